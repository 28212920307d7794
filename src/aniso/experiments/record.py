"""One JSON file for each cell: what was asked, what came out, from what, with what."""

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

from aniso.experiments.outcome import Outcome
from aniso.experiments.scores import summary
from aniso.experiments.settings import BaseSetting
from aniso.weights.atomic import write_text

SCHEMA = 1


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self._begun, 2)


def record(
    setting: BaseSetting, outcome: Outcome, clock: Clock, *, experiment: str = "", label: str = ""
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "status": "ok",
        "id": setting.id,
        "experiment": experiment or setting.spec()["setting"],
        "label": label or setting.method,
        "spec": _public(setting.spec(), outcome.names),
        "metrics": outcome.metrics,
        "coefficients": summary(outcome.coefficients) if outcome.coefficients is not None else None,
        "inputs": outcome.inputs,
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


def _public(value: Any, names: Mapping[str, str]) -> Any:
    """Tasks by name, and of files their names alone: where things lie on a disk is nobody's business."""
    if isinstance(value, dict):
        return {key: _public(item, names) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_public(item, names) for item in value]
    if isinstance(value, str):
        return names.get(value, PurePath(value).name if "/" in value and value[0] in "/~." else value)
    return value


def write(path: Path, made: dict[str, Any], *, overwrite: bool = False) -> None:
    write_text(path, json.dumps(rounded(made), indent=1, sort_keys=True) + "\n", overwrite=overwrite)


def rounded(value: Any) -> Any:
    """Six digits say all there is to say, and keep differences between records readable."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def file_name(setting: BaseSetting, label: str) -> str:
    """Readable, and unique by its end."""
    spec = setting.spec()
    words = [label or setting.method]
    words += [str(spec[key]) for key in ("task", "images", "target") if spec.get(key) is not None]
    words += [f"{key}-{spec[key]}" for key in ("shots", "fraction", "seed") if key in spec]
    return f"{re.sub(r'[^A-Za-z0-9.+]+', '-', ' '.join(words)).strip('-')}-{setting.id[:8]}.json"
