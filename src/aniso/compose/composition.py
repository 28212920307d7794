"""A model whose weights are base + sum of coefficient * delta; the coefficients are its only parameter."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from aniso.compose.bake import Baked
from aniso.compose.coefficients import Coefficients, Origin
from aniso.compose.engine import Engine, Places, passing_blocks, places_of, require_no_lists, skeleton_of
from aniso.compose.partition import Partition
from aniso.compose.plan import Plan
from aniso.compose.runtime import Runtime, keep_freed_memory
from aniso.compose.sharded import Sharding
from aniso.compose.slots import Slots
from aniso.compose.store import Store
from aniso.compose.tangent import Linearised, linearised, run_tangent
from aniso.errors import InputError, UsageError
from aniso.vectors import Bank
from aniso.vectors.block import tied_names
from aniso.weights import HasWeights, TensorMap, WeightSource
from aniso.weights.directory import transformers_config
from aniso.weights.files import Progress


@final
class Composition(nn.Module):
    """Runs a model at theta0 + sum_i Lambda_i tau_i. Starts at zero, which is the base bit for bit.

    The model that is given is not changed: the composition works on a copy of its modules that shares its
    weights. ``composition.values`` is the only parameter; batch norms stay in evaluation mode.
    """

    values: nn.Parameter

    def __init__(
        self,
        model: nn.Module,
        bank: Bank,
        partition: Partition | None = None,
        *,
        runtime: Runtime | None = None,
        any_base: bool = False,
        mesh: DeviceMesh | None = None,
        progress: Progress | None = None,
    ) -> None:
        """``any_base`` composes over a model that is not the one the bank was made over.

        On a ``mesh`` of processes each holds its share of the bank, and gradients are means over all.
        """
        super().__init__()
        self.bank = bank
        self.partition = partition or Partition.blocks()
        self.runtime = runtime or Runtime()
        self.slots = Slots.of(bank, self.partition)
        self._any_base = any_base
        self._mesh = mesh
        self.linearised = isinstance(model, Linearised)
        inner = model.module if isinstance(model, Linearised) else model
        source = source_of(inner)
        self.layout = bank.over(source, any_base=any_base).layout
        self._tied = tied_names(source)
        require_no_lists(inner)
        self._hold(skeleton_of(inner))
        missing = [p.key for b in self.layout.blocks for p in b.parts if p.key not in self._places]
        if missing:
            raise InputError(
                "MODEL-COPY",
                f"the model {source.label} saves tensors under names that none of its modules has",
                key=missing[0],
                fix="remove hooks that rename tensors in its state dict",
            )
        self._watched = [(p, p._version) for p in inner.parameters()]
        first = next(iter(model.parameters()), torch.zeros(0))
        dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        self.values = nn.Parameter(torch.zeros(self.slots.count, dtype=dtype, device=first.device))
        self._engine: Engine | None = None
        self._store: Store | None = None
        self._progress = progress
        self.plan  # noqa: B018 (what does not fit is said now, not at the first batch)
        self.train(model.training)

    _model: nn.Module
    _places: Places

    def _hold(self, model: nn.Module) -> None:
        """Keep the model without making it a child: its weights are no parameters of the composition."""
        object.__setattr__(self, "_model", model)
        object.__setattr__(self, "_places", places_of(model, self._tied))

    @classmethod
    def of(
        cls,
        model: nn.Module,
        bank: Bank,
        coefficients: Coefficients,
        *,
        runtime: Runtime | None = None,
        any_base: bool = False,
        any_bank: bool = False,
        mesh: DeviceMesh | None = None,
    ) -> Composition:
        """The composition that coefficients were learned for; other vectors of the bank are left out."""
        chosen = coefficients.chosen(bank)
        fitting = coefficients.for_bank(chosen, any_bank=any_bank)
        made = cls(model, chosen, coefficients.partition, runtime=runtime, any_base=any_base, mesh=mesh)
        return made.load(fitting)

    @property
    def model(self) -> nn.Module:
        """The copy of the model that runs here. Ask it what it is; run it through the composition."""
        return self._model

    # coefficients

    @property
    def coefficients(self) -> Coefficients:
        """A labelled copy of the values as they are now."""
        values = self.values.detach().cpu().clone()
        return Coefficients(self.slots, values, Origin.of(self.bank), self.linearised)

    def load(self, coefficients: Coefficients, *, any_bank: bool = False) -> Self:
        """Take over coefficients, which must fit the bank and the partition."""
        if coefficients.partition != self.partition:
            raise InputError(
                "COEF-PARTITION",
                f"these coefficients have another partition{_seed(coefficients.partition, self.partition)}",
                expected=str(self.partition),
                found=str(coefficients.partition),
                fix="Composition.of(model, bank, coefficients) takes theirs",
            )
        if not self.linearised:
            coefficients.require_standard()
        fitting = coefficients.for_bank(self.bank, any_bank=any_bank)
        with torch.no_grad():
            self.values.copy_(fitting.values)
        return self

    # running

    @property
    def plan(self) -> Plan:
        """Where the task vectors will be, and what memory that takes."""
        itemsize = next((t.element_size() for t in self._model.parameters()), 4)
        world = self._mesh.size() if self._mesh is not None else 1
        return Plan.of(
            self.bank, self.slots, self.runtime, self.values.device, itemsize, world, self._can_pass()
        )

    def _can_pass(self) -> dict[str, int]:
        """Blocks that need not be kept composed, and how large their tensors are."""
        if self.linearised or self._mesh is not None:
            return {}
        return passing_blocks(self.layout, self.slots, self._places)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        engine = self._running()
        if self.linearised:
            return run_tangent(engine, self._model, engine.installed, args, kwargs, linearised)
        return self._model(*args, **kwargs)

    def prepare(self) -> Self:
        """Read vectors and compose now, not at the first batch."""
        self._running()
        return self

    @contextlib.contextmanager
    def composed(self) -> Iterator[nn.Module]:
        """The model with composed weights, for calls other than ``forward``: ``model.encode_image(x)``."""
        if self.linearised:
            raise _no_weights()
        self._running()
        # coefficients may change inside; other calls than forward see that when the context is entered anew
        handle = self._model.register_forward_pre_hook(lambda *_: self._refreshed())
        # what was put in place stays until the next call: checkpointed layers run again in the backward pass
        try:
            yield self._model
        finally:
            handle.remove()

    def weights(self) -> dict[str, Tensor]:
        """Copies of the composed tensors by the model's names; what no coefficient moves is left out."""
        with torch.no_grad(), self.composed():
            return {key: t.clone() for key, t in self._running().installed.items()}

    def _refreshed(self) -> None:
        self._running()

    @torch.compiler.disable  # type: ignore[misc,untyped-decorator,unused-ignore]
    def _running(self) -> Engine:
        """The engine, with the weights for the present values in place."""
        if self._engine is None:
            if self.runtime.keep_freed and self.values.device.type == "cpu":
                keep_freed_memory()
            sharding = Sharding(self._mesh) if self._mesh is not None else None
            with torch.inference_mode(False):  # they outlive the call
                store = self._vectors(sharding)
            self._engine = Engine(
                self._places,
                self.layout,
                self.slots,
                store,
                differences=self.linearised,
                passing=store.plan.passing,
                answers_pass=store.plan.answers_pass,
                sharding=sharding,
            )
        self._engine.install(self.values)
        self._require_unchanged()
        return self._engine

    def _vectors(self, sharding: Sharding | None) -> Store:
        if self._store is None:
            self._store = Store(
                self.bank,
                self.slots,
                self.plan,
                self.values.device,
                fast=self.runtime.fast,
                sharding=sharding,
                progress=self._progress,
            )
        return self._store

    def _require_unchanged(self) -> None:
        """The base's memory is shared with the model that was given: who writes there changes the base."""
        if any(p._version != version for p, version in self._watched):
            raise UsageError(
                "BANK-BASE",
                "the model that this composition was made over has been written to since",
                fix="load composed weights into another model, or make the composition anew",
            )

    def bake(self) -> Baked:
        """Ordinary weights under the model's names, composed when they are read or saved."""
        if self.linearised:
            raise _no_weights()
        return Baked(source_of(self._model), self.bank, self.coefficients, any_base=True)

    # being a module

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self._model.train(mode)
        for module in self._model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.eval()  # the base's statistics are part of the base
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # coefficients are learned in 32 bits or more, whatever the model's format
        super()._apply(lambda t: _wide(fn(t), t), recurse)  # type: ignore[no-untyped-call]
        self._forget()
        self._model._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _forget(self) -> None:
        """Drop everything that can be made again."""
        if self._engine is not None:
            self._engine.uninstall()
            self._engine = None
        self._store = None

    def _bare(self) -> nn.Module:
        """A copy of the model as it is without composed weights."""
        if self._engine is None:
            return skeleton_of(self._model)
        installed = self._engine.installed
        self._engine.unput(installed)
        try:
            return skeleton_of(self._model)
        finally:
            if not self.linearised:
                self._engine.put(installed)  # a backward pass through checkpointed layers may need them yet

    def __deepcopy__(self, memo: dict[int, Any]) -> Composition:
        """Coefficients of its own; the base and the bank, which never change, are shared, in memory, too."""
        out = Composition.__new__(Composition)
        nn.Module.__init__(out)
        for name in (
            "bank",
            "partition",
            "runtime",
            "slots",
            "layout",
            "linearised",
            "_any_base",
            "_mesh",
            "_tied",
            "_watched",
            "_progress",
        ):
            setattr(out, name, getattr(self, name))
        out._hold(self._bare())
        out._engine = None
        out._store = self._store if self._store is not None and self._store.is_resident else None
        out.values = copy.deepcopy(self.values, memo)
        out.train(self.training)
        return out

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_engine", "_store", "_places", "_progress", "_watched", "slots")
        return {k: v for k, v in self.__dict__.items() if k not in left_out} | {"_model": self._bare()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._engine = self._store = self._progress = None
        self._watched = []
        self.slots = Slots.of(self.bank, self.partition)
        self._hold(self._model)

    def extra_repr(self) -> str:
        return f"{self.slots.count} coefficients: {self.partition}; {self.bank!r}"


def source_of(model: nn.Module) -> WeightSource:
    """A model's weights, with what it says of itself, or its configuration if it is one of Hugging Face's."""
    if isinstance(model, HasWeights):
        return model.weight_source()
    said: Any = getattr(getattr(model, "config", None), "to_dict", dict)()
    config = transformers_config(said)[0] if isinstance(said, dict) and said else None
    return TensorMap(model.state_dict(), type(model).__name__, config=config)


def _wide(moved: Tensor, before: Tensor) -> Tensor:
    """What a tensor was made into, but in no fewer bits than 32."""
    return moved if moved.element_size() >= 4 else before.to(moved.device)


def _no_weights() -> UsageError:
    return UsageError(
        "USAGE",
        "a linearised model has no composed weights: its output is a derivative",
        fix="call the composition itself, or compose the model without Linearised",
    )


def _seed(a: Partition, b: Partition) -> str:
    return ": the seed differs" if replace(a, seed=0) == replace(b, seed=0) else ""
