"""What an engine is: it runs the cells that a source hands out, and says what became of each."""

from __future__ import annotations

import importlib
import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from pydantic import BaseModel, ConfigDict, ValidationError

from aniso.errors import UsageError, printable
from aniso.experiments.cell_source import CellSource
from aniso.experiments.grid import Grid
from aniso.experiments.spec import Cell
from aniso.experiments.worker import CellOptions, Place
from aniso.registry import ENGINES
from aniso.weights.atomic import write_text

Happened = Callable[[Cell, str, float], None]
"""Called with a cell, what became of it, and the seconds it took."""


def _nothing(cell: Cell, what: str, seconds: float) -> None:
    pass


@final
@dataclass(frozen=True)
class GridRun:
    """How the cells of a grid are run, on any engine."""

    options: CellOptions = field(default_factory=CellOptions)
    jobs: int = 1
    """Cells at the same time; an engine that knows its resources may decide itself."""
    timeout: float | None = None
    """Seconds that a cell may take."""
    happened: Happened = _nothing


class Engine(BaseModel):
    """Runs cells; its fields are the options of ``--engine-option``.

    Cells write their records themselves, below the directory of the grid, which all machines must see. Banks
    and data are not sent to them, only their paths.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @abstractmethod
    def run(self, grid: Grid, source: CellSource, how: GridRun) -> None:
        """Run what the source hands out; a cell that fails costs itself alone."""


def make_engine(name: str, options: Sequence[str] = ()) -> Engine:
    """Return an engine by name, with options such as "gpus=1"."""
    found: type[Engine] = ENGINES.get(name)
    pairs = [option.partition("=") for option in options]
    try:
        return found.model_validate({key: value for key, _, value in pairs})
    except ValidationError as e:
        first = e.errors()[0]
        known = [f"{key}={value.default}" for key, value in found.model_fields.items()]
        raise UsageError(
            "USAGE",
            f"--engine-option {printable('.'.join(map(str, first['loc'])))}: {first['msg'].lower()}",
            expected=", ".join(known) or f"no options: '{name}' has none",
            fix="give KEY=VALUE, once for each option",
        ) from None


def note_failure(place: Place, cell: Cell, reason: str) -> None:
    """Write down why a cell failed that could not do so itself."""
    made = {"id": cell.setting.id, "label": cell.label, "spec": cell.setting.spec(), "message": reason}
    write_text(place.failure, json.dumps(made, indent=1, sort_keys=True) + "\n", overwrite=True)


def require_package(name: str, extra: str) -> Any:
    """Import the package of an engine."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UsageError(
            "MODEL-LIBRARY",
            f"this engine needs {name}, which is not installed",
            fix=f"pip install 'aniso[{extra}]'",
        ) from None


def failure_message(place: Place) -> str:
    """Return why a cell failed."""
    return str(json.loads(place.failure.read_text()).get("message", ""))
