"""Items that a run got wrong, small enough for a page: thumbnails of images, the beginning of texts."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from aniso.data import Labelled, load_task
from aniso.errors import AnisoError, printable
from aniso.experiments.run_files import SPEC
from aniso.experiments.strict_yaml import read_yaml

SIDE = 96
"""Pixels of the longer side of a thumbnail."""
_QUALITY = 80
_LETTERS = 300


def error_items(
    run: Path, task: str, ids: Sequence[str], data: Path | None = None
) -> tuple[dict[str, bytes | str], str]:
    """Return test items of a task of a run by their ids, and a note if its data cannot be read any more.

    Images become JPEG of at most 96 pixels a side, texts their first 300 letters. Items that are missing or
    damaged now are left out.
    """
    try:
        split = _test_split(run, task, data)
    except AnisoError as e:
        return {}, f"no gallery for {printable(run.name)}: {e.message}"
    if split is None:
        return {}, f"no gallery for {printable(run.name)}: its spec names no data of {printable(task)}"
    place = {name: i for i, name in enumerate(split.ids)}
    found: dict[str, bytes | str] = {}
    for name in ids:
        if name in place:
            try:
                found[name] = small_item(split.open(place[name]))
            except AnisoError:
                continue
    return found, ""


def _test_split(run: Path, task: str, data: Path | None) -> Labelled | None:
    """Return the test split of the task with this name among those that the run's spec names."""
    spec = read_yaml(run / SPEC).data
    named = [spec.get(key) for key in ("task", "target", "control")]
    several = spec.get("tasks")
    refs = [ref for ref in (*named, *(several if isinstance(several, list) else ())) if isinstance(ref, str)]
    seed = spec.get("split_seed", 0)
    for ref in refs:
        place = str(data / ref[2:]) if ref.startswith("./") and data is not None else ref
        if ref == task or Path(ref).stem == task or Path(ref).name == task:
            return load_task(place, data, seed=seed if isinstance(seed, int) else 0).split("test")
    return None


def small_item(item: Image.Image | str) -> bytes | str:
    """Return an image as a JPEG of at most 96 pixels a side, or the first 300 letters of a text."""
    if isinstance(item, str):
        return item if len(item) <= _LETTERS else f"{item[: _LETTERS - 1]}…"
    item.thumbnail((SIDE, SIDE))
    out = io.BytesIO()
    item.save(out, "JPEG", quality=_QUALITY)
    return out.getvalue()
