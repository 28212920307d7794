"""LoRA adapters as deltas over a base's blocks, kept factored wherever the update is a product."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from aniso.errors import InputError, printable
from aniso.vectors.block import Block, Layout, Part, Place
from aniso.vectors.block_source import BlockSource
from aniso.vectors.delta import Delta, Dense, LowRank, Term, difference
from aniso.vectors.naming import VISION, expanded
from aniso.weights import LoraUpdate, PeftAdapter


class _Contribution(Protocol):
    """Something an adapter does to some rows of a block."""

    @property
    def place(self) -> Place: ...

    def rows(self, base: BlockSource, adapter: PeftAdapter) -> Tensor: ...


@dataclass(frozen=True)
class _Product:
    """A low-rank update."""

    place: Place
    update: LoraUpdate
    flipped: bool

    def term(self, adapter: PeftAdapter) -> Term:
        b, a = _factors(adapter, self.update)
        if self.flipped:
            b, a = a.T.contiguous(), b.T.contiguous()
        part = self.place.part
        if part.offset or part.stop - part.start != b.shape[0]:  # a fused update over split blocks
            b = b[part.offset : part.offset + part.stop - part.start]
        return Term(b, a, self.update.scale, part.start)

    def rows(self, base: BlockSource, adapter: PeftAdapter) -> Tensor:
        term = self.term(adapter)
        product = (term.b.float() @ term.a.float()) * term.scale
        return product if self.update.magnitude is None else self._dora(base, adapter, product)

    def _dora(self, base: BlockSource, adapter: PeftAdapter, product: Tensor) -> Tensor:
        """DoRA gives every output's row a length of its own."""
        part = self.place.part
        old = base.read_as_base(self.place.block).reshape(self.place.block.matrix_shape)
        old = old[part.start : part.stop]
        assert self.update.magnitude is not None
        length = adapter.read(self.update.magnitude).float().reshape(-1)
        along = 0 if self.flipped else 1
        new = old + product
        factor = (length / torch.linalg.norm(new, dim=along)).unsqueeze(along)
        delta: Tensor = factor * new - old
        return delta


@dataclass(frozen=True)
class _Replacement:
    """A tensor saved whole: the difference to the base's."""

    place: Place
    key: str

    def rows(self, base: BlockSource, adapter: PeftAdapter) -> Tensor:
        part, block = self.place.part, self.place.block
        new = adapter.read(self.key).float()
        new = (new.T if part.transposed else new).contiguous()
        old = base.read_as_base(block)[part.start : part.stop]
        return difference(old, new[part.offset : part.offset + len(old)].clone()).values.reshape(len(old), -1)


@dataclass(frozen=True)
class _Bias:
    """The bias of an update's second factor."""

    update: LoraUpdate
    place: Place

    def rows(self, base: BlockSource, adapter: PeftAdapter) -> Tensor:
        assert self.update.bias is not None
        part = self.place.part
        bias = adapter.read(self.update.bias).float() * self.update.scale
        return bias.reshape(-1, 1)[part.offset : part.offset + part.stop - part.start]


def adapter_cells(base: BlockSource, adapter: PeftAdapter) -> Mapping[str, Callable[[], Delta]]:
    """A delta for each block the adapter touches; every tensor of the adapter must have its place."""
    find = _Finder(base.layout)
    touched: dict[str, list[_Contribution]] = {}
    homeless: list[str] = []

    def add(key: str, make: Callable[[Place], _Contribution], name: str) -> None:
        places = find(key)
        if not places:
            homeless.append(name)
        for place in places:
            touched.setdefault(place.block.name, []).append(make(place))

    for update in adapter.updates:
        add(f"{update.module}.weight", partial(_product, adapter, update), update.a)
        if update.bias is not None:
            add(f"{update.module}.bias", partial(_Bias, update), update.bias)
    for key, name in adapter.replacements.items():
        add(key, partial(_replacement, adapter, name), name)
    if homeless:
        raise InputError(
            "LORA-KEYS",
            f"'{adapter.label}' has tensors without a place in base '{base.label}'",
            found=[printable(name) for name in homeless[:8]],
            more=f"{len(homeless) - 8} more" if len(homeless) > 8 else "",
            trained_on=printable(adapter.settings.base_model or "unknown"),
            fix="use the base that the adapter was trained on, or --skip-key to leave keys out",
        )
    blocks = base.layout.by_name
    return {
        name: partial(_cell, base, adapter, blocks[name], parts) for name, parts in sorted(touched.items())
    }


def _cell(base: BlockSource, adapter: PeftAdapter, block: Block, parts: list[_Contribution]) -> Delta:
    products = [p for p in parts if isinstance(p, _Product) and p.update.magnitude is None]
    if len(products) == len(parts):
        return LowRank(block.shape, tuple(p.term(adapter) for p in products))
    out = torch.zeros(block.matrix_shape)
    for contribution in parts:
        part = contribution.place.part
        out[part.start : part.stop] += contribution.rows(base, adapter)
    return Dense(out.reshape(block.shape))


def _factors(adapter: PeftAdapter, update: LoraUpdate) -> tuple[Tensor, Tensor]:
    """B and A as matrices; a convolution's kernel positions count as inputs."""
    a, b = adapter.read(update.a), adapter.read(update.b)
    return b.reshape(b.shape[0], -1), a.reshape(a.shape[0], -1)


def _product(adapter: PeftAdapter, update: LoraUpdate, place: Place) -> _Product:
    shape_a, shape_b = adapter.tensors[update.a].shape, adapter.tensors[update.b].shape
    rows, columns = shape_b[0], adapter.tensors[update.a].numel // shape_a[0]
    if place.part.offset or place.block.parts == ():
        rows = place.part.stop - place.part.start
    wanted = (place.part.stop - place.part.start, place.block.matrix_shape[1])
    straight, turned = (rows, columns) == wanted, (columns, rows) == wanted
    # a square matrix fits both ways: then the configuration and the naming decide
    by_name = (adapter.settings.fan_in_fan_out or update.embedding) != place.part.transposed
    flipped = by_name if straight and turned else turned
    convolution = len(shape_a) > 2
    if not (straight or turned) or (convolution and (flipped or any(n != 1 for n in shape_b[2:]))):
        raise InputError(
            "CKPT-SHAPE",
            f"'{adapter.label}' does not fit the base",
            key=update.module,
            expected=f"{wanted[0]} x {wanted[1]} for block {place.block.name}",
            found=f"B {shape_b}, A {shape_a}",
            fix="use the base that the adapter was trained on",
        )
    if update.magnitude is not None and (convolution or update.embedding):
        raise InputError(
            "LORA-KIND",
            f"'{adapter.label}' uses DoRA on a layer that is not linear",
            key=update.module,
            expected="DoRA on linear layers",
            fix="merge it with PEFT and use the merged checkpoint",
        )
    return _Product(place, update, flipped)


def _replacement(adapter: PeftAdapter, name: str, place: Place) -> _Replacement:
    shape = adapter.tensors[name].shape
    part = place.part
    turned = shape[::-1] if part.transposed else shape
    wanted = place.block.shape
    if turned[1:] != wanted[1:] or (turned and turned[0] < part.offset + part.stop - part.start):
        raise InputError(
            "CKPT-SHAPE",
            f"'{adapter.label}' does not fit the base",
            key=name,
            expected=wanted,
            found=turned,
            fix="use the base that the adapter was trained on",
        )
    return _Replacement(place, name)


class _Finder:
    """The places of a key that may be named in another library's way than the base's."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._known: dict[str, tuple[Place, ...]] = dict(layout.places)
        depth = 1 + max((b.depth for b in layout.blocks if b.depth is not None), default=-1)
        for rule in expanded(VISION, depth):
            places = self._block_places(rule.open_clip)
            if not places:
                continue
            self._known.setdefault(rule.open_clip, places)
            total = sum(p.block.shape[0] if p.block.shape else 1 for p in places)
            share = total // len(rule.hugging_face)
            for i, name in enumerate(rule.hugging_face):
                self._known.setdefault(name, _share(places, i * share, share, rule.transposed))

    def __call__(self, key: str) -> tuple[Place, ...]:
        for candidate in (key, f"vision_model.{key}", f"visual.{key}", *_tails(key)):
            if candidate in self._known:
                return self._known[candidate]
        # the same model under a wrapper: one name is the end of the other, and only one is
        close = [k for k in self.layout.places if k.endswith(f".{key}") or key.endswith(f".{k}")]
        return self.layout.places[close[0]] if len(close) == 1 else ()

    def _block_places(self, name: str) -> tuple[Place, ...]:
        """A block by its open_clip name, or its thirds where they are blocks of their own."""
        blocks = self.layout.by_name
        found = [blocks[n] for n in (name, *(f"{name}.{x}" for x in "qkv")) if n in blocks]
        places, row = [], 0
        for block in found:
            rows = block.shape[0] if block.shape else 1
            places.append(Place(block, Part("", 0, rows, offset=row)))
            row += rows
        return tuple(places)


def _share(places: tuple[Place, ...], start: int, rows: int, transposed: bool) -> tuple[Place, ...]:
    """The rows ``start : start + rows`` of what ``places`` cover together."""
    if len(places) > 1:  # split blocks: each is one share
        place = next(p for p in places if p.part.offset == start)
        return (Place(place.block, Part("", 0, rows, transposed=transposed)),)
    return (Place(places[0].block, Part("", start, start + rows, transposed=transposed)),)


def _tails(key: str) -> list[str]:
    """The key from the name of the image encoder on, wherever that stands."""
    return [key[key.index(mark) :] for mark in ("vision_model.", "visual.") if mark in key]
