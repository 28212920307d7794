"""Minimise an objective over coefficients, or over weights; interrupted runs can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from aniso.compose import Coefficients, Composition, Sharding
from aniso.data import Labelled, Split, TextDataset, Unlabelled, content_hash
from aniso.errors import UsageError, printable
from aniso.learn._training.checkpointed_run import METRICS as METRICS
from aniso.learn._training.checkpointed_run import CheckpointedRun, RunIdentity
from aniso.learn._training.loop import Loop
from aniso.learn._training.starting import begin_at, start_coefficients
from aniso.learn._training.trainable import Trainable
from aniso.learn.keep import Keep, Last
from aniso.learn.objectives import Objective, Term
from aniso.learn.starts import Start
from aniso.progress import ProgressCallback, progress_or_default
from aniso.records import EpochRow, JsonValue
from aniso.schedule import Schedule


@final
@dataclass(frozen=True)
class Fit:
    """Result of ``fit``: the history, the kept epoch and its coefficients, which the model now has."""

    history: tuple[EpochRow, ...]
    """A row for every validation, which is after every epoch by default; the first is the start."""
    kept: int
    """The row that was kept; 0 is the start."""
    coefficients: Coefficients | None
    notes: tuple[str, ...] = ()
    predictions: Tensor | None = None
    """Online runs: the class predicted for every image before it was learned from."""
    lr: float | None = None
    """The learning rate that was used: lower than the schedule's if predictions collapsed with that."""


def fit(
    model: Composition | Trainable,
    objective: Objective | Term,
    schedule: Schedule,
    *,
    keep: Keep | None = None,
    start: Start | Coefficients | float | None = None,
    seed: int = 0,
    directory: str | Path | None = None,
    resume: bool = False,
    allow_env_change: bool = False,
    workers: int = 0,
    online: bool = False,
    progress: ProgressCallback | None = None,
    epoch_done: Callable[[EpochRow], None] | None = None,
) -> Fit:
    """Minimise an objective over a composition's coefficients, or over what a ``Trainable`` holds.

    Args:
        keep: the rule that chooses the epoch (default: the last one).
        start: what to begin at, a start, coefficients or one number (default: what the composition has, which
            is zero at first); see ``aniso.starts``.
        directory: where to write a checkpoint after every epoch and when the run is interrupted.
        resume: continue from the newest checkpoint in ``directory``. The result is the same, bit for bit, as
            that of a run that was not interrupted.
        allow_env_change: resume although software, device or threads differ, which changes rounding.
        online: visit every image once, as they come, and predict each batch before learning from it.
        epoch_done: called with every epoch's row.

    Example::

        done = fit(composition, CrossEntropy(task.train), Schedule(epochs=10, lr=0.1), keep=Best(task.val))
    """
    progress = progress_or_default(progress)
    trainable = Trainable.coefficients(model) if isinstance(model, Composition) else model
    whole = objective if isinstance(objective, Objective) else objective * 1.0
    _require_objective(whole, trainable)
    _require_whole_batches(whole, schedule)
    if online:
        schedule = replace(schedule, epochs=1, min_steps_per_epoch=1, steps=None, validate_every=None)
        _require_one_stream(whole)
    keep = keep or Last()
    begin = None if start is None else start_coefficients(trainable.model, start)
    if begin is not None:
        keep = begin_at(trainable.model, begin, keep, workers=workers)
    loop = Loop(trainable, whole, schedule, keep, seed=seed, workers=workers, online=online)
    row_done = epoch_done or (lambda row: None)
    notes: list[str] = []
    if directory is None:
        for row in loop.run(progress, lambda: None):
            row_done(row)
    else:
        images = _images(whole, keep)
        what: dict[str, JsonValue] = {
            "trained": trainable.identity,
            "objective": whole.identity(),
            "schedule": asdict(schedule),
            "keep": keep.identity(),
            "seed": seed,
            "online": online,
            **({} if begin is None else {"start": begin.content_hash}),
        }
        content = {split.name: content_hash(split, progress) for split in images}
        run = CheckpointedRun(
            Path(directory), loop, RunIdentity(what, _environment(trainable, loop.sharding), content), images
        )
        with run.locked():
            notes += run.begin(resume=resume, allow_env_change=allow_env_change)
            run.run(progress, row_done)
    kept = next(i for i, row in enumerate(loop.history) if row.kept)
    coefficients = model.coefficients if isinstance(model, Composition) else None
    doubts = (*(f"warning: {text}" for text in loop.restarts), *_doubts(loop.history))
    return Fit(tuple(loop.history), kept, coefficients, (*notes, *doubts), loop.predictions, loop.lr)


def _require_objective(objective: Objective, trainable: Trainable) -> None:
    if not objective.data_terms:
        raise UsageError(
            "OBJECTIVE", "the objective has no split to learn from", fix="add CrossEntropy(split)"
        )
    if objective.value_terms and trainable.slots is None:
        raise UsageError(
            "OBJECTIVE",
            f"'{objective.value_terms[0][1].name}' is a term on coefficients, but weights are trained",
            fix="leave that term out",
        )
    lengths = {term.split.length for _, term in objective.data_terms if isinstance(term.split, TextDataset)}
    if len(lengths) > 1:
        raise UsageError(
            "OBJECTIVE",
            "all texts of an objective must have the same maximum length: they go through the model together",
            found=", ".join(map(str, sorted(lengths))),
            fix=f"text_dataset(…, length={max(lengths)}) for all of them",
        )
    names = [term.name for _, term in objective.parts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(
            "OBJECTIVE",
            f"'{printable(twice)}' is in the objective twice",
            fix="multiply it by a number, or give one of the tasks another name",
        )


def _environment(trainable: Trainable, sharding: Sharding | None) -> dict[str, JsonValue]:
    # so does another number of processes
    shared: dict[str, JsonValue] = {} if sharding is None else {"processes": sharding.world}
    return shared | {
        "aniso": version("aniso"),
        "torch": torch.__version__,
        "device": trainable.device.type,
        "threads": torch.get_num_threads(),  # another number of threads sums in another order
    }


def _images(objective: Objective, keep: Keep) -> list[Split]:
    """The splits of images that the result depends on. For text the manifest has the content already."""
    used = [*(term.split for _, term in objective.data_terms), *keep.splits]
    return [split for split in used if isinstance(split, Labelled | Unlabelled)]


def _doubts(history: Sequence[EpochRow]) -> list[str]:
    """Warnings about a rising loss, or about predictions that collapsed."""
    out = []
    losses = [row.loss for row in history if row.loss is not None]
    selective = any(row.trusted is not None or row.forgotten is not None for row in history)
    # where only some images count, more of them may count later, and the loss may rise
    if not selective and len(losses) > 1 and losses[-1] > losses[0] + abs(losses[0]):
        out.append(
            f"warning: the loss rose from {losses[0]:.3g} to {losses[-1]:.3g}: try a lower learning rate"
        )
    if history and (resets := history[-1].forgotten):
        times = "once" if resets == 1 else f"{resets} times"
        out.append(f"predictions collapsed {times}, and training began again from the start values")
    return out


def _require_whole_batches(objective: Objective, schedule: Schedule) -> None:
    compared = [term.name for _, term in objective.data_terms if term.whole_batch]
    if compared and schedule.micro_batch is not None and schedule.micro_batch < schedule.batch_size:
        raise UsageError(
            "OBJECTIVE",
            f"'{printable(compared[0])}' compares the images of a batch, so it cannot use micro-batches",
            fix="leave --micro-batch out, and lower --batch instead",
        )
    if compared and schedule.batch_size < 2:
        raise UsageError(
            "OBJECTIVE",
            f"'{printable(compared[0])}' compares the images of a batch, and a batch has one image",
            fix="--batch 64",
        )


def _require_one_stream(objective: Objective) -> None:
    splits = [term.split for _, term in objective.data_terms]
    if len(splits) != 1 or not isinstance(splits[0], Unlabelled):
        raise UsageError(
            "OBJECTIVE",
            "an online run needs exactly one split, of images without labels",
            fix="one term on one unlabelled split",
        )
