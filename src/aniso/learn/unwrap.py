"""The model behind a composition, for what is not its weights' business."""

from __future__ import annotations

from torch import nn

from aniso.compose import Composition, FactorModel
from aniso.data import Split, TextDataset
from aniso.errors import UsageError
from aniso.learn.heads import Classifier, Head, RestrictedHead
from aniso.models import Encoder, LanguageModel, Wrapped


def encoder_of(model: nn.Module) -> Encoder:
    """The encoder behind a model or a composition."""
    inner = _inside(model)
    if isinstance(inner, Encoder):
        return inner
    raise _is_no(inner, "encoder", "load_model")


def language_model_of(model: nn.Module) -> LanguageModel:
    """The language model behind a model or a composition."""
    inner = _inside(model)
    if isinstance(inner, LanguageModel):
        return inner
    raise _is_no(inner, "language model", "load_language_model")


def _is_no(inner: nn.Module, what: str, maker: str) -> UsageError:
    return UsageError(
        "MODEL-NAME",
        f"a {type(inner).__name__} is no {what}",
        expected=f"a model from {maker}, or a composition of one",
        fix=f"aniso.{maker}(...)",
    )


def model_of(model: nn.Module) -> Wrapped:
    """Whichever of the two is behind it."""
    inner = _inside(model)
    return inner if isinstance(inner, LanguageModel) else encoder_of(model)


def head_for(model: nn.Module, split: Split | TextDataset, own: Head | None = None) -> Classifier | None:
    """What answers: a head of its own, or class weights from prompts.

    Nothing does for texts, of which language models say it all themselves.
    """
    if isinstance(split, TextDataset):
        return None
    if own is None:
        return encoder_of(model).class_weights(split.classes)
    return own if own.names == split.classes.names else RestrictedHead(own, split.classes.names)


def _inside(model: nn.Module) -> nn.Module:
    inner = model.model if isinstance(model, Composition) else getattr(model, "_module", model)
    return inner.model if isinstance(inner, FactorModel) else inner
