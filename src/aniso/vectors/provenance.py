"""Records of where things came from: the base a vector is over, and the file it was made from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class BaseInfo:
    """What identifies a base: a fingerprint that does not depend on naming or storage."""

    label: str
    content: str
    """Hash of the blocks' names and values, and of running statistics."""
    activation: str | None = None
    norms: Mapping[str, float] = field(default_factory=dict)
    """Euclidean norm of each block, to judge a difference by."""

    @property
    def fingerprint(self) -> str:
        """Content and activation in one."""
        text = f"{self.content}\0{self.activation or 'unknown'}"
        return hashlib.sha256(text.encode()).hexdigest()

    def is_same_as(self, other: BaseInfo) -> bool:
        """Equal content, and activations that do not contradict each other; some files do not say theirs."""
        known = {self.activation, other.activation} - {None}
        return self.content == other.content and len(known) <= 1


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
