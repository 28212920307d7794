"""Evaluation: how the result of a method is measured, with labels, without labels, and on texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor, nn

from aniso.data import Labelled, Split, TextDataset, Unlabelled
from aniso.errors import UsageError, printable
from aniso.experiments.head_fitting import class_weights, feature_cache
from aniso.learn import (
    FeatureCache,
    Predictions,
    accuracy,
    classify,
    evaluate_lm,
    predict_unlabelled,
    wilson,
)
from aniso.learn.heads import Classifier, Head, RestrictedHead
from aniso.records import Metrics, OnlineScore, PredictionSummary, Score

if TYPE_CHECKING:
    from aniso.data import ClassList
    from aniso.experiments.result import MethodResult
    from aniso.experiments.session import Session
    from aniso.learn import LanguageScore

Hashes = dict[str, str]


@final
@dataclass(frozen=True)
class MeasuredPredictions:
    """The predictions on one split that a result is measured on, by the name that records use."""

    task: str
    split: Split
    predictions: Predictions


@final
@dataclass(frozen=True)
class Measurement:
    """Metrics, notes about them, and the predictions that they were computed from."""

    metrics: Metrics
    notes: list[str]
    predictions: tuple[MeasuredPredictions, ...] = ()


class Evaluation(ABC):
    """How results are measured. ``tests`` has the data by the name that records use."""

    unit: ClassVar[str] = "images"

    @property
    @abstractmethod
    def tests(self) -> Mapping[str, Labelled | TextDataset]:
        """The data with which a result is compared, by name."""

    @property
    @abstractmethod
    def splits(self) -> list[Split]:
        """All images that metrics depend on."""

    def identity(self) -> tuple[Hashes, Hashes]:
        """Return hashes of data and of classes that belong to no task."""
        return {}, {}

    @property
    def classes(self) -> Mapping[str, ClassList]:
        """The classes that are predicted, by the name of the data."""
        return {name: split.classes for name, split in self.tests.items() if isinstance(split, Labelled)}

    @abstractmethod
    def measure(self, session: Session, result: MethodResult) -> Measurement:
        """Return metrics, notes about them, and predictions."""

    def accuracies(self, session: Session, result: MethodResult) -> dict[str, float]:
        """Return the accuracy on every test split, and nothing else; none where there are no labels."""
        return {}


@final
@dataclass(frozen=True)
class LabelledEvaluation(Evaluation):
    """Accuracy on test splits, and on other data with the same classes."""

    test_splits: Mapping[str, Labelled]
    out_of_domain: Mapping[str, Labelled] = field(default_factory=dict)

    @property
    def tests(self) -> Mapping[str, Labelled]:
        return self.test_splits

    @property
    def splits(self) -> list[Split]:
        return [*self.test_splits.values(), *self.out_of_domain.values()]

    def measure(self, session: Session, result: MethodResult) -> Measurement:
        method, notes = session.setting.method, list[str]()
        scores, made = {}, []
        for name, split in self.test_splits.items():
            predictions = _classify(session, result.model_for(name), split, result.head)
            made.append(MeasuredPredictions(name, split, predictions))
            scores[name] = score(split, predictions.labels)
            notes += accuracy(predictions.labels, split).notes
            notes += session.encoder.transforms.notes(split.items, split.name)
        notes += _learned_notes(session)
        metrics = Metrics(accuracy=scores)
        if self.out_of_domain:
            metrics = metrics.with_values(out_of_domain=self._out_of_domain(session, result))
        if session.problem.has_own_vectors and (method.minimises or method.chooses):
            own = {task: session.own_accuracy(split) for task, split in self.test_splits.items()}
            metrics = metrics.with_values(reference=own)
        if session.setting.compare and (method.changes_model or result.head is not None):
            metrics = metrics.with_values(zero_shot=self._zero_shot(session))
        notes += [
            f"warning: {task.name} has no test split, so nothing was evaluated; aniso eval can, on another"
            for task in session.tasks.values()
            if "test" not in task.splits
        ]
        notes += _prompt_notes(session, [s.classes for s in self.test_splits.values()])
        return Measurement(metrics, notes, tuple(made))

    def accuracies(self, session: Session, result: MethodResult) -> dict[str, float]:
        return {
            name: accuracy(_classify(session, result.model_for(name), split, result.head).labels, split).value
            for name, split in self.test_splits.items()
        }

    def _zero_shot(self, session: Session) -> dict[str, float]:
        return {
            name: accuracy(_classify(session, session.encoder, split, None).labels, split).value
            for name, split in self.test_splits.items()
        }

    def _out_of_domain(self, session: Session, result: MethodResult) -> dict[str, Score]:
        """Scores on other data with the same classes, or some of them, by name."""
        head: Classifier = result.head or class_weights(session)
        model = result.model_for(session.task_name)
        heads = {
            name: RestrictedHead(head, split.classes.names) for name, split in self.out_of_domain.items()
        }
        return {
            name: score(split, _classify(session, model, split, heads[name]).labels)
            for name, split in self.out_of_domain.items()
        }


@final
@dataclass(frozen=True)
class UnlabelledEvaluation(Evaluation):
    """Predictions before and after learning without labels; labels, if there are any, are for counting."""

    split: Unlabelled
    test_splits: Mapping[str, Labelled]

    @property
    def tests(self) -> Mapping[str, Labelled]:
        return self.test_splits

    @property
    def splits(self) -> list[Split]:
        return [*self.test_splits.values(), self.split]

    @property
    def classes(self) -> Mapping[str, ClassList]:
        return super().classes or {self.split.name: self.split.classes}

    def identity(self) -> tuple[Hashes, Hashes]:
        if self.test_splits:
            return {}, {}
        return {self.split.name: self.split.manifest}, {self.split.name: self.split.classes.key}

    def measure(self, session: Session, result: MethodResult) -> Measurement:
        setting, options = session.setting, session.options
        before = predict_unlabelled(
            session.encoder,
            self.split,
            workers=options.workers,
            cache=FeatureCache.default(),  # the base predicts the same in every run
            progress=options.progress,
        )
        after = before
        if setting.method.changes_model:
            after = predict_unlabelled(
                result.model_for(""), self.split, workers=options.workers, progress=options.progress
            )
        tests = self.test_splits.items()
        metrics = Metrics(
            accuracy={name: score(test, after.labels) for name, test in tests},
            answers=PredictionSummary.model_validate(after.compared_with(before), strict=False),
        )
        if setting.compare and setting.method.changes_model:
            zero_shot = {name: accuracy(before.labels, test).value for name, test in tests}
            metrics = metrics.with_values(zero_shot=zero_shot)
        if result.fit is not None and result.fit.predictions is not None:
            metrics = metrics.with_values(online=self._online(result.fit.predictions))
        made = [MeasuredPredictions(name, test, after) for name, test in tests]
        notes = [*after.doubts(before), *_prompt_notes(session, [self.split.classes])]
        unlabelled = MeasuredPredictions(self.split.name, self.split, after)
        return Measurement(metrics, notes, tuple(made) or (unlabelled,))

    def _online(self, predictions: Tensor) -> dict[str, OnlineScore]:
        """Scores of predictions made before learning; counts where there are no labels."""
        if self.test_splits:
            return {
                name: OnlineScore.model_validate(score(split, predictions).content(), strict=False)
                for name, split in self.test_splits.items()
            }
        counts = Predictions(predictions, torch.ones(len(predictions)), self.split.classes).counts
        return {self.split.name: OnlineScore(counts=counts)}


@final
@dataclass(frozen=True)
class LanguageEvaluation(Evaluation):
    """Perplexity and next-token accuracy on texts."""

    texts: Mapping[str, TextDataset]
    """By what they are for: train, val, test."""

    unit = "rows"

    def __post_init__(self) -> None:
        _require_apart(self.texts)

    @property
    def tests(self) -> Mapping[str, TextDataset]:
        return {text.name: text for role, text in self.texts.items() if role == "test"}

    @property
    def splits(self) -> list[Split]:
        return []

    def identity(self) -> tuple[Hashes, Hashes]:
        return {text.name: text.manifest for text in self.texts.values()}, {}

    def measure(self, session: Session, result: MethodResult) -> Measurement:
        notes = [note for text in self.texts.values() for note in text.notes] + _overlaps(self.texts)
        test = self.texts.get("test")
        if test is None:
            notes.append("warning: there are no test texts, so nothing was evaluated: --test FILE")
            return Measurement(Metrics(accuracy={}), notes)
        found = _evaluate_texts(session, result.model_for(""), test)
        metrics = Metrics(accuracy={test.name: _token_score(found)}, perplexity={test.name: found.perplexity})
        if session.setting.compare and session.setting.method.changes_model:
            before = _evaluate_texts(session, session.model, test)
            metrics = metrics.with_values(
                zero_shot={test.name: before.correct / before.tokens},
                base_perplexity={test.name: before.perplexity},
            )
        return Measurement(metrics, notes)


def score(split: Labelled, predictions: Tensor) -> Score:
    """Return the score of predictions on a split."""
    found = accuracy(predictions, split)
    return Score(
        correct=found.correct,
        total=found.total,
        accuracy=found.value,
        per_class_accuracy=found.per_class,
        interval=found.interval,
        right=_bits(predictions == torch.tensor(split.labels)),
    )


def _bits(right: Tensor) -> str:
    """A bit for every image, the first one lowest, as hexadecimal."""
    number = sum(1 << i for i, good in enumerate(right.tolist()) if good)
    return f"{number:0{-(-len(right) // 4)}x}"


def _classify(
    session: Session, model: nn.Module, split: Labelled, head: Classifier | Head | None
) -> Predictions:
    options = session.options
    cache = feature_cache(session)
    return classify(model, split, head=head, workers=options.workers, cache=cache, progress=options.progress)


def _learned_notes(session: Session) -> list[str]:
    """What a user should know about the items that were learned from, such as texts that were cut."""
    if not session.setting.method.minimises:
        return []
    splits = [term.split for _, term in session.problem.objective.data_terms]
    transforms = session.encoder.transforms
    return [n for s in splits if isinstance(s, Labelled) for n in transforms.notes(s.items, s.name)]


def _prompt_notes(session: Session, classes: Sequence[ClassList]) -> list[str]:
    """Which prompts were too long for the text tower and truncated."""
    encoder = session.encoder
    distinct = {one.key: one for one in classes if encoder.has_text}
    return [note for one in distinct.values() for note in encoder.class_weights(one).notes]


def _evaluate_texts(session: Session, model: nn.Module, split: TextDataset) -> LanguageScore:
    from aniso.experiments.methods import TrainingMethod

    options, method, micro_batch = session.options, session.setting.method, None
    if isinstance(method, TrainingMethod):
        micro_batch = method.resolved_schedule(session.setting).micro_batch
    return evaluate_lm(
        model,
        split,
        batch_size=min(split.default_batch_size, micro_batch or split.default_batch_size),
        workers=options.workers,
        progress=options.progress,
    )


def _token_score(found: LanguageScore) -> Score:
    """Of all tokens, those that the model thought the likeliest."""
    return Score(
        correct=found.correct,
        total=found.tokens,
        accuracy=found.correct / found.tokens,
        interval=wilson(found.correct, found.tokens),
    )


def _require_apart(texts: Mapping[str, TextDataset]) -> None:
    """A result that is measured on, or chosen by, texts that were learned from means nothing."""
    for one, other in combinations(texts, 2):
        if texts[one].manifest == texts[other].manifest:
            raise UsageError(
                "LEARN-TEST",
                f"{printable(texts[one].name)} and {printable(texts[other].name)} are the same texts",
                fix=f"--{other} with other texts, or leave it out",
            )


def _overlaps(texts: Mapping[str, TextDataset]) -> list[str]:
    """A warning for every file to choose or to measure by, some of whose rows were learned from."""
    learned = set(texts["train"].digests)
    out = []
    for role, text in texts.items():
        known = sum(digest in learned for digest in text.digests)
        if role != "train" and known:
            name = printable(texts["train"].name)
            out.append(f"warning: {known} of {len(text)} rows of {printable(text.name)} are in {name}, too")
    return out
