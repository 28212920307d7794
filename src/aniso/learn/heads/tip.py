"""Tip-Adapter, fine-tuned (Zhang et al. 2022): class weights and a cache of the pictures' own features."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from aniso.learn.heads.head import Head
from aniso.models import ClassWeights

_ROWS = 256  # at once, against all keys: what is computed of them stays in a processor's cache


@final
class TipAdapter(Head):
    """Logits of the class weights + alpha exp(-beta (1 - f · keys')) labels.

    Keys are learned, beginning as the mean of every picture's views; so are the two scalars.
    """

    kind = "tip"
    rates: ClassVar[Mapping[str, float]] = {"keys": 1e-3, "alpha": 1e-1, "beta": 1e-1}

    def __init__(
        self, base: ClassWeights, *, steps: int = 300, alpha: float = 1.0, beta: float = 5.5
    ) -> None:
        super().__init__(base)
        self.steps = steps
        self._scalars = (alpha, beta)
        self.keys = nn.Parameter(torch.zeros(0, self.base_weight.shape[1]))
        self.alpha = nn.Parameter(torch.zeros(()))
        self.beta = nn.Parameter(torch.tensor(float(beta)))
        self.owners: Tensor
        self.register_buffer("owners", torch.zeros(0, dtype=torch.long))

    def settings(self) -> dict[str, Any]:
        return {"steps": self.steps, "alpha": self._scalars[0], "beta": self._scalars[1]}

    def logits(self, features: Tensor) -> Tensor:
        seen = functional.normalize(features, dim=-1).flatten(0, -2)
        weights = torch.exp(self.beta * (self.keys.to(features) @ seen.T - 1))
        votes = self._by_class(weights).T.reshape(*features.shape[:-1], -1)
        return self.base.logits(features) + self.alpha * votes

    def _by_class(self, weights: Tensor) -> Tensor:
        """Rows, one for each key, added up by the keys' classes; a product with labels costs far more."""
        return weights.new_zeros(len(self.names), weights.shape[1]).index_add(0, self.owners, weights)

    def remember(self, features: Tensor, labels: Tensor | Sequence[int]) -> Self:
        """Fill the cache: what there is to learn is where its keys and scalars go from here."""
        owners = torch.as_tensor(labels)
        views = functional.normalize(self._usable(features, owners), dim=-1)
        keys = functional.normalize(views.mean(0), dim=-1)
        self.keys = nn.Parameter(keys.clone())
        self.owners = owners.to(keys.device, torch.long, copy=True)
        with torch.no_grad():
            self.alpha.fill_(self._scalars[0])
            self.beta.fill_(self._scalars[1])
        return self

    def adopt(self, tensors: Mapping[str, Tensor]) -> Self:
        if tensors["keys"].dim() != 2 or tensors["owners"].shape != tensors["keys"].shape[:1]:
            raise ValueError("keys and their owners do not fit each other")
        self.keys = nn.Parameter(torch.empty_like(tensors["keys"]))  # as many as there are
        self.owners = torch.empty_like(tensors["owners"])
        return super().adopt(tensors)

    def _descend(self, views: Tensor, labels: Tensor) -> Iterator[float]:
        """Full batches, each of another view: a picture's own key is its views' mean, not the view itself."""
        if self.by_angle:
            views = functional.normalize(views, dim=-1)  # once, and not in every step
        self.remember(views, labels)
        named = dict(self.named_parameters())
        groups = [{"params": [named[name]], "lr": rate} for name, rate in self.rates.items()]
        optimiser = torch.optim.AdamW(groups, weight_decay=0.0, eps=1e-4)
        for number in range(self.steps):
            falling = 0.5 * (1 + math.cos(math.pi * number / self.steps))
            for group, rate in zip(optimiser.param_groups, self.rates.values(), strict=True):
                group["lr"] = rate * falling
            loss = self._gradients(views[number % len(views)], labels)
            optimiser.step()
            yield loss

    @torch.no_grad()
    def _gradients(self, features: Tensor, labels: Tensor) -> float:
        """Of a full batch, some rows at a time: all against all would not fit for a thousand classes.

        Written out, since autograd would keep, and go through, several matrices of rows by keys.
        """
        keys = torch.zeros_like(self.keys)
        alpha, beta, total = (torch.zeros((), dtype=torch.float64) for _ in range(3))
        for start in range(0, len(labels), _ROWS):
            rows, wanted = features[start : start + _ROWS], labels[start : start + _ROWS]
            seen = functional.normalize(rows, dim=-1)
            place = (wanted, torch.arange(len(wanted), device=wanted.device))
            near = (self.keys @ seen.T).sub_(1)
            weights = torch.mul(near, self.beta).exp_()
            votes = self._by_class(weights)
            logits = self.base.logits(rows).T + self.alpha * votes
            scale = logits.logsumexp(0)
            total += (scale - logits[place]).sum().cpu()
            error = logits.sub_(scale).exp_()
            error[place] -= 1
            error /= len(labels)
            alpha += (error * votes).sum().cpu()
            weights.mul_(error.index_select(0, self.owners)).mul_(self.alpha)
            beta += torch.dot(weights.flatten(), near.flatten()).cpu()
            keys.addmm_(weights, seen, alpha=float(self.beta))
        self.keys.grad = keys
        self.alpha.grad, self.beta.grad = alpha.to(self.alpha), beta.to(self.beta)
        return float(total) / len(labels)
