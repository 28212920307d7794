"""LoRA adapters as deltas over a base's blocks, factored wherever the update is a product."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from aniso.errors import InputError
from aniso.vectors._matching.adapter_names import keys_error, place_finder
from aniso.vectors.block import Block, Place
from aniso.vectors.block_source import BlockSource
from aniso.vectors.delta import Delta, Dense, LowRank, Term
from aniso.vectors.naming import PLAIN
from aniso.weights import LoraUpdate, PeftAdapter


class _Contribution(Protocol):
    """The change that an adapter makes to some rows of a block."""

    @property
    def place(self) -> Place: ...

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the adapter's tensors that it is computed from."""

    def rows(self, base: BlockSource, adapter: PeftAdapter) -> Tensor: ...


@dataclass(frozen=True)
class _Product:
    """A low-rank update."""

    place: Place
    update: LoraUpdate
    flipped: bool

    @property
    def tensors(self) -> tuple[str, ...]:
        more = self.update.magnitude
        return (self.update.a, self.update.b, *(() if more is None else (more,)))

    def term(self, adapter: PeftAdapter) -> Term:
        # as matrices; a convolution's kernel positions count as inputs
        b, a = (_read(adapter, name).flatten(1) for name in (self.update.b, self.update.a))
        if self.flipped:
            b, a = a.T.contiguous(), b.T.contiguous()
        return Term(b, a, self.update.scale, self.place.part.start)

    def rows(self, base: BlockSource, adapter: PeftAdapter) -> Tensor:
        term = self.term(adapter)
        product = (term.b.float() @ term.a.float()) * term.scale
        return product if self.update.magnitude is None else self._dora(base, adapter, product)

    def _dora(self, base: BlockSource, adapter: PeftAdapter, product: Tensor) -> Tensor:
        """Return DoRA's delta, which gives the weights of every output a learned norm."""
        assert self.update.magnitude is not None
        old = _base_rows(base, self.place)
        length = _read(adapter, self.update.magnitude).float().reshape(-1)
        along = 0 if self.flipped else 1
        new = old + product
        norm = torch.linalg.norm(new, dim=along)
        if bool((norm == 0).any()):
            raise InputError(
                "LORA-KIND",
                f"'{adapter.label}' uses DoRA on an output whose weights are all zero",
                key=self.update.module,
                found=f"output {int((norm == 0).nonzero()[0])}",
                fix="leave the module out with --skip-key",
            )
        delta: Tensor = (length / norm).unsqueeze(along) * new - old
        return delta


@dataclass(frozen=True)
class _Replacement:
    """A tensor that replaces the base's: the difference of the two."""

    place: Place
    key: str

    @property
    def tensors(self) -> tuple[str, ...]:
        return (self.key,)

    def rows(self, base: BlockSource, adapter: PeftAdapter) -> Tensor:
        part = self.place.part
        new = _read(adapter, self.key).float()
        new = (new.T if part.transposed else new).reshape(-1, self.place.block.matrix_shape[1])
        return new[part.offset : part.offset + part.stop - part.start] - _base_rows(base, self.place)


@dataclass(frozen=True)
class _Bias:
    """The bias of an update's second factor."""

    place: Place
    update: LoraUpdate

    @property
    def tensors(self) -> tuple[str, ...]:
        assert self.update.bias is not None
        return (self.update.bias,)

    def rows(self, base: BlockSource, adapter: PeftAdapter) -> Tensor:
        assert self.update.bias is not None
        return _read(adapter, self.update.bias).float().reshape(-1, 1) * self.update.scale


Cells = Mapping[str, Callable[[], Delta]]


def adapter_cells(base: BlockSource, adapter: PeftAdapter) -> tuple[Cells, list[str]]:
    """Return a delta for each block that the adapter changes, and notes; raises if a tensor has no place."""
    touched, notes = _contributions(base, adapter)
    blocks = base.layout.by_name
    return {n: partial(_cell, base, adapter, blocks[n], parts) for n, parts in touched.items()}, notes


def block_tensors(base: BlockSource, adapter: PeftAdapter) -> dict[str, tuple[str, ...]]:
    """Return the tensors of the adapter that the delta of each block is computed from."""
    touched, _ = _contributions(base, adapter)
    return {name: tuple(key for part in parts for key in part.tensors) for name, parts in touched.items()}


def _contributions(
    base: BlockSource, adapter: PeftAdapter
) -> tuple[dict[str, list[_Contribution]], list[str]]:
    keys = {f"{u.module}.weight": u.a for u in adapter.updates} | dict(adapter.replacements)
    find, notes = place_finder(base, list(keys), adapter)
    touched: dict[str, list[_Contribution]] = {}
    homeless: list[str] = []

    def add(key: str, name: str, make: Callable[[Place], _Contribution]) -> None:
        places = find(key)
        if not places:
            homeless.append(name)
        for place in places:
            touched.setdefault(place.block.name, []).append(make(place))

    for update in adapter.updates:
        add(f"{update.module}.weight", update.a, partial(_product, adapter, update))
        if update.bias is not None:
            add(f"{update.module}.bias", update.bias, partial(_bias, adapter, update))
    for key, name in adapter.replacements.items():
        rows = sum(place.part.stop - place.part.start for place in find(key))
        add(key, name, partial(_replacement, adapter, name, rows))
    if homeless:
        part = "" if base.layout.scheme == PLAIN else "the image encoder of "
        raise keys_error(
            adapter,
            f"'{adapter.label}' has tensors without a place in {part}'{base.label}'",
            homeless,
            "use the base that the adapter was trained on, or --skip-key to leave keys out",
        )
    for parts in touched.values():
        _refuse_overlap(adapter, parts)
    return dict(sorted(touched.items())), notes


def _refuse_overlap(adapter: PeftAdapter, parts: list[_Contribution]) -> None:
    """Raise if two updates change the same rows, which means that two names were taken for one."""
    products = [p for p in parts if isinstance(p, _Product)]
    end = 0
    for product in sorted(products, key=lambda p: p.place.part.start):
        if product.place.part.start < end:
            names = [p.update.module for p in products]
            raise keys_error(
                adapter,
                f"'{adapter.label}' has two updates for one place",
                names,
                "leave one out with --skip-key",
            )
        end = product.place.part.stop


def _cell(base: BlockSource, adapter: PeftAdapter, block: Block, parts: list[_Contribution]) -> Delta:
    products = [p for p in parts if isinstance(p, _Product) and p.update.magnitude is None]
    rest = [p for p in parts if p not in products]
    # PEFT also saves an adapted output layer completely, though only the update has changed
    if products and all(isinstance(p, _Replacement) and not p.rows(base, adapter).any() for p in rest):
        return LowRank(block.shape, tuple(p.term(adapter) for p in products))
    out = torch.zeros(block.matrix_shape)
    for contribution in parts:
        part = contribution.place.part
        out[part.start : part.stop] += contribution.rows(base, adapter)
    return Dense(out.reshape(block.shape))


def _base_rows(base: BlockSource, place: Place) -> Tensor:
    matrix = base.read_as_base(place.block).reshape(place.block.matrix_shape)
    return matrix[place.part.start : place.part.stop]


def _read(adapter: PeftAdapter, name: str) -> Tensor:
    tensor = adapter.read(name)
    bad = (~torch.isfinite(tensor.reshape(-1))).nonzero()
    if bad.numel():
        raise InputError(
            "WEIGHT-NONFINITE",
            f"'{adapter.label}' has {bad.numel()} values that are NaN or infinite",
            key=name,
            first=f"element {int(bad[0])}",
            fix="find out why training diverged",
        )
    return tensor


def _product(adapter: PeftAdapter, update: LoraUpdate, place: Place) -> _Product:
    shape_a, shape_b = adapter.tensors[update.a].shape, adapter.tensors[update.b].shape
    found = (shape_b[0], math.prod(shape_a[1:]))
    wanted = (place.part.stop - place.part.start, place.block.matrix_shape[1])
    # a square matrix fits in both orientations: the configuration and the naming decide
    by_name = (adapter.settings.fan_in_fan_out or update.embedding) != place.part.transposed
    flipped = by_name if found == wanted == found[::-1] else found[::-1] == wanted
    convolution = len(shape_a) > 2
    pointwise = all(n == 1 for n in shape_b[2:])
    if (found != wanted and not flipped) or (convolution and (flipped or not pointwise)):
        expected = f"{wanted[0]} x {wanted[1]} for block {place.block.name}"
        raise _misfit(adapter, update.module, expected, f"B {shape_b}, A {shape_a}")
    if update.magnitude is None:
        return _Product(place, update, flipped)
    if convolution or update.embedding:
        raise InputError(
            "LORA-KIND",
            f"'{adapter.label}' uses DoRA on a layer that is not linear",
            key=update.module,
            expected="DoRA on linear layers",
            fix="merge it with PEFT and use the merged checkpoint",
        )
    if adapter.tensors[update.magnitude].numel != found[0]:
        raise _misfit(adapter, update.magnitude, found[0], adapter.tensors[update.magnitude].shape)
    return _Product(place, update, flipped)


def _bias(adapter: PeftAdapter, update: LoraUpdate, place: Place) -> _Bias:
    assert update.bias is not None
    found, rows = adapter.tensors[update.bias].numel, place.part.stop - place.part.start
    if found != rows or place.block.matrix_shape[1] != 1:
        raise _misfit(adapter, update.bias, place.block.shape, adapter.tensors[update.bias].shape)
    return _Bias(place, update)


def _replacement(adapter: PeftAdapter, name: str, rows: int, place: Place) -> _Replacement:
    """Check a replacing tensor; ``rows`` is its required number of rows over all its blocks."""
    shape = adapter.tensors[name].shape
    turned = shape[::-1] if place.part.transposed else shape
    wanted = (rows, *place.block.shape[1:]) if place.block.shape else ()
    if turned != wanted:
        raise _misfit(adapter, name, wanted, turned)
    return _Replacement(place, name)


def _misfit(adapter: PeftAdapter, key: str, expected: object, found: object) -> InputError:
    return InputError(
        "CKPT-SHAPE",
        f"'{adapter.label}' does not fit the base",
        key=key,
        expected=str(expected),
        found=str(found),
        fix="use the base that the adapter was trained on",
    )
