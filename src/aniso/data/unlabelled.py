"""A folder of pictures that nobody has sorted, and a list of what they may show."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from aniso.classes import ClassList
from aniso.data.images import FileImages, NamelessImages
from aniso.data.readers.naming import PICTURES, is_hidden, natural, some, suffix
from aniso.data.readers.safe_paths import Links
from aniso.data.splits import Labelled, Unlabelled
from aniso.data.task import OnBadImage, readable
from aniso.errors import InputError, printable
from aniso.progress import ProgressCallback


def unlabelled_pictures(
    folder: str | Path,
    classes: Sequence[str],
    prompts: Sequence[str] = (),
    *,
    on_bad_image: OnBadImage = "error",
    progress: ProgressCallback | None = None,
) -> tuple[Unlabelled, tuple[str, ...]]:
    """All pictures below a folder, whatever it is divided into, and notes on what was left out."""
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise InputError(
            "DATA-MISSING", f"there is no folder '{printable(root)}'", fix="name a folder of pictures"
        )
    said = ClassList(tuple(classes), tuple(prompts)) if prompts else ClassList(tuple(classes))
    paths, other = _found(root)
    notes = [f"ignored, for it is no picture: {some(other)}"] if other else []
    # without labels, and so under one that says nothing: leaving pictures out is the same for both
    whole = Labelled(root.resolve().name, said, FileImages(root, paths), (0,) * len(paths))
    if on_bad_image != "error":
        whole = readable(whole, on_bad_image, notes, progress)
    if len(whole) < 2:
        raise InputError(
            "DATA-MISSING",
            f"'{printable(root)}' holds {len(whole)} pictures: at least two are needed",
            expected=f"files that end in {', '.join(sorted(PICTURES))}",
            fix="name another folder",
        )
    if len(whole) < len(said):
        notes.append(f"{len(whole)} pictures for {len(said)} classes: some of them cannot occur")
    return Unlabelled(whole.name, said, NamelessImages(whole.images)), tuple(notes)


def _refused(error: OSError) -> None:
    """A folder that cannot be looked into may hold anything: it is not passed over."""
    raise InputError(
        "DATA-MISSING",
        f"'{printable(error.filename)}' cannot be looked into",
        reason=error.strerror or str(error),
        fix="allow reading it, or move it away",
    ) from error


def _found(root: Path) -> tuple[list[str], list[str]]:
    """Pictures and other files, by their paths from the root, in the order people count."""
    pictures: list[str] = []
    other: list[str] = []
    links = Links(root)
    for place, folders, names in os.walk(root, onerror=_refused):
        folders[:] = [name for name in folders if not is_hidden(name)]
        for name in names:
            path = Path(place, name).relative_to(root).as_posix()
            if not is_hidden(name):
                if Path(place, name).is_symlink() and suffix(name) in PICTURES:
                    links.require_inside(path)
                (pictures if suffix(name) in PICTURES else other).append(path)
    return sorted(pictures, key=natural), sorted(other, key=natural)
