"""What a model says of pictures without labels, and what can be told from that alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from aniso.classes import ClassList
from aniso.data import Unlabelled
from aniso.errors import printable
from aniso.learn.features import FeatureCache, features, passed
from aniso.learn.unwrap import encoder_of
from aniso.progress import ProgressCallback


@final
@dataclass(frozen=True, eq=False)
class Said:
    """For every picture the class it is said to be, and with what probability."""

    answers: Tensor
    sure: Tensor
    classes: ClassList

    @property
    def counts(self) -> dict[str, int]:
        found = torch.bincount(self.answers, minlength=len(self.classes)).tolist()
        return dict(zip(self.classes.names, found, strict=True))

    @property
    def largest(self) -> tuple[str, float]:
        """The class that is said most often, and of what share of the pictures."""
        name, count = max(self.counts.items(), key=lambda one: one[1])
        return name, count / len(self.answers)

    def since(self, before: Said) -> dict[str, Any]:
        """As plain data: how often both say the same, how sure each is, and how often each class is said."""
        return {
            "agreement": float((self.answers == before.answers).float().mean()),
            "confidence": [float(before.sure.mean()), float(self.sure.mean())],
            "counts": self.counts,
        }

    def doubts(self, before: Said) -> tuple[str, ...]:
        """A warning if one class has swallowed the others, more than it had before."""
        name, share = self.largest
        even = 1 / len(self.classes)
        earlier = before.counts[name] / len(before.answers)
        if share <= 0.5 + even / 2 or share <= earlier:
            return ()
        return (
            f"warning: {share:.0%} of the answers are '{printable(name, 40)}' ({earlier:.0%} before): what "
            "was learned has probably collapsed; try a lower learning rate, or --objective fixmatch",
        )


@torch.no_grad()
def said(
    model: nn.Module,
    split: Unlabelled,
    *,
    workers: int = 0,
    cache: FeatureCache | None = None,
    progress: ProgressCallback | None = None,
) -> Said:
    """Answers by class weights from prompts; features are kept, or found, in a cache if there is one."""
    head = encoder_of(model).class_weights(split.classes, progress=progress)
    answers, sure = [], []
    for piece in _features(model, split, workers, cache):
        best = head.logits(piece).softmax(-1).max(-1)
        answers.append(best.indices.cpu())
        sure.append(best.values.cpu())
        if progress:
            progress(f"answers on {split.name}", sum(map(len, answers)), len(split))
    return Said(torch.cat(answers), torch.cat(sure), split.classes)


def _features(
    model: nn.Module, split: Unlabelled, workers: int, cache: FeatureCache | None
) -> Iterable[Tensor]:
    if cache is None:
        return passed(model, split, workers=workers)
    return [features(model, split, workers=workers, cache=cache)[0]]
