"""Cross-entropy with labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn
from torch.nn import functional

from aniso.data import Labelled
from aniso.data.batches import View
from aniso.errors import UsageError, printable
from aniso.learn.objectives.objective import DataTerm, Seen
from aniso.learn.unwrap import encoder_of

VIEWS = ("train", "few_shot", "eval")


@final
@dataclass(frozen=True)
class CrossEntropy(DataTerm):
    """The mean of -log p(label) over a split's pictures."""

    split: Labelled
    view: str = "train"
    """train (a crop of nine tenths or more), few_shot (a crop of half or more, mirrored or not) or eval."""

    def __post_init__(self) -> None:
        if not isinstance(self.split, Labelled) or not len(self.split):
            raise UsageError(
                "OBJECTIVE",
                "cross-entropy needs a split with labels and at least one picture",
                found=printable(self.split),
                fix="task.train, or shots of it",
            )
        if self.split.role == "test":
            raise UsageError(
                "LEARN-TEST",
                f"{self.split.name} is for testing: nothing is learned from its labels",
                fix="task.train or task.val",
            )
        if self.view not in VIEWS:
            raise UsageError(
                "OBJECTIVE",
                f"there is no view '{printable(self.view)}'",
                expected=", ".join(VIEWS),
                fix="view='train'",
            )

    @property
    def name(self) -> str:
        return self.split.name

    def identity(self) -> dict[str, Any]:
        classes = self.split.classes.key
        return {"loss": "cross-entropy", "split": self.split.manifest, "classes": classes, "view": self.view}

    def views(self, model: nn.Module) -> tuple[View, ...]:
        view: View = getattr(encoder_of(model).transforms, self.view)
        return (view,)

    def loss(self, seen: Seen) -> Tensor:
        assert seen.labels is not None
        return functional.cross_entropy(seen.logits[0], seen.labels)
