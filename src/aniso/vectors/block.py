"""Blocks: the parts of a model that have coefficients, and the tensors of a file that they consist of."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import torch
from torch import Tensor

from aniso.errors import UsageError
from aniso.vectors.naming import (
    HUGGING_FACE,
    OPEN_CLIP,
    PLAIN,
    SCHEMES,
    TEXT,
    VISION,
    Names,
    Rule,
    expanded,
    layers_of,
    recognise,
)
from aniso.weights import TensorInfo, WeightSource


class Kind(StrEnum):
    """The kind of a block; the last four are not part of task vectors."""

    ATTENTION = "attention weight"
    MLP = "mlp weight"
    CONV = "conv weight"
    BIAS = "bias"
    NORM = "norm"
    EMBEDDING = "embedding"
    PROJECTION = "projection"
    POOLER = "pooler"
    OTHER = "weight"
    BUFFER = "buffer"
    STATISTIC = "running statistic"
    TEXT_TOWER = "text tower"
    LOGIT_SCALE = "logit scale"


MATRICES = frozenset({Kind.ATTENTION, Kind.MLP, Kind.CONV, Kind.PROJECTION, Kind.POOLER, Kind.OTHER})
"""The kinds of weights that are linear maps, as embeddings are not."""


@dataclass(frozen=True)
class Part:
    """Rows ``start:stop`` of a block are rows from ``offset`` on of the tensor ``key``."""

    key: str
    start: int
    stop: int
    offset: int = 0
    transposed: bool = False


@dataclass(frozen=True)
class Block:
    """A named part of a model; ``parts`` are the tensors of one file that it consists of."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    depth: int | None = None
    parts: tuple[Part, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def gathered(self, read: Callable[[str], Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Read the block's values from the tensors of its parts; in their dtype by default."""
        if len(self.parts) == 1:
            return _piece(self.parts[0], read, dtype).contiguous()
        first = _piece(self.parts[0], read, dtype)
        out = torch.empty(self.shape, dtype=first.dtype, device=first.device)
        for part in self.parts:  # one at a time: at most twice the block's size in memory
            out[part.start : part.stop] = first if part is self.parts[0] else _piece(part, read, dtype)
        return out

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The shape as a matrix: the first dimension by all others."""
        rows = self.shape[0] if self.shape else 1
        return rows, self.numel // max(1, rows)

    @property
    def is_matrix(self) -> bool:
        """True for the weight of a linear map: some biases and norms have names that tell nothing."""
        return self.kind in MATRICES and len(self.shape) > 1

    @property
    def most_components(self) -> int:
        """The largest number of singular components of a matrix; 1 for other blocks, which have none."""
        return max(1, min(self.matrix_shape)) if self.is_matrix else 1


def _piece(part: Part, read: Callable[[str], Tensor], dtype: torch.dtype | None) -> Tensor:
    tensor = read(part.key)
    if part.transposed:
        tensor = tensor.T
    if tensor.ndim:
        tensor = tensor[part.offset : part.offset + part.stop - part.start]
    return tensor if dtype is None else tensor.to(dtype)


@dataclass(frozen=True)
class Place:
    """The block and part that a tensor of a file belongs to."""

    block: Block
    part: Part


@dataclass(frozen=True)
class Layout:
    """A model's blocks in order, and the tensors outside of task vectors."""

    scheme: str
    blocks: tuple[Block, ...]
    outside: tuple[Block, ...] = ()

    @classmethod
    def of(cls, source: WeightSource, *, scheme: str = "auto", split: bool = False) -> Layout:
        """Return the layout of a weight source, from its names and shapes alone.

        ``split`` makes query, key and value separate blocks, as Hugging Face names them.
        """
        names = _names(source, scheme)
        builder = _Builder(source, names)
        if names.scheme in (HUGGING_FACE, OPEN_CLIP):
            builder.add_rules(split=split)
        builder.add_rest()
        return builder.layout()

    @cached_property
    def by_name(self) -> Mapping[str, Block]:
        return {block.name: block for block in self.blocks}

    @cached_property
    def signature(self) -> str:
        """A hash of the blocks' names and shapes, equal for every naming of the same model."""
        lines = sorted(f"{b.name} {b.shape}" for b in self.blocks)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @cached_property
    def places(self) -> Mapping[str, tuple[Place, ...]]:
        """The blocks that each tensor of the source belongs to."""
        out: dict[str, tuple[Place, ...]] = {}
        for block in self.blocks:
            for part in block.parts:
                out[part.key] = (*out.get(part.key, ()), Place(block, part))
        return out


def _names(source: WeightSource, scheme: str) -> Names:
    if scheme not in ("auto", *SCHEMES):
        raise UsageError(
            "LAYOUT-SCHEME",
            f"there is no naming scheme '{scheme}'",
            expected=", ".join(("auto", *SCHEMES)),
            fix="choose one of these, or leave --scheme out",
        )
    tied = tied_names(source)
    keys = [key for key in source.tensors if tied.get(key, key) == key]
    names = recognise(keys)
    if scheme == PLAIN:
        return Names(PLAIN, {key: key for key in keys})
    if scheme not in ("auto", names.scheme):
        raise UsageError(
            "LAYOUT-SCHEME",
            f"'{source.label}' does not follow the naming '{scheme}'",
            found=names.scheme,
            expected=scheme,
            fix=f"use --scheme auto, or one of {', '.join(SCHEMES)}",
        )
    return names


def tied_names(source: WeightSource) -> dict[str, str]:
    """Return, for every name of a tied tensor, the name of its block.

    This is the shortest name of an embedding, if it is one: the name under which transformers saves a model,
    so that files and the model itself agree. Otherwise it is the first in alphabetical order.
    """
    groups: dict[str, list[str]] = {}
    for name, other in source.aliases.items():
        groups.setdefault(other, [other]).append(name)
    return {name: _first(names) for names in groups.values() for name in names}


def _first(names: list[str]) -> str:
    embedding = [name for name in names if _KINDS[0][0].search(name)]
    return min(embedding, key=lambda name: (len(name), name)) if embedding else min(names)


class _Builder:
    """Collects blocks in order and removes the tensors that are used."""

    def __init__(self, source: WeightSource, names: Names) -> None:
        self.source = source
        self.names = names
        self.left = dict(names.keys)
        self.blocks: list[Block] = []
        self.outside: list[Block] = []

    def layout(self) -> Layout:
        return Layout(self.names.scheme, tuple(self.blocks), tuple(self.outside))

    def add_rules(self, *, split: bool) -> None:
        for rules, target, division in ((VISION, self.blocks, split), (TEXT, self.outside, False)):
            for rule in expanded(rules, layers_of(rules, self.left)):
                target.extend(self._rule_blocks(rule, division, outside=target is self.outside))

    def _rule_blocks(self, rule: Rule, split: bool, *, outside: bool) -> list[Block]:
        fused = self.names.scheme == OPEN_CLIP
        wanted = (rule.open_clip,) if fused else rule.hugging_face
        if not all(name in self.left and self._info(name).is_float for name in wanted):
            return []
        keys = [self.left.pop(name) for name in wanted]
        shapes = [self.source.tensors[key].shape for key in keys]
        turned = rule.transposed and not fused and len(shapes[0]) == 2
        if turned:
            shapes = [shape[::-1] for shape in shapes]
        parts, row = [], 0
        for key, shape in zip(keys, shapes, strict=True):
            rows = shape[0] if shape else 1
            parts.append(Part(key, row, row + rows, transposed=turned))
            row += rows
        shape = (row, *shapes[0][1:]) if shapes[0] else ()
        kind = _outside_kind(rule.open_clip) if outside else _kind(rule.open_clip, shape)
        block = Block(rule.open_clip, shape, kind, _depth(rule.open_clip), tuple(parts))
        return _divided(block) if split and len(rule.hugging_face) == 3 else [block]

    def add_rest(self) -> None:
        """Add tensors that no rule covers as separate blocks, or outside of task vectors."""
        # by name, so that the order in the file does not matter
        for name, key in sorted(self.left.items(), key=lambda item: _natural(item[0])):
            info = self.source.tensors[key]
            kind = self._rest_kind(name, info)
            target = self.outside if kind in OUTSIDE else self.blocks
            rows = info.shape[0] if info.shape else 1
            target.append(Block(name, info.shape, kind, _depth(name), (Part(key, 0, rows),)))

    def _rest_kind(self, name: str, info: TensorInfo) -> Kind:
        if not info.is_float:
            return Kind.BUFFER
        if name.endswith((".running_mean", ".running_var")):
            return Kind.STATISTIC
        if self.names.scheme != PLAIN and not name.startswith(("visual.", "vision_model.", "visual_")):
            return _outside_kind(name)
        return self._norm_or(name, info)

    def _norm_or(self, name: str, info: TensorInfo) -> Kind:
        """Return the kind norm for weights with one dimension, and for their biases."""
        weight = f"{name.rpartition('.')[0]}.weight"
        key = self.names.keys.get(weight)
        scales = key is not None and len(self.source.tensors[key].shape) == 1
        return Kind.NORM if scales and len(info.shape) == 1 else _kind(name, info.shape)

    def _info(self, name: str) -> TensorInfo:
        return self.source.tensors[self.left[name]]


OUTSIDE = frozenset({Kind.BUFFER, Kind.STATISTIC, Kind.TEXT_TOWER, Kind.LOGIT_SCALE})


def _divided(block: Block) -> list[Block]:
    """Return query, key and value as three blocks."""
    rows = block.shape[0] // 3
    out = []
    for i, letter in enumerate("qkv"):
        source = block.parts[i] if len(block.parts) == 3 else block.parts[0]
        offset = 0 if len(block.parts) == 3 else i * rows
        part = Part(source.key, 0, rows, offset)
        name = f"{block.name}.{letter}"
        out.append(Block(name, (rows, *block.shape[1:]), block.kind, block.depth, (part,)))
    return out


def _outside_kind(name: str) -> Kind:
    return Kind.LOGIT_SCALE if name in ("logit_scale", "logit_bias") else Kind.TEXT_TOWER


_NORM = re.compile(r"(^|[._])(ln|norm|bn|layer_?norm|layrnorm|batch_?norm)\w*(\.|_|\d|$)", re.IGNORECASE)
_KINDS: tuple[tuple[re.Pattern[str], Kind], ...] = (
    (re.compile(r"embed|\bwte\b|\bwpe\b|shared\.weight", re.IGNORECASE), Kind.EMBEDDING),
    (re.compile(r"(^|\.)pooler\."), Kind.POOLER),
    (re.compile(r"attn|attention|[._][qkvo](_proj)?\.", re.IGNORECASE), Kind.ATTENTION),
    (re.compile(r"mlp|fc\d?\b|ffn|feed_forward|dense|\bw[io](_\d)?\b", re.IGNORECASE), Kind.MLP),
    (re.compile(r"proj|head", re.IGNORECASE), Kind.PROJECTION),
)


def _kind(name: str, shape: tuple[int, ...]) -> Kind:
    """Return the kind of a block, from common names and its number of dimensions."""
    owner = name.rpartition(".")[0]
    if len(shape) <= 1 and _NORM.search(owner.rpartition(".")[2] or name):
        return Kind.NORM
    if name.endswith("bias"):
        return Kind.BIAS
    if "embed" in name.rpartition(".")[2] or "embedding" in name:
        return Kind.EMBEDDING
    if len(shape) == 4:
        return Kind.CONV
    for pattern, kind in _KINDS:
        if pattern.search(name):
            return kind
    return Kind.OTHER


def _depth(name: str) -> int | None:
    """Return the first number in a name, which is its layer."""
    number = re.search(r"(?:^|\.)([0-9]{1,6})(?:\.|$)", name)
    stage = re.search(r"(?:^|\.)layer([0-9]{1,6})\.", name)
    found = number or stage
    return int(found[1]) if found else None


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts layer 10 after layer 9."""
    parts = re.split(r"([0-9]{1,9})", name)
    return [(0, int(t), "") if i % 2 else (1, 0, t) for i, t in enumerate(parts)]


__all__ = ["Block", "Kind", "Layout", "OUTSIDE", "Part", "Place", "tied_names"]
