"""The deltas of one block, read one vector at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import final

from torch import Tensor

from aniso.errors import InputError


@final
class Deltas:
    """One block of the vectors that change it, in float64.

    Iterating reads one delta after another, in alphabetical order of the vectors, so that the order of the
    bank does not matter. A rule that iterates twice reads them twice; none is kept here.
    """

    def __init__(
        self,
        block: str,
        shape: Sequence[int],
        readers: Sequence[tuple[str, Callable[[], Tensor]]],
        vectors: int,
    ) -> None:
        """``vectors`` counts all vectors of the merge; those without a reader have a delta of zero here."""
        self.block = block
        self.shape = tuple(shape)
        self.vectors = vectors
        self._readers = sorted(readers, key=lambda reader: reader[0])

    @classmethod
    def of(cls, tensors: Sequence[Tensor], *, block: str = "block", vectors: int | None = None) -> Deltas:
        """Return deltas that are in memory."""
        width = len(str(len(tensors)))
        readers = [(f"{i:0{width}d}", _constant(tensor)) for i, tensor in enumerate(tensors)]
        return cls(block, tensors[0].shape, readers, vectors or len(tensors))

    @property
    def names(self) -> tuple[str, ...]:
        """The vectors that change the block."""
        return tuple(name for name, _ in self._readers)

    @property
    def rank(self) -> int:
        """The largest rank that a matrix of this shape can have."""
        return min(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __len__(self) -> int:
        """Return the number of vectors that change the block."""
        return len(self._readers)

    def __iter__(self) -> Iterator[Tensor]:
        for _, values in self.items():
            yield values

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and deltas."""
        for name, read in self._readers:
            yield name, self._finite(name, read())

    def _finite(self, name: str, values: Tensor) -> Tensor:
        bad = values.numel() - int(values.isfinite().sum())
        if bad:
            raise InputError(
                "WEIGHT-NONFINITE",
                f"vector '{name}' has {bad} values that are NaN or infinite",
                key=self.block,
                fix="leave the vector out with --vectors, or find out why its training diverged",
            )
        return values

    def mapped(self, function: Callable[[str, Tensor], Tensor]) -> Deltas:
        """Return deltas that a function of a vector's name and delta changes whenever one is read."""

        def reader(name: str, read: Callable[[], Tensor]) -> Callable[[], Tensor]:
            return lambda: function(name, self._finite(name, read()))

        readers = [(name, reader(name, read)) for name, read in self._readers]
        return Deltas(self.block, self.shape, readers, self.vectors)

    def total(self) -> Tensor:
        """Return the sum of all deltas."""
        out: Tensor | None = None
        for values in self:
            out = values.double() if out is None else out.add_(values)
        assert out is not None
        return out

    def mean(self) -> Tensor:
        """Return the mean over all vectors of the merge: a vector without the block counts as zero."""
        return self.total().div_(self.vectors)


def _constant(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor.double().clone()
