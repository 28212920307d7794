"""A bank: a sparse table, vectors by blocks, of deltas over one base.

On disk it is a directory: files of vectors, and ``manifest.json``, written last, with their hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, final

from torch import Tensor

from aniso.errors import InputError, UsageError, printable
from aniso.vectors._files.bank_check import check_files, check_norms, duplicate_notes, vector_notes
from aniso.vectors._files.bank_directory import (
    BankContent,
    VectorLocation,
    append_vectors,
    read_bank_directory,
    read_bank_features,
    replace_features,
    write_directory,
    write_facts,
)
from aniso.vectors._files.manifest import Fact, Manifest, check_vector_name
from aniso.vectors._files.segment_writer import common_base
from aniso.vectors._files.vector_table import VectorTable
from aniso.vectors._matching.key_edits import KeyEdits
from aniso.vectors.bank_base import require_base, require_blocks, require_one_base, split_like
from aniso.vectors.block import Layout
from aniso.vectors.block_source import BlockSource
from aniso.vectors.bundled import bundled_bank, is_bundled
from aniso.vectors.delta import Delta
from aniso.vectors.difference import difference_between
from aniso.vectors.packing import Storage
from aniso.vectors.provenance import BaseInfo
from aniso.vectors.selection_protocol import SelectionRule
from aniso.vectors.task_vector import TaskVector, stored_vector
from aniso.weights import Ref, open_weights
from aniso.weights.atomic import locked, require_space
from aniso.weights.files import Progress


@final
class Bank:
    """Task vectors over one base, by name. Immutable: selecting returns a smaller bank over the same files.

    Make one with ``Bank.build`` or ``Bank.load``. A bank is a mapping from names to ``TaskVector``::

        bank = Bank.load("bank/")
        bank.names            # ('cars', 'dtd', 'mnist')
        bank["cars"].norm()
        smaller = bank.without("mnist")
    """

    def __init__(
        self,
        vectors: Mapping[str, TaskVector],
        *,
        path: Path | None = None,
        manifest: Manifest | None = None,
        locations: Mapping[str, VectorLocation] | None = None,
        parent: Bank | None = None,
    ) -> None:
        """``path``, ``manifest`` and ``locations`` are of a bank on disk; ``parent`` was selected from."""
        if not vectors:
            raise UsageError("BANK-NAME", "a bank needs at least one vector", fix="name a fine-tuned model")
        for name in vectors:
            check_vector_name(name)
        self._vectors = {name: v.renamed(name) if v.name != name else v for name, v in vectors.items()}
        self._table = VectorTable(self._vectors, dict(locations or {}))
        self.path = path
        self.manifest = manifest
        self._parent = parent
        self.layout: Layout = next(iter(self._vectors.values())).layout
        require_one_base(self._vectors.values())

    @classmethod
    def build(
        cls,
        base: Ref | BlockSource,
        tuned: Mapping[str, Ref | TaskVector],
        *,
        to: str | Path | None = None,
        storage: str = "fp32",
        overwrite: bool = False,
        edits: KeyEdits | None = None,
        allow_distant: bool = False,
        progress: Progress | None = None,
    ) -> Bank:
        """Build a bank from a base and models or LoRA adapters that were fine-tuned from it.

        ``tuned`` maps a name to a checkpoint, an adapter directory, a ``TaskVector`` over the same base, or
        the file such a vector was saved to. ``edits`` skips or renames keys of the checkpoints;
        ``allow_distant`` accepts a model that differs more from the base than fine-tuning does.

        With ``to``, the bank is written to that directory in ``storage`` (fp32, fp16, bf16, int8, int4, ...),
        block by block, in the memory of two blocks. Without, it is a view of the checkpoints, which are read
        and checked now::

            bank = Bank.build("ViT-B-32.pt", {"cars": "cars.pt", "dtd": "dtd.pt"}, to="bank/")
        """
        for name in tuned:
            check_vector_name(name)
        blocks = BlockSource.of(base)
        edits = edits or KeyEdits()
        stored = {name: stored_vector(ref) for name, ref in tuned.items()}
        sources = {name: open_weights(cast(Ref, tuned[name])) for name, v in stored.items() if v is None}
        edits.require_used(sources.values())
        vectors = {name: vector for name, vector in stored.items() if vector}
        for name, source in sources.items():
            difference = difference_between(
                blocks, source, edits, name=name, allow_distant=allow_distant, progress=progress
            )
            vector = TaskVector.of_difference(difference)
            vectors[name] = vector.checked(progress) if to is None else vector
        bank = cls({name: vectors[name] for name in tuned})
        if any(stored.values()):
            bank.over(blocks)
        if to is None:
            return bank
        return bank.save(to, storage=storage, overwrite=overwrite, progress=progress)

    @classmethod
    def load(cls, path: str | Path) -> Bank:
        """Load a bank from a directory, or a bundled bank by its name (``mini``).

        The indices of its files are read now, deltas when they are used. An existing directory has
        precedence over the name of a bundled bank.
        """
        path = bundled_bank(str(path)) if is_bundled(path) else Path(path)
        manifest, locations = read_bank_directory(path)
        vectors = {
            name: TaskVector.of_segment(locations[name].segment, locations[name].index)
            for name in manifest.vectors
        }
        return cls(vectors, path=path, manifest=manifest, locations=locations)

    def save(
        self,
        path: str | Path,
        *,
        storage: str = "fp32",
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> Bank:
        """Write the bank to a directory in any storage; returns the bank loaded from there."""
        path, kind = Path(path), Storage.of(storage)
        require_space(path, self._table.expected_bytes(kind))
        content = BankContent(list(self._vectors.values()), kind, self.facts, self.features)
        write_directory(path, content, overwrite=overwrite, progress=progress)
        return Bank.load(path)

    def add(
        self,
        base: Ref | BlockSource | None,
        tuned: Mapping[str, Ref | TaskVector],
        *,
        storage: str | None = None,
        edits: KeyEdits | None = None,
        allow_distant: bool = False,
        progress: Progress | None = None,
    ) -> Bank:
        """Add vectors to a bank on disk, as one more file; existing files are not changed.

        ``storage`` is the bank's by default; the other arguments are those of ``build``. Without a base
        there must be task vectors alone, which know theirs.
        """
        path = self._require_path()
        in_part = [name for name in self if self._table.has_fewer_blocks(name)]
        if self.manifest is not None and (self.names != self.manifest.vectors or in_part):
            raise UsageError(
                "BANK-NAME",
                "vectors cannot be added to a selection from a bank",
                fix="Bank.load(path).add(…), then select",
            )
        kind = Storage.of(storage or self.storage)
        if kind.has_mean:  # a mean of the few new vectors would be no mean of the bank
            if storage:
                raise UsageError("USAGE", f"'{storage}' needs all vectors at once", fix="use bank quantise")
            kind = Storage.INT4
        blocks = None if base is None else BlockSource.of(base)
        with locked(path):
            current = Bank.load(path)
            current.require_new(tuned)
            assert current.manifest is not None
            if blocks is None:
                new = Bank(cast(Mapping[str, TaskVector], tuned))
                require_one_base([*current._vectors.values(), *new._vectors.values()])
            else:
                current.over(blocks)
                new = Bank.build(blocks, tuned, edits=edits, allow_distant=allow_distant, progress=progress)
            require_space(path, new._table.expected_bytes(kind))
            append_vectors(path, current.manifest, list(new._vectors.values()), kind, progress)
        return Bank.load(path)

    def annotate(self, facts: Mapping[str, Mapping[str, Fact]]) -> Bank:
        """Write facts about vectors (accuracies of a task, say) to the bank on disk, beside existing ones."""
        path = self._require_path()
        self._require_known(facts)
        with locked(path):
            write_facts(path, facts)
        return Bank.load(path)

    def with_features(self, features: Mapping[str, Tensor]) -> Bank:
        """Write mean features of the vectors' tasks to the bank on disk, beside existing ones."""
        path = self._require_path()
        self._require_known(features)
        with locked(path):
            replace_features(path, features)
        return Bank.load(path)

    @property
    def base(self) -> BaseInfo:
        """The base of all vectors, with its activation if any vector records it."""
        return common_base(list(self._vectors.values()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._vectors)

    @property
    def facts(self) -> Mapping[str, Mapping[str, Fact]]:
        """The facts that ``annotate`` wrote, by vector."""
        known = self.manifest.facts if self.manifest is not None else {}
        return {name: known.get(name, {}) for name in self}

    @property
    def features(self) -> dict[str, Tensor]:
        """Mean features of the vectors' tasks, computed with the base, where ``with_features`` wrote them."""
        if self.manifest is None or self.manifest.features is None:
            return {}
        features = read_bank_features(self._require_path(), self.manifest)
        return {name: features[name] for name in self if name in features}

    @property
    def storage(self) -> str:
        """The storage of a bank on disk; files that were added may have others."""
        return next((self.storage_of(name) for name in self), Storage.FP32)

    def storage_of(self, name: str) -> str:
        return self._table.storage_of(name)

    @property
    def content_hash(self) -> str:
        """Hash of the base, names and deltas; it does not depend on where the bank is stored."""
        return self._table.content_hash(self.base, self.manifest)

    @property
    def whole_hash(self) -> str:
        """The content hash of the bank that this one was selected from; its own if it was not."""
        return (self._parent or self).content_hash

    def __len__(self) -> int:
        return len(self._vectors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._vectors)

    def __contains__(self, name: str) -> bool:
        return name in self._vectors

    def __getitem__(self, name: str) -> TaskVector:
        self._require_known([name])
        return self._vectors[name]

    def __repr__(self) -> str:
        return f"Bank({len(self)} vectors, {len(self.layout.blocks)} blocks: {', '.join(self.names[:6])})"

    def read_block(self, block: str, *, exact: bool = True) -> dict[str, Delta]:
        """Read one block of all vectors that have it, in the bank's order: one contiguous read per file.

        Without ``exact``, the tuned values that base + delta misses by a rounding are not read.
        """
        return self._table.read_block(block, exact=exact)

    def block_bytes(self, block: str) -> int:
        """Return the stored size of one block's deltas; an upper bound for a bank that is not on disk."""
        return self._table.block_bytes(block)

    def over(self, base: Ref | BlockSource, *, any_base: bool = False) -> BlockSource:
        """Return a model's weights in the bank's blocks; raises unless the model is the bank's base.

        With ``any_base``, any model with the same blocks is accepted.
        """
        blocks = base if isinstance(base, BlockSource) else split_like(self.layout, open_weights(base))
        require = require_blocks if any_base else require_base
        require(blocks, self.base, self.layout)
        return blocks

    def only(self, *names: str) -> Bank:
        """Return the bank of these vectors, in the bank's order."""
        self._require_known(names)
        return self._subset({name: v for name, v in self._vectors.items() if name in names})

    def without(self, *names: str) -> Bank:
        """Return the bank without these vectors; an unknown name is an error."""
        self._require_known(names)
        return self._subset({name: v for name, v in self._vectors.items() if name not in names})

    def only_cells(self, cells: Mapping[str, Collection[str]]) -> Bank:
        """Return the bank of these cells: vector names to block names. Vectors without blocks are left out.

        A cell that the bank does not have is an error.
        """
        self._require_known(cells)
        absent = [(name, block) for name in cells for block in cells[name] if block not in self[name]]
        if absent:
            name, block = absent[0]
            raise UsageError(
                "BANK-NAME",
                f"vector '{name}' has no block '{printable(block)}'",
                fix=f"list its blocks with bank['{name}'].blocks",
            )
        return self._subset(
            {
                name: vector
                if len(set(cells[name])) == len(vector.blocks)
                else vector.within(frozenset(cells[name]))
                for name, vector in self._vectors.items()
                if cells.get(name)
            }
        )

    def select(self, rule: SelectionRule) -> Bank:
        """Return a smaller bank, chosen by one of the rules in ``aniso.selection``."""
        return rule.choose(self).bank

    def with_vectors(self, vectors: Mapping[str, TaskVector]) -> Bank:
        """Return the bank with more vectors over the same base, which are not written to disk."""
        self.require_new(vectors)
        more, places, whole = {**self._vectors, **vectors}, self._table.locations, self._parent or self
        return Bank(more, path=self.path, manifest=self.manifest, locations=places, parent=whole)

    def _subset(self, vectors: Mapping[str, TaskVector]) -> Bank:
        table = self._table.subset(vectors)
        whole, places = self._parent or self, table.locations
        return Bank(vectors, path=self.path, manifest=self.manifest, locations=places, parent=whole)

    def __reduce__(self) -> tuple[Callable[..., Bank], tuple[Any, ...]]:
        """Pickle the path, the cells and the content hash, not the deltas."""
        if self.manifest is not None and not set(self._vectors) <= set(self.manifest.vectors):
            raise UsageError("BANK-MANIFEST", "vectors of this bank are not on disk", fix="bank.add(None, …)")
        cells = {name: [block.name for block in vector.blocks] for name, vector in self._vectors.items()}
        return _reload, (self._require_path().resolve(), cells, self.content_hash)

    def __deepcopy__(self, memo: object) -> Bank:
        return self  # immutable

    def check(self, progress: Progress | None = None) -> list[str]:
        """Read the whole bank and compare hashes, indices and norms; returns notes, raises on damage."""
        path = self._require_path()
        assert self.manifest is not None
        notes = check_files(path, self.manifest, progress)
        check_norms(self._vectors, [block.name for block in self.layout.blocks], self.read_block, progress)
        return [*notes, *duplicate_notes(self._vectors)]

    @property
    def notes(self) -> list[str]:
        """Notes and warnings on the vectors from when they were made."""
        return [*vector_notes(self._vectors), *duplicate_notes(self._vectors)]

    def _require_path(self) -> Path:
        if self.path is None:
            raise UsageError("BANK-MANIFEST", "this bank is not on disk", fix="bank.save(directory)")
        return self.path

    def require_new(self, names: Collection[str]) -> None:
        """Raise an error if the bank has a vector of one of these names."""
        for name in filter(self.__contains__, names):
            raise UsageError("BANK-NAME", f"the bank already has a vector '{name}'", fix="use another name")

    def _require_known(self, names: Collection[str]) -> None:
        unknown = [name for name in names if name not in self]
        if unknown:
            raise UsageError(
                "BANK-NAME",
                f"the bank has no vector {', '.join(map(repr, unknown))}",
                expected=", ".join(self.names),
                fix="aniso bank ls",
            )


def _reload(path: Path, cells: Mapping[str, Sequence[str]], content: str) -> Bank:
    bank = Bank.load(path).only_cells(cells)
    if bank.content_hash != content:
        raise InputError(
            "FILE-HASH",
            f"the bank '{printable(path)}' has changed since it was pickled",
            expected=content[:16],
            found=bank.content_hash[:16],
            fix="restore the bank from a copy, or make the composition again",
        )
    return bank
