"""A folder of unlabelled images and a list of classes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from aniso.classes import ClassList
from aniso.data.images import FileImages
from aniso.data.items import NamelessItems
from aniso.data.readers.naming import some
from aniso.data.readers.safe_paths import Links
from aniso.data.splits import Labelled, Unlabelled
from aniso.data.task import OnBadImage, readable
from aniso.errors import InputError, printable
from aniso.item_files import IMAGE_SUFFIXES, is_hidden, natural, suffix
from aniso.progress import ProgressCallback


def unlabelled_images(
    folder: str | Path,
    classes: Sequence[str],
    prompts: Sequence[str] = (),
    *,
    on_bad_image: OnBadImage = "error",
    progress: ProgressCallback | None = None,
) -> tuple[Unlabelled, tuple[str, ...]]:
    """Return all images below a folder as an unlabelled split, and notes on files that were left out."""
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise InputError(
            "DATA-MISSING", f"there is no folder '{printable(root)}'", fix="name a folder of images"
        )
    class_list = ClassList(tuple(classes), tuple(prompts)) if prompts else ClassList(tuple(classes))
    paths, other = _walk(root)
    notes = [f"ignored files that are no images: {some(other)}"] if other else []
    # with a dummy label, so that ``readable`` can be used
    split = Labelled(root.resolve().name, class_list, FileImages(root, paths), (0,) * len(paths))
    if on_bad_image != "error":
        split = readable(split, on_bad_image, notes, progress)
    if len(split) < 2:
        raise InputError(
            "DATA-MISSING",
            f"'{printable(root)}' holds {len(split)} images: at least two are needed",
            expected=f"files that end in {', '.join(sorted(IMAGE_SUFFIXES))}",
            fix="name another folder",
        )
    if len(split) < len(class_list):
        notes.append(f"{len(split)} images for {len(class_list)} classes: some classes cannot occur")
    return Unlabelled(split.name, class_list, NamelessItems(split.items)), tuple(notes)


def _refused(error: OSError) -> None:
    """Raise for a folder that cannot be listed."""
    raise InputError(
        "DATA-MISSING",
        f"'{printable(error.filename)}' cannot be listed",
        reason=error.strerror or str(error),
        fix="allow reading it, or move it away",
    ) from error


def _walk(root: Path) -> tuple[list[str], list[str]]:
    """Return images and other files as paths relative to the root, in natural order."""
    images: list[str] = []
    other: list[str] = []
    links = Links(root)
    for place, folders, names in os.walk(root, onerror=_refused):
        folders[:] = [name for name in folders if not is_hidden(name)]
        for name in names:
            path = Path(place, name).relative_to(root).as_posix()
            if not is_hidden(name):
                if Path(place, name).is_symlink() and suffix(name) in IMAGE_SUFFIXES:
                    links.require_inside(path)
                (images if suffix(name) in IMAGE_SUFFIXES else other).append(path)
    return sorted(images, key=natural), sorted(other, key=natural)
