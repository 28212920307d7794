"""Mean features of the vectors' tasks, computed with the base and stored with the bank.

With them vectors can be selected by the similarity of their tasks to another one, without their images.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from aniso.errors import InputError, UsageError, printable
from aniso.vectors._files.manifest import FEATURE_FILE, FileRecord
from aniso.weights import SafetensorsFile, save_safetensors
from aniso.weights.files import RawFile

_FORMAT = "aniso mean features"


def write_features(
    directory: Path, features: Mapping[str, Tensor], current: FileRecord | None = None
) -> FileRecord:
    """Write one row for each vector, all of the same width; ``current`` is the manifest's record so far."""
    for name, feature in features.items():
        if feature.ndim != 1 or not feature.numel() or not bool(torch.isfinite(feature.float()).all()):
            raise UsageError(
                "BANK-FEATURES",
                f"the feature of '{printable(name)}' is not a mean feature",
                found=f"shape {tuple(feature.shape)}",
                expected="one row of finite numbers",
                fix="aniso.selection.mean_feature(model, split)",
            )
    widths = {feature.numel() for feature in features.values()}
    if len(widths) > 1:
        raise UsageError(
            "BANK-FEATURES",
            f"the features have {len(widths)} different widths",
            found=", ".join(map(str, sorted(widths))),
            fix="compute all of them with the bank's base",
        )
    rows = {name: feature.detach().cpu().float().contiguous() for name, feature in features.items()}
    match = FEATURE_FILE.fullmatch(current.file) if current else None
    path = directory / f"features-{int(match[1]) + 1 if match else 0:03d}.safetensors"
    # the current file stays until the manifest names the new one; a file of the new name was never in use
    sha256 = save_safetensors(path, rows, {"format": _FORMAT}, overwrite=True)
    return FileRecord(file=path.name, sha256=sha256, nbytes=path.stat().st_size)


def read_features(directory: Path, record: FileRecord) -> dict[str, Tensor]:
    """Read all mean features of a bank; raises if the file does not match its sha256."""
    path = directory / record.file
    raw = RawFile(path)
    if raw.sha256() != record.sha256:
        raise InputError(
            "FILE-HASH",
            f"'{printable(path)}': content hash differs from the recorded one",
            expected=record.sha256,
            fix="compute them again with: aniso bank features",
        )
    file = SafetensorsFile(raw)
    return {name: file.read(name) for name in file.tensors}
