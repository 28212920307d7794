"""What ``aniso bake`` writes: the model of a run, or of a file of coefficients, with its classifier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from aniso.classes import ClassList
from aniso.compose import Baked, Coefficients, PlainModel
from aniso.errors import InputError, UsageError, printable
from aniso.experiments.banks import load_coefficients, open_bank
from aniso.experiments.class_lists import class_lists_text, read_class_lists
from aniso.experiments.prediction.model_files import ModelFiles, files_of_run
from aniso.experiments.run_files import CLASSES, WEIGHTS, is_run, record_beside
from aniso.learn.features import composed_identity
from aniso.learn.heads import SavedHead, load_head
from aniso.models import base_weights, load_model
from aniso.models.stored_class_weights import CLASS_WEIGHTS, class_weights_file
from aniso.records import Record
from aniso.vectors import Bank, BlockSource
from aniso.vectors.convert import SENTENCE
from aniso.weights import open_weights

_TRAINED = "trained"


@final
@dataclass(frozen=True)
class BakeSource:
    """A model to bake, with what lies beside it."""

    model: Baked | PlainModel
    base: str
    """The base's weights: a path, a hub id, mini, or NAME:TAG of open_clip's."""
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
        elif not self.has_adapter:  # composing an adapter rounds, so its features have no hash of weights
            saved.require_features({"model": self.content}, str(path))
        return saved

    @property
    def content(self) -> str:
        """A hash of the weights that are written, as heads name their model."""
        weights = self.model.source if isinstance(self.model, PlainModel) else self.model
        return BlockSource(weights).identity().content

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
    if is_run(path):
        files = files_of_run(path, base, None if bank is None else str(bank))
        return _of_run(path, files, base, dtype)
    if path.is_dir():
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
    return _composed(path, base, base, open_bank(bank, base_weights(base)), None, dtype)


def _of_run(path: Path, files: ModelFiles, given: str | None, dtype: torch.dtype | None) -> BakeSource:
    trained = next((own for own in (path / WEIGHTS, files.adapter) if own is not None and own.exists()), None)
    base = given or _base_name(files.base, None if trained == path / WEIGHTS else files.weights)
    if files.coefficients is not None:
        bank = open_bank(files.bank or "", base_weights(base), seed=files.seed)
        return _composed(files.coefficients, base, files.base, bank, files.head, dtype)
    if dtype is not None:
        raise UsageError("USAGE", "--dtype needs a run with coefficients", fix="aniso convert --dtype")
    return BakeSource(
        _plain(base, trained),
        base,
        files.base,
        f"{files.label}: {'fine-tuned weights' if trained else 'the base as it is'}",
        _classes(path),
        record=record_beside(path / CLASSES),
        head=files.head,
        has_adapter=files.adapter is not None,
    )


def _composed(
    file: Path, base: str, text_base: str, bank: Bank, head: Path | None, dtype: torch.dtype | None
) -> BakeSource:
    opened, made = load_coefficients(bank, file)
    return BakeSource(
        Baked(base_weights(base), opened, made, dtype=dtype),
        base,
        text_base,
        f"{len(made.vectors)} vectors over {made.provenance.base.label}, {made.partition}",
        _classes(file.parent),
        opened,
        made,
        record_beside(file),
        head,
    )


def _plain(base: str, trained: Path | None) -> PlainModel:
    """Return the base, or what a run trained, with everything that it left as it was."""
    source = open_weights(base_weights(base))
    if trained is None:
        return PlainModel(source)
    own = Bank.build(source, {_TRAINED: trained}, allow_distant=True)
    return PlainModel(Baked(source, own, Coefficients.ones(own)), tuned_from=BlockSource(source))


def _base_name(model: str, weights: str | None) -> str:
    """Return the name of a base's weights; a tag of open_clip's is written NAME:TAG."""
    if weights is None:
        return model
    return weights if Path(weights).exists() else f"{model}:{weights}"


def _classes(directory: Path) -> Mapping[str, ClassList]:
    path = directory / CLASSES
    return read_class_lists(path) if path.is_file() else {}
