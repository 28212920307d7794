"""Bundled banks, by name."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from aniso.errors import UsageError, printable

_PLACES = {"mini": "standard", "mini-linearised": "linearised", "mini-lora4": "lora4"}
_PREFIX = "mini"


def list_banks() -> tuple[str, ...]:
    """Return the names of bundled banks, which ``Bank.load`` takes like directories."""
    return tuple(name for name in _PLACES if _place(name).is_dir())


def bundled_bank(name: str) -> Path:
    """Return the directory of a bundled bank."""
    if name not in list_banks():
        raise UsageError(
            "BANK-NAME",
            f"there is no bundled bank '{printable(name)}'",
            expected=", ".join(list_banks()),
            fix="name a directory",
        )
    return _place(name)


def is_bundled(path: str | Path) -> bool:
    """True if ``path`` is no existing directory and has the form of a bundled bank's name."""
    return str(path).split("-")[0] == _PREFIX and not Path(path).exists()


def _place(name: str) -> Path:
    return Path(str(resources.files("aniso"))) / "models" / "mini" / "banks" / _PLACES[name]
