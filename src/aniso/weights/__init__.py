"""Named tensors on disk: read lazily without running anything, written atomically, hashed."""

from aniso.weights.memory import TensorMap
from aniso.weights.open import HasWeights, Ref, open_weights
from aniso.weights.peft_lora import LoraUpdate, PeftAdapter
from aniso.weights.safetensors import (
    SafetensorsFile,
    SafetensorsWriter,
    header_room,
    save_safetensors,
)
from aniso.weights.source import PickleReport, Renamed, SourceInfo, TensorInfo, WeightSource

__all__ = [
    "open_weights",
    "Ref",
    "HasWeights",
    "WeightSource",
    "TensorInfo",
    "SourceInfo",
    "PickleReport",
    "TensorMap",
    "Renamed",
    "PeftAdapter",
    "LoraUpdate",
    "SafetensorsFile",
    "SafetensorsWriter",
    "header_room",
    "save_safetensors",
]
