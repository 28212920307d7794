"""The training loop: batches in, gradient steps on what is trained, validation after every epoch."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from aniso.compose import Composition, Sharding
from aniso.data import Batch, sampling
from aniso.errors import InputError, NumericalError
from aniso.learn._training.collapse import CollapseDetector
from aniso.learn._training.companions import Companions
from aniso.learn._training.epoch_sampler import EpochSampler
from aniso.learn._training.forward import Forward, bind, slices
from aniso.learn._training.guards import (
    explain_out_of_memory,
    require_finite_gradient,
    require_finite_losses,
    require_gradient,
    still_collapsed,
)
from aniso.learn._training.online import OnlinePredictions
from aniso.learn._training.optimiser import (
    add_offsets_to_gradients,
    decay_offsets,
    make_optimiser,
    moments,
    restart_optimiser,
    restore_moments,
    set_learning_rates,
)
from aniso.learn._training.trainable import Trainable
from aniso.learn._training.training_checkpoint import State
from aniso.learn._training.validation import Validation, scores
from aniso.learn.keep import Keep, Measured
from aniso.learn.objectives import Losses, Objective, RunContext
from aniso.progress import ProgressCallback
from aniso.records import EpochRow
from aniso.schedule import Schedule

RESTART_FACTOR = 1 / 3
"""The learning rate after a collapse, as a share of the one before."""


@final
class Loop:
    """A run between two steps. ``state()`` holds everything that changes; the rest is how it was called."""

    def __init__(
        self,
        trainable: Trainable,
        objective: Objective,
        schedule: Schedule,
        keep: Keep,
        *,
        seed: int = 0,
        workers: int = 0,
        online: bool = False,
    ) -> None:
        self._trainable = trainable
        self._objective = objective
        self._schedule = schedule
        self._keep = keep
        self._seed = seed
        self._workers = workers
        self._bound = bind(objective, trainable)
        self._terms = terms = [bound.term for bound in self._bound]
        self._optimiser = make_optimiser(trainable, schedule)
        self._scaler = torch.amp.GradScaler(trainable.device.type, enabled=schedule.precision == "fp16")
        run = RunContext(
            trainable.model,
            trainable.tensors,
            self._optimiser,
            [bound.head for bound in self._bound],
            batch_size=min(256, schedule.micro_batch or 256),
            workers=workers,
            online=online,
        )
        self._online = OnlinePredictions(len(terms[0].split)) if online else None
        self._collapse = self._collapse_detector(online)
        others = [companion for companion in (self._online, self._collapse) if companion is not None]
        self._companions = Companions.of(terms, run, *others)
        self._first_state = self._companions.state()
        self._forward = Forward(trainable, self._bound, self._companions, schedule.precision)
        self._sampler = EpochSampler(
            [(term.split, term.views(trainable.model)) for term in terms],
            schedule,
            seed,
            [0.0 if online else term.reserved_share for term in terms],
            objective.target,
        )
        self._validation = Validation(
            trainable.model, keep, head=trainable.head, batch_size=schedule.micro_batch, workers=workers
        )
        self.epoch = self.step = 0
        self.history: list[EpochRow] = []
        self.kept = trainable.copied()
        self._start = self.kept if self._collapse is not None else {}
        self.restarts: list[str] = []
        """Why the run was started again with a lower learning rate, each time."""
        self._sums: dict[str, list[float]] = {}  # by term: sum of losses, number of items

    @property
    def sharding(self) -> Sharding | None:
        """How several processes share the run, if there are several."""
        model = self._trainable.model
        return model.sharding if isinstance(model, Composition) else None

    def _within(self, check: Callable[[], None]) -> Callable[[], None]:
        """Return the check for pieces of work between two steps.

        Processes that share a run agree on signals between steps only: of other work one may have more pieces
        than another, which finds some of it cached.
        """
        return check if self.sharding is None else lambda: None

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return self._sampler.steps

    @property
    def predictions(self) -> Tensor | None:
        """Online runs: the class predicted for every image before it was learned from."""
        return None if self._online is None else self._online.predictions

    @property
    def lr(self) -> float:
        """The highest learning rate, after restarts."""
        return self._schedule.lr * RESTART_FACTOR ** len(self.restarts)

    def done(self) -> bool:
        """Return True if the run has ended: all epochs are done, or its keep rule says so."""
        if not self.history:
            return False
        return self.epoch >= self._sampler.epochs or self._keep.ends(self._scores())

    @property
    def taken(self) -> int:
        """Steps of the whole run that were taken."""
        return self.epoch * self.steps + self.step

    def run(self, progress: ProgressCallback, check: Callable[[], None]) -> Iterator[EpochRow]:
        """Train to the end, giving a row after every validation. ``check`` is called between steps."""
        if not self.history:
            yield self._validate(progress, check, epoch=0)
        while self._restart_if_collapsed() or not self.done():
            try:
                while not self._train(progress, check):
                    yield self._validate(progress, check, epoch=self.epoch)
                    if self.done():
                        break
                else:
                    row = self._validate(progress, check, epoch=self.epoch + 1)
                    self.epoch, self.step = self.epoch + 1, 0
                    yield row
            except NumericalError:
                self._trainable.load(self.kept)  # the last good values
                raise
        self._trainable.load(self.kept)

    def _collapse_detector(self, online: bool) -> CollapseDetector | None:
        """Coefficients can start again; weights would need a copy of the model, online items come once."""
        if self._schedule.restarts == 0 or self._trainable.slots is None or online:
            return None
        return CollapseDetector({i: bound.term for i, bound in enumerate(self._bound) if bound.weight > 0})

    def _restart_if_collapsed(self) -> bool:
        """Start again from the first values with a lower learning rate if predictions have collapsed."""
        reason = None if self._collapse is None or self.step else self._collapse.reason()
        if reason is None:
            return False
        if len(self.restarts) >= self._schedule.restarts:
            self._trainable.load(self._start)
            raise still_collapsed(reason, self.lr, len(self.restarts))
        text = f"predictions collapsed in epoch {self.epoch} at a learning rate of {self.lr:.2g} ({reason})"
        self.restarts.append(text)
        self.restarts[-1] += f": started again with {self.lr:.2g}"
        self._trainable.load(self._start)
        self.kept = {name: tensor.clone() for name, tensor in self._start.items()}
        restart_optimiser(self._optimiser, RESTART_FACTOR)
        self._companions.restore(*self._first_state)
        self.history = [self.history[0].model_copy(update={"kept": True})]
        self.epoch, self.step, self._sums = 0, 0, {}
        return True

    # training

    def _train(self, progress: ProgressCallback, check: Callable[[], None]) -> bool:
        """Take the steps of the epoch that are left, or those to the next validation; True at its end."""
        model, left = self._trainable.model, self._sampler.total_steps - self.taken
        if self._validation_due():  # the run was interrupted in a validation
            return False
        if self.step == 0:
            self._companions.before_epoch(progress, self._within(check))
        reserved = [self._companions.reserved_items(i) for i in range(len(self._terms))]
        # a few coefficients need no dropout; without it slices of a batch give the very gradient of the batch
        model.train(self._trainable.slots is None)
        steps = self._sampler.epoch(
            self.epoch, start=self.step, workers=self._workers, reserved_items=reserved
        )
        try:
            for batches in itertools.islice(steps, left):
                check()
                self._take_step(batches)
                self.step += 1
                progress(f"epoch {self.epoch + 1} of {self._sampler.epochs}", self.step, self.steps)
                if self._validation_due():
                    return False
        finally:
            steps.close()  # ends the workers; the traceback of an interrupted run would keep them alive
            model.eval()
        return True

    def _validation_due(self) -> bool:
        """True if the model is to be validated before the next step, within an epoch."""
        every = self._schedule.validate_every
        ends = self.step in (0, self.steps) or self.taken >= self._sampler.total_steps
        return every is not None and not ends and self.taken % every == 0 and self._last_step != self.taken

    @property
    def _last_step(self) -> int | None:
        """The step of the last validation."""
        return self.history[-1].step if self.history else None

    def _take_step(self, batches: Sequence[Batch]) -> None:
        done, schedule = self.taken, self._schedule
        set_learning_rates(self._optimiser, schedule, done, self._sampler.total_steps)
        self._optimiser.zero_grad(set_to_none=True)
        size = min(sum(map(len, batches)), schedule.micro_batch or schedule.batch_size)
        with self._step_randomness(), explain_out_of_memory(size, self._terms[0].split.item_kind):
            losses = self._companions.around_step(lambda: self._gradients(batches))
        where = f"epoch {self.epoch + 1}, step {self.step + 1}"
        require_finite_losses(losses, where, self._terms, batches)
        self._scaler.unscale_(self._optimiser)
        norm = nn.utils.clip_grad_norm_(list(self._trainable.tensors.values()), schedule.max_grad_norm).item()
        # with fp16 a step may be skipped until the scale fits, but not for ever
        if not (self._scaler.is_enabled() and self._scaler.get_scale() >= 1):
            require_finite_gradient(norm, where, self._terms, batches)
        if done == 0 and not any(term.selective for term in self._terms):
            require_gradient(norm)
        add_offsets_to_gradients(self._trainable, schedule)
        self._scaler.step(self._optimiser)
        self._scaler.update()
        if math.isfinite(norm):  # else the step was skipped
            decay_offsets(self._trainable, schedule, self._optimiser)
        self._companions.after_step()
        for name, (loss, count) in losses.items():
            total, items = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = [total + loss * count, items + count]

    def _gradients(self, batches: Sequence[Batch]) -> Losses:
        """Accumulate the gradients of a step, slice by slice; returns every term's mean loss and size.

        Losses are read once, when all is done: reading one would wait for the device.
        """
        losses: dict[str, list[Tensor]] = {}
        progress = self.taken / max(1, self._sampler.total_steps)
        cut = slices(batches, self._schedule.micro_batch)
        counts = self._counted(cut, progress)
        sizes: dict[str, int] = {}
        for number, pieces in enumerate(cut):
            total = torch.zeros((), device=self._trainable.device)
            terms = zip(self._bound, batches, pieces, self._forward(pieces, progress), strict=True)
            for i, (bound, batch, piece, inputs) in enumerate(terms):
                if not len(piece):
                    continue
                self._companions.observe(i, piece.indices, inputs)
                share = len(piece) / len(batch)
                if i in counts:
                    share = bound.term.counted(inputs) / max(1, counts[i])
                loss = bound.term.loss(inputs) * share
                total = total + bound.weight * loss
                name = bound.term.name
                losses.setdefault(name, []).append(loss.detach())
                sizes[name] = len(batch)
            if number == 0:
                total = total + self._value_loss(losses)
            self._scaler.scale(total).backward()  # type: ignore[no-untyped-call]
        return {name: (loss, sizes.get(name, 1)) for name, loss in _summed(losses).items()}

    @torch.no_grad()
    def _counted(self, cut: Sequence[Sequence[Batch]], progress: float) -> dict[int, int]:
        """Count the items of a whole batch that count, by term; needed for batches in slices only.

        It takes a forward pass more: how many count is not known before the last slice.
        """
        counting = [i for i, bound in enumerate(self._bound) if bound.term.averages_counted]
        if not counting or len(cut) == 1:
            return {}
        counts = dict.fromkeys(counting, 0)
        for pieces in cut:
            inputs = self._forward(pieces, progress)
            for i in counting:
                counts[i] += self._bound[i].term.counted(inputs[i]) if len(pieces[i]) else 0
        return counts

    def _value_loss(self, losses: dict[str, list[Tensor]]) -> Tensor:
        """Return the weighted sum of terms on the coefficients themselves; adds them to ``losses``."""
        total = torch.zeros((), device=self._trainable.device)
        for weight, term in self._objective.value_terms:
            index = self._trainable.slots
            assert index is not None  # fit() has checked it
            loss = term.loss(self._trainable.tensors["values"], index)
            losses[term.name] = [loss.detach()]
            total = total + weight * loss
        return total

    @contextlib.contextmanager
    def _step_randomness(self) -> Iterator[None]:
        """Seed torch by the step alone, so that dropout is the same in a resumed run."""
        device = self._trainable.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(sampling.number("step", self._seed, self.epoch, self.step))
            yield

    # validation

    def _validate(self, progress: ProgressCallback, check: Callable[[], None], *, epoch: int) -> EpochRow:
        def checked(what: str, done: int, total: int) -> None:
            self._within(check)()
            progress(what, done, total)

        measured = self._validation.measure(checked)
        terms = {name: total / count for name, (total, count) in self._sums.items()}
        weighted = [weight * terms[term.name] for weight, term in self._objective.parts if terms]
        losses = {"loss": sum(weighted) if terms else None, "terms": terms}
        within = self._schedule.validate_every is not None or self._schedule.steps is not None
        place = {"epoch": epoch, "step": self.taken} if within else {"epoch": epoch}
        row = EpochRow.model_validate(
            {**place, **losses, **measured, **self._companions.metrics(), "kept": False}
        )
        self.history.append(row)
        self._sums = {}
        if self._keep.choose(self._scores()) == len(self.history) - 1:
            self.kept = self._trainable.copied()
            self.history = [other.model_copy(update={"kept": other is row}) for other in self.history]
        return self.history[-1]

    def _scores(self) -> list[Measured]:
        return [scores(row) for row in self.history]

    # resuming

    def state(self) -> State:
        """Everything that a resumed run needs, on the CPU."""
        tensors = {f"trained.{name}": t.detach() for name, t in self._trainable.tensors.items()}
        tensors |= {f"kept.{name}": t for name, t in self.kept.items()}
        tensors |= moments(self._optimiser, self._trainable.tensors)
        own, companions = self._companions.state()
        facts = {
            "history": [row.content() for row in self.history],
            "sums": self._sums,
            "scaler": self._scaler.state_dict(),
            "companions": companions,
            "restarts": self.restarts,
        }
        return State(self.epoch, self.step, {n: t.cpu() for n, t in (tensors | own).items()}, facts)

    def restore(self, state: State) -> None:
        """Continue from a state that ``state()`` returned."""
        self.epoch, self.step = state.epoch, state.step
        self.history = [EpochRow.model_validate(row) for row in state.facts["history"]]
        self._sums = state.facts["sums"]
        self.restarts = state.facts["restarts"]
        self._scaler.load_state_dict(state.facts["scaler"])
        try:
            self._trainable.load({n: state.tensors[f"trained.{n}"] for n in self._trainable.tensors})
            device = self._trainable.device
            self.kept = {n: state.tensors[f"kept.{n}"].to(device) for n in self._trainable.tensors}
            self._companions.restore(state.tensors, state.facts["companions"])
        except (KeyError, RuntimeError) as e:
            raise InputError(
                "RUN-STATE",
                f"the checkpoint is of another run: {e}",
                fix="start a new run in another directory",
            ) from None
        restart_optimiser(self._optimiser, RESTART_FACTOR ** len(self.restarts))
        restore_moments(self._optimiser, self._trainable.tensors, state.tensors)


def _summed(losses: Mapping[str, Sequence[Tensor]]) -> dict[str, float]:
    """Return the sum of each list of numbers; all are read from the device at once."""
    flat = [loss for own in losses.values() for loss in own]
    numbers = iter(torch.stack(flat).tolist() if flat else ())
    return {name: sum(itertools.islice(numbers, len(own)), 0.0) for name, own in losses.items()}
