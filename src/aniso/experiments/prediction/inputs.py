"""Inputs of predictions: files, folders, globs, tables, lines of text, standard input; listed without torch.

Items are listed anew whenever they are asked for, in the same order, and never all held: of a folder the
names in one directory at a time, of a table one row. Standard input can be listed once.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from aniso.errors import InputError, UsageError, printable
from aniso.experiments.prediction.tables import Column, InputItem, ItemKind, TextLines, open_table
from aniso.item_files import (
    IMAGE_SUFFIXES,
    JSON_LINES_SUFFIXES,
    TABLE_SUFFIXES,
    is_hidden,
    natural,
    suffix,
)

STDIN = "-"
_TEXTS = TABLE_SUFFIXES | JSON_LINES_SUFFIXES | {"txt"}
_EXPECTED = "images, folders of images, .csv, .tsv, .jsonl or .txt files, or - for standard input"


@final
@dataclass(frozen=True)
class Inputs:
    """The items that arguments name, all images or all texts."""

    sources: tuple[Source, ...]
    kind: ItemKind
    total: int | None
    """None if standard input is among them."""
    notes: tuple[str, ...] = ()

    def items(self) -> Iterator[InputItem]:
        """Yield the items in order."""
        for source in self.sources:
            yield from source.items()


def find_inputs(arguments: Sequence[str], column: str | None = None) -> Inputs:
    """Return the items that arguments name; every file is listed, and every row of a table read, once.

    ``column`` is the column of tables that holds texts or paths of images; by default one with a usual name.
    """
    sources = [source for argument in arguments for source in _sources(argument, column)]
    if column is not None and not any(source.has_columns for source in sources):
        raise UsageError(
            "USAGE", "--column names a column of a table, and no input is one", fix="leave out --column"
        )
    kinds: dict[ItemKind, str] = {}
    for source in sources:
        kinds.setdefault(source.kind, source.name)
    if len(kinds) > 1:
        raise UsageError(
            "DATA-ITEM",
            "some of the inputs are images and others texts",
            found=[f"{kind}: {printable(name)}" for kind, name in kinds.items()],
            fix="name only images, or only texts: a model takes one of them",
        )
    counts = [None if source.once else _count(source) for source in sources]
    known = [count for count in counts if count is not None]
    return Inputs(
        tuple(sources),
        sources[0].kind,
        sum(known) if len(known) == len(counts) else None,
        tuple(note for source in sources for note in source.notes()),
    )


@final
@dataclass(frozen=True)
class Source:
    """One file, folder or stream."""

    name: str
    kind: ItemKind
    reader: ImageFile | ImageFolder | Column | TextLines

    @property
    def once(self) -> bool:
        """True if the items can be listed only once."""
        return isinstance(self.reader, TextLines) and self.reader.path is None

    @property
    def has_columns(self) -> bool:
        return isinstance(self.reader, Column)

    def items(self) -> Iterator[InputItem]:
        return self.reader.items()

    def notes(self) -> Iterator[str]:
        if isinstance(self.reader, ImageFolder) and (ignored := self.reader.ignored()):
            yield f"{self.name}: ignored {ignored:,} files that are no images"


@final
@dataclass(frozen=True)
class ImageFile:
    """One image."""

    path: Path

    def items(self) -> Iterator[InputItem]:
        yield InputItem(str(self.path), path=str(self.path))


@final
@dataclass(frozen=True)
class ImageFolder:
    """All images below a folder, in natural order, a directory at a time."""

    root: Path

    def items(self) -> Iterator[InputItem]:
        home = self.root.resolve()
        for path in _walk(self.root):
            if suffix(path.name) in IMAGE_SUFFIXES:
                if path.is_symlink():
                    _require_inside(path, home)
                yield InputItem(str(path), path=str(path))

    def ignored(self) -> int:
        """Return the number of other files."""
        return sum(suffix(path.name) not in IMAGE_SUFFIXES for path in _walk(self.root))


def _walk(root: Path) -> Iterator[Path]:
    """Yield the files below a directory that are not hidden: those in it first, then those of its folders."""
    for place, folders, names in os.walk(root, onerror=_refused):
        folders[:] = sorted((name for name in folders if not is_hidden(name)), key=natural)
        yield from (Path(place, name) for name in sorted(names, key=natural) if not is_hidden(name))


def _refused(error: OSError) -> None:
    raise InputError(
        "DATA-MISSING",
        f"'{printable(error.filename)}' cannot be listed",
        reason=error.strerror or str(error),
        fix="allow reading it, or name other inputs",
    ) from error


def _require_inside(path: Path, home: Path) -> None:
    if not path.resolve().is_relative_to(home):
        raise InputError(
            "DATA-PATH",
            f"the link '{printable(path)}' leads out of its folder",
            found=printable(path.resolve()),
            fix="name the file that it leads to, or remove the link",
        )


# what an argument is


def _sources(argument: str, column: str | None) -> list[Source]:
    if argument == STDIN:
        lines = TextLines(None, sys.stdin.buffer)
        return [Source("standard input", lines.kind, lines)]
    path = _path(argument)
    if not os.path.lexists(path) and glob.has_magic(argument):
        # Path.glob takes no pattern with a root
        matches = sorted(glob.iglob(str(path), recursive=True), key=natural)  # noqa: PTH207
        if not matches:
            raise _missing(argument, "the pattern matches no file")
        return [source for match in matches for source in _of_match(Path(match), column)]
    return _of_path(path, column)


def _of_match(path: Path, column: str | None) -> list[Source]:
    """Return the sources in a file that a pattern matches; files that hold no items are ignored."""
    if path.is_dir() or suffix(path.name) not in IMAGE_SUFFIXES | _TEXTS or is_hidden(path.name):
        return []
    return _of_path(path, column)


def _of_path(path: Path, column: str | None) -> list[Source]:
    if path.is_dir():
        return _of_folder(path, column)
    if not path.exists():
        reason = "the link leads nowhere" if path.is_symlink() else "there is no such file or folder"
        raise _missing(str(path), reason)
    ending, name = suffix(path.name), str(path)
    if ending in TABLE_SUFFIXES | JSON_LINES_SUFFIXES:
        table = open_table(path, column)
        return [Source(name, table.kind, table)]
    if ending == "txt":
        lines = TextLines(path)
        return [Source(name, lines.kind, lines)]
    if ending in IMAGE_SUFFIXES:
        return [Source(name, "images", ImageFile(path))]
    raise InputError(
        "DATA-FORMAT", f"'{printable(path)}' is no input", expected=_EXPECTED, fix="name other inputs"
    )


def _of_folder(path: Path, column: str | None) -> list[Source]:
    if any(suffix(file.name) in IMAGE_SUFFIXES for file in _walk(path)):
        return [Source(str(path), "images", ImageFolder(path))]
    files = [file for file in _walk(path) if suffix(file.name) in _TEXTS]
    if not files:
        some = [printable(file.name, 40) for _, file in zip(range(5), _walk(path), strict=False)]
        raise InputError(
            "DATA-EMPTY",
            f"the folder '{printable(path)}' holds no images and no texts",
            found=", ".join(some) or "no files",
            expected=f"files that end in {', '.join(sorted(IMAGE_SUFFIXES | _TEXTS))}",
            fix="name another folder",
        )
    return [source for file in files for source in _of_path(file, column)]


def _path(argument: str) -> Path:
    try:
        path = Path(argument).expanduser()
        os.path.lexists(path)
    except (OSError, RuntimeError, ValueError) as e:
        raise _missing(argument, getattr(e, "strerror", None) or printable(e)) from None
    if not argument:
        raise UsageError("USAGE", "an input has no name", expected=_EXPECTED, fix="name a file or folder")
    return path


def _count(source: Source) -> int:
    count = sum(1 for _ in source.items())
    if not count:
        raise InputError(
            "DATA-EMPTY", f"'{printable(source.name)}' holds no items", fix="name a file with some"
        )
    return count


def _missing(argument: str, reason: str) -> InputError:
    return InputError(
        "DATA-MISSING", f"'{printable(argument)}': {reason}", expected=_EXPECTED, fix="correct the path"
    )
