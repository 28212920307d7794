"""Which epoch's result is kept: pure functions of what was measured, the start included."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from aniso.data import Labelled, TextDataset
from aniso.errors import UsageError, printable

Measured = Mapping[str, float]
"""Accuracies after an epoch, and likelihoods of tokens, by the name of the split."""
_ROUNDING = 1e-9  # less than a picture is worth: at the floor exactly is not below it


class Keep(ABC):
    """What to measure after every epoch, and which epoch that makes the best so far."""

    @property
    @abstractmethod
    def splits(self) -> tuple[Labelled | TextDataset, ...]: ...

    @abstractmethod
    def choose(self, history: Sequence[Measured]) -> int:
        """The place of the epoch to keep; the first is the start, before any step."""

    def ends(self, history: Sequence[Measured]) -> bool:
        """Whether going on makes no sense."""
        return False

    @abstractmethod
    def identity(self) -> dict[str, Any]: ...


@final
@dataclass(frozen=True)
class Last(Keep):
    """The last epoch. Nothing is measured, so no labelled split is needed beside the one learned from."""

    @property
    def splits(self) -> tuple[Labelled, ...]:
        return ()

    def choose(self, history: Sequence[Measured]) -> int:
        return len(history) - 1

    def identity(self) -> dict[str, Any]:
        return {"keep": "last"}


@final
@dataclass(frozen=True, init=False)
class Best(Keep):
    """The highest mean accuracy, each relative to a reference where one is given; the first of equals.

    Of texts it is the likelihood of a token that counts, one by the perplexity.
    """

    _splits: tuple[Labelled | TextDataset, ...]
    references: Mapping[str, float] = field(default_factory=dict)

    def __init__(
        self, *splits: Labelled | TextDataset, references: Mapping[str, float] | None = None
    ) -> None:
        object.__setattr__(self, "_splits", _chosen_by(splits))
        object.__setattr__(self, "references", dict(references or {}))
        low = {name: value for name, value in self.references.items() if not value > 0}
        if low:
            raise UsageError("KEEP", f"a reference of {printable(low)} cannot be divided by", fix="above 0")
        names = [split.name for split in self._splits]
        unknown = [name for name in self.references if name not in names]
        if unknown:
            raise UsageError(
                "KEEP",
                f"there is a reference for '{printable(unknown[0])}', which is not measured",
                expected=", ".join(names),
                fix="name references like splits",
            )

    @property
    def splits(self) -> tuple[Labelled | TextDataset, ...]:
        return self._splits

    def choose(self, history: Sequence[Measured]) -> int:
        return max(range(len(history)), key=lambda i: (self._score(history[i]), -i))

    def _score(self, measured: Measured) -> float:
        scores = [measured[s.name] / self.references.get(s.name, 1.0) for s in self._splits]
        return sum(scores) / len(scores)

    def identity(self) -> dict[str, Any]:
        return {"keep": "best", **_identity(self._splits), "references": dict(self.references)}


@final
@dataclass(frozen=True)
class Lowest(Keep):
    """The lowest accuracy on a target while a control keeps ``floor`` of what it had at the start."""

    target: Labelled
    control: Labelled
    floor: float = 0.95
    stop: bool = True
    """End once the control has fallen below the floor."""

    def __post_init__(self) -> None:
        _chosen_by((self.target, self.control))
        if not 0 <= self.floor <= 1:
            raise UsageError("KEEP", f"a floor of {self.floor} makes no sense", expected="0 to 1", fix="0.95")

    @property
    def splits(self) -> tuple[Labelled, ...]:
        return self.target, self.control

    def choose(self, history: Sequence[Measured]) -> int:
        allowed = [i for i in range(len(history)) if not self._fell(history, i)]
        # of equals the one that is better on the control, then the first
        return min(allowed, key=lambda i: (history[i][self.target.name], -history[i][self.control.name], i))

    def ends(self, history: Sequence[Measured]) -> bool:
        return self.stop and self._fell(history, len(history) - 1)

    def _fell(self, history: Sequence[Measured], i: int) -> bool:
        return history[i][self.control.name] < self.floor * history[0][self.control.name] - _ROUNDING

    def identity(self) -> dict[str, Any]:
        return {"keep": "lowest", **_identity(self.splits), "floor": self.floor, "stop": self.stop}


def _identity(splits: Sequence[Labelled | TextDataset]) -> dict[str, Any]:
    classes = [split.classes.key for split in splits if isinstance(split, Labelled)]
    return {"splits": [split.manifest for split in splits], "classes": classes}


def _chosen_by(splits: Sequence[Labelled | TextDataset]) -> tuple[Labelled | TextDataset, ...]:
    """Splits with labels that a choice may be made by."""
    for split in splits:
        if not isinstance(split, Labelled | TextDataset) or not len(split):
            raise UsageError(
                "KEEP",
                "an epoch is chosen by texts, or by pictures with labels, at least one",
                found=printable(split),
                fix="task.val",
            )
        if split.role == "test":
            raise UsageError(
                "LEARN-TEST",
                f"{split.name} is for testing: nothing is chosen by it",
                fix="task.val, or keep the last epoch",
            )
    names = [split.name for split in splits]
    if not splits or len(set(names)) < len(names):
        raise UsageError(
            "KEEP", "an epoch is chosen by one split or several, each once", found=names, fix="task.val"
        )
    return tuple(splits)
