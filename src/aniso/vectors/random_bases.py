"""Random vectors: normal numbers with each block's mean and deviation, generated when they are read.

A baseline: the gain of task vectors over these is due to what they learned.
"""

from __future__ import annotations

import hashlib
from functools import partial

import numpy
import torch

from aniso.errors import UsageError
from aniso.vectors.bank import Bank
from aniso.vectors.block import Block
from aniso.vectors.block_source import BlockSource
from aniso.vectors.delta import Delta, Dense
from aniso.vectors.provenance import Provenance
from aniso.vectors.task_vector import TaskVector
from aniso.weights import Ref

_MOST = 100_000


def random_bases(base: Ref | BlockSource, count: int, seed: int = 0) -> Bank:
    """Return a bank of ``count`` random vectors; nothing is stored. The first vectors do not depend on it."""
    if not 1 <= count <= _MOST:
        raise UsageError(
            "BANK-NAME",
            f"invalid number of random vectors: {count}",
            expected=f"1 to {_MOST:,}",
            fix="random:15",
        )
    blocks = BlockSource.of(base)
    info = blocks.identity()
    moments = {block.name: _moments(blocks, block) for block in blocks.layout.blocks}
    vectors = {}
    for number in range(count):
        name = f"random-{number}"
        words = f"random basis\0{info.content}\0{seed}\0{number}"
        cells = {b.name: partial(_sample, b, *moments[b.name], words) for b in blocks.layout.blocks}
        provenance = Provenance(
            name, "random", hashlib.sha256(words.encode()).hexdigest(), formula=f"normal, seed {seed}"
        )
        vectors[name] = TaskVector(name, blocks.layout, lambda: info, cells, provenance)
    return Bank(vectors)


def _moments(base: BlockSource, block: Block) -> tuple[float, float]:
    values = base.read(block).double()
    return float(values.mean()), float(values.std(correction=0))


def _sample(block: Block, mean: float, deviation: float, words: str) -> Delta:
    seed = hashlib.blake2b(f"{words}\0{block.name}".encode(), digest_size=8).digest()
    # numpy's generator is the same on every machine and in every version; torch promises neither
    drawn = numpy.random.Generator(numpy.random.Philox(int.from_bytes(seed, "big")))
    values = torch.from_numpy(drawn.standard_normal(block.shape, dtype=numpy.float32))
    return Dense(values.mul_(deviation).add_(mean))
