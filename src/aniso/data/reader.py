"""The interface of readers: how a dataset lies on disk, and how to tell that a directory is laid out so."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from aniso.data.part import Reading
from aniso.errors import InputError
from aniso.registry import READERS


class Reader(ABC):
    """Lists the images and labels of datasets in one layout; it decodes no image.

    A reader is one file in ``data/readers``, or an entry point of the group ``aniso.readers``::

        @READERS.register("folder")
        class FolderReader(Reader):
            ...

    A task card chooses it by ``kind = "folder"`` in ``[reader]``.
    """

    priority: ClassVar[int] = 0
    """Of several readers that recognise a path, the one with the highest priority reads it."""

    @abstractmethod
    def read(self, root: Path, settings: Mapping[str, object]) -> Reading:
        """List every part of the dataset at ``root``; all parts have the same classes in the same order.

        ``settings`` are the keys of ``[reader]`` in the task card, without ``kind`` and ``fetch``.
        """

    def recognises(self, path: Path) -> bool:
        """True if a dataset at ``path`` can be read without a task card."""
        return False

    def fetch(self, root: Path, settings: Mapping[str, object]) -> None:
        """Download the dataset to where ``read`` looks for it."""
        raise InputError(
            "DATA-MISSING",
            f"aniso knows no address to download datasets of kind '{READERS.name_of(type(self))}' from",
            fix="see the homepage in the task's card",
        )
