"""Bundled banks, by name. One of them, too large for the wheel, is found in a checkout of the repository."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from aniso.errors import UsageError, printable

_PACKAGE = Path(str(resources.files("aniso")))
_BANKS = {
    "mini": _PACKAGE / "models/mini/banks/standard",
    "mini-lora4": _PACKAGE / "models/mini/banks/lora4",
    # 15 MB, and used by one experiment of the repository alone
    "mini-linearised": _PACKAGE.parents[1] / "experiments/mini/banks/linearised",
}
_PREFIX = "mini"


def list_banks() -> tuple[str, ...]:
    """Return the names of bundled banks, which ``Bank.load`` takes like directories."""
    return tuple(name for name, path in _BANKS.items() if path.is_dir())


def bundled_bank(name: str) -> Path:
    """Return the directory of a bundled bank."""
    if name in _BANKS and name not in list_banks():
        raise UsageError(
            "BANK-NAME",
            f"the bank '{name}' is in the repository of aniso, not in the installed package",
            expected=", ".join(list_banks()),
            fix="clone the repository and run 'pip install -e .', or build it as docs/mini.md shows",
        )
    if name not in list_banks():
        raise UsageError(
            "BANK-NAME",
            f"there is no bundled bank '{printable(name)}'",
            expected=", ".join(list_banks()),
            fix="name a directory",
        )
    return _BANKS[name]


def is_bundled(path: str | Path) -> bool:
    """True if ``path`` is no existing directory and has the form of a bundled bank's name."""
    return str(path).split("-")[0] == _PREFIX and not Path(path).exists()
