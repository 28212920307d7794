"""Which files a result was made from, to the byte, and which of them have changed since."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from aniso.data import IMAGES, ImageLists, Split, content_hash
from aniso.errors import printable
from aniso.progress import ProgressCallback
from aniso.weights.files import RawFile

KnownHashes = dict[int, tuple[Split | Path, str]]
"""By ``id()``; what has that id is kept, too, so that nothing else can get it."""


@final
@dataclass(frozen=True)
class Content:
    """The splits of images and the text files that one result depends on."""

    learned: tuple[Split | Path, ...]
    """What was learned from, or chosen by."""
    measured: tuple[Split | Path, ...]

    def hashes(self, progress: ProgressCallback | None = None) -> dict[str, dict[str, str]]:
        """A hash for every split and file, as records hold it."""
        return {
            "learned": {_name(one): _hash(one, progress) for one in self.learned},
            "measured": {_name(one): _hash(one, progress) for one in self.measured},
        }

    def keep(self, directory: Path) -> None:
        """Write down which image has which hash, so that changed files can be named later."""
        ImageLists(directory / IMAGES).keep(self._splits())

    def changes(
        self, before: Mapping[str, Mapping[str, str]], directory: Path, known: KnownHashes | None = None
    ) -> list[str]:
        """Name the files that changed since a record said that they had the hashes ``before``.

        ``known`` are hashes of splits that were computed already, for when many results are compared at once.
        """
        lists = ImageLists(directory / IMAGES)
        known = {} if known is None else known
        out: dict[str, None] = {}
        for part, found in (("learned", self.learned), ("measured", self.measured)):
            for one in found:
                then = before.get(part, {}).get(_name(one))
                if then is None:
                    continue
                if id(one) not in known:
                    known[id(one)] = (one, _hash(one))
                if then != known[id(one)][1]:
                    named = [printable(one)] if isinstance(one, Path) else lists.changes(then, one)
                    out |= dict.fromkeys(named)
        return list(out)

    def _splits(self) -> Iterable[Split]:
        return [one for one in (*self.learned, *self.measured) if not isinstance(one, Path)]


def _name(one: Split | Path) -> str:
    return one.name


def _hash(one: Split | Path, progress: ProgressCallback | None = None) -> str:
    return RawFile(one).sha256() if isinstance(one, Path) else content_hash(one, progress)
