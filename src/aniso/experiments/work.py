"""A setting carried out: model and bank loaded, the method applied, the result measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn

from aniso.compose import (
    Coefficients,
    Composition,
    FactorComposition,
    Linearised,
    MergedAdapter,
    Partition,
    Plan,
)
from aniso.data import Labelled, Task, Unlabelled, load_task
from aniso.errors import AnisoError, InputError, UsageError, printable
from aniso.experiments.banks import coefficients_file, open_bank
from aniso.experiments.choosing import strategy_of
from aniso.experiments.content import Content
from aniso.experiments.learning import composed, device_of, evolved, learned, with_choice
from aniso.experiments.metrics import score
from aniso.experiments.outcome import RunOptions, RunResult
from aniso.experiments.settings import Job, PictureSetting
from aniso.experiments.settings.setting import COMPOSED, Adapts
from aniso.learn import Best, EpochSampler, Keep, Objective, Trainable, search
from aniso.learn.evaluate import accuracy, predict
from aniso.learn.features import FeatureCache, feature_identity, features
from aniso.learn.finetune import tuned_weights
from aniso.learn.heads import Classifier, Head, RestrictedHead, TipAdapter, new_head
from aniso.learn.lora import Adapter, adapter
from aniso.learn.predictions import Predictions, predict_unlabelled
from aniso.learn.selection import Choice
from aniso.models import ClassWeights, Encoder, load_model
from aniso.vectors import Bank
from aniso.weights import TensorMap
from aniso.weights.fingerprint import combined_hash

VIEWS = 10
"""Of every shot, for a head to learn from."""


@final
@dataclass(frozen=True)
class _Made:
    """What a method came to, before it is measured."""

    model_for: Callable[[str], nn.Module]
    """The model for a task, by the task's name."""
    facts: dict[str, Any] = field(default_factory=dict)
    coefficients: Coefficients | None = None
    weights: TensorMap | None = None
    adapter: Adapter | MergedAdapter | None = None
    head: Head | None = None
    notes: tuple[str, ...] = ()


@final
class Work:
    """One setting on its way. What is loaded is loaded when first needed, and once."""

    def __init__(
        self,
        setting: PictureSetting,
        options: RunOptions | None = None,
        tasks: dict[str, Task] | None = None,
    ) -> None:
        """``tasks`` were loaded before, with the same seed for splits; those loaded here are added."""
        self.setting = setting
        self._how = options or RunOptions()
        self._tasks: dict[str, Task] = {} if tasks is None else tasks

    @cached_property
    def encoder(self) -> Encoder:
        return load_model(self.setting.model, self.setting.weights).to(self._device)

    @cached_property
    def _device(self) -> torch.device:
        return device_of(self._how)

    @cached_property
    def job(self) -> Job:
        return self.setting.job(self._task)

    @cached_property
    def bank(self) -> Bank:
        """The vectors that are composed."""
        whole = self._whole_bank
        names = self.job.vectors(whole.names)
        if not names:
            raise InputError(
                "BANK-NAME",
                f"bank '{printable(self.setting.bank)}' has no vector for this",
                expected=", ".join(self.job.tests),
                found=", ".join(whole.names),
                fix="vectors are matched with tasks by name: rename one of them",
            )
        found = whole.only(*names)
        self.choice = self._chosen(found)
        return found if self.choice is None else self.choice.bank

    choice: Choice | None = None
    """Which vectors, or cells, were kept, if the setting chooses; known once there is a bank."""

    def _chosen(self, bank: Bank) -> Choice | None:
        how = self._how
        strategy = strategy_of(
            self.setting, self.job.objective, self.encoder, workers=how.workers, progress=how.progress
        )
        return None if strategy is None else strategy.choose(bank)

    @cached_property
    def _whole_bank(self) -> Bank:
        return open_bank(str(self.setting.bank), self.encoder.weight_source(), seed=self.setting.seed)

    def _task(self, ref: str) -> Task:
        if ref not in self._tasks:
            here, root = ref, self._how.data
            if ref.startswith("./") and root is not None:
                here = str(root / ref[2:])
            self._tasks[ref] = load_task(
                here,
                root,
                seed=self.setting.split_seed,
                on_bad_image=self.setting.on_bad_image,
                progress=self._how.progress,
            )
        return self._tasks[ref]

    def _over(self, bank: Bank, partition: Partition) -> Composition:
        model = Linearised(self.encoder) if self.setting.linearised else self.encoder
        return Composition(model, bank, partition, runtime=self._how.runtime)

    def _composition(self) -> tuple[Composition, FactorComposition | None]:
        """What is learned, or searched through."""
        if self.setting.composes_factors:
            return composed(self.encoder, self.bank, self.setting, self._how)
        return self._over(self.bank, self._partition()), None

    # before anything is learned

    def plan(self) -> tuple[Plan | None, dict[str, Any]]:
        """What will be read, trained and needed, in numbers; fails where the work itself would."""
        job, schedule = self.job, self.setting.resolved_schedule()
        facts: dict[str, Any] = {"method": self.setting.method, "tests": _sizes(job.tests)}
        memory = None
        if self.setting.trains_norms:
            facts["trainable"] = Trainable.layer_norms(self.encoder).count
        elif self.setting.method in (*COMPOSED, "search"):
            made, _ = self._composition()
            memory = made.plan
            facts |= {"vectors": list(self.bank.names), "trainable": made.values.numel()}
            facts |= {"notes": list(made.index.notes)} if made.index.notes else {}
            if self.choice is not None:
                facts["selection"] = self.choice.summary()
        elif self.setting.method == "vector":
            facts["vectors"] = list(self._own(*job.tests).names)
        elif self.setting.method == "weights":
            rank = self.setting.rank
            whole = sum(block.numel for block in self.encoder.layout.blocks)
            facts["trainable"] = whole if rank is None else self._adapter(rank).trained.count
        if self.setting.method in ("coefficients", "weights") and job.objective is not None:
            terms = [term for _, term in job.objective.data_terms]
            facts["learned_from"] = {term.split.name: len(term.split) for term in terms}
            reserved = [0.0 if self.setting.is_online else term.reserved_share for term in terms]
            passes = EpochSampler([(term.split, ()) for term in terms], schedule, self.setting.seed, reserved)
            facts["steps"] = schedule.epochs * passes.steps
        if self.setting.head_kind is not None:
            together = ", together with the coefficients" if self.setting.is_joint else ""
            head = new_head(self.setting.head_kind, self._class_weights())
            facts["head"] = f"{head.kind}, {VIEWS} views of {len(self._shots()):,} pictures{together}"
        facts["chosen_by"] = {split.name: len(split) for split in job.keep.splits}
        return memory, facts

    # the methods

    def run(self) -> RunResult:
        method = {
            "none": self._unchanged,
            "vector": self._own_vectors,
            "search": self._searched,
            "coefficients": self._composed,
            "gradient-free": self._evolved,
            "weights": self._tuned,
        }[self.setting.method]
        if self.setting.head_kind is not None:
            new_head(self.setting.head_kind, self._class_weights())  # what cannot be is found out now
        self._content_hashes  # noqa: B018 (of what is learned from, not of what may have replaced it since)
        made = method()
        if self.setting.head_kind is not None and made.head is None:
            made = self._topped(made, self.setting.head_kind)
        return self._outcome(made)

    def _unchanged(self) -> _Made:
        return _Made(lambda name: self.encoder)

    def _own_vectors(self) -> _Made:
        return _Made(self._with_own_vector)

    def _own(self, *names: str) -> Bank:
        """The tasks' own vectors, also where learning leaves them out."""
        return self._whole_bank.only(*names)

    def _with_own_vector(self, name: str) -> nn.Module:
        made = self._over(self._own(name), Partition.whole())
        with torch.no_grad():
            made.values.fill_(1.0)
        return made

    def _searched(self) -> _Made:
        made = self._over(self.bank, Partition.whole())
        found = search(
            made, self._keep(), self.job.points, workers=self._how.workers, progress=self._how.progress
        )
        history = [row.content() for row in found.history]
        facts = {"scale": found.scale, "history": history}
        return _Made(lambda name: made, facts, found.coefficients)

    def _composed(self) -> _Made:
        if self.setting.trains_norms:
            return self._with_own_norms()
        if self.setting.is_joint:
            return self._joint()
        known = self._learned_before()
        if known is not None:
            return known
        made, factors = self._composition()
        facts, notes = self._learn(Trainable.coefficients(made))
        if factors is not None:
            return _Made(lambda name: made, facts, adapter=factors.adapter(), notes=notes)
        return _Made(lambda name: made, facts, made.coefficients, notes=notes)

    def _evolved(self) -> _Made:
        """Coefficients from losses alone."""
        made = self._over(self.bank, self._partition())
        assert isinstance(self.setting, Adapts)  # no other has tries
        facts = evolved(made, self._objective(), self._keep(), self.setting, self._how)
        return _Made(lambda name: made, facts, made.coefficients)

    def _with_own_norms(self) -> _Made:
        trained = Trainable.layer_norms(self.encoder)
        facts, notes = self._learn(trained)
        tuned = tuned_weights(self.encoder, trained)
        return _Made(lambda name: trained.model, facts, weights=tuned, notes=notes)

    def _learned_before(self) -> _Made | None:
        """Coefficients that the same setting without a head has come to, where such are kept."""
        place = self._how.coefficients
        if place is None or self.setting.head_kind is None:
            return None
        try:
            file = place / coefficients_file(self.setting, self._inputs())
            found = Coefficients.load(file).for_bank(self.bank)
        except AnisoError:  # there are none, or not for this bank: they are learned
            return None
        model = Linearised(self.encoder) if self.setting.linearised else self.encoder
        made = Composition.of(model, self.bank, found, runtime=self._how.runtime)
        return _Made(lambda name: made, {"trainable": len(found)}, found)

    def _joint(self) -> _Made:
        """Coefficients and a head that begins as the base's features of the shots, learned together."""
        made = self._over(self.bank, self._partition())
        shots = self._shots()
        head = TipAdapter(self._class_weights()).remember(self._seen(self.encoder, shots), _labels(shots))
        trained = Trainable.coefficients(made).with_head(head.to(self._device))
        facts, notes = self._learn(trained)
        facts["head"] = {"kind": head.kind, "trainable": head.count}
        return _Made(lambda name: made, facts, made.coefficients, head=head, notes=notes)

    def _tuned(self) -> _Made:
        if self.setting.rank is not None:
            return self._adapted(self.setting.rank)
        trained = Trainable.weights(self.encoder, linearised=self.setting.linearised)
        facts, notes = self._learn(trained)
        tuned = tuned_weights(self.encoder, trained)
        return _Made(lambda name: trained.model, facts, weights=tuned, notes=notes)

    def _adapter(self, rank: int) -> Adapter:
        return adapter(self.encoder, rank, layers=self.setting.lora_layers, seed=self.setting.seed)

    def _adapted(self, rank: int) -> _Made:
        made = self._adapter(rank)
        facts, notes = self._learn(made.trained)
        return _Made(lambda name: made.trained.model, facts, adapter=made, notes=notes)

    # heads

    def _topped(self, made: _Made, kind: str) -> _Made:
        """A head on what was made, learned from the same shots; the step is chosen as the epoch is."""
        shots = self._shots()
        model = made.model_for(self._name)
        held_out = None
        if isinstance(self.job.keep, Best):
            (split,) = _pictures(self.job.keep)
            held_out = (self._features(model, split)[0], _labels(split))
        head = new_head(kind, self._class_weights()).to(self._device)
        done = head.fit(
            self._seen(model, shots), _labels(shots), held_out=held_out, progress=self._how.progress
        )
        said = {"kind": kind, "trainable": head.count, "steps": len(done.losses), "kept_step": done.kept}
        said["loss"] = [done.losses[0], done.losses[-1]]
        return replace(made, head=head, facts={**made.facts, "head": said})

    @property
    def _name(self) -> str:
        """Of the task that is learned."""
        return next(iter(self._tasks.values())).name

    def _shots(self) -> Labelled:
        assert self.job.shots is not None  # settings with heads have shots
        return self.job.shots

    def _class_weights(self) -> ClassWeights:
        return self.encoder.class_weights(self._shots().classes, progress=self._how.progress)

    def _seen(self, model: nn.Module, shots: Labelled) -> Tensor:
        """Several views of every shot."""
        return self._features(model, shots, view=self.setting.head_view, views=VIEWS, seed=self.setting.seed)

    def _features(self, model: nn.Module, split: Labelled, **how: Any) -> Tensor:
        cache, progress = self._cache, self._how.progress
        found = features(model, split, workers=self._how.workers, cache=cache, progress=progress, **how)
        return found.to(self._device)

    @property
    def _cache(self) -> FeatureCache | None:
        """Features are worth keeping where several heads are learned on them."""
        return FeatureCache.default() if self.setting.head_kind is not None else None

    # learning

    def _learn(self, trained: Trainable) -> tuple[dict[str, Any], tuple[str, ...]]:
        done, facts = learned(trained, self._objective(), self._keep(), self.setting, self._how)
        if done.predictions is not None:
            facts["online"] = self._online(done.predictions)
        return facts, done.notes

    def _online(self, predictions: Tensor) -> dict[str, Any]:
        """What was said before anything was learned from it: scores, or counts where there are no labels."""
        if self.job.tests:
            return {name: score(split, predictions) for name, split in self.job.tests.items()}
        assert self.job.unlabelled is not None
        split = self.job.unlabelled
        return {
            split.name: {
                "counts": Predictions(predictions, torch.ones(len(predictions)), split.classes).counts
            }
        }

    def _objective(self) -> Objective:
        if self.job.objective is None:
            raise UsageError("USAGE", "there is nothing to learn from", fix="choose another method")
        return self.job.objective

    def _partition(self) -> Partition:
        return Partition.whole() if self.setting.method == "search" else self.setting.resolved_partition()

    def _keep(self) -> Keep:
        """The job's rule; where tasks have vectors of their own, accuracies count relative to theirs."""
        keep = self.job.keep
        if not self.job.own_vectors or not isinstance(keep, Best):
            return keep
        found = {split.name: self._with_own(split) for split in _pictures(keep)}
        return Best(*keep.splits, references={name: value for name, value in found.items() if value > 0})

    def _with_own(self, split: Labelled) -> float:
        """What a task's own vector alone is good for."""
        name = next(t.name for t in self._tasks.values() if split.name == f"{t.name} {split.role}")
        return accuracy(predict(self._with_own_vector(name), split, workers=self._how.workers), split).value

    # results

    def _measured(
        self, model_for: Callable[[str], nn.Module], head: Head | None = None
    ) -> dict[str, tuple[Labelled, Tensor]]:
        return {
            name: (split, self._answers(model_for(name), split, head))
            for name, split in self.job.tests.items()
        }

    def _answers(self, model: nn.Module, split: Labelled, head: Classifier | None) -> Tensor:
        how = self._how
        return predict(model, split, head=head, workers=how.workers, cache=self._cache, progress=how.progress)

    def _elsewhere(self, made: _Made) -> dict[str, Any]:
        """Other data with the same classes, or some of them, by name."""
        head: Classifier = made.head or self._class_weights()
        model = made.model_for(self._name)
        return {
            name: score(split, self._answers(model, split, RestrictedHead(head, split.classes.names)))
            for name, split in self.job.out_of_domain.items()
        }

    def _with_labels(self, made: _Made) -> tuple[dict[str, Any], list[str]]:
        """Metrics, and doubts about them."""
        measured = self._measured(made.model_for, made.head)
        metrics: dict[str, Any] = {"accuracy": {name: score(*one) for name, one in measured.items()}}
        if self.job.out_of_domain:
            metrics["out_of_domain"] = self._elsewhere(made)
        if self.job.own_vectors and self.setting.method not in ("none", "vector"):
            metrics["reference"] = {task: self._with_own(split) for task, split in self.job.tests.items()}
        if self.setting.compare and (self.setting.method != "none" or made.head is not None):
            unchanged = self._measured(lambda name: self.encoder)
            metrics["zero_shot"] = {
                n: accuracy(predictions, split).value for n, (split, predictions) in unchanged.items()
            }
        doubts = [
            note for split, predictions in measured.values() for note in accuracy(predictions, split).notes
        ]
        return metrics, doubts

    def _without_labels(self, made: _Made, split: Unlabelled) -> tuple[dict[str, Any], list[str]]:
        """The same where answers themselves are looked at; labels, if there are any, are for counting."""
        how = self._how
        cache = FeatureCache.default()  # the base says the same in every run
        before = predict_unlabelled(
            self.encoder, split, workers=how.workers, cache=cache, progress=how.progress
        )
        after = before
        if self.setting.method != "none":
            after = predict_unlabelled(made.model_for(""), split, workers=how.workers, progress=how.progress)
        tests = self.job.tests.items()
        metrics: dict[str, Any] = {"accuracy": {n: score(test, after.labels) for n, test in tests}}
        metrics["answers"] = after.compared_with(before)
        if self.setting.compare and self.setting.method != "none":
            metrics["zero_shot"] = {n: accuracy(before.labels, test).value for n, test in tests}
        return metrics, list(after.doubts(before))

    def _outcome(self, made: _Made) -> RunResult:
        split = self.job.unlabelled
        metrics, doubts = self._with_labels(made) if split is None else self._without_labels(made, split)
        metrics |= made.facts
        if self.choice is not None:
            metrics["selection"] = self.choice.summary()
            doubts += self.choice.notes
        doubts += made.coefficients.index.notes if made.coefficients is not None else ()
        doubts += [
            f"warning: {t.name} has no test split, so nothing was measured: aniso eval can, on another"
            for t in self._tasks.values()
            if "test" not in t.splits
        ]
        doubts += self._prompt_notes()
        return RunResult(
            metrics,
            self._inputs(),
            {ref: task.name for ref, task in self._tasks.items()},
            with_choice(made.coefficients, self.choice),
            made.weights,
            made.adapter,
            made.head,
            feature_identity(made.model_for(self._name)) if made.head is not None else {},
            device=self._device.type,
            notes=(*self.job.notes, *made.notes, *doubts),
            content=self.content,
        )

    @cached_property
    def _content_hashes(self) -> dict[str, dict[str, str]]:
        """Of the images as they were when the run began."""
        return self.content.hashes(self._how.progress)

    @cached_property
    def content(self) -> Content:
        """The images that the result depends on; no model is needed to know them."""
        job, learned = self.job, list[Any]()
        if self.setting.method not in ("none", "vector", "search") and job.objective is not None:
            learned += [term.split for _, term in job.objective.data_terms]
        if self.setting.method not in ("none", "vector") or self.setting.head_kind is not None:
            learned += job.keep.splits
        if self.setting.head_kind is not None and job.shots is not None:
            learned.append(job.shots)
        measured: list[Any] = [*job.tests.values(), *job.out_of_domain.values()]
        measured += [job.unlabelled] if job.unlabelled is not None else []
        return Content(_distinct(learned), _distinct(measured))

    def _prompt_notes(self) -> list[str]:
        """Which prompts were too long for the text tower and truncated."""
        found = [split.classes for split in self.job.tests.values()]
        found += [self.job.unlabelled.classes] if self.job.unlabelled is not None else []
        classes = {one.key: one for one in found if self.encoder.has_text}
        return [note for one in classes.values() for note in self.encoder.class_weights(one).notes]

    def _inputs(self) -> dict[str, Any]:
        tasks = self._tasks.values()
        data = {t.name: combined_hash({role: s.manifest for role, s in t.splits.items()}) for t in tasks}
        classes = {task.name: task.classes.key for task in tasks}
        if self.job.unlabelled is not None and not tasks:
            split = self.job.unlabelled
            data, classes = {split.name: split.manifest}, {split.name: split.classes.key}
        inputs: dict[str, Any] = {"model": self.encoder.fingerprint, "data": data, "classes": classes}
        inputs["content"] = self._content_hashes
        if self.setting.method in (*COMPOSED, "search") and self.setting.needs_bank:
            inputs |= {"bank": self.bank.content_hash, "vectors": list(self.bank.names)}
        elif self.setting.method == "vector":
            inputs["bank"] = self._own(*self.job.tests).content_hash
        return inputs


def _distinct(splits: list[Any]) -> tuple[Any, ...]:
    return tuple({split.name: split for split in splits}.values())


def _pictures(keep: Keep) -> list[Labelled]:
    return [split for split in keep.splits if isinstance(split, Labelled)]


def _labels(split: Labelled) -> Tensor:
    return torch.tensor(split.labels)


def _sizes(splits: Mapping[str, Labelled]) -> dict[str, int]:
    return {name: len(split) for name, split in splits.items()}
