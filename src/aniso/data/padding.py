"""Rows of different length, padded to the longest; tensors of one shape are left as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

NOTHING = -1
"""Stands for no token: padding, or a position without a target."""


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
