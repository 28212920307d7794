"""Unsupervised FixMatch, and the trusted set it learns from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from aniso.data import Unlabelled
from aniso.data.batches import View
from aniso.errors import UsageError
from aniso.learn.features import iterate_features
from aniso.learn.objectives.companion import Companion, RunContext
from aniso.learn.objectives.term_inputs import TermInputs
from aniso.learn.objectives.unlabelled_term import UnlabelledTerm
from aniso.learn.unwrap import encoder_of
from aniso.progress import ProgressCallback
from aniso.records import JsonValue
from aniso.registry import OBJECTIVES

UNTRUSTED = -1  # label of an image that is not in the trusted set


@OBJECTIVES.register("fixmatch")
@final
@dataclass(frozen=True)
class FixMatch(UnlabelledTerm):
    """Unsupervised FixMatch: predictions on an image are the targets for a strongly augmented view of it.

    A trusted set takes the place of labelled images: the same number of most confident images per predicted
    class, chosen again in every epoch, fills a quarter of each batch. Other images count if their prediction,
    flattened to p^``power``, is more confident than a threshold that rises from ``threshold`` to 1.
    """

    loss_name = "FixMatch"
    selective = True
    no_grad_views = 1
    reserved_share = 0.25
    fixed_targets = False

    split: Unlabelled
    power: float = 0.5
    threshold: float = 0.9
    most: int = 100
    """Largest number of trusted images per class."""
    strong: str = "few_shot"
    """Transform of the augmented view: few_shot, strong or train."""

    def __post_init__(self) -> None:
        self._require_unlabelled()
        self._require_strong(self.strong)
        whole = type(self.most) is int and self.most >= 1
        if not (whole and 0 < self.power < math.inf and 0 <= self.threshold <= 1):
            raise UsageError(
                "OBJECTIVE",
                f"FixMatch cannot have power {self.power}, threshold {self.threshold}, most {self.most}",
                expected="power above 0, threshold from 0 to 1, most at least 1",
                fix="power=0.5, threshold=0.9, most=100",
            )

    @classmethod
    def companion(cls, terms: Mapping[int, Self], run: RunContext) -> Companion | None:
        return None if run.online else TrustedSet(terms, run)

    def settings(self) -> dict[str, JsonValue]:
        return {"power": self.power, "threshold": self.threshold, "most": self.most, "strong": self.strong}

    def views(self, model: nn.Module) -> tuple[View, ...]:
        transforms = encoder_of(model).transforms
        return transforms.eval, getattr(transforms, self.strong)

    def trust(self, logits: Tensor) -> Tensor:
        """Return the label of every trusted image, and -1 for all others, from the logits of all images.

        The trusted set has the same number of most confident images per predicted class.
        """
        confidence, predictions = logits.softmax(-1).max(-1)
        each = max(1, min(len(self.split) // len(self.split.classes), self.most))
        trusted = torch.full_like(predictions, UNTRUSTED)
        for label in range(len(self.split.classes)):
            own = (predictions == label).nonzero().flatten()
            best = own[confidence[own].argsort(descending=True, stable=True)[:each]]
            trusted[best] = label
        return trusted

    def loss(self, inputs: TermInputs) -> Tensor:
        """Return the mean over all images, to which images that do not count add zero."""
        weak, strong = inputs.logits
        targets = flattened(weak.detach(), self.power)
        confident = targets.max(-1).values > self.threshold + (1 - self.threshold) * inputs.progress
        own = -(targets * strong.log_softmax(-1)).sum(-1)
        trusted = inputs.marks.get("trusted")
        if trusted is None:
            return (own * confident).mean()
        taught = functional.cross_entropy(strong, trusted.clamp(min=0), reduction="none")
        return torch.where(trusted != UNTRUSTED, taught, own * confident).mean()


@final
class TrustedSet(Companion):
    """Companion of FixMatch: chooses the trusted images of every term before each epoch."""

    name = "trusted"

    def __init__(self, terms: Mapping[int, FixMatch], run: RunContext) -> None:
        self._terms = terms
        self._run = run
        self._labels: dict[int, Tensor] = {}  # by term: a label for every image of its split

    @torch.no_grad()
    def before_epoch(self, progress: ProgressCallback, check: Callable[[], None]) -> None:
        run = self._run
        for i, term in self._terms.items():
            head, logits = run.heads[i], []
            assert head is not None  # an unlabelled split has classes
            for piece in iterate_features(
                run.model, term.split, batch_size=run.batch_size, workers=run.workers
            ):
                check()
                logits.append(head.logits(piece.float()))
                progress(f"predictions on {term.split.name}", sum(map(len, logits)), len(term.split))
            self._labels[i] = term.trust(torch.cat(logits)).cpu()

    def reserved_items(self, term: int) -> Sequence[int] | None:
        labels = self._labels.get(term)
        return None if labels is None else (labels != UNTRUSTED).nonzero().flatten().tolist()

    def marks(self, term: int, items: Sequence[int]) -> Mapping[str, Tensor]:
        return {"trusted": self._labels[term][list(items)]} if term in self._labels else {}

    def metrics(self) -> Mapping[str, int]:
        if not self._labels:
            return {}
        return {"trusted": sum(int((labels != UNTRUSTED).sum()) for labels in self._labels.values())}

    def state_dict(self) -> dict[str, Tensor | JsonValue]:
        return {str(i): labels for i, labels in self._labels.items()}

    def load_state_dict(self, state: Mapping[str, Tensor | JsonValue]) -> None:
        self._labels = {int(i): labels for i, labels in state.items() if isinstance(labels, Tensor)}


def flattened(logits: Tensor, power: float) -> Tensor:
    """Return probabilities to a power, normalised to sum to one again."""
    return (power * logits.log_softmax(-1)).softmax(-1)
