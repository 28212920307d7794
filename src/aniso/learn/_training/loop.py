"""The loop: batches in, gradient steps on whatever is trained, a measurement after every epoch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from aniso.data import Batch, TextDataset, sampling
from aniso.errors import InputError, NumericalError, ResourceError, UsageError
from aniso.learn._training.epoch_sampler import EpochSampler
from aniso.learn._training.sharpness import Sharpness
from aniso.learn._training.trainable import Trainable
from aniso.learn._training.training_checkpoint import State
from aniso.learn._training.validation import Validation, worth
from aniso.learn.features import passed
from aniso.learn.heads import Classifier
from aniso.learn.keep import Keep, Measured
from aniso.learn.objectives import SAR, DataTerm, Objective, Seen, answered
from aniso.learn.schedule import Schedule
from aniso.learn.unwrap import head_for
from aniso.progress import ProgressCallback

Row = dict[str, Any]
"""What is known after an epoch: its number, losses, accuracies, and whether it is the one to keep."""

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@final
@dataclass(frozen=True)
class _Bound:
    """A data term with what it needs of the model."""

    weight: float
    term: DataTerm
    head: Classifier | None


@final
class Loop:
    """A run between two steps. Everything that changes is in ``state()``; the rest is how it was called."""

    def __init__(
        self,
        trained: Trainable,
        objective: Objective,
        schedule: Schedule,
        keep: Keep,
        *,
        seed: int = 0,
        workers: int = 0,
        online: bool = False,
    ) -> None:
        self._trained = trained
        self._objective = objective
        self._schedule = schedule
        self._keep = keep
        self._seed = seed
        self._workers = workers
        self._bound = [
            _Bound(w, t, head_for(trained.model, t.split, trained.head)) for w, t in objective.data_terms
        ]
        self._gauge = Validation(
            trained.model, keep, head=trained.head, at_once=schedule.micro_batch, workers=workers
        )
        views = [(b.term.split, b.term.views(trained.model)) for b in self._bound]
        reserved = [0.0 if online else b.term.trusted_share for b in self._bound]
        self._passes = EpochSampler(views, schedule, seed, reserved)
        self._device = next(iter(trained.tensors.values())).device
        self._optimiser = _optimiser(trained, schedule)
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=schedule.precision == "fp16")
        self.epoch = self.step = 0
        self.history: list[Row] = []
        self.kept = trained.copied()
        self._start = trained.copied()
        self._trusted: dict[int, Tensor] = {}  # of every term that trusts pictures, which
        self.forgotten = 0
        """How often what was learned had collapsed and was begun anew."""
        self._sharpness = _sharpness(trained, objective)
        self.answers = torch.full((len(self._bound[0].term.split),), -1) if online else None
        """Of an online run: what was said of each picture before anything was learned from it."""
        self._sums: dict[str, list[float]] = {}  # of every term its losses, and how many

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return self._passes.steps

    @property
    def done(self) -> bool:
        if not self.history:
            return False
        return self.epoch >= self._schedule.epochs or self._keep.ends(self._measured())

    def run(self, progress: ProgressCallback, between: Callable[[], None]) -> Iterator[Row]:
        """Train to the end, giving a row after every epoch. ``between`` is called between steps."""
        if not self.history:
            yield self._measure(progress, between)
        while not self.done:
            try:
                self._train(progress, between)
                row = self._measure(progress, between)
            except NumericalError:
                self._trained.load(self.kept)  # the last that was good
                raise
            self.epoch, self.step, self._sums = self.epoch + 1, 0, {}
            yield row
        self._trained.load(self.kept)

    # training

    def _train(self, progress: ProgressCallback, between: Callable[[], None]) -> None:
        """The epoch's steps that are left."""
        model = self._trained.model
        if self.step == 0:
            self._trust(progress, between)
        trusted = [self._places(i) for i in range(len(self._bound))]
        # a few coefficients need no dropout; without it slices of a batch give the very gradient of the batch
        model.train(self._trained.slots is None)
        try:
            for batches in self._passes.epoch(
                self.epoch, start=self.step, workers=self._workers, trusted=trusted
            ):
                between()
                self._take_step(batches)
                self.step += 1
                progress(f"epoch {self.epoch + 1} of {self._schedule.epochs}", self.step, self.steps)
        finally:
            model.eval()

    @torch.no_grad()
    def _trust(self, progress: ProgressCallback, between: Callable[[], None]) -> None:
        """Look at all pictures of terms that trust some, with what was learned so far."""
        for i, bound in enumerate(self._bound):
            if bound.term.trusted_share and self.answers is None:
                split, head, seen = bound.term.split, bound.head, []
                assert head is not None and not isinstance(split, TextDataset)  # such terms have classes
                for piece in passed(self._trained.model, split, batch=self._at_once, workers=self._workers):
                    between()
                    seen.append(head.logits(piece.float()))
                    progress(f"answers on {split.name}", sum(map(len, seen)), len(split))
                self._trusted[i] = bound.term.trust(torch.cat(seen)).cpu()

    def _places(self, which: int) -> list[int] | None:
        found = self._trusted.get(which)
        return None if found is None else (found >= 0).nonzero().flatten().tolist()

    def _take_step(self, batches: Sequence[Batch]) -> None:
        done = self.epoch * self.steps + self.step
        for group in self._optimiser.param_groups:
            group["lr"] = self._schedule.rate(done, self._schedule.epochs * self.steps, group["full_lr"])
        self._optimiser.zero_grad(set_to_none=True)
        at_once = min(sum(map(len, batches)), self._schedule.micro_batch or self._schedule.batch)
        with self._own_chance(), _memory_explained(at_once, self._bound[0].term.split.item_kind):
            losses = self._gradients(batches)
            if self._sharpness is not None:  # the gradient of the worst point nearby in the place of this one
                self._sharpness.climb()
                try:
                    self._optimiser.zero_grad(set_to_none=True)
                    self._gradients(batches)
                finally:
                    self._sharpness.back()
        self._require_finite(losses, batches)
        self._scaler.unscale_(self._optimiser)
        tensors = list(self._trained.tensors.values())
        norm = nn.utils.clip_grad_norm_(tensors, self._schedule.clip)
        selective = any(bound.term.selective for bound in self._bound)
        self._require_gradient(norm, first=done == 0 and not selective, batches=batches)
        self._scaler.step(self._optimiser)
        self._scaler.update()
        if self._sharpness is not None and self._sharpness.collapsed():
            self._forget()
        for name, (loss, count) in losses.items():
            total, seen = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = [total + loss * count, seen + count]

    def _gradients(self, batches: Sequence[Batch]) -> dict[str, tuple[float, int]]:
        """Add up the gradients of a step, slice by slice; gives every term's mean loss and size."""
        found: dict[str, tuple[float, int]] = {}
        for number, slices in enumerate(self._slices(batches)):
            total = torch.zeros((), device=self._device)
            terms = zip(self._bound, batches, slices, self._seen(slices), strict=True)
            for i, (bound, whole, piece, seen) in enumerate(terms):
                if not len(piece):
                    continue
                self._notice(i, bound.term, piece, seen)
                loss = bound.term.loss(seen) * (len(piece) / len(whole))
                total = total + bound.weight * loss
                name = bound.term.name
                found[name] = (found.get(name, (0.0, 0))[0] + loss.item(), len(whole))
            if number == 0:
                total = total + self._of_values(found)
            self._scaler.scale(total).backward()  # type: ignore[no-untyped-call]
        return found

    def _forget(self) -> None:
        """Begin anew: answers have become so sure that they can hardly be right."""
        self._trained.load(self._start)
        self._optimiser.state.clear()
        self.forgotten += 1

    def _of_values(self, found: dict[str, tuple[float, int]]) -> Tensor:
        total = torch.zeros((), device=self._device)
        for weight, term in self._objective.value_terms:
            slots = self._trained.slots
            assert slots is not None  # fit() has seen to it
            loss = term.loss(self._trained.tensors["values"], slots)
            found[term.name] = (loss.item(), 1)
            total = total + weight * loss
        return total

    def _slices(self, batches: Sequence[Batch]) -> list[list[Batch]]:
        """All terms' pictures in a row, cut into pieces; of some terms a piece may have none."""
        ends = list(itertools.accumulate(map(len, batches)))
        most = self._schedule.micro_batch or ends[-1]
        return [
            [_part(b, low - end + len(b), most) for b, end in zip(batches, ends, strict=True)]
            for low in range(0, ends[-1], most)
        ]

    def _seen(self, batches: Sequence[Batch]) -> list[Seen]:
        """All terms' pictures go through the model together."""
        looked_at = [
            v for b, batch in zip(self._bound, batches, strict=True) for v in batch.views[: b.term.looks]
        ]
        learned = [
            v for b, batch in zip(self._bound, batches, strict=True) for v in batch.views[b.term.looks :]
        ]
        with torch.no_grad():
            before = iter(self._forward(looked_at))
        through = iter(self._forward(learned))
        out = []
        for i, (bound, batch) in enumerate(zip(self._bound, batches, strict=True)):
            looks = bound.term.looks
            own = tuple(next(before if n < looks else through) for n in range(len(batch.views)))
            labels = None if batch.labels is None else batch.labels.to(self._device)
            logits = answered(bound.head, own)
            out.append(Seen(own, logits, labels, *self._marks(i, batch), progress=self._progress))
        return out

    def _forward(self, images: list[Tensor]) -> Sequence[Tensor]:
        """Features of stacks of pictures, which go through the model together."""
        if not images:
            return ()
        dtype = _HALF.get(self._schedule.precision)
        with torch.autocast(self._device.type, dtype or torch.bfloat16, enabled=dtype is not None):
            features = self._trained.model(torch.cat(images).to(self._device)).float()
        return torch.split(features, [len(view) for view in images])

    def _marks(self, which: int, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
        """Of a batch's pictures: what they are trusted to show, and whether they are reliable."""
        places = list(batch.indices)
        trusted = self._trusted[which][places] if which in self._trusted else None
        reliable = None if self._sharpness is None else self._sharpness.reliable(which, places)
        moved = [None if marks is None else marks.to(self._device) for marks in (trusted, reliable)]
        return moved[0], moved[1]

    @property
    def _at_once(self) -> int:
        """Pictures that are looked at together; what does not fit into a step does not fit here."""
        return min(256, self._schedule.micro_batch or 256)

    @property
    def _progress(self) -> float:
        return (self.epoch * self.steps + self.step) / max(1, self._schedule.epochs * self.steps)

    @torch.no_grad()
    def _notice(self, which: int, term: DataTerm, batch: Batch, seen: Seen) -> None:
        """What later passes and online answers need of this one."""
        places = list(batch.indices)
        if self.answers is not None and seen.reliable is None:
            self.answers[places] = seen.logits[0].argmax(-1).cpu()
        if self._sharpness is not None:
            self._sharpness.notice(which, term, places, seen)

    @contextlib.contextmanager
    def _own_chance(self) -> Iterator[None]:
        """What is random inside a model (dropout) depends on the step alone, so a run can go on anywhere."""
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(sampling.number("step", self._seed, self.epoch, self.step))
            yield

    # measuring

    def _measure(self, progress: ProgressCallback, between: Callable[[], None]) -> Row:
        def checked(what: str, done: int, total: int) -> None:
            between()
            progress(what, done, total)

        read = self._gauge.read(checked)
        row: Row = {"epoch": len(self.history), **self._losses(), **read, **self._self_training()}
        self.history.append(row)
        if self._keep.choose(self._measured()) == len(self.history) - 1:
            self.kept = self._trained.copied()
            for other in self.history:
                other["kept"] = other is row
        else:
            row["kept"] = False
        return row

    def _self_training(self) -> dict[str, int]:
        """Pictures that were trusted in the epoch, and how often the run began anew, where either can be."""
        out = {}
        if self._trusted:
            out["trusted"] = sum(int((marks >= 0).sum()) for marks in self._trusted.values())
        if self._sharpness is not None:
            out["forgotten"] = self.forgotten
        return out

    def _measured(self) -> list[Measured]:
        return [worth(row) for row in self.history]

    def _losses(self) -> dict[str, Any]:
        """Means over the epoch; the objective's is their weighted sum."""
        terms = {name: total / count for name, (total, count) in self._sums.items()}
        weighted = [weight * terms[term.name] for weight, term in self._objective.parts if terms]
        return {"loss": sum(weighted) if terms else None, "terms": terms}

    # going on

    def state(self) -> State:
        tensors = {f"trained.{name}": t.detach() for name, t in self._trained.tensors.items()}
        tensors |= {f"kept.{name}": t for name, t in self.kept.items()}
        for name, t in self._trained.tensors.items():
            moments = self._optimiser.state.get(t, {}).items()
            tensors |= {f"moment.{key}.{name}": v for key, v in moments if v is not None}
        tensors |= {f"trusted.{i}": marks for i, marks in self._trusted.items()}
        if self.answers is not None:
            tensors["answers"] = self.answers
        facts: dict[str, Any] = {
            "history": self.history,
            "sums": self._sums,
            "scaler": self._scaler.state_dict(),
        }
        if self._sharpness is not None:
            tensors |= {f"start.{name}": t for name, t in self._start.items()}
            facts["sharpness"] = [self._sharpness.average, self.forgotten]
        return State(self.epoch, self.step, {n: t.cpu() for n, t in tensors.items()}, facts)

    def restore(self, state: State) -> None:
        self.epoch, self.step = state.epoch, state.step
        self.history, self._sums = state.facts["history"], state.facts["sums"]
        self._scaler.load_state_dict(state.facts["scaler"])
        try:
            self._trained.load({n: state.tensors[f"trained.{n}"] for n in self._trained.tensors})
            self.kept = {n: state.tensors[f"kept.{n}"].to(self._device) for n in self._trained.tensors}
        except (KeyError, RuntimeError) as e:
            raise InputError("RUN-STATE", f"the state is of another run: {e}", fix="start anew") from None
        for name, t in self._trained.tensors.items():
            found = {key: state.tensors.get(f"moment.{key}.{name}") for key in _MOMENTS}
            moved = {
                key: v if key == "step" else v.to(self._device) for key, v in found.items() if v is not None
            }
            if moved:
                self._optimiser.state[t] = moved
        known = {i: state.tensors.get(f"trusted.{i}") for i in range(len(self._bound))}
        self._trusted = {i: marks for i, marks in known.items() if marks is not None}
        self.answers = state.tensors.get("answers", self.answers)
        if self._sharpness is not None:
            self._sharpness.average, self.forgotten = state.facts["sharpness"]
            self._start = {n: state.tensors[f"start.{n}"].to(self._device) for n in self._trained.tensors}

    # what must not go unnoticed

    def _require_finite(self, losses: dict[str, tuple[float, int]], batches: Sequence[Batch]) -> None:
        bad = [name for name, (loss, _) in losses.items() if not abs(loss) < float("inf")]
        if bad:
            raise NumericalError(
                "LEARN-NONFINITE",
                f"the loss on {bad[0]} is {losses[bad[0]][0]} in epoch {self.epoch + 1}, "
                f"step {self.step + 1}",
                **self._named(bad[0], batches),
                fix="lower the learning rate (--lr), or look at these",
            )

    def _named(self, name: str, batches: Sequence[Batch]) -> dict[str, Any]:
        """What a term saw in a step."""
        for bound, batch in zip(self._bound, batches, strict=True):
            if bound.term.name == name:
                split = bound.term.split
                return {split.item_kind: [split.describe(i) for i in batch.indices[:20]]}
        return {}

    def _skips(self) -> bool:
        """Whether a step may be left out: a scaler does that until its scale fits, but not for ever."""
        return self._scaler.is_enabled() and self._scaler.get_scale() >= 1

    def _require_gradient(self, norm: Tensor, *, first: bool, batches: Sequence[Batch]) -> None:
        if not bool(torch.isfinite(norm)) and not self._skips():
            name = self._bound[0].term.name if self._bound else ""
            raise NumericalError(
                "LEARN-NONFINITE",
                f"the gradient is {norm.item()} in epoch {self.epoch + 1}, step {self.step + 1}",
                **self._named(name, batches),
                fix="lower the learning rate (--lr), or look at these",
            )
        if first and float(norm) == 0.0:
            raise NumericalError(
                "LEARN-GRADIENT",
                "no gradient reaches what is trained",
                likely="a single class, blocks that do not reach the output, or vectors that are zero there",
                fix="aniso bank ls shows vectors' norms; --partition says which blocks have coefficients",
            )


def _groups(trained: Trainable, schedule: Schedule) -> list[dict[str, Any]]:
    """Tensors that share a learning rate; those with a rate of their own are not pulled to zero."""
    usual = [tensor for name, tensor in trained.tensors.items() if name not in trained.rates]
    groups: list[dict[str, Any]] = [
        {"params": usual, "full_lr": schedule.lr, "weight_decay": schedule.weight_decay}
    ]
    for name, rate in trained.rates.items():
        groups.append({"params": [trained.tensors[name]], "full_lr": rate, "weight_decay": 0.0})
    return groups


def _optimiser(trained: Trainable, schedule: Schedule) -> torch.optim.Optimizer:
    groups = _groups(trained, schedule)
    if schedule.optimiser == "sgd":
        return torch.optim.SGD(groups, lr=schedule.lr, momentum=0.9)
    return torch.optim.AdamW(groups, lr=schedule.lr)


def _sharpness(trained: Trainable, objective: Objective) -> Sharpness | None:
    """From the terms that ask for it, which have to agree."""
    terms = [term for _, term in objective.data_terms if isinstance(term, SAR)]
    found = {(term.radius, term.floor) for term in terms}
    if not terms:
        return None
    if len(found) > 1:
        raise UsageError(
            "OBJECTIVE", "terms differ in radius or floor", found=sorted(found), fix="give them the same"
        )
    lowest = min(term.collapse for term in terms)  # of tasks with different numbers of classes
    return Sharpness(list(trained.tensors.values()), terms[0].radius, lowest)


_MOMENTS = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")


def _part(batch: Batch, start: int, count: int) -> Batch:
    """So many pictures from a place on, which may lie before the first one."""
    low, high = max(0, start), max(0, start + count)
    if low == 0 and high >= len(batch):
        return batch
    labels = None if batch.labels is None else batch.labels[low:high]
    return Batch(tuple(view[low:high] for view in batch.views), labels, batch.indices[low:high])


@contextlib.contextmanager
def _memory_explained(size: int, things: str) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as e:
        known = ("out of memory", "allocate memory")  # not "illegal memory access"
        if not isinstance(e, MemoryError) and not any(words in str(e) for words in known):
            raise
        raise ResourceError(
            "OUT-MEMORY",
            f"a step with {size} {things} at once does not fit into memory",
            reason=str(e)[:200],
            fix=f"--micro-batch {max(1, size // 2)} gives the same result in slices",
        ) from None
