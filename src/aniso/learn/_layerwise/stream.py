"""A student and its teachers run over the same items, one stage of the network at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from torch import Tensor
from torch.func import functional_call

from aniso.data.padding import NOTHING
from aniso.learn._layerwise.layers import Layer
from aniso.learn._layerwise.trace import Call, Chain, Group, Trace, input_of
from aniso.models import Encoder

Weights = Callable[[Collection[str]], dict[str, Tensor]]
"""Returns some tensors of a model by their names; names of tensors that are the base's may be left out."""


@final
@dataclass(frozen=True, eq=False)
class TaskItems:
    """The items of one task, and the model that was fine-tuned on it."""

    name: str
    teacher: Weights
    batches: Callable[[], Iterable[Tensor]]
    """Yields the same inputs each time it is called."""


@final
class LayerStream:
    """Yields the inputs of one group of layers after another: of the student as it is by then, of teachers.

    Between two stages only the stages' inputs are kept: one tensor for every batch and model.
    """

    def __init__(
        self,
        encoder: Encoder,
        trace: Trace,
        keys: Collection[str],
        student: Mapping[str, Tensor],
        tasks: Iterable[TaskItems],
        *,
        uses_student: bool,
        uses_teachers: bool,
    ) -> None:
        """``encoder`` is the base; tensors of the ``student`` may be replaced as it runs."""
        self._encoder = encoder
        self._trace = trace
        self._keys = keys
        self._stage = -1
        self._device = next(iter(encoder.parameters())).device
        self._runs: dict[str, list[_Run]] = {}
        for task in tasks:
            own: list[_Run] = []
            if uses_student:
                own.append(_Run(lambda names: {name: student[name] for name in names}, task.batches))
            if uses_teachers:
                own.append(_Run(task.teacher, task.batches))
            self._runs[task.name] = own

    def inputs(self, stage: int, group: Group, task: str) -> Iterator[tuple[Tensor, ...]]:
        """Yield the rows that enter a group of layers, batch by batch: the student's, then the teacher's."""
        while self._stage < stage:
            self._advance()
        runs = [self._captured(run, group[0]) for run in self._runs[task]]
        return zip(*runs, strict=True)

    def _captured(self, run: _Run, layer: Layer) -> Iterator[Tensor]:
        for passed, mask in self._passes(run):
            call = input_of(layer.module, passed)
            given = None if call is None else layer.input(*call)
            assert given is not None, layer.name  # it was called when the network was traced
            yield layer.rows(given, mask)

    def _advance(self) -> None:
        """Keep the inputs of the next stage in place of those of this one."""
        chain = self._trace.chain
        assert chain is not None
        for run in (run for runs in self._runs.values() for run in runs):
            after = []
            for place, (passed, mask) in enumerate(self._passes(run)):
                if self._stage < 0:
                    call = input_of(chain.modules[0], passed)
                    assert call is not None, chain.names[0]
                else:
                    call = chain.following(run.calls[place][0], passed())
                after.append((call, mask))
            run.calls = after
        self._stage += 1

    def _passes(self, run: _Run) -> Iterator[tuple[Callable[[], Any], Tensor | None]]:
        """Yield, for every batch, a function that runs the current stage, and which tokens are no padding."""
        chain = self._trace.chain
        if chain is not None and 0 <= self._stage < len(chain.modules):
            yield from self._through(chain, run)
            return
        after = chain is not None and self._stage >= 0
        weights = run.weights(self._names_outside(chain))
        for place, batch in enumerate(run.batches()):
            inputs = batch.to(self._device)
            passed = partial(functional_call, self._encoder, weights, (inputs,))
            if after and chain is not None:
                passed = partial(_skipping, chain, chain.value(run.calls[place][0]), passed)
            yield passed, _mask(inputs)

    def _through(self, chain: Chain, run: _Run) -> Iterator[tuple[Callable[[], Any], Tensor | None]]:
        prefix, module = f"{chain.names[self._stage]}.", chain.modules[self._stage]
        found = run.weights([key for key in self._keys if key.startswith(prefix)])
        weights = {key.removeprefix(prefix): tensor for key, tensor in found.items()}
        for (args, kwargs), mask in run.calls:
            yield partial(functional_call, module, weights, args, kwargs), mask

    def _names_outside(self, chain: Chain | None) -> list[str]:
        inside = () if chain is None else tuple(f"{name}." for name in chain.names)
        return [key for key in self._keys if not key.startswith(inside)]


@final
class _Run:
    """One model over the items of one task, between two stages."""

    def __init__(self, weights: Weights, batches: Callable[[], Iterable[Tensor]]) -> None:
        self.weights = weights
        self.batches = batches
        self.calls: list[tuple[Call, Tensor | None]] = []


def _skipping(chain: Chain, value: Tensor, run: Callable[[], Any]) -> Any:
    with chain.skipped(value):
        return run()


def _mask(inputs: Tensor) -> Tensor | None:
    """Return which tokens are no padding; None for inputs that are not rows of tokens."""
    if inputs.dim() != 2 or inputs.is_floating_point():
        return None
    mask = inputs != NOTHING
    return None if bool(mask.all()) else mask
