"""The predictions of an online run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from aniso.learn.objectives import Companion, TermInputs
from aniso.records import JsonValue

_NONE = -1  # no prediction yet


@final
class OnlinePredictions(Companion):
    """Companion of online runs: the class predicted for every image before it is learned from."""

    name = "online"

    def __init__(self, items: int) -> None:
        self.predictions = torch.full((items,), _NONE)

    @torch.no_grad()
    def observe(self, term: int, items: Sequence[int], inputs: TermInputs) -> None:
        places = torch.tensor(items)
        first = self.predictions[places] == _NONE  # a step may have a second forward pass
        self.predictions[places[first]] = inputs.logits[0].argmax(-1).cpu()[first]

    def state_dict(self) -> dict[str, Tensor | JsonValue]:
        return {"predictions": self.predictions}

    def load_state_dict(self, state: Mapping[str, Tensor | JsonValue]) -> None:
        predictions = state["predictions"]
        assert isinstance(predictions, Tensor)
        self.predictions = predictions
