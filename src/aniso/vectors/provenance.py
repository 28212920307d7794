"""Provenance of vectors: their base, and the file they were made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class BaseInfo:
    """The identity of a base, which does not depend on naming or storage."""

    label: str
    content: str
    """A hash of the blocks' names and values, and of running statistics; it names the base everywhere."""
    activation: str | None = None
    norms: Mapping[str, float] = field(default_factory=dict)
    """The Euclidean norm of each block, for plausibility checks."""

    def is_same_as(self, other: BaseInfo) -> bool:
        """True if the content is equal and activations do not differ; None, unknown, equals any."""
        known = {self.activation, other.activation} - {None}
        return self.content == other.content and len(known) <= 1


@dataclass(frozen=True)
class Provenance:
    """The source of a vector, without paths and host names."""

    source: str
    format: str
    sha256: str = ""
    revision: str | None = None
    dtype: str | None = None
    formula: str = "tuned - base"
    notes: tuple[str, ...] = ()
