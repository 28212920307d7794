"""Checks of a whole bank: every hash, every delta against its recorded norm, duplicate vectors, notes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from aniso.errors import InputError, printable
from aniso.vectors._files.bank_features import read_features
from aniso.vectors._files.checksums import require_sha256
from aniso.vectors._files.manifest import MANIFEST, Manifest
from aniso.vectors.delta import Delta
from aniso.vectors.task_vector import TaskVector
from aniso.weights.files import Progress, RawFile

_NORM_TOLERANCE = 1e-4


def check_files(path: Path, manifest: Manifest, progress: Progress | None) -> list[str]:
    """Compare every file with its recorded sha256; returns a note on files that no bank has."""
    for record in manifest.files:
        require_sha256(RawFile(path / record.file), record.sha256, progress)
    known = {record.file for record in manifest.files} | {MANIFEST}
    if manifest.features is not None:
        read_features(path, manifest.features)  # which compares its sha256
        known.add(manifest.features.file)
    strays = sorted(p.name for p in path.iterdir() if p.name not in known)
    return [f"not part of the bank: {printable(', '.join(strays))}"] if strays else []


def check_norms(
    vectors: Mapping[str, TaskVector],
    blocks: Iterable[str],
    read_block: Callable[[str], Mapping[str, Delta]],
    progress: Progress | None,
) -> None:
    """Read every delta and compare its norm with the recorded one."""
    for block in blocks:
        for name, delta in read_block(block).items():
            recorded, found = vectors[name].norms[block], delta.norm()
            if not abs(found - recorded) <= _NORM_TOLERANCE * recorded:
                raise InputError(
                    "FILE-HASH",
                    f"vector '{name}' does not have the norm recorded for it",
                    key=block,
                    expected=f"norm {recorded:.6g}",
                    found=f"norm {found:.6g}",
                    fix="build the bank again",
                )
            if progress:
                progress(delta.nbytes)


def duplicate_notes(vectors: Mapping[str, TaskVector]) -> list[str]:
    """Return a warning for every vector that was made from the same file as an earlier one."""
    seen: dict[str, str] = {}
    notes = []
    for name, vector in vectors.items():
        first = seen.setdefault(vector.provenance.sha256 or f"vector {name}", name)
        if first != name:
            notes.append(f"warning: '{name}' was made from the same file as '{first}'")
    return notes


def vector_notes(vectors: Mapping[str, TaskVector]) -> list[str]:
    """Return the notes of all vectors, each with its vector's name."""
    return [_with_name(name, note) for name, vector in vectors.items() for note in vector.notes]


def _with_name(name: str, note: str) -> str:
    warning = "warning: " if note.startswith("warning: ") else ""
    return f"{warning}{name}: {note.removeprefix('warning: ')}"
