"""Reader of Pascal VOC as a classification problem: every object is cropped out of its photograph."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final
from xml.etree import ElementTree

from aniso.data.images import Box, CroppedImages, FileImages
from aniso.data.part import Part, Reading
from aniso.data.reader import Reader
from aniso.data.readers import settings as given
from aniso.data.readers.labels import by_name
from aniso.data.readers.safe_paths import Below, relative
from aniso.data.readers.texts import read_lines, read_text
from aniso.errors import InputError, UnsafeError, printable
from aniso.registry import READERS

_LARGEST = 4 << 20
_DECLARATION = re.compile(r"<!\s*(DOCTYPE|ENTITY)", re.IGNORECASE)


@dataclass(frozen=True)
class _Object:
    path: str
    id: str
    name: str
    box: Box


@READERS.register("voc")
@final
class VocReader(Reader):
    """Reads objects of PASCAL VOC, cropped by their bounding boxes."""

    def read(self, root: Path, settings: Mapping[str, object]) -> Reading:
        """Read the image sets that ``parts`` names.

        Objects marked difficult are left out, as in VOC's own scores, unless ``difficult`` is true.
        """
        given.require_known(settings, "parts", "year", "difficult")
        every = given.flag(settings, "difficult")
        base = f"VOCdevkit/VOC{relative(str(settings.get('year', '2007')), 'year')}"
        below = Below(root, f"{base}/JPEGImages")
        parts: dict[str, list[_Object]] = {}
        left_out = 0
        for part, chosen in given.texts(settings, "parts").items():
            lines = read_lines(root / base / "ImageSets" / "Main" / f"{relative(chosen, 'parts')}.txt")
            photographs = {line.split()[0]: where for line, where in lines}
            found = [_objects(root / base, below, name, where, every) for name, where in photographs.items()]
            parts[part] = [item for easy, _ in found for item in easy]
            left_out += sum(difficult for _, difficult in found)
            below.require(list(dict.fromkeys(item.path for item in parts[part])))
        return _reading(root, parts, left_out)


def _reading(root: Path, parts: Mapping[str, Sequence[_Object]], left_out: int) -> Reading:
    empty = [part for part, found in parts.items() if not found]
    if empty:
        raise InputError(
            "DATA-EMPTY", f"{empty[0]} has no objects", fix="complete the dataset, or correct the card"
        )
    classes, codes = by_name({part: [item.name for item in found] for part, found in parts.items()})
    readings = {part: Part(_images(root, found), classes, codes[part]) for part, found in parts.items()}
    return Reading(readings, (f"left out {left_out:,} objects marked difficult",) if left_out else ())


def _images(root: Path, found: Sequence[_Object]) -> CroppedImages:
    files = FileImages(root, [item.path for item in found])
    return CroppedImages(files, [item.box for item in found], [item.id for item in found])


def _objects(base: Path, below: Below, name: str, where: str, every: bool) -> tuple[list[_Object], int]:
    """Return the objects of a photograph, and how many difficult ones were left out."""
    path = below.name(f"{name}.jpg", where)
    file = base / "Annotations" / f"{relative(name, where)}.xml"
    easy, difficult = [], 0
    for i, item in enumerate(_parsed(file).iterfind("object")):
        if not every and (item.findtext("difficult") or "0").strip() == "1":
            difficult += 1
        else:
            easy.append(_Object(path, f"{name}#{i}", _name(file, item), _box(file, item)))
    return easy, difficult


def _parsed(file: Path) -> ElementTree.Element:
    content = read_text(file, _LARGEST)
    if _DECLARATION.search(content):
        raise UnsafeError(
            "DATA-FORMAT",
            f"'{printable(file)}' declares a document type or entities",
            expected="plain XML: entities can name other files, or grow without end",
            fix="unpack the dataset again",
        )
    try:
        return ElementTree.fromstring(content)  # text, so that no encoding can be declared
    except (ElementTree.ParseError, ValueError) as e:
        raise _malformed(file, printable(e)) from None


def _name(file: Path, item: ElementTree.Element) -> str:
    name = (item.findtext("name") or "").strip()
    if not name:
        raise _malformed(file, "an object without a name")
    return name


def _box(file: Path, item: ElementTree.Element) -> Box:
    """Return left, top, right, bottom as Pillow counts: from 0, exclusive. VOC counts from 1, inclusive."""
    sides = [item.findtext(f"bndbox/{side}") or "" for side in ("xmin", "ymin", "xmax", "ymax")]
    try:
        left, top, right, bottom = (int(float(value)) for value in sides)
    except (ValueError, OverflowError):
        raise _malformed(file, f"a box of {', '.join(sides)}") from None
    if not (0 < left <= right and 0 < top <= bottom):
        raise _malformed(file, f"a box of {', '.join(sides)}")
    return left - 1, top - 1, right, bottom


def _malformed(file: Path, found: str) -> InputError:
    return InputError(
        "DATA-FORMAT",
        f"'{printable(file)}' is not a VOC annotation",
        found=found,
        expected="objects with a name and a bndbox",
        fix="unpack the dataset again",
    )
