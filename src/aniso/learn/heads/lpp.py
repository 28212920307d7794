"""LP++ (Huang et al. 2024): a linear probe that blends image prototypes with text, class by class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Self, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from aniso.errors import NumericalError, UsageError, printable
from aniso.learn.heads.head import Head, HeadOption
from aniso.models import ClassWeights
from aniso.registry import HEADS

ALPHA_STARTS = ("images", "logit-scale")


@HEADS.register("lpp")
@final
class LPP(Head):
    """LP++: logits f · (w_k + alpha_k t_k) + b_k, with prototypes w_k, text embeddings t_k and biases b_k.

    Prototypes and biases take full-batch steps of SGD with momentum, the multipliers alpha plain steps in
    between. Step sizes come from bounds on the loss's curvature, so there is no learning rate to choose.
    """

    def __init__(
        self,
        base: ClassWeights,
        *,
        steps: int = 300,
        text: float = 250.0,
        text_every: int = 10,
        momentum: float = 0.9,
        bias: bool = True,
        alpha_start: str = "images",
    ) -> None:
        """Alpha takes a step after every ``text_every`` steps of the prototypes.

        Args:
            momentum: of the prototypes and biases. With 0, and without ``bias``, the loss never rises.
            alpha_start: ``images`` starts alpha at ``text`` times the mean cosine of images and their class's
                text, ``logit-scale`` at the scale of the model's own logits (100 for CLIP).
        """
        super().__init__(base)
        if not base.by_angle:
            raise UsageError(
                "HEAD-FEATURES",
                "LP++ needs text embeddings, and this model has no text tower",
                fix="--head linear or --head tip",
            )
        if not 0 <= momentum < 1 or alpha_start not in ALPHA_STARTS or steps < 1 or text_every < 1:
            raise UsageError(
                "HEAD-OPTION",
                f"LP++ cannot have steps {steps}, text_every {text_every}, momentum {momentum}, "
                f"alpha_start '{printable(alpha_start)}'",
                expected="1 or more steps, momentum from 0 to below 1, alpha_start images or logit-scale",
                fix="--head-option momentum=0.9, --head-option alpha_start=images",
            )
        self.steps = steps
        self._text = text
        self._text_every = text_every
        self._momentum = momentum
        self._alpha_start = alpha_start
        self.prototypes = nn.Parameter(torch.zeros_like(self.base_weight))
        self.alpha = nn.Parameter(self.base_weight.norm(dim=-1))
        self.bias = nn.Parameter(torch.zeros(len(self.names))) if bias else None

    def settings(self) -> dict[str, HeadOption]:
        return {
            "steps": self.steps,
            "text": self._text,
            "text_every": self._text_every,
            "momentum": self._momentum,
            "bias": self.bias is not None,
            "alpha_start": self._alpha_start,
        }

    def adopt(self, tensors: Mapping[str, Tensor]) -> Self:
        if "bias" not in tensors:  # files of earlier versions have none, and no option that says so
            self.bias = None
        return super().adopt(tensors)

    def logits(self, features: Tensor) -> Tensor:
        weight = self.prototypes + self.alpha[:, None] * self._directions()
        bias = None if self.bias is None else self.bias.to(features)
        return functional.linear(functional.normalize(features, dim=-1), weight.to(features), bias)

    def _directions(self) -> Tensor:
        return functional.normalize(self.base_weight, dim=-1)

    @torch.no_grad()
    def _descend(self, views: Tensor, labels: Tensor) -> Iterator[float]:
        views = functional.normalize(views, dim=-1)
        features, wanted = views.flatten(0, 1), labels.repeat(len(views))
        cosines = features @ self._directions().T
        step, text_step = step_sizes(features, cosines)
        self._begin(views.mean(0), cosines, labels, wanted)
        velocity = torch.zeros_like(self.prototypes)
        bias_velocity = torch.zeros_like(self.alpha)
        for number in range(1, self.steps + 1):
            loss, excess = self._errors(features, cosines, wanted)
            self.prototypes.sub_(velocity.mul_(self._momentum).add_(excess.T @ features), alpha=step)
            if self.bias is not None:
                self.bias.sub_(bias_velocity.mul_(self._momentum).add_(excess.sum(0)), alpha=step)
            if number % self._text_every == 0:
                _, excess = self._errors(features, cosines, wanted)
                self.alpha.sub_((excess * cosines).sum(0), alpha=text_step)
            yield loss

    def _begin(self, features: Tensor, cosines: Tensor, labels: Tensor, wanted: Tensor) -> None:
        """Set the start: prototypes are sums over a class's images, alpha is the same for all classes."""
        self.prototypes.zero_().index_add_(0, labels, features)
        if self.bias is not None:
            self.bias.zero_()
        if self._alpha_start == "logit-scale":
            self.alpha.copy_(self.base_weight.norm(dim=-1))
            return
        own = cosines.gather(1, wanted[:, None])[:, 0]
        sums = torch.zeros_like(self.alpha).index_add_(0, wanted, own)
        counts = torch.bincount(wanted, minlength=len(self.names))
        self.alpha.fill_(self._text * (sums / counts).mean())

    def _errors(self, features: Tensor, cosines: Tensor, wanted: Tensor) -> tuple[float, Tensor]:
        """The loss, and its derivative with respect to the logits."""
        logits = torch.addcmul(features @ self.prototypes.T, self.alpha, cosines)
        if self.bias is not None:
            logits += self.bias
        loss = functional.cross_entropy(logits, wanted)
        excess = logits.softmax(-1)
        excess[torch.arange(len(wanted), device=wanted.device), wanted] -= 1
        return loss.item(), excess / len(wanted)


def step_sizes(features: Tensor, cosines: Tensor) -> tuple[float, float]:
    """Return the step sizes of prototypes and multipliers.

    For prototypes 4 N / the largest eigenvalue of F'F; for multipliers N / (4 m), with m the largest sum of
    squares of a class's text logits. The Hessian of a softmax is at most a half, so the loss's curvature
    along the prototypes is at most L = eigenvalue / 2 N, and no step of up to 2 / L can raise the loss.
    """
    count, width = features.shape
    wide = features.double()
    gram = wide.T @ wide if width <= count else wide @ wide.T  # both have the same largest eigenvalue
    largest = float(torch.linalg.eigvalsh(gram)[-1])
    most = float(cosines.double().square().sum(0).max())
    if largest <= 0 or most <= 0:
        raise NumericalError(
            "LEARN-NONFINITE",
            "all features, or their similarity to all classes, are zero: there is nothing to learn from",
            fix="look for coefficients that are too large: aniso coefficients show",
        )
    return 4 * count / largest, count / (4 * most)
