"""Splits: items (images or texts) with labels, and items without labels by type."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, final

from torch.utils.data import Dataset

from aniso.classes import ClassList
from aniso.data import sampling
from aniso.data.items import ChosenItems, Items, NamelessItems
from aniso.errors import InputError, UsageError, printable


@final
@dataclass(frozen=True, eq=False, repr=False)
class Unlabelled(Dataset[Any]):
    """Items and the classes they may belong to, without labels and without file names.

    File names are left out because folders are often named after the class.
    """

    name: str
    classes: ClassList
    items: NamelessItems
    default_batch_size: ClassVar[int] = 256

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return f"Unlabelled({self.name}: {len(self)} {self.item_kind}, {len(self.classes)} possible classes)"

    @property
    def item_kind(self) -> str:
        """What messages call the items: images or texts."""
        return self.items.kind

    def __getitem__(self, index: int) -> Any:
        return self.items.open(_checked(index, len(self)))

    def open(self, index: int) -> Any:
        """Return an item: an RGB image, or a text."""
        return self.items.open(index)

    def describe(self, index: int) -> str:
        """Return the path of an item, or another name for messages."""
        return self.items.describe(index)

    @cached_property
    def keys(self) -> tuple[int, ...]:
        """The number that seeds random choices about each item."""
        return tuple(int(name, 16) for name in self.items.ids)

    @cached_property
    def manifest(self) -> str:
        """A hash that changes whenever an item is added or removed."""
        return _digest(sorted(self.items.ids))

    def take(self, indices: Iterable[int], what: str = "") -> Unlabelled:
        """Return the split of these items, in this order; ``what`` is added to the name."""
        name = f"{self.name} ({what})" if what else self.name
        return Unlabelled(name, self.classes, self.items.take(indices))

    def carve(self, *words: Hashable, share: float, what: str = "") -> tuple[Unlabelled, Unlabelled]:
        """Divide into two disjoint splits, drawn by item alone: a share of the items, and the rest.

        Smaller shares are part of larger ones; ``what`` is added to the name of the first split.
        """
        order = sampling.shuffled(self.items.ids, *words)
        count = round(share * len(self))
        return self.take(sorted(order[:count]), what), self.take(sorted(order[count:]))


@final
@dataclass(frozen=True, eq=False, repr=False)
class Labelled(Dataset[tuple[Any, int]]):
    """Items and, for each, the index of its class.

    Selections return another split::

        few = task.train.shots(4, seed=0)     # 4 items per class
        part = task.train.fraction(0.25)      # a quarter of every class
        target = task.test.unlabelled()       # the same items without labels

    A split is a PyTorch dataset of pairs (item, label). ``aniso.data.loader`` gives batches of tensors.
    """

    name: str
    classes: ClassList
    items: Items
    labels: tuple[int, ...]
    role: str = ""
    """train, val or test, if the split is a task's; a test split may not be learned from or selected by."""
    default_batch_size: ClassVar[int] = 256
    """The batch size for evaluation if none is given."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        place = _checked(index, len(self))
        return self.items.open(place), self.labels[place]

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return f"Labelled({self.name}: {len(self)} {self.item_kind}, {len(self.classes)} classes)"

    @property
    def item_kind(self) -> str:
        """What messages call the items: images or texts."""
        return self.items.kind

    def open(self, index: int) -> Any:
        """Return an item: an RGB image, or a text."""
        return self.items.open(index)

    def describe(self, index: int) -> str:
        """Return the path of an item, or another name for messages."""
        return self.items.describe(index)

    @property
    def ids(self) -> Sequence[str]:
        return self.items.ids

    @cached_property
    def keys(self) -> tuple[int, ...]:
        """The number that seeds random choices about each item."""
        return tuple(sampling.number(name) for name in self.ids)

    @cached_property
    def counts(self) -> dict[str, int]:
        """The number of items of every class, including classes without any."""
        counts = Counter(self.labels)
        return {name: counts[i] for i, name in enumerate(self.classes.names)}

    @cached_property
    def manifest(self) -> str:
        """A hash that changes whenever an item is added, removed or relabelled."""
        named = (
            f"{name}\0{self.classes.names[label]}" for name, label in zip(self.ids, self.labels, strict=True)
        )
        return _digest(sorted(named))

    def unlabelled(self) -> Unlabelled:
        """Return the same items without labels and file names."""
        return Unlabelled(self.name, self.classes, NamelessItems(self.items))

    def shots(self, k: int, seed: int = 0, *, allow_fewer: bool = False) -> Labelled:
        """Return ``k`` items of every class; with one seed, 2 shots are among the 4 shots.

        A class with fewer than ``k`` items raises an error, unless ``allow_fewer``.
        """
        if k < 1:
            raise UsageError("DATA-SHOTS", f"invalid shots: {k}", expected="1 or more", fix="--shots 1")
        short = {name: n for name, n in self.counts.items() if n < k}
        if short and not allow_fewer:
            raise InputError(
                "DATA-SHOTS",
                f"{self.name} has fewer than {k} {self.item_kind} of {len(short)} classes",
                found=[f"{printable(name, 40)}: {n}" for name, n in list(short.items())[:10]],
                more=f"{len(short) - 10} more classes" if len(short) > 10 else "",
                fix="use fewer shots, or --allow-fewer-shots to use all items of these classes",
            )
        chosen = sampling.per_class(self.ids, self.labels, k, "shots", seed)
        return self.take(chosen, f"{k} shots, seed {seed}")

    def fraction(self, share: float, seed: int = 0) -> Labelled:
        """Return a share of the items of every class; smaller shares are part of larger ones."""
        if not 0 < share <= 1:
            raise UsageError(
                "DATA-SHOTS",
                f"invalid fraction {share}",
                expected="above 0, at most 1",
                fix="for example 0.25",
            )
        count = round(share * len(self))
        if not count:
            raise InputError(
                "DATA-SHOTS",
                f"a fraction {share:g} of {self.name} is less than one of its {self.item_kind}",
                found=f"{len(self)} {self.item_kind}",
                fix=f"use at least {1 / max(1, len(self)):.2g}",
            )
        chosen = sampling.stratified(self.ids, self.labels, count, "fraction", seed)
        return self.take(chosen, f"{share:.2%}, seed {seed}")

    def take(self, indices: Iterable[int], what: str = "") -> Labelled:
        """Return the split of these items, in this order; ``what`` is added to the name."""
        chosen = list(indices)
        items = ChosenItems([self.items], [(0, i) for i in chosen])
        name = f"{self.name} ({what})" if what else self.name
        return Labelled(name, self.classes, items, tuple(self.labels[i] for i in chosen), self.role)

    def without(self, indices: Iterable[int]) -> Labelled:
        """Return the split without these items."""
        left_out = set(indices)
        return self.take(i for i in range(len(self)) if i not in left_out)

    def carve(
        self,
        *words: Hashable,
        share: float | None = None,
        most: int | None = None,
        per_class: int | None = None,
    ) -> tuple[Labelled, Labelled]:
        """Divide into two disjoint splits, drawn by class: the selected items, and the rest."""
        if per_class is not None:
            chosen = sampling.per_class(self.ids, self.labels, per_class, *words)
        else:
            wanted = len(self) if share is None else round(share * len(self))
            count = min(wanted, most) if most is not None else wanted
            chosen = sampling.stratified(self.ids, self.labels, count, *words)
        return self.take(chosen), self.without(chosen)

    def unlabelled_folds(self, count: int, seed: int = 0) -> list[list[int]]:
        """Return ``count`` disjoint groups of places of items, drawn by item alone: no label is read."""
        order = sampling.shuffled(NamelessItems(self.items).ids, "folds", seed)
        return [sorted(order[i::count]) for i in range(min(count, len(order)))]

    def folds(self, count: int, seed: int = 0) -> list[tuple[Labelled, Labelled]]:
        """Return pairs of splits for cross-validation: all but one group of items, and that group.

        Groups have equal shares of every class. The first split of a pair has items of every class that has
        any; the only item of a class is therefore never in the second one.
        """
        groups = sampling.folds(self.ids, self.labels, count, "folds", seed)
        return [
            (self.without(group), self.take(group, f"fold {i} of {len(groups)}"))
            for i, group in enumerate(groups, 1)
        ]


def _checked(index: int, length: int) -> int:
    """The place that an index means; IndexError ends a loop over a split, as over a list."""
    if not -length <= index < length:
        raise IndexError(f"index {index} of a split of {length} items")
    return index % length


def joined(name: str, splits: Sequence[Labelled]) -> Labelled:
    """Concatenate several splits of one task."""
    if len(splits) == 1:
        return Labelled(name, splits[0].classes, splits[0].items, splits[0].labels)
    pairs = [(which, i) for which, split in enumerate(splits) for i in range(len(split))]
    items = ChosenItems([split.items for split in splits], pairs)
    return Labelled(
        name, splits[0].classes, items, tuple(label for split in splits for label in split.labels)
    )


Split = Labelled | Unlabelled


def _digest(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()
