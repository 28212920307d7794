"""Class weights in a file of a model's directory, for encoders that can no longer make them themselves.

The class weights of a sentence encoder are made by its base. A tuned or composed encoder is written without
the base, and would make other ones: predictions would not be those that were measured.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from pydantic import RootModel, ValidationError
from torch import Tensor

from aniso.classes import ClassList
from aniso.errors import InputError, printable
from aniso.models.head import ClassWeights
from aniso.weights import SafetensorsFile, save_safetensors
from aniso.weights.files import RawFile
from aniso.weights.fingerprint import content_checksum, require_checksum

CLASS_WEIGHTS = "class_weights.safetensors"


def class_weights_file(made: Iterable[tuple[ClassList, ClassWeights]]) -> bytes:
    """Return the content of a file of class weights, found again by names, prompts and descriptions."""
    pairs = list(made)
    tensors = {classes.key: weights.weight.detach().cpu().contiguous() for classes, weights in pairs}
    index = json.dumps({classes.key: classes.names for classes, _ in pairs}, sort_keys=True)
    metadata = {"index": index, "checksum": content_checksum(index, tensors)}
    with tempfile.TemporaryDirectory() as place:
        save_safetensors(Path(place) / CLASS_WEIGHTS, tensors, metadata)
        return (Path(place) / CLASS_WEIGHTS).read_bytes()


def read_class_weights(directory: Path) -> Mapping[str, Tensor]:
    """Return the class weights in a model's directory by ``ClassList.key``; empty if it has no such file."""
    path = directory / CLASS_WEIGHTS
    if not path.is_file():
        return {}
    file = SafetensorsFile(RawFile(path))
    tensors = {name: file.read(name) for name in file.tensors}
    require_checksum(file.metadata, tensors, file.label)
    try:
        names = _Index.model_validate_json(file.metadata.get("index", "")).root
    except ValidationError:
        names = {}
    rows = {key: len(t) for key, t in tensors.items() if t.dim() == 2 and bool(torch.isfinite(t).all())}
    if not tensors or rows != {key: len(own) for key, own in names.items()}:
        raise InputError(
            "HEAD-FILE",
            f"'{printable(path)}' holds no class weights",
            expected="a matrix of finite numbers for every list of classes, with a row for each class",
            fix="bake the model again, or remove the file to make class weights with this encoder",
        )
    return tensors


class _Index(RootModel[dict[str, list[str]]]):
    """Names of the classes by ``ClassList.key``."""
