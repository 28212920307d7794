"""One weight file of any format, recognised by its content."""

from __future__ import annotations

from pathlib import Path

from aniso.weights.files import RawFile, refuse_unknown
from aniso.weights.safetensors import SafetensorsFile, looks_like_safetensors
from aniso.weights.source import WeightSource
from aniso.weights.torch_file import TorchFile, looks_like_torch


def open_file(path: Path, entry: str = "", *, tensors_only: bool = False) -> WeightSource:
    """Open one file; its format is recognised by content, not by suffix."""
    file = RawFile(path)
    head = file.head(16)
    if file.size >= 8 and looks_like_safetensors(head):
        return SafetensorsFile(file)
    known = refuse_unknown(file)
    if known.code != "FILE-FORMAT" or not looks_like_torch(head):
        raise known
    return TorchFile(file, entry, tensors_only=tensors_only)
