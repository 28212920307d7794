"""Reader of text files that list images, one file per part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from aniso.data.images import FileImages
from aniso.data.part import Part, Reading
from aniso.data.reader import Reader
from aniso.data.readers import settings as given
from aniso.data.readers.labels import by_name, once
from aniso.data.readers.safe_paths import Below, relative
from aniso.data.readers.texts import read_lines
from aniso.errors import InputError, printable
from aniso.item_files import IMAGE_SUFFIXES, suffix
from aniso.registry import READERS

Listed = tuple[str, str, str]
"""An image's path from the root, its class, and the line that names it."""


@READERS.register("lists")
@final
class ListsReader(Reader):
    """Reads text files that list image paths, whose folders are the classes."""

    def read(self, root: Path, settings: Mapping[str, object]) -> Reading:
        """Read lines ``path`` or ``path label`` from the files that ``parts`` names.

        Without a label, the class is the path of the image's folder (``a/apse/indoor``), or the start of the
        file name: ``airport_012.jpg`` is an airport, in the folder of that name or beside the others.
        """
        given.require_known(settings, "images", "parts")
        folder = relative(given.text(settings, "images"), "images")
        files = given.texts(settings, "parts")
        below = Below(root, folder)
        lines = {part: read_lines(root / relative(file, "parts")) for part, file in files.items()}
        return reading(
            root, below, {part: [_listed(below, *line) for line in of] for part, of in lines.items()}
        )


def reading(
    root: Path, below: Below, parts: Mapping[str, Sequence[Listed]], classes: Sequence[str] | None = None
) -> Reading:
    """Build the reading of listed images; each must exist, and repeated lines are dropped."""
    notes: list[str] = []
    kept: dict[str, list[Listed]] = {}
    for part, rows in parts.items():
        if not rows:
            raise InputError(
                "DATA-EMPTY",
                f"the list of {part} in '{printable(root)}' is empty",
                fix="complete the dataset, or leave the part out of the card",
            )
        paths, names, lines = zip(*rows, strict=True)
        first = once(paths, names, lines.__getitem__)
        if len(first) < len(rows):
            notes.append(f"{part}: {len(rows) - len(first):,} repeated lines ignored")
        kept[part] = [rows[i] for i in first]
        below.require([paths[i] for i in first], lambda i, of=kept[part]: of[i][2])  # type: ignore[misc]
    order, codes = by_name({part: [name for _, name, _ in rows] for part, rows in kept.items()}, classes)
    images = {part: FileImages(root, [path for path, _, _ in rows]) for part, rows in kept.items()}
    return Reading({part: Part(images[part], order, codes[part]) for part in parts}, tuple(notes))


def _listed(below: Below, line: str, where: str) -> Listed:
    path, label = line, ""
    if suffix(line) not in IMAGE_SUFFIXES:  # a path may hold spaces
        path, _, label = (piece.strip() for piece in line.rpartition(" "))
        path, label = (path, label) if path else (label, "")
    path = path.removeprefix("/")  # SUN397 writes the folder of the images as /
    folder, _, name = path.rpartition("/")
    if label or folder:
        return below.name(path, where), label or folder, where
    label = name.rpartition("_")[0]
    if not label:
        raise InputError(
            "DATA-LABEL",
            f"a line names no class: '{printable(line)}'",
            where=where,
            expected="path label, CLASS/name.jpg, or CLASS_012.jpg",
            fix="add the class to the line",
        )
    sorted_ = below.name(f"{label}/{name}", where)
    return (sorted_ if below.holds(sorted_, where) else below.name(name, where)), label, where
