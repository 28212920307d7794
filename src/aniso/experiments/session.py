"""One setting being run: its model, data and bank are loaded, its method is applied and evaluated."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import final

import torch
from torch import nn

from aniso.compose import Coefficients, Composition, Linearised, Partition
from aniso.data import Labelled, Task, load_task
from aniso.errors import AnisoError, InputError, printable
from aniso.experiments.banks import coefficients_file, open_bank
from aniso.experiments.content import Content
from aniso.experiments.device import find_device
from aniso.experiments.head_fitting import VIEWS, check_head, fit_head
from aniso.experiments.methods import TrainingMethod
from aniso.experiments.problem import Problem
from aniso.experiments.result import MethodResult, RunOptions, RunPlan, RunResult
from aniso.experiments.run_files import round_directory
from aniso.experiments.settings import Setting
from aniso.experiments.settings.image_setting import ImageSetting
from aniso.learn import Best, EpochSampler, Fit, Keep, Objective, Start, Trainable, accuracy, fit, predict
from aniso.learn.selection import Choice, SelectionInputs, new_selection_rule
from aniso.learn.teacher import Teacher, with_vector
from aniso.models import Encoder, LanguageModel, Wrapped
from aniso.records import Inputs, SelectionSummary
from aniso.vectors import Bank


@final
class Session:
    """A setting with its model, problem and bank, each loaded when first needed, and once.

    >>> Session(FewShot(model="mini", bank="mini", task="./photos", shots=4)).run().metrics.accuracy
    """

    def __init__(
        self,
        setting: Setting,
        options: RunOptions | None = None,
        tasks: dict[str, Task] | None = None,
    ) -> None:
        """``tasks`` were loaded before with the same seed for splits; tasks loaded here are added to them."""
        setting.check()
        self.setting = setting
        self.options = options or RunOptions()
        self.tasks: dict[str, Task] = {} if tasks is None else tasks

    def sibling(self, setting: Setting, tasks: dict[str, Task]) -> Session:
        """Return a session of another setting with the same base and bank, which are not loaded again.

        ``tasks`` replace the data: a task of the same name may have other splits.
        """
        other = Session(setting, self.options, tasks)
        other.__dict__["device"] = self.device
        other.__dict__["model"] = self.model
        if self.setting.bank is not None and setting.bank == self.setting.bank:
            other.__dict__["whole_bank"] = self.whole_bank
        return other

    # what is loaded

    @cached_property
    def device(self) -> torch.device:
        """The device asked for; else the GPU, if there is one."""
        return find_device(self.options.device)

    @cached_property
    def model(self) -> Wrapped:
        """The base model on its device."""
        found: Wrapped = self.setting.load_model()
        # a base that is shared out may not fit into one device: each composition has its share there
        return found if self.options.runtime.shard_base else found.to(self.device)

    @property
    def encoder(self) -> Encoder:
        """The base model of a setting about classes."""
        assert isinstance(self.model, Encoder)
        return self.model

    @property
    def language_model(self) -> LanguageModel:
        """The base model of a setting about texts."""
        assert isinstance(self.model, LanguageModel)
        return self.model

    @cached_property
    def problem(self) -> Problem:
        """The data, the objective, the keep rule and the evaluation."""
        return self.setting.problem(self)

    @cached_property
    def whole_bank(self) -> Bank:
        """The bank as it was given."""
        return open_bank(str(self.setting.bank), self.model.weight_source(), seed=self.setting.seed)

    @cached_property
    def _selected(self) -> tuple[Bank, Choice | None]:
        names = self.problem.vectors(self.whole_bank.names)
        if not names:
            raise InputError(
                "BANK-NAME",
                f"bank '{printable(self.setting.bank)}' has no vector left for this setting",
                expected=", ".join(self.problem.evaluation.tests),
                found=", ".join(self.whole_bank.names),
                fix="vectors are matched with tasks by name: rename one of them, or leave out fewer",
            )
        bank = self.whole_bank.only(*names)
        if self.setting.selection is None:
            return bank, None
        name, budget = self.setting.selection
        inputs = SelectionInputs(
            self.model,
            self.problem.objective,
            budget,
            seed=self.setting.seed,
            workers=self.options.workers,
            progress=self.options.progress,
        )
        choice = new_selection_rule(name, inputs).choose(bank)
        return choice.bank, choice

    @property
    def bank(self) -> Bank:
        """The vectors that are composed: those that fit the problem, after selection."""
        return self._selected[0]

    @cached_property
    def start(self) -> Start | None:
        """Where coefficients start; None for zero. A merge rule is applied when this is first asked for."""
        return self.setting.method.start_of(self)

    @cached_property
    def composed_bank(self) -> Bank:
        """The vectors that the method composes: a merged one may have joined the bank, or replace it."""
        return self.setting.method.composed_bank(self)

    @property
    def choice(self) -> Choice | None:
        """What the selection rule chose, if there is one."""
        return self._selected[1]

    @property
    def selection_summary(self) -> SelectionSummary | None:
        """What records say about the selection."""
        if self.choice is None:
            return None
        return SelectionSummary.model_validate(self.choice.summary(), strict=False)

    def task(self, ref: str) -> Task:
        """Return a task by name or place."""
        if ref not in self.tasks:
            assert isinstance(self.setting, ImageSetting)
            self.tasks[ref] = load_task(
                str(self.path(ref)) if ref.startswith("./") else ref,
                self.options.data,
                seed=self.setting.split_seed,
                on_bad_image=self.setting.on_bad_image,
                progress=self.options.progress,
            )
        return self.tasks[ref]

    def path(self, name: str) -> Path:
        """Return where a file or directory of data lies; ``./`` means below the data directory."""
        root = self.options.data
        return root / name[2:] if name.startswith("./") and root is not None else Path(name).expanduser()

    # what methods use

    def compose(self, bank: Bank, partition: Partition) -> Composition:
        """Return a composition of the base, linearised if the setting says so."""
        options = self.options
        made = Composition(self._base, bank, partition, runtime=options.runtime, mesh=options.mesh)
        return made.to(self.device) if options.runtime.shard_base else made

    @property
    def _base(self) -> nn.Module:
        return Linearised(self.encoder) if self.setting.is_linearised else self.model

    def with_own_vector(self, task: str) -> Composition:
        """Return the model fine-tuned on a task: the base plus the task's own vector."""
        alone = replace(self.options.runtime, shard_base=False)
        return with_vector(self._base, self.whole_bank.only(task), alone)

    def teacher(self, task: str) -> Teacher:
        """Return the teacher of a task: the model fine-tuned on it, composed when its outputs are needed."""
        return Teacher(task, lambda: self.with_own_vector(task))

    @cached_property
    def objective(self) -> Objective:
        """The objective that is minimised."""
        return self.setting.method.objective(self)

    @property
    def shots(self) -> Labelled:
        """The items that a head is learned from, in settings that have them."""
        assert self.problem.shots is not None
        return self.problem.shots

    @cached_property
    def keep(self) -> Keep:
        """The keep rule; where tasks have vectors of their own, accuracies count relative to theirs."""
        keep = self.problem.keep
        if not self.problem.has_own_vectors or not isinstance(keep, Best):
            return keep
        labelled = [split for split in keep.splits if isinstance(split, Labelled)]
        found = {split.name: self.own_accuracy(split) for split in labelled}
        return Best(*keep.splits, references={name: value for name, value in found.items() if value > 0})

    def own_accuracy(self, split: Labelled) -> float:
        """Return the accuracy of a task's own vector alone."""
        task = next(t.name for t in self.tasks.values() if split.name == f"{t.name} {split.role}")
        model = self.with_own_vector(task)
        return accuracy(predict(model, split, workers=self.options.workers), split).value

    def fit(self, trained: Trainable, *, keep: Keep | None = None, round_number: int = 1) -> Fit:
        """Minimise the objective over something trainable; ``keep`` replaces the setting's rule.

        Rounds after the first have directories of their own within the run's.
        """
        method, options = self.setting.method, self.options
        assert isinstance(method, TrainingMethod)
        schedule, note = method.session_schedule(self)
        directory = options.directory
        if directory is not None and round_number > 1:
            directory = directory / round_directory(round_number)
        done = fit(
            trained,
            self.objective,
            schedule,
            keep=keep or self.keep,
            start=self.start,
            seed=self.setting.seed,
            directory=directory,
            resume=options.resume,
            allow_env_change=options.allow_env_change,
            workers=options.workers,
            online=self.setting.is_online,
            progress=options.progress,
            epoch_done=options.epoch_done,
        )
        return done if note is None else replace(done, notes=(note, *done.notes))

    def stored_coefficients(self) -> MethodResult | None:
        """Return coefficients that the same setting has learned without its head, where these are kept."""
        directory = self.options.coefficients
        if directory is None or self.setting.head_name is None:
            return None
        try:
            file = directory / coefficients_file(self.setting, self.inputs())
            found = Coefficients.load(file).for_bank(self.composed_bank)
        except AnisoError:  # there are none, or not for this bank: they are learned
            return None
        bank, how = self.composed_bank, self.options
        composition = Composition.of(self._base, bank, found, runtime=how.runtime, mesh=how.mesh)
        if how.runtime.shard_base:
            composition.to(self.device)
        result = MethodResult(lambda task: composition, coefficients=found)
        return replace(result, metrics=result.metrics.model_copy(update={"trainable": len(found)}))

    # plan and run

    def plan(self) -> RunPlan:
        """Return what a run will read, train and need; fails where the run would."""
        method, problem = self.setting.method, self.problem
        learned, steps = dict[str, int](), None
        if isinstance(method, TrainingMethod):
            schedule = method.resolved_schedule(self.setting)
            terms = [term for _, term in self.objective.data_terms]
            learned = {term.split.name: len(term.split) for term in terms}
            reserved = [0.0 if self.setting.is_online else term.reserved_share for term in terms]
            target = self.objective.target
            splits = [(term.split, ()) for term in terms]
            steps = EpochSampler(splits, schedule, self.setting.seed, reserved, target).total_steps
        head = None
        if self.setting.head_name is not None:
            check_head(self)
            together = ", together with the coefficients" if method.learns_head else ""
            shots = len(problem.shots or ())
            head = f"{self.setting.head_name}, {VIEWS} views of {shots:,} images{together}"
        learned |= {split.name: len(split) for split in problem.calibration.values()}
        tests = problem.evaluation.tests.items()
        return RunPlan(
            method.name,
            method.plan(self),
            {name: len(split) for name, split in tests},
            problem.evaluation.unit,
            learned,
            {split.name: len(split) for split in problem.keep.splits},
            steps,
            head,
        )

    def run(self) -> RunResult:
        """Apply the method, fit the head, evaluate."""
        if self.setting.head_name is not None:
            check_head(self)  # what cannot work is reported before the hours of training
        _ = self.problem
        _ = self._content_hashes  # of what is learned from, not of what may have replaced it since
        learned = self.setting.finished(self, self.setting.method.run(self))
        return self._evaluated(learned, self.with_head(learned))

    def with_head(self, result: MethodResult) -> MethodResult:
        """Return a method's result with the setting's head, learned on its features, if there is one."""
        if self.setting.head_name is None or result.head is not None:
            return result
        return fit_head(self, result)

    def _evaluated(self, learned: MethodResult, result: MethodResult) -> RunResult:
        """Evaluate a result; ``learned`` is the method's own, before the head was added."""
        evaluation = self.problem.evaluation
        measured = evaluation.measure(self, result)
        metrics, notes = measured.metrics, measured.notes
        if self.setting.compare and result.head is not None:
            metrics = metrics.with_values(**self._parts_alone(learned))
        metrics = metrics.merged(result.metrics)
        supervision = self.problem.supervision(self.setting.method, has_head=result.head is not None)
        if supervision is not None:
            metrics = metrics.with_values(supervision=supervision)
        coefficients = result.coefficients
        if self.setting.method.needs_bank and self.setting.selection is not None and self.choice is not None:
            metrics = metrics.model_copy(update={"selection": self.selection_summary})
            notes += self.choice.notes
            if coefficients is not None:
                coefficients = replace(coefficients, selection=self.choice.words)
        fit_notes = result.notes
        index_notes = coefficients.index.notes if coefficients is not None else ()
        return RunResult(
            metrics,
            result.completed(self.inputs()),
            self.setting.public_names(self),
            coefficients,
            result.weights,
            result.adapter,
            result.head,
            self._head_identity(result),
            device=self.device.type,
            notes=(*self.problem.notes, *fit_notes, *index_notes, *notes),
            content=self.content,
            predictions=measured.predictions,
            classes=evaluation.classes or {t.name: t.classes for t in [*self.tasks.values()][:1]},
        )

    def _parts_alone(self, learned: MethodResult) -> dict[str, dict[str, float]]:
        """Return accuracies of the head on the base, and of what was learned without the head.

        Both are cheap: features of the base are cached, and those of the learned model are known by now.
        """
        if not self.setting.method.changes_model or self.setting.head_name is None:
            return {}
        alone = {"head_alone": self.with_head(MethodResult(lambda task: self.model))}
        if learned.head is None:
            alone["without_head"] = learned
        return {name: self.problem.evaluation.accuracies(self, part) for name, part in alone.items()}

    def _head_identity(self, result: MethodResult) -> dict[str, str]:
        from aniso.learn import feature_identity

        if result.head is None:
            return {}
        return feature_identity(result.model_for(self.task_name))

    @property
    def task_name(self) -> str:
        """The name of the task that is learned."""
        return next(iter(self.tasks.values())).name

    # what it was made from

    @cached_property
    def content(self) -> Content:
        """The files that the result depends on; no model is needed to know them."""
        return self.setting.content(self)

    @cached_property
    def _content_hashes(self) -> dict[str, dict[str, str]]:
        """Hashes of the files as they were when the run began."""
        return self.content.hashes(self.options.progress)

    def inputs(self) -> Inputs:
        """Return hashes of everything that the result was made from."""
        found = {**self.setting.inputs(self).content(), "content": self._content_hashes}
        bank = self.setting.method.vectors_used(self)
        if bank is not None:
            hashes = {"bank": bank.whole_hash, "selected": bank.content_hash}
            found |= {**hashes, "vectors": tuple(bank.names)}
            known = {name: self.whole_bank[name].provenance for name in self.whole_bank}
            merged = [name for name in bank if bank[name].provenance != known.get(name)]
            found |= {"merged": {name: bank[name].provenance.formula for name in merged}} if merged else {}
        if self.start is not None:
            found["start"] = {
                "sha256": self.start.coefficients.content_hash,
                "description": self.start.description,
            }
        return Inputs.model_validate(found)
