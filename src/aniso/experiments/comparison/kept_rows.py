"""Measurements of a comparison in files, so that an interrupted comparison continues where it was.

Each candidate on each part of the data has one file, named by a hash of everything that the measurement
depends on: options, model, bank, classes, and the bytes of the items. A measurement of other data is thus
never found; one that is damaged is reported and made again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar, final

from pydantic import ValidationError
from torch import Tensor

from aniso.data import Labelled, Unlabelled, content_hash
from aniso.errors import AnisoError, InputError, UsageError, printable
from aniso.experiments.run_files import COMPARISON_ROWS, SPEC
from aniso.experiments.settings import Setting
from aniso.experiments.strict_yaml import as_yaml, read_yaml
from aniso.json_value import JsonObject
from aniso.learn import differences
from aniso.weights import SafetensorsFile, save_safetensors
from aniso.weights.atomic import make_directory, write_text
from aniso.weights.files import RawFile
from aniso.weights.fingerprint import content_checksum, require_checksum
from aniso.weights.temporary import TEMPORARY

_FORMAT = "aniso comparison row"
_SCHEMA = 1


class AnyCandidate(Protocol):
    """One row of any comparison."""

    @property
    def label(self) -> str: ...
    @property
    def setting(self) -> Setting: ...


C = TypeVar("C", bound=AnyCandidate)


class StoredRow(Protocol[C]):
    """A measurement that can be written to a file, and read again for its candidate."""

    @property
    def candidate(self) -> C: ...
    def stored(self) -> tuple[str, dict[str, Tensor]]:
        """Return numbers as JSON, and tensors."""

    @classmethod
    def restored(cls, candidate: C, index: str, tensors: Mapping[str, Tensor]) -> Self:
        """Return the row of what ``stored`` returned; raises ValidationError if it is something else."""


R = TypeVar("R", bound=StoredRow)  # type: ignore[type-arg]


@final
class KeptRows(Generic[R]):
    """The measurements of one comparison, in the directory ``comparison`` of the run that it will write.

    Nothing is written before the first measurement. Without a directory nothing is kept.
    """

    def __init__(self, run: Path | None, spec: JsonObject, kind: type[R]) -> None:
        """``spec`` says what is compared; another comparison in the same directory is refused."""
        self._kind = kind
        self._directory = None if run is None else run / COMPARISON_ROWS
        self._spec: JsonObject = json.loads(json.dumps(spec))
        self.reused = 0
        self.notes: list[str] = []
        if run is not None and run.is_dir():
            self._require_same(run)

    def _require_same(self, run: Path) -> None:
        there = run / COMPARISON_ROWS / SPEC
        if not there.is_file():
            if any(p.name != COMPARISON_ROWS and not TEMPORARY.fullmatch(p.name) for p in run.iterdir()):
                raise UsageError(
                    "OUT-EXISTS",
                    f"'{printable(run)}' holds a run that is no comparison",
                    fix="name a new directory",
                )
            return
        other = differences(read_yaml(there).data, self._spec)
        if other:
            raise InputError(
                "RUN-CHANGED",
                f"the comparison in '{printable(run)}' was begun with other options",
                changed=other[:12],
                fix="use the same options, or name another directory",
            )

    def read(self, candidate: AnyCandidate, key: str) -> R | None:
        """Return a measurement, or None if there is none, or a damaged one."""
        path = self._path(key)
        if path is None or not path.exists():
            return None
        try:
            row: R = self._kind.restored(candidate, *_read(path))
        except (AnisoError, ValidationError, LookupError) as e:
            reason = e.message if isinstance(e, AnisoError) else "its index is damaged"
            self.notes.append(f"warning: {candidate.label} is measured again: {reason}")
            return None
        self.reused += 1
        return row

    def write(self, row: R, key: str) -> None:
        """Keep a measurement."""
        path = self._path(key)
        if path is None:
            return
        if not (path.parent / SPEC).exists():
            make_directory(path.parent)
            write_text(path.parent / SPEC, as_yaml(self._spec), overwrite=True)
        index, tensors = row.stored()
        meta = {"format": _FORMAT, "schema": str(_SCHEMA), "index": index}
        meta["checksum"] = content_checksum(index, tensors)
        save_safetensors(path, tensors, meta, overwrite=True)

    def _path(self, key: str) -> Path | None:
        return None if self._directory is None else self._directory / f"{key}.safetensors"


def _read(path: Path) -> tuple[str, dict[str, Tensor]]:
    file = SafetensorsFile(RawFile(path))
    if file.metadata.get("format") != _FORMAT or file.metadata.get("schema") != str(_SCHEMA):
        raise InputError("FILE-HASH", f"'{printable(path)}' is no measurement", fix="remove it")
    tensors = {name: file.read(name) for name in file.tensors}
    require_checksum(file.metadata, tensors, file.label)
    return file.metadata["index"], tensors


def splits_key(splits: Sequence[Labelled | Unlabelled | None]) -> str:
    """Return a hash of the items of splits, their order, their labels if they have any, and their bytes."""
    parts = [[s.classes.key, s.manifest, content_hash(s)] if s is not None else None for s in splits]
    return _hash(parts)


def row_key(candidate: AnyCandidate, splits: str, model: str, bank: str | None) -> str:
    """Return the hash that names the measurement of a candidate; ``splits`` is ``splits_key``."""
    return _hash([_SCHEMA, version("aniso"), candidate.setting.id, splits, model, bank])


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
