"""Cross-entropy with labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor, nn
from torch.nn import functional

from aniso.data import Labelled
from aniso.data.batches import View
from aniso.errors import UsageError, printable
from aniso.learn.objectives.objective import DataTerm
from aniso.learn.objectives.term_inputs import TermInputs
from aniso.learn.unwrap import encoder_of
from aniso.records import JsonValue
from aniso.registry import OBJECTIVES

VIEWS = ("train", "few_shot", "eval")


def require_learnable(split: Labelled, view: str) -> None:
    """Raise an error if a split's labels must not be learned from, or if there is no such view."""
    if split.role == "test":
        raise UsageError(
            "LEARN-TEST",
            f"{split.name} is for testing: its labels cannot be trained on",
            fix="task.train or task.val",
        )
    if view not in VIEWS:
        raise UsageError(
            "OBJECTIVE",
            f"there is no view '{printable(view)}'",
            expected=", ".join(VIEWS),
            fix="view='train'",
        )


@OBJECTIVES.register("cross-entropy")
@final
@dataclass(frozen=True)
class CrossEntropy(DataTerm):
    """The mean of -log p(label) over the images of a labelled split."""

    needs_labels = True

    split: Labelled
    view: str = "train"
    """train (crops of 90 % or more), few_shot (crops of 50 % or more, flipped at random) or eval."""

    def __post_init__(self) -> None:
        if not isinstance(self.split, Labelled) or not len(self.split):
            raise UsageError(
                "OBJECTIVE",
                "CrossEntropy needs a split with labels and at least one image",
                found=printable(self.split),
                fix="task.train, or shots of it",
            )
        require_learnable(self.split, self.view)

    @property
    def name(self) -> str:
        return self.split.name

    def identity(self) -> dict[str, JsonValue]:
        classes = self.split.classes.key
        return {"loss": "cross-entropy", "split": self.split.manifest, "classes": classes, "view": self.view}

    def views(self, model: nn.Module) -> tuple[View, ...]:
        view: View = getattr(encoder_of(model).transforms, self.view)
        return (view,)

    def loss(self, inputs: TermInputs) -> Tensor:
        assert inputs.labels is not None
        return functional.cross_entropy(inputs.logits[0], inputs.labels)
