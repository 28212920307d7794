"""Reader of Caltech-UCSD Birds: four tables that share a number for every image."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import final

from aniso.data.part import Reading
from aniso.data.reader import Reader
from aniso.data.readers import settings as given
from aniso.data.readers.lists import Listed, reading
from aniso.data.readers.naming import first_few
from aniso.data.readers.safe_paths import Below, relative
from aniso.data.readers.texts import distinct, read_lines
from aniso.errors import InputError, printable
from aniso.registry import READERS

_PARTS = {"1": "train", "0": "test"}


@READERS.register("cub")
@final
class CubReader(Reader):
    """Reads CUB-200-2011 as its authors published it."""

    def read(self, root: Path, settings: Mapping[str, object]) -> Reading:
        """Read the tables; ``images`` names the folder that holds images.txt and the folder ``images``."""
        given.require_known(settings, "images")
        folder = relative(given.text(settings, "images", "CUB_200_2011"), "images")
        base = root / folder
        classes = _table(base / "classes.txt")
        paths = _table(base / "images.txt")
        labels = _table(base / "image_class_labels.txt", paths, classes)
        parts = _table(base / "train_test_split.txt", paths, _PARTS)
        below = Below(root, relative(f"{folder}/images", "images"))
        rows: dict[str, list[Listed]] = {"train": [], "test": []}
        for number, path in paths.items():
            where = f"images.txt number {number}"
            rows[_PARTS[parts[number]]].append((below.name(path, where), classes[labels[number]], where))
        return reading(root, below, rows, distinct(tuple(classes.values()), base / "classes.txt"))


def _table(
    file: Path, keys: Mapping[str, str] | None = None, values: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Read lines "number value"; ``keys`` are the required numbers, ``values`` the allowed values."""
    lines = [(*line.partition(" ")[::2], where) for line, where in read_lines(file)]
    table = {key: value.strip() for key, value, _ in lines}
    wrong = [
        where
        for _, value, where in lines
        if not value or (values is not None and value.strip() not in values)
    ]
    wrong += [f"{key} occurs twice" for key in table if len(table) < len(lines)][:1]
    if keys is not None:
        wrong += [f"{key} is missing or too many" for key in sorted(keys.keys() ^ table.keys())]
    if wrong:
        raise InputError(
            "DATA-FORMAT",
            f"'{printable(file)}' does not fit the other tables of the dataset",
            found=first_few(wrong),
            fix="unpack the dataset again",
        )
    return table
