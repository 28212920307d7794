"""A bank: a sparse table, vectors by blocks, of deltas over one base.

On disk it is a directory: files of vectors, and ``manifest.json``, written last, with their hashes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast, final

from torch import Tensor

from aniso.errors import InputError, UsageError, printable
from aniso.vectors._files.bank_features import read_features, write_features
from aniso.vectors._files.checksums import require_sha256
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
from aniso.vectors._files.segment_writer import common_base, write_segment
from aniso.vectors._matching.key_edits import KeyEdits
from aniso.vectors.bank_base import divided_as, require_base, require_blocks
from aniso.vectors.block import Layout
from aniso.vectors.block_source import BlockSource
from aniso.vectors.bundled import PREFIX, bundled_bank
from aniso.vectors.delta import Delta, LowRank
from aniso.vectors.packing import Storage
from aniso.vectors.provenance import BaseInfo
from aniso.vectors.task_vector import TaskVector, stored_vector
from aniso.weights import Ref, open_weights
from aniso.weights.atomic import (
    atomic_directory,
    atomic_file,
    disk,
    locked,
    require_free,
    require_space,
    write_text,
)
from aniso.weights.files import Progress, RawFile
from aniso.weights.peft_lora import LORA

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")
_NORM_TOLERANCE = 1e-4


class Chosen(Protocol):
    """What a strategy came to."""

    @property
    def bank(self) -> Bank: ...


class Selects(Protocol):
    """What makes a bank smaller."""

    def choose(self, bank: Bank) -> Chosen: ...


def require_writable(path: str | Path, *, storage: str = "fp32", overwrite: bool = False) -> None:
    """What ``Bank.save`` would refuse after an hour is refused now."""
    Storage.of(storage)
    require_free(Path(path), overwrite=overwrite, ours=BANK_FILES)


@final
class Bank:
    """Task vectors over one base, by name. Immutable; selecting gives a smaller bank over the same files."""

    def __init__(
        self,
        vectors: Mapping[str, TaskVector],
        *,
        path: Path | None = None,
        manifest: Manifest | None = None,
        homes: Mapping[str, tuple[Segment, int]] | None = None,
    ) -> None:
        """``homes`` say in which file, and where in it, a vector lies that is on disk."""
        if not vectors:
            raise UsageError("BANK-NAME", "a bank needs at least one vector", fix="name a fine-tuned model")
        for name in vectors:
            _check_name(name)
        self._vectors = {name: v.renamed(name) if v.name != name else v for name, v in vectors.items()}
        self.path = path
        self.manifest = manifest
        self._homes = dict(homes or {})
        first = next(iter(self._vectors.values()))
        self.layout: Layout = first.layout
        known: dict[str, str] = {}
        for vector in self._vectors.values():
            if vector.layout.signature != self.layout.signature:
                raise InputError(
                    "BANK-LAYOUT",
                    f"vectors '{first.name}' and '{vector.name}' have different blocks",
                    fix="build the bank over one base",
                )
            if vector._base == first._base:
                continue  # made together over one base
            for each in (first, vector):
                if each.base.activation:
                    known.setdefault(each.base.activation, each.name)
            if len(known) > 1 or not vector.base.is_same_as(first.base):
                raise InputError(
                    "BANK-BASE",
                    f"vectors '{first.name}' and '{vector.name}' are over different bases",
                    expected=f"{first.base.label} {first.base.fingerprint[:16]}",
                    found=f"{vector.base.label} {vector.base.fingerprint[:16]}",
                    activations=" and ".join(f"{a} ({name})" for a, name in known.items()),
                    fix="build the bank over one base",
                )

    # making one

    @classmethod
    def build(
        cls,
        base: Ref | BlockSource,
        tuned: Mapping[str, Ref | TaskVector],
        *,
        to: str | Path | None = None,
        storage: str = "fp32",
        overwrite: bool = False,
        skip: tuple[str, ...] = (),
        rename: Mapping[str, str] | None = None,
        allow_distant: bool = False,
        progress: Progress | None = None,
    ) -> Bank:
        """A bank of the differences of fine-tuned models and adapters to their base.

        A vector that was made over the same base before, or the file it was saved to, is taken as it is.
        With ``to`` it is written there block by block as it is computed and checked, in the memory of two
        blocks. Without, it stays a view of the files it was built from, which are checked at once.
        """
        for name in tuned:
            _check_name(name)
        blocks = BlockSource.of(base)
        edits = KeyEdits(skip, rename or {})
        stored = {name: stored_vector(ref) for name, ref in tuned.items()}
        sources = {name: open_weights(cast(Ref, tuned[name])) for name, v in stored.items() if v is None}
        edits.require_used(sources.values())
        vectors = {
            name: stored[name]
            or TaskVector.between(
                blocks,
                sources[name],
                name=name,
                skip=skip,
                rename=rename,
                allow_distant=allow_distant,
                check=to is None,
                require_used=False,
                progress=progress,
            )
            for name in tuned
        }
        bank = cls(vectors)
        if any(stored.values()):
            bank.over(blocks)
        if to is None:
            return bank
        return bank.save(to, storage=storage, overwrite=overwrite, progress=progress)

    @classmethod
    def load(cls, path: str | Path) -> Bank:
        """Load a bank from a directory, or one that comes with the package by name (``mini``).

        Indices are read at once, deltas when they are used. A directory wins over a name.
        """
        path = bundled_bank(str(path)) if _is_bundled(path) else Path(path)
        manifest = read_manifest(path)
        found: dict[str, tuple[Segment, int]] = {}
        for record in manifest.files:
            segment = _open_segment(path, record, manifest)
            for i, vector in enumerate(segment.index.vectors):
                if vector.name in found:
                    raise manifest_error(path, f"vector {vector.name} is in two files")
                found[vector.name] = (segment, i)
        if set(found) != set(manifest.vectors) or len(found) != len(manifest.vectors):
            odd = sorted(set(found) ^ set(manifest.vectors))
            raise manifest_error(path, f"manifest and files disagree on {', '.join(odd)}")
        vectors = {name: TaskVector.of_segment(*found[name]) for name in manifest.vectors}
        return cls(vectors, path=path, manifest=manifest, homes=found)

    def save(
        self,
        path: str | Path,
        *,
        storage: str = "fp32",
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> Bank:
        """Write the bank to a directory, in any storage; returns the bank that is there now."""
        path = Path(path)
        require_space(path, self._expected_bytes(Storage.of(storage)))
        with atomic_directory(path, overwrite=overwrite, ours=BANK_FILES) as partial:
            vectors = list(self._vectors.values())
            target = partial / "vectors-000.safetensors"
            with atomic_file(target) as out:
                written = write_segment(out.stream, vectors, storage=storage, progress=progress)
            record = _file_record(target, out.sha256, written.sha256)
            known = self.features
            manifest = Manifest(
                schema_version=SCHEMA,
                base=written.index.base.content,
                layout=self.layout.signature,
                files=(record,),
                vectors=tuple(self._vectors),
                facts={name: dict(found) for name, found in self.facts.items() if found},
                features=write_features(partial, known) if known else None,
            )
            write_text(partial / MANIFEST, manifest.dump())
        return Bank.load(path)

    def annotate(self, facts: Mapping[str, Mapping[str, Fact]]) -> Bank:
        """Write down what is known of vectors, a task's accuracies say, beside what was known before."""
        path = self._require_path()
        unknown = [name for name in facts if name not in self]
        if unknown:
            raise self._unknown(unknown)
        with locked(path):
            manifest = read_manifest(path)
            merged = {**manifest.facts}
            for name, found in facts.items():
                merged[name] = {**merged.get(name, {}), **found}
            require_facts(merged)
            update = {"schema_version": SCHEMA, "facts": merged}
            write_text(path / MANIFEST, manifest.model_copy(update=update).dump(), overwrite=True)
        return Bank.load(path)

    def with_features(self, features: Mapping[str, Tensor]) -> Bank:
        """Write down mean features of the vectors' own tasks, beside those that are known."""
        path = self._require_path()
        unknown = [name for name in features if name not in self]
        if unknown:
            raise self._unknown(unknown)
        with locked(path):
            current = Bank.load(path)
            assert current.manifest is not None
            # what is replaced is not read: that is how damaged features are mended
            known = {} if set(features) == set(current) else current.features
            record = write_features(path, {**known, **features}, current.manifest.features)
            update = {"schema_version": SCHEMA, "features": record}
            text = current.manifest.model_copy(update=update).dump()
            write_text(path / MANIFEST, text, overwrite=True)
            for old in path.iterdir():  # also what a process left that died before this line
                if FEATURE_FILE.fullmatch(old.name) and old.name != record.file:
                    disk.remove(old)
        return Bank.load(path)

    def add(
        self,
        base: Ref | BlockSource,
        tuned: Mapping[str, Ref],
        *,
        storage: str | None = None,
        skip: tuple[str, ...] = (),
        rename: Mapping[str, str] | None = None,
        allow_distant: bool = False,
        progress: Progress | None = None,
    ) -> Bank:
        """Add vectors to a bank on disk, as a further file; what is there is not touched."""
        path = self._require_path()
        parts = [name for name, home in self._homes.items() if _of_blocks(self[name], home)]
        if self.manifest is not None and (self.names != self.manifest.vectors or parts):
            raise UsageError(
                "BANK-NAME",
                "vectors can be added to a whole bank only, and this is a selection from one",
                fix="Bank.load(path).add(…), then select",
            )
        kind = Storage.of(storage or self.storage)
        if kind.has_mean:  # a mean of the few new vectors would be no mean of the bank
            if storage:
                raise UsageError("USAGE", f"'{storage}' needs all vectors at once", fix="use bank quantise")
            kind = Storage.INT4
        blocks = BlockSource.of(base)
        with locked(path):
            current = Bank.load(path)
            current._require_new(tuned)
            current.over(blocks)
            assert current.manifest is not None
            new = Bank.build(
                blocks,
                tuned,
                skip=skip,
                rename=rename,
                allow_distant=allow_distant,
                progress=progress,
            )
            require_space(path, new._expected_bytes(kind))
            target = path / _next_file(current.manifest)
            # a file that the manifest does not name is one whose writer died before it could
            with atomic_file(target, overwrite=True) as out:
                added = list(new._vectors.values())
                written = write_segment(out.stream, added, storage=kind, progress=progress)
            record = _file_record(target, out.sha256, written.sha256)
            manifest = current.manifest.model_copy(
                update={
                    "schema_version": SCHEMA,
                    "files": (*current.manifest.files, record),
                    "vectors": (*current.manifest.vectors, *tuned),
                }
            )
            write_text(path / MANIFEST, manifest.dump(), overwrite=True)
        return Bank.load(path)

    # looking at it

    @property
    def base(self) -> BaseInfo:
        """The base of all vectors, with its activation if any of them knows it."""
        return common_base(list(self._vectors.values()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._vectors)

    @property
    def facts(self) -> Mapping[str, Mapping[str, Fact]]:
        """What is written down about each vector."""
        known = self.manifest.facts if self.manifest is not None else {}
        return {name: known.get(name, {}) for name in self}

    @property
    def features(self) -> dict[str, Tensor]:
        """Mean features of the vectors' own tasks, as the base sees them, where they are known."""
        if self.manifest is None or self.manifest.features is None:
            return {}
        path, record = self._require_path(), self.manifest.features
        if not (path / record.file).exists():  # others may have been written since
            record = read_manifest(path).features or record
        found = read_features(path, record)
        return {name: found[name] for name in self if name in found}

    @property
    def storage(self) -> str:
        """The storage of a bank on disk; files that were added may have others."""
        return next((self.storage_of(name) for name in self), Storage.FP32)

    def storage_of(self, name: str) -> str:
        home = self._homes.get(name)
        return home[0].index.storage if home else Storage.FP32

    @property
    def content_hash(self) -> str:
        """Hash of base, names and content, the same wherever the bank lies."""
        digest = hashlib.sha256(f"{self.base.fingerprint}\n".encode())
        files = {r.file: r.sha256 for r in self.manifest.files} if self.manifest else {}
        for name, vector in self._vectors.items():
            home = self._homes.get(name)
            if home:
                what = f"{files[home[0].file.path.name]}\0{home[1]}{_of_blocks(vector, home)}"
            else:
                what = (
                    f"{vector.provenance.sha256}\0{vector.provenance.formula}\0{sorted(vector.norms.items())}"
                )
            digest.update(f"{name}\0{what}\n".encode())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._vectors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._vectors)

    def __contains__(self, name: str) -> bool:
        return name in self._vectors

    def __getitem__(self, name: str) -> TaskVector:
        if name not in self._vectors:
            raise self._unknown([name])
        return self._vectors[name]

    def __repr__(self) -> str:
        return f"Bank({len(self)} vectors, {len(self.layout.blocks)} blocks: {', '.join(self.names[:6])})"

    def read_block(self, block: str, *, exact: bool = True) -> dict[str, Delta]:
        """One block of all vectors that have it, in the bank's order: one contiguous read per file.

        Without ``exact``, the tuned values that base + delta misses by a rounding are not read.
        """
        found: dict[str, Delta] = {}
        by_segment: dict[int, tuple[Segment, dict[int, str]]] = {}
        for name, vector in self._vectors.items():
            if block not in vector:
                continue
            home = self._homes.get(name)
            if home is None:
                found[name] = vector[block]
                continue
            segment, i = home
            by_segment.setdefault(id(segment), (segment, {}))[1][i] = name
        for segment, wanted in by_segment.values():
            for i, delta in segment.read(block, set(wanted), exact=exact).items():
                found[wanted[i]] = delta
        return {name: found[name] for name in self._vectors if name in found}

    def block_bytes(self, block: str) -> int:
        """About how much the deltas of one block take as they are stored; at most, if not on disk."""
        total = 0
        for name, vector in self._vectors.items():
            home = self._homes.get(name)
            if block not in vector:
                continue
            if home is not None:
                total += home[0].cell_bytes(block, home[1])
            elif vector.provenance.format == LORA:  # small, and read in no time
                total += vector[block].nbytes
            else:
                total += 4 * self.layout.by_name[block].numel
        return total

    # selecting

    def only(self, *names: str) -> Bank:
        unknown = [name for name in names if name not in self]
        if unknown:
            raise self._unknown(unknown)
        return self._subset([name for name in self if name in names])

    def without(self, *names: str) -> Bank:
        """The bank without some vectors; a name it does not have is an error, not a wish already granted."""
        unknown = [name for name in names if name not in self]
        if unknown:
            raise self._unknown(unknown)
        return self._subset([name for name in self if name not in names])

    def only_cells(self, cells: Mapping[str, Collection[str]]) -> Bank:
        """Of each vector that is named, the blocks that are named; vectors without any are left out.

        Naming a cell that the bank does not have is an error.
        """
        unknown = [name for name in cells if name not in self]
        if unknown:
            raise self._unknown(unknown)
        absent = [(name, block) for name in cells for block in cells[name] if block not in self[name]]
        if absent:
            name, block = absent[0]
            raise UsageError(
                "BANK-NAME",
                f"vector '{name}' has no block '{printable(block)}'",
                fix=f"bank['{name}'].blocks says which it has",
            )
        within = {
            name: vector
            if len(set(cells[name])) == len(vector.blocks)
            else vector.within(frozenset(cells[name]))
            for name, vector in self._vectors.items()
            if cells.get(name)
        }
        return self._subset(list(within), within)

    def select(self, strategy: Selects) -> Bank:
        """A smaller bank, chosen by one of the strategies in ``aniso.selection``."""
        return strategy.choose(self).bank

    def _subset(self, names: list[str], vectors: Mapping[str, TaskVector] | None = None) -> Bank:
        found = self._vectors if vectors is None else vectors
        return Bank(
            {name: found[name] for name in names},
            path=self.path,
            manifest=self.manifest,
            homes={name: self._homes[name] for name in names if name in self._homes},
        )

    # taking it elsewhere

    def __reduce__(self) -> tuple[Any, ...]:
        """A bank is pickled as the place where it lies."""
        cells = {name: [block.name for block in vector.blocks] for name, vector in self._vectors.items()}
        return _opened_again, (self._require_path().resolve(), cells, self.content_hash)

    def __deepcopy__(self, memo: dict[int, Any]) -> Bank:
        return self  # it never changes

    # trusting it

    def check(self, progress: Progress | None = None) -> list[str]:
        """Read everything: hashes, indices, and every delta against its recorded norm. Returns notes."""
        path = self._require_path()
        assert self.manifest is not None
        for record in self.manifest.files:
            require_sha256(RawFile(path / record.file), record.sha256, progress)
        for block in self.layout.blocks:
            for name, delta in self.read_block(block.name).items():
                self._check_norm(name, block.name, delta)
                if progress:
                    progress(delta.nbytes)
        known = {record.file for record in self.manifest.files} | {MANIFEST}
        if self.manifest.features is not None:
            read_features(path, self.manifest.features)  # which checks its hash
            known.add(self.manifest.features.file)
        strays = sorted(p.name for p in path.iterdir() if p.name not in known)
        notes = [f"not part of the bank: {printable(', '.join(strays))}"] if strays else []
        return [*notes, *self._duplicates()]

    def _check_norm(self, name: str, block: str, delta: Delta) -> None:
        recorded, found = self._vectors[name].norms[block], delta.norm()
        if not abs(found - recorded) <= _NORM_TOLERANCE * recorded:
            raise InputError(
                "FILE-HASH",
                f"vector '{name}' differs from what was recorded",
                key=block,
                expected=f"norm {recorded:.6g}",
                found=f"norm {found:.6g}",
                fix="build the bank again",
            )

    def _duplicates(self) -> list[str]:
        seen: dict[str, str] = {}
        notes = []
        for name, vector in self._vectors.items():
            first = seen.setdefault(vector.provenance.sha256 or f"vector {name}", name)
            if first != name:
                notes.append(f"warning: '{name}' was made from the same file as '{first}'")
        return notes

    @property
    def notes(self) -> list[str]:
        """What was said of the vectors when they were made."""
        said = [_named(name, note) for name, vector in self._vectors.items() for note in vector.notes]
        return said + self._duplicates()

    def _expected_bytes(self, storage: Storage) -> int:
        """About what it will take on disk."""
        dense = storage.bytes_per_element(len(self))
        return sum(_expected_of(vector, dense) for vector in self._vectors.values())

    def _require_path(self) -> Path:
        if self.path is None:
            raise UsageError("BANK-MANIFEST", "this bank is not on disk", fix="bank.save(directory)")
        return self.path

    def _require_new(self, tuned: Mapping[str, Ref]) -> None:
        for name in tuned:
            _check_name(name)
            if name in self:
                raise UsageError(
                    "BANK-NAME",
                    f"the bank has a vector '{name}' already",
                    fix="choose another name",
                )

    def over(self, base: Ref | BlockSource, *, any_base: bool = False) -> BlockSource:
        """A model as the bank's blocks; it must be the bank's base, or at least have the same blocks."""
        blocks = base if isinstance(base, BlockSource) else divided_as(self.layout, open_weights(base))
        require = require_blocks if any_base else require_base
        require(blocks, self.base, self.layout)
        return blocks

    def _unknown(self, names: list[str]) -> UsageError:
        return UsageError(
            "BANK-NAME",
            f"the bank has no vector {', '.join(map(repr, names))}",
            expected=", ".join(self.names),
            fix="aniso bank ls",
        )


def _expected_of(vector: TaskVector, dense: float) -> int:
    """Dense, or low-rank as its largest block is, which alone is read."""
    blocks = vector.blocks
    if not blocks:
        return 0
    largest = vector[max(blocks, key=lambda block: block.numel).name]
    if not isinstance(largest, LowRank):
        return int(dense * sum(block.numel for block in blocks))
    return 4 * sum(min(block.numel, largest.rank * sum(block.matrix_shape)) for block in blocks)


def _is_bundled(path: str | Path) -> bool:
    return str(path).split("-")[0] == PREFIX and not Path(path).exists()


def _of_blocks(vector: TaskVector, home: tuple[Segment, int]) -> str:
    """What tells a vector in some of its blocks from the whole one in the file."""
    whole = home[0].vector(home[1]).cells
    return "" if len(vector.blocks) == len(whole) else "\0" + "\0".join(b.name for b in vector.blocks)


def _opened_again(path: Path, cells: Mapping[str, Sequence[str]], content: str) -> Bank:
    bank = Bank.load(path).only_cells(cells)
    if bank.content_hash != content:
        raise InputError(
            "FILE-HASH",
            f"the bank '{printable(path)}' is not what it was when it was pickled",
            expected=content[:16],
            found=bank.content_hash[:16],
            fix="restore the bank from a copy, or make the composition again",
        )
    return bank


def _named(name: str, note: str) -> str:
    warning = "warning: " if note.startswith("warning: ") else ""
    return f"{warning}{name}: {note.removeprefix('warning: ')}"


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(
            "BANK-NAME",
            f"'{printable(name)}' cannot be a vector's name",
            expected="letters, digits and . _ + - (at most 100)",
            fix="write NAME=FILE with another name",
        )


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
            f"'{printable(path / record.file)}' has another size than recorded",
            expected=f"{record.nbytes} bytes",
            found=f"{segment.file.size} bytes",
            fix="restore the file from a copy, or build the bank again",
        )
    if (segment.base.content, segment.layout.signature) != (manifest.base, manifest.layout):
        raise InputError(
            "BANK-BASE",
            f"'{printable(path / record.file)}' is over another base than the rest of the bank",
            fix="build the bank again",
        )
    return segment
