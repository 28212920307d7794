"""Composed weights put where a model's modules look for them."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Iterable, Mapping
from functools import cache, partial
from itertools import islice
from typing import final

import torch
from torch import Tensor, nn

from aniso.compose.division import Undivided
from aniso.compose.factored import FactoredLayer, Factorisation
from aniso.compose.layer_weight import LayerWeight
from aniso.compose.lease import Lease
from aniso.compose.linear import KeptLayer
from aniso.compose.passing import PassingLayer
from aniso.compose.sharded import Sharding
from aniso.compose.slab import Slab, Window, slabs_of
from aniso.compose.slots import Slots
from aniso.compose.store import Store
from aniso.errors import InputError, NumericalError
from aniso.vectors import Layout

Places = Mapping[str, list[tuple[nn.Module, str]]]
"""The modules and attributes that hold each tensor of the model; tied tensors have several."""


@final
class Engine:
    """Slabs over a model, and what is in place now. Made anew when the model moves or changes its format."""

    def __init__(
        self,
        places: Places,
        layout: Layout,
        slots: Slots,
        store: Store,
        *,
        differences: bool,
        passing: frozenset[str] = frozenset(),
        answers_pass: bool = False,
        sharding: Sharding | None = None,
    ) -> None:
        """``differences`` leaves the base out: the sum of coefficient * delta alone is composed.

        Blocks in ``passing`` are composed when their layer runs, and not kept; without a graph only if
        ``answers_pass``, since the same coefficients then serve many batches.
        """
        self._places = places
        self._slots = slots
        self.base = {key: getattr(*found[0]) for key, found in places.items()}
        self.installed: dict[str, Tensor] = {}
        self.slabs: list[Slab] = []
        self._factored: dict[int, list[Factorisation]] = {}
        for shape, windows, blocks in slabs_of(layout, slots):
            own = [None if differences else self.base[w.key] for w in windows]
            slab = Slab(shape, windows, blocks, own, store, sharding)
            self.slabs.append(slab)
            if not differences:
                self._factored[id(slab)] = _factorisations(slab, store)
        self._passing = passing
        self._answers_pass = answers_pass
        self._differences = differences
        self._sharding = sharding
        self._in_place: tuple[Tensor, bool, Tensor, int] | None = None

    def install(self, values: nn.Parameter) -> None:
        """Compose for these values, unless that has been done."""
        wants_graph = torch.is_grad_enabled() and values.requires_grad
        if self._holds(values, wants_graph):
            return
        _require_finite(values, self._slots)
        # let go of the last graph, so that its buffers may be written over; and if this is interrupted,
        # what was in place is gone
        self.uninstall()
        # buffers outlive the call: made in inference mode, they would be of no use outside of it
        with torch.inference_mode(False), torch.set_grad_enabled(wants_graph):
            copied = values.detach().clone()
            fixed = self._slots.divided(copied)
            coefficients = self._slots.divided(self._root(values)) if wants_graph else fixed
            for slab in self.slabs:
                tensors = self._tensors(slab, coefficients, fixed, wants_graph)
                for window, tensor in zip(slab.windows, tensors, strict=True):
                    self.installed[window.key] = tensor
            self._in_place = (values, wants_graph, copied, values._version)
        if not self._differences:
            self.put(self.installed)

    def _holds(self, values: nn.Parameter, wants_graph: bool) -> bool:
        """Whether what is in place will do."""
        if self._in_place is None:
            return False
        known, has_graph, copied, version = self._in_place
        if known is not values or not torch.equal(copied, values.detach()):
            return False
        if has_graph and version != values._version:
            return False  # autograd does not go back through views of what was written to since
        # a graph does no harm where none is made, and layers that are checkpointed may need it yet
        return has_graph == wants_graph or (has_graph and not torch.is_grad_enabled())

    def tensors_moved_by(self, values: Tensor) -> dict[str, Tensor]:
        """The composed tensors of those slabs alone that these values change; copies."""
        out: dict[str, Tensor] = {}
        coefficients = self._slots.divided(values)
        for slab in self.slabs:
            if any(bool(coefficients[i].any()) for i, _, _ in slab.blocks):
                tensors = slab.composed(coefficients, self.base[slab.windows[0].key])
                out |= {w.key: t.clone() for w, t in zip(slab.windows, tensors, strict=True)}
        self._in_place = None
        return out

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        for key, tensor in tensors.items():
            for module, attribute in self._places[key]:
                # found before the parameter of that name, which stays what it is
                module.__dict__[attribute] = tensor
                _refresh(module)

    def unput(self, keys: Iterable[str]) -> None:
        """Let the model have its own tensors again."""
        for key in keys:
            for module, attribute in self._places[key]:
                module.__dict__.pop(attribute, None)
                _refresh(module)

    def uninstall(self) -> None:
        self.unput(self.installed)
        self._in_place = None
        self.installed.clear()

    def _root(self, values: Tensor) -> Tensor:
        """The values, with a mark that says when a backward pass came through: a graph is used once."""
        root = values.view_as(values)
        me = weakref.ref(self)

        sharding = self._sharding

        def used(gradient: Tensor) -> Tensor:
            engine = me()
            if engine is not None:
                engine._in_place = None
            return sharding.summed(gradient) if sharding else gradient

        root.register_hook(used)  # type: ignore[no-untyped-call]
        return root

    def _tensors(
        self, slab: Slab, coefficients: list[Tensor], fixed: list[Tensor], wants_graph: bool
    ) -> list[Tensor]:
        """``fixed`` are the coefficients' values, which stay what they are."""
        like = self.base[slab.windows[0].key]
        connected = [partial(_connected, slab, coefficients, like, i) for i in range(len(slab.windows))]
        passes = wants_graph or self._answers_pass
        passing = self._passing_layer(slab, coefficients, fixed) if passes else None
        made = self._factored.get(id(slab), [])
        if made and wants_graph:
            return [
                LayerWeight.made(
                    self.base[window.key],
                    FactoredLayer(
                        self.base[window.key],
                        factorisation,
                        coefficients[slab.blocks[0][0]],
                        passing or KeptLayer(connected[i]),
                        None if passing else cache(partial(_composed, slab, coefficients, like, i)),
                    ),
                    connected[i],
                )
                for i, (window, factorisation) in enumerate(zip(slab.windows, made, strict=True))
            ]
        if passing:
            # at zero, the model's own tensors: torch has ways through attention that are for these alone
            is_base = not wants_graph and not any(bool(v.any()) for v in passing.values)
            return [like if is_base else LayerWeight.made(like, passing, connected[0])]
        if not wants_graph:
            return slab.composed(coefficients, like)
        return [
            self._for_layer(window, tensor)
            for window, tensor in zip(slab.windows, slab.connected(coefficients, like), strict=True)
        ]

    def _for_layer(self, window: Window, tensor: Tensor) -> Tensor:
        if self._differences or tensor.device.type != "cpu" or tensor.ndim != 2:
            return tensor
        if not _is_layers(self._places[window.key]):
            return tensor
        layer = KeptLayer(lambda: tensor)
        return LayerWeight.made(tensor, layer, layer.weight)

    def _passing_layer(
        self, slab: Slab, coefficients: list[Tensor], fixed: list[Tensor]
    ) -> PassingLayer | None:
        if slab.blocks[0][1].block.name not in self._passing:
            return None
        slab.let_go()
        own = [i for i, _, _ in slab.blocks]
        base = self.base[slab.windows[0].key]
        return PassingLayer(
            slab,
            base,
            [coefficients[i] for i in own],
            [fixed[i] for i in own],
            partial(_connected, slab, coefficients, base, 0),
        )


def passing_blocks(layout: Layout, slots: Slots, places: Places) -> dict[str, int]:
    """Blocks that can be composed when their layer runs: those of matrices that are one layer's alone.

    With the number of elements of the matrix.
    """
    return {
        slot.block.name: math.prod(shape)
        for shape, windows, blocks in slabs_of(layout, slots)
        if len(windows) == 1 and len(shape) == 2 and not windows[0].transposed
        if len(places[windows[0].key]) == 1 and _is_layers(places[windows[0].key])
        for _, slot, _ in blocks
    }


def _is_layers(places: list[tuple[nn.Module, str]]) -> bool:
    """Whether linear layers use a tensor, as far as modules tell."""
    own = {nn.Linear: "weight", nn.MultiheadAttention: "in_proj_weight"}
    return any(isinstance(m, kind) and name == own[kind] for m, name in places for kind in own)


def _require_finite(values: Tensor, slots: Slots) -> None:
    bad = (~torch.isfinite(values.detach())).nonzero().reshape(-1).tolist()
    if bad:
        vector, block, part = next(islice(slots.labels(), bad[0], None))
        raise NumericalError(
            "COEF-VALUES",
            f"{len(bad)} coefficients are NaN or infinite",
            key=block,
            first=f"vector '{vector}', part {part}",
            fix="go back to the last good coefficients and use a smaller learning rate",
        )


def _composed(slab: Slab, coefficients: list[Tensor], like: Tensor, i: int) -> tuple[Tensor, Lease]:
    return slab.composed(coefficients, like)[i], slab.lease()


def _connected(slab: Slab, coefficients: list[Tensor], like: Tensor, i: int) -> Tensor:
    return slab.connected(coefficients, like)[i]


def _factorisations(slab: Slab, store: Store) -> list[Factorisation]:
    """For a slab of one block that only low-rank vectors change: one for each tensor over it."""
    if len(slab.blocks) != 1 or len(slab.shape) != 2:
        return []
    _, slot, _ = slab.blocks[0]
    stack = store.factored(slot)
    if stack is None or not isinstance(slot.division, Undivided):
        return []
    # rows of the stack's vectors are the slot's in order, since there is no other stack
    return [
        Factorisation(
            stack.factors,
            (slab.shape[1], slab.shape[0]) if w.transposed else (w.stop - w.start, slab.shape[1]),
            slice(w.start, w.stop),
            transposed=w.transposed,
        )
        for w in slab.windows
    ]


def skeleton_of(model: nn.Module) -> nn.Module:
    """A copy of the modules that shares the weights' memory, and whose weights take no gradient."""
    shared = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    try:
        return copy.deepcopy(model, shared)
    except Exception as e:
        raise InputError(
            "MODEL-COPY",
            f"the model {type(model).__name__} cannot be copied",
            reason=e,
            fix="remove hooks and caches that hold results of a forward pass, or load the model afresh",
        ) from e


def places_of(model: nn.Module, tied: Mapping[str, str]) -> Places:
    """Where every tensor is."""
    out: dict[str, list[tuple[nn.Module, str]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        same = (module, *vars(module).get("same_as", ()))  # an encoder shares its network's dictionaries
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                key = f"{prefix}.{attribute}" if prefix else attribute
                out.setdefault(tied.get(key, key), []).extend((one, attribute) for one in same)
    return out


def require_no_lists(model: nn.Module) -> None:
    """Weights in plain lists or dictionaries are out of reach: composed ones could not be put in place."""
    for prefix, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            continue  # these keep such a list, which is refreshed
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_buffers", "_modules"):
                continue
            inside = value.values() if isinstance(value, dict) else value
            if isinstance(value, list | tuple | dict) and any(isinstance(v, nn.Parameter) for v in inside):
                raise InputError(
                    "MODEL-COPY",
                    f"the model {type(model).__name__} keeps weights in a plain container",
                    key=f"{prefix}.{attribute}".lstrip("."),
                    fix="use nn.ParameterList or nn.ParameterDict, or plain attributes",
                )


def _refresh(module: nn.Module) -> None:
    """Recurrent layers keep a list of their weights beside the attributes."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]
