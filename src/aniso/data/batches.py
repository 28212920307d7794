"""What a split holds, as batches of tensors: the same whatever the number of workers."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from aniso.data import sampling
from aniso.data.splits import Labelled, Split
from aniso.data.text_dataset import TextDataset
from aniso.errors import AnisoError

Opened = Callable[[int], Any]
"""A picture, or a row of tokens, by its place in a split."""


class View(Protocol):
    """How a picture, or a text, becomes a model's input; what is random in it comes from the generator."""

    @property
    def name(self) -> str: ...

    def __call__(self, opened: Any, rng: torch.Generator, /) -> Tensor:
        """Of a picture eight bits, 3 x height x width; of a text two rows of tokens."""
        ...

    def finish(self, stack: Tensor, /) -> Tensor:
        """A stack of these as the model takes them."""
        ...


@dataclass(frozen=True)
class Batch:
    """Some pictures, once for every view that was asked for."""

    views: tuple[Tensor, ...]
    labels: Tensor | None
    """None for an unlabelled split, always."""
    indices: tuple[int, ...]
    """Places in the split."""

    @property
    def images(self) -> Tensor:
        return self.views[0]

    def __len__(self) -> int:
        return len(self.indices)


@final
class Batches:
    """One pass over a split. Orders are drawn by (seed, epoch, picture), views also by view and visit."""

    def __init__(
        self,
        split: Split | TextDataset,
        *views: View,
        size: int,
        shuffle: bool = False,
        seed: int = 0,
        epoch: int = 0,
        workers: int = 0,
        order: Sequence[int] | None = None,
    ) -> None:
        """``order`` gives the places to visit, in that order; with ``shuffle`` all are visited, at random."""
        self.split = split
        self.views = views
        self.size = size
        self.workers = workers
        self.order = list(order) if order is not None else _order(split, shuffle, seed, epoch)
        self._pictures = _Pictures(split, views, seed, epoch)

    def __len__(self) -> int:
        return -(-len(self.order) // self.size)

    def __iter__(self) -> Iterator[Batch]:
        return (batch for (batch,) in together(self, workers=self.workers))

    def groups(self) -> list[list[tuple[int, int]]]:
        """For every batch its places in the split, each with how often it was visited before."""
        visits = _visits([self.split.keys[i] for i in self.order])
        places = list(zip(self.order, visits, strict=True))
        return [places[i : i + self.size] for i in range(0, len(places), self.size)]

    def finished(self, group: list[tuple[int, int]], stacks: Sequence[Tensor]) -> Batch:
        # eight bits cross from worker to here, a quarter of the bytes
        views = tuple(view.finish(stack) for view, stack in zip(self.views, stacks, strict=True))
        indices = tuple(i for i, _ in group)
        labels = None
        if isinstance(self.split, Labelled):
            labels = torch.tensor([self.split.labels[i] for i in indices])
        return Batch(views, labels, indices)


def together(*passes: Batches, workers: int = 0, start: int = 0) -> Iterator[tuple[Batch, ...]]:
    """Several passes of equal length side by side, a batch of each at a time, read by the same workers.

    The first ``start`` steps are left out without a picture being read: a run that goes on where it ended.
    """
    steps = list(zip(*(one.groups() for one in passes), strict=True))[start:]
    loader = DataLoader(
        _Joint([one._pictures for one in passes]),
        batch_sampler=[[(w, *place) for w, group in enumerate(step) for place in group] for step in steps],
        num_workers=workers,
        collate_fn=_stacked,
        generator=torch.Generator(),  # else it would draw from the global one
        prefetch_factor=4 if workers else None,
        worker_init_fn=_leave_signals_to_the_parent,
    )
    for step, found in zip(steps, loader, strict=True):
        if isinstance(found, AnisoError):  # torch would rebuild it from its text alone, and fail
            raise found
        yield tuple(one.finished(*both) for one, *both in zip(passes, step, found, strict=True))


def _leave_signals_to_the_parent(worker: int) -> None:
    """Ctrl-C reaches all processes of a terminal: who decides what to do about it is the parent alone."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # so may SIGTERM, from a scheduler; but torch sends it, too, to workers that hang
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_GRACE))


_GRACE = 30  # seconds for the parent to finish its step in


@final
class _Joint(Dataset[tuple[int, tuple[Tensor, ...] | AnisoError]]):
    """Pictures of several passes; a place says of which."""

    def __init__(self, parts: Sequence[_Pictures]) -> None:
        self._parts = parts

    def __getitem__(self, place: tuple[int, int, int]) -> tuple[int, tuple[Tensor, ...] | AnisoError]:
        which, index, visit = place
        return which, self._parts[which].views_of(index, visit)


@final
class _Pictures:
    """Views of one picture at a time; what workers get a copy of. Labels are not in it."""

    def __init__(self, split: Split | TextDataset, views: tuple[View, ...], seed: int, epoch: int) -> None:
        self._opened: Opened = split.opened if isinstance(split, TextDataset) else split.images.picture
        self._keys = split.keys
        self._views = views
        self._words = (seed, epoch)

    def views_of(self, index: int, visit: int) -> tuple[Tensor, ...] | AnisoError:
        """``visit`` is how often the picture was visited before in this pass."""
        try:
            picture = self._opened(index)
        except AnisoError as e:
            return e
        words = (*self._words, self._keys[index], visit)
        return tuple(view(picture, _generator(*words, view.name, n)) for n, view in enumerate(self._views))


def _generator(*words: Hashable) -> torch.Generator:
    return torch.Generator().manual_seed(sampling.number(*words))


def _visits(keys: Sequence[int]) -> list[int]:
    """For every visit to a picture how many came before it: small splits are repeated within a pass."""
    seen: Counter[int] = Counter()
    out = []
    for key in keys:
        out.append(seen[key])
        seen[key] += 1
    return out


def _stacked(
    samples: list[tuple[int, tuple[Tensor, ...] | AnisoError]],
) -> list[tuple[Tensor, ...]] | AnisoError:
    """For every pass its stacks of pictures, one for each view."""
    grouped: dict[int, list[tuple[Tensor, ...]]] = {}
    for which, views in samples:
        if isinstance(views, AnisoError):
            return views
        grouped.setdefault(which, []).append(views)
    return [tuple(torch.stack(views) for views in zip(*grouped[w], strict=True)) for w in sorted(grouped)]


def _order(split: Split | TextDataset, shuffle: bool, seed: int, epoch: int) -> list[int]:
    if not shuffle:
        return list(range(len(split)))
    keys: Any = split.keys
    return sampling.shuffled([str(key) for key in keys], "order", seed, epoch)
