"""Rows of different length, padded to the longest; tensors of one shape are left as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

NOTHING = -1
"""Stands for no token: padding, or a position without a target."""
_SHORTEST = 0.75  # of a piece's width that each of its rows fills, so less than a quarter is padding


def stack_padded(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors; rows of tokens are padded at the end to the longest."""
    return torch.stack(_padded(tensors))


def cat_padded(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate batches; rows of tokens are padded at the end to the longest of all."""
    return torch.cat(_padded(tensors))


def _padded(tensors: Sequence[Tensor]) -> list[Tensor]:
    widths = {tensor.shape[-1] for tensor in tensors if tensor.ndim}
    if len(widths) < 2 or tensors[0].is_floating_point():
        return list(tensors)
    width = max(widths)
    return [functional.pad(tensor, (0, width - tensor.shape[-1]), value=NOTHING) for tensor in tensors]


@final
@dataclass(frozen=True)
class Pieces:
    """A batch in pieces of similar length, so that little of each is padding."""

    inputs: tuple[Tensor, ...]
    order: Tensor | None
    """For every row of the pieces, one after another, its place in the batch; None for a single piece."""

    @classmethod
    def of(cls, batch: Tensor) -> Pieces:
        """Cut rows of tokens by length; a batch of anything else stays one piece.

        Each row fills at least three quarters of its piece, the longest row all of it.
        """
        if batch.ndim != 2 or batch.is_floating_point() or not len(batch):
            return cls((batch,), None)
        ranked, order = (batch != NOTHING).sum(1).sort(descending=True, stable=True)
        lengths = ranked.tolist()
        starts = [0]
        for place, length in enumerate(lengths):
            if length < _SHORTEST * lengths[starts[-1]]:
                starts.append(place)
        if len(starts) == 1:
            return cls((batch[:, : lengths[0]],), None)
        ends = [*starts[1:], len(lengths)]
        pieces = zip(starts, ends, strict=True)
        return cls(tuple(batch[order[low:high], : lengths[low]] for low, high in pieces), order)

    def joined(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return what a model gave for every piece in the order of the batch."""
        if self.order is None:
            (only,) = outputs
            return only
        return torch.cat(list(outputs))[self.order.argsort().to(outputs[0].device)]
