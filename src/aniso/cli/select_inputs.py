"""The model that vectors are selected for, and its loss on the items to select by."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from aniso.cli import show

if TYPE_CHECKING:
    from aniso.learn.objectives import Objective
    from aniso.models import Wrapped


class Inputs(NamedTuple):
    """The model, its loss on the items to select by, and the name of the task's own vector."""

    model: Wrapped
    objective: Objective | None
    own: str


def texts(name: str, weights: str | None, file: Path | None = None, length: int | None = None) -> Inputs:
    """Return the language model, and its loss on the texts to select by; no vector is left out."""
    from aniso.data import read_examples
    from aniso.learn import LanguageLoss, text_dataset
    from aniso.models import load_language_model

    model = load_language_model(name, weights)
    if file is None:
        return Inputs(model, None, "")
    dataset = text_dataset(model, read_examples(file), file.name, "train", length=length)
    show.notes(dataset.notes)
    return Inputs(model, LanguageLoss(dataset) * 1.0, "")


def images(
    model: str,
    weights: str | None,
    task: str | None = None,
    data: Path | None = None,
    shots: int | None = None,
    seed: int = 0,
) -> Inputs:
    """Return the encoder, its loss on the items to select by, and the name of the task's own vector."""
    from aniso.models import load_model

    encoder = load_model(model, weights)
    if task is None:
        return Inputs(encoder, None, "")
    from aniso.data import load_task
    from aniso.experiments.problem import require_split
    from aniso.learn import CrossEntropy

    with show.item_progress() as progress:
        found = load_task(task, data, progress=progress)
    show.notes(found.notes)
    train = require_split(found, "train", "vectors are selected by")
    loss = CrossEntropy(train if shots is None else train.shots(shots, seed)) * 1.0
    return Inputs(encoder, loss, found.name)
