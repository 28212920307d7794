"""Objectives without labels, by name, as settings offer and build them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from aniso.registry import OBJECTIVES

if TYPE_CHECKING:
    from aniso.data import Unlabelled
    from aniso.learn import Objective, Teacher

LABELLED = ("cross-entropy", "cosine-pairs", "image-text", "language", "coefficient-norm", "stay-near")
"""Objectives that need labels, captions or texts, or no data at all."""
TAUGHT = ("distil",)
"""Objectives that need a teacher, which only settings have whose tasks have vectors of their own."""


def unlabelled_objectives() -> tuple[str, ...]:
    """Return the names of objectives that need nothing but items without labels."""
    return tuple(name for name in OBJECTIVES.names if name not in (*LABELLED, *TAUGHT))


def unlabelled_term(name: str, split: Unlabelled, options: Mapping[str, float | str | Teacher]) -> Objective:
    """Return an objective by name on a split, with those of the options that it has."""
    term = OBJECTIVES.get(name)
    own = {field.name for field in dataclasses.fields(term) if field.init}
    found: Objective = term(split, **{key: value for key, value in options.items() if key in own}) * 1.0
    return found
