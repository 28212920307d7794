"""Class weights that were built before, found again by everything they depend on."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from aniso.classes import ClassList
from aniso.errors import AnisoError
from aniso.models.head import ClassWeights
from aniso.weights import SafetensorsFile, save_safetensors
from aniso.weights.files import RawFile

_VERSION = "1"


@dataclass(frozen=True)
class WeightsCache:
    """A directory of small files named by their key. Without a directory nothing is kept."""

    directory: Path | None

    @classmethod
    def usual(cls) -> WeightsCache:
        """``$ANISO_CACHE``, or ``aniso`` in the user's cache directory."""
        said = os.environ.get("ANISO_CACHE")
        home = Path(said) if said else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "aniso"
        try:
            return cls(home.expanduser() / "class-weights")
        except RuntimeError:  # no home
            return cls(None)

    def get(self, key: str, classes: ClassList) -> ClassWeights | None:
        """What was kept under a key; a damaged file is as good as none."""
        path = self._path(key)
        if path is None or not path.is_file():
            return None
        try:
            file = SafetensorsFile(RawFile(path))
            said = json.loads(file.metadata.get("aniso", "{}"))
            weight = file.read("weight")
        except (AnisoError, OSError, ValueError):
            return None
        if said.get("key") != key or said.get("names") != list(classes.names) or weight.ndim != 2:
            return None
        return ClassWeights(classes.names, weight, notes=tuple(said.get("notes", ())))

    def put(self, key: str, weights: ClassWeights) -> None:
        """Keep, if the directory can be written to; class weights can always be built again."""
        path = self._path(key)
        if path is None:
            return
        said = {"version": _VERSION, "key": key, "names": weights.names, "notes": weights.notes}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_safetensors(path, {"weight": weights.weight}, {"aniso": json.dumps(said)}, overwrite=True)
        except (AnisoError, OSError):
            return

    def _path(self, key: str) -> Path | None:
        return self.directory / f"{_VERSION}-{key}.safetensors" if self.directory is not None else None
