"""A comparison of merge rules and learned coefficients on several tasks' validation data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from aniso.data import Labelled, Task, Unlabelled
from aniso.errors import InputError, NumericalError, UsageError
from aniso.experiments.comparison.addition_candidates import (
    AdditionCandidate,
    AdditionComparisonOptions,
    addition_candidates,
)
from aniso.experiments.comparison.addition_choice import (
    AdditionRecommendation,
    AdditionRow,
    recommend_addition,
)
from aniso.experiments.comparison.kept_rows import KeptRows, row_key, splits_key
from aniso.experiments.comparison.scale_table import ScaleTable, scale_table
from aniso.experiments.comparison.winner import AnyComparison, as_run
from aniso.experiments.methods.merge_rules import MergeMethod
from aniso.experiments.problem import require_split
from aniso.experiments.result import RunOptions
from aniso.experiments.session import Session
from aniso.experiments.settings.addition import Addition
from aniso.json_value import JsonObject
from aniso.learn import Agreement, Best, Keep, predict_unlabelled

RowDone = Callable[[AdditionRow], None]
"""Called with every candidate that was measured."""
_UNFIT = ("MERGE-RANK", "MERGE-VECTORS", "VECTOR-ZERO")
"""Errors that say that a merge rule has no result for these vectors; the others are still compared."""


@final
@dataclass(frozen=True)
class AdditionResult:
    """All candidates with what was measured, and the recommendation."""

    tasks: tuple[str, ...]
    measure: str
    """What the share of hits is: accuracy, or agreement with the tasks' own vectors."""
    chosen_by: str
    """Which data candidates were chosen by, in words."""
    rows: Sequence[AdditionRow]
    recommendation: AdditionRecommendation
    notes: tuple[str, ...] = field(default=())

    @property
    def chosen(self) -> AdditionCandidate:
        """The recommended candidate."""
        return self.recommendation.chosen.candidate

    def content(self) -> JsonObject:
        """Return plain JSON values."""
        return {
            "tasks": list(self.tasks),
            "measure": self.measure,
            "chosen_by": self.chosen_by,
            "candidates": [row.content(self.measure) for row in self.rows],
            "own_vectors": dict(self.recommendation.chosen.references),
            "chosen": self.chosen.label,
            "reason": self.recommendation.reason,
            "spec": as_run(self.chosen).spec(),
            "notes": list(self.notes),
        }


@final
class AdditionComparison(AnyComparison):
    """Ways to make one model of several tasks, over one model and bank that are loaded once.

    The validation splits are divided into folds. Whatever a candidate learns or chooses, it does so on all
    folds but one, and is measured on that one; the test splits are not used.

    >>> setting = Addition(model="mini", bank="mini", tasks=("./mnist", "./svhn"))
    >>> AdditionComparison(setting).run().recommendation.reason
    """

    def __init__(
        self,
        setting: Addition,
        options: AdditionComparisonOptions | None = None,
        run_options: RunOptions | None = None,
        done: RowDone | None = None,
        directory: Path | None = None,
    ) -> None:
        """``setting`` names model, bank, tasks and seed; its method has the options of learned candidates.

        Measurements are kept in ``directory``, and those of the same comparison that are there are reused.
        """
        self._setting = setting.model_copy(update={"compare": False})
        self._how = options or AdditionComparisonOptions()
        self._done = done or (lambda row: None)
        self._directory = directory
        spec: JsonObject = {**self._setting.spec(), "compared": self._how.spec()}
        self._kept = KeptRows(directory, spec, AdditionRow)
        self._origin = Session(self._setting, run_options or RunOptions())
        self.candidates = addition_candidates(
            self._setting, self._how.chosen, with_labels=not self._how.without_labels
        )

    def run(self) -> AdditionResult:
        """Measure every candidate on held-out items and recommend one."""
        self._check()
        rows = list(self._measured())
        made = recommend_addition(rows)
        notes = [note for task in self.tasks.values() for note in task.notes] + self._kept.notes
        if self._kept.reused:
            notes.append(f"{self._kept.reused:,} measurements of an earlier call are reused")
        notes += [f"warning: {row.candidate.label} failed: {row.failure}" for row in rows if row.failure]
        count, kind = sum(map(len, self._splits.values())), next(iter(self._splits.values())).item_kind
        words = (
            f"{self.measure} on {count:,} validation {kind} in {self._how.folds} folds, each held out once"
        )
        if self._how.without_labels:
            words += "; no label is read"
        names = tuple(self._splits)
        return AdditionResult(names, self.measure, words, rows, made, tuple(notes))

    # data

    @property
    def measure(self) -> str:
        """What candidates are compared by."""
        return "agreement" if self._how.without_labels else "accuracy"

    @cached_property
    def tasks(self) -> dict[str, Task]:
        """The tasks with all their splits, by the word that names them."""
        return {ref: self._origin.task(ref) for ref in self._setting.tasks}

    @cached_property
    def _splits(self) -> dict[str, Unlabelled]:
        """Every task's validation items without labels, by the task's name."""
        return {task.name: split.unlabelled() for task, split in self._labelled}

    @cached_property
    def _labelled(self) -> list[tuple[Task, Labelled]]:
        found = []
        for task in self.tasks.values():
            split = require_split(task, "val", "candidates are compared on")
            if len(split) < self._how.folds:
                raise InputError(
                    "DATA-SHOTS",
                    f"{split.name} has fewer {split.item_kind} than there are folds",
                    found=f"{len(split)}, {self._how.folds} folds",
                    fix="--folds 2, or more validation data",
                )
            found.append((task, split))
        return found

    @cached_property
    def _groups(self) -> dict[str, list[list[int]]]:
        """For every task the items of each fold, drawn without reading labels."""
        seed = self._setting.seed
        return {task.name: split.unlabelled_folds(self._how.folds, seed) for task, split in self._labelled}

    def _fold(self, number: int) -> dict[str, Task]:
        """The tasks with all folds but one as validation split, and that one in place of the test split."""
        found = {}
        for ref, (task, split) in zip(self.tasks, self._labelled, strict=True):
            held = self._groups[task.name][number]
            learned = replace(split.without(held), name=split.name)
            found[ref] = replace(task, val=learned, test=split.take(held, "held out"), notes=())
        return found

    @cached_property
    def _truth(self) -> dict[str, Tensor]:
        """The classes that count as hits."""
        if self._how.without_labels:
            return self._own
        return {task.name: torch.tensor(split.labels) for task, split in self._labelled}

    @cached_property
    def _own(self) -> dict[str, Tensor]:
        """What every task's own vector predicts for its items."""
        return {name: self._predicted(self._origin.with_own_vector(name), name) for name in self._splits}

    def _predicted(self, model: torch.nn.Module, task: str, places: Sequence[int] | None = None) -> Tensor:
        split = self._splits[task] if places is None else self._splits[task].take(places)
        return predict_unlabelled(model, split, workers=self._origin.options.workers).labels

    @cached_property
    def _references(self) -> dict[str, float]:
        return {name: _share(self._own[name], truth) for name, truth in self._truth.items()}

    # measuring

    def _check(self) -> None:
        """Raise what any candidate would raise, before the first one is measured."""
        fold = self._fold(0)
        for candidate in self.candidates:
            session = self._origin.sibling(candidate.setting, dict(fold))
            try:
                session.plan()
            except UsageError as e:
                if not candidate.is_merge or e.code not in _UNFIT:
                    raise
        if self._directory is not None:  # the winner is evaluated on it
            for task in self.tasks.values():
                require_split(task, "test", "the recommended model is measured on")

    def _measured(self) -> Iterator[AdditionRow]:
        """Measure all candidates; those of one merge rule share its merged vector."""
        folds = [self._fold(number) for number in range(self._how.folds)]
        splits = [split for fold in folds for task in fold.values() for split in (task.val, task.test)]
        read = [s.unlabelled() if self._how.without_labels and s else s for s in splits]
        key = splits_key(read) + self.measure
        encoder, bank = self._origin.encoder.fingerprint, self._origin.whole_bank.whole_hash
        for _, members in groupby(self.candidates, key=lambda one: one.setting.method.name):
            shared = _Shared()
            for candidate in members:
                name = row_key(candidate, key, encoder, bank)
                row = self._kept.read(candidate, name)
                if row is None:
                    row = self._row(candidate, shared)
                    self._done(row)
                    self._kept.write(row, name)
                yield row

    def _row(self, candidate: AdditionCandidate, shared: _Shared) -> AdditionRow:
        try:
            row = self._merge(candidate, shared) if candidate.is_merge else self._learned(candidate)
        except NumericalError as e:
            return AdditionRow(candidate, failure=e.message)
        except (UsageError, InputError) as e:
            if not candidate.is_merge or e.code not in _UNFIT:
                raise
            return AdditionRow(candidate, failure=e.message)
        return replace(row, references=self._references)

    def _merge(self, candidate: AdditionCandidate, shared: _Shared) -> AdditionRow:
        method = candidate.setting.method
        assert isinstance(method, MergeMethod)
        if shared.table is None:
            session = self._origin.sibling(candidate.setting, self._fold(0))
            default = () if method.fixed_scale is None else (method.fixed_scale,)
            shared.table = scale_table(session, method, self._splits, default)
        table = shared.table
        if method.fixed_scale is not None:
            chosen = [table.at(method.fixed_scale)] * (self._how.folds + 1)
        else:
            learned = [self._all_but(number) for number in range(self._how.folds)]
            everything = {task: torch.arange(len(split)) for task, split in self._splits.items()}
            chosen = [
                self._choice(candidate, table, len(method.points), part) for part in (*learned, everything)
            ]
        hits = {}
        for task, predictions in table.predictions.items():
            hits[task] = torch.zeros(predictions.shape[1], dtype=torch.bool)
            for row, held in zip(chosen, self._groups[task], strict=False):
                hits[task][held] = predictions[row, held] == self._truth[task][held]
        searched = 0 if method.fixed_scale is not None else len(method.points)
        seconds = table.merging_seconds + searched * table.scale_seconds
        return AdditionRow(
            candidate, hits, scale=table.scales[chosen[-1]], seconds=seconds, trainable=int(searched > 0)
        )

    def _all_but(self, number: int) -> dict[str, Tensor]:
        """For every task the items of all folds but one."""
        found = {}
        for task, groups in self._groups.items():
            left = [i for n, group in enumerate(groups) if n != number for i in group]
            found[task] = torch.tensor(sorted(left))
        return found

    def _choice(
        self, candidate: AdditionCandidate, table: ScaleTable, points: int, part: dict[str, Tensor]
    ) -> int:
        """Return the row of the scale that the setting's keep rule chooses by some of the items."""
        by_labels = candidate.data == "labelled"
        truth = self._truth if by_labels else self._own
        history = [
            {
                self._splits[task].name: _share(table.predictions[task][row, places], truth[task][places])
                for task, places in part.items()
            }
            for row in range(points)
        ]
        return self._keep(by_labels, part).choose(history)

    def _keep(self, by_labels: bool, part: dict[str, Tensor]) -> Keep:
        """The keep rule that ``fit addition`` has for this choice."""
        if not by_labels:
            pairs = ((split, self._origin.teacher(task)) for task, split in self._splits.items())
            return Agreement(*pairs)
        own = {
            split.name: _share(self._own[task.name][part[task.name]], self._truth[task.name][part[task.name]])
            for task, split in self._labelled
        }
        references = {name: share for name, share in own.items() if share > 0}
        return Best(*(split for _, split in self._labelled), references=references)

    def _learned(self, candidate: AdditionCandidate) -> AdditionRow:
        """Learn on all folds but one, for each of them; the base is measured once."""
        hits = {task: torch.zeros(len(split), dtype=torch.bool) for task, split in self._splits.items()}
        minimises, begun, trainable, spent = candidate.setting.method.minimises, 0.0, 0, 0.0
        for number in range(self._how.folds):
            session = self._origin.sibling(candidate.setting, self._fold(number))
            begun = time.monotonic()
            result = candidate.setting.method.run(session)
            spent += time.monotonic() - begun
            trainable = result.metrics.trainable or 0
            for task, groups in self._groups.items():
                held = groups[number]
                predicted = self._predicted(result.model_for(task), task, held)
                hits[task][held] = predicted == self._truth[task][held]
        seconds = spent / self._how.folds if minimises else 0.0
        return AdditionRow(candidate, hits, seconds=seconds, trainable=trainable)


@final
@dataclass
class _Shared:
    """What the candidates of one merge rule have in common."""

    table: ScaleTable | None = None


def _share(predicted: Tensor, truth: Tensor) -> float:
    return float((predicted == truth).double().mean())
