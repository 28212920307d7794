"""What can be minimised without a label: entropy, contrast between views, and agreement with oneself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from aniso.data import Unlabelled
from aniso.data.batches import View
from aniso.errors import UsageError, printable
from aniso.learn.objectives.objective import DataTerm, Seen
from aniso.learn.unwrap import encoder_of

STRONG = ("few_shot", "strong", "train")
NOBODY = -1  # the class of a picture that is not trusted


class _NoLabels(DataTerm):
    """Bound to pictures that have no labels by type: there are none to read, by mistake or otherwise."""

    split: Unlabelled
    loss_name: ClassVar[str]

    def _require_unlabelled(self) -> None:
        if not isinstance(self.split, Unlabelled) or len(self.split) < 2:
            raise UsageError(
                "OBJECTIVE",
                f"{self.loss_name} is for two pictures or more without labels",
                found=printable(self.split),
                fix="task.test.unlabelled()",
            )

    def _require_strong(self, view: str) -> None:
        if view not in STRONG:
            raise UsageError(
                "OBJECTIVE",
                f"there is no view '{printable(view)}' to compare with",
                expected=", ".join(STRONG),
                fix="strong='few_shot'",
            )

    @property
    def name(self) -> str:
        return f"{self.split.name}, {self.loss_name}"

    def identity(self) -> dict[str, Any]:
        own = {"split": self.split.manifest, "classes": self.split.classes.key}
        return {"loss": self.loss_name, **own, **self.settings()}

    def settings(self) -> dict[str, Any]:
        return {}

    def views(self, model: nn.Module) -> tuple[View, ...]:
        return (encoder_of(model).transforms.eval,)


@final
@dataclass(frozen=True)
class Entropy(_NoLabels):
    """The mean entropy of answers. Simple, and it can collapse into one answer for all."""

    loss_name = "entropy"

    split: Unlabelled

    def __post_init__(self) -> None:
        self._require_unlabelled()

    def loss(self, seen: Seen) -> Tensor:
        return entropy(seen.logits[0]).mean()


@final
@dataclass(frozen=True)
class SAR(_NoLabels):
    """Sharpness-aware entropy of reliable answers (Niu et al. 2023).

    Pictures count whose entropy is below ``margin`` times the largest possible; the gradient is taken where
    the loss is worst within ``radius``; if the answers become too sure of themselves, as a moving average of
    their entropy says, what was learned is forgotten. ``floor`` is that of a thousand classes; for fewer it
    is lower, as their largest entropy is.
    """

    loss_name = "reliable entropy"
    selective = True

    split: Unlabelled
    margin: float = 0.4
    radius: float = 0.05
    floor: float = 0.2

    def __post_init__(self) -> None:
        self._require_unlabelled()
        finite = math.isfinite(self.margin + self.radius + self.floor)
        if not (finite and self.margin > 0 and self.radius >= 0):
            raise UsageError(
                "OBJECTIVE",
                f"SAR cannot have margin {self.margin}, radius {self.radius} and floor {self.floor}",
                expected="a margin above 0, a radius of 0 or more",
                fix="margin=0.4, radius=0.05",
            )

    def settings(self) -> dict[str, Any]:
        return {"margin": self.margin, "radius": self.radius, "floor": self.floor}

    @property
    def collapse(self) -> float:
        """The entropy below which answers can hardly be right."""
        return self.floor * math.log(len(self.split.classes)) / math.log(1000)

    def reliable(self, seen: Seen) -> Tensor:
        return entropy(seen.logits[0]) < self.margin * math.log(len(self.split.classes))

    def loss(self, seen: Seen) -> Tensor:
        """A mean over all pictures, to which those that do not count give nothing."""
        counts = self.reliable(seen) if seen.reliable is None else self.reliable(seen) & seen.reliable
        return (entropy(seen.logits[0]) * counts).mean()


@final
@dataclass(frozen=True)
class Contrastive(_NoLabels):
    """SimCLR's: of all other pictures' features, those of the same picture's other view shall be nearest."""

    loss_name = "contrast"
    whole_batch = True

    split: Unlabelled
    temperature: float = 0.2
    strong: str = "few_shot"
    on: str = "features"
    """features, or logits."""

    def __post_init__(self) -> None:
        self._require_unlabelled()
        self._require_strong(self.strong)
        if not 0 < self.temperature < math.inf or self.on not in ("features", "logits"):
            raise UsageError(
                "OBJECTIVE",
                f"there is no contrast of {printable(self.on)} at temperature {self.temperature}",
                expected="features or logits, at a temperature above 0",
                fix="on='features', temperature=0.2",
            )

    def settings(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "strong": self.strong, "on": self.on}

    def views(self, model: nn.Module) -> tuple[View, ...]:
        seen = encoder_of(model).transforms
        return seen.eval, getattr(seen, self.strong)

    def loss(self, seen: Seen) -> Tensor:
        one, other = seen.features if self.on == "features" else seen.logits
        both = functional.normalize(torch.cat([one, other]), dim=-1)
        near = both @ both.T / self.temperature
        near.fill_diagonal_(-math.inf)  # nothing is compared with itself
        count = len(one)
        partner = torch.arange(2 * count, device=near.device).roll(count)
        return functional.cross_entropy(near, partner)


@final
@dataclass(frozen=True)
class FixMatch(_NoLabels):
    """Unsupervised FixMatch: answers on a picture as it is are what is learned on a strongly changed view.

    As a labelled set would, a trusted one keeps it from drifting: of every class those pictures that are most
    surely of it, chosen anew in every epoch, a quarter of each batch. Of the others those count whose answer,
    after ``power`` has flattened it, is surer than a threshold that rises from ``threshold`` to 1.
    """

    loss_name = "FixMatch"
    selective = True
    looks = 1
    trusted_share = 0.25

    split: Unlabelled
    power: float = 0.5
    threshold: float = 0.9
    most: int = 100
    """Trusted pictures of a class."""
    strong: str = "few_shot"

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

    def settings(self) -> dict[str, Any]:
        return {"power": self.power, "threshold": self.threshold, "most": self.most, "strong": self.strong}

    def views(self, model: nn.Module) -> tuple[View, ...]:
        seen = encoder_of(model).transforms
        return seen.eval, getattr(seen, self.strong)

    def trust(self, logits: Tensor) -> Tensor:
        """Of the pictures whose answer a class is, the most certain ones, for every class equally many."""
        scores, answers = logits.softmax(-1).max(-1)
        each = max(1, min(len(self.split) // len(self.split.classes), self.most))
        trusted = torch.full_like(answers, NOBODY)
        for label in range(len(self.split.classes)):
            own = (answers == label).nonzero().flatten()
            best = own[scores[own].argsort(descending=True, stable=True)[:each]]
            trusted[best] = label
        return trusted

    def loss(self, seen: Seen) -> Tensor:
        """A mean over all pictures, to which those that do not count give nothing."""
        weak, strong = seen.logits
        said = flattened(weak.detach(), self.power)
        sure = said.max(-1).values > self.threshold + (1 - self.threshold) * seen.progress
        learned = -(said * strong.log_softmax(-1)).sum(-1)
        if seen.trusted is None:
            return (learned * sure).mean()
        known = seen.trusted != NOBODY
        taught = functional.cross_entropy(strong, seen.trusted.clamp(min=0), reduction="none")
        return torch.where(known, taught, learned * sure).mean()


def entropy(logits: Tensor) -> Tensor:
    """Of every picture's answer."""
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def flattened(logits: Tensor, power: float) -> Tensor:
    """Probabilities to a power, made to sum to one again."""
    return (power * logits.log_softmax(-1)).softmax(-1)
