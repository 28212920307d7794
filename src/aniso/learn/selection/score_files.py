"""Scores of adapters in a directory: parquet files of some adapters each, written whole or not at all.

Workers add files of their own; which adapters have scores depends on the files alone, so that an interrupted
worker, or one with another number of shards, continues where files end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from aniso.errors import AnisoError, InputError, UsageError, printable
from aniso.json_value import JsonObject
from aniso.learn.selection.block_gradient import BlockGradient
from aniso.weights.object_store import UNREACHABLE
from aniso.weights.tables import read_table, write_table

GRADIENT = "gradient.safetensors"
_FORMAT = "aniso scores 1"
_COLUMNS = {
    **dict.fromkeys(("uri", "etag", "block"), "text"),
    **dict.fromkeys(("score", "norm"), "number"),
    "bytes": "whole",
    **dict.fromkeys(("code", "reason"), "text"),
}


@final
@dataclass(frozen=True)
class AdapterScores:
    """Scores of one adapter's cells, or the reason why it has none."""

    uri: str
    etag: str
    blocks: tuple[str, ...] = ()
    scores: NDArray[np.float64] | tuple[()] = ()
    norms: NDArray[np.float64] | tuple[()] = ()
    nbytes: NDArray[np.int64] | tuple[()] = ()
    code: str = ""
    reason: str = ""

    @property
    def norm(self) -> float | None:
        """Euclidean norm over all blocks."""
        return None if self.code else float(np.linalg.norm(np.asarray(self.norms)))

    def refused(self, error: AnisoError) -> AdapterScores:
        """Return a result with the reason why the adapter has no scores."""
        return AdapterScores(self.uri, self.etag, code=error.code, reason=error.in_one_line())


@final
class ScoreFiles:
    """The files of scores in a directory, all of one gradient."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.gradient_path = directory / GRADIENT

    @property
    def has_gradient(self) -> bool:
        return self.gradient_path.exists()

    def gradient(self, identity: JsonObject | None, compute: Callable[[], BlockGradient]) -> BlockGradient:
        """Return the gradient of the directory, which the first worker computes and writes.

        Raises if it depends on anything but ``identity``; None accepts any.
        """
        if not self.has_gradient:
            made = compute()
            try:
                made.save(self.gradient_path)
                return made
            except UsageError:  # another worker was faster: all use the same, to the last digit
                pass
        found = BlockGradient.load(self.gradient_path)
        if identity is not None:
            found.require(identity, self.gradient_path)
        return found

    def read(self, gradient: BlockGradient) -> dict[tuple[str, str], AdapterScores]:
        """Return all scores by address and ETag; raises if a file has scores of another gradient."""
        found: dict[tuple[str, str], AdapterScores] = {}
        for path in sorted(self.directory.glob("part-*.parquet")):
            for one in self._part(path, gradient.key):
                before = found.get((one.uri, one.etag))
                if before is None or before.code:  # a later try may have reached what an earlier one did not
                    found[one.uri, one.etag] = one
        return found

    def add(self, results: Sequence[AdapterScores], gradient: BlockGradient) -> Path:
        """Write the scores of some adapters to a file of their own."""
        text = "\n".join(f"{one.uri} {one.etag} {one.code}" for one in results)
        name = f"part-{hashlib.sha256(text.encode()).hexdigest()[:24]}.parquet"
        rows = [row for one in results for row in _rows(one)]
        about = {"format": _FORMAT, "gradient": gradient.key}
        write_table(self.directory / name, _COLUMNS, rows, about, overwrite=True)
        return self.directory / name

    def _part(self, path: Path, key: str) -> list[AdapterScores]:
        columns, about = read_table(path, _COLUMNS, "SCORES")
        if about.get("format") != _FORMAT or about.get("gradient") != key:
            raise InputError(
                "RUN-CHANGED",
                f"'{printable(path)}' has scores of another gradient",
                fix="name another directory with --scores, or remove this one",
            )
        return _grouped(columns)


def unreached(one: AdapterScores) -> bool:
    """True if the adapter could not be read, and may be readable the next time."""
    return one.code == UNREACHABLE


def _rows(one: AdapterScores) -> Iterable[tuple[Any, ...]]:
    if one.code:
        return [(one.uri, one.etag, "", None, None, None, one.code, one.reason)]
    values = zip(one.blocks, one.scores, one.norms, one.nbytes, strict=True)
    return [(one.uri, one.etag, b, float(s), float(n), int(size), "", "") for b, s, n, size in values]


def _grouped(columns: dict[str, list[Any]]) -> list[AdapterScores]:
    """Return adapters, whose rows follow each other."""
    uris, etags, codes = columns["uri"], columns["etag"], columns["code"]
    known: dict[tuple[str, ...], tuple[str, ...]] = {}
    out, start = [], 0
    for i in range(1, len(uris) + 1):
        if i < len(uris) and (uris[i], etags[i]) == (uris[start], etags[start]):
            continue
        if codes[start]:
            reason = columns["reason"][start]
            out.append(AdapterScores(uris[start], etags[start], code=codes[start], reason=reason))
        else:
            blocks = tuple(columns["block"][start:i])
            scores, norms = (np.array(columns[name][start:i], np.float64) for name in ("score", "norm"))
            nbytes = np.array(columns["bytes"][start:i], np.int64)
            blocks = known.setdefault(blocks, blocks)
            out.append(AdapterScores(uris[start], etags[start], blocks, scores, norms, nbytes))
        start = i
    return out
