"""The directory of results: banks, records, analyses and reports of all recipes, by backbone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from aniso.experiments.paper.catalogue import bank_names
from aniso.experiments.paper.smoke import SMOKE_BANKS, SMOKE_MODEL
from aniso.experiments.paper.template import Setup

RECORDS, BANKS, ANALYSES, REPORTS, DATA = "records", "banks", "analyses", "report", "smoke-data"


@final
@dataclass(frozen=True)
class Workspace:
    """Where the results of recipes on one backbone are. Recipes with the same runs share their records."""

    root: Path
    backbone: str
    smoke: bool = False
    bank_root: Path | None = None
    """Directory of banks, by name; default: within the workspace. It may itself be the standard bank."""

    @property
    def model(self) -> str:
        """The model that records name."""
        return SMOKE_MODEL if self.smoke else self.backbone

    def records(self, experiment: str) -> Path:
        """Return the directory of an experiment's records."""
        return self.root / RECORDS / experiment / self.model

    def analysis(self, name: str) -> Path:
        """Return the file of a recipe's analysis."""
        return self.root / ANALYSES / f"{name}-{self.model}.json"

    @property
    def reports(self) -> Path:
        return self.root / REPORTS

    @property
    def smoke_data(self) -> Path:
        return self.root / DATA

    def bank(self, name: str) -> Path:
        """Return the directory of a bank that is given or made."""
        given = self.bank_root
        if given is not None and (given / "manifest.json").exists():
            return given if name == "standard" else self.root / BANKS / self.model / name
        return (given or self.root / BANKS / self.model) / name

    def bundled(self, name: str) -> str | None:
        """Return the bundled bank that a smoke run takes, if there is one."""
        return SMOKE_BANKS.get(name) if self.smoke and self.bank_root is None else None

    @property
    def banks(self) -> Mapping[str, str]:
        """Places of all banks by name, as settings have them.

        Paths are absolute, since they are part of what identifies a run: ``-o paper`` and ``-o ./paper`` are
        the same.
        """
        return {name: self.bundled(name) or str(self.bank(name).resolve()) for name in bank_names()}

    @property
    def setup(self) -> Setup:
        """What templates are completed with."""
        return Setup(self.backbone, self.banks, self.smoke)
