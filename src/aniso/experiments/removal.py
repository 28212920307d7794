"""Verification of a negation: what is left of the target, beyond its zero-shot accuracy.

A low zero-shot accuracy says that class weights no longer fit the features. Whether features still tell the
classes apart is measured by linear probes, by nearest neighbours and by learning the task again from a few
shots, each before and after the removal; related data sets show whether more than one data set is affected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch
from torch.nn import functional

from aniso.compose import Baked
from aniso.data import Labelled, Task
from aniso.errors import InputError, UsageError, printable
from aniso.experiments.banks import load_coefficients
from aniso.experiments.parsing import parse_setting
from aniso.experiments.problem import require_split
from aniso.experiments.result import RunOptions
from aniso.experiments.run_files import COEFFICIENTS, SPEC, WEIGHTS
from aniso.experiments.session import Session
from aniso.experiments.settings.negation import Negation
from aniso.experiments.strict_yaml import read_yaml
from aniso.json_value import JsonObject
from aniso.learn import FeatureCache, accuracy, features, finetune, predict
from aniso.learn.heads import new_head
from aniso.models import Encoder, load_model
from aniso.schedule import Schedule

Measure = Callable[[Encoder], float]
"""The accuracy of a model."""
RELEARNING = Schedule(epochs=3, lr=1e-4, batch_size=16, warmup_steps=0, min_steps_per_epoch=10)
"""Fine-tuning of all weights on the shots: at least 30 steps."""
RATES = (1e-5, 1e-4, 1e-3)
"""The best of these learning rates on the target's validation split is taken."""


@final
@dataclass(frozen=True)
class RemovalRow:
    """One accuracy on one test split, before and after the removal."""

    data: str
    role: str
    """target, related or control."""
    measure: str
    shots: int | None
    """Labelled items of each class that it needs."""
    chance: float
    before: float
    after: float

    @property
    def kept(self) -> float | None:
        """Share of the accuracy above chance that is left; None where there was none."""
        above = self.before - self.chance
        return (self.after - self.chance) / above if above > 0 else None

    def content(self) -> JsonObject:
        """Return plain JSON values."""
        return {**vars(self), "kept": self.kept}


@final
@dataclass(frozen=True)
class RemovalReport:
    """Everything that was measured about one removal."""

    target: str
    control: str
    floor: float
    rows: tuple[RemovalRow, ...]

    @property
    def control_share(self) -> float | None:
        """Share of its zero-shot accuracy that the control kept, on its test split."""
        row = self._row("control", "zero-shot")
        return row.after / row.before if row.before else None

    @property
    def findings(self) -> tuple[str, ...]:
        """Sentences on what the numbers mean."""
        return tuple(self._findings())

    def content(self) -> JsonObject:
        """Return plain JSON values."""
        return {
            "target": self.target,
            "control": self.control,
            "floor": self.floor,
            "control_share": self.control_share,
            "rows": [row.content() for row in self.rows],
            "findings": list(self.findings),
        }

    def _row(self, role: str, measure: str) -> RemovalRow:
        """The row of a measure, of several shots that with the most."""
        found = [row for row in self.rows if (row.role, row.measure) == (role, measure)]
        return max(found, key=lambda row: row.shots or 0)

    def _findings(self) -> Iterator[str]:
        row = self._row("target", "zero-shot")
        yield f"{self.target}, zero-shot: {_change(row)}, chance {row.chance:.1%}"
        row = self._row("target", "linear probe")
        if row.kept is None:
            yield f"a linear probe reads no class of {self.target} from the base: it cannot show a removal"
        else:
            still = "the features still tell its classes apart" if row.kept > 0.5 else "features have lost it"
            kept = f"{100 * row.kept:.0f} % of what it reads above chance is left"
            yield f"a linear probe of {row.shots} shots on {self.target}: {_change(row)}; {kept}: {still}"
        row = self._row("target", "relearned")
        yield f"learned again from {row.shots} shots of each class: {_change(row)}"
        for row in self.rows:
            if row.role == "related" and row.measure == "zero-shot":
                yield f"{row.data}, related and not named in the run: {_change(row)}"
        if self.control_share is not None:
            row = self._row("control", "zero-shot")
            kept = f"{100 * self.control_share:.1f} % of {100 * row.before:.1f}"
            yield f"control kept {kept} (floor {100 * self.floor:g} %)"


@final
@dataclass(frozen=True)
class RemovalRun:
    """A finished negation: the base and the model it results in, with their tasks."""

    setting: Negation
    session: Session
    before: Encoder
    after: Encoder

    @classmethod
    def open(cls, directory: Path, options: RunOptions) -> RemovalRun:
        """Open the directory of a run of ``aniso fit negation``, or of a search for one."""
        setting = negation_of(directory)
        session = Session(setting, options)
        before = session.encoder
        if (directory / COEFFICIENTS).exists():
            baked = Baked(before.weight_source(), *load_coefficients(session.whole_bank, directory))
            after = load_model(setting.model, baked)
        elif (directory / WEIGHTS).exists():
            after = load_model(setting.model, directory / WEIGHTS)
        else:
            raise InputError(
                "RUN-FILES",
                f"'{printable(directory)}' holds neither coefficients nor weights",
                found=printable(", ".join(sorted(p.name for p in directory.iterdir()))),
                fix="name the directory of a finished negation by coefficients, search or weights",
            )
        return cls(setting, session, before, after.to(session.device))


def negation_of(directory: Path) -> Negation:
    """Return the setting of a run directory; raises if it is no negation. Nothing heavy is loaded."""
    if not (directory / SPEC).is_file():
        raise InputError(
            "RUN-FILES",
            f"'{printable(directory)}' is not the directory of a run: it has no {SPEC}",
            fix="name a directory that aniso fit negation … -o DIR wrote",
        )
    setting = parse_setting(read_yaml(directory / SPEC))
    if not isinstance(setting, Negation):
        raise UsageError(
            "USAGE",
            f"'{printable(directory)}' is a run of '{setting.name}', not of negation",
            fix="name the directory of a negation",
        )
    return setting


@final
class Verification:
    """Measures one removal, before and after, on one item after the other of a fixed list."""

    def __init__(self, run: RemovalRun, related: Sequence[str], shots: int, seed: int = 0) -> None:
        """``shots`` is the largest number of labelled items per class for probes and relearning."""
        self._run = run
        self._shots = shots
        self._seed = seed
        session = run.session
        self._target = session.task(run.setting.target)
        self._control = session.task(run.setting.control)
        self._related = [session.task(name) for name in related]
        self._require_splits()

    def report(self) -> RemovalReport:
        """Measure everything; ``progress`` of the session's options is called on the way."""
        rows = [self._zero_shot(self._target, "target")]
        rows += [self._zero_shot(task, "related") for task in self._related]
        rows.append(self._zero_shot(self._control, "control"))
        rows += [self._probe(self._target, "target", k) for k in curve(self._shots)]
        rows += [self._probe(task, "related", self._shots) for task in self._related]
        rows.append(self._neighbours(self._target, "target"))
        rows += [self._neighbours(task, "related") for task in self._related]
        rows += [self._relearned(k) for k in curve(self._shots, 4)]
        setting = self._run.setting
        return RemovalReport(self._target.name, self._control.name, setting.floor, tuple(rows))

    def _require_splits(self) -> None:
        for task in (self._target, self._control, *self._related):
            require_split(task, "test", "accuracies are measured on")
        for task in (self._target, *self._related):
            require_split(task, "train", "probes learn from")
        require_split(self._target, "val", "the rate of relearning is chosen on")

    def _zero_shot(self, task: Task, role: str) -> RemovalRow:
        test = task.split("test")
        return self._row(task, role, "zero-shot", None, lambda model: self._accuracy(model, test))

    def _probe(self, task: Task, role: str, shots: int) -> RemovalRow:
        part, test = self._drawn(task, shots), task.split("test")

        def measure(model: Encoder) -> float:
            head = new_head("linear", model.class_weights(task.classes)).to(self._run.session.device)
            head.fit(self._features(model, part), torch.tensor(part.labels))
            with torch.no_grad():
                found = head.logits(self._features(model, test)).argmax(-1).cpu()
            return accuracy(found, test).value

        return self._row(task, role, "linear probe", shots, measure)

    def _neighbours(self, task: Task, role: str) -> RemovalRow:
        part, test = self._drawn(task, self._shots), task.split("test")

        def measure(model: Encoder) -> float:
            known, seen = (functional.normalize(self._features(model, s), dim=-1) for s in (part, test))
            nearest = (seen @ known.T).argmax(-1).cpu()
            return accuracy(torch.tensor(part.labels)[nearest], test).value

        return self._row(task, role, "nearest neighbour", self._shots, measure)

    def _relearned(self, shots: int) -> RemovalRow:
        part = self._drawn(self._target, shots)
        val, test = self._target.split("val"), self._target.split("test")

        def measure(model: Encoder) -> float:
            tuned = [self._tuned(model, part, lr) for lr in RATES]
            best = max(tuned, key=lambda one: self._accuracy(one, val))
            return self._accuracy(best, test)

        return self._row(self._target, "target", "relearned", shots, measure)

    def _tuned(self, model: Encoder, part: Labelled, lr: float) -> Encoder:
        options = self._run.session.options
        schedule = replace(RELEARNING, lr=lr)
        done = finetune(
            model, part, schedule, seed=self._seed, workers=options.workers, progress=options.progress
        )
        assert isinstance(done.model, Encoder)
        return done.model

    def _row(self, task: Task, role: str, measure: str, shots: int | None, of: Measure) -> RemovalRow:
        before, after = of(self._run.before), of(self._run.after)
        return RemovalRow(task.name, role, measure, shots, 1 / len(task.classes), before, after)

    def _drawn(self, task: Task, shots: int) -> Labelled:
        return task.split("train").shots(shots, self._seed, allow_fewer=True)

    def _accuracy(self, model: Encoder, split: Labelled) -> float:
        options = self._run.session.options
        found = predict(model, split, workers=options.workers, progress=options.progress)
        return accuracy(found, split).value

    def _features(self, model: Encoder, split: Labelled) -> torch.Tensor:
        options = self._run.session.options
        cache = FeatureCache.default()  # a probe at every k reads the same test features
        found = features(model, split, workers=options.workers, cache=cache, progress=options.progress)
        return found[0].to(self._run.session.device)


def curve(most: int, factor: int = 2) -> tuple[int, ...]:
    """Return 1, ``factor``, its square and so on up to ``most``, which is always the last.

    >>> curve(16), curve(6), curve(16, 4)
    ((1, 2, 4, 8, 16), (1, 2, 4, 6), (1, 4, 16))
    """
    found = []
    k = 1
    while k < most:
        found.append(k)
        k *= factor
    return (*found, most)


def verify_removal(
    directory: Path, related: Sequence[str], shots: int, options: RunOptions, seed: int = 0
) -> RemovalReport:
    """Measure what is left of the target of a finished negation.

    ``related`` are tasks that a removal should affect, too, although the run did not name them.
    """
    return Verification(RemovalRun.open(directory, options), related, shots, seed).report()


def _change(row: RemovalRow) -> str:
    return f"{row.before:.1%} -> {row.after:.1%}"
