"""The mixing desk: what a page can ask for, as JSON values; it knows nothing of HTTP."""

from __future__ import annotations

import base64
import shlex
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch import Tensor

from aniso.compose import Baked, CardDetails, Coefficients
from aniso.errors import AnisoError, UsageError
from aniso.experiments.assignments import assigned_coefficients
from aniso.explore.commands import COEFFICIENTS, Recipe, recipe_of
from aniso.explore.geometry import Geometry
from aniso.explore.items import MOST, DeskItem
from aniso.explore.predictor import Predictor
from aniso.explore.presets import BASE, LEARNED, Presets
from aniso.explore.table import CoefficientTable, Rows
from aniso.json_value import JsonObject, JsonValue
from aniso.report.figures import block_label
from aniso.vectors import Bank
from aniso.weights import Ref
from aniso.weights.atomic import make_directory

BUDGET = 0.15
"""Seconds in which a measurement answers, plus one chunk of the sample."""


@final
@dataclass(frozen=True)
class DeskFiles:
    """How commands name what a desk was opened with."""

    bank: str
    start: str | None = None
    """The file of coefficients, or the run."""
    base: str | None = None
    weights: Ref | None = None
    """The base as something to read, for baking."""
    out: Path | None = None
    """The directory that baked models are written to; nothing is written without one."""


@final
class Desk:
    """A bank with a table of coefficients, presets, geometry, and maybe a model that predicts.

    It keeps no state of the page: every request carries its table, so several tabs do not disturb each other.
    """

    def __init__(
        self,
        title: str,
        bank: Bank,
        whole_bank: Bank,
        files: DeskFiles,
        start: Coefficients | None = None,
        predictor: Predictor | None = None,
        *,
        only_over_start: bool = False,
        notes: Sequence[str] = (),
    ) -> None:
        """``bank`` are the vectors on the desk, ``whole_bank`` those that coefficients are written over."""
        self.title = title
        self.files = files
        self.table = CoefficientTable.of(bank, start.partition.families if start is not None else ())
        self.start = start
        self.presets = Presets(bank, self.table, start)
        self.predictor = predictor
        self.notes = tuple(notes)
        self._bank = bank
        self._whole_bank = whole_bank
        self._alone = not only_over_start
        self._geometry: Geometry | None = None
        self._geometry_error = ""
        self._baking = threading.Lock()

    # what the page asks for

    def describe(self) -> JsonObject:
        """Return everything a page needs once: names, presets, the table to begin with, and the items."""
        predictor = self.predictor
        return {
            "title": self.title,
            "vectors": list(self.table.vectors),
            "blocks": [
                {"name": b.name, "label": block_label(b), "kind": b.kind, "depth": b.depth}
                for b in self.table.blocks
            ],
            "presets": [vars(preset) for preset in self.presets.all()],
            "values": self.preset(LEARNED if self.start is not None else BASE),
            "classes": list(predictor.classes) if predictor else [],
            "item_kind": predictor.items.kind if predictor else "",
            "most_items": MOST,
            "items": self.item_list(),
            "has_sample": predictor is not None and predictor.measures_accuracy,
            "can_bake": self.files.out is not None and self.files.weights is not None,
            "notes": list(self.notes),
        }

    def item_list(self) -> list[JsonValue]:
        """Return the items with their small copies."""
        return [_item(item) for item in self.predictor.items.all] if self.predictor else []

    def preset(self, name: str) -> JsonValue:
        """Return the table of a preset."""
        return self.table.write(self.presets.values(name))

    def measure(self, rows: Rows, seconds: float = BUDGET) -> JsonObject:
        """Return predictions, accuracy so far, and norm and interference of every block."""
        begun = time.monotonic()
        values = self.table.read(rows)
        out: JsonObject = {"complete": True}
        if self.predictor is not None:
            found = self.predictor.measure(values, seconds)
            out = {
                "complete": found.is_complete,
                "items": [{"number": one.number, "ranked": list(one.ranked)} for one in found.items],
                "correct": found.correct,
                "done": found.done,
                "total": found.total,
                "interval": list(found.interval) if found.interval else None,
                "recomposed": found.recomposed,
            }
        if self._geometry is not None:
            geometry = self._geometry.at(values)
            out["norms"] = _numbers(geometry.norms)
            out["interference"] = _numbers(geometry.interference)
        out["milliseconds"] = round(1000 * (time.monotonic() - begun), 1)
        return out

    def compute_geometry(self) -> None:
        """Read the whole bank for similarity, norms and interference; called once, in a thread of its own."""
        try:
            self._geometry = Geometry.of(self._bank, self.table)
        except AnisoError as e:
            self._geometry_error = e.message

    def geometry(self) -> JsonObject:
        """Return the similarity of vectors, once it is computed."""
        if self._geometry is None:
            return {"ready": False, "error": self._geometry_error}
        cosines = [list(row) for row in self._geometry.similarity().values]
        return {"ready": True, "cosines": cosines, "relative": self._geometry.relative}

    def recipe(self, rows: Rows) -> Recipe:
        """Return how ``aniso coefficients make`` writes a table."""
        return recipe_of(self.table, self.table.read(rows), self.start, self._alone)

    def command(self, rows: Rows) -> JsonObject:
        """Return the commands that write a table, and that bake it."""
        base = self.files.base or "BASE"
        bake = ["aniso", "bake", COEFFICIENTS, "--bank", self.files.bank, "--base", base]
        return {
            "make": self.recipe(rows).command(self.files.bank, self.files.start),
            "bake": shlex.join([*bake, "-o", "model.safetensors"]),
        }

    def coefficients(self, rows: Rows) -> Coefficients:
        """Return the coefficients of a table, as the command of ``command`` writes them."""
        recipe = self.recipe(rows)
        return assigned_coefficients(
            self._whole_bank, recipe.assignments, self.start if recipe.over_start else None
        )

    def bake(self, rows: Rows) -> Path:
        """Write the composed model into the desk's directory, under the next free name; return its path."""
        out, weights = self.files.out, self.files.weights
        if out is None or weights is None:
            raise UsageError(
                "USAGE",
                "this desk writes no models",
                fix="start aniso explore with -o DIR and --base BASE, or copy the command",
            )
        made = self.coefficients(rows)
        with self._baking:
            make_directory(out)
            number = next(i for i in range(1, 1 << 20) if not (out / f"model-{i}.safetensors").exists())
            path = out / f"model-{number}.safetensors"
            details = CardDetails(command=str(self.command(rows)["make"]))
            Baked(weights, self._whole_bank, made).save(path, details=details)
            made.save(out / f"coefficients-{number}.safetensors", overwrite=True)
        return path


def _item(item: DeskItem) -> JsonObject:
    small = item.small
    image = f"data:image/jpeg;base64,{base64.b64encode(small).decode()}" if isinstance(small, bytes) else None
    return {
        "number": item.number,
        "name": item.name,
        "label": item.label,
        "image": image,
        "text": small if isinstance(small, str) else None,
    }


def _numbers(values: Tensor) -> list[float | None]:
    """Return numbers with five digits; None for NaN."""
    return [None if x != x else float(f"{x:.5g}") for x in values.tolist()]
