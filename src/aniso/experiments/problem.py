"""The problem that a setting poses once its data are loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from aniso.data import Labelled, Task, TextDataset, Unlabelled
from aniso.errors import InputError, UsageError, printable
from aniso.experiments.evaluation import Evaluation
from aniso.experiments.methods import Method
from aniso.learn import Keep, Objective
from aniso.records import Supervision


@final
@dataclass(frozen=True)
class Problem:
    """What is learned, from which vectors, and how the result is chosen and evaluated."""

    objective: Objective
    keep: Keep
    evaluation: Evaluation
    vectors: Callable[[Sequence[str]], Sequence[str]]
    """Which of a bank's vectors are composed."""
    scales: Sequence[float] = ()
    """Scales that a search tries; the first is 0."""
    has_own_vectors: bool = False
    """Whether every task has a vector of its own, which alone is what results are compared with."""
    shots: Labelled | None = None
    """What a head is learned from."""
    calibration: Mapping[str, Unlabelled] = field(default_factory=dict)
    """Items by task that the result is calibrated on."""
    notes: tuple[str, ...] = ()

    def supervision(self, method: Method, *, has_head: bool = False) -> Supervision | None:
        """Return what decides the result of a method: no data, items without labels, or labels.

        None for texts, of which there is no class to label. A head is learned from labels.
        """
        terms = [term for _, term in self.objective.data_terms] if method.minimises else []
        splits = [
            *(term.split for term in terms),
            *(self.keep.splits if method.uses_keep_data else ()),
            *self.calibration.values(),
        ]
        if any(isinstance(split, TextDataset) for split in splits):
            return None
        if has_head or any(isinstance(split, Labelled) for split in splits):
            return "labelled"
        return "unlabelled" if splits else "none"


def other_vectors(
    present: Sequence[str], own: str, leave_out: Sequence[str], only: Sequence[str] = ()
) -> list[str]:
    """Return a bank's vectors without a task's own and those to leave out, or only the named ones.

    Names that the bank does not have are errors, and so is a task's own vector among ``only``.
    """
    # a folder MNIST is the task that a vector mnist was made from: its own vector would give the labels away
    out = {_plain(own), *map(_plain, leave_out)}
    _require_present([name for name in leave_out if name != own], present, "to leave out", "--leave-out")
    _require_present(only, present, "to use", "--only")
    barred = [name for name in only if _plain(name) in out]
    if barred:
        raise UsageError(
            "BANK-NAME",
            f"vector '{printable(barred[0])}' cannot be used: it is the task's own, or left out",
            expected=", ".join(name for name in present if _plain(name) not in out),
            fix="name another vector with --only",
        )
    return [name for name in present if _plain(name) not in out and (not only or name in only)]


def _require_present(names: Sequence[str], present: Sequence[str], purpose: str, flag: str) -> None:
    unknown = [name for name in names if name not in present]
    if unknown:
        raise UsageError(
            "BANK-NAME",
            f"the bank has no vector '{printable(unknown[0])}' {purpose}",
            expected=", ".join(present),
            fix=f"correct the name, or remove {flag}",
        )


def _plain(name: str) -> str:
    return re.sub(r"[\W_]+", "", name).casefold()


def require_split(task: Task, role: str, why: str) -> Labelled:
    """Return a split of a task, or raise an error that says what it is needed for."""
    found = task.splits.get(role)
    if found is None:
        raise InputError(
            "DATA-SPLIT",
            f"{printable(task.name)} has no {role} split, which {why}",
            found=", ".join(task.splits),
            fix=f"add one, or choose another way: aniso task show '{printable(task.name)}'",
        )
    return found
