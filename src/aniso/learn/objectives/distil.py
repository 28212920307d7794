"""Distillation: a composition learns from the bank's own vectors, without labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from aniso.data import Unlabelled
from aniso.errors import UsageError, printable
from aniso.learn.objectives.companion import Companion, RunContext
from aniso.learn.objectives.term_inputs import TermInputs
from aniso.learn.objectives.unlabelled_term import UnlabelledTerm
from aniso.learn.teacher import Teacher
from aniso.learn.unwrap import head_for
from aniso.progress import ProgressCallback
from aniso.records import JsonValue
from aniso.registry import OBJECTIVES

MATCHES = ("kl", "features", "cosine", "labels")
_TARGET = "teacher"


@OBJECTIVES.register("distil")
@final
@dataclass(frozen=True)
class Distil(UnlabelledTerm):
    """Match the outputs of a teacher, the base plus one vector of the bank, on items without labels.

    With features f and logits z of the student, f' and z' of the teacher, the loss is a mean over items of

    - ``kl``: T² KL(softmax(z' / T) || softmax(z / T)), with T the ``temperature``;
    - ``features``: the mean of (f - f')² over dimensions;
    - ``cosine``: 1 - cos(f, f');
    - ``labels``: -log p(argmax z'), for items that are kept: those whose predicted classes agree, or of which
      the teacher's confidence is at least the student's (SyMerge), and at least ``confidence``. Other items
      add zero.

    The teacher's outputs are computed once, before the first step, on the view that evaluation uses; the
    student sees the same view.
    """

    loss_name = "distil"

    split: Unlabelled
    teacher: Teacher
    match: str = "kl"
    temperature: float = 1.0
    confidence: float = 0.0
    _computed: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._require_unlabelled()
        if not isinstance(self.teacher, Teacher):
            raise UsageError(
                "OBJECTIVE",
                "Distil needs a teacher",
                found=printable(self.teacher),
                fix="Distil(split, Teacher.of(encoder, bank, 'mnist'))",
            )
        fits = 0 < self.temperature < math.inf and 0 <= self.confidence <= 1
        if self.match not in MATCHES or not fits:
            raise UsageError(
                "OBJECTIVE",
                f"Distil cannot match '{printable(self.match)}' at temperature {self.temperature} "
                f"and confidence {self.confidence}",
                expected=f"{', '.join(MATCHES)}; a temperature above 0, a confidence from 0 to 1",
                fix="match='kl', temperature=1, confidence=0",
            )

    @property
    def selective(self) -> bool:
        return self.match == "labels"

    @classmethod
    def companion(cls, terms: Mapping[int, Self], run: RunContext) -> Companion | None:
        return TeacherOutputs(tuple(terms.values()), run)

    def settings(self) -> dict[str, JsonValue]:
        own: dict[str, JsonValue] = {"match": self.match, "teacher": self.teacher.identity()}
        used = {"kl": {"temperature": self.temperature}, "labels": {"confidence": self.confidence}}
        return {**own, **used.get(self.match, {})}

    @torch.no_grad()
    def compute_targets(
        self,
        model: nn.Module,
        *,
        batch_size: int = 256,
        workers: int = 0,
        progress: ProgressCallback | None = None,
    ) -> Tensor:
        """Return the teacher's features or logits of every item; they are computed once and remembered."""
        found = self._computed.get(_TARGET)
        if found is None:
            found = self.teacher.features(
                self.split, batch_size=batch_size, workers=workers, progress=progress
            )
            if self.match in ("kl", "labels"):
                head = head_for(model, self.split)  # of the base, also where a head is learned
                assert head is not None  # an unlabelled split has classes
                device = next(model.parameters()).device
                found = head.logits(found.to(device)).cpu()
            self._computed[_TARGET] = found
        return found

    def item_targets(self, model: nn.Module, items: Sequence[int]) -> Mapping[str, Tensor]:
        return {_TARGET: self.compute_targets(model)[list(items)]}

    def loss(self, inputs: TermInputs) -> Tensor:
        target = inputs.marks[_TARGET]
        if self.match == "features":
            return functional.mse_loss(inputs.features[0], target)
        if self.match == "cosine":
            return (1 - functional.cosine_similarity(inputs.features[0], target, dim=-1)).mean()
        logits = inputs.logits[0]
        if self.match == "labels":
            losses = functional.cross_entropy(logits, target.argmax(-1), reduction="none")
            return (losses * kept_items(logits, target, self.confidence)).mean()
        student, teacher = (z.div(self.temperature).log_softmax(-1) for z in (logits, target))
        divergence = functional.kl_div(student, teacher, reduction="batchmean", log_target=True)
        return self.temperature**2 * divergence


def kept_items(student: Tensor, teacher: Tensor, least: float = 0.0) -> Tensor:
    """Return for every item whether the teacher's prediction counts, given the logits of both.

    It does if both predict the same class, or if the teacher is at least as confident as the student; in both
    cases the teacher's confidence must be at least ``least``.
    """
    own, given = student.detach().softmax(-1).amax(-1), teacher.softmax(-1).amax(-1)
    agree = student.argmax(-1) == teacher.argmax(-1)
    return (agree | (given >= own)) & (given >= least)


@final
class TeacherOutputs(Companion):
    """Companion of Distil: computes the outputs of all teachers before the first step, one after another."""

    name = "teachers"

    def __init__(self, terms: Sequence[Distil], run: RunContext) -> None:
        self._terms = terms
        self._run = run

    def before_epoch(self, progress: ProgressCallback, check: Callable[[], None]) -> None:
        for term in self._terms:

            def checked(what: str, done: int, total: int, vector: str = term.teacher.vector) -> None:
                check()
                progress(f"teacher {vector}, {what}", done, total)

            self._compute(term, checked)

    def load_state_dict(self, state: Mapping[str, Tensor | JsonValue]) -> None:
        for term in self._terms:  # a run that was interrupted within an epoch does not begin it again
            self._compute(term)

    def _compute(self, term: Distil, progress: ProgressCallback | None = None) -> None:
        run = self._run
        term.compute_targets(run.model, batch_size=run.batch_size, workers=run.workers, progress=progress)
