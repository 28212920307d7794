"""Learning: an objective minimised over coefficients, or over weights; a run can be gone on with."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from aniso.compose import Coefficients, Composition
from aniso.data import IMAGES, ImageLists, Labelled, Split, TextDataset, Unlabelled, content_hash
from aniso.errors import InputError, NumericalError, StoppedError, UsageError, printable
from aniso.learn._training.interrupt import Interrupt
from aniso.learn._training.loop import Loop, Row
from aniso.learn._training.trainable import Trainable
from aniso.learn._training.training_checkpoint import TrainingCheckpoints, require_same
from aniso.learn.keep import Keep, Last
from aniso.learn.objectives import Objective, Term
from aniso.learn.schedule import Schedule
from aniso.progress import ProgressCallback, progress_or_default
from aniso.weights.atomic import locked, make_directory, require_space, write_text

METRICS = "metrics.jsonl"


@final
@dataclass(frozen=True)
class Fit:
    """What a run came to. The model that was trained holds the kept epoch's values."""

    history: tuple[Row, ...]
    """A row for every epoch; the first is the start."""
    kept: int
    """The epoch that was kept; 0 is the start."""
    coefficients: Coefficients | None
    notes: tuple[str, ...] = ()
    answers: Tensor | None = None
    """Of an online run: for every picture what was said of it before anything was learned from it."""


def fit(
    model: Composition | Trainable,
    objective: Objective | Term,
    schedule: Schedule,
    *,
    keep: Keep | None = None,
    seed: int = 0,
    directory: str | Path | None = None,
    resume: bool = False,
    allow_env_change: bool = False,
    workers: int = 0,
    online: bool = False,
    progress: ProgressCallback | None = None,
    epoch_done: Callable[[Row], None] | None = None,
) -> Fit:
    """Minimise an objective over a composition's coefficients, or over what ``Trainable`` says.

    ``keep`` chooses the epoch, the last one if not said. With a ``directory`` the run leaves a state there
    after every epoch and when it is interrupted; ``resume`` goes on from it, and ends with the very same
    numbers as if nothing had happened. ``online`` goes through the pictures once, as they come, and answers
    before it learns from each batch. ``epoch_done`` is called with every epoch's row.
    """
    progress = progress_or_default(progress)
    trained = Trainable.coefficients(model) if isinstance(model, Composition) else model
    whole = objective if isinstance(objective, Objective) else objective * 1.0
    _require_sense(whole, trained)
    _require_whole_batches(whole, schedule)
    if online:
        schedule = replace(schedule, epochs=1, min_steps_per_epoch=1)
        _require_one_stream(whole)
    keep = keep or Last()
    loop = Loop(trained, whole, schedule, keep, seed=seed, workers=workers, online=online)
    notes: list[str] = []
    if directory is None:
        for row in loop.run(progress, lambda: None):
            _tell(epoch_done, row)
    else:
        images = _images(whole, keep)
        circumstances = _circumstances(trained, whole, schedule, keep, seed, online)
        circumstances["content"] = {s.name: content_hash(s, progress) for s in images}
        run = _Run(Path(directory), loop, circumstances, images)
        with run.held():
            notes += run.begin(resume=resume, allow_env_change=allow_env_change)
            run.go(progress, lambda row: _tell(epoch_done, row))
    kept = next(row["epoch"] for row in loop.history if row["kept"])
    coefficients = model.coefficients if isinstance(model, Composition) else None
    return Fit(tuple(loop.history), kept, coefficients, (*notes, *_doubts(loop.history)), loop.answers)


def _tell(listener: Callable[[Row], None] | None, row: Row) -> None:
    if listener:
        listener(row)


def _require_sense(objective: Objective, trained: Trainable) -> None:
    if not objective.data_terms:
        raise UsageError("OBJECTIVE", "there is no split to learn from", fix="add CrossEntropy(split)")
    if objective.value_terms and trained.slots is None:
        raise UsageError(
            "OBJECTIVE",
            f"'{objective.value_terms[0][1].name}' is about coefficients, but weights are trained",
            fix="leave that term out",
        )
    lengths = {term.split.length for _, term in objective.data_terms if isinstance(term.split, TextDataset)}
    if len(lengths) > 1:
        raise UsageError(
            "OBJECTIVE",
            "texts of one objective go through the model together, and these are cut to different lengths",
            found=", ".join(map(str, sorted(lengths))),
            fix=f"text_dataset(…, length={max(lengths)}) for all of them",
        )
    names = [term.name for _, term in objective.parts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(
            "OBJECTIVE",
            f"'{printable(twice)}' is in the objective twice",
            fix="weigh it by a number, or give one of the tasks another name",
        )


def _circumstances(
    trained: Trainable, objective: Objective, schedule: Schedule, keep: Keep, seed: int, online: bool
) -> dict[str, Any]:
    what = {
        "trained": trained.identity,
        "objective": objective.identity(),
        "schedule": asdict(schedule),
        "keep": keep.identity(),
        "seed": seed,
        "online": online,
    }
    device = next(iter(trained.tensors.values())).device.type
    around = {"aniso": version("aniso"), "torch": torch.__version__, "device": device}
    # sums are taken in another order by another number of threads
    return {"what": what, "environment": {**around, "threads": torch.get_num_threads()}}


def _images(objective: Objective, keep: Keep) -> list[Split]:
    """The splits of images that coefficients depend on. Of texts the manifest has the content already."""
    used = [*(term.split for _, term in objective.data_terms), *keep.splits]
    return [split for split in used if isinstance(split, Labelled | Unlabelled)]


def _doubts(history: list[Row]) -> list[str]:
    out = []
    losses = [row["loss"] for row in history if row["loss"] is not None]
    selective = any(key in row for row in history for key in ("trusted", "forgotten"))  # more may count later
    if not selective and len(losses) > 1 and losses[-1] > losses[0] + abs(losses[0]):
        out.append(
            f"warning: the loss rose from {losses[0]:.3g} to {losses[-1]:.3g}: try a lower learning rate"
        )
    if history and history[-1].get("forgotten"):
        often = history[-1]["forgotten"]
        times = "once" if often == 1 else f"{often} times"
        out.append(f"answers collapsed {times}, and what was learned was begun anew")
    return out


def _require_whole_batches(objective: Objective, schedule: Schedule) -> None:
    compared = [term.name for _, term in objective.data_terms if term.whole_batch]
    if compared and schedule.micro_batch is not None and schedule.micro_batch < schedule.batch_size:
        raise UsageError(
            "OBJECTIVE",
            f"'{printable(compared[0])}' compares the pictures of a batch, which cannot be cut into slices",
            fix="leave --micro-batch out, and lower --batch instead",
        )
    if compared and schedule.batch_size < 2:
        raise UsageError(
            "OBJECTIVE",
            f"'{printable(compared[0])}' compares pictures, of which a batch has one",
            fix="--batch 64",
        )


def _require_one_stream(objective: Objective) -> None:
    splits = [term.split for _, term in objective.data_terms]
    if len(splits) != 1 or not isinstance(splits[0], Unlabelled):
        raise UsageError(
            "OBJECTIVE",
            "an online run learns from one stream of pictures without labels",
            fix="one term on one unlabelled split",
        )


@final
class _Run:
    """A loop with a directory of its own: state after every epoch, and before being interrupted."""

    def __init__(
        self, directory: Path, loop: Loop, circumstances: dict[str, Any], images: list[Split]
    ) -> None:
        self._directory = directory
        self._images = images
        self._loop = loop
        self._states = TrainingCheckpoints(directory)
        # through JSON and back, as it is compared with what was read
        self._circumstances: dict[str, Any] = json.loads(json.dumps(circumstances))
        self._notes: list[str] = []

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """No other process works in this directory meanwhile."""
        size = sum(t.nbytes for t in self._loop.state().tensors.values())
        require_space(self._directory, 6 * size + (1 << 20))  # moments come; two states and a new one
        make_directory(self._directory)
        with locked(self._directory):
            yield

    def begin(self, *, resume: bool, allow_env_change: bool) -> list[str]:
        if not resume and self._states.files():
            raise UsageError(
                "OUT-EXISTS",
                f"'{printable(self._directory)}' holds a run already",
                fix="add --resume to go on with it, or name another directory",
            )
        state, notes = self._states.newest()
        lists = ImageLists(self._directory / IMAGES)
        if state is None:
            lists.keep(self._images)
        else:
            was = state.facts.get("circumstances", {})
            moved = require_same(was, self._circumstances, environment=allow_env_change)
            self._require_same_images(was.get("content", {}), lists)
            self._notes = [*state.facts.get("notes", []), *(f"gone on with elsewhere: {m}" for m in moved)]
            self._loop.restore(state)
            self._write_metrics()
        return [*notes, *self._notes]

    def _require_same_images(self, before: Mapping[str, str], lists: ImageLists) -> None:
        """Images that were replaced under the same name make it another run; the files are named."""
        now = self._circumstances["content"]
        other = [split for split in self._images if before.get(split.name) not in (None, now[split.name])]
        if other:
            raise InputError(
                "RUN-CHANGED",
                "images changed since the run was begun",
                changed=[name for split in other for name in lists.changes(before[split.name], split)],
                fix="restore these files, or start a new run in another directory",
            )

    def go(self, progress: ProgressCallback, row_done: Callable[[Row], None]) -> None:
        with Interrupt() as stop:
            try:
                for row in self._loop.run(progress, stop.check):
                    self._save()
                    row_done(row)
                    stop.check()
            except StoppedError as e:
                self._save()
                e.fix = "run the same command with --resume"
                raise
            except NumericalError as e:
                e.facts["kept"] = f"what was good before is in '{printable(self._directory)}'"
                failure = json.dumps(e.to_json(), indent=1, sort_keys=True)
                write_text(self._directory / "failure.json", failure + "\n", overwrite=True)
                raise

    def _save(self) -> None:
        state = self._loop.state()
        state.facts.update(circumstances=self._circumstances, notes=self._notes)
        self._states.save(state)
        self._write_metrics()

    def _write_metrics(self) -> None:
        """Written whole each time: no line is ever missing, cut or there twice."""
        lines = "".join(json.dumps(row, sort_keys=True) + "\n" for row in self._loop.history)
        write_text(self._directory / METRICS, lines, overwrite=True)
