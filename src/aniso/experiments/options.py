"""Options: each is defined once, and serves Python, YAML specs and the command line.

A class of options is a frozen pydantic model. ``option`` declares a field with its help text and its group in
``--help``; the type, the default and the limits are the field's own. Nothing here imports torch, so a wrong
value is reported before anything heavy is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, final, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from aniso.registry import Registry

Group = Literal["Task", "Method", "Head", "Selection", "Objective", "Optimiser", "Runtime", "Output"]
GROUPS: tuple[Group, ...] = get_args(Group)
REQUIRED: Any = PydanticUndefined


class Options(BaseModel):
    """Frozen values; unknown names and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


@final
@dataclass(frozen=True)
class OptionInfo:
    """One option, as commands need it."""

    name: str
    group: Group
    help: str
    flags: tuple[str, ...]
    """On the command line; a switch may have a second one after a slash, which turns it off."""
    type: Any
    default: Any
    """``REQUIRED`` if there is none."""
    multiple: bool
    """May be repeated."""
    choices: tuple[str, ...]

    @property
    def required(self) -> bool:
        """True if the option has no default."""
        return self.default is REQUIRED


@final
@dataclass(frozen=True)
class _Details:
    group: Group
    flags: tuple[str, ...]
    choices: Callable[[], Sequence[str]] | None
    without: Any


def option(
    default: Any = REQUIRED,
    *,
    help: str,  # noqa: A002 (as argparse and click call it)
    group: Group,
    flags: Sequence[str] = (),
    registry: Registry | None = None,
    choices: Callable[[], Sequence[str]] | None = None,
    without: Any = REQUIRED,
    **limits: Any,
) -> Any:
    """Declare an option: a field with a help text and a group.

    ``flags`` replace the default flag, which is the name with dashes. Values of a ``registry`` are its names.
    ``without`` is the value that means the same as a version of aniso without the option: it is no part of a
    run's id, so records from before the option are found. ``limits`` are pydantic's: ``ge``, ``gt``, ``le``.
    """
    names = (lambda: registry.names) if registry is not None else choices
    extra: Any = {"details": _Details(group, tuple(flags), names, without)}
    return Field(default, description=help, json_schema_extra=extra, **limits)


def options_of(cls: type[BaseModel]) -> dict[str, OptionInfo]:
    """Return the options of a class in the order of their definition; other fields are left out."""
    out = {}
    for name, field in cls.model_fields.items():
        details = (field.json_schema_extra or {}).get("details")  # type: ignore[union-attr]
        if isinstance(details, _Details):
            out[name] = _info(name, field, details)
    return out


def without_values(cls: type[BaseModel]) -> dict[str, object]:
    """Return, for every option that was added later, the value that means the same as its absence."""
    out = {}
    for name, field in cls.model_fields.items():
        details = (field.json_schema_extra or {}).get("details")  # type: ignore[union-attr]
        if isinstance(details, _Details) and details.without is not REQUIRED:
            out[name] = details.without
    return out


def _info(name: str, field: FieldInfo, details: _Details) -> OptionInfo:
    kind, multiple = _plain_type(field.annotation)
    choices = tuple(details.choices()) if details.choices is not None else ()
    if get_origin(kind) is Literal:
        choices, kind = tuple(str(value) for value in get_args(kind)), str
    if kind not in (bool, int, float, Path):
        kind = str
    flags = details.flags or (f"--{name.replace('_', '-')}",)
    return OptionInfo(
        name, details.group, field.description or "", flags, kind, field.default, multiple, choices
    )


def _plain_type(annotation: Any) -> tuple[Any, bool]:
    """The type of one value, and whether there may be several."""
    if get_origin(annotation) is Annotated:
        return _plain_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        plain = [_plain_type(member)[0] for member in members]
        return (plain[0] if len(plain) == 1 else str), False
    if get_origin(annotation) in (tuple, list):
        return _plain_type(get_args(annotation)[0])[0], True
    return annotation, False
