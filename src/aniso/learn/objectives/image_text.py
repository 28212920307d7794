"""The contrastive loss between images and their captions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from aniso.data import Labelled
from aniso.data.batches import View
from aniso.errors import UsageError, printable
from aniso.learn.heads import Classifier, Head
from aniso.learn.objectives.cross_entropy import require_learnable
from aniso.learn.objectives.objective import DataTerm
from aniso.learn.objectives.term_inputs import TermInputs
from aniso.learn.unwrap import encoder_of, require_items
from aniso.models.dual_encoder import SCALE
from aniso.records import JsonValue
from aniso.registry import OBJECTIVES
from aniso.weights.fingerprint import tensor_hash


@OBJECTIVES.register("image-text")
@final
@dataclass(frozen=True, eq=False)
class ImageText(DataTerm):
    """CLIP's loss: an image should be nearer to its caption than to the other captions of the batch.

    The mean of two cross-entropies over cosines times the model's logit scale: of every image over the
    distinct captions of the batch, and of every caption over the images, of which several may have it.
    """

    needs_labels = True
    whole_batch = True

    split: Labelled
    """Images whose classes are captions, as ``aniso.data.captions.caption_split`` makes them."""
    captions: Tensor
    """Features of every caption, normalised; a text tower that is frozen computes them once."""
    view: str = "few_shot"

    def __post_init__(self) -> None:
        require_learnable(self.split, self.view)
        if self.captions.ndim != 2 or len(self.captions) != len(self.split.classes):
            raise UsageError(
                "OBJECTIVE",
                "ImageText needs a row of features for every caption",
                found=printable(tuple(self.captions.shape)),
                expected=f"{len(self.split.classes)} rows",
                fix="model.class_weights(split.classes).weight, normalised",
            )

    @property
    def name(self) -> str:
        return self.split.name

    def identity(self) -> dict[str, JsonValue]:
        own = {"split": self.split.manifest, "captions": tensor_hash(self.captions), "view": self.view}
        return {"loss": "image-text", **own}

    def views(self, model: nn.Module) -> tuple[View, ...]:
        view: View = getattr(encoder_of(model).transforms, self.view)
        return (view,)

    def classifier(self, model: nn.Module, own: Head | None = None) -> Classifier | None:
        encoder = encoder_of(model)
        require_items(encoder, self.split)
        return _ScaledFeatures(dict(encoder.named_parameters())["logit_scale"])

    def loss(self, inputs: TermInputs) -> Tensor:
        assert inputs.labels is not None
        rows, own = torch.unique(inputs.labels.cpu(), return_inverse=True)
        texts = self.captions[rows].to(inputs.logits[0])
        own = own.to(texts.device)
        logits = inputs.logits[0] @ texts.T
        shares = functional.one_hot(own, len(rows)).to(logits.dtype)
        shares = shares / shares.sum(0)
        of_captions = -(logits.log_softmax(0) * shares).sum(0).mean()
        return (functional.cross_entropy(logits, own) + of_captions) / 2


@final
@dataclass(frozen=True, eq=False)
class _ScaledFeatures:
    """Normalised features times the model's logit scale, which is trained, too."""

    log_scale: Tensor
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def logits(self, features: Tensor) -> Tensor:
        scale = self.log_scale.clamp(max=math.log(SCALE)).exp()
        return scale * functional.normalize(features, dim=-1)


def caption_features(weight: Tensor) -> Tensor:
    """Return class weights of captions as normalised features."""
    return functional.normalize(weight.detach().to(torch.float32), dim=-1)
