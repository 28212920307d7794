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

from aniso.classes import ClassList
from aniso.errors import InputError, printable
from aniso.models.head import ClassWeights
from aniso.weights import SafetensorsFile, save_safetensors
from aniso.weights.files import RawFile
from aniso.weights.fingerprint import content_checksum, require_checksum

CLASS_WEIGHTS = "class_weights.safetensors"
_LARGEST = 64 << 20  # bytes
_TOLERANCE = 1e-3


def class_weights_file(made: Iterable[tuple[ClassList, ClassWeights]]) -> bytes:
    """Return the content of a file of class weights, found again by names, prompts and descriptions."""
    pairs = list(made)
    tensors = {classes.key: weights.weight.detach().cpu().contiguous() for classes, weights in pairs}
    index = json.dumps({classes.key: classes.names for classes, _ in pairs}, sort_keys=True)
    metadata = {"index": index, "checksum": content_checksum(index, tensors)}
    with tempfile.TemporaryDirectory() as place:
        save_safetensors(Path(place) / CLASS_WEIGHTS, tensors, metadata)
        return (Path(place) / CLASS_WEIGHTS).read_bytes()


def read_class_weights(directory: Path, width: int, scale: float) -> Mapping[str, ClassWeights]:
    """Return the class weights in a model's directory by ``ClassList.key``; empty if it has no such file.

    ``width`` is that of the encoder's features, and ``scale`` the length of every row.
    """
    path = directory / CLASS_WEIGHTS
    if not path.is_file():
        return {}
    file = SafetensorsFile(RawFile(path))
    if file.nbytes > _LARGEST:
        raise _no_class_weights(path, f"{file.nbytes:,} bytes", f"at most {_LARGEST:,}")
    tensors = {name: file.read(name) for name in file.tensors}
    require_checksum(file.metadata, tensors, file.label)
    try:
        names = _Index.model_validate_json(file.metadata.get("index", "")).root
    except ValidationError:
        names = {}
    if not tensors or set(tensors) != set(names):
        raise _no_class_weights(path, f"{len(tensors)} matrices, names for {len(names)}", "names for each")
    for key, rows in tensors.items():
        if rows.dtype != torch.float32 or rows.shape != (len(names[key]), width):
            found = f"{rows.dtype} {tuple(rows.shape)}"
            raise _no_class_weights(path, found, f"torch.float32 {(len(names[key]), width)}")
        lengths = torch.linalg.vector_norm(rows.double(), dim=1)
        if not bool(((lengths / scale - 1).abs() < _TOLERANCE).all()):  # also for NaN
            found = f"rows of length {float(lengths.min()):g} to {float(lengths.max()):g}"
            raise _no_class_weights(path, found, f"rows of length {scale:g}")
    return {key: ClassWeights(tuple(names[key]), rows) for key, rows in tensors.items()}


def require_names(stored: ClassWeights, names: tuple[str, ...], model: str) -> None:
    """Raise unless stored class weights are of these classes, in this order."""
    if stored.names != names:
        raise InputError(
            "HEAD-FILE",
            f"{CLASS_WEIGHTS} of '{printable(model)}' has class weights of other classes under these prompts",
            found=printable(", ".join(stored.names[:8])),
            expected=printable(", ".join(names[:8])),
            fix=f"bake the model again, or remove {CLASS_WEIGHTS} to make class weights with this encoder",
        )


def _no_class_weights(path: Path, found: str, expected: str) -> InputError:
    return InputError(
        "HEAD-FILE",
        f"'{printable(path)}' holds no class weights of this encoder",
        found=found,
        expected=expected,
        fix="bake the model again, or remove the file to make class weights with this encoder",
    )


class _Index(RootModel[dict[str, list[str]]]):
    """Names of the classes by ``ClassList.key``."""
