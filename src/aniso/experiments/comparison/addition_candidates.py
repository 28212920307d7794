"""The candidates for one model of several tasks: merge rules and learned coefficients."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from aniso.errors import UsageError, printable
from aniso.experiments.methods.coefficients import LearnedCoefficients
from aniso.experiments.methods.zero_shot import ZeroShot
from aniso.experiments.options import Options, option
from aniso.experiments.settings.addition import Addition
from aniso.json_value import JsonObject
from aniso.records import Supervision
from aniso.registry import MERGE_RULES, METHODS

LEARNED = "coefficients"
BASE = "base"
LEVELS: tuple[Supervision, ...] = ("none", "unlabelled", "labelled")
"""Data that a candidate needs beside the vectors, the least first."""


def comparable_methods() -> tuple[str, ...]:
    """Return the methods that can be compared: every merge rule that is a method, and coefficients."""
    return (*(name for name in METHODS.names if name in MERGE_RULES), LEARNED)


class AdditionComparisonOptions(Options):
    """Which methods are compared, and how."""

    methods: str | None = option(
        None,
        help=f"Compare these alone, separated by commas; default: all of {', '.join(comparable_methods())}.",
        group="Method",
    )
    without_labels: bool = option(
        False,
        help="Read no label: methods that need labels are left out, and the others are compared by how often "
        "they predict what the tasks' own vectors do.",
        group="Method",
    )
    folds: int = option(
        2, help="Folds of the validation splits, each held out once.", group="Method", ge=2, le=100
    )

    @property
    def chosen(self) -> tuple[str, ...]:
        """The methods that are compared, in the order of their registration."""
        words = [word.strip() for word in (self.methods or "").split(",") if word.strip()]
        known = comparable_methods()
        for word in words:
            if word not in known:
                near = difflib.get_close_matches(word, known, 1)
                raise UsageError(
                    "USAGE",
                    f"invalid value '{printable(word)}' for --methods",
                    expected=", ".join(known),
                    likely=f"did you mean '{near[0]}'?" if near else "",
                    fix=f"--methods {near[0] if near else f'{known[0]},{LEARNED}'}",
                )
        return tuple(name for name in known if not words or name in words)

    def spec(self) -> JsonObject:
        """Return the options that decide what is chosen, as plain data."""
        return {
            "methods": list(self.chosen),
            "without_labels": self.without_labels,
            "folds": self.folds,
        }


@final
@dataclass(frozen=True)
class AdditionCandidate:
    """One row of a comparison."""

    label: str
    setting: Addition
    data: Supervision
    """What it needs beside the vectors, also to choose a scale or an epoch."""

    @property
    def is_merge(self) -> bool:
        """True if it is a merged vector at one scale."""
        return self.setting.method.name in MERGE_RULES


def addition_candidates(
    base: Addition, methods: Sequence[str], *, with_labels: bool = True
) -> list[AdditionCandidate]:
    """Return all candidates; those that share a merged vector follow each other.

    ``base`` names model, bank, tasks and seed; if its method is learned coefficients, its options are those
    of the learned candidates.
    """
    own = base.method if isinstance(base.method, LearnedCoefficients) else LearnedCoefficients()
    out = [_candidate(BASE, base, "none", method=ZeroShot())]
    for name in methods:
        if name == LEARNED:
            taught = {"method": own, "objective": "distil", "choose_by": None}
            out.append(_candidate(f"{name} by teachers", base, "unlabelled", **taught))
            labels = {"method": own, "objective": "cross-entropy", "choose_by": None}
            out.append(_candidate(f"{name} by labels", base, "labelled", **labels))
            continue
        kind = METHODS.get(name)
        scale = MERGE_RULES.get(name)().scale if kind.default_scale is None else kind.default_scale
        out.append(_candidate(f"{name} at {scale:g}", base, "none", method=kind(scale=scale)))
        if kind.default_scale is None:
            searched = {"method": kind(), "objective": "cross-entropy"}
            label = f"{name}, scale by"
            out.append(_candidate(f"{label} teachers", base, "unlabelled", **searched, choose_by="teachers"))
            out.append(_candidate(f"{label} labels", base, "labelled", **searched, choose_by=None))
    return [one for one in out if with_labels or one.data != "labelled"]


def _candidate(label: str, base: Addition, data: Supervision, **values: object) -> AdditionCandidate:
    return AdditionCandidate(label, base.model_copy(update=values), data)
