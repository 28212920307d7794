"""Learning coefficients from losses alone: no gradient, so no more memory than a forward pass takes.

An evolution strategy of nevergrad's proposes coefficients and is told their loss. Good for a few
coefficients, of whole vectors say; for thousands it needs more tries than most can wait for.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, final

import numpy
import torch
from torch import Tensor

from aniso.compose import Composition
from aniso.data import Batches
from aniso.errors import NumericalError, UsageError
from aniso.learn._training.loop import Row
from aniso.learn._training.validation import Validation, worth
from aniso.learn.fit import Fit
from aniso.learn.keep import Keep, Last
from aniso.learn.objectives import Objective, Seen, Term, answered
from aniso.learn.unwrap import head_for
from aniso.progress import ProgressCallback

LOOKS = 10
"""How often on the way it is measured what the best so far is worth."""
_AT_ONCE = 64
_CORRELATED = 500  # coefficients of which each is seen together with each other; of more, each alone
_STEP = 0.1  # of the first tries; coefficients that help are of this size, the bounds are far beyond


def evolve(
    composition: Composition,
    objective: Objective | Term,
    *,
    evaluations: int = 500,
    bound: float = 1.5,
    parallel: int = 1,
    keep: Keep | None = None,
    seed: int = 0,
    workers: int = 0,
    progress: ProgressCallback | None = None,
    look_done: Callable[[Row], None] | None = None,
) -> Fit:
    """Minimise an objective over coefficients from ``-bound`` to ``bound`` with so many evaluations.

    Each is a pass over all pictures, with the same views every time. ``parallel`` are proposed at once, and
    evaluated side by side. ``keep`` chooses among the looks that are taken on the way, the base
    included; what ``fit`` gives for epochs is given for looks.
    """
    nevergrad = _nevergrad()
    whole = objective if isinstance(objective, Objective) else objective * 1.0
    _require_sense(whole, evaluations, bound, parallel)
    keep = keep or Last()
    looks = _Looks(composition, keep, workers)
    looks.take(0, None)
    _tell(look_done, looks.history[-1])
    optimiser = _optimiser(nevergrad, composition.values.numel(), bound, evaluations, parallel, seed)
    best: tuple[float, Tensor] | None = None
    done = 0
    with _evaluated(composition, whole, seed, parallel) as losses:
        while done < evaluations and not looks.ended:
            with _quiet():
                asked = [optimiser.ask() for _ in range(min(parallel, evaluations - done))]
            tried = [torch.from_numpy(numpy.array(each.value)).to(composition.values.dtype) for each in asked]
            before = done
            for each, values, loss in zip(asked, tried, losses(tried), strict=True):
                with _quiet():
                    optimiser.tell(each, loss)
                done += 1
                if best is None or loss < best[0]:
                    best = (loss, values)
            if progress:
                progress("evaluations", done, evaluations)
            if done * LOOKS // evaluations > before * LOOKS // evaluations and best is not None:
                _put(composition, best[1])
                looks.take(done, best[0])
                _tell(look_done, looks.history[-1])
    kept = looks.settle()
    return Fit(tuple(looks.history), kept, composition.coefficients)


def _optimiser(nevergrad: Any, count: int, bound: float, evaluations: int, parallel: int, seed: int) -> Any:
    """CMA by name: NGOpt may choose what fails with numpy 2.4, knows no seed, or leaves a thread waiting."""
    zero = numpy.zeros(count)
    space = nevergrad.p.Array(init=zero)
    space.random_state = numpy.random.RandomState(seed % 2**32)
    with _quiet():
        space = space.set_bounds(-bound, bound).set_mutation(sigma=min(_STEP, bound / 3))
        kind = nevergrad.optimizers.CMA if count <= _CORRELATED else nevergrad.optimizers.DiagonalCMA
        made = kind(parametrization=space, budget=evaluations, num_workers=parallel)
        made.suggest(zero)  # the base is tried first
    return made


@final
class _Looks:
    """What the best so far was worth at times, and the values it had."""

    def __init__(self, composition: Composition, keep: Keep, workers: int) -> None:
        self._composition = composition
        self._keep = keep
        self._gauge = Validation(composition, keep, workers=workers)
        self._values: list[Tensor] = []
        self._read: tuple[str, ...] = ()
        self.history: list[Row] = []

    @property
    def ended(self) -> bool:
        return self._keep.ends([worth(row) for row in self.history])

    def take(self, evaluations: int, loss: float | None) -> None:
        values = self._composition.values.detach().clone()
        if self._values and torch.equal(values, self._values[-1]):
            read = {key: self.history[-1][key] for key in self._read}
        else:
            read = self._gauge.read()
            self._read = tuple(read)
        self._values.append(values)
        self.history.append(
            {
                "epoch": len(self.history),
                "evaluations": evaluations,
                "loss": loss,
                "terms": {},
                **read,
                "kept": False,
            }
        )
        kept = self._kept
        for i, row in enumerate(self.history):
            row["kept"] = i == kept

    @property
    def _kept(self) -> int:
        return self._keep.choose([worth(row) for row in self.history])

    def settle(self) -> int:
        _put(self._composition, self._values[self._kept])
        return self._kept


@contextmanager
def _quiet() -> Iterator[None]:
    """Optimisers warn of budgets and bounds that are too small for them, and draw from numpy's generator."""
    before = numpy.random.get_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            numpy.random.set_state(before)


@torch.no_grad()
def _put(composition: Composition, values: Tensor) -> None:
    composition.values.copy_(values)


@torch.no_grad()
def objective_loss(composition: Composition, objective: Objective, seed: int = 0) -> float:
    """Of the composition as it is, over all pictures."""
    device = composition.values.device
    total = 0.0
    for weight, term in objective.data_terms:
        head = head_for(composition, term.split)
        views = term.views(composition)
        size = min(_AT_ONCE, term.split.default_batch_size)
        for pictures in Batches(term.split, *views, size=size, seed=seed):
            own = tuple(composition(view.to(device)).float() for view in pictures.views)
            labels = None if pictures.labels is None else pictures.labels.to(device)
            loss = float(term.loss(Seen(own, answered(head, own), labels)))
            total += weight * loss * len(pictures) / len(term.split)
    for weight, value_term in objective.value_terms:
        total += weight * float(value_term.loss(composition.values, composition.index))
    if not abs(total) < float("inf"):
        raise NumericalError(
            "LEARN-NONFINITE", f"the loss of a try is {total}", fix="a smaller bound, or look at the pictures"
        )
    return total


Losses = Callable[[Sequence[Tensor]], list[float]]


@contextmanager
def _evaluated(composition: Composition, objective: Objective, seed: int, parallel: int) -> Iterator[Losses]:
    """A function that gives the losses of several tries."""
    composition.eval()
    if parallel == 1:
        yield lambda tries: [_loss_at(composition, objective, seed, values) for values in tries]
        return
    # threads, not processes: torch does not hold Python's lock while it computes, and nothing has to be sent
    before = torch.get_num_threads()
    composition.prepare()  # copies share the vectors that are in memory by now
    idle: SimpleQueue[Composition] = SimpleQueue()
    for _ in range(parallel):
        idle.put(copy.deepcopy(composition))

    def loss(values: Tensor) -> float:
        own = idle.get()
        try:
            return _loss_at(own, objective, seed, values)
        finally:
            idle.put(own)

    try:
        with ThreadPoolExecutor(
            parallel, "aniso-try", torch.set_num_threads, (max(1, before // parallel),)
        ) as pool:
            yield lambda tries: list(pool.map(loss, tries))
    finally:
        torch.set_num_threads(before)


def _loss_at(composition: Composition, objective: Objective, seed: int, values: Tensor) -> float:
    _put(composition, values)
    return objective_loss(composition, objective, seed)


def _require_sense(objective: Objective, evaluations: int, bound: float, parallel: int) -> None:
    fine = evaluations >= 1 and parallel >= 1 and 0 < bound < float("inf")
    trusting = [term.name for _, term in objective.data_terms if term.trusted_share]
    if not fine or not objective.data_terms or trusting:
        raise UsageError(
            "OBJECTIVE",
            "there is nothing to try"
            if fine
            else f"{evaluations} evaluations, {parallel} at once, to {bound}?",
            found=", ".join(trusting),
            expected="an objective with a fixed loss, evaluations and tries from 1 on, a bound above 0",
            fix="CrossEntropy(split), evaluations=500",
        )


def _nevergrad() -> Any:
    try:
        import nevergrad
    except ImportError:
        raise UsageError(
            "MODEL-LIBRARY", "learning without gradients is nevergrad's", fix="pip install 'aniso[evolve]'"
        ) from None
    return nevergrad


def _tell(listener: Callable[[Row], None] | None, row: Row) -> None:
    if listener:
        listener(row)
