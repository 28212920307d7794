"""Tip-Adapter, fine-tuned (Zhang et al. 2022): class weights and a cache of the images' own features."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Self, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from aniso.errors import UsageError
from aniso.learn.heads.head import Head, HeadOption
from aniso.models import ClassWeights
from aniso.registry import HEADS

_ROWS = 256  # at once, against all keys: their products stay in a processor's cache


@HEADS.register("tip")
@final
class TipAdapter(Head):
    """Tip-Adapter: logits of the class weights + alpha exp(-beta (1 - f · keys')) labels.

    Keys, which start as the mean of every image's views, and the two scalars are trained by AdamW in 300
    passes over the images. Starts, weight decay and batches are those of the paper's runs.
    """

    rates: ClassVar[Mapping[str, float]] = {"keys": 1e-3, "alpha": 1e-1, "beta": 1e-1}

    def __init__(
        self,
        base: ClassWeights,
        *,
        steps: int = 300,
        alpha: float = 2.0,
        beta: float = 1.0,
        batch_size: int = 256,
        decay: float = 0.01,
    ) -> None:
        """``steps`` are passes over the images.

        Args:
            batch_size: images per step of the optimiser; 0 takes all images at once, which is faster.
            decay: weight decay of keys and scalars.
        """
        super().__init__(base)
        if steps < 1 or batch_size < 0 or decay < 0:
            raise UsageError(
                "HEAD-OPTION",
                f"Tip-Adapter cannot have steps {steps}, batch_size {batch_size}, decay {decay}",
                expected="1 or more steps, batch_size 0 (all images) or more, decay 0 or more",
                fix="--head-option batch_size=256, --head-option decay=0.01",
            )
        self.steps = steps
        self._batch_size = batch_size
        self._decay = decay
        self._scalars = (alpha, beta)
        self.keys = nn.Parameter(torch.zeros(0, self.base_weight.shape[1]))
        self.alpha = nn.Parameter(torch.zeros(()))
        self.beta = nn.Parameter(torch.tensor(float(beta)))
        self.owners: Tensor
        self.register_buffer("owners", torch.zeros(0, dtype=torch.long))

    def settings(self) -> dict[str, HeadOption]:
        return {
            "steps": self.steps,
            "alpha": self._scalars[0],
            "beta": self._scalars[1],
            "batch_size": self._batch_size,
            "decay": self._decay,
        }

    def logits(self, features: Tensor) -> Tensor:
        seen = functional.normalize(features, dim=-1).flatten(0, -2)
        weights = torch.exp(self.beta * (self.keys.to(features) @ seen.T - 1))
        votes = self._by_class(weights).T.reshape(*features.shape[:-1], -1)
        return self.base.logits(features) + self.alpha * votes

    def _by_class(self, weights: Tensor) -> Tensor:
        """Sum rows, one for each key, by the keys' classes; a product with one-hot labels costs far more."""
        return weights.new_zeros(len(self.names), weights.shape[1]).index_add(0, self.owners, weights)

    def remember(self, features: Tensor, labels: Tensor | Sequence[int]) -> Self:
        """Fill the cache with features and labels: keys and scalars are trained from there."""
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
            raise ValueError("keys and their classes differ in number")
        self.keys = nn.Parameter(torch.empty_like(tensors["keys"]))  # as many as in the file
        self.owners = torch.empty_like(tensors["owners"])
        return super().adopt(tensors)

    def _descend(self, views: Tensor, labels: Tensor) -> Iterator[float]:
        """Train on batches, in each pass of another view: an image's key is its views' mean, not one view."""
        if self.by_angle:
            views = functional.normalize(views, dim=-1)  # once, and not in every step
        self.remember(views, labels)
        named = dict(self.named_parameters())
        groups = [{"params": [named[name]], "lr": rate} for name, rate in self.rates.items()]
        optimiser = torch.optim.AdamW(groups, weight_decay=self._decay, eps=1e-4)
        count = len(labels)
        size = self._batch_size or count
        done, steps = 0, self.steps * -(-count // size)
        for number in range(self.steps):
            seen, total = views[number % len(views)], 0.0
            for rows in self._order(number, count, size, labels.device):
                falling = 0.5 * (1 + math.cos(math.pi * done / steps))
                for group, rate in zip(optimiser.param_groups, self.rates.values(), strict=True):
                    group["lr"] = rate * falling
                total += self._gradients(seen[rows], labels[rows]) * len(rows) / count
                optimiser.step()
                done += 1
            yield total

    @staticmethod
    def _order(number: int, count: int, size: int, device: torch.device) -> Iterable[Tensor]:
        """The batches of a pass, in another order in each; a single batch keeps the order of the images."""
        if size >= count:
            return [torch.arange(count, device=device)]
        order = torch.randperm(count, generator=torch.Generator().manual_seed(number))
        return torch.split(order.to(device), size)

    @torch.no_grad()
    def _gradients(self, features: Tensor, labels: Tensor) -> float:
        """Set the gradients of a batch, some rows at a time: a thousand classes would not fit at once.

        Written out, since autograd would keep several matrices of rows x keys.
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
