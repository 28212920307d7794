"""The interface of merge rules."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from aniso.errors import UsageError, printable
from aniso.merge.deltas import Deltas
from aniso.registry import MERGE_RULES

RuleOption = float | int | bool | str
"""The value of a rule's option."""


@dataclass(frozen=True)
class MergeRule(ABC):
    """A function of one block of all vectors that returns one block of the merged vector.

    A rule is a frozen dataclass whose fields are its options, each with a default. ``matrix`` and ``other``
    return the block before it is multiplied by ``scale``.
    """

    scale: float = 1.0
    """Factor of the whole merged vector."""

    spectral: ClassVar[bool] = True
    """Decomposes matrices. Low-rank vectors are merged in core space, where that takes no time."""
    linear: ClassVar[bool] = False
    """The result is a sum of scaled vectors, so that it is the same in core space."""
    least_vectors: ClassVar[int] = 1
    distinct: ClassVar[bool] = False
    """Refuses two vectors that are equal everywhere: the rule would count their directions twice."""
    reads: ClassVar[int] = 1
    """How often every delta is read."""

    def __post_init__(self) -> None:
        self.require("scale", math.isfinite(self.scale) and self.scale != 0, "a number other than 0")

    @property
    def kind(self) -> str:
        """The name that the rule is registered with."""
        return MERGE_RULES.name_of(type(self))

    @abstractmethod
    def matrix(self, deltas: Deltas) -> Tensor:
        """Return the merged block of matrices, outputs by inputs, in float64."""

    def other(self, deltas: Deltas) -> Tensor:
        """Return the merged block of anything else: biases, norms, convolutions. By default the mean."""
        return deltas.mean()

    def coefficient(self, vectors: int) -> float | None:
        """Return the coefficient of each of so many vectors if the rule is their plain sum; else None."""
        return None

    def prepared(self, blocks: Iterable[Deltas]) -> MergeRule:
        """Return the rule after a pass over all blocks, if it needs numbers of whole vectors."""
        return self

    def has_room(self, rank: int, vectors: int) -> bool:
        """Return False if matrices of this rank have too few singular components for so many vectors."""
        return True

    def require_room(self, block: str, shape: Sequence[int], vectors: int) -> None:
        """Raise MERGE-RANK unless matrices of this shape have room for so many vectors."""
        if not self.has_room(min(shape), vectors):
            raise UsageError(
                "MERGE-RANK",
                f"merge rule '{self.kind}' needs more singular components than a matrix has",
                key=block,
                found=f"shape {shape[0]} x {shape[1]}, {vectors} vectors",
                fix="--small mean averages such matrices; or merge fewer vectors with --vectors",
            )

    def workspace(self, rows: int, columns: int) -> int:
        """Return about how many float64 numbers merging one matrix of this shape holds at once."""
        return 5 * rows * columns

    def require(self, option: str, fine: bool, expected: str) -> None:
        """Raise UsageError unless the value of an option is in its range."""
        if not fine:
            value = getattr(self, option)
            raise UsageError(
                "USAGE",
                f"invalid value {printable(value)} for option '{option}' of merge rule '{self.kind}'",
                expected=expected,
                fix=f"--option {option}={self._default(option)}",
            )

    def options(self) -> dict[str, RuleOption]:
        """Return the rule's options with their values."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def _default(self, option: str) -> object:
        return next(field.default for field in dataclasses.fields(self) if field.name == option)


class ElementwiseRule(MergeRule):
    """A rule that treats every element of every block alike."""

    spectral: ClassVar[bool] = False

    @abstractmethod
    def elements(self, deltas: Deltas) -> Tensor:
        """Return the merged block of any shape."""

    def matrix(self, deltas: Deltas) -> Tensor:
        return self.elements(deltas)

    def other(self, deltas: Deltas) -> Tensor:
        return self.elements(deltas)


def new_merge_rule(name: str, options: Mapping[str, RuleOption] | None = None) -> MergeRule:
    """Return the rule that is registered as ``name``, with these options."""
    MERGE_RULES.require(name)
    kind: type[MergeRule] = MERGE_RULES.get(name)
    known = [field.name for field in dataclasses.fields(kind)]
    for key in options or {}:
        if key not in known:
            raise _unknown_option(name, key, kind)
    return kind(**(options or {}))  # type: ignore[arg-type]


def parsed_options(name: str, given: Sequence[str]) -> dict[str, RuleOption]:
    """Return options of a rule that are written as text, such as ``keep=0.3``."""
    MERGE_RULES.require(name)
    kind: type[MergeRule] = MERGE_RULES.get(name)
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    found: dict[str, RuleOption] = {}
    for pair in given:
        key, _, text = pair.partition("=")
        if key not in defaults:
            raise _unknown_option(name, key, kind)
        found[key] = _converted(name, key, text, defaults[key])
    return found


def _unknown_option(name: str, key: str, kind: type[MergeRule]) -> UsageError:
    known = [f"{field.name}={field.default}" for field in dataclasses.fields(kind)]
    return UsageError(
        "USAGE",
        f"merge rule '{name}' has no option '{printable(key)}'",
        expected=", ".join(known),
        fix=f"--option {known[0]}",
    )


def _converted(rule: str, key: str, text: str, default: object) -> RuleOption:
    """Return an option's text as a value of its default's type."""
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(default, int):
            return int(text)
        return float(text) if isinstance(default, float) else text
    except (KeyError, ValueError):
        raise UsageError(
            "USAGE",
            f"invalid value '{printable(text)}' for option '{key}' of merge rule '{rule}'",
            expected="true or false" if isinstance(default, bool) else f"such as {default}",
            fix=f"--option {key}={default}",
        ) from None
