"""Pictures named line by line in a text file for every part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from aniso.data.images import FileImages
from aniso.data.part import Part, Reading
from aniso.data.reader import Reader
from aniso.data.readers import settings as given
from aniso.data.readers.labels import by_name, once
from aniso.data.readers.naming import PICTURES, suffix
from aniso.data.readers.safe_paths import Below, relative
from aniso.data.readers.texts import read_lines
from aniso.errors import InputError, printable
from aniso.registry import READERS

Listed = tuple[str, str, str]
"""A picture's path from the root, its class, and the line that says so."""


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
    """Parts whose pictures are listed; each must be there, and is taken once."""
    notes: list[str] = []
    kept: dict[str, list[Listed]] = {}
    for part, rows in parts.items():
        if not rows:
            raise InputError(
                "DATA-EMPTY",
                f"the list of {part} in '{printable(root)}' is empty",
                fix="complete the data set, or leave the part out of the card",
            )
        paths, names, lines = zip(*rows, strict=True)
        first = once(paths, names, lines.__getitem__)
        if len(first) < len(rows):
            notes.append(f"{part}: {len(rows) - len(first):,} lines ignored, for they repeat another")
        kept[part] = [rows[i] for i in first]
        below.require([paths[i] for i in first], lambda i, of=kept[part]: of[i][2])  # type: ignore[misc]
    order, codes = by_name({part: [name for _, name, _ in rows] for part, rows in kept.items()}, classes)
    images = {part: FileImages(root, [path for path, _, _ in rows]) for part, rows in kept.items()}
    return Reading({part: Part(images[part], order, codes[part]) for part in parts}, tuple(notes))


def _listed(below: Below, line: str, where: str) -> Listed:
    path, label = line, ""
    if suffix(line) not in PICTURES:  # names may hold spaces, so a line that ends as a picture has no label
        path, _, label = (piece.strip() for piece in line.rpartition(" "))
        path, label = (path, label) if path else (label, "")
    path = path.removeprefix("/")  # lines of SUN397 begin with one, meaning the folder of the pictures
    folder, _, name = path.rpartition("/")
    if label or folder:
        return below.name(path, where), label or folder, where
    label = name.rpartition("_")[0]
    if not label:
        raise InputError(
            "DATA-LABEL",
            f"a line does not say what its picture shows: '{printable(line)}'",
            where=where,
            expected="path label, CLASS/name.jpg, or CLASS_012.jpg",
            fix="add the class to the line",
        )
    sorted_ = below.name(f"{label}/{name}", where)
    return (sorted_ if below.holds(sorted_, where) else below.name(name, where)), label, where
