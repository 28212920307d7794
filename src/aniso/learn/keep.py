"""Keep rules: which epoch's values are kept, as a pure function of the scores so far."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from aniso.data import Labelled, TextDataset, Unlabelled
from aniso.errors import UsageError, printable
from aniso.learn.teacher import Teacher
from aniso.records import JsonValue

Measured = Mapping[str, float]
"""Scores after an epoch by the name of the split: accuracy, agreement, or for text 1 / perplexity."""
_ROUNDING = 1e-9  # less than one image is worth: exactly at the floor is not below it


class Keep(ABC):
    """Says what to measure after every epoch, and which epoch is the best so far."""

    @property
    @abstractmethod
    def splits(self) -> tuple[Labelled | Unlabelled | TextDataset, ...]:
        """The splits that are measured after every epoch."""

    @property
    def teachers(self) -> Mapping[str, Teacher]:
        """The teachers that predictions on unlabelled splits are compared with, by the split's name."""
        return {}

    @abstractmethod
    def choose(self, history: Sequence[Measured]) -> int:
        """Return the number of the epoch to keep; 0 is the start, before any step."""

    def ends(self, history: Sequence[Measured]) -> bool:
        """Return True if training further cannot change the choice."""
        return False

    @abstractmethod
    def identity(self) -> dict[str, JsonValue]:
        """Everything the choice depends on, as JSON data."""


@final
@dataclass(frozen=True)
class Last(Keep):
    """Keep the last epoch. Nothing is measured, so no validation split is needed."""

    @property
    def splits(self) -> tuple[Labelled, ...]:
        return ()

    def choose(self, history: Sequence[Measured]) -> int:
        return len(history) - 1

    def identity(self) -> dict[str, JsonValue]:
        return {"keep": "last"}


@final
@dataclass(frozen=True, init=False)
class Best(Keep):
    """Keep the epoch with the highest mean accuracy over splits; of equals the first.

    Accuracies are divided by ``references`` where given. For text the score is 1 / perplexity.
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
            raise UsageError(
                "KEEP", f"accuracy cannot be divided by a reference of {printable(low)}", fix="above 0"
            )
        names = [split.name for split in self._splits]
        unknown = [name for name in self.references if name not in names]
        if unknown:
            raise UsageError(
                "KEEP",
                f"there is a reference for '{printable(unknown[0])}', which is not one of the splits",
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

    def identity(self) -> dict[str, JsonValue]:
        return {"keep": "best", **_identity(self._splits), "references": dict(self.references)}


@final
@dataclass(frozen=True)
class Lowest(Keep):
    """Keep the epoch with the lowest target accuracy at which the control keeps ``floor`` of its accuracy."""

    target: Labelled
    control: Labelled
    floor: float = 0.95
    stop: bool = True
    """End training once the control has fallen below the floor."""
    reference: float | None = None
    """Accuracy of the base on the control; default: that of the first row, which is the base's if learning
    starts at zero."""

    def __post_init__(self) -> None:
        _chosen_by((self.target, self.control))
        if not 0 <= self.floor <= 1:
            raise UsageError("KEEP", f"the floor cannot be {self.floor}", expected="0 to 1", fix="0.95")

    @property
    def splits(self) -> tuple[Labelled, ...]:
        return self.target, self.control

    def choose(self, history: Sequence[Measured]) -> int:
        allowed = [i for i in range(len(history)) if not self._fell(history, i)]
        if not allowed:
            raise UsageError(
                "KEEP",
                f"the start already takes {self.control.name} below the floor",
                found=f"{history[0][self.control.name]:.1%}",
                expected=f"{self.floor * self._reference(history):.1%} or more",
                fix="a smaller --start-scale, or a lower --floor",
            )
        # of equals the one that is better on the control, then the first
        return min(allowed, key=lambda i: (history[i][self.target.name], -history[i][self.control.name], i))

    def ends(self, history: Sequence[Measured]) -> bool:
        return self.stop and self._fell(history, len(history) - 1)

    def _fell(self, history: Sequence[Measured], i: int) -> bool:
        return history[i][self.control.name] < self.floor * self._reference(history) - _ROUNDING

    def _reference(self, history: Sequence[Measured]) -> float:
        return history[0][self.control.name] if self.reference is None else self.reference

    def identity(self) -> dict[str, JsonValue]:
        out: dict[str, JsonValue] = {"keep": "lowest", **_identity(self.splits), "floor": self.floor}
        given = {} if self.reference is None else {"reference": self.reference}
        return {**out, "stop": self.stop, **given}


@final
@dataclass(frozen=True, init=False)
class Agreement(Keep):
    """Keep the epoch whose predictions agree most often with those of teachers; of equals the first.

    No label is read. The score is the mean over splits of the share of items for which model and teacher
    predict the same class::

        Agreement((task.val.unlabelled(), Teacher.of(encoder, bank, "mnist")), ...)
    """

    pairs: tuple[tuple[Unlabelled, Teacher], ...]

    def __init__(self, *pairs: tuple[Unlabelled, Teacher]) -> None:
        object.__setattr__(self, "pairs", tuple(pairs))
        names = [split.name for split, _ in self.pairs]
        good = all(isinstance(s, Unlabelled) and len(s) and isinstance(t, Teacher) for s, t in self.pairs)
        if not good or not names or len(set(names)) < len(names):
            raise UsageError(
                "KEEP",
                "agreement needs one split without labels or several, each once and with its teacher",
                found=names,
                fix="Agreement((task.val.unlabelled(), Teacher.of(encoder, bank, 'mnist')))",
            )

    @property
    def splits(self) -> tuple[Unlabelled, ...]:
        return tuple(split for split, _ in self.pairs)

    @property
    def teachers(self) -> Mapping[str, Teacher]:
        return {split.name: teacher for split, teacher in self.pairs}

    def choose(self, history: Sequence[Measured]) -> int:
        return max(range(len(history)), key=lambda i: (self._score(history[i]), -i))

    def _score(self, measured: Measured) -> float:
        return sum(measured[split.name] for split in self.splits) / len(self.pairs)

    def identity(self) -> dict[str, JsonValue]:
        return {
            "keep": "agreement",
            "splits": [split.manifest for split in self.splits],
            "classes": [split.classes.key for split in self.splits],
            "teachers": [teacher.identity() for _, teacher in self.pairs],
        }


def _identity(splits: Sequence[Labelled | TextDataset]) -> dict[str, JsonValue]:
    classes = [split.classes.key for split in splits if isinstance(split, Labelled)]
    return {"splits": [split.manifest for split in splits], "classes": classes}


def _chosen_by(splits: Sequence[Labelled | TextDataset]) -> tuple[Labelled | TextDataset, ...]:
    """Return the splits if an epoch may be chosen by them; raise an error if not."""
    for split in splits:
        if not isinstance(split, Labelled | TextDataset) or not len(split):
            raise UsageError(
                "KEEP",
                "a keep rule needs texts, or images with labels, at least one",
                found=printable(split),
                fix="task.val",
            )
        if split.role == "test":
            raise UsageError(
                "LEARN-TEST",
                f"{split.name} is for testing: an epoch cannot be chosen by it",
                fix="task.val, or keep the last epoch",
            )
    names = [split.name for split in splits]
    if not splits or len(set(names)) < len(names):
        raise UsageError(
            "KEEP", "a keep rule needs one split or several, each once", found=names, fix="task.val"
        )
    return tuple(splits)
