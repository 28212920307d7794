"""Paths from untrusted files: each must lead to an existing file below a directory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import final

from aniso.data.readers.naming import first_few
from aniso.errors import InputError, UnsafeError, printable

# absolute on any system, or upwards by either kind of slash
_LEAVES = re.compile(r"^[/\\]|^[A-Za-z]:[/\\]|(^|[/\\])\.\.([/\\]|$)|\0")
_UNTIDY = re.compile(r"^\./|//|/\./|/\.?$")


def relative(named: str, where: str) -> str:
    """Return a normalised relative path; one that could leave its directory raises an error."""
    if not named or _LEAVES.search(named):
        raise _leaves(named, where, "a path below the dataset's directory")
    return str(PurePosixPath(named)) if _UNTIDY.search(named) else named


@final
class Below:
    """Looks up files below a directory; each folder is listed once."""

    def __init__(self, root: Path, folder: str = "", *, trust_links: bool = False) -> None:
        """Paths start at ``folder`` below ``root``; it may be a symbolic link.

        ``trust_links`` is for directories that the user made; otherwise no link may lead out of the folder.
        """
        self._prefix = f"{folder.rstrip('/')}/" if folder not in ("", ".") else ""
        self._base = root / folder
        self._trust_links = trust_links
        self._listed: dict[str, dict[str, str]] = {}

    def name(self, named: str, where: str) -> str:
        """Return a path relative to the root, for one relative to the folder."""
        return self._prefix + relative(named, where)

    def holds(self, path: str, where: str = "") -> bool:
        """True if the path, as ``name`` returns it, is a regular file."""
        folder, _, name = path.removeprefix(self._prefix).rpartition("/")
        if folder not in self._listed:
            self._listed[folder] = self._list(folder, where)
        kind = self._listed[folder].get(name)
        if kind == "link":
            self._require_inside(f"{folder}/{name}" if folder else name, where)
        return kind in ("file", "link")

    def require(self, paths: Sequence[str], where: Callable[[int], str] = lambda _: "") -> None:
        """Raise an error that lists missing files; ``where`` describes the row that names a path."""
        missing = [path for i, path in enumerate(paths) if not self.holds(path, where(i))]
        if missing:
            raise InputError(
                "DATA-MISSING",
                f"{len(missing):,} files are missing from '{printable(self._base)}'",
                missing=first_few(missing),
                fix="complete the dataset, or remove the lines that name them",
            )

    def _list(self, folder: str, where: str) -> dict[str, str]:
        place = self._base / folder
        try:
            with os.scandir(place) as entries:
                found = {entry.name: _kind(entry, self._trust_links) for entry in entries}
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as e:
            raise InputError(
                "DATA-FORMAT",
                f"'{printable(place)}' cannot be listed",
                reason=e.strerror,
                fix=f"ls -ld '{printable(place)}'",
            ) from None
        if not self._trust_links:
            self._require_inside(folder, where)
        return found

    def _require_inside(self, path: str, where: str) -> None:
        try:
            inside = (self._base / path).resolve().is_relative_to(self._base.resolve())
        except (OSError, RuntimeError):  # links that go round in circles
            inside = False
        if not inside:
            raise _leaves(path, where, f"links that stay below '{printable(self._base)}'")


def _kind(entry: os.DirEntry[str], trust_links: bool) -> str:
    try:
        if not entry.is_file():
            return "other"
    except OSError:
        return "other"
    return "link" if entry.is_symlink() and not trust_links else "file"


@final
class Links:
    """Refuses symbolic links below a directory that lead out of it; the directory itself may be a link."""

    def __init__(self, root: Path) -> None:
        self._root = root
        home = root.resolve()
        self._homes = [home]
        if home.parent.name == "snapshots":  # the hub's cache links to files in a folder beside it
            self._homes.append(home.parent.parent / "blobs")

    def require_inside(self, path: str) -> None:
        """Raise if a path, given relative to the root, leads out of it."""
        try:
            target = (self._root / path).resolve()
        except (OSError, RuntimeError):  # links that go round in circles
            target = Path("/")
        if not any(target.is_relative_to(home) for home in self._homes):
            raise UnsafeError(
                "DATA-PATH",
                f"a symbolic link leads out of the dataset: '{printable(path)}'",
                where=printable(self._root),
                expected="links that stay inside",
                fix="copy the files there, or name the directory that holds all of them",
            )


def _leaves(named: str, where: str, expected: str) -> UnsafeError:
    return UnsafeError(
        "DATA-PATH",
        f"a path leads out of the dataset: '{printable(named)}'",
        where=where,
        expected=expected,
        fix="correct the path, or copy the file to where the others are",
    )
