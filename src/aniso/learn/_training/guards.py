"""Checks of a step: losses and gradients must be finite, gradients not zero, and memory suffice."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

from aniso.data import Batch
from aniso.errors import NumericalError, ResourceError
from aniso.learn.objectives import DataTerm, Losses

_SHOWN = 20  # items of a batch that a message names
_FIX = "lower the learning rate (--lr), or look at these"


def require_finite_losses(
    losses: Losses, where: str, terms: Sequence[DataTerm], batches: Sequence[Batch]
) -> None:
    """Raise an error that names the items of the batch if a loss is NaN or infinite."""
    bad = [name for name, (loss, _) in losses.items() if not abs(loss) < float("inf")]
    if bad:
        raise NumericalError(
            "LEARN-NONFINITE",
            f"the loss on {bad[0]} is {losses[bad[0]][0]} in {where}",
            fix=_FIX,
            **_items(bad[0], terms, batches),
        )


def require_finite_gradient(
    norm: float, where: str, terms: Sequence[DataTerm], batches: Sequence[Batch]
) -> None:
    """Raise an error that names the items of the first term's batch if the gradient is not finite."""
    if not math.isfinite(norm):
        raise NumericalError(
            "LEARN-NONFINITE",
            f"the gradient is {norm} in {where}",
            fix=_FIX,
            **_items(terms[0].name, terms, batches),
        )


def require_gradient(norm: float) -> None:
    """Raise an error if the gradient of the first step is zero: nothing would ever be learned."""
    if norm == 0.0:
        raise NumericalError(
            "LEARN-GRADIENT",
            "the gradient of everything that is trained is zero",
            likely="a single class, blocks that do not reach the output, or vectors that are zero there",
            fix="aniso bank ls shows vectors' norms; --partition says which blocks have coefficients",
        )


def still_collapsed(reason: str, lr: float, restarts: int) -> NumericalError:
    """Return the error of a run whose predictions collapse however low its learning rate is."""
    return NumericalError(
        "LEARN-COLLAPSE",
        f"predictions collapsed, also at a learning rate of {lr:.2g}",
        reason=reason,
        restarts=restarts,
        likely="vectors that are long compared with the base, or labels that do not fit the items",
        fix=f"--lr {lr / 10:.1g}; aniso bank ls shows the vectors' norms",
    )


@contextlib.contextmanager
def explain_out_of_memory(size: int, things: str) -> Iterator[None]:
    """Turn torch's out-of-memory errors into one that names a micro-batch which may fit."""
    try:
        yield
    except (MemoryError, RuntimeError) as e:
        known = ("out of memory", "allocate memory")  # not "illegal memory access"
        if not isinstance(e, MemoryError) and not any(words in str(e) for words in known):
            raise
        raise ResourceError(
            "OUT-MEMORY",
            f"a step with {size} {things} at once does not fit into memory",
            reason=str(e)[:200],
            fix=f"--micro-batch {max(1, size // 2)} gives the same result in slices",
        ) from None


def _items(name: str, terms: Sequence[DataTerm], batches: Sequence[Batch]) -> dict[str, Any]:
    """The items of a term's batch, by name."""
    for term, batch in zip(terms, batches, strict=True):
        if term.name == name:
            return {term.split.item_kind: [term.split.describe(i) for i in batch.indices[:_SHOWN]]}
    return {}
