"""Tasks that anything can learn, and a composition to learn them with, made in the test that needs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pictures
import tiny
from PIL import Image, ImageChops

from aniso.compose import Composition, Partition
from aniso.data import Task, load_task
from aniso.models import Encoder, load_model
from aniso.vectors import Bank

COLOURS = {"red": (220, 30, 30), "blue": (30, 30, 220), "green": (30, 220, 30)}


def task(root: Path, counts: Mapping[str, int], colours: tuple[str, ...] = ("red", "blue")) -> Task:
    """Classes that differ in colour; so many pictures of each in every part."""
    begin = sum(root.name.encode())  # no two tasks share a picture
    for first, (part, count) in enumerate(counts.items(), begin):
        for name in colours:
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                noise = pictures.picture(1000 * first + i).point(lambda v: v // 4)
                tinted = ImageChops.add(noise, Image.new("RGB", noise.size, COLOURS[name]))
                tinted.save(root / part / name / f"{i:03}.png")
    return load_task(root)


@dataclass(frozen=True)
class World:
    """A model, vectors over it, and two tasks."""

    encoder: Encoder
    bank: Bank
    target: Task
    control: Task

    def composition(self, partition: Partition | None = None) -> Composition:
        return Composition(self.encoder, self.bank, partition)


def world(root: Path) -> World:
    with mock.patch.object(tiny, "LAYERS", 1):  # time goes by blocks
        encoder = load_model(tiny.hf_clip_directory(root / "model", seed=2))
    state = encoder.state_dict()
    tuned = {
        name: {k: v if tiny.is_hf_vision(k) else state[k] for k, v in tiny.tuned(state, seed, 0.5).items()}
        for seed, name in enumerate(("one", "two"), 1)
    }
    bank = Bank.build(encoder, tuned, allow_distant=True)
    target = task(root / "target", {"train": 8, "val": 5, "test": 4})
    control = task(root / "control", {"train": 5, "val": 4, "test": 3}, ("green", "blue", "red"))
    return World(encoder, bank, target, control)
