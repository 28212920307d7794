"""Recipes scaled down: the bundled model, drawn images, two steps, one value of every axis.

The code that runs is that of the full recipe. Tasks are named like vectors of the bundled banks, so that
vectors and tasks find each other.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from aniso.json_value import JsonObject

SMOKE_MODEL = "mini"
SMOKE_BANKS = {"standard": "mini", "lora4": "mini-lora4"}
"""Banks that come with aniso; others are made."""
SMOKE_NOTE = "smoke: drawn images, the bundled model, two steps; the numbers mean nothing"
_TASKS = ("cars", "mnist")
"""Data sets of the paper whose vectors the bundled banks have."""
_CONTROL = ("imagenet", "imagenet_a", "imagenet_r", "imagenet_sketch", "imagenet_v2")
_SCHEDULE: JsonObject = {"epochs": 1, "steps": 2, "batch_size": 8, "min_steps_per_epoch": 1}
_CLASSES = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 60, 220)}
_EACH = {"train": 6, "val": 4, "test": 4}
"""Images of every class."""
_SIDE = 16
_RANK = 2
_EVALUATIONS = 4
_LISTS = ("tasks",)
_NAMES = ("task", "target", "control")
_WHOLE = ("fraction",)
"""Axes of which the last value is taken: a hundredth of a few images is none."""


def smoke_tasks(names: Iterable[str]) -> list[str]:
    """Return the tasks of a list that a smoke run takes: at most two."""
    wanted = [name for name in names if name in (*_TASKS, *_CONTROL[:1])]
    few = [name for name in wanted if name in _TASKS] or wanted
    return (few or list(_TASKS[-1:]))[:2]


def scaled(spec: JsonObject, tasks: Sequence[str]) -> JsonObject:
    """Return a spec of few and short cells with drawn tasks."""
    base, variants = _mapping(spec["base"]), spec["variants"]
    assert isinstance(variants, list)
    grid = _short(_mapping(spec["grid"]), tasks)
    made = [
        {**v, "base": _small(_mapping(v["base"])), "grid": _short(_mapping(v["grid"]), tasks)}
        for v in map(_mapping, variants)
    ]
    return {**spec, "base": {**_small(base), "schedule": _SCHEDULE}, "grid": grid, "variants": made}


def _mapping(value: object) -> JsonObject:
    assert isinstance(value, dict)
    return value


def _small(options: JsonObject) -> JsonObject:
    out = {key: value for key, value in options.items() if key != "schedule"}
    for key in _NAMES:
        if key in out:
            out[key] = f"./{out[key]}"
    for key in ("tasks", "out_of_domain"):
        names: Any = out.get(key)
        if names is not None:
            out[key] = [f"./{name}" for name in names]
    if "lora" in out:
        out["lora"] = _RANK
    if "evaluations" in out:
        out["evaluations"] = _EVALUATIONS
    return out


def _short(grid: JsonObject, tasks: Sequence[str]) -> JsonObject:
    """Return one value of every axis; of tasks the last that is drawn."""
    out: JsonObject = {}
    for key, values in grid.items():
        assert isinstance(values, list)
        if key in _NAMES:
            drawn = [name for name in values if name in (*_TASKS, *_CONTROL)] or list(tasks)
            out[key] = [f"./{drawn[-1]}"]
        else:
            out[key] = values[-1:] if key in _WHOLE else values[:1]
    return out


def write_smoke_data(directory: Path) -> None:
    """Draw the tasks of smoke runs: a folder per split and class, as a user's own would be."""
    for task in (*_TASKS, *_CONTROL):
        for split, each in _EACH.items():
            if task in _CONTROL[1:] and split != "test":
                continue
            for name, colour in _CLASSES.items():
                _draw(directory / task / split / name, each, colour, f"{task} {split} {name}")


def _draw(folder: Path, each: int, colour: tuple[int, int, int], seed: str) -> None:
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    for i in range(each):
        path = folder / f"{i:02}.png"
        pixels = [
            tuple(max(0, min(255, value + chance.randint(-60, 60))) for value in colour)
            for _ in range(_SIDE * _SIDE)
        ]
        if path.exists():
            continue
        image = Image.new("RGB", (_SIDE, _SIDE))
        image.putdata(pixels)
        image.save(path)
