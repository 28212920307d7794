"""A classifier from its files: the model, its head or class weights, its temperature, hashes of all of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch

from aniso.classes import ClassList
from aniso.data import Task, load_task
from aniso.errors import AnisoError, printable
from aniso.experiments.banks import open_bank
from aniso.experiments.model_evaluation import Subject
from aniso.experiments.prediction.model_files import ModelFiles, no_classes
from aniso.learn import FeatureCache
from aniso.learn.calibration import Calibration, calibrate
from aniso.learn.heads import Classifier, RestrictedHead
from aniso.models import Encoder, load_model
from aniso.progress import ProgressCallback
from aniso.vectors import Bank
from aniso.weights.fingerprint import combined_hash

_TRAINED = "trained"


@final
@dataclass(frozen=True)
class LoadedClassifier:
    """A model with a classifier for its features."""

    label: str
    encoder: Encoder
    subject: Subject
    classifier: Classifier
    classes_key: str
    """A hash of the classes and, without a head, of their prompts."""

    @property
    def identity(self) -> dict[str, str]:
        """Hashes of everything that predictions depend on beside the items and the temperature."""
        return {"model": self.encoder.fingerprint, **self.subject.identity, "classes": self.classes_key}


def load_classifier(
    files: ModelFiles,
    data: Path | None = None,
    *,
    device: torch.device | None = None,
    progress: ProgressCallback | None = None,
) -> LoadedClassifier:
    """Load the model and its classifier; ``data`` is the directory of known data sets."""
    of_encoder = files.weights if files.linearised else files.trained or files.weights
    encoder: Encoder = load_model(files.base, of_encoder).to(device or torch.device("cpu"))
    subject = _subject(encoder, files)
    if files.head is not None:
        subject = subject.with_head(files.head)
    names, classes = _classes(files, encoder, data, progress)
    if subject.head is not None:
        head: Classifier = subject.head.to(device or torch.device("cpu"))
        own = names is None or names == head.names
        chosen = head if own else RestrictedHead(head, names or ())
        return LoadedClassifier(files.label, encoder, subject, chosen, combined_hash(_numbered(chosen.names)))
    if classes is None:
        raise no_classes(files.label)
    weights = encoder.class_weights(classes, progress=progress)
    return LoadedClassifier(files.label, encoder, subject, weights, classes.key)


def _numbered(names: tuple[str, ...]) -> dict[str, str]:
    return {str(i): name for i, name in enumerate(names)}


def _subject(encoder: Encoder, files: ModelFiles) -> Subject:
    if files.coefficients is not None:
        bank = open_bank(files.bank or "", encoder.weight_source(), seed=files.seed)
        return Subject.composed(encoder, bank, files.coefficients, linearised=files.linearised)
    if files.adapter is not None or (files.linearised and files.trained is not None):
        bank = Bank.build(encoder.weight_source(), {_TRAINED: files.adapter or files.trained or ""})
        return Subject.with_vector(encoder, bank, _TRAINED, linearised=files.linearised)
    return Subject.base(encoder)


def _classes(
    files: ModelFiles, encoder: Encoder, data: Path | None, progress: ProgressCallback | None
) -> tuple[tuple[str, ...] | None, ClassList | None]:
    """Return the names of the classes, and the classes with their prompts; None where a head has its own."""
    if files.classes is not None:
        return files.classes.names, files.classes
    if files.task is not None and (files.head is None or not files.is_run):
        task = load_task_of(files.task, files, data, progress, files.prompts)
        return task.classes.names, task.classes
    if encoder.family.own_classes and not encoder.has_text:
        return encoder.family.own_classes, ClassList(encoder.family.own_classes)
    return None, None


def load_task_of(
    name: str,
    files: ModelFiles,
    data: Path | None,
    progress: ProgressCallback | None = None,
    prompts: tuple[str, ...] = (),
) -> Task:
    """Load a task with the split seed of a run; ``./`` means below the data directory."""
    ref = str(data / name[2:]) if name.startswith("./") and data is not None else name
    return load_task(ref, data, prompts=prompts, seed=files.split_seed, progress=progress)


def calibrated(
    loaded: LoadedClassifier,
    files: ModelFiles,
    data: Path | None,
    *,
    task: str | None = None,
    workers: int = 0,
    progress: ProgressCallback | None = None,
) -> Calibration:
    """Fit the temperature on the validation split of ``task``, or else of the task that a run learned.

    Without a task of its own, or without its data, the result says why there is no calibration.
    """
    if task is None and files.validation_task is None:
        return Calibration(reason="no validation data are known")
    name = task or files.validation_task or ""
    try:
        split = load_task_of(name, files, data, progress).split("val")
    except AnisoError as e:
        if task is not None:
            raise
        return Calibration(reason=f"the run's validation data cannot be read: {printable(e.message, 200)}")
    head = loaded.classifier
    if head.names != split.classes.names and {*head.names} == {*split.classes.names}:
        head = RestrictedHead(head, split.classes.names)
    found = calibrate(
        loaded.subject.model,
        split,
        head=head,
        workers=workers,
        cache=FeatureCache.default(),
        progress=progress,
    )
    return replace(found, split=printable(found.split))
