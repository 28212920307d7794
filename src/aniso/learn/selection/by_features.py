"""Whole vectors of tasks whose pictures look, to the base, most like the target's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from aniso.data import Split
from aniso.errors import InputError
from aniso.learn.features import features
from aniso.learn.selection.strategy import Budget, Scores, Strategy
from aniso.models import Encoder
from aniso.progress import ProgressCallback
from aniso.vectors import Bank


def mean_feature(
    encoder: Encoder, split: Split, *, workers: int = 0, progress: ProgressCallback | None = None
) -> Tensor:
    """Of all its pictures as they are."""
    return features(encoder, split, workers=workers, progress=progress)[0].mean(0)


@final
class FeatureSimilarity(Strategy):
    """By the cosine of mean features. Those of the vectors' own tasks are kept in the bank."""

    kind = "features"
    whole = True

    def __init__(
        self,
        encoder: Encoder,
        split: Split,
        budget: int | str | Budget,
        *,
        sources: Mapping[str, Tensor] | None = None,
        workers: int = 0,
        progress: ProgressCallback | None = None,
    ) -> None:
        """``sources`` are mean features by vector, if they are not to be the bank's own."""
        self.budget = Budget.of(budget)
        self.progress = progress
        self._encoder = encoder
        self._split = split
        self._sources = sources
        self._workers = workers

    def scores(self, bank: Bank) -> Scores:
        bank.over(self._encoder.weight_source())  # another model's features would be compared with these
        known = bank.features if self._sources is None else self._sources
        missing = [name for name in bank if name not in known]
        if missing:
            raise InputError(
                "BANK-FEATURES",
                f"nothing says what the pictures of {len(missing)} vectors look like",
                found=", ".join(missing[:8]),
                fix="aniso bank features BANK --model MODEL --task NAME=TASK …, or another --select",
            )
        own = mean_feature(self._encoder, self._split, workers=self._workers, progress=self.progress)
        other = [n for n in bank if known[n].shape != own.shape]
        if other:
            raise InputError(
                "BANK-FEATURES",
                f"the mean feature of vector '{other[0]}' is of another model",
                expected=f"{len(own)} numbers",
                found=f"{known[other[0]].numel()}",
                fix="aniso bank features BANK --model MODEL, with this model",
            )
        near = {n: float(functional.cosine_similarity(own, known[n].to(own), dim=0)) for n in bank}
        odd = [name for name, value in near.items() if not torch.isfinite(torch.tensor(value))]
        if odd:
            raise InputError(
                "BANK-FEATURES",
                f"the mean feature of vector '{odd[0]}' cannot be compared",
                fix="aniso bank features, once more",
            )
        # from 0 to 2, shared by a vector's blocks, so that their sum is the vector's
        return {n: {b.name: (1 + near[n]) / len(bank[n].blocks) for b in bank[n].blocks} for n in bank}
