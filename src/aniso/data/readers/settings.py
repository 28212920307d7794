"""Checked access to the keys of ``[reader]`` in a task card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from aniso.data.readers.naming import some
from aniso.errors import InputError, printable

T = TypeVar("T")


def require_known(settings: Mapping[str, object], *known: str) -> None:
    """Raise if a setting is unknown."""
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise _bad("the reader has no such setting", some(unknown), ", ".join(known) or "no settings at all")


def text(settings: Mapping[str, object], name: str, default: str | None = None) -> str:
    value = settings.get(name, default)
    if not isinstance(value, str):
        raise _bad(f"the reader needs '{name}'", printable(value), f'{name} = "..."')
    return value


def flag(settings: Mapping[str, object], name: str) -> bool:
    value = settings.get(name, False)
    if not isinstance(value, bool):
        raise _bad(f"'{name}' is either true or false", printable(value), f"{name} = true")
    return value


def texts(settings: Mapping[str, object], name: str) -> dict[str, str]:
    """Return a table of texts."""
    value = settings.get(name)
    if not isinstance(value, Mapping) or not value or not all(isinstance(v, str) for v in value.values()):
        raise _bad(f"the reader needs '{name}'", printable(value), f'{name} = {{ train = "..." }}')
    return dict(value)


def select_parts(
    found: Mapping[str, T], settings: Mapping[str, object]
) -> tuple[dict[str, T], tuple[str, ...]]:
    """Return the parts that the setting ``parts`` selects, and a note on those it leaves out.

    ``parts = ["train", "test"]`` selects, ``parts = { val = "dev" }`` also renames; all by default.
    """
    wanted = settings.get("parts")
    if wanted is None:
        return dict(found), ()
    if isinstance(wanted, list):
        wanted = {name: name for name in wanted if isinstance(name, str)}
    if not isinstance(wanted, Mapping) or not all(isinstance(v, str) for v in wanted.values()):
        raise _bad("'parts' must be a list or table of names", printable(wanted), 'parts = ["train", "test"]')
    missing = [there for there in wanted.values() if there not in found]
    if missing:
        raise InputError(
            "DATA-MISSING",
            f"there is no part {some(missing)}",
            found=some(found),
            fix="complete the dataset, or correct 'parts' in the card",
        )
    rest = sorted(found.keys() - set(wanted.values()))
    return {name: found[there] for name, there in wanted.items()}, _left_out(rest)


def _left_out(rest: list[str]) -> tuple[str, ...]:
    return (f"parts that the card does not select: {some(rest)}",) if rest else ()


def _bad(problem: str, found: str, expected: str) -> InputError:
    return InputError(
        "DATA-CARD", problem, found=found, expected=expected, fix="correct [reader] in the task's card"
    )
