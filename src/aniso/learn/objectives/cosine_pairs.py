"""The cosine-similarity loss of pairs, which SetFit fine-tunes sentence encoders by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor, nn
from torch.nn import functional

from aniso.data import Labelled
from aniso.data.batches import View
from aniso.data.pairs import OfPair, PairedItems
from aniso.errors import UsageError, printable
from aniso.learn.objectives.cross_entropy import require_learnable
from aniso.learn.objectives.objective import DataTerm
from aniso.learn.objectives.term_inputs import TermInputs
from aniso.learn.unwrap import encoder_of
from aniso.records import JsonValue
from aniso.registry import OBJECTIVES


@OBJECTIVES.register("cosine-pairs")
@final
@dataclass(frozen=True)
class CosinePairs(DataTerm):
    """The mean of (cos(f(a), f(b)) - y)² over pairs: y is 1 for pairs of one class, and 0 for others.

    ``split`` holds pairs, as ``aniso.data.pairs`` draws them from a labelled split::

        CosinePairs(pairs(task.train.shots(8)))
    """

    needs_labels = True
    uses_logits = False

    split: Labelled
    view: str = "train"
    """Transform of both items of a pair: train, few_shot or eval."""

    def __post_init__(self) -> None:
        if not isinstance(self.split, Labelled) or not isinstance(self.split.items, PairedItems):
            raise UsageError(
                "OBJECTIVE",
                "CosinePairs needs pairs of a split's items",
                found=printable(self.split),
                fix="CosinePairs(pairs(task.train))",
            )
        require_learnable(self.split, self.view)

    @property
    def name(self) -> str:
        return self.split.name

    def identity(self) -> dict[str, JsonValue]:
        return {"loss": "cosine-pairs", "split": self.split.manifest, "view": self.view}

    def views(self, model: nn.Module) -> tuple[View, ...]:
        view: View = getattr(encoder_of(model).transforms, self.view)
        return OfPair(view, 0), OfPair(view, 1)

    def loss(self, inputs: TermInputs) -> Tensor:
        assert inputs.labels is not None
        one, other = inputs.features
        cosines = functional.cosine_similarity(one, other, dim=-1)
        return functional.mse_loss(cosines, inputs.labels.to(cosines.dtype))
