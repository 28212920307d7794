"""What a split's images hold, to the byte: one hash for all, and lists by which changed files are named."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import final

from aniso.data.splits import Labelled, Split
from aniso.errors import printable
from aniso.json_value import JsonObject
from aniso.progress import ProgressCallback
from aniso.weights.atomic import make_directory, write_text
from aniso.weights.caches import HashCache, cache_directory

IMAGES = "images"
"""The directory of a run, or of records, in which such lists are kept."""
_DIGITS = 16  # of a hash in a list
_NAMED = 5  # changed files in a message
_QUICK = 0.5  # seconds of hashing before there is any talk of it
_CACHE: dict[str, HashCache] = {}


def content_hashes(split: Split, progress: ProgressCallback | None = None) -> tuple[bytes, ...]:
    """sha256 of every image of a split. Files are read once; unchanged ones are remembered across runs."""
    cache, begun = _cache(), time.monotonic()
    found = []
    for i in range(len(split)):
        found.append(split.images.content_hash(i, cache))
        if progress and time.monotonic() - begun > _QUICK:
            progress(f"hashing the images of {split.name}", i + 1, len(split))
    cache.save()
    return tuple(found)


def content_hash(split: Split, progress: ProgressCallback | None = None) -> str:
    """One hash that changes whenever an image of the split comes, goes or changes in a single byte."""
    return _combined(split, content_hashes(split, progress))


def _combined(split: Split, hashes: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for number, one in zip(split.keys, hashes, strict=True):
        digest.update(f"{number} ".encode() + one)
    return digest.hexdigest()


@final
class ImageLists:
    """A directory of lists, one for every content that a split has had: which image had which hash."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def keep(self, splits: Iterable[Split]) -> None:
        """Write the lists of splits as they are now."""
        for split in splits:
            hashes = content_hashes(split)
            path = self._path(_combined(split, hashes))
            if not path.exists():
                make_directory(self._directory)
                content = {"split": split.name, "images": dict(_pairs(split, hashes))}
                write_text(path, json.dumps(content, indent=0, sort_keys=True) + "\n", overwrite=True)

    def changes(self, before: str, split: Split) -> list[str]:
        """Name the images of a split that were others when its content had the hash ``before``."""
        then = self._read(before)
        if then is None:
            return [f"images of {printable(split.name)}"]
        now = list(_pairs(split, content_hashes(split)))
        changed = [
            _label(split, i) for i, (name, value) in enumerate(now) if then.get(name) not in (None, value)
        ]
        added = [f"{_label(split, i)} (new)" for i, (name, _) in enumerate(now) if name not in then]
        gone = [f"{printable(name)} (gone)" for name in then.keys() - dict(now).keys()]
        every = [*changed, *added, *sorted(gone)]
        more = [f"{len(every) - _NAMED} more of {printable(split.name)}"] if len(every) > _NAMED else []
        return [*every[:_NAMED], *more]

    def _read(self, content: str) -> JsonObject | None:
        try:
            found = json.loads(self._path(content).read_text())["images"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if isinstance(found, dict) else None

    def _path(self, content: str) -> Path:
        return self._directory / f"{content[:_DIGITS]}.json"


def _pairs(split: Split, hashes: Sequence[bytes]) -> Iterable[tuple[str, str]]:
    return ((name, one.hex()[:_DIGITS]) for name, one in zip(split.images.ids, hashes, strict=True))


def _label(split: Split, index: int) -> str:
    if isinstance(split, Labelled):
        return printable(split.images.label(index))
    return printable(split.images.file_label(index))


def _cache() -> HashCache:
    """The cache of this process for the directory that is set now."""
    directory = cache_directory("content")
    return _CACHE.setdefault(str(directory), HashCache(directory))
