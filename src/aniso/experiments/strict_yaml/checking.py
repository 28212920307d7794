"""Plain data against a pydantic model; errors name the file's line, the key and the likely word."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from aniso.errors import UsageError, printable
from aniso.experiments.strict_yaml.reading import Document, Keys, dotted, refusal, shown

M = TypeVar("M", bound=BaseModel)
_VALUE_ERRORS = ("value_error", "assertion_error")
_EXPECTED = {
    **dict.fromkeys(("model_type", "dict_type", "mapping_type", "model_attributes_type"), "a mapping"),
    **dict.fromkeys(("list_type", "tuple_type", "set_type", "frozen_set_type"), "a list"),
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "none_required": "null",
    "missing": "",
    "union_tag_not_found": "",
}


def validated(model: type[M], document: Document) -> M:
    """Return the document as an object of the model; values are not converted between types."""
    _require_finite(document, document.data, ())
    try:
        # as JSON: a list may then become a tuple and a text a path, while "1" still is no number
        return model.model_validate_json(json.dumps(document.data), strict=True)
    except ValidationError as e:
        found = _of_likely_types([_problem(model, document, error) for error in e.errors(include_url=False)])
    # an unknown key often is the reason why another one is missing
    found.sort(key=lambda p: (p.kind != "extra_forbidden", _line(document, p.path) or math.inf))
    raise _refusal(document, found[0], len(found) - 1)


@dataclass(frozen=True)
class _Problem:
    """One of pydantic's errors, in terms of the file."""

    kind: str
    path: Keys
    unions: tuple[tuple[Keys, str], ...]
    """Paths where several types were possible, and the type that the error is about."""
    found: Any
    expected: str
    names: tuple[str, ...] = ()
    """Words that could have been meant."""


def _require_finite(document: Document, node: Any, path: Keys) -> None:
    """Refuse NaN and infinity, which a command line may hold; YAML files are checked when read."""
    if isinstance(node, dict | list):
        for part, value in node.items() if isinstance(node, dict) else enumerate(node):
            _require_finite(document, value, (*path, part))
    elif isinstance(node, float) and not math.isfinite(node):
        raise _refusal(document, _Problem("finite_number", path, (), str(node), "a finite number"), 0)


def _problem(model: type[BaseModel], document: Document, error: Any) -> _Problem:
    kind, context, found = error["type"], error.get("ctx", {}), error["input"]
    last = error["loc"][-1:] if kind == "missing" else ()
    parts = error["loc"][: len(error["loc"]) - len(last)]
    path, unions = _located(parts, document.data, found) or ((), ())
    expected = _EXPECTED.get(kind, "")
    names: tuple[str, ...] = ()
    if kind == "extra_forbidden":
        found, names = path[-1], _field_names(model, path[:-1])
        expected = ", ".join(names)
    elif kind in _VALUE_ERRORS:
        expected = str(context.get("error", error["msg"]))
    elif kind.startswith("union_tag"):
        last = (context["discriminator"].strip("'"),)
        found, expected = context.get("tag"), context.get("expected_tags", "")
    elif kind not in _EXPECTED:
        expected = error["msg"].removeprefix("Input should be ")
    if kind in ("literal_error", "enum", "union_tag_invalid"):
        names = tuple(re.findall("'([^']*)'", expected))
    return _Problem(kind, (*path, *last), unions, found, expected, names)


def _located(
    parts: Sequence[str | int], node: Any, value: Any, path: Keys = ()
) -> tuple[Keys, tuple[tuple[Keys, str], ...]] | None:
    """Return the path in the file that pydantic's location means, and the names of types left out of it.

    A location also holds the names of types wherever several are possible, and a key may look like one: the
    path is right if the value that the error is about lies there.
    """
    if not parts:
        return (path, ()) if node == value else None
    part, *rest = parts
    if _has(node, part) and (found := _located(rest, node[part], value, (*path, part))):
        return found
    found = _located(rest, node, value, path)
    return found and (found[0], ((path, str(part)), *found[1]))


def _of_likely_types(problems: list[_Problem], level: int = 0) -> list[_Problem]:
    """Leave out the errors about types that were not meant, where several were possible."""
    out = [p for p in problems if len(p.unions) <= level]
    unions: dict[Keys, dict[str, list[_Problem]]] = {}
    for p in problems:
        if len(p.unions) > level:
            path, name = p.unions[level]
            unions.setdefault(path, {}).setdefault(name, []).append(p)
    for path, types in unions.items():
        out += _of_likely_type([_of_likely_types(own, level + 1) for own in types.values()], path)
    return out


def _of_likely_type(types: list[list[_Problem]], path: Keys) -> list[_Problem]:
    """Return the errors of the type that fits best, or one that says what all of them expect."""
    # only something within the value is wrong
    near = [own for own in types if all(len(p.path) > len(path) or p.kind in _VALUE_ERRORS for p in own)]
    if near:
        return min(near, key=lambda own: (any(p.kind == "literal_error" for p in own), len(own)))
    expected = " or ".join(dict.fromkeys(p.expected for own in types for p in own))
    names = tuple(name for own in types for p in own for name in p.names)
    return [replace(types[0][0], expected=expected, names=names)]


def _refusal(document: Document, problem: _Problem, others: int) -> UsageError:
    key = dotted(problem.path)
    name = str(problem.path[-1]) if problem.path else ""
    line = _line(document, problem.path)
    was_set = line is None and _holds(document.data, problem.path) and problem.path != ()
    near = _nearest(problem.found, problem.names)
    what, expected, found = f"'{key}' has a value that does not fit", problem.expected, shown(problem.found)
    unquoted = problem.kind == "string_type" and isinstance(problem.found, bool | int | float)
    fix = "put it in quotes" if unquoted else "change the value"
    if problem.kind == "extra_forbidden":
        what, found, fix = f"unknown key '{key}'", name, "correct or remove the key"
    elif problem.kind in ("missing", "union_tag_not_found"):
        what, found, fix = f"the key '{key}' is missing", "", f"add '{name}: ...'"
    elif problem.kind in _VALUE_ERRORS:
        what, expected = f"'{key}': {expected}" if key else expected, ""
    return refusal(
        document.label,
        line,
        what + (", as set on the command line" if was_set else ""),
        key=key,
        found=found,
        expected=expected,
        more=f"{others} other problem{'s' if others > 1 else ''}" if others else "",
        likely=f"did you mean '{near}'?" if near else "",
        fix=f"write '{near}' in place of '{printable(problem.found)}'" if near else fix,
    )


def _nearest(word: object, known: Sequence[str]) -> str:
    """Return the known word that was probably meant, whatever its case and hyphens; '' if none."""
    plain = {name.lower().replace("-", "_"): name for name in known}
    near = difflib.get_close_matches(str(word).lower().replace("-", "_"), plain, 1)
    return plain[near[0]] if near else ""


def _line(document: Document, path: Keys) -> int | None:
    """Return the line of a key, or of the mapping that lacks it; None for values set on the command line."""
    while path and not _holds(document.data, path):
        path = path[:-1]
    return document.lines.get(path)


def _holds(data: Any, path: Keys) -> bool:
    for part in path:
        if not _has(data, part):
            return False
        data = data[part]
    return True


def _has(node: Any, part: str | int) -> bool:
    if isinstance(node, list):
        return isinstance(part, int) and 0 <= part < len(node)
    return isinstance(node, dict) and part in node


def _field_names(model: type[BaseModel], path: Keys) -> tuple[str, ...]:
    """Return the keys that may stand in the mapping at a path."""
    models = [model]
    for part in path:  # an item of a list or a dictionary is of the models that its field names
        types = [fields[part] for m in models if part in (fields := _fields(m))]
        models = [m for kind in types for m in _models(kind)] if types else models
    return tuple(dict.fromkeys(str(name) for m in models for name in _fields(m)))


def _fields(model: type[BaseModel]) -> dict[str | int, Any]:
    """Return the types of a model's fields by the names they have in a file."""
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _models(kind: Any) -> list[type[BaseModel]]:
    """Return the models named anywhere in a type."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [m for argument in get_args(getattr(kind, "__value__", kind)) for m in _models(argument)]
