"""Reader of a folder per class, in a folder per split."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from aniso.data.images import FileImages
from aniso.data.part import Part, Reading
from aniso.data.reader import Reader
from aniso.data.readers import settings as given
from aniso.data.readers.labels import by_name
from aniso.data.readers.naming import first_few, in_order, known_part, some, visible_folders
from aniso.data.readers.safe_paths import Links, relative
from aniso.errors import InputError, printable
from aniso.item_files import IMAGE_SUFFIXES, is_hidden, natural, suffix
from aniso.registry import READERS

Inode = tuple[int, int]


@dataclass
class _Ignored:
    """Files and folders that are no image of a class."""

    hidden: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    stray: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)

    def notes(self) -> list[str]:
        ignored = {
            "ignored hidden files": self.hidden,
            "ignored files that are no images": self.other,
            "ignored images outside of class folders": self.stray,
            "links not followed, to folders already read": self.links,
        }
        return [f"{what}: {some(sorted(names))}" for what, names in ignored.items() if names]


@READERS.register("folder")
@final
class FolderReader(Reader):
    """Reads a folder per class, in folders per split or without them."""

    priority = -1

    def recognises(self, path: Path) -> bool:
        return path.is_dir() and bool(visible_folders(path))

    def read(self, root: Path, settings: Mapping[str, object]) -> Reading:
        """List images at any depth below a class's folder, by suffix; other files are listed in the notes."""
        given.require_known(settings, "parts")
        ignored = _Ignored()
        parts = _parts(root, settings, ignored)
        links = Links(root)
        found = {part: _classes(root, folder, ignored, links) for part, folder in parts.items()}
        _require_images(root, found)
        names = {part: [name for name, paths in of.items() for _ in paths] for part, of in found.items()}
        classes, codes = by_name(names)
        images = {
            part: FileImages(root, [p for paths in of.values() for p in paths]) for part, of in found.items()
        }
        return Reading(
            {part: Part(images[part], classes, codes[part]) for part in found},
            tuple(ignored.notes() + _collisions(classes)),
        )


# parts


def _parts(root: Path, settings: Mapping[str, object], ignored: _Ignored) -> dict[str, str]:
    """Return each part's folder, relative to the root."""
    if "parts" in settings:
        folders = {part: relative(place, "parts") for part, place in given.texts(settings, "parts").items()}
        missing = [place for place in folders.values() if not (root / place).is_dir()]
        if missing:
            raise _missing(root, missing)
        return in_order(folders)
    if not root.is_dir():
        raise _missing(root.parent, [root.name])
    names = [entry.name for entry in _scan(root) if _is_folder(entry) and not is_hidden(entry.name)]
    return _standard_parts(root, names, ignored) or {"all": ""}


def _standard_parts(root: Path, folders: list[str], ignored: _Ignored) -> dict[str, str]:
    """Return the folders called train, val and test, unless they are classes: a train is also a vehicle."""
    standard = [name for name in folders if known_part(name)]
    rest = [name for name in folders if not known_part(name)]
    if rest and not any(_has_folders(root / name) for name in standard):
        return {}
    parts: dict[str, str] = {}
    for name in sorted(standard):
        part = str(known_part(name))
        if part in parts:
            raise InputError(
                "DATA-FORMAT",
                f"'{printable(root)}' has two folders for {part}",
                found=f"{printable(parts[part])}, {printable(name)}",
                fix="keep one of them",
            )
        parts[part] = name
    if parts:
        ignored.other += rest
        ignored.hidden += [entry.name for entry in _scan(root) if is_hidden(entry.name)]
        _sort_files(_scan(root), "", ignored)
    return in_order(parts)


def _has_folders(place: Path) -> bool:
    return any(_is_folder(entry) and not is_hidden(entry.name) for entry in _scan(place))


def _missing(root: Path, folders: list[str]) -> InputError:
    return InputError(
        "DATA-MISSING",
        f"'{printable(root)}' lacks {len(folders)} of the folders to read",
        missing=first_few(folders),
        fix=f"ls '{printable(root)}', and complete the dataset",
    )


# classes


def _classes(root: Path, folder: str, ignored: _Ignored, links: Links) -> dict[str, list[str]]:
    """Return the image paths of every class of a part, relative to the root."""
    base = root / folder
    links.require_inside(folder)
    prefix = f"{folder}/" if folder not in ("", ".") else ""
    above = {_inode(root), _inode(base)}
    found: dict[str, list[str]] = {}
    entries = _scan(base)
    for entry in sorted((e for e in entries if _is_class(e, prefix, ignored)), key=lambda e: natural(e.name)):
        if _entry_inode(entry) in above:
            ignored.links.append(prefix + entry.name)
        else:
            links.require_inside(prefix + entry.name)
            found[entry.name] = sorted(_images(root, prefix + entry.name, above, ignored, links))
    _sort_files(entries, prefix, ignored)
    return found


def _is_class(entry: os.DirEntry[str], prefix: str, ignored: _Ignored) -> bool:
    if is_hidden(entry.name):
        ignored.hidden.append(prefix + entry.name)
        return False
    return _is_folder(entry)


def _sort_files(entries: list[os.DirEntry[str]], prefix: str, ignored: _Ignored) -> None:
    """Record the files that lie where class folders are expected."""
    for entry in entries:
        if not _is_folder(entry) and not is_hidden(entry.name) and prefix + entry.name != "task.toml":
            stray = suffix(entry.name) in IMAGE_SUFFIXES
            (ignored.stray if stray else ignored.other).append(prefix + entry.name)


def _images(root: Path, start: str, above: set[Inode], ignored: _Ignored, links: Links) -> list[str]:
    """Return all images below a class's folder; each real folder is read once, so links cannot loop."""
    seen = above | {_inode(root / start)}
    found: list[str] = []
    folders = [start]
    while folders:
        here = folders.pop()
        for entry in _scan(root / here):
            path = f"{here}/{entry.name}"
            if is_hidden(entry.name):
                ignored.hidden.append(path)
            elif _is_folder(entry):
                _enter(entry, path, seen, folders, ignored)
                if folders and folders[-1] == path and entry.is_symlink():
                    links.require_inside(path)
            elif suffix(entry.name) in IMAGE_SUFFIXES and _is_file(entry):
                if entry.is_symlink():
                    links.require_inside(path)
                found.append(path)
            else:
                ignored.other.append(path)
    return found


def _enter(
    entry: os.DirEntry[str], path: str, seen: set[Inode], folders: list[str], ignored: _Ignored
) -> None:
    inode = _entry_inode(entry)
    if inode in seen:
        ignored.links.append(path)
        return
    seen.add(inode)
    folders.append(path)


def _require_images(root: Path, found: Mapping[str, Mapping[str, list[str]]]) -> None:
    empty = [f"{part}: no class folder" for part, of in found.items() if not of]
    for part, of in found.items():
        empty += [f"{part}: {name}" if part != "all" else name for name, paths in of.items() if not paths]
    if empty or not found:
        raise InputError(
            "DATA-EMPTY",
            f"'{printable(root)}' has {len(empty)} folders without images",
            empty=first_few(empty),
            expected=f"a folder per class, with {', '.join(sorted(IMAGE_SUFFIXES))} files",
            fix="fill or remove these folders",
        )


def _collisions(classes: tuple[str, ...]) -> list[str]:
    """Return a note on names that differ in case or accents only, which some file systems take as equal."""
    alike: dict[str, list[str]] = {}
    for name in classes:
        alike.setdefault(unicodedata.normalize("NFC", name).casefold(), []).append(name)
    groups = [" / ".join(names) for names in alike.values() if len(names) > 1]
    return [f"classes that differ in case or accents only: {some(groups)}"] if groups else []


# the file system


def _scan(place: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(place) as entries:
            return list(entries)
    except OSError as e:
        raise _unlistable(place, e) from None


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:
        return False


def _inode(place: Path) -> Inode:
    try:
        status = place.stat()
    except OSError as e:
        raise _unlistable(place, e) from None
    return status.st_dev, status.st_ino


def _entry_inode(entry: os.DirEntry[str]) -> Inode:
    status = entry.stat()
    return status.st_dev, status.st_ino


def _unlistable(place: Path, error: OSError) -> InputError:
    return InputError(
        "DATA-FORMAT",
        f"'{printable(place)}' cannot be listed",
        reason=error.strerror,
        fix=f"ls -ld '{printable(place)}'",
    )
