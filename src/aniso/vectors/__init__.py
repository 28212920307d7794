"""What fine-tuning changed: blocks, deltas, task vectors, banks."""

from aniso.vectors.bank import Bank
from aniso.vectors.block import Block, Kind, Layout, Part
from aniso.vectors.block_source import BlockSource
from aniso.vectors.delta import Delta, Dense, LowRank, Packed
from aniso.vectors.origin import BaseInfo, Provenance
from aniso.vectors.packing import Packing, Storage
from aniso.vectors.random_bases import random_bases
from aniso.vectors.shelf import shelf
from aniso.vectors.task_vector import TaskVector

__all__ = [
    "TaskVector",
    "random_bases",
    "shelf",
    "Bank",
    "Layout",
    "Block",
    "Part",
    "Kind",
    "BlockSource",
    "BaseInfo",
    "Provenance",
    "Delta",
    "Dense",
    "LowRank",
    "Packed",
    "Packing",
    "Storage",
]
