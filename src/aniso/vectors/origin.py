"""Records of where things came from: the base a vector is over, and the file it was made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class BaseInfo:
    """What identifies a base: a fingerprint that does not depend on naming or storage."""

    label: str
    fingerprint: str
    activation: str | None = None
    norms: Mapping[str, float] = field(default_factory=dict)
    """Euclidean norm of each block, to judge a difference by."""


@dataclass(frozen=True)
class Provenance:
    """Where a vector came from; no paths, no host names."""

    source: str
    format: str
    sha256: str = ""
    revision: str | None = None
    dtype: str | None = None
    formula: str = "tuned - base"
    notes: tuple[str, ...] = ()
