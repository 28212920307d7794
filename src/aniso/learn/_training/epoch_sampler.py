"""The batches of an epoch over several splits, each with the same share of every batch."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import final

from aniso.data import Batch, Batches, Split, TextDataset, sampling
from aniso.data.batches import View, together
from aniso.errors import UsageError
from aniso.schedule import Schedule


@final
@dataclass(frozen=True)
class EpochSampler:
    """Draws the batches of an epoch.

    Every split has the same share of every batch. One split is visited once in an epoch: the one that takes
    longest, the smallest, or the target (``Schedule.epoch_of``). Smaller ones begin again, in another order,
    until it is done; of larger ones every epoch has another part.
    """

    splits: Sequence[tuple[Split | TextDataset, tuple[View, ...]]]
    schedule: Schedule
    seed: int
    reserved: Sequence[float] = ()
    """For every split the part of its share that is kept for reserved items (default: none)."""
    target: int | None = None
    """The split to be forgotten, if there is one (``Objective.target``)."""

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        passes = [-(-len(split) // self._own(i)) for i, (split, _) in enumerate(self.splits)]
        return max(self.schedule.min_steps_per_epoch, self._chosen(passes))

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.schedule.steps or self.schedule.epochs * self.steps

    @property
    def epochs(self) -> int:
        """Epochs of the whole run; the last may be cut short by ``Schedule.steps``."""
        return -(-self.total_steps // self.steps)

    def _chosen(self, passes: Sequence[int]) -> int:
        """The steps of a pass over the split that an epoch is a pass over."""
        if self.schedule.epoch_of == "longest":
            return max(passes)
        if self.schedule.epoch_of == "smallest":
            return min(passes)
        if self.target is None:
            raise UsageError(
                "OBJECTIVE",
                "epoch_of 'target' needs a term with a negative weight, the target of a negation",
                fix="--epoch-of longest, or --epoch-of smallest",
            )
        return passes[self.target]

    @property
    def _share(self) -> int:
        return self.schedule.share(len(self.splits))

    def _own(self, which: int) -> int:
        """Items of a split in a batch, without reserved ones."""
        reserved = self.reserved[which] if self.reserved else 0.0
        return max(1, self._share - int(reserved * self._share))

    def epoch(
        self,
        number: int,
        *,
        start: int = 0,
        workers: int = 0,
        reserved_items: Sequence[Sequence[int] | None] = (),
    ) -> Generator[tuple[Batch, ...], None, None]:
        """Yield the steps of an epoch from ``start`` on: one batch of each split.

        ``reserved_items`` are places in each split; they fill the part of its share that is reserved.
        """
        passes = []
        for i, (split, views) in enumerate(self.splits):
            own = self._own(i)
            order, size = self.order(split, own, number), own
            if reserved_items and reserved_items[i]:
                order = self._filled_up(order, own, list(reserved_items[i] or ()), split, number)
                size = self._share
            passes.append(Batches(split, *views, size=size, seed=self.seed, epoch=number, order=order))
        return together(*passes, workers=workers, start=start)

    def _filled_up(
        self, order: list[int], own: int, reserved: list[int], split: Split | TextDataset, epoch: int
    ) -> list[int]:
        """The order with reserved items at the end of every batch, all of them equally often."""
        keys = [str(split.keys[i]) for i in reserved]
        batches = [order[i : i + own] for i in range(0, len(order), own)]
        if own == self._share:
            return order
        wanted = [self._share - len(batch) for batch in batches]
        drawn: list[int] = []
        while len(drawn) < sum(wanted):
            again = len(drawn) // len(keys)
            drawn += [reserved[i] for i in sampling.shuffled(keys, "trusted", self.seed, epoch, again)]
        fills = [[drawn.pop(0) for _ in range(count)] for count in wanted]
        return [place for pair in zip(batches, fills, strict=True) for part in pair for place in part]

    def order(self, split: Split | TextDataset, share: int, epoch: int) -> list[int]:
        """Return the places of a split's items in the order in which an epoch visits them."""
        keys = [str(key) for key in split.keys]
        out = sampling.shuffled(keys, "order", self.seed, epoch)
        if -(-len(keys) // share) == self.steps:
            return out
        again = 1
        while len(out) < self.steps * share:
            out += sampling.shuffled(keys, "order", self.seed, epoch, again)
            again += 1
        return out[: self.steps * share]
