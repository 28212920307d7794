"""What ``--plan`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aniso.cli import show
from aniso.sizes import show_bytes

if TYPE_CHECKING:
    from aniso.experiments.result import RunPlan
    from aniso.experiments.settings import Setting

_COPIES = 4  # of every trained number in a checkpoint: its value, two moments, and the kept value
_CHECKPOINTS = 3  # two, and one that is being written


def print_plan(setting: Setting, plan: RunPlan, writes: list[str], *, as_json: bool) -> None:
    """Print what a run would read, train and write."""
    trained = plan.trained
    count = trained.trainable or 0
    disk = (_CHECKPOINTS * _COPIES + 1) * 4 * count if writes else 0
    if as_json:
        show.as_json({"spec": setting.spec(), **_as_json(plan), "disk_bytes": disk, "writes": writes})
        return
    _line("method", plan.method)
    _line("evaluated on", _counts(plan.evaluated_on, plan.unit))
    if trained.vectors is not None:
        _line("vectors", ", ".join(trained.vectors))
    if trained.trainable is not None:
        _line("trainable", f"{trained.trainable:,}")
    for note in trained.notes:
        _line("note", note)
    if trained.selection is not None:
        chosen = trained.selection
        cells = f"{chosen.cells:,} cells of {len(chosen.vectors)} vectors"
        _line("selection", f"{chosen.strategy}, budget {chosen.budget}: {cells}")
    if plan.learned_from:
        _line("learned from", _counts(plan.learned_from, plan.unit))
    if plan.steps is not None:
        _line("steps", f"{plan.steps:,}")
    if plan.head is not None:
        _line("head", plan.head)
    _line("chosen by", _counts(plan.chosen_by, plan.unit))
    _line("disk", show_bytes(disk))
    _line("writes", ", ".join(writes) or "nothing")
    if trained.memory is not None:
        _line("memory", show_bytes(trained.memory.memory))
        _line("strategy", trained.memory.strategy)


def _line(name: str, value: str) -> None:
    show.line(f"{name:14} {value}")


def _counts(splits: Mapping[str, int], unit: str) -> str:
    return ", ".join(f"{name} ({count:,} {unit})" for name, count in splits.items()) or "nothing"


def _as_json(plan: RunPlan) -> Mapping[str, Any]:
    trained = plan.trained
    out = {
        "method": plan.method,
        "tests": dict(plan.evaluated_on),
        "learned_from": dict(plan.learned_from) or None,
        "chosen_by": dict(plan.chosen_by),
        "steps": plan.steps,
        "head": plan.head,
        "trainable": trained.trainable,
        "vectors": None if trained.vectors is None else list(trained.vectors),
        "notes": list(trained.notes) or None,
        "selection": None if trained.selection is None else trained.selection.content(),
        "memory_bytes": None if trained.memory is None else trained.memory.memory,
        "strategy": None if trained.memory is None else trained.memory.strategy,
    }
    return {key: value for key, value in out.items() if value is not None}
