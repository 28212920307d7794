"""The batches of an epoch over several splits: none is cut to the smallest, none outweighs another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from aniso.data import Batch, Batches, Split, draw
from aniso.data.batches import View, together
from aniso.learn.schedule import Schedule


@final
@dataclass(frozen=True)
class Passes:
    """Every split gives the same share of every batch. The one that takes longest is gone through once in
    an epoch; the others begin anew, in another order, until it is done."""

    splits: Sequence[tuple[Split, tuple[View, ...]]]
    schedule: Schedule
    seed: int

    @property
    def steps(self) -> int:
        """Of one epoch."""
        return self.schedule.epoch_steps([len(split) for split, _ in self.splits])

    def epoch(self, number: int, *, start: int = 0, workers: int = 0) -> Iterator[tuple[Batch, ...]]:
        """The steps of an epoch from ``start`` on: one batch of each split."""
        share = self.schedule.share(len(self.splits))
        passes = [
            Batches(
                split,
                *views,
                size=share,
                seed=self.seed,
                epoch=number,
                order=self.order(split, share, number),
            )
            for split, views in self.splits
        ]
        return together(*passes, workers=workers, start=start)

    def order(self, split: Split, share: int, epoch: int) -> list[int]:
        """Places in the split as they are visited."""
        keys = [str(key) for key in split.keys]
        out = draw.shuffled(keys, "order", self.seed, epoch)
        if -(-len(keys) // share) == self.steps:
            return out
        again = 1
        while len(out) < self.steps * share:
            out += draw.shuffled(keys, "order", self.seed, epoch, again)
            again += 1
        return out[: self.steps * share]
