"""Pairs of items, of one class or of two: what contrastive fine-tuning learns from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, cycle, islice
from typing import Any, Literal, final

import torch
from torch import Tensor

from aniso.classes import ClassList
from aniso.data import sampling
from aniso.data.batches import View
from aniso.data.items import Items
from aniso.data.splits import Labelled
from aniso.errors import UsageError, printable

Sampling = Literal["iterations", "oversampling"]
DIFFERENT, SAME = 0, 1
_CLASSES = ClassList(("different", "same"), ("{}",))
_Pair = tuple[int, int]


@final
class PairedItems(Items):
    """Pairs of other items; opening one gives both. A pair may occur several times."""

    def __init__(self, items: Items, pairs: Sequence[_Pair]) -> None:
        self._items = items
        self._pairs = tuple(pairs)
        self.kind = items.kind
        names = items.ids
        self._ids = tuple(f"{i} {names[one]}\x1f{names[other]}" for i, (one, other) in enumerate(self._pairs))

    @property
    def ids(self) -> Sequence[str]:
        return self._ids

    def describe(self, index: int) -> str:
        return " and ".join(self._items.describe(i) for i in self._pairs[index])

    def content(self, index: int) -> bytes:
        one, other = (self._items.content(i) for i in self._pairs[index])
        return len(one).to_bytes(8, "big") + one + other

    def open(self, index: int) -> tuple[Any, Any]:
        one, other = self._pairs[index]
        return self._items.open(one), self._items.open(other)


@final
@dataclass(frozen=True)
class OfPair:
    """The view of one item of a pair."""

    view: View
    place: int
    """0 for the first item, 1 for the second."""

    @property
    def name(self) -> str:
        return self.view.name

    def __call__(self, opened: tuple[Any, Any], rng: torch.Generator) -> Tensor:
        return self.view(opened[self.place], rng)

    def finish(self, stack: Tensor) -> Tensor:
        return self.view.finish(stack)

    def lengths(self, items: Items) -> None:
        """Pairs are not sorted by length."""


def pairs(split: Labelled, how: Sampling = "iterations", *, iterations: int = 20, seed: int = 0) -> Labelled:
    """Return pairs of a split's items with the labels 1, of one class, and 0, of two classes.

    With ``iterations``, every item is paired so often with a random other item of its class, and as often
    with a random item of another class. With ``oversampling`` every pair occurs, and those of the rarer kind
    are repeated until there are as many as of the other. An item is never paired with itself, so a class with
    a single item has no pairs of its own.
    """
    if iterations < 1 or how not in ("iterations", "oversampling"):
        raise UsageError(
            "OBJECTIVE",
            f"pairs cannot be drawn by '{printable(how)}', {iterations} times",
            expected="iterations or oversampling; at least one iteration",
            fix="iterations=20",
        )
    groups = sampling.by_class(split.labels, sorted(range(len(split)), key=lambda i: split.ids[i]))
    if len(groups) < 2:
        raise UsageError(
            "OBJECTIVE",
            f"pairs of {split.name} need {split.item_kind} of at least two classes",
            found=f"{len(groups)} classes",
            fix="use a split with more classes",
        )
    drawn = _every_pair(split, groups, seed) if how == "oversampling" else None
    found = drawn or list(_random_pairs(split, groups, iterations, seed))
    same = tuple(SAME if split.labels[a] == split.labels[b] else DIFFERENT for a, b in found)
    drawing = f"{how} {iterations}" if how == "iterations" else how
    name = f"{split.name} (pairs, {drawing}, seed {seed})"
    return Labelled(name, _CLASSES, PairedItems(split.items, found), same, split.role)


def _random_pairs(
    split: Labelled, groups: dict[int, list[int]], iterations: int, seed: int
) -> Iterator[_Pair]:
    """Yield for every item of the split, in every iteration, a pair of each kind."""
    everything = [i for members in groups.values() for i in members]
    others = {label: [i for i in everything if split.labels[i] != label] for label in groups}
    for number in range(iterations):
        for i in everything:
            label = split.labels[i]
            for kind, members in (("same", groups[label]), ("different", others[label])):
                candidates = [j for j in members if j != i]
                if candidates:
                    draw = sampling.number("pair", seed, number, split.ids[i], kind)
                    yield i, candidates[draw % len(candidates)]


def _every_pair(split: Labelled, groups: dict[int, list[int]], seed: int) -> list[_Pair]:
    everything = [i for members in groups.values() for i in members]
    kinds: dict[bool, list[_Pair]] = {True: [], False: []}
    for pair in combinations(everything, 2):
        kinds[split.labels[pair[0]] == split.labels[pair[1]]].append(pair)
    most = max(map(len, kinds.values()))
    out = []
    for same, found in kinds.items():
        names = [f"{split.ids[a]}\x1f{split.ids[b]}" for a, b in found]
        shuffled = [found[k] for k in sampling.shuffled(names, "pair", seed, same)]
        out += list(islice(cycle(shuffled), most if found else 0))
    return out
