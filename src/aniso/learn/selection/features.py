"""Selection by the similarity of tasks' images to the target's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self, final

import torch
from torch import Tensor
from torch.nn import functional

from aniso.data import Split, TextDataset
from aniso.errors import InputError, UsageError
from aniso.learn.features import features
from aniso.learn.selection.selection_rule import Scores, SelectionInputs, SelectionRule
from aniso.models import Encoder
from aniso.progress import ProgressCallback
from aniso.registry import SELECTION_RULES
from aniso.sizes import Budget
from aniso.vectors import Bank


def mean_feature(
    encoder: Encoder, split: Split, *, workers: int = 0, progress: ProgressCallback | None = None
) -> Tensor:
    """Return the mean feature of a split's images, without augmentation."""
    return features(encoder, split, workers=workers, progress=progress)[0].mean(0)


@SELECTION_RULES.register("features")
@final
class FeatureSimilarity(SelectionRule):
    """Select whole vectors by the cosine of the tasks' mean features, which are stored in the bank."""

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
        """``sources`` are mean features by vector (default: the bank's own)."""
        self.budget = Budget.of(budget)
        self.progress = progress
        self._encoder = encoder
        self._split = split
        self._sources = sources
        self._workers = workers

    @classmethod
    def from_inputs(cls, inputs: SelectionInputs) -> Self:
        assert inputs.objective is not None
        split = inputs.objective.data_terms[0][1].split
        if not isinstance(inputs.model, Encoder) or isinstance(split, TextDataset):
            raise UsageError(
                "USAGE", "selection rule 'features' compares images, not texts", fix="--select gradient"
            )
        return cls(inputs.model, split, inputs.budget, workers=inputs.workers, progress=inputs.progress)

    def scores(self, bank: Bank) -> Scores:
        bank.over(self._encoder.weight_source())  # another model's features would be compared with these
        known = bank.features if self._sources is None else self._sources
        missing = [name for name in bank if name not in known]
        if missing:
            raise InputError(
                "BANK-FEATURES",
                f"the bank has no mean features of {len(missing)} vectors' tasks",
                found=", ".join(missing[:8]),
                fix="aniso bank features BANK --model MODEL --task NAME=TASK …, or another --select",
            )
        own = mean_feature(self._encoder, self._split, workers=self._workers, progress=self.progress)
        other = [n for n in bank if known[n].shape != own.shape]
        if other:
            raise InputError(
                "BANK-FEATURES",
                f"the mean feature of vector '{other[0]}' was made with another model",
                expected=f"{len(own)} numbers",
                found=f"{known[other[0]].numel()}",
                fix="aniso bank features BANK --model MODEL, with this model",
            )
        near = {n: float(functional.cosine_similarity(own, known[n].to(own), dim=0)) for n in bank}
        odd = [name for name, value in near.items() if not torch.isfinite(torch.tensor(value))]
        if odd:
            raise InputError(
                "BANK-FEATURES",
                f"the mean feature of vector '{odd[0]}' is zero, NaN or infinite",
                fix="run aniso bank features again",
            )
        # from 0 to 2, shared by a vector's blocks, so that their sum is the vector's
        return {n: {b.name: (1 + near[n]) / len(bank[n].blocks) for b in bank[n].blocks} for n in bank}
