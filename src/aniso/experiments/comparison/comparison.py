"""A comparison: candidates on folds of the shots, or on the validation split; the winner as a run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Literal, final

import torch
from torch import Tensor

from aniso.data import Labelled, Task
from aniso.errors import NumericalError, UsageError
from aniso.experiments.comparison.candidates import Also, Candidate, candidates, default_budget
from aniso.experiments.comparison.choice import (
    Measured,
    Recommendation,
    adjust,
    recommend,
    recommend_for_one_shot,
)
from aniso.experiments.head_fitting import check_head, class_weights
from aniso.experiments.problem import require_split
from aniso.experiments.record import Clock, record
from aniso.experiments.result import MethodResult, RunOptions, RunResult
from aniso.experiments.run_directory import RunDirectory
from aniso.experiments.run_files import COMPARISON
from aniso.experiments.schedule_options import ScheduleOptions
from aniso.experiments.session import Session
from aniso.experiments.settings.few_shot import FewShot
from aniso.json_value import JsonObject
from aniso.learn import ItemFeatures, accuracy, features
from aniso.progress import ProgressCallback
from aniso.records import Metrics, Record, rounded
from aniso.weights.atomic import write_text

By = Literal["auto", "folds", "val"]
BY: tuple[By, ...] = ("auto", "folds", "val")
FOLDS = 4

CandidateDone = Callable[[str, Measured], None]
"""Called with the part of the data that was held out, and what was measured there."""


@final
@dataclass(frozen=True)
class ComparisonOptions:
    """What is compared, and on which held-out data."""

    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    by: By = "auto"
    folds: int = FOLDS
    budget: int | None = None
    """Cells of each block that a selection keeps; default: a quarter of the vectors."""
    also: tuple[Also, ...] = ()
    test: bool = False
    """Also evaluate every candidate on the test split, which is not used for choosing."""


@final
@dataclass(frozen=True)
class ComparisonResult:
    """All candidates with what was measured, and the recommendation."""

    task: str
    shots: int
    chosen_by: str
    """Which data candidates were chosen by, in words."""
    rows: Sequence[Measured]
    recommendation: Recommendation
    notes: tuple[str, ...] = field(default=())

    def content(self) -> JsonObject:
        """Return plain JSON values."""
        return {
            "task": self.task,
            "shots": self.shots,
            "chosen_by": self.chosen_by,
            "candidates": [row.content() for row in self.rows],
            "chosen": self.recommendation.chosen.candidate.label,
            "reason": self.recommendation.reason,
            "spec": as_run(self.recommendation.chosen.candidate).spec(),
            "notes": list(self.notes),
        }


@final
class Comparison:
    """Candidates for one few-shot setting, over one model and bank that are loaded once.

    >>> setting = FewShot(model="mini", bank="mini", task="./photos", shots=4, method="none")
    >>> Comparison(setting).run().recommendation.reason
    """

    def __init__(
        self,
        setting: FewShot,
        options: ComparisonOptions | None = None,
        run_options: RunOptions | None = None,
        done: CandidateDone | None = None,
    ) -> None:
        """``setting`` names model, bank, task, shots and seed; its method and head are not used."""
        self._setting = setting.model_copy(update={"compare": False})
        self._how = options or ComparisonOptions()
        self._features = ItemFeatures()
        self._options = replace(run_options or RunOptions(), features=self._features)
        self._done = done or (lambda where, row: None)
        self._origin = Session(self._setting, self._options)

    @cached_property
    def task(self) -> Task:
        """The task with all its splits."""
        return self._origin.task(self._setting.task)

    @cached_property
    def shots(self) -> Labelled:
        """The shots that every candidate learns from."""
        train = require_split(self.task, "train", "shots are taken from")
        setting = self._setting
        return train.shots(setting.shots, setting.seed, allow_fewer=setting.allow_fewer_shots)

    @cached_property
    def candidates(self) -> list[Candidate]:
        """All candidates, the simplest first."""
        budget = self._how.budget
        if self._setting.bank is not None:
            vectors = len(self._origin.problem.vectors(self._origin.whole_bank.names))
            if budget is None:
                budget = default_budget(vectors)
            elif budget >= vectors:
                raise UsageError(
                    "SPEC",
                    f"a budget of {budget} selects nothing from {vectors} vectors",
                    fix=f"--budget {max(1, vectors // 4)}, or leave it out",
                )
        return candidates(self._setting, self._how.schedule, budget=budget, also=self._how.also)

    def run(self) -> ComparisonResult:
        """Measure every candidate on held-out items and recommend one."""
        held_out = self._held_out()
        self._check()
        rows = adjust(self._measured(held_out))
        made = recommend(rows) if held_out else recommend_for_one_shot(rows)
        notes = [*self._origin.problem.notes]
        notes += [f"warning: {row.candidate.label} failed: {row.failure}" for row in rows if row.failure]
        words = self._words(len(held_out))
        return ComparisonResult(self.task.name, self._setting.shots, words, rows, made, tuple(notes))

    def learn(self, chosen: Candidate, options: RunOptions) -> RunResult:
        """Learn a candidate from all shots, and evaluate it as ``aniso fit few-shot`` does."""
        session = self._origin.sibling(as_run(chosen), dict(self._origin.tasks))
        session.options = replace(options, features=self._features)
        return session.run()

    # which items are held out

    def _held_out(self) -> list[Task]:
        """Tasks whose train split is learned from, and whose test split is held out."""
        if self._by == "val":
            return [self._as_task(self.shots, require_split(self.task, "val", "candidates are chosen by"))]
        if max(self.shots.counts.values()) < 2:
            return []
        folds = self.shots.folds(min(self._how.folds, max(self.shots.counts.values())), self._setting.seed)
        return [self._as_task(train, held) for train, held in folds]

    @cached_property
    def _by(self) -> Literal["folds", "val"]:
        if self._how.by != "auto":
            return "folds" if self._how.by == "folds" else "val"
        val = self.task.splits.get("val")
        return "val" if val is not None and len(val) >= len(self.shots) else "folds"

    def _words(self, parts: int) -> str:
        if self._by == "val":
            val = self.task.split("val")
            return f"the validation split, {len(val):,} {val.item_kind}; each candidate learns from all shots"
        if not parts:
            return "nothing: one shot of each class leaves none to hold out"
        return f"cross-validation over the {len(self.shots):,} shots in {parts} folds"

    def _as_task(self, train: Labelled, held_out: Labelled) -> Task:
        return replace(self.task, train=train, val=None, test=held_out, notes=())

    # measuring

    def _check(self) -> None:
        """Raise what any candidate would raise, before the first one is trained."""
        tasks = {self._setting.task: self._as_task(self.shots, self.shots)}
        for family, members in groupby(self.candidates, key=lambda one: one.family):
            for i, candidate in enumerate(members):
                session = self._session(candidate, tasks)
                if candidate.head is not None and family == "zero-shot":
                    check_head(session)
                elif i == 0 and candidate.setting.select is None:  # a selection is a pass over the shots
                    session.plan()

    def _measured(self, held_out: Sequence[Task]) -> list[Measured]:
        """Measure all candidates on every part, and on the test split if asked."""
        test = self.task.splits.get("test") if self._how.test else None
        rows = [] if held_out else [Measured(candidate) for candidate in self.candidates]
        for number, task in enumerate(held_out, 1):
            where = "validation split" if self._by == "val" else f"fold {number} of {len(held_out)}"
            found = list(self._on_one_part(task, where, test if self._by == "val" else None))
            rows = [one.joined(other) for one, other in zip(rows, found, strict=True)] if rows else found
        rows = [
            replace(row, seconds=(row.seconds or 0.0) / len(held_out)) for row in rows if held_out
        ] or rows
        return self._with_test(rows, test) if test is not None and self._by == "folds" else rows

    def _with_test(self, rows: Sequence[Measured], test: Labelled) -> list[Measured]:
        """Add the accuracy on the test split of every candidate, learned from all shots."""
        found = self._on_one_part(self._as_task(self.shots, test), "test split")
        return [
            replace(row, test_accuracy=whole.accuracy, trainable=whole.trainable, seconds=whole.seconds)
            for row, whole in zip(rows, found, strict=True)
        ]

    def _on_one_part(self, task: Task, where: str, test: Labelled | None = None) -> Iterator[Measured]:
        """Measure all candidates; what several learn in common is learned once, and charged to each."""
        tasks = {self._setting.task: task}
        for _, members in groupby(self.candidates, key=lambda one: one.family):
            shared = _Shared()
            for candidate in members:
                session = self._session(candidate, tasks)
                try:
                    if shared.result is None and not shared.failure:
                        shared.result, shared.seconds = self._timed(partial(_run_method, session))
                    row = self._row(candidate, session, shared, test)
                except NumericalError as e:
                    shared.failure = shared.failure or (e.message if shared.result is None else "")
                    row = Measured(candidate, failure=e.message)
                self._done(where, row)
                yield row
            self._features.keep_only(self._origin.model)

    def _row(
        self, candidate: Candidate, session: Session, shared: _Shared, test: Labelled | None
    ) -> Measured:
        if shared.result is None:
            return Measured(candidate, failure=shared.failure)
        result, own = self._timed(partial(session.with_head, shared.result))
        held_out = session.problem.evaluation.tests[self.task.name]
        assert isinstance(held_out, Labelled)
        logits = self._logits(session, result, held_out)
        row = Measured(candidate, logits, held_out.labels, shared.seconds + own, _trainable(result.metrics))
        if test is None:
            return row
        found = accuracy(self._logits(session, result, test).argmax(-1), test)
        return replace(row, test_accuracy=found.value)

    def _logits(self, session: Session, result: MethodResult, split: Labelled) -> Tensor:
        """Return the logits of every item; features of one model are computed once."""
        seen = features(
            result.model_for(self.task.name),
            split,
            workers=self._options.workers,
            cache=self._features,
            progress=self._options.progress,
        )[0]
        head = result.head or class_weights(session)
        with torch.no_grad():
            found = head.logits(seen.to(session.device)).cpu()
        if not bool(torch.isfinite(found).all()):
            raise NumericalError(
                "LEARN-NONFINITE", f"logits on {split.name} are NaN or infinite", fix="lower --lr"
            )
        return found

    def _timed(self, work: Callable[[], MethodResult]) -> tuple[MethodResult, float]:
        """Return a result and the seconds it takes alone: shared features count as if computed again."""
        seconds, charged, begun = self._features.seconds, self._features.charged, time.monotonic()
        result = work()
        spent = time.monotonic() - begun
        return result, spent - (self._features.seconds - seconds) + (self._features.charged - charged)

    def _session(self, candidate: Candidate, tasks: dict[str, Task]) -> Session:
        # the train split of a fold is what is left of the shots
        setting = candidate.setting.model_copy(update={"allow_fewer_shots": True})
        return self._origin.sibling(setting, dict(tasks))


@final
@dataclass
class _Shared:
    """What the candidates of one family have in common: a method's result, or why there is none."""

    result: MethodResult | None = None
    seconds: float = 0.0
    failure: str = ""


def as_run(candidate: Candidate) -> FewShot:
    """Return the setting of a candidate as an ordinary run, which also evaluates the base."""
    return candidate.setting.model_copy(update={"compare": True})


def _run_method(session: Session) -> MethodResult:
    return session.setting.method.run(session)


def _trainable(metrics: Metrics) -> int:
    return (metrics.trainable or 0) + (metrics.head.trainable if metrics.head is not None else 0)


def write_winner(
    comparison: Comparison,
    result: ComparisonResult,
    options: RunOptions,
    directory: Path,
    progress: ProgressCallback,
) -> tuple[Record, tuple[str, ...]]:
    """Learn the recommended candidate from all shots into a run directory; returns its record and notes.

    The directory is that of ``aniso fit few-shot`` with the same options, and has the comparison beside.
    """
    chosen = result.recommendation.chosen.candidate
    run, clock = RunDirectory(directory), Clock()
    run.begin(as_run(chosen), resume=False)
    try:
        learned = comparison.learn(chosen, replace(options, directory=directory, progress=progress))
    except BaseException as e:
        run.forget(e)
        raise
    made = record(as_run(chosen), learned, clock)
    text = json.dumps(rounded(result.content()), indent=1, sort_keys=True) + "\n"
    write_text(directory / COMPARISON, text, overwrite=True)
    return run.finish(made, learned), learned.notes
