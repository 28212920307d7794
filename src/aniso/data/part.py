"""What a reader finds: pictures and the names of their classes, as they are on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aniso.data.images import Images
from aniso.errors import InputError, printable


@dataclass(frozen=True)
class Part:
    """One part of a data set (its training images, say), known without decoding a single picture."""

    images: Images
    classes: tuple[str, ...]
    """Every class name the data set has, as written on disk; some may have no picture here."""
    codes: tuple[int, ...]
    """For every picture the index of its class."""

    def __post_init__(self) -> None:
        if len(self.codes) != len(self.images):
            raise ValueError(f"{len(self.codes)} labels for {len(self.images)} images")
        wrong = [i for i, code in enumerate(self.codes) if not 0 <= code < len(self.classes)]
        if wrong:
            raise InputError(
                "DATA-LABEL",
                f"{len(wrong)} of {len(self.codes)} labels name no class",
                found=[f"{self.images.label(i)}: {self.codes[i]}" for i in wrong[:5]],
                expected=f"0 to {len(self.classes) - 1}",
                fix="correct the labels, or the list of classes",
            )


@dataclass(frozen=True)
class Reading:
    """Everything a reader found below a directory."""

    parts: Mapping[str, Part]
    notes: tuple[str, ...] = ()
    """What was ignored, and why, in words."""
    prompts: tuple[str, ...] = ()


def coded(names: Sequence[str], order: Sequence[str]) -> tuple[int, ...]:
    """Samples' classes, given by name, as places in the list of classes."""
    place = {name: i for i, name in enumerate(order)}
    unknown = sorted(set(names) - place.keys())
    if unknown:
        raise InputError(
            "DATA-CLASS",
            f"{len(unknown)} classes are not in the list of classes",
            found=printable(", ".join(unknown[:10])),
            expected=printable(", ".join(order[:10])) + (" …" if len(order) > 10 else ""),
            fix="correct the folder names or the list",
        )
    return tuple(place[name] for name in names)
