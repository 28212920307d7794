"""The vectors of a bank and where each is stored: reads blocks, estimates sizes, hashes content."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from aniso.vectors._files.bank_directory import VectorLocation
from aniso.vectors._files.manifest import Manifest
from aniso.vectors._files.segment import Segment
from aniso.vectors.block import Block
from aniso.vectors.delta import Delta, LowRank
from aniso.vectors.packing import Storage
from aniso.vectors.provenance import BaseInfo
from aniso.vectors.task_vector import TaskVector
from aniso.weights.peft_lora import LORA


@dataclass(frozen=True)
class VectorTable:
    """Vectors by name; a vector without a location is computed from the files it was built from."""

    vectors: Mapping[str, TaskVector]
    locations: Mapping[str, VectorLocation]

    def subset(self, vectors: Mapping[str, TaskVector]) -> VectorTable:
        """Return the table of these vectors, which may have fewer blocks than the stored ones."""
        return VectorTable(vectors, {n: self.locations[n] for n in vectors if n in self.locations})

    def storage_of(self, name: str) -> Storage:
        location = self.locations.get(name)
        return location.storage if location else Storage.FP32

    def read_block(self, block: str, *, exact: bool = True) -> dict[str, Delta]:
        """Read one block of all vectors that have it; vectors of one file are read together."""
        deltas: dict[str, Delta] = {}
        by_segment: dict[int, tuple[Segment, dict[int, str]]] = {}
        for name, vector in self.vectors.items():
            if block not in vector:
                continue
            location = self.locations.get(name)
            if location is None:
                deltas[name] = vector[block]
                continue
            segment = location.segment
            by_segment.setdefault(id(segment), (segment, {}))[1][location.index] = name
        for segment, wanted in by_segment.values():
            for i, delta in segment.read(block, set(wanted), exact=exact).items():
                deltas[wanted[i]] = delta
        return {name: deltas[name] for name in self.vectors if name in deltas}

    def block_bytes(self, block: str) -> int:
        """Return the stored size of one block's deltas; an upper bound for what is not on disk."""
        total = 0
        for name, vector in self.vectors.items():
            location = self.locations.get(name)
            if block not in vector:
                continue
            if location is not None:
                total += location.block_bytes(block)
            elif vector.provenance.format == LORA:  # small, so reading it takes no time
                total += vector[block].nbytes
            else:
                total += 4 * vector.layout.by_name[block].numel
        return total

    def expected_bytes(self, storage: Storage) -> int:
        """Return the approximate size on disk in a storage."""
        element = storage.bytes_per_element(len(self.vectors))
        return sum(_expected_bytes(vector, element, storage.rank) for vector in self.vectors.values())

    def has_fewer_blocks(self, name: str) -> bool:
        """True if a stored vector has more blocks than this table's vector of that name."""
        location = self.locations.get(name)
        return location is not None and len(self.vectors[name].blocks) != location.blocks

    def content_hash(self, base: BaseInfo, manifest: Manifest | None) -> str:
        """Hash the base, names and deltas; vectors on disk by the sha256 of their file."""
        known = hashlib.sha256(f"{base.content}\0{base.activation or 'unknown'}".encode())
        digest = hashlib.sha256(f"{known.hexdigest()}\n".encode())
        files = {r.file: r.sha256 for r in manifest.files} if manifest else {}
        for name, vector in self.vectors.items():
            location = self.locations.get(name)
            if location:
                blocks = "".join(f"\0{b.name}" for b in vector.blocks) if self.has_fewer_blocks(name) else ""
                content = f"{files[location.file]}\0{location.index}{blocks}"
            else:
                norms = sorted(vector.norms.items())
                content = f"{vector.provenance.sha256}\0{vector.provenance.formula}\0{norms}"
            digest.update(f"{name}\0{content}\n".encode())
        return digest.hexdigest()


def _expected_bytes(vector: TaskVector, element: float, rank: int | None) -> int:
    """Matrices of a rank; or dense, or low-rank if the largest block is, the only one that is read."""
    blocks = vector.blocks
    if not blocks:
        return 0
    if rank is not None:
        factored = [block for block in blocks if block.most_components > 1]
        dense = sum(block.numel for block in blocks) - sum(block.numel for block in factored)
        return int(element * dense) + 4 * sum(_factor_numel(block, rank) for block in factored)
    largest = vector[max(blocks, key=lambda block: block.numel).name]
    if not isinstance(largest, LowRank):
        return int(element * sum(block.numel for block in blocks))
    return 4 * sum(min(block.numel, _factor_numel(block, largest.rank)) for block in blocks)


def _factor_numel(block: Block, rank: int) -> int:
    return min(rank, *block.matrix_shape) * sum(block.matrix_shape)
