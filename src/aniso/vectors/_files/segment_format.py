"""The format of vector files: safetensors in which the deltas of a block are stored together for all vectors.

Written block by block, so the memory needed is that of one block of one vector; read block by block, so a
bank may be larger than memory. For a block ``B`` the file holds

* ``B``: the dense deltas stacked, vectors first; or ``B|codes`` and ``B|scales`` when packed, with
  ``B|mean`` when differences to a shared mean are packed;
* ``B|exact.index``, ``B|exact.value``: tuned values that base + delta would miss by a rounding;
* ``B|A.n`` and ``B|B.n``: the low-rank factors of all vectors, concatenated along the rank
  (``B`` transposed), one pair for each number of rows and dtype that occurs;
* ``B|rows.index``, ``B|rows.value``: numbers and differences of the rows that changed, for deltas in which
  most rows did not (a vocabulary), all vectors concatenated; ``B|rows.exact.index`` and ``.value`` as above;

and a last tensor, ``aniso.index``, that says in JSON which vector is where, with a checksum of every part
(``checksums.py``). Its own sha256 is in the file's metadata. Schema 1 had no checksums. Schema 3 is
schema 2 with rows; files without rows are still written as schema 2.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from aniso.vectors.block import Kind
from aniso.vectors.packing import Storage

SCHEMA = 2
SCHEMA_WITH_ROWS = 3
READABLE = (1, SCHEMA, SCHEMA_WITH_ROWS)
INDEX = "aniso.index"
FORMAT = "aniso vectors"


def metadata(index_sha256: str, schema: int = SCHEMA) -> dict[str, str]:
    """The metadata of a file that this version writes."""
    return {"format": FORMAT, "schema": str(schema), "index": index_sha256}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BlockRecord(_Strict):
    """A block, without the names of its tensors in the source file."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    depth: int | None = None


class BaseRecord(_Strict):
    """The base of all vectors of the file."""

    label: str
    content: str
    activation: str | None = None
    norms: dict[str, float]


class ProvenanceRecord(_Strict):
    """The provenance of a vector."""

    source: str
    format: str
    sha256: str = ""
    revision: str | None = None
    dtype: str | None = None
    formula: str
    notes: tuple[str, ...] = ()


class VectorRecord(_Strict):
    """A vector: its name, block norms, packing error and provenance."""

    name: str
    norms: dict[str, float]
    relative_error: float = 0.0
    origin: ProvenanceRecord


class TermRecord(_Strict):
    """One low-rank term: ranks ``first : first + rank`` of the pair ``group``."""

    vector: int
    group: int
    first: int
    rank: int
    start: int
    scale: float


class RowsRecord(_Strict):
    """The changed rows of one vector: entries ``first : first + count`` of the block's rows."""

    vector: int
    first: int
    count: int


class CellRecord(_Strict):
    """The deltas of one block in the file."""

    dense: tuple[int, ...] = ()
    """Indices of the vectors in the order in which they are stacked."""
    packed: bool = False
    terms: tuple[TermRecord, ...] = ()
    rows: tuple[RowsRecord, ...] = ()

    @property
    def vectors(self) -> tuple[int, ...]:
        """The vectors that have a delta here; a low-rank one once for each of its terms."""
        return (*self.dense, *(t.vector for t in self.terms), *(r.vector for r in self.rows))


class Index(_Strict):
    """The last tensor of the file, as JSON."""

    schema_version: int
    storage: Storage
    scheme: str
    base: BaseRecord
    blocks: tuple[BlockRecord, ...]
    vectors: tuple[VectorRecord, ...]
    cells: dict[str, CellRecord]
    checksums: dict[str, str] = {}
    """For every other tensor the checksums of its parts in order, 16 hexadecimal digits each."""
