"""Image encoders, of either CLIP library or any classifier, with class weights and views; language models."""

from aniso.models.cache import WeightsCache
from aniso.models.encoder import Encoder
from aniso.models.head import ClassWeights
from aniso.models.language_model import LanguageModel, load_language_model
from aniso.models.load import (
    base_source,
    base_weights,
    list_models,
    load_composed,
    load_model,
    mini_directory,
)
from aniso.models.wrapped import Wrapped

__all__ = [
    "load_model",
    "load_composed",
    "load_language_model",
    "Encoder",
    "LanguageModel",
    "Wrapped",
    "ClassWeights",
    "WeightsCache",
    "list_models",
    "mini_directory",
    "base_weights",
    "base_source",
]
