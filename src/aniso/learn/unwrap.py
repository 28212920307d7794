"""The encoder or language model inside a composition, and the classifier for a split."""

from __future__ import annotations

from torch import nn

from aniso.compose import Composition, FactorModel
from aniso.data import Split, TextDataset
from aniso.errors import InputError, UsageError, printable
from aniso.learn.heads import Classifier, Head, RestrictedHead
from aniso.models import Encoder, LanguageModel, Wrapped


def encoder_of(model: nn.Module) -> Encoder:
    """Return the encoder inside a model or a composition."""
    inner = _unwrap(model)
    if isinstance(inner, Encoder):
        return inner
    raise _wrong_model(inner, "encoder", "load_model")


def language_model_of(model: nn.Module) -> LanguageModel:
    """Return the language model inside a model or a composition."""
    inner = _unwrap(model)
    if isinstance(inner, LanguageModel):
        return inner
    raise _wrong_model(inner, "language model", "load_language_model")


def _wrong_model(inner: nn.Module, what: str, maker: str) -> UsageError:
    return UsageError(
        "MODEL-NAME",
        f"a {type(inner).__name__} is not a{'n' if what[0] in 'aeiou' else ''} {what}",
        expected=f"a model from {maker}, or a composition of one",
        fix=f"aniso.{maker}(...)",
    )


def model_of(model: nn.Module) -> Wrapped:
    """Return the language model or encoder inside a model or a composition."""
    inner = _unwrap(model)
    return inner if isinstance(inner, LanguageModel) else encoder_of(model)


def head_for(model: nn.Module, split: Split | TextDataset, own: Head | None = None) -> Classifier | None:
    """Return the classifier for a split: ``own``, or class weights from prompts.

    None for text, where the language model's own head is used.
    """
    if isinstance(split, TextDataset):
        return None
    require_items(encoder_of(model), split)
    if own is None:
        return encoder_of(model).class_weights(split.classes)
    return own if own.names == split.classes.names else RestrictedHead(own, split.classes.names)


def require_items(encoder: Encoder, split: Split) -> None:
    """Raise if a split holds other items than the encoder takes."""
    if split.item_kind != encoder.transforms.kind:
        raise InputError(
            "DATA-ITEM",
            f"'{printable(encoder.name)}' does not take the items of {printable(split.name)}",
            found=split.item_kind,
            expected=encoder.transforms.kind,
            fix="use a sentence encoder for texts, and a CLIP or an image classifier for images",
        )


def _unwrap(model: nn.Module) -> nn.Module:
    inner = model.model if isinstance(model, Composition) else getattr(model, "_module", model)
    return inner.model if isinstance(inner, FactorModel) else inner
