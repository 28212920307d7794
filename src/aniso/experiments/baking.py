"""What ``aniso bake`` writes: the model of a run, or of a file of coefficients, with its classifier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch

from aniso.classes import ClassList
from aniso.compose import Baked, Coefficients, PlainModel
from aniso.errors import InputError, UsageError, printable
from aniso.experiments.banks import load_coefficients, open_bank
from aniso.experiments.class_lists import class_lists_text, read_class_lists
from aniso.experiments.prediction.model_files import ModelFiles, files_of_run
from aniso.experiments.run_files import CLASSES, COEFFICIENTS, SPEC, file_of, record_beside
from aniso.learn.features import composed_identity
from aniso.learn.heads import SavedHead, load_head
from aniso.models import base_source, load_language_model, load_model
from aniso.models.exported_files import home_of
from aniso.models.sentence_encoder import recognises
from aniso.models.stored_class_weights import CLASS_WEIGHTS, class_weights_file
from aniso.records import Record
from aniso.vectors import Bank, BlockSource
from aniso.vectors.convert import HUGGING_FACE, SENTENCE
from aniso.weights import WeightSource, open_weights

_TRAINED = "trained"


@final
@dataclass(frozen=True)
class BakeSource:
    """A model to bake, with what lies beside it."""

    model: Baked | PlainModel
    base: WeightSource
    text_base: str
    """The model that makes class weights."""
    label: str
    """The model in words."""
    classes: Mapping[str, ClassList]
    """The classes that it was learned for, by task."""
    bank: Bank | None = None
    coefficients: Coefficients | None = None
    record: Record | None = None
    head: Path | None = None
    has_adapter: bool = False
    """True for a base with an adapter that a run trained."""

    def checked_head(self, path: Path) -> SavedHead:
        """Return the head in a file; raises unless it was learned on this model's features."""
        saved = load_head(path)
        if self.coefficients is not None and self.bank is not None:
            made = self.coefficients
            known = composed_identity(made.provenance.base.content, made.chosen(self.bank), made)
            saved.require_features(known, str(path))
        elif not self.has_adapter or path != self.head:
            # composing an adapter rounds, so the features of the run's own head have no hash of weights
            saved.require_features({"model": self.content}, str(path))
        return saved

    @property
    def content(self) -> str:
        """A hash of the weights that are written, as heads name their model."""
        weights = self.model.source if isinstance(self.model, PlainModel) else self.model
        return BlockSource(weights).identity().content

    def require_form(self, to: str) -> None:
        """Raise for a kind of directory that has no place for this model's classifier."""
        home = home_of(self.base)
        is_text = home is not None and (recognises(home) or recognises(home.parent))
        if (to == HUGGING_FACE and is_text) or (to == SENTENCE and not is_text):
            fit = SENTENCE if is_text else HUGGING_FACE
            lost = "pooling and class weights of a sentence encoder" if is_text else "model of images"
            raise UsageError(
                "USAGE",
                f"a directory of kind {to} has no place for the {lost}",
                found=self.base.label,
                fix=f"--to {fit}",
            )

    def beside(self, to: str) -> dict[str, tuple[bytes, str]]:
        """Return files for a directory of kind ``to`` by name, each with a sentence for the card."""
        if not self.classes:
            return {}
        text = class_lists_text(self.classes).encode()
        out = {CLASSES: (text, "lists the classes and prompts that the model was learned for.")}
        if to == SENTENCE:
            encoder = load_model(self.text_base)
            made = [(classes, encoder.class_weights(classes)) for classes in self.classes.values()]
            sentence = "holds their class weights, which the base made: this encoder would make others."
            out[CLASS_WEIGHTS] = (class_weights_file(made), sentence)
        return out


def bake_source(
    path: Path, *, base: str | None = None, bank: str | Path | None = None, dtype: torch.dtype | None = None
) -> BakeSource:
    """Return what to bake; ``base`` and ``bank`` are needed for a file, and replace those of a run."""
    if (path / SPEC).is_file():
        return _of_run(path, files_of_run(path, base, None if bank is None else str(bank)), dtype)
    if path.is_dir() and not (path / COEFFICIENTS).is_file():
        raise InputError(
            "FILE-MISSING",
            f"'{printable(path)}' is no directory of a run",
            expected="a run, or a file of coefficients",
            fix="aniso bake RUN, or aniso bake FILE --bank BANK --base BASE",
        )
    if base is None or bank is None:
        raise UsageError(
            "USAGE",
            f"a file of coefficients does not say where its base and its bank are: '{printable(path)}'",
            fix="--bank BANK --base BASE, or name the directory of the run",
        )
    source = base_source(base)
    return _composed(file_of(path, COEFFICIENTS), source, base, open_bank(bank, source), None, dtype)


def _of_run(path: Path, files: ModelFiles, dtype: torch.dtype | None) -> BakeSource:
    base = base_source(files.base, files.weights)
    if files.coefficients is not None:
        bank = open_bank(files.bank or "", base, seed=files.seed)
        return _composed(files.coefficients, base, files.base, bank, files.head, dtype)
    if dtype is not None:
        raise UsageError("USAGE", "--dtype needs a run with coefficients", fix="aniso convert --dtype")
    if files.linearised and files.trained is not None:
        raise InputError(
            "CKPT-LINEARISED",
            f"the run in '{printable(path)}' trained the linearised model, which has no weights of its own",
            fix="aniso predict RUN, or train without --linearised",
        )
    record = record_beside(path / CLASSES)
    _require_base_of(record, files, base)
    is_tuned = files.trained is not None or files.adapter is not None
    return BakeSource(
        _plain(base, files),
        base,
        files.base,
        f"{files.label}: {'fine-tuned weights' if is_tuned else 'the base as it is'}",
        _classes(path),
        record=record,
        head=files.head,
        has_adapter=files.adapter is not None,
    )


def _require_base_of(record: Record | None, files: ModelFiles, base: WeightSource) -> None:
    """Raise unless the base is the one that the run was measured with."""
    known = None if record is None else record.inputs.model
    if record is None or known is None or known == BlockSource(base).identity().content:
        return
    load = load_language_model if record.spec.setting == "lm" else load_model
    found = load(files.base, files.weights).fingerprint  # in the library's precision, if it is not the file's
    if found != known:
        raise InputError(
            "RUN-CHANGED",
            f"'{base.label}' is not the base that the run was measured with",
            found=found,
            expected=known,
            likely="another model, or the directory has changed since",
            fix="--base DIRECTORY, with the model that the run began with",
        )


def _composed(
    file: Path, base: WeightSource, text_base: str, bank: Bank, head: Path | None, dtype: torch.dtype | None
) -> BakeSource:
    opened, made = load_coefficients(bank, file)
    return BakeSource(
        Baked(base, opened, made, dtype=dtype),
        base,
        text_base,
        f"{len(made.vectors)} vectors over {made.provenance.base.label}, {made.partition}",
        _classes(file.parent),
        opened,
        made,
        record_beside(file),
        head,
    )


def _plain(base: WeightSource, files: ModelFiles) -> PlainModel:
    """Return the base, or what a run trained from it."""
    if files.trained is not None:
        trained = open_weights(files.trained)
        trained.info = replace(trained.info, config=base.info.config, home=home_of(base))
        return PlainModel(trained, tuned_from=BlockSource(base))
    if files.adapter is not None:
        own = Bank.build(base, {_TRAINED: files.adapter}, allow_distant=True)
        return PlainModel(Baked(base, own, Coefficients.ones(own)), tuned_from=BlockSource(base))
    return PlainModel(base)


def _classes(directory: Path) -> Mapping[str, ClassList]:
    path = directory / CLASSES
    return read_class_lists(path) if path.is_file() else {}
