"""The result of a reader: items and the names of their classes as on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aniso.data.items import Items
from aniso.errors import InputError, printable


@dataclass(frozen=True)
class Part:
    """One part of a dataset, such as its training items; none is opened."""

    items: Items
    classes: tuple[str, ...]
    """All class names of the dataset as on disk; a class may have no item in this part."""
    codes: tuple[int, ...]
    """The class index of every item."""

    def __post_init__(self) -> None:
        if len(self.codes) != len(self.items):
            raise ValueError(f"{len(self.codes)} labels for {len(self.items)} items")
        wrong = [i for i, code in enumerate(self.codes) if not 0 <= code < len(self.classes)]
        if wrong:
            raise InputError(
                "DATA-LABEL",
                f"{len(wrong)} of {len(self.codes)} labels are no class index",
                found=[f"{self.items.describe(i)}: {self.codes[i]}" for i in wrong[:5]],
                expected=f"0 to {len(self.classes) - 1}",
                fix="correct the labels, or the list of classes",
            )


@dataclass(frozen=True)
class Reading:
    """All parts of a dataset, with notes."""

    parts: Mapping[str, Part]
    notes: tuple[str, ...] = ()
    """Sentences on files that were ignored, and why."""
    prompts: tuple[str, ...] = ()
    descriptions: tuple[str, ...] = ()
    """One phrase per class of the parts, which prompts are filled with."""


def coded(names: Sequence[str], order: Sequence[str]) -> tuple[int, ...]:
    """Return the class indices of class names."""
    place = {name: i for i, name in enumerate(order)}
    unknown = sorted(set(names) - place.keys())
    if unknown:
        raise InputError(
            "DATA-CLASS",
            f"{len(unknown)} classes are not in the list of classes",
            found=printable(", ".join(unknown[:10])),
            expected=printable(", ".join(order[:10])) + (" …" if len(order) > 10 else ""),
            fix="correct the folder names or the list",
        )
    return tuple(place[name] for name in names)
