"""Classes and prompts of the tasks of a run, as a file beside its coefficients: no torch, no data needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, RootModel, ValidationError

from aniso.classes import ClassList
from aniso.errors import AnisoError, InputError, printable

_LARGEST = 64 << 20  # bytes


class _Classes(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    names: list[str]
    prompts: list[str]
    descriptions: list[str] = []


class _File(RootModel[dict[str, _Classes]]):
    pass


def class_lists_text(classes: Mapping[str, ClassList]) -> str:
    """Return the content of a file of classes by task."""
    parts = {
        task: _Classes(names=list(one.names), prompts=list(one.prompts), descriptions=list(one.descriptions))
        for task, one in classes.items()
    }
    content = {task: part.model_dump(exclude_defaults=True) for task, part in parts.items()}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def read_class_lists(path: Path) -> dict[str, ClassList]:
    """Read classes by task from a file that a run wrote."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise ValueError(f"more than {_LARGEST:,} bytes")
        parts = _File.model_validate_json(content).root
        return {
            task: ClassList(tuple(one.names), tuple(one.prompts), tuple(one.descriptions))
            for task, one in parts.items()
        }
    except (OSError, ValueError, ValidationError, AnisoError) as e:
        raise InputError(
            "DATA-CLASS",
            f"'{printable(path)}' is no file of classes",
            reason=printable(str(e).splitlines()[0], 200),
            fix="name the classes with --classes or --task",
        ) from None
