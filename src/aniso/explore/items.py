"""The handful of images or texts whose predictions the desk shows, from files, a task or the page."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from aniso.classes import ClassList
from aniso.data import Items, Labelled
from aniso.data.images import EncodedImages
from aniso.data.items import ChosenItems, Texts
from aniso.errors import ResourceError, UsageError, printable
from aniso.experiments.prediction.thumbnails import small_item

MOST = 24
"""Items on a desk: each costs a forward pass whenever a coefficient moves."""
LONGEST_TEXT = 20_000
LARGEST_IMAGE = 8 << 20
"""Bytes of an uploaded image."""


@final
@dataclass(frozen=True)
class DeskItem:
    """An item with its number, which the page knows it by, its true class if known, and a small copy."""

    number: int
    items: Items
    index: int
    name: str
    label: str | None
    small: bytes | str
    """A JPEG of at most 96 pixels a side, or the beginning of a text."""


@final
class ItemList:
    """The items of a desk; every change has a new version. Safe to use from several threads."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._version = 0
        self._next = 1
        self._items: list[DeskItem] = []
        self._lock = threading.Lock()

    @property
    def all(self) -> tuple[DeskItem, ...]:
        return self.snapshot()[1]

    def snapshot(self) -> tuple[int, tuple[DeskItem, ...]]:
        """Return the version and the items of now."""
        with self._lock:
            return self._version, tuple(self._items)

    def add(self, items: Items, index: int, name: str, label: str | None = None) -> DeskItem:
        """Decode an item and add it; raises an error if it cannot be read, or there are too many."""
        if items.kind != self.kind:
            raise UsageError(
                "DATA-ITEM", f"the model takes {self.kind}, not {items.kind}", fix=f"add {self.kind}"
            )
        small = small_item(items.open(index))
        with self._lock:
            if len(self._items) >= MOST:
                raise ResourceError(
                    "DATA-ITEM", f"there are {MOST} items already", fix="remove one before adding another"
                )
            item = DeskItem(self._next, items, index, printable(name, 120), label, small)
            self._next += 1
            self._items.append(item)
            self._version += 1
        return item

    def add_image(self, content: bytes, name: str) -> DeskItem:
        """Add an encoded image; a broken one, or one that would take too much memory, is refused."""
        return self.add(EncodedImages([content], [printable(name, 120)]), 0, name)

    def add_text(self, text: str) -> DeskItem:
        """Add a text."""
        if not text.strip() or len(text) > LONGEST_TEXT:
            raise UsageError(
                "DATA-ITEM",
                "the text is empty" if not text.strip() else f"the text has {len(text):,} letters",
                expected=f"1 to {LONGEST_TEXT:,} letters",
                fix="write a text, or a shorter one",
            )
        return self.add(Texts([text], ["text"], ["text"]), 0, "text")

    def add_all(self, split: Labelled, count: int) -> None:
        """Add the first items of a split, with their classes."""
        for i in range(min(count, len(split))):
            self.add(split.items, i, split.items.ids[i], split.classes.names[split.labels[i]])

    def remove(self, number: int) -> None:
        """Remove an item; one that is not there is no error, since another tab may have removed it."""
        with self._lock:
            self._items = [item for item in self._items if item.number != number]
            self._version += 1


def as_split(items: Sequence[DeskItem], classes: Sequence[str]) -> Labelled:
    """Return items as a split, for the functions that make batches; its labels mean nothing."""
    chosen = ChosenItems([item.items for item in items], [(i, item.index) for i, item in enumerate(items)])
    return Labelled("items", ClassList(tuple(classes)), chosen, (0,) * len(items))
