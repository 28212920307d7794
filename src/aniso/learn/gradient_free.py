"""Gradient-free optimisation of coefficients: it needs no more memory than a forward pass.

An evolution strategy of nevergrad proposes coefficients and is given their loss. It suits few coefficients,
such as one per vector; thousands need more evaluations than is practical.
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

from aniso.compose import Coefficients, Composition
from aniso.data import Batches
from aniso.errors import NumericalError, UsageError
from aniso.learn._training.starting import begin_at, start_coefficients
from aniso.learn._training.validation import Validation, scores
from aniso.learn.fit import Fit
from aniso.learn.keep import Keep, Last
from aniso.learn.objectives import Objective, Term, TermInputs, logits_of
from aniso.learn.starts import Start
from aniso.progress import ProgressCallback
from aniso.records import EpochRow

LOOKS = 10
"""How often the best coefficients so far are validated during a run."""
_AT_ONCE = 64
_CORRELATED = 500  # coefficients: up to here with a full covariance matrix, beyond with its diagonal
_STEP = 0.1  # first step size: coefficients that help are of this size, the bounds far beyond


def evolve(
    composition: Composition,
    objective: Objective | Term,
    *,
    evaluations: int = 500,
    bound: float = 1.5,
    parallel: int = 1,
    keep: Keep | None = None,
    start: Start | Coefficients | float | None = None,
    seed: int = 0,
    workers: int = 0,
    progress: ProgressCallback | None = None,
    look_done: Callable[[EpochRow], None] | None = None,
) -> Fit:
    """Minimise an objective over coefficients, at most ``bound`` from their start, without gradients.

    Each of the ``evaluations`` is a pass over all data, with the same views every time; ``parallel`` of them
    run at once, each in a thread. The best coefficients so far are validated ten times during the run, and
    ``keep`` chooses among these looks, the start included. The history has a row for every look. ``start`` is
    that of ``fit``.
    """
    nevergrad = _nevergrad()
    whole = objective if isinstance(objective, Objective) else objective * 1.0
    _require_options(whole, evaluations, bound, parallel)
    keep = keep or Last()
    if start is not None:
        keep = begin_at(composition, start_coefficients(composition, start), keep, workers=workers)
    first = composition.values.detach().cpu().clone()
    looks = _Looks(composition, keep, workers)
    looks.take(0, None)
    row_done = look_done or (lambda row: None)
    row_done(looks.history[-1])
    optimiser = _optimiser(nevergrad, composition.values.numel(), bound, evaluations, parallel, seed)
    best: tuple[float, Tensor] | None = None
    done = 0
    with _evaluated(composition, whole, seed, parallel) as losses:
        while done < evaluations and not looks.ended:
            with _quiet():
                asked = [optimiser.ask() for _ in range(min(parallel, evaluations - done))]
            tried = [first + torch.from_numpy(numpy.array(each.value)).to(first.dtype) for each in asked]
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
                row_done(looks.history[-1])
    kept = looks.settle()
    return Fit(tuple(looks.history), kept, composition.coefficients)


def _optimiser(nevergrad: Any, count: int, bound: float, evaluations: int, parallel: int, seed: int) -> Any:
    """CMA by name: NGOpt may choose one that fails with numpy 2.4, ignores the seed, or leaves a thread."""
    zero = numpy.zeros(count)
    space = nevergrad.p.Array(init=zero)
    space.random_state = numpy.random.RandomState(seed % 2**32)
    with _quiet():
        space = space.set_bounds(-bound, bound).set_mutation(sigma=min(_STEP, bound / 3))
        kind = nevergrad.optimizers.CMA if count <= _CORRELATED else nevergrad.optimizers.DiagonalCMA
        made = kind(parametrization=space, budget=evaluations, num_workers=parallel)
        made.suggest(zero)  # the start is evaluated first
    return made


@final
class _Looks:
    """Validates the best coefficients so far, and remembers their values."""

    def __init__(self, composition: Composition, keep: Keep, workers: int) -> None:
        self._composition = composition
        self._keep = keep
        self._validation = Validation(composition, keep, workers=workers)
        self._values: list[Tensor] = []
        self._measured: dict[str, dict[str, float]] = {}
        self.history: list[EpochRow] = []

    @property
    def ended(self) -> bool:
        return self._keep.ends([scores(row) for row in self.history])

    def take(self, evaluations: int, loss: float | None) -> None:
        values = self._composition.values.detach().clone()
        if not self._values or not torch.equal(values, self._values[-1]):
            self._measured = self._validation.measure()
        self._values.append(values)
        row = EpochRow.model_validate(
            {
                "epoch": len(self.history),
                "evaluations": evaluations,
                "loss": loss,
                "terms": {},
                **self._measured,
                "kept": False,
            }
        )
        self.history.append(row)
        kept = self._kept
        self.history = [row.model_copy(update={"kept": i == kept}) for i, row in enumerate(self.history)]

    @property
    def _kept(self) -> int:
        return self._keep.choose([scores(row) for row in self.history])

    def settle(self) -> int:
        _put(self._composition, self._values[self._kept])
        return self._kept


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence nevergrad's warnings about small budgets, and restore numpy's global generator."""
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
    """Return the loss of a composition as it is, over all data."""
    device = composition.values.device
    total = 0.0
    for weight, term in objective.data_terms:
        head = term.classifier(composition)
        views = term.views(composition)
        size = min(_AT_ONCE, term.split.default_batch_size)
        for batch in Batches(term.split, *views, size=size, seed=seed):
            own = tuple(composition(view.to(device)).float() for view in batch.views)
            labels = None if batch.labels is None else batch.labels.to(device)
            targets = term.item_targets(composition, batch.indices)
            marks = {name: values.to(device) for name, values in targets.items()}
            loss = float(term.loss(TermInputs(own, logits_of(head, own), labels, marks)))
            total += weight * loss * len(batch) / len(term.split)
    for weight, value_term in objective.value_terms:
        total += weight * float(value_term.loss(composition.values, composition.index))
    if not abs(total) < float("inf"):
        raise NumericalError(
            "LEARN-NONFINITE",
            f"the loss of an evaluation is {total}",
            fix="use a smaller bound, or look at the data",
        )
    return total


Losses = Callable[[Sequence[Tensor]], list[float]]


@contextmanager
def _evaluated(composition: Composition, objective: Objective, seed: int, parallel: int) -> Iterator[Losses]:
    """Yield a function that returns the losses of several sets of coefficients."""
    composition.eval()
    if parallel == 1:
        yield lambda points: [_loss_at(composition, objective, seed, values) for values in points]
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
            yield lambda points: list(pool.map(loss, points))
    finally:
        torch.set_num_threads(before)


def _loss_at(composition: Composition, objective: Objective, seed: int, values: Tensor) -> float:
    _put(composition, values)
    return objective_loss(composition, objective, seed)


def _require_options(objective: Objective, evaluations: int, bound: float, parallel: int) -> None:
    fine = evaluations >= 1 and parallel >= 1 and 0 < bound < float("inf")
    changing = [term.name for _, term in objective.data_terms if not term.fixed_targets]
    if not fine or not objective.data_terms or changing:
        raise UsageError(
            "OBJECTIVE",
            "gradient-free optimisation needs an objective with fixed targets"
            if fine
            else f"evolve cannot run {evaluations} evaluations, {parallel} at once, with bound {bound}",
            found=", ".join(changing),
            expected="evaluations and parallel of at least 1, a bound above 0",
            fix="CrossEntropy(split), evaluations=500",
        )


def _nevergrad() -> Any:
    try:
        import nevergrad
    except ImportError:
        raise UsageError(
            "MODEL-LIBRARY",
            "gradient-free optimisation needs nevergrad, which is not installed",
            fix="pip install 'aniso[evolve]'",
        ) from None
    return nevergrad
