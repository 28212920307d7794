"""Evaluation of one model on tasks or texts, as ``aniso eval`` does it, and the record of each.

A record says what is needed to tell whether two evaluations are comparable; it has no paths, dates or hosts.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from torch import nn

from aniso import __version__
from aniso.compose import Composition, Linearised, Partition
from aniso.data import Labelled, Task, TextDataset
from aniso.errors import UsageError
from aniso.experiments.banks import load_coefficients
from aniso.experiments.evaluation import MeasuredPredictions
from aniso.json_value import JsonObject
from aniso.learn import accuracy, classify, evaluate_lm, feature_identity
from aniso.learn.heads import Classifier, Head, RestrictedHead, load_head
from aniso.models import Encoder, LanguageModel, Wrapped
from aniso.progress import ProgressCallback
from aniso.records import Score
from aniso.vectors import Bank
from aniso.weights.atomic import make_directory, write_text
from aniso.weights.fingerprint import combined_hash, tensor_hash


@final
@dataclass(frozen=True)
class Subject:
    """The model to evaluate: its description, the module, and hashes of what was added to the base."""

    what: str
    model: nn.Module
    identity: dict[str, str] = field(default_factory=dict)
    head: Head | None = None

    @classmethod
    def base(cls, model: Wrapped) -> Subject:
        """The base as it is."""
        return cls("zero-shot", model)

    @classmethod
    def with_vector(cls, model: Wrapped, bank: Bank, vector: str, *, linearised: bool = False) -> Subject:
        """The base plus one whole vector of a bank: a coefficient of 1."""
        only = bank.only(vector)
        composition = Composition(_base(model, linearised), only, Partition.whole())
        composition.values.data.fill_(1.0)
        what = f"with {'linearised ' if linearised else ''}vector {vector}"
        return cls(what, composition, {"bank": only.whole_hash, "storage": only.storage})

    @classmethod
    def composed(cls, model: Wrapped, bank: Bank, path: Path, *, linearised: bool = False) -> Subject:
        """The base composed with the coefficients in a file."""
        bank, coefficients = load_coefficients(bank, path)
        composition = Composition.of(_base(model, linearised), bank, coefficients)
        hashes = {"bank": bank.whole_hash, "coefficients": coefficients.content_hash}
        return cls(f"composed with {path.stem}", composition, hashes)

    @classmethod
    def with_adapter(cls, model: Wrapped, path: Path) -> Subject:
        """The base with a LoRA adapter in PEFT's format."""
        only = Bank.build(model, {"adapter": path})
        composition = Composition(model, only, Partition.whole())
        composition.values.data.fill_(1.0)
        return cls(f"with adapter {path.name}", composition, {"adapter": only["adapter"].provenance.sha256})

    def with_head(self, path: Path) -> Subject:
        """Return the subject with a head that was learned on its features."""
        saved = load_head(path)
        saved.require_features(feature_identity(self.model), str(path))
        content = combined_hash({name: tensor_hash(t) for name, t in saved.head.tensors().items()})
        what = f"{'base' if self.what == 'zero-shot' else self.what}, head {saved.head.kind}"
        return replace(self, what=what, head=saved.head, identity={**self.identity, "head": content})


def _base(model: Wrapped, linearised: bool) -> Any:
    return Linearised(model) if linearised else model


class TaskEvaluation(Score):
    """The accuracy on one split of a task, and everything it depends on; hashes of the subject are extra."""

    model: str
    fingerprint: str
    what: str
    task: str
    split: str
    manifest: str
    class_list: str
    class_weights: str
    classes: int
    notes: tuple[str, ...] = ()
    aniso: str = __version__

    def content(self) -> JsonObject:
        """Return plain JSON values."""
        return self.model_dump(mode="json", exclude_none=True)

    def save(self, directory: Path, *, overwrite: bool) -> None:
        """Write the record as JSON, under a name made from the model, task, split and subject."""
        text = json.dumps(self.content(), indent=1, sort_keys=True) + "\n"
        name = record_name(self.model, self.task, self.split, self.what)
        write_text(directory / name, text, overwrite=overwrite)


def evaluate_task(
    encoder: Encoder,
    subject: Subject,
    task: Task,
    split: str,
    *,
    batch: int,
    workers: int,
    progress: ProgressCallback,
) -> tuple[TaskEvaluation, list[str], MeasuredPredictions]:
    """Evaluate a subject on one split of a task; returns the record, notes for the user, and predictions."""
    chosen: Labelled = task.split(split)
    weights = encoder.class_weights(task.classes, progress=progress)
    head: Classifier = weights
    if subject.head is not None:
        head = RestrictedHead(subject.head, task.classes.names)
    predictions = classify(
        subject.model, chosen, head=head, batch_size=batch, workers=workers, progress=progress
    )
    cut = encoder.transforms.notes(chosen.items, chosen.name)
    result = accuracy(predictions.labels, chosen, notes=(*head.notes, *cut))
    record = TaskEvaluation(
        model=encoder.name,
        fingerprint=encoder.fingerprint,
        what=subject.what,
        task=task.name,
        split=split,
        manifest=chosen.manifest,
        class_list=task.classes.key,
        class_weights=tensor_hash(weights.weight),
        classes=len(task.classes),
        correct=result.correct,
        total=result.total,
        accuracy=result.value,
        per_class_accuracy=result.per_class,
        interval=result.interval,
        notes=tuple(task.notes),
        **subject.identity,
    )
    notes = list(result.notes)
    if subject.head is not None and len(subject.head.names) > len(task.classes):
        known = f"{len(task.classes)} of the head's {len(subject.head.names)} classes"
        notes.append(f"{task.name}: predictions are restricted to {known}")
    if task.card.metric != "accuracy":
        notes.append(f"{task.name}: others report {task.card.metric}, which is {result.per_class:.1%}")
    return record, notes, MeasuredPredictions(task.name, chosen, predictions)


@final
@dataclass(frozen=True)
class TextEvaluation:
    """The loss of a language model on one file of texts, and everything it depends on."""

    model: str
    fingerprint: str
    tokenizer: str
    what: str
    identity: dict[str, str]
    texts: str
    manifest: str
    length: int
    tokens: int
    right: int
    loss: float
    perplexity: float
    notes: tuple[str, ...]

    def content(self) -> JsonObject:
        """Return plain JSON values."""
        values = {key: value for key, value in vars(self).items() if key != "identity"}
        return {**values, **self.identity, "notes": list(self.notes), "aniso": __version__}


def evaluate_texts(
    model: LanguageModel,
    subject: Subject,
    texts: TextDataset,
    *,
    batch: int | None,
    workers: int,
    progress: ProgressCallback,
) -> TextEvaluation:
    """Evaluate a subject on the texts of one file."""
    score = evaluate_lm(
        subject.model,
        texts,
        batch_size=batch or TextDataset.default_batch_size,
        workers=workers,
        progress=progress,
    )
    return TextEvaluation(
        model=model.name,
        fingerprint=model.fingerprint,
        tokenizer=model.tokens.fingerprint,
        what=subject.what,
        identity=subject.identity,
        texts=texts.name,
        manifest=texts.manifest,
        length=texts.length,
        tokens=score.tokens,
        right=score.correct,
        loss=score.loss,
        perplexity=score.perplexity,
        notes=tuple(texts.notes),
    )


def record_name(model: str, task: str, split: str, what: str) -> str:
    """Return the file name of an evaluation's record."""
    return re.sub(r"[^\w.+-]+", "-", f"{model} {task} {split} {what}") + ".json"


def require_free(directory: Path, names: list[str], *, overwrite: bool) -> None:
    """Create the directory of records, and raise an error if one of these is already there."""
    if directory.exists() and not directory.is_dir():
        raise UsageError("OUT-EXISTS", f"'{directory}' is a file", fix="name a directory with --record")
    there = [name for name in names if (directory / name).exists()]
    if there and not overwrite:
        raise UsageError(
            "OUT-EXISTS", f"'{directory / there[0]}' exists", fix="add --overwrite to replace it"
        )
    make_directory(directory)
