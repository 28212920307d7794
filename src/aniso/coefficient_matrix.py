"""All coefficients of a run in a record: a matrix, vectors by blocks, in a few kB of text."""

from __future__ import annotations

import base64
import binascii
import json
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, final

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

LARGEST = 200_000
"""Characters of ``data``: a matrix that needs more is left out of its record."""
_CELLS = 1 << 20  # vectors times blocks, checked before anything is decoded
_BLOCKS = 1 << 14
_LABEL = 512  # bytes of a block's name, kind and depth as JSON
_VALUE = 2  # bytes of a float16


@final
@dataclass(frozen=True)
class BlockLabel:
    """A block as figures need it: its name, its kind, and its layer if it has one."""

    name: str
    kind: str
    depth: int | None = None


_LABELS = TypeAdapter(list[tuple[str, str, Annotated[int, Field(ge=0, lt=1 << 20)] | None]])


@final
class CoefficientMatrix(BaseModel):
    """Coefficients of vectors (rows) in blocks (columns); cells that do not exist are NaN.

    ``data`` is base64 of zlib of the values, row by row, followed by the blocks as JSON. A value is stored as
    a float16 that is multiplied by ``scale``, the largest absolute coefficient, so the error is at most
    ``scale / 4096`` and, for values above ``scale / 16000``, at most one part in 2048.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)

    vectors: Annotated[tuple[str, ...], Field(min_length=1, max_length=_CELLS)]
    block_count: Annotated[int, Field(ge=1, le=_BLOCKS)]
    scale: Annotated[float, Field(gt=0)]
    data: Annotated[str, Field(max_length=LARGEST)]
    note: str = ""
    """What a value stands for where it is not one coefficient."""

    @classmethod
    def of(
        cls,
        vectors: Sequence[str],
        blocks: Sequence[BlockLabel],
        values: Sequence[Sequence[float]],
        note: str = "",
    ) -> CoefficientMatrix | None:
        """Return the matrix, or None if it is too large for a record."""
        if len(vectors) * len(blocks) > _CELLS or len(blocks) > _BLOCKS:
            return None
        flat = [x for row in values for x in row]
        scale = float(f"{max((abs(x) for x in flat if x == x), default=0.0) or 1.0:.6g}")
        scaled = [max(-1.0, min(1.0, x / scale)) if x == x else math.nan for x in flat]
        labels = json.dumps([[b.name, b.kind, b.depth] for b in blocks], separators=(",", ":")).encode()
        if len(labels) > _LABEL * len(blocks):
            return None
        packed = zlib.compress(struct.pack(f"<{len(scaled)}e", *scaled) + labels, 9)
        data = base64.b64encode(packed).decode()
        if len(data) > LARGEST:
            return None
        return cls(vectors=tuple(vectors), block_count=len(blocks), scale=scale, data=data, note=note)

    @property
    def blocks(self) -> tuple[BlockLabel, ...]:
        """The columns, from the input of the model to its output."""
        return self._decoded()[0]

    @property
    def rows(self) -> tuple[tuple[float, ...], ...]:
        """The coefficients of every vector; NaN where a vector does not change a block."""
        return self._decoded()[1]

    @model_validator(mode="after")
    def _is_readable(self) -> CoefficientMatrix:
        if len(self.vectors) * self.block_count > _CELLS:
            raise ValueError(f"{len(self.vectors):,} vectors by {self.block_count:,} blocks are too many")
        if len(set(self.vectors)) < len(self.vectors):
            raise ValueError("a vector occurs twice")
        blocks, rows = self._decoded()
        if len({block.name for block in blocks}) < len(blocks):
            raise ValueError("a block occurs twice")
        if any(math.isinf(x) for row in rows for x in row):
            raise ValueError("a coefficient is infinite")
        return self

    def _decoded(self) -> tuple[tuple[BlockLabel, ...], tuple[tuple[float, ...], ...]]:
        """Decompress labels and values; no more bytes are made than the stated sizes allow."""
        count = len(self.vectors) * self.block_count
        most = _VALUE * count + _LABEL * self.block_count
        try:
            unpacker = zlib.decompressobj()
            content = unpacker.decompress(base64.b64decode(self.data, validate=True), most + 1)
            if len(content) > most or len(content) < _VALUE * count or not unpacker.eof:
                raise ValueError("the values do not match the number of vectors and blocks")
            labels = _LABELS.validate_json(content[_VALUE * count :], strict=False)
        except (binascii.Error, zlib.error, ValidationError) as e:
            raise ValueError(f"the coefficients cannot be decoded: {type(e).__name__}") from None
        if len(labels) != self.block_count:
            raise ValueError(f"{len(labels):,} blocks are named, {self.block_count:,} are stated")
        values = struct.unpack(f"<{count}e", content[: _VALUE * count])
        width = self.block_count
        return (
            tuple(BlockLabel(name, kind, depth) for name, kind, depth in labels),
            tuple(
                tuple(self.scale * x for x in values[i * width : (i + 1) * width])
                for i in range(len(self.vectors))
            ),
        )
