"""A merged vector at every scale: one pass over the items serves all folds and all ways to choose a scale."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from aniso.data import Unlabelled
from aniso.experiments.methods.merge_rules import MergeMethod
from aniso.experiments.session import Session
from aniso.learn import predict_unlabelled


@final
@dataclass(frozen=True)
class ScaleTable:
    """What a merged vector predicts at every scale, by task: a tensor scales x items."""

    scales: tuple[float, ...]
    predictions: Mapping[str, Tensor]
    merging_seconds: float
    scale_seconds: float
    """Of one scale, on all items."""

    def at(self, scale: float) -> int:
        """Return the row of a scale."""
        return self.scales.index(scale)


def scale_table(
    session: Session, method: MergeMethod, splits: Mapping[str, Unlabelled], also: Sequence[float] = ()
) -> ScaleTable:
    """Merge, and predict every item at the scales that the method searches, and at those of ``also``."""
    begun = time.monotonic()
    composition, unit = method.composition(session)
    merged = time.monotonic()
    scales = tuple(dict.fromkeys((*method.points, *also)))
    found: dict[str, list[Tensor]] = {name: [] for name in splits}
    progress = session.options.progress
    for number, scale in enumerate(scales, 1):
        with torch.no_grad():
            composition.values.fill_(unit * scale)
        for name, split in splits.items():
            predicted = predict_unlabelled(composition, split, workers=session.options.workers)
            found[name].append(predicted.labels)
        if progress is not None:
            progress(f"scales of {method.name}", number, len(scales))
    spent = (time.monotonic() - merged) / len(scales)
    return ScaleTable(
        scales, {name: torch.stack(rows) for name, rows in found.items()}, merged - begun, spent
    )
