"""Checks of the place that a bank is to be written to."""

from __future__ import annotations

from pathlib import Path

from aniso.vectors._files.manifest import BANK_FILES
from aniso.vectors.packing import Storage
from aniso.weights.atomic import require_free


def require_writable(path: str | Path, *, storage: str = "fp32", overwrite: bool = False) -> None:
    """Raise the error that ``Bank.save`` would raise for this path, before an hour of computation."""
    Storage.of(storage)
    require_free(Path(path), overwrite=overwrite, ours=BANK_FILES)
