"""Companions: state that an objective's terms keep over a run, with hooks around epochs and steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from aniso.learn.heads import Classifier
from aniso.learn.objectives.term_inputs import TermInputs
from aniso.progress import ProgressCallback
from aniso.records import JsonValue

Losses = dict[str, tuple[float, int]]
"""Mean loss and number of items of every term in a step, by the term's name."""


@final
@dataclass(frozen=True)
class RunContext:
    """What a companion may use of the training run it belongs to."""

    model: nn.Module
    tensors: Mapping[str, Tensor]
    """The tensors that are trained, by name."""
    optimiser: torch.optim.Optimizer
    heads: Sequence[Classifier | None]
    """The classifier of every data term."""
    batch_size: int = 256
    """Items per forward pass outside of steps."""
    workers: int = 0
    online: bool = False
    """True if every item is seen once, as it comes."""


class Companion:
    """State that one or several terms of a kind keep over a run. By default every hook does nothing.

    A term's class makes its companion in ``DataTerm.companion``. Terms are numbered as in
    ``Objective.data_terms``; items are places in a term's split.
    """

    name: ClassVar[str]
    """Prefix of its entries in training checkpoints; unique within a run."""

    def before_epoch(self, progress: ProgressCallback, check: Callable[[], None]) -> None:
        """Prepare an epoch. Work that takes long calls ``check`` now and then: it raises to interrupt."""

    def reserved_items(self, term: int) -> Sequence[int] | None:
        """Items that fill the share of every batch which a term reserves (``DataTerm.reserved_share``)."""
        return None

    def marks(self, term: int, items: Sequence[int]) -> Mapping[str, Tensor]:
        """Values per item that the term's loss finds in ``TermInputs.marks``."""
        return {}

    def observe(self, term: int, items: Sequence[int], inputs: TermInputs) -> None:
        """Look at what a term is about to compute its loss from; called in every forward pass of a step."""

    def around_step(self, backward: Callable[[], Losses]) -> Losses:
        """Compute the gradients of a step by calling ``backward`` once or more; returns the step's losses."""
        return backward()

    def after_step(self) -> None:
        """Act after the optimiser has updated the trained tensors."""

    def metrics(self) -> Mapping[str, int]:
        """Fields for the epoch's row."""
        return {}

    def state_dict(self) -> dict[str, Tensor | JsonValue]:
        """Everything that a resumed run needs."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor | JsonValue]) -> None:
        """Restore what ``state_dict`` returned; tensors come on the CPU."""
