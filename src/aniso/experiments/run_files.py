"""Names of the files that a run leaves in its directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from aniso.errors import InputError, printable
from aniso.prediction_files import META

if TYPE_CHECKING:
    from aniso.records import Record

SPEC = "spec.yaml"
RECORD = "record.json"
METRICS = "metrics.jsonl"
COEFFICIENTS = "coefficients.safetensors"
WEIGHTS = "weights.safetensors"
MERGED = "merged.safetensors"
HEAD = "head.safetensors"
ADAPTER = "adapter"
FAILURE = "failure.json"
COMPARISON = "comparison.json"
COMPARISON_ROWS = "comparison"
TENSORBOARD = "tensorboard"
WANDB = "wandb"
CLASSES = "classes.json"
PREDICTIONS = "predictions.csv"
PREDICTIONS_META = f"{PREDICTIONS}{META}"
ROUND = r"round-\d+"
"""Directories of rounds after the first."""


def round_directory(number: int) -> str:
    """Return the name of the directory of a round."""
    return f"round-{number}"


def file_of(path: Path, name: str) -> Path:
    """Return a file itself, or the file of that name in the directory of a run."""
    if not path.is_dir():
        return path
    if (path / name).exists():
        return path / name
    found = [own for own in (COEFFICIENTS, WEIGHTS, HEAD, ADAPTER, RECORD) if (path / own).exists()]
    raise InputError(
        "FILE-MISSING",
        f"'{printable(path)}' has no {name}",
        found=", ".join(found) or "no file of a run",
        fix=f"name the directory of a run that wrote {name}, or the file",
    )


def is_run(path: Path) -> bool:
    """True for the directory of a run; exported models have a record, too, and a card."""
    return (path / SPEC).is_file() or ((path / RECORD).is_file() and not (path / "README.md").is_file())


def run_file(ref: str | Path, name: str) -> str | Path:
    """Return the file or directory of that name in the directory of a run; other references as they are."""
    return file_of(Path(ref), name) if is_run(Path(ref)) else ref


def weights_of(ref: str) -> str:
    """Return the weights or the adapter that a run in a directory trained; other references as they are."""
    path = Path(ref)
    if not is_run(path):
        return ref
    return next((str(path / name) for name in (WEIGHTS, ADAPTER) if (path / name).exists()), ref)


def record_beside(file: Path) -> Record | None:
    """Return the record of the run that wrote a file, if it is in the same directory."""
    from aniso.record_files import read_record

    path = file.parent / RECORD
    return read_record(path) if path.is_file() else None
