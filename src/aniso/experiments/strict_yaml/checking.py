"""Data against the types of a model, with complaints in terms of the file."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from aniso.errors import UsageError, printable
from aniso.experiments.strict_yaml.document import Document, Keys, dotted, refusal, shown

M = TypeVar("M", bound=BaseModel)


def validated(model: type[M], document: Document) -> M:
    """The document as the model's object, without any conversion between kinds of values."""
    _require_numbers(document)
    try:
        # as JSON: a list may then become a tuple and a text a path, while "1" still is no number
        return model.model_validate_json(json.dumps(document.data, allow_nan=False), strict=True)
    except ValidationError as e:
        found = _settled([_problem(model, document, error) for error in e.errors(include_url=False)])
    # an unknown key often is the reason why another one is missing
    found.sort(key=lambda p: (p.kind != "extra_forbidden", _line(document, p.path) or math.inf))
    raise _problem_refusal(document, found[0], len(found) - 1)


@dataclass(frozen=True)
class _Problem:
    """One complaint of pydantic's, in terms of the file."""

    kind: str
    path: Keys
    unions: tuple[tuple[Keys, str], ...]
    """Where several types were possible, and the one that the complaint is about."""
    found: Any
    expected: str
    names: tuple[str, ...]
    """What could have been meant."""


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


class _Walk:
    """Follows the place of a complaint through the data and through the types that may lie there."""

    def __init__(self, model: type[BaseModel], data: Any) -> None:
        self.path: Keys = ()
        self.unions: tuple[tuple[Keys, str], ...] = ()
        self._types: list[Any] = [model]
        self._node = data

    def step(self, part: str | int) -> None:
        named = [kind for kind in self._types if _is_called(kind, part)] if len(self._types) > 1 else []
        if named:
            self._types = named
        elif _has(self._node, part):
            self._types = [t for kind in self._types for t in _inside(kind, part)]
            self._node = self._node[part]
            self.path = (*self.path, part)
            return
        # a part that is no key says which of several types did not fit
        self.unions = (*self.unions, (self.path, str(part)))

    def names(self) -> tuple[str, ...]:
        """The keys that may stand here."""
        models = [kind for kind in self._types if _is_model(kind)]
        return tuple(dict.fromkeys(name for kind in models for name in _fields(kind)))


def _require_numbers(document: Document) -> None:
    """YAML files have none but finite ones; a command line may."""
    for path, value in _leaves(document.data, ()):
        if isinstance(value, float) and not math.isfinite(value):
            key = dotted(path)
            raise refusal(
                document.label,
                _line(document, path),
                f"'{key}' has a value that does not fit",
                key=key,
                found=str(value),
                expected="a finite number",
                fix="change the value",
            )


def _leaves(node: Any, path: Keys) -> Iterator[tuple[Keys, Any]]:
    if isinstance(node, dict | list):
        for part, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _leaves(value, (*path, part))
    else:
        yield path, node


def _problem(model: type[BaseModel], document: Document, error: Any) -> _Problem:
    kind, place, context = error["type"], error["loc"], error.get("ctx", {})
    walk = _Walk(model, document.data)
    last: Keys = place[-1:] if kind in ("missing", "extra_forbidden") else ()
    for part in place[: len(place) - len(last)]:
        walk.step(part)
    found, expected = error["input"], _EXPECTED.get(kind, "")
    names: tuple[str, ...] = ()
    if kind == "extra_forbidden":
        names = walk.names()
        found, expected = last[0], ", ".join(names)
    elif kind in ("value_error", "assertion_error"):
        expected = str(context.get("error", error["msg"]))
    elif kind.startswith("union_tag"):
        last = (context["discriminator"].strip("'"),)
        found, expected = context.get("tag"), context.get("expected_tags", "")
    elif kind not in _EXPECTED:
        expected = error["msg"].removeprefix("Input should be ")
    if kind in ("literal_error", "enum", "union_tag_invalid"):
        names = tuple(re.findall("'([^']*)'", expected))
    return _Problem(kind, (*walk.path, *last), walk.unions, found, expected, names)


def _settled(problems: list[_Problem], level: int = 0) -> list[_Problem]:
    """Without what the types say that were not meant, where several were possible."""
    out = [p for p in problems if len(p.unions) <= level]
    unions: dict[Keys, dict[str, list[_Problem]]] = {}
    for p in problems:
        if len(p.unions) > level:
            place, choice = p.unions[level]
            unions.setdefault(place, {}).setdefault(choice, []).append(p)
    for place, choices in unions.items():
        out += _meant([_settled(own, level + 1) for own in choices.values()], place)
    return out


def _meant(choices: list[list[_Problem]], place: Keys) -> list[_Problem]:
    """The complaints of the type that fits best, or that of all that none of them fits."""
    close = [own for own in choices if all(_is_inside(p, place) for p in own)]
    if close:
        return min(close, key=lambda own: (any(p.kind == "literal_error" for p in own), len(own)))
    first = choices[0][0]
    expected = " or ".join(dict.fromkeys(p.expected for own in choices for p in own))
    names = tuple(name for own in choices for p in own for name in p.names)
    return [dataclasses.replace(first, expected=expected, names=names)]


def _is_inside(problem: _Problem, place: Keys) -> bool:
    """Whether the value at the place was of the right kind, and only something about it is wrong."""
    return len(problem.path) > len(place) or problem.kind in ("value_error", "assertion_error")


def _problem_refusal(document: Document, problem: _Problem, others: int) -> UsageError:
    key = dotted(problem.path)
    name = str(problem.path[-1]) if problem.path else ""
    line = _line(document, problem.path)
    set_here = line is None and _holds(document.data, problem.path) and problem.path != ()
    near = _nearest(problem.found, problem.names)
    what, expected, found = f"'{key}' has a value that does not fit", problem.expected, shown(problem.found)
    fix = "put it in quotes" if _wants_quotes(problem) else "change the value"
    if problem.kind == "extra_forbidden":
        what, found = f"unknown key '{key}'", name
        fix = "correct or remove the key"
    elif problem.kind in ("missing", "union_tag_not_found"):
        what, found = f"the key '{key}' is missing", ""
        fix = f"add '{name}: ...'"
    elif problem.kind in ("value_error", "assertion_error"):
        what, expected = f"'{key}': {expected}" if key else expected, ""
    return refusal(
        document.label,
        line,
        what + (", as set on the command line" if set_here else ""),
        key=key,
        found=found,
        expected=expected,
        more=f"{others} other problem{'s' if others > 1 else ''}" if others else "",
        likely=f"did you mean '{near}'?" if near else "",
        fix=f"write '{near}' in place of '{printable(problem.found)}'" if near else fix,
    )


def _wants_quotes(problem: _Problem) -> bool:
    return problem.kind == "string_type" and isinstance(problem.found, bool | int | float)


def _nearest(word: object, known: Sequence[str]) -> str:
    """The known word that was probably meant, whatever its case and hyphens; '' if none."""
    plain = {name.lower().replace("-", "_"): name for name in known}
    near = difflib.get_close_matches(str(word).lower().replace("-", "_"), plain, 1)
    return plain[near[0]] if near else ""


def _line(document: Document, path: Keys) -> int | None:
    """The line of a key, or of what a missing key is missing from; None for what was set."""
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


# types


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    """The types of a model's fields by the names they have in a file."""
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _inside(kind: Any, part: str | int) -> list[Any]:
    """The types that may lie under a key or an index of a type."""
    if _is_model(kind):
        return _alternatives(_fields(kind).get(str(part), NoneType))
    args = get_args(kind)
    if isinstance(part, str):  # dict[str, X]
        return _alternatives(args[1]) if len(args) == 2 else []
    if get_origin(kind) is tuple and ... not in args:
        return _alternatives(args[part]) if part < len(args) else []
    return _alternatives(args[0]) if args else []


def _alternatives(kind: Any) -> list[Any]:
    """The members of a union, without None, or the type itself."""
    kind = getattr(kind, "__value__", kind)  # of a named alias
    if get_origin(kind) is Annotated:
        return _alternatives(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [t for member in get_args(kind) for t in _alternatives(member)]
    return [] if kind is NoneType else [kind]


def _is_called(kind: Any, part: str | int) -> bool:
    """Whether pydantic means this member of a union: by its name, or by the value that tells them apart."""
    if not isinstance(part, str):
        return False
    if _is_model(kind) and any(
        get_origin(t) is Literal and part in get_args(t) for t in _fields(kind).values()
    ):
        return True
    # with validators the name is wrapped, as in function-after[check(), Name]
    return bool(re.search(rf"\b{re.escape(getattr(kind, '__name__', '?'))}\b", part))
