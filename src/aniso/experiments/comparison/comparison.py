"""A comparison: candidates on folds of the shots, or on the validation split; the winner as a run."""

from __future__ import annotations

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
from aniso.experiments.comparison.kept_rows import KeptRows, row_key, splits_key
from aniso.experiments.comparison.winner import AnyComparison, as_run
from aniso.experiments.head_fitting import check_head, class_weights
from aniso.experiments.problem import require_split
from aniso.experiments.result import MethodResult, RunOptions
from aniso.experiments.schedule_options import ScheduleOptions
from aniso.experiments.session import Session
from aniso.experiments.settings.few_shot import FewShot
from aniso.json_value import JsonObject
from aniso.learn import ItemFeatures, accuracy, features
from aniso.records import Metrics

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

    def spec(self) -> JsonObject:
        """Return the options that decide what is chosen, as plain data."""
        how: JsonObject = {"by": self.by, "folds": self.folds, "budget": self.budget, "also": self.also}
        return {**how, "schedule": self.schedule.model_dump(mode="json")}


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

    @property
    def chosen(self) -> Candidate:
        """The recommended candidate."""
        return self.recommendation.chosen.candidate

    def content(self) -> JsonObject:
        """Return plain JSON values."""
        return {
            "task": self.task,
            "shots": self.shots,
            "chosen_by": self.chosen_by,
            "candidates": [row.content() for row in self.rows],
            "chosen": self.chosen.label,
            "reason": self.recommendation.reason,
            "spec": as_run(self.chosen).spec(),
            "notes": list(self.notes),
        }


@final
class Comparison(AnyComparison):
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
        directory: Path | None = None,
    ) -> None:
        """``setting`` names model, bank, task, shots and seed; its method and head are not used.

        Measurements are kept in ``directory``, and those of the same comparison that are there are reused.
        """
        self._setting = setting.model_copy(update={"compare": False})
        self._how = options or ComparisonOptions()
        self._features = ItemFeatures()
        self._options = replace(run_options or RunOptions(), features=self._features)
        self._done = done or (lambda where, row: None)
        spec = {**self._setting.spec(), "compared": self._how.spec()}
        self._kept = KeptRows(directory, spec, Measured)
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
        notes = [*self._origin.problem.notes, *self._kept.notes]
        if self._kept.reused:
            notes.append(f"{self._kept.reused:,} measurements of an earlier call are reused")
        notes += [f"warning: {row.candidate.label} failed: {row.failure}" for row in rows if row.failure]
        words = self._words(len(held_out))
        return ComparisonResult(self.task.name, self._setting.shots, words, rows, made, tuple(notes))

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
        found = self._on_one_part(self._as_task(self.shots, test), "test split", is_test=True)
        return [
            replace(row, test_accuracy=whole.test_accuracy, trainable=whole.trainable, seconds=whole.seconds)
            for row, whole in zip(rows, found, strict=True)
        ]

    def _on_one_part(
        self, task: Task, where: str, test: Labelled | None = None, *, is_test: bool = False
    ) -> Iterator[Measured]:
        """Measure all candidates; what several learn in common is learned once, and charged to each.

        With ``is_test`` the held-out items are those of the test split, of which only accuracies are kept.
        """
        splits = splits_key([task.splits.get("train"), task.splits.get("test"), test])
        for _, members in groupby(self.candidates, key=lambda one: one.family):
            shared = _Shared()
            for candidate in members:
                key = row_key(candidate, splits, self._origin.encoder.fingerprint, self._bank_hash)
                row = self._kept.read(candidate, key)
                if row is None:
                    row = self._measure(candidate, task, shared, test)
                    self._done(where, row)
                    if is_test:
                        row = replace(row, test_accuracy=row.accuracy, logits=None, labels=())
                    self._kept.write(row, key)
                yield row
            self._features.keep_only(self._origin.model)

    @cached_property
    def _bank_hash(self) -> str | None:
        return self._origin.whole_bank.whole_hash if self._setting.bank is not None else None

    def _measure(self, candidate: Candidate, task: Task, shared: _Shared, test: Labelled | None) -> Measured:
        session = self._session(candidate, {self._setting.task: task})
        try:
            if shared.result is None and not shared.failure:
                shared.result, shared.seconds = self._timed(partial(_run_method, session))
            return self._row(candidate, session, shared, test)
        except NumericalError as e:
            shared.failure = shared.failure or (e.message if shared.result is None else "")
            return Measured(candidate, failure=e.message)

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


def _run_method(session: Session) -> MethodResult:
    return session.setting.method.run(session)


def _trainable(metrics: Metrics) -> int:
    return (metrics.trainable or 0) + (metrics.head.trainable if metrics.head is not None else 0)
