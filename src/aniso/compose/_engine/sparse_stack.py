"""The changed rows of several vectors over one block: a dense stack over the rows that any vector changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from aniso.compose._engine.block_partition import BlockPartition, WholeBlock
from aniso.compose._engine.delta_stack import DeltaStack, DenseStack
from aniso.compose._engine.scratch import scratch
from aniso.vectors import SparseRows


@final
class SparseStack(DeltaStack):
    """Deltas that are zero in most rows, with one float per element of the other rows."""

    def __init__(
        self, rows: Tensor, inner: DenseStack, shape: tuple[int, int], host_rows: Tensor | None = None
    ) -> None:
        """``inner`` has the elements of ``rows``, one row of the block after the other, for each vector.

        ``host_rows`` are the same on the CPU, where tiles are chosen.
        """
        self.vectors = inner.vectors
        self.numel = shape[0] * shape[1]
        self._rows = rows
        self._host_rows = rows if host_rows is None else host_rows
        self._inner = inner
        self._shape = shape

    @classmethod
    def of(cls, vectors: tuple[int, ...], deltas: Sequence[SparseRows]) -> SparseStack:
        """Stack deltas over the rows that any of them changed."""
        rows = torch.unique(torch.cat([delta.rows for delta in deltas]))
        height, width = deltas[0].shape
        values = torch.zeros(len(deltas), len(rows), width)
        for k, delta in enumerate(deltas):
            values[k, torch.searchsorted(rows, delta.rows)] = delta.values.float()
        return cls(rows, DenseStack(vectors, values.view(len(deltas), -1)), (height, width))

    @property
    def device(self) -> torch.device:
        return self._rows.device

    @property
    def nbytes(self) -> int:
        return self._inner.nbytes + 8 * self._rows.numel()

    def cut(self, start: int, stop: int) -> DeltaStack:
        """Return a range of elements, no longer sparse: ranges may begin within a row."""
        whole = torch.zeros(len(self.vectors), *self._shape)
        whole[:, self._rows] = self._inner.values.view(len(self.vectors), -1, self._shape[1])
        return DenseStack(self.vectors, whole.view(len(self.vectors), -1), self.offset).cut(start, stop)

    def to(self, device: torch.device) -> SparseStack:
        return SparseStack(self._rows.to(device), self._inner.to(device), self._shape, self._host_rows)

    def tiles(self, alignment: int, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        width = self._shape[1]
        values = self._inner.values.view(len(self.vectors), -1, width)
        for start, stop in self._steps(alignment):
            low, high = start // width, -(-stop // width)
            first, last = torch.searchsorted(self._host_rows, torch.tensor([low, high])).tolist()
            tile = scratch("tile", (len(self.vectors), high - low, width), dtype, values.device).zero_()
            tile[:, self._rows[first:last] - low] = values[:, first:last].to(dtype)
            flat = tile.view(len(self.vectors), -1)
            yield start, flat[:, start - low * width : stop - low * width]

    def _add(self, out: Tensor, own: Tensor, partition: BlockPartition) -> None:
        if not isinstance(partition, WholeBlock):
            super()._add(out, own, partition)
            return
        matrix = out.view(self._shape)
        chosen = matrix[self._rows].view(-1)
        self._inner._add(chosen, own, WholeBlock(chosen.numel()))
        matrix[self._rows] = chosen.view(-1, self._shape[1])

    def dots(self, gradient: Tensor, partition: BlockPartition) -> Tensor:
        if not isinstance(partition, WholeBlock):
            return super().dots(gradient, partition)
        chosen = gradient.view(self._shape)[self._rows].reshape(-1)
        return self._inner.dots(chosen, WholeBlock(chosen.numel()))
