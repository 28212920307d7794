"""A cache of class weights on disk, keyed by everything they depend on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from aniso.classes import ClassList
from aniso.errors import AnisoError
from aniso.models.head import ClassWeights
from aniso.weights import SafetensorsFile, save_safetensors
from aniso.weights.caches import cache_directory
from aniso.weights.files import RawFile
from aniso.weights.fingerprint import tensor_hash
from aniso.weights.jsontext import parse_object

_VERSION = "1"


@dataclass(frozen=True)
class WeightsCache:
    """A directory of small files named by their key; without a directory nothing is cached."""

    directory: Path | None

    @classmethod
    def default(cls) -> WeightsCache:
        return cls(cache_directory("class-weights"))

    def get(self, key: str, classes: ClassList) -> ClassWeights | None:
        """Return the class weights stored under a key, or None if there are none or the file is damaged."""
        path = self._path(key)
        if path is None:
            return None
        try:
            file = SafetensorsFile(RawFile(path))
            said = parse_object(file.metadata.get("aniso", "").encode())
            weight = file.read("weight")
        except (AnisoError, OSError, ValueError):
            return None
        notes = said.get("notes")
        if said != _record(key, ClassWeights(classes.names, weight), notes) or not isinstance(notes, list):
            return None
        return ClassWeights(classes.names, weight, notes=tuple(map(str, notes)))

    def put(self, key: str, weights: ClassWeights) -> None:
        """Store class weights; a directory that cannot be written to is ignored."""
        path = self._path(key)
        if path is None:
            return
        said = _record(key, weights, list(weights.notes))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_safetensors(path, {"weight": weights.weight}, {"aniso": json.dumps(said)}, overwrite=True)
        except (AnisoError, OSError):
            return

    def _path(self, key: str) -> Path | None:
        return self.directory / f"{_VERSION}-{key}.safetensors" if self.directory is not None else None


def _record(key: str, weights: ClassWeights, notes: object) -> dict[str, object]:
    """Return the metadata of a file, with a hash that detects damage."""
    values = tensor_hash(weights.weight)
    return {"version": _VERSION, "key": key, "names": list(weights.names), "notes": notes, "values": values}
