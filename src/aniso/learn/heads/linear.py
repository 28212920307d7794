"""The linear probe: logistic regression on features, without class names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from aniso.learn.heads.head import Head, HeadOption
from aniso.models import ClassWeights
from aniso.registry import HEADS


@HEADS.register("linear")
@final
class LinearProbe(Head):
    """Linear probe: minimises cross-entropy + decay / 2 |weights|² by L-BFGS, starting from zero."""

    def __init__(self, base: ClassWeights, *, steps: int = 300, decay: float = 1e-3) -> None:
        super().__init__(base)
        self.steps = steps
        self._decay = decay
        self.weight = nn.Parameter(self.base_weight.clone())
        bias = torch.zeros(len(base.names)) if self.base_bias is None else self.base_bias.clone()
        self.bias = nn.Parameter(bias)
        self.unit: Tensor
        self.register_buffer("unit", torch.tensor(float(base.by_angle)))  # 1 if features are normalised

    def settings(self) -> dict[str, HeadOption]:
        return {"steps": self.steps, "decay": self._decay}

    def logits(self, features: Tensor) -> Tensor:
        unit = self.unit.to(features.device).bool()  # not read by Python, so that it can be exported
        seen = torch.where(unit, functional.normalize(features, dim=-1), features)
        return functional.linear(seen, self.weight.to(features), self.bias.to(features))

    def _descend(self, views: Tensor, labels: Tensor) -> Iterator[float]:
        features = functional.normalize(views.flatten(0, 1), dim=-1)
        wanted = labels.repeat(len(views))
        with torch.no_grad():
            self.weight.zero_()
            self.bias.zero_()
            self.unit.fill_(1.0)
        # max_eval defaults to 1.25 max_iter; more are left for the line search
        optimiser = torch.optim.LBFGS(
            [self.weight, self.bias],
            max_iter=1,
            max_eval=26,
            history_size=30,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            optimiser.zero_grad()
            loss = functional.cross_entropy(functional.linear(features, self.weight, self.bias), wanted)
            loss = loss + self._decay / 2 * self.weight.square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        for _ in range(self.steps):
            with torch.enable_grad():
                loss = optimiser.step(closure)  # type: ignore[no-untyped-call]
            yield loss.item()
