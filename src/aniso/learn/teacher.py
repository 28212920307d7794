"""Teachers: fine-tuned models whose outputs on items without labels another model learns from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self, final

import torch
from torch import Tensor, nn

from aniso.compose import Composition, Partition, Runtime
from aniso.data import Unlabelled
from aniso.learn.features import FeatureCache, feature_identity, feature_key, features, iterate_features
from aniso.learn.heads import Classifier
from aniso.progress import ProgressCallback
from aniso.records import JsonValue
from aniso.vectors import Bank
from aniso.weights.fingerprint import combined_hash


@final
@dataclass(frozen=True, eq=False)
class Teacher:
    """The base plus one vector of a bank at coefficient 1, as the vector's task was fine-tuned::

        teacher = Teacher.of(encoder, bank, "mnist")
        Distil(task.val.unlabelled(), teacher)

    The model is composed when its outputs are computed and dropped afterwards, so that any number of teachers
    needs the memory of one. Features are cached on disk under a hash of base, vector, items and transforms.
    """

    vector: str
    compose: Callable[[], Composition]
    """Makes the model: the base with this vector at coefficient 1."""
    cache: FeatureCache = field(default_factory=FeatureCache.default)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        bank: Bank,
        vector: str,
        *,
        runtime: Runtime | None = None,
        cache: FeatureCache | None = None,
    ) -> Self:
        """Return the teacher for a vector of a bank over ``model``; an unknown vector is an error."""
        own = bank.only(vector)
        return cls(vector, lambda: with_vector(model, own, runtime), cache or FeatureCache.default())

    def identity(self) -> dict[str, JsonValue]:
        """Everything the outputs depend on beside the items, as JSON data."""
        return {"vector": self.vector, **feature_identity(self.compose())}

    def features(
        self,
        split: Unlabelled,
        *,
        batch_size: int = 256,
        workers: int = 0,
        progress: ProgressCallback | None = None,
    ) -> Tensor:
        """Return the features of every item as a tensor items x width, from the cache if they are there."""
        model = self.compose()
        # rounding depends on the size of batches: a resumed run must read the very bits it began with
        key = combined_hash({"features": feature_key(model, split), "batch": str(batch_size)})
        found = None if self.cache.directory is None else self.cache.get(key)
        if found is None:
            found = features(model, split, batch_size=batch_size, workers=workers, progress=progress)[0]
            self.cache.put(key, found)
        return found


def with_vector(model: nn.Module, bank: Bank, runtime: Runtime | None = None) -> Composition:
    """Return the base plus the vectors of a bank, each at coefficient 1."""
    composition = Composition(model, bank, Partition.whole(), runtime=runtime)
    with torch.no_grad():
        composition.values.fill_(1.0)
    return composition


@torch.no_grad()
def agreement(
    model: nn.Module,
    split: Unlabelled,
    head: Classifier,
    labels: Tensor,
    *,
    batch_size: int = 256,
    workers: int = 0,
    progress: ProgressCallback | None = None,
) -> float:
    """Return the share of a split's items that a model predicts as ``labels``, those of a teacher."""
    predicted: list[Tensor] = []
    for piece in iterate_features(model, split, batch_size=batch_size, workers=workers):
        predicted.append(head.logits(piece.float()).argmax(-1).cpu())
        if progress:
            progress(f"agreement on {split.name}", sum(map(len, predicted)), len(split))
    return float((torch.cat(predicted) == labels).double().mean())
