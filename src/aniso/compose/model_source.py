"""A model's weights as a source."""

from __future__ import annotations

from typing import Any

from torch import nn

from aniso.weights import HasWeights, TensorMap, WeightSource
from aniso.weights.directory import transformers_config


def source_of(model: nn.Module) -> WeightSource:
    """Return a model's weights as a source, with its configuration if it is a Hugging Face model."""
    if isinstance(model, HasWeights):
        return model.weight_source()
    settings: Any = getattr(getattr(model, "config", None), "to_dict", dict)()
    config = transformers_config(settings)[0] if isinstance(settings, dict) and settings else None
    return TensorMap(model.state_dict(), type(model).__name__, config=config)
