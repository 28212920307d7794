"""The directory of a bank: vector files, a feature file, and ``manifest.json``, which is written last.

Every change writes its new files first and replaces the manifest at the end, so that readers see the bank
before the change or after it, and a process that dies leaves at most a file that no manifest names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from aniso.errors import InputError, printable
from aniso.vectors._files.bank_features import read_features, write_features
from aniso.vectors._files.manifest import (
    BANK_FILES,
    FEATURE_FILE,
    MANIFEST,
    SCHEMA,
    VECTOR_FILE,
    Fact,
    FileRecord,
    Manifest,
    manifest_error,
    read_manifest,
    require_facts,
)
from aniso.vectors._files.segment import Segment
from aniso.vectors._files.segment_writer import VectorLike, write_segment
from aniso.vectors.packing import Storage
from aniso.weights.atomic import atomic_directory, atomic_file, disk, write_text
from aniso.weights.files import Progress


@dataclass(frozen=True)
class VectorLocation:
    """Where a vector is stored: a file of the bank, and the vector's position in it."""

    segment: Segment
    index: int

    @property
    def storage(self) -> Storage:
        return self.segment.index.storage

    @property
    def file(self) -> str:
        return self.segment.file.name

    @property
    def blocks(self) -> int:
        """The number of blocks that the stored vector has."""
        return len(self.segment.vector(self.index).cells)

    def block_bytes(self, block: str) -> int:
        return self.segment.cell_bytes(block, self.index)


@dataclass(frozen=True)
class BankContent:
    """What is written to a new bank directory."""

    vectors: Sequence[VectorLike]
    storage: Storage
    facts: Mapping[str, Mapping[str, Fact]]
    features: Mapping[str, Tensor]


def read_bank_directory(path: Path) -> tuple[Manifest, dict[str, VectorLocation]]:
    """Read the manifest and the index of every vector file; deltas are not read."""
    manifest = read_manifest(path)
    locations: dict[str, VectorLocation] = {}
    for record in manifest.files:
        segment = _open_segment(path, record, manifest)
        for i, vector in enumerate(segment.index.vectors):
            if vector.name in locations:
                raise manifest_error(path, f"vector {vector.name} is in two files")
            locations[vector.name] = VectorLocation(segment, i)
    if set(locations) != set(manifest.vectors) or len(locations) != len(manifest.vectors):
        odd = sorted(set(locations) ^ set(manifest.vectors))
        raise manifest_error(path, f"manifest and files disagree on {', '.join(odd)}")
    return manifest, locations


def write_directory(
    path: Path, content: BankContent, *, overwrite: bool = False, progress: Progress | None = None
) -> None:
    """Write a bank to a new directory."""
    vectors = content.vectors
    with atomic_directory(path, overwrite=overwrite, ours=BANK_FILES) as partial:
        target = partial / "vectors-000.safetensors"
        with atomic_file(target) as out:
            written = write_segment(out.stream, vectors, storage=content.storage, progress=progress)
        manifest = Manifest(
            schema_version=SCHEMA,
            base=written.index.base.content,
            layout=vectors[0].layout.signature,
            files=(_file_record(target, out.sha256, written.sha256),),
            vectors=tuple(vector.name for vector in vectors),
            facts={name: dict(facts) for name, facts in content.facts.items() if facts},
            features=write_features(partial, content.features) if content.features else None,
        )
        write_text(partial / MANIFEST, manifest.dump())


def append_vectors(
    path: Path, manifest: Manifest, vectors: Sequence[VectorLike], storage: Storage, progress: Progress | None
) -> None:
    """Add a vector file to a bank directory; existing files are not changed."""
    target = path / _next_file(manifest)
    # overwrite: a file that the manifest does not name was left by a process that died before naming it
    with atomic_file(target, overwrite=True) as out:
        written = write_segment(out.stream, vectors, storage=storage, progress=progress)
    record = _file_record(target, out.sha256, written.sha256)
    names = tuple(vector.name for vector in vectors)
    update = {"files": (*manifest.files, record), "vectors": (*manifest.vectors, *names)}
    _replace_manifest(path, manifest, update)


def write_facts(path: Path, facts: Mapping[str, Mapping[str, Fact]]) -> None:
    """Add facts about vectors to the manifest; a fact of the same name is replaced."""
    manifest = read_manifest(path)
    merged = {**manifest.facts}
    for name, new in facts.items():
        merged[name] = {**merged.get(name, {}), **new}
    require_facts(merged)
    _replace_manifest(path, manifest, {"facts": merged})


def replace_features(path: Path, features: Mapping[str, Tensor]) -> None:
    """Write mean features, beside the existing ones of other vectors."""
    manifest = read_manifest(path)
    # existing features that are replaced anyway are not read: this is how a damaged file is repaired
    replaces_all = set(features) == set(manifest.vectors)
    existing = {} if replaces_all else read_bank_features(path, manifest)
    record = write_features(path, {**existing, **features}, manifest.features)
    _replace_manifest(path, manifest, {"features": record})
    for old in path.iterdir():  # also what a process left that died before this line
        if FEATURE_FILE.fullmatch(old.name) and old.name != record.file:
            disk.remove(old)


def read_bank_features(path: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Read the mean features that a manifest names, in the order of its vectors."""
    record = manifest.features
    if record is None:
        return {}
    if not (path / record.file).exists():  # replaced since the manifest was read
        record = read_manifest(path).features or record
    features = read_features(path, record)
    return {name: features[name] for name in manifest.vectors if name in features}


def _replace_manifest(path: Path, manifest: Manifest, update: Mapping[str, object]) -> None:
    changed = manifest.model_copy(update={"schema_version": SCHEMA, **update})
    write_text(path / MANIFEST, changed.dump(), overwrite=True)


def _next_file(manifest: Manifest) -> str:
    taken = [int(m[1]) for record in manifest.files if (m := VECTOR_FILE.fullmatch(record.file))]
    return f"vectors-{max(taken, default=-1) + 1:03d}.safetensors"


def _file_record(path: Path, sha256: str, index: str) -> FileRecord:
    return FileRecord(file=path.name, sha256=sha256, nbytes=path.stat().st_size, index=index)


def _open_segment(path: Path, record: FileRecord, manifest: Manifest) -> Segment:
    segment = Segment.open(path / record.file, index_sha256=record.index, sha256=record.sha256)
    if segment.file.size != record.nbytes:
        raise InputError(
            "FILE-TRUNCATED",
            f"'{printable(path / record.file)}' does not have the size that the manifest records",
            expected=f"{record.nbytes} bytes",
            found=f"{segment.file.size} bytes",
            fix="restore the file from a copy, or build the bank again",
        )
    if (segment.base.content, segment.layout.signature) != (manifest.base, manifest.layout):
        raise InputError(
            "BANK-BASE",
            f"'{printable(path / record.file)}' has a different base than the rest of the bank",
            fix="build the bank again",
        )
    return segment
