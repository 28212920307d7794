"""What is fuzzed: for each kind of file valid seeds, changes to them, and everything a reader might do."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True)
class Case:
    """One input: files in a directory."""

    files: Mapping[str, bytes]
    damaged: bool = False
    """Whether reading must fail, since bytes that a checksum covers have changed."""


class Target(ABC):
    """A reader and how to make input for it."""

    name: ClassVar[str]
    quick: ClassVar[int] = 1000
    """Cases in the default suite."""

    @abstractmethod
    def prepare(self, place: Path) -> None:
        """Make the valid files that cases are changed from; ``place`` is an empty directory."""

    @abstractmethod
    def case(self, rng: random.Random) -> Case:
        """A case that depends on the random numbers alone."""

    @abstractmethod
    def read(self, folder: Path) -> object:
        """Do everything with the files of a case that the product might do."""

    def warm(self, folder: Path) -> None:  # noqa: B027
        """Import what reading needs, so that no case is charged for it."""


def targets() -> dict[str, type[Target]]:
    """Every target by its name."""
    from . import models, pickles, products, weights

    kinds = (
        pickles.ZipPickles,
        pickles.LegacyPickles,
        weights.Safetensors,
        weights.Adapters,
        weights.Images,
        products.Banks,
        products.Coefficients,
        products.Heads,
        products.Records,
        products.Specs,
        models.Encoders,
        models.SentenceEncoders,
        models.LanguageModels,
    )
    return {kind.name: kind for kind in kinds}
