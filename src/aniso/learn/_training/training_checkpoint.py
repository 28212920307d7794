"""Training checkpoints: tensors and JSON in one safetensors file, with a checksum; the last two are kept."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from torch import Tensor

from aniso.errors import AnisoError, InputError, printable
from aniso.weights import SafetensorsFile, save_safetensors
from aniso.weights.atomic import disk
from aniso.weights.files import RawFile
from aniso.weights.fingerprint import combined_hash, tensor_hash

SCHEMA = 1
FORMAT = "aniso-run-state"
_NAME = re.compile(r"state-(\d{5,})-(\d{6,})\.safetensors")
_KEPT = 2  # the newest may be damaged


@final
@dataclass(frozen=True)
class State:
    """The state of a run between two steps."""

    epoch: int
    """Epochs that are done, validation included."""
    step: int
    """Steps of the next epoch that are done."""
    tensors: dict[str, Tensor]
    facts: dict[str, Any] = field(default_factory=dict)
    """Everything else, as JSON data."""


@final
class TrainingCheckpoints:
    """The checkpoints in a run's directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def files(self) -> list[Path]:
        """Return the checkpoint files, oldest first."""
        found = [path for path in self._directory.glob("state-*.safetensors") if _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: tuple(int(n) for n in _NAME.fullmatch(path.name).groups()))  # type: ignore[union-attr]

    def save(self, state: State) -> None:
        """Write a checkpoint; then, and only then, remove all but the last two."""
        # its place in the run is in the name, for people, and in the text, for the hash
        facts = json.dumps({**state.facts, "at": [state.epoch, state.step]}, sort_keys=True)
        meta = {
            "format": FORMAT,
            "schema": str(SCHEMA),
            "facts": facts,
            "hash": _digest(state.tensors, facts),
        }
        path = self._directory / f"state-{state.epoch:05d}-{state.step:06d}.safetensors"
        save_safetensors(path, state.tensors, meta, overwrite=True)
        files = self.files()
        later = files[files.index(path) + 1 :]  # left by a run that resumed from an older one
        for old in [*files[: max(0, files.index(path) + 1 - _KEPT)], *later]:
            disk.remove(old)

    def newest(self) -> tuple[State | None, list[str]]:
        """Return the newest checkpoint that can be read, and a warning for every newer one that cannot."""
        notes: list[str] = []
        files = self.files()
        for path in reversed(files):
            try:
                return _read(path), notes
            except AnisoError as e:
                notes.append(
                    f"warning: checkpoint {path.name} cannot be read ({e.message}); using the one before"
                )
        if files:
            raise InputError(
                "RUN-STATE",
                f"no checkpoint in '{printable(self._directory)}' can be read",
                found=[note.removeprefix("warning: ") for note in notes],
                fix="start a new run in another directory",
            )
        return None, notes


def _read(path: Path) -> State:
    file = SafetensorsFile(RawFile(path))
    if file.metadata.get("format") != FORMAT or file.metadata.get("schema") != str(SCHEMA):
        raise InputError(
            "RUN-STATE",
            f"it was written by another version, schema {printable(file.metadata.get('schema', '?'), 20)}",
            expected=f"schema {SCHEMA}",
            fix="resume it with the version that wrote it",
        )
    tensors = {name: file.read(name) for name in file.tensors}
    text = file.metadata.get("facts", "")
    if file.metadata.get("hash") != _digest(tensors, text):
        raise InputError("RUN-STATE", "its content does not match its hash", fix="use an older checkpoint")
    facts = json.loads(text)
    epoch, step = facts.pop("at")
    return State(epoch, step, tensors, facts)


def _digest(tensors: Mapping[str, Tensor], facts: str) -> str:
    return combined_hash({"facts": facts, **{f"tensor {n}": tensor_hash(t) for n, t in tensors.items()}})


def require_same(was: Mapping[str, Any], now: Mapping[str, Any], *, environment: bool = False) -> list[str]:
    """Raise RUN-CHANGED if a run is resumed with other inputs, settings or (unless allowed) environment.

    ``was`` and ``now`` have the keys "what" and "environment". Returns the differences in the environment.
    """
    other = differences(was.get("what", {}), now.get("what", {}))
    around = differences(was.get("environment", {}), now.get("environment", {}))
    if other or (around and not environment):
        raise InputError(
            "RUN-CHANGED",
            "the run was started with other inputs or settings"
            if other
            else "the run was started in another environment",
            changed=[*other, *around][:12],
            fix="start a new run in another directory"
            if other
            else "resume it there, or accept other rounding with --allow-env-change",
        )
    return around


def differences(was: Any, now: Any, path: str = "") -> list[str]:
    """Return the differences between two nested dictionaries and lists, as text."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        keys = [*was, *(key for key in now if key not in was)]
        return [d for key in keys for d in differences(was.get(key), now.get(key), f"{path}{key}.")]
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        pairs = enumerate(zip(was, now, strict=True), 1)
        return [d for i, (one, other) in pairs for d in differences(one, other, f"{path}{i}.")]
    if was == now:
        return []
    return [f"{path.rstrip('.')}: {printable(was, 60)} -> {printable(now, 60)}"]
