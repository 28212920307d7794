"""Banks as settings name them, and where coefficients for them are kept."""

from __future__ import annotations

import re
from pathlib import Path

from aniso.experiments.settings import BaseSetting
from aniso.models import mini_bank
from aniso.vectors import Bank


def open_bank(name: str | Path) -> Bank:
    """A bank by its directory, or one of those that come with the package by name."""
    if not Path(name).exists() and str(name).split("-")[0] == "mini":
        return Bank.open(mini_bank(str(name)))
    return Bank.open(name)


def random_bank(name: str) -> int | None:
    """How many vectors ``random:15`` means."""
    found = re.fullmatch(r"random:([0-9]{1,9})", name)
    return int(found[1]) if found else None


def coefficients_file(setting: BaseSetting) -> str:
    """What coefficients of a setting are kept as, the same with and without a head learned afterwards."""
    return f"{(setting if setting.is_joint else setting.headless()).id[:16]}.safetensors"
