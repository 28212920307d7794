"""Batches of tensors from a split; they do not depend on the number of workers."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from aniso.data import sampling
from aniso.data.items import Items
from aniso.data.padding import stack_padded
from aniso.data.splits import Labelled, Split
from aniso.data.text_dataset import TextDataset
from aniso.errors import AnisoError

Opened = Callable[[int], Any]
"""Returns an image, or a row of tokens, by its index in a split."""


class View(Protocol):
    """Turns an image or a text into a model's input; the generator is its only source of randomness."""

    @property
    def name(self) -> str: ...

    def __call__(self, opened: Any, rng: torch.Generator, /) -> Tensor:
        """Return uint8 pixels, 3 x height x width, for an image; a row of tokens for a text."""
        ...

    def finish(self, stack: Tensor, /) -> Tensor:
        """Return a stack of these as the model's input."""
        ...

    def lengths(self, items: Items, /) -> Sequence[int] | None:
        """Return the length of every item as the model's input; None if all have one size."""
        ...


@dataclass(frozen=True)
class Batch:
    """Items of a split, once for every view."""

    views: tuple[Tensor, ...]
    labels: Tensor | None
    """Always None for an unlabelled split."""
    indices: tuple[int, ...]
    """Positions in the split."""

    @property
    def inputs(self) -> Tensor:
        """The first view, as the model takes it."""
        return self.views[0]

    def __len__(self) -> int:
        return len(self.indices)


@final
class Batches:
    """One pass over a split. The order depends on (seed, epoch, image), views also on view and visit."""

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
        """``order`` lists the indices to visit; default: all, in random order if ``shuffle``."""
        self.split = split
        self.views = views
        self.size = size
        self.workers = workers
        self.order = list(order) if order is not None else _order(split, shuffle, seed, epoch)
        self._items = _Items(split, views, seed, epoch)

    def __len__(self) -> int:
        return -(-len(self.order) // self.size)

    def __iter__(self) -> Iterator[Batch]:
        return (batch for (batch,) in together(self, workers=self.workers))

    def groups(self) -> list[list[tuple[int, int]]]:
        """Return the indices of every batch, each with the number of earlier visits to it."""
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


def loader(
    split: Split,
    *views: View,
    batch_size: int = 256,
    shuffle: bool = False,
    seed: int = 0,
    workers: int = 0,
) -> Batches:
    """Return an iterable over the batches of a split, for a training loop of your own.

    A batch has ``inputs`` (the first view), ``views``, ``labels`` and ``indices``. Random augmentation is
    seeded by (seed, epoch, item, view), so it does not depend on the number of workers::

        for batch in aniso.data.loader(task.train, model.transforms.few_shot, batch_size=32, shuffle=True):
            loss = cross_entropy(weights.logits(model(batch.inputs)), batch.labels)
    """
    return Batches(split, *views, size=batch_size, shuffle=shuffle, seed=seed, workers=workers)


def together(*passes: Batches, workers: int = 0, start: int = 0) -> Generator[tuple[Batch, ...], None, None]:
    """Iterate over several passes of equal length in parallel, a batch of each, with the same workers.

    The first ``start`` steps are skipped without reading an image, for resumed runs.
    """
    steps = list(zip(*(batches.groups() for batches in passes), strict=True))[start:]
    loader = DataLoader(
        _Joint([batches._items for batches in passes]),
        batch_sampler=[[(w, *place) for w, group in enumerate(step) for place in group] for step in steps],
        num_workers=workers,
        collate_fn=_stacked,
        generator=torch.Generator(),  # else it would draw from the global one
        prefetch_factor=4 if workers else None,
        worker_init_fn=_leave_signals_to_the_parent,
    )
    for step, stacks in zip(steps, loader, strict=True):
        if isinstance(stacks, AnisoError):  # torch would rebuild it from its text alone, and fail
            raise stacks
        yield tuple(
            batches.finished(group, views) for batches, group, views in zip(passes, step, stacks, strict=True)
        )


def _leave_signals_to_the_parent(worker: int) -> None:
    """Ignore Ctrl-C in workers: it reaches all processes of a terminal, and the parent handles it."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # a scheduler may send SIGTERM to all; but torch sends it, too, to workers that hang
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_GRACE))


_GRACE = 30  # seconds for the parent to finish its step


@final
class _Joint(Dataset[tuple[int, tuple[Tensor, ...] | AnisoError]]):
    """Items of several passes; a key names the pass, the index and the visit."""

    def __init__(self, parts: Sequence[_Items]) -> None:
        self._parts = parts

    def __getitem__(self, place: tuple[int, int, int]) -> tuple[int, tuple[Tensor, ...] | AnisoError]:
        which, index, visit = place
        return which, self._parts[which].views_of(index, visit)


@final
class _Items:
    """Views of one item at a time, without labels; workers get a copy of this."""

    def __init__(self, split: Split | TextDataset, views: tuple[View, ...], seed: int, epoch: int) -> None:
        self._opened: Opened = split.opened if isinstance(split, TextDataset) else split.items.open
        self._keys = split.keys
        self._views = views
        self._words = (seed, epoch)

    def views_of(self, index: int, visit: int) -> tuple[Tensor, ...] | AnisoError:
        """``visit`` is the number of earlier visits to the item in this pass."""
        try:
            item = self._opened(index)
        except AnisoError as e:
            return e
        words = (*self._words, self._keys[index], visit)
        return tuple(view(item, _generator(*words, view.name, n)) for n, view in enumerate(self._views))


def _generator(*words: Hashable) -> torch.Generator:
    return torch.Generator().manual_seed(sampling.number(*words))


def _visits(keys: Sequence[int]) -> list[int]:
    """Return, for every visit, the number of earlier ones: small splits are repeated within a pass."""
    seen: Counter[int] = Counter()
    out = []
    for key in keys:
        out.append(seen[key])
        seen[key] += 1
    return out


def _stacked(
    samples: list[tuple[int, tuple[Tensor, ...] | AnisoError]],
) -> list[tuple[Tensor, ...]] | AnisoError:
    """Return the stacks of every pass, one for each view."""
    grouped: dict[int, list[tuple[Tensor, ...]]] = {}
    for which, views in samples:
        if isinstance(views, AnisoError):
            return views
        grouped.setdefault(which, []).append(views)
    return [tuple(stack_padded(views) for views in zip(*grouped[w], strict=True)) for w in sorted(grouped)]


def by_length(split: Split, view: View) -> list[int] | None:
    """Return the indices of a split by length, so that little of a batch is padding; None for images."""
    lengths = view.lengths(split.items)
    return None if lengths is None else sorted(range(len(lengths)), key=lambda i: (lengths[i], i))


def _order(split: Split | TextDataset, shuffle: bool, seed: int, epoch: int) -> list[int]:
    if not shuffle:
        return list(range(len(split)))
    keys: Any = split.keys
    return sampling.shuffled([str(key) for key in keys], "order", seed, epoch)
