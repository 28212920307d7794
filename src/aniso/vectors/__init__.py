"""Blocks, deltas, task vectors and banks: what fine-tuning changed."""

from aniso.vectors._matching.key_edits import KeyEdits
from aniso.vectors.adapter_directory import load_adapter_directory
from aniso.vectors.bank import Bank
from aniso.vectors.block import Block, Kind, Layout, Part
from aniso.vectors.block_source import BlockSource
from aniso.vectors.bundled import list_banks
from aniso.vectors.catalogue import Catalogue, CatalogueRow
from aniso.vectors.catalogue_refresh import AdapterStores, refresh_catalogue
from aniso.vectors.delta import Delta, Dense, LowRank, Packed
from aniso.vectors.packing import Packing, Storage
from aniso.vectors.provenance import BaseInfo, Provenance
from aniso.vectors.random_bases import random_bases
from aniso.vectors.sparse_rows import SparseRows
from aniso.vectors.task_vector import TaskVector

__all__ = [
    "TaskVector",
    "random_bases",
    "load_adapter_directory",
    "AdapterStores",
    "Catalogue",
    "CatalogueRow",
    "refresh_catalogue",
    "KeyEdits",
    "Bank",
    "list_banks",
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
    "SparseRows",
    "Packing",
    "Storage",
]
