"""Splits: pictures with labels, and pictures that have none by type."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, final

from PIL import Image

from aniso.classes import ClassList
from aniso.data import sampling
from aniso.data.images import ChosenImages, Images, NamelessImages
from aniso.errors import InputError, UsageError, printable


@final
@dataclass(frozen=True, eq=False, repr=False)
class Unlabelled:
    """Pictures and the names of the classes they may belong to; which one each belongs to is not in here.

    Not even a picture's name is: folders are often named after what they hold.
    """

    name: str
    classes: ClassList
    images: NamelessImages
    things: ClassVar[str] = "pictures"
    at_once: ClassVar[int] = 256

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        return f"Unlabelled({self.name}: {len(self)} images, {len(self.classes)} possible classes)"

    def picture(self, index: int) -> Image.Image:
        return self.images.picture(index)

    def label(self, index: int) -> str:
        """How to speak of a picture."""
        return self.images.label(index)

    @cached_property
    def keys(self) -> tuple[int, ...]:
        """What random choices about each picture are seeded by."""
        return tuple(int(name, 16) for name in self.images.ids)

    @cached_property
    def manifest(self) -> str:
        """Changes whenever a picture comes or goes."""
        return _digest(sorted(self.images.ids))


@final
@dataclass(frozen=True, eq=False, repr=False)
class Labelled:
    """Pictures and, for each, the index of its class."""

    name: str
    classes: ClassList
    images: Images
    labels: tuple[int, ...]
    role: str = ""
    """train, val or test, where a task said so: what may be learned from, or chosen by, is decided by it."""
    things: ClassVar[str] = "pictures"
    """What it holds."""
    at_once: ClassVar[int] = 256
    """How many go through a model together, where nobody says so."""

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        return f"Labelled({self.name}: {len(self)} images, {len(self.classes)} classes)"

    def picture(self, index: int) -> Image.Image:
        return self.images.picture(index)

    def label(self, index: int) -> str:
        """How to speak of a picture."""
        return self.images.label(index)

    @property
    def ids(self) -> Sequence[str]:
        return self.images.ids

    @cached_property
    def keys(self) -> tuple[int, ...]:
        """What random choices about each picture are seeded by."""
        return tuple(sampling.number(name) for name in self.ids)

    @cached_property
    def counts(self) -> dict[str, int]:
        """Pictures of every class, those without any included."""
        found = Counter(self.labels)
        return {name: found[i] for i, name in enumerate(self.classes.names)}

    @cached_property
    def manifest(self) -> str:
        """Changes whenever a picture comes, goes or gets another label."""
        named = (
            f"{name}\0{self.classes.names[label]}" for name, label in zip(self.ids, self.labels, strict=True)
        )
        return _digest(sorted(named))

    # parts of it

    def unlabelled(self) -> Unlabelled:
        """The same pictures without their labels."""
        return Unlabelled(self.name, self.classes, NamelessImages(self.images))

    def shots(self, k: int, seed: int = 0, *, allow_fewer: bool = False) -> Labelled:
        """``k`` pictures of every class; for one seed, fewer shots are part of more."""
        if k < 1:
            raise UsageError("DATA-SHOTS", f"{k} shots are no shots", expected="1 or more", fix="--shots 1")
        short = {name: n for name, n in self.counts.items() if n < k}
        if short and not allow_fewer:
            raise InputError(
                "DATA-SHOTS",
                f"{self.name} has fewer than {k} images of {len(short)} classes",
                found=[f"{printable(name, 40)}: {n}" for name, n in list(short.items())[:10]],
                more=f"{len(short) - 10} more classes" if len(short) > 10 else "",
                fix="ask for fewer shots, or take what there is with --allow-fewer-shots",
            )
        chosen = sampling.per_class(self.ids, self.labels, k, "shots", seed)
        return self.take(chosen, f"{k} shots, seed {seed}")

    def fraction(self, share: float, seed: int = 0) -> Labelled:
        """A share of the pictures, about as large for every class; smaller ones are part of larger ones."""
        if not 0 < share <= 1:
            raise UsageError(
                "DATA-SHOTS", f"{share} is no fraction", expected="above 0, at most 1", fix="for example 0.25"
            )
        count = round(share * len(self))
        if not count:
            raise InputError(
                "DATA-SHOTS",
                f"{share:g} of {self.name} is no image at all",
                found=f"{len(self)} images",
                fix=f"use at least {1 / max(1, len(self)):.2g}",
            )
        chosen = sampling.stratified(self.ids, self.labels, count, "fraction", seed)
        return self.take(chosen, f"{share:.2%}, seed {seed}")

    def take(self, indices: Iterable[int], what: str = "") -> Labelled:
        """The split of these pictures alone, in the order given."""
        chosen = list(indices)
        images = ChosenImages([self.images], [(0, i) for i in chosen])
        name = f"{self.name} ({what})" if what else self.name
        return Labelled(name, self.classes, images, tuple(self.labels[i] for i in chosen), self.role)

    def without(self, indices: Iterable[int]) -> Labelled:
        left_out = set(indices)
        return self.take(i for i in range(len(self)) if i not in left_out)

    def carve(
        self,
        *words: Hashable,
        share: float | None = None,
        most: int | None = None,
        per_class: int | None = None,
    ) -> tuple[Labelled, Labelled]:
        """Two disjoint parts: what is cut out, and what is left."""
        if per_class is not None:
            chosen = sampling.per_class(self.ids, self.labels, per_class, *words)
        else:
            wanted = len(self) if share is None else round(share * len(self))
            count = min(wanted, most) if most is not None else wanted
            chosen = sampling.stratified(self.ids, self.labels, count, *words)
        return self.take(chosen), self.without(chosen)


def joined(name: str, splits: Sequence[Labelled]) -> Labelled:
    """Several splits of one task as one."""
    if len(splits) == 1:
        return Labelled(name, splits[0].classes, splits[0].images, splits[0].labels)
    pairs = [(which, i) for which, split in enumerate(splits) for i in range(len(split))]
    images = ChosenImages([split.images for split in splits], pairs)
    return Labelled(
        name, splits[0].classes, images, tuple(label for split in splits for label in split.labels)
    )


Split = Labelled | Unlabelled


def _digest(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()
