"""A full check of a task: every item opened, every pair of splits compared."""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from dataclasses import dataclass
from itertools import combinations

from PIL import Image

from aniso.data.decode import FORMATS
from aniso.data.splits import Labelled
from aniso.data.task import Task
from aniso.errors import AnisoError
from aniso.json_value import JsonObject
from aniso.progress import ProgressCallback


@dataclass(frozen=True)
class Audit:
    """The result of ``audit``."""

    kinds: dict[str, Counter[str]]
    """Counts of image format, mode and size, by split."""
    unreadable: list[str]
    by_split: dict[str, int]
    shared: dict[tuple[str, str], int]
    """The number of byte-identical images, by pair of splits."""

    def rows(self) -> list[tuple[object, ...]]:
        return [
            (
                role,
                sum(kinds.values()) + self.by_split[role],
                self.by_split[role],
                ", ".join(f"{n:,} {kind}" for kind, n in kinds.most_common(3))
                + (" …" if len(kinds) > 3 else ""),
            )
            for role, kinds in self.kinds.items()
        ]

    def warnings(self) -> list[str]:
        return [
            f"warning: {count} images are in both {a} and {b}, byte for byte"
            for (a, b), count in self.shared.items()
            if count
        ]

    def as_dict(self) -> JsonObject:
        return {
            "kinds": {role: dict(kinds) for role, kinds in self.kinds.items()},
            "unreadable": self.unreadable,
            "shared": [{"splits": list(pair), "pictures": count} for pair, count in self.shared.items()],
        }


def audit(task: Task, progress: ProgressCallback | None = None) -> Audit:
    """Decode every image of a task and compare its splits."""
    kinds, contents, bad, by_split = {}, {}, [], {}
    for role, split in task.splits.items():
        kinds[role], contents[role], wrong = _look(split, progress)
        by_split[role] = len(wrong)
        bad += wrong
    shared = {(a, b): len(contents[a] & contents[b]) for a, b in combinations(contents, 2)}
    return Audit(kinds, bad, by_split, shared)


def _look(split: Labelled, progress: ProgressCallback | None) -> tuple[Counter[str], set[bytes], list[str]]:
    kinds: Counter[str] = Counter()
    contents, bad = set(), []
    for i in range(len(split)):
        try:
            data = split.items.content(i)
            contents.add(hashlib.sha256(data).digest())
            kinds[_kind(split, i, data)] += 1
        except AnisoError as e:
            bad.append(e.message)
        if progress:
            progress(f"decoding {split.name}", i + 1, len(split))
    return kinds, contents, bad


def _kind(split: Labelled, index: int, data: bytes) -> str:
    """Decode an image as it will be used, and return its format on disk."""
    image = split.open(index)
    if isinstance(image, str):
        return "text"
    try:
        raw = Image.open(io.BytesIO(data), formats=FORMATS)
    except OSError:  # pixels stored without a format
        return f"RGB {image.width}x{image.height}"
    return f"{raw.format} {raw.mode} {raw.width}x{raw.height}"
