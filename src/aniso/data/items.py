"""Items of tasks, images or texts: opened one at a time and without labels."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, final

from aniso.data import sampling
from aniso.weights.caches import HashCache


class Items(ABC):
    """A sequence of images or texts without labels, opened when they are used."""

    kind: str = "images"
    """What messages call the items: images or texts."""

    @property
    @abstractmethod
    def ids(self) -> Sequence[str]:
        """A name for every item: unique, and the same on every machine."""

    @abstractmethod
    def content(self, index: int) -> bytes:
        """Return the encoded bytes of an item, which identify it."""

    @abstractmethod
    def open(self, index: int) -> Any:
        """Return an item as views take it: an RGB image, or a text."""

    def content_hash(self, index: int, cache: HashCache) -> bytes:
        """Return the sha256 of the item's content; ``cache`` remembers it until the file changes."""
        return hashlib.sha256(self.content(index)).digest()

    def describe(self, index: int) -> str:
        """Return the path of an item, or another name for messages."""
        return self.ids[index]

    def __len__(self) -> int:
        return len(self.ids)


@final
class Texts(Items):
    """Texts in memory, each with an id and the file and line it comes from."""

    kind = "texts"

    def __init__(self, texts: Sequence[str], ids: Sequence[str], places: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._ids = tuple(ids)
        self._places = tuple(places)

    @property
    def ids(self) -> Sequence[str]:
        return self._ids

    def describe(self, index: int) -> str:
        return self._places[index]

    def content(self, index: int) -> bytes:
        return self._texts[index].encode("utf-8", "surrogatepass")

    def open(self, index: int) -> str:
        return self._texts[index]


@final
class ChosenItems(Items):
    """A selection of other items, in any order; nothing is copied."""

    def __init__(self, items: Sequence[Items], chosen: Sequence[tuple[int, int]]) -> None:
        """``chosen`` are pairs: the position in ``items``, and the index of an item in it."""
        self._items = tuple(items)
        self._chosen = tuple(chosen)
        self._ids = tuple(items[which].ids[index] for which, index in chosen)
        self.kind = items[0].kind

    @property
    def ids(self) -> Sequence[str]:
        return self._ids

    def describe(self, index: int) -> str:
        which, inner = self._chosen[index]
        return self._items[which].describe(inner)

    def content(self, index: int) -> bytes:
        which, inner = self._chosen[index]
        return self._items[which].content(inner)

    def content_hash(self, index: int, cache: HashCache) -> bytes:
        which, inner = self._chosen[index]
        return self._items[which].content_hash(inner, cache)

    def open(self, index: int) -> Any:
        which, inner = self._chosen[index]
        return self._items[which].open(inner)


@final
class NamelessItems(Items):
    """Other items under numbers, because paths are often named after the class."""

    def __init__(self, items: Items) -> None:
        self.__items = items
        self._ids = tuple(f"{sampling.number(name):016x}" for name in items.ids)
        self.kind = items.kind

    @property
    def ids(self) -> Sequence[str]:
        return self._ids

    def take(self, indices: Iterable[int]) -> NamelessItems:
        """Return these items, in this order, under the numbers that they have here."""
        return NamelessItems(ChosenItems([self.__items], [(0, i) for i in indices]))

    def content(self, index: int) -> bytes:
        return self.__items.content(index)

    def content_hash(self, index: int, cache: HashCache) -> bytes:
        return self.__items.content_hash(index, cache)

    def describe_file(self, index: int) -> str:
        """Return the file's name, for error messages alone: it often names the class."""
        return self.__items.describe(index)

    def revealed_id(self, index: int) -> str:
        """Return the item's own id, for output after learning has ended: it often names the class."""
        return self.__items.ids[index]

    def open(self, index: int) -> Any:
        return self.__items.open(index)  # an error still names the file
