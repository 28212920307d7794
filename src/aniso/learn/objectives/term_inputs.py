"""What a term computes its loss from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from aniso.learn.heads import Classifier


@dataclass(frozen=True)
class TermInputs:
    """Model outputs for one batch of a term's split, and what is known about its items."""

    features: tuple[Tensor, ...]
    """One tensor per view, not normalised; for text the loss, token count and hits of every row."""
    logits: tuple[Tensor, ...]
    """One tensor per view, over the split's classes; empty for text."""
    labels: Tensor | None
    """None for an unlabelled split, always."""
    marks: Mapping[str, Tensor] = field(default_factory=dict)
    """Values per item from the term (``item_targets``) and from its companion, by name."""
    progress: float = 0.0
    """The share of the run that is done, from 0 to 1."""


def logits_of(head: Classifier | None, features: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the logits of every view; none where there is no classifier."""
    return () if head is None else tuple(head.logits(view) for view in features)
