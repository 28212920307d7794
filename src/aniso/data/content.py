"""Hashes of a split's images: one for the split, and lists from which changed files are named."""

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
"""The folder of a run directory in which these lists are stored."""
_DIGITS = 16  # of a hash in a list
_NAMED = 5  # changed files in a message
_QUICK = 0.5  # seconds of hashing before progress is shown
_CACHE: dict[str, HashCache] = {}


def content_hashes(split: Split, progress: ProgressCallback | None = None) -> tuple[bytes, ...]:
    """Return the sha256 of every image of a split; hashes of unchanged files are cached across runs."""
    cache, begun = _cache(), time.monotonic()
    found = []
    for i in range(len(split)):
        found.append(split.items.content_hash(i, cache))
        if progress and time.monotonic() - begun > _QUICK:
            progress(f"hashing the images of {split.name}", i + 1, len(split))
    cache.save()
    return tuple(found)


def content_hash(split: Split, progress: ProgressCallback | None = None) -> str:
    """Return a hash that changes whenever an image is added, removed or changed."""
    return _combined(split, content_hashes(split, progress))


def _combined(split: Split, hashes: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for number, one in zip(split.keys, hashes, strict=True):
        digest.update(f"{number} ".encode() + one)
    return digest.hexdigest()


@final
class ImageLists:
    """A directory of JSON lists of image hashes, one for every content that a split has had."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def keep(self, splits: Iterable[Split]) -> None:
        """Write the lists of the splits' current content."""
        for split in splits:
            hashes = content_hashes(split)
            path = self._path(_combined(split, hashes))
            if not path.exists():
                make_directory(self._directory)
                content = {"split": split.name, "images": dict(_pairs(split, hashes))}
                write_text(path, json.dumps(content, indent=0, sort_keys=True) + "\n", overwrite=True)

    def changes(self, before: str, split: Split) -> list[str]:
        """Return the images of a split that changed since its content hash was ``before``."""
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
    return ((name, one.hex()[:_DIGITS]) for name, one in zip(split.items.ids, hashes, strict=True))


def _label(split: Split, index: int) -> str:
    if isinstance(split, Labelled):
        return printable(split.items.describe(index))
    return printable(split.items.describe_file(index))


def _cache() -> HashCache:
    """Return this process's cache for the current cache directory."""
    directory = cache_directory("content")
    return _CACHE.setdefault(str(directory), HashCache(directory))
