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
from aniso.errors import UsageError, printable
from aniso.learn.features import iterate_features
from aniso.learn.objectives.companion import Companion, RunContext
from aniso.learn.objectives.term_inputs import TermInputs
from aniso.learn.objectives.unlabelled_term import UnlabelledTerm
from aniso.learn.unwrap import encoder_of
from aniso.progress import ProgressCallback
from aniso.records import JsonValue
from aniso.registry import OBJECTIVES

TRUSTED_BY = ("score", "prediction")
_PAIRS = 4096  # of an image and a class, looked at together
UNTRUSTED = -1  # label of an image that is not in the trusted set


@OBJECTIVES.register("fixmatch")
@final
@dataclass(frozen=True)
class FixMatch(UnlabelledTerm):
    """Unsupervised FixMatch: predictions on an image are the targets for a strongly augmented view of it.

    A trusted set takes the place of labelled images: the same number of images per class, those with the
    highest scores for it, chosen again in every epoch, fills a quarter of each batch. Other images count if
    their prediction, flattened to p^``power``, is more confident than a threshold that rises from
    ``threshold`` to 1.
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
    """Transform of the augmented view: few_shot, strong or train; texts have one, which drops tokens."""
    trusted_by: str = "score"
    """``score`` ranks all images by each class's score, ``prediction`` those that are predicted as it."""

    def __post_init__(self) -> None:
        self._require_unlabelled()
        self._require_strong(self.strong)
        if self.trusted_by not in TRUSTED_BY:
            raise UsageError(
                "OBJECTIVE",
                f"FixMatch cannot choose trusted images by '{printable(self.trusted_by)}'",
                expected=" or ".join(TRUSTED_BY),
                fix="trusted_by='score'",
            )
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
        return {
            "power": self.power,
            "threshold": self.threshold,
            "most": self.most,
            "strong": self.strong,
            "trusted_by": self.trusted_by,
        }

    def views(self, model: nn.Module) -> tuple[View, ...]:
        transforms = encoder_of(model).transforms
        return transforms.eval, transforms.augmented(self.strong)

    def trust(self, logits: Tensor) -> Tensor:
        """Return the label of every trusted image, and -1 for all others, from the logits of all images.

        Every class has the same number: the images with the highest scores for it. An image that is among
        the highest of several classes belongs to the one with the highest score, and the others take their
        next. With ``trusted_by`` prediction a class has fewer if fewer images are predicted as it.
        """
        each = max(1, min(len(self.split) // len(self.split.classes), self.most))
        scores = logits.softmax(-1)
        if self.trusted_by == "score":
            return highest_of_each(scores, each)
        confidence, predictions = scores.max(-1)
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


def highest_of_each(scores: Tensor, each: int) -> Tensor:
    """Return a class for ``each`` images of every class, by their scores for it, and -1 for all others.

    ``scores`` are images x classes. Pairs are taken from the highest score down, unless their image has a
    class already, or their class ``each`` images; of equal scores the first image comes first.
    """
    count, classes = scores.shape
    order = scores.flatten().argsort(descending=True, stable=True).cpu()
    trusted = torch.full((count,), UNTRUSTED)
    room = torch.full((classes,), each)
    for pairs in torch.split(order, _PAIRS):
        free = (trusted[pairs // classes] == UNTRUSTED) & (room[pairs % classes] > 0)
        for pair in pairs[free].tolist():
            image, label = divmod(pair, classes)
            if trusted[image] == UNTRUSTED and room[label] > 0:
                trusted[image] = label
                room[label] -= 1
        if not bool(room.any()):
            break
    return trusted.to(scores.device)
