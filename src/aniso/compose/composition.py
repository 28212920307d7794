"""A model whose weights are base + sum of coefficient * delta; the coefficients are its only parameter."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from aniso.compose._engine import torch_internals
from aniso.compose._engine.coefficient_index import CoefficientIndex
from aniso.compose._engine.delta_store import DeltaStore
from aniso.compose._engine.installer import WeightInstaller, recomputable_blocks
from aniso.compose._engine.sharded import Sharding
from aniso.compose._engine.sharded_base import ShardedBase
from aniso.compose._engine.tensor_locations import (
    TensorLocations,
    copy_sharing_weights,
    require_plain_attributes,
    tensor_locations,
)
from aniso.compose.bake import Baked
from aniso.compose.coefficients import CoefficientProvenance, Coefficients
from aniso.compose.linearised.tangent import Linearised, run_tangent
from aniso.compose.model_source import source_of
from aniso.compose.partition import Partition
from aniso.compose.plan import Plan
from aniso.compose.runtime import Runtime, keep_freed_memory
from aniso.errors import InputError, UsageError
from aniso.vectors import Bank
from aniso.vectors.block import tied_names
from aniso.weights.files import Progress


@final
class Composition(nn.Module):
    """A module that runs a model with weights theta0 + sum_i Lambda_i tau_i::

        composition = Composition(model, bank, Partition.blocks())
        fit(composition, CrossEntropy(task.train.shots(4)))
        composition.bake().save("model.safetensors")

    It starts at zero, which is the base bit for bit. The given model is not changed: the composition works on
    a copy of its modules that shares its weights. ``composition.values`` is the only parameter; batch norms
    stay in evaluation mode.
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
        """``any_base`` accepts a model that is not the bank's base.

        On a ``mesh`` each process holds its share of the bank, and gradients are averaged over processes.
        """
        super().__init__()
        self.bank = bank
        self.partition = partition or Partition.blocks()
        self.runtime = runtime or Runtime()
        self.index = CoefficientIndex.of(bank, self.partition)
        self._any_base = any_base
        self._mesh = mesh
        self.linearised = isinstance(model, Linearised)
        inner = model.module if isinstance(model, Linearised) else model
        source = source_of(inner)
        self.layout = bank.over(source, any_base=any_base).layout
        self._tied = tied_names(source)
        require_plain_attributes(inner)
        self._hold(copy_sharing_weights(inner))
        missing = [p.key for b in self.layout.blocks for p in b.parts if p.key not in self._locations]
        if missing:
            raise InputError(
                "MODEL-COPY",
                f"the model {source.label} saves tensors under names that none of its modules has",
                key=missing[0],
                fix="remove hooks that rename tensors in its state dict",
            )
        over = None if self.linearised else mesh
        given = (self._model, self._locations, self.layout, self.index, over)
        self._sharded_base = ShardedBase.of(*given) if self.runtime.shard_base else None
        kept = inner if self._sharded_base is None else self._model  # which has none of what was sharded
        self._versions = [(p, torch_internals.version(p)) for p in kept.parameters()]
        first = next(iter(model.parameters()), torch.zeros(0))
        dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        self.values = nn.Parameter(torch.zeros(self.index.count, dtype=dtype, device=first.device))
        self._installer: WeightInstaller | None = None
        self._store: DeltaStore | None = None
        self._progress = progress
        self.plan  # noqa: B018 (too little memory is an error now, not at the first batch)
        self.train(model.training)

    _model: nn.Module
    _locations: TensorLocations

    def _hold(self, model: nn.Module) -> None:
        """Keep the model without registering it: its weights are not parameters of the composition."""
        object.__setattr__(self, "_model", model)
        object.__setattr__(self, "_locations", tensor_locations(model, self._tied))

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
        """Build the composition that coefficients were learned for; other vectors are left out."""
        chosen = coefficients.chosen(bank)
        fitting = coefficients.for_bank(chosen, any_bank=any_bank)
        out = cls(model, chosen, coefficients.partition, runtime=runtime, any_base=any_base, mesh=mesh)
        return out.load(fitting)

    @property
    def model(self) -> nn.Module:
        """The copy of the model, for its attributes; run it through the composition."""
        return self._model

    @property
    def sharding(self) -> Sharding | None:
        """How the processes of a mesh share the work; None without a mesh."""
        return None if self._mesh is None else Sharding(self._mesh)

    # coefficients

    @property
    def coefficients(self) -> Coefficients:
        """A labelled copy of the current values."""
        values = self.values.detach().cpu().clone()
        return Coefficients(self.index, values, CoefficientProvenance.of(self.bank), self.linearised)

    def load(self, coefficients: Coefficients, *, any_bank: bool = False) -> Self:
        """Set the values to these coefficients, which must fit the bank and the partition."""
        if coefficients.partition != self.partition:
            raise InputError(
                "COEF-PARTITION",
                f"the coefficients have a different partition{_seed(coefficients.partition, self.partition)}",
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
        """The plan: where task vectors and composed weights are kept, and the memory that takes."""
        itemsize = next((t.element_size() for t in self._model.parameters()), 4)
        world = self._mesh.size() if self._mesh is not None else 1
        return Plan.of(
            self.bank, self.index, self.runtime, self.values.device, itemsize, world, self._recomputable()
        )

    def _require_whole_base(self, what: str) -> None:
        if self._sharded_base is not None:
            raise UsageError(
                "USAGE",
                f"{what} needs the whole base, of which each process has a share",
                fix="make a composition of its coefficients in one process: Composition.of(model, bank, ...)",
            )

    def _recomputable(self) -> dict[str, int]:
        """Return the blocks that need not be kept composed, with the elements of their tensors."""
        if self.linearised or (self._mesh is not None and self._sharded_base is None):
            return {}
        return recomputable_blocks(self.layout, self.index, self._locations)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        installer = self._install()
        if self.linearised:
            return run_tangent(installer, self._model, installer.installed, args, kwargs)
        return self._model(*args, **kwargs)

    def prepare(self) -> Self:
        """Read the task vectors and compose the weights now, not at the first batch."""
        self._install()
        return self

    @contextlib.contextmanager
    def composed(self) -> Iterator[nn.Module]:
        """Yield the model with composed weights, for other calls: ``model.encode_image(x)``."""
        if self.linearised:
            raise _no_weights()
        self._install()
        # coefficients may change inside; calls other than forward see that when the context is entered again
        handle = self._model.register_forward_pre_hook(lambda *_: self._install_before_forward())
        # installed weights stay until the next call: checkpointed layers run again in the backward pass
        try:
            yield self._model
        finally:
            handle.remove()

    def weights(self) -> dict[str, Tensor]:
        """Return copies of the composed tensors by name; tensors without a coefficient are left out."""
        with torch.no_grad(), self.composed():
            return {key: t.clone() for key, t in self._install().installed.items()}

    def _install_before_forward(self) -> None:
        self._install()

    @torch.compiler.disable  # type: ignore[misc,untyped-decorator,unused-ignore]
    def _install(self) -> WeightInstaller:
        """Install the weights for the current values."""
        if self._installer is None:
            if self.runtime.keep_freed and self.values.device.type == "cpu":
                keep_freed_memory()
            sharding = self.sharding
            with torch.inference_mode(False):  # they outlive the call
                store = self._delta_store(sharding)
            self._installer = WeightInstaller(
                self._locations,
                self.layout,
                self.index,
                store,
                deltas_only=self.linearised,
                sharding=sharding,
                sharded_base=self._sharded_base,
            )
        self._installer.install(self.values)
        self._require_unchanged()
        return self._installer

    def _delta_store(self, sharding: Sharding | None) -> DeltaStore:
        if self._store is None:
            self._store = DeltaStore(
                self.bank,
                self.index,
                self.plan,
                self.values.device,
                fast=self.runtime.fast,
                sharding=sharding,
                progress=self._progress,
            )
        return self._store

    def _require_unchanged(self) -> None:
        """Refuse to run if the given model was written to: its memory is shared with the base."""
        if any(torch_internals.version(p) != version for p, version in self._versions):
            raise UsageError(
                "BANK-BASE",
                "the model under this composition was modified after the composition was made",
                fix="load composed weights into another model, or make a new composition",
            )

    def release(self) -> Self:
        """Drop vectors and composed weights from memory; they are read again when they are needed."""
        self._reset()
        return self

    def with_bank(self, bank: Bank) -> Composition:
        """Return a composition of another bank over the same model, with all coefficients zero."""
        self._require_whole_base("a composition of another bank")
        model = self._base_copy()
        return Composition(
            Linearised(model) if self.linearised else model,
            bank,
            self.partition,
            runtime=self.runtime,
            any_base=self._any_base,
            mesh=self._mesh,
        )

    def bake(self) -> Baked:
        """Return ordinary weights under the model's names, composed when they are read or saved."""
        if self.linearised:
            raise _no_weights()
        self._require_whole_base("baking")
        return Baked(source_of(self._model), self.bank, self.coefficients, any_base=True)

    # nn.Module methods

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self._model.train(mode)
        for module in self._model.modules():
            if isinstance(module, torch_internals.NormBase):
                module.eval()  # the base's statistics are part of the base
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # coefficients are learned in 32 bits or more, whatever the model's format
        super()._apply(lambda t: _wide(fn(t), t), recurse)  # type: ignore[no-untyped-call]
        self._reset()
        if self._sharded_base is None:
            self._model._apply(fn, recurse)  # type: ignore[no-untyped-call]
        else:
            self._sharded_base.move(fn, self._locations, self._model)
        return self

    def _reset(self) -> None:
        """Drop everything that can be computed again."""
        if self._installer is not None:
            self._installer.uninstall()
            self._installer = None
        self._store = None

    def _base_copy(self) -> nn.Module:
        """Return a copy of the model without composed weights."""
        if self._installer is None:
            return copy_sharing_weights(self._model)
        installed = self._installer.installed
        self._installer.restore_tensors(installed)
        try:
            return copy_sharing_weights(self._model)
        finally:
            if not self.linearised:  # the backward pass of checkpointed layers may need them
                self._installer.set_tensors(installed)

    def __deepcopy__(self, memo: dict[int, Any]) -> Composition:
        """Copy the coefficients; share the base and the bank, which never change."""
        out = Composition.__new__(Composition)
        nn.Module.__init__(out)
        for name in (
            "bank",
            "partition",
            "runtime",
            "index",
            "layout",
            "linearised",
            "_any_base",
            "_mesh",
            "_sharded_base",
            "_tied",
            "_versions",
            "_progress",
        ):
            setattr(out, name, getattr(self, name))
        out._hold(self._base_copy())
        out._installer = None
        out._store = self._store if self._store is not None and self._store.is_resident else None
        out.values = copy.deepcopy(self.values, memo)
        out.train(self.training)
        return out

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_installer", "_store", "_locations", "_progress", "_versions", "index")
        return {k: v for k, v in self.__dict__.items() if k not in left_out} | {"_model": self._base_copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._installer = self._store = self._progress = None
        self._versions = []
        self.index = CoefficientIndex.of(self.bank, self.partition)
        self._hold(self._model)

    def extra_repr(self) -> str:
        return f"{self.index.count} coefficients: {self.partition}; {self.bank!r}"


def batch_runner(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return what runs a model on a batch: itself, or for a composition on a mesh its processes together.

    Each of them runs a share of the batch, and has all outputs.
    """
    sharding = model.sharding if isinstance(model, Composition) else None
    return model if sharding is None else partial(sharding.run, model)


def _wide(moved: Tensor, before: Tensor) -> Tensor:
    """Return the moved tensor, or the old one on the new device if it has fewer than 32 bits."""
    return moved if moved.element_size() >= 4 else before.to(moved.device)


def _no_weights() -> UsageError:
    return UsageError(
        "USAGE",
        "a linearised model has no composed weights: its output is a derivative",
        fix="call the composition itself, or compose the model without Linearised",
    )


def _seed(a: Partition, b: Partition) -> str:
    return ": the seed differs" if replace(a, seed=0) == replace(b, seed=0) else ""
