"""What a recipe needs and what it costs, for listing and showing it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, final

from aniso.experiments.paper.catalogue import data_sets, recipe, recipes
from aniso.experiments.paper.cost import TFLOPS, Work, analysis_work, basis, total
from aniso.experiments.paper.recipe import BANK, HyperParameters, Recipe
from aniso.experiments.paper.template import Setup, banks_of, counted_settings, experiment_document, owner
from aniso.experiments.settings import Setting
from aniso.json_value import JsonObject


@final
@dataclass(frozen=True)
class Needs:
    """What a recipe needs on one backbone."""

    backbone: str
    data_sets: tuple[str, ...]
    banks: tuple[str, ...]
    work: Work

    def hours(self, tflops: float = TFLOPS) -> float:
        """Return GPU hours of the runs themselves, without those that make the banks."""
        return self.work.hours(self.backbone, tflops)

    def to_json(self, tflops: float = TFLOPS) -> JsonObject:
        return {
            "backbone": self.backbone,
            "data_sets": list(self.data_sets),
            "banks": list(self.banks),
            "runs": self.work.cells,
            "steps": self.work.steps,
            "forward_passes": self.work.passes,
            "gpu_hours": round(self.hours(tflops), 2),
            "basis": basis(self.backbone, self.work, tflops),
        }


def needs(found: Recipe, backbone: str) -> Needs:
    """Return what a recipe needs on a backbone, from its cells."""
    counted = counted_settings(found, Setup(backbone))
    names = {name for setting, _ in counted for name in _data_sets(setting)}
    work = total(counted, data_sets())
    if found.entry.analysis is not None:
        work += analysis_work(found.entry.analysis, len(counted), found.file.tasks, data_sets())
    if found.entry.kind == "analysis":
        names |= {*found.file.tasks}
    banks = banks_of(setting for setting, _ in counted)
    return Needs(backbone, tuple(sorted(names)), banks, work)


def _data_sets(setting: Setting) -> Iterable[str]:
    spec: Any = setting
    yield from (getattr(spec, name) for name in ("task", "target", "control") if getattr(spec, name, None))
    yield from getattr(spec, "tasks", ())
    yield from getattr(spec, "out_of_domain", ())


def description(found: Recipe, tflops: float = TFLOPS) -> JsonObject:
    """Return everything about a recipe but its numbers, as plain data."""
    entry = found.entry
    return {
        "id": entry.id,
        "title": entry.title,
        "kind": entry.kind,
        "parts": list(entry.parts),
        "file": PurePath(found.document.label).name,
        "needs": [needs(found, backbone).to_json(tflops) for backbone in entry.backbones],
        "figures": [use.figure for use in entry.figures],
        "analysis": entry.analysis,
        "doubts": list(entry.doubts),
        "missing": list(entry.missing),
        "differs": list(entry.differs),
        "assumed": list(entry.assumed),
    }


def specs(found: Recipe) -> list[JsonObject]:
    """Return the specs of a recipe on its first backbone, as ``aniso run`` would read them."""
    if found.entry.kind not in ("runs", "bank"):
        return []
    setup = Setup(found.entry.backbones[0])
    return [experiment_document(*owner(found, own), setup).data for own in found.entry.runs]


@final
@dataclass(frozen=True)
class ComparedValue:
    """A hyper-parameter that the paper printed, and the value that aniso uses."""

    name: str
    task: str
    published: float
    resolved: float

    @property
    def same(self) -> bool:
        return abs(self.published - self.resolved) <= 1e-9 * abs(self.published)


def compared_values(printed: Iterable[HyperParameters]) -> list[ComparedValue]:
    """Return printed hyper-parameters with what settings resolve to when no option is given."""
    from aniso.experiments.recipes import schedule

    out = []
    for parameters in printed:
        for task, value in parameters.published.items():
            made = schedule(parameters.setting, **{**parameters.options, parameters.over: task})
            out.append(ComparedValue(parameters.name, task, value, float(getattr(made, parameters.name))))
    return out


def parents() -> dict[str, str]:
    """Return the id of the entry that every label of the paper belongs to."""
    own = {name: name for name in recipes() if not name.startswith(BANK)}
    return own | {part: name for name in own for part in recipe(name).entry.parts}
