"""Reader of a folder with one text file per class: every line is a text of that class."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import final

from aniso.data.part import Reading
from aniso.data.reader import Reader
from aniso.data.readers import settings as given
from aniso.data.readers.csv_table import TableRow
from aniso.data.readers.naming import in_order, known_part
from aniso.data.readers.safe_paths import Links
from aniso.data.readers.shards import require_filled
from aniso.data.readers.text_table import text_reading
from aniso.data.readers.texts import read_class_card, read_lines
from aniso.item_files import IMAGE_SUFFIXES, is_hidden, natural, suffix
from aniso.registry import READERS

_NO_CLASS = frozenset({"classes.txt", "readme.txt", "license.txt", "licence.txt", "notes.txt"})


@READERS.register("text_folder")
@final
class TextFolderReader(Reader):
    """Reads ``CLASS.txt``, one text per line, in a folder or in the folders train, val and test."""

    priority = 0

    def recognises(self, path: Path) -> bool:
        if not path.is_dir():
            return False
        folders = [folder for folder in path.iterdir() if folder.is_dir() and not is_hidden(folder.name)]
        if folders and not all(known_part(folder.name) for folder in folders):
            return False
        return all(_is_of_texts(folder) for folder in (folders or [path]))

    def read(self, root: Path, settings: Mapping[str, object]) -> Reading:
        """Read every line that is not empty as a text; the file's name is its class."""
        given.require_known(settings, "parts")
        links = Links(root)
        folders = {known_part(folder.name): folder for folder in sorted(root.iterdir()) if folder.is_dir()}
        places = {part: folder for part, folder in folders.items() if part} or {"all": root}
        rows: dict[str, list[TableRow]] = {}
        for part, folder in places.items():
            for file in _files(folder):
                if file.is_symlink():
                    links.require_inside(file.relative_to(root).as_posix())
                lines = read_lines(file)
                rows.setdefault(part, []).extend(TableRow(text, file.stem, part, w) for text, w in lines)
        chosen, notes = given.select_parts(in_order(rows), settings)
        require_filled(root, {part: len(of) for part, of in chosen.items()})
        return text_reading(chosen, read_class_card(root), notes=notes)


def _is_of_texts(folder: Path) -> bool:
    """True if a folder holds text files, at least two, and neither folders nor images."""
    inside = [path for path in folder.iterdir() if not is_hidden(path.name)]
    images = any(path.is_dir() or suffix(path.name) in IMAGE_SUFFIXES for path in inside)
    return not images and len(_files(folder)) > 1


def _files(folder: Path) -> list[Path]:
    found = [p for p in folder.iterdir() if p.suffix.lower() == ".txt" and p.name.lower() not in _NO_CLASS]
    return sorted((p for p in found if p.is_file() and not is_hidden(p.name)), key=lambda p: natural(p.name))
