"""The record of a run: what was asked, what came out, from what, with what."""

from __future__ import annotations

import json
import platform
import re
import resource
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path, PurePath
from typing import Any

import torch

from aniso.coefficient_matrix import LARGEST, CoefficientMatrix
from aniso.compose import Coefficients
from aniso.experiments.result import RunResult
from aniso.experiments.settings import Setting
from aniso.json_value import JsonObject
from aniso.learn.analysis import by_depth, by_kind, five_numbers
from aniso.record_files import record_text
from aniso.records import SCHEMA, Record, rounded
from aniso.weights.atomic import write_text


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self._begun, 2)


def record(
    setting: Setting, outcome: RunResult, clock: Clock, *, experiment: str = "", label: str = ""
) -> Record:
    """The record of a run that has just ended; what it says of itself is checked here."""
    content = {
        "schema": SCHEMA,
        "status": "ok",
        "id": setting.id,
        "experiment": experiment or setting.spec()["setting"],
        "label": label or setting.method.name,
        "spec": _public(setting.spec(), outcome.names),
        "metrics": outcome.metrics.content(),
        "coefficients": _summary(outcome.coefficients),
        "inputs": outcome.inputs.content(),
        "versions": {
            "aniso": version("aniso"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "environment": {"device": outcome.device, "threads": torch.get_num_threads()},
        "seconds": clock.seconds,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "notes": list(outcome.notes),
    }
    return Record.model_validate_json(json.dumps(rounded(content)))


def _summary(coefficients: Coefficients | None) -> JsonObject | None:
    """Return the coefficients as a matrix, and their five numbers by kind of block and by layer."""
    if coefficients is None:
        return None
    groups = {"kind": by_kind(coefficients), "depth": by_depth(coefficients)}
    numbers = {by: {name: five_numbers(v) for name, v in found.items()} for by, found in groups.items()}
    matrix = coefficient_matrix(coefficients)
    omitted = "" if matrix else f"{len(coefficients):,} coefficients take more than {LARGEST // 1000} kB"
    stored = {"matrix": matrix.model_dump(mode="json", exclude_defaults=True)} if matrix else {}
    out: JsonObject = {"sha256": coefficients.content_hash}
    for part in (numbers, stored, {"omitted": omitted} if omitted else {}):
        out.update(part)
    return out


def coefficient_matrix(coefficients: Coefficients) -> CoefficientMatrix | None:
    """Return the coefficients as records hold them; None if there are too many cells."""
    most = max((entry.partition.count for entry in coefficients.index.blocks), default=1)
    note = "one coefficient per vector, the same in all blocks" if coefficients.partition.is_shared else ""
    if most > 1:
        note = f"means over the parts of a block, up to {most:,} ({coefficients.partition})"
    return CoefficientMatrix.of(
        coefficients.vectors, coefficients.block_labels, coefficients.matrix().tolist(), note
    )


def _public(value: Any, names: Mapping[str, str]) -> Any:
    """Tasks by name, and of files their names alone: where things lie on a disk is nobody's business."""
    if isinstance(value, dict):
        return {key: _public(item, names) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_public(item, names) for item in value]
    if isinstance(value, str):
        return names.get(value, PurePath(value).name if "/" in value and value[0] in "/~." else value)
    return value


def write(path: Path, made: Record, *, overwrite: bool = False) -> None:
    """Write one record to a file of its own."""
    write_text(path, record_text(made), overwrite=overwrite)


def file_name(setting: Setting, label: str) -> str:
    """Readable, and unique by its end."""
    spec = setting.spec()
    words = [label or setting.method.name]
    words += [str(spec[key]) for key in ("task", "images", "target") if spec.get(key) is not None]
    words += [f"{key}-{spec[key]}" for key in ("shots", "fraction", "seed") if key in spec]
    return f"{re.sub(r'[^A-Za-z0-9.+]+', '-', ' '.join(words)).strip('-')}-{setting.id[:8]}.json"
