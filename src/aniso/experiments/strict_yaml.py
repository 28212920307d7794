"""YAML 1.2 without surprises: plain data or a refusal that names the line, the key and the likely word.

ruamel.yaml splits the text into events; what they mean is decided here alone. So no file can name a class
to build, repeat itself a billion times, or have the class ``no`` read as false.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    StreamEndEvent,
)
from ruamel.yaml.reader import ReaderError

from aniso.errors import UsageError, printable

Keys = tuple[str | int, ...]
"""The way to a value: keys of mappings, and indices of lists from 0."""
M = TypeVar("M", bound=BaseModel)

LARGEST = 1 << 20
DEEPEST = 32
_LONGEST_NUMBER = 100  # characters; a larger whole number would become infinite as a float
_LONGEST_KEY = 1000  # characters; YAML allows 1024 before the colon


@dataclass(frozen=True)
class Document:
    """A YAML 1.2 file as plain data, with the line (from 1) of every key and every item of a list."""

    label: str
    data: dict[str, Any]
    lines: Mapping[Keys, int]


def read_yaml(path: Path) -> Document:
    """The one mapping in a file of at most a megabyte."""
    from aniso.weights.files import RawFile  # it brings torch, which checking a text can do without

    file = RawFile(path)
    if file.size > LARGEST:
        found = f"{file.size:,} bytes"
        raise _refusal(file.label, None, "the file is too large", found=found, expected=_SMALL)
    raw = file.read(0, file.size)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as e:
        line = raw.count(b"\n", 0, e.start) + 1
        found = f"byte {raw[e.start]:#04x}"
        raise _refusal(file.label, line, "not UTF-8", found=found, fix="save it as UTF-8") from None
    return parse_yaml(text, file.label)


def parse_yaml(text: str, label: str) -> Document:
    """The one mapping in a text; ``label`` is how errors call it."""
    if len(text) > LARGEST:
        found = f"{len(text):,} characters"
        raise _refusal(label, None, "the text is too large", found=found, expected=_SMALL)
    reader = _Reader(text.removeprefix("\ufeff"), label)
    data = reader.document(())
    if not isinstance(data, dict):
        what = "the file is empty" if data is None else "the top level is not a mapping"
        fix = "write 'key: value' lines"
        raise _refusal(label, None, what, found=_kind(data), expected="a mapping", fix=fix)
    return Document(label, data, reader.lines)


def with_values(document: Document, assignments: Sequence[str]) -> Document:
    """The document with some values replaced or added, as by ``schedule.lr=0.01`` or ``tasks.0=dtd``.

    Dots divide the path, whole numbers count the items of a list from 0, the value is read as YAML 1.2.
    What was set has no line; of two settings of the same key the later one holds.
    """
    data, lines = copy.deepcopy(document.data), dict(document.lines)
    for assignment in assignments:
        label = f"--set {printable(assignment)}"
        path = _assign(data, assignment, label)
        lines = {keys: line for keys, line in lines.items() if keys[: len(path)] != path}
    return Document(document.label, data, lines)


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


def as_yaml(data: Mapping[str, Any]) -> str:
    """Block-style YAML 1.2 in the order given, which ``parse_yaml`` reads back to equal data."""
    text = "\n".join(_block(data, 0)) + "\n" if data else "{}\n"
    if (size := len(text.encode())) > LARGEST:
        raise _unwritable("", f"{size:,} bytes", _SMALL)
    return text


# reading

_SMALL = f"at most {LARGEST:,} bytes"
_FIX = "correct it, then try again"
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_WHOLE = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_BASES = {"0o": 8, "0x": 16}


def _resolved(text: str) -> Any:
    """What an unquoted word means in the core schema of YAML 1.2; a ValueError says what is wrong."""
    if text in _WORDS:
        return _WORDS[text]
    whole = _WHOLE.fullmatch(text)
    if whole or _FLOAT.fullmatch(text):
        if len(text) > _LONGEST_NUMBER:
            raise ValueError(f"a number has more than {_LONGEST_NUMBER} characters")
        value = int(text, _BASES.get(text[:2], 10)) if whole else float(text)
        if math.isfinite(value):
            return value
    elif not _NOT_FINITE.fullmatch(text):
        return text
    raise ValueError("numbers must be finite")


class _Reader:
    """Plain data from the events of one text, noting the line of every key."""

    def __init__(self, text: str, label: str) -> None:
        self.label = label
        self.lines: dict[Keys, int] = {}
        self._events = _events(text, label)

    def document(self, path: Keys) -> Any:
        """The only document, whose place in a larger one is ``path``; None if there is nothing."""
        next(self._events)
        start = next(self._events)
        if isinstance(start, StreamEndEvent):
            return None
        if start.tags or start.version not in (None, (1, 2)):
            raise self._refusal(
                start, "directives are not supported", fix="remove the lines that begin with %"
            )
        value = self._node(next(self._events), path)
        next(self._events)
        after = next(self._events)
        if isinstance(after, DocumentStartEvent):
            raise self._refusal(after, "a second document begins", fix="write one document per file")
        return value

    def _node(self, event: Any, path: Keys) -> Any:
        self._check_properties(event)
        if isinstance(event, ScalarEvent):
            return self._scalar(event)
        if len(path) >= DEEPEST:
            raise self._refusal(event, "nested too deeply", expected=f"at most {DEEPEST} levels")
        return self._mapping(path) if isinstance(event, MappingStartEvent) else self._list(path)

    def _check_properties(self, event: Any) -> None:
        if isinstance(event, AliasEvent) or event.anchor is not None:
            sign = "*" if isinstance(event, AliasEvent) else "&"
            fix = "write the value out, or put a text that begins with * or & in quotes"
            raise self._refusal(event, "anchors are not supported", found=f"{sign}{event.anchor}", fix=fix)
        if event.tag is not None:
            fix = "remove the tag, or put a text that begins with ! in quotes"
            raise self._refusal(event, "tags are not supported", found=event.tag, fix=fix)

    def _scalar(self, event: Any) -> Any:
        text = event.value
        if not _encodes(text):
            raise self._refusal(event, "half of a surrogate pair is no character", found=text)
        if event.style:  # quoted, or a block of text
            return text
        try:
            return _resolved(text)
        except ValueError as e:
            fix = "write another number, or quote it to make it text"
            raise self._refusal(event, str(e), found=text, fix=fix) from None

    def _mapping(self, path: Keys) -> dict[str, Any]:
        out: dict[str, Any] = {}
        while not isinstance(event := next(self._events), MappingEndEvent):
            key = self._key(event)
            here = (*path, key)
            if key in out:
                first = f"the same key in line {self.lines[here]}"
                fix = "remove one of the two"
                raise self._refusal(event, "duplicate key", key=_dotted(here), found=first, fix=fix)
            self.lines[here] = event.start_mark.line + 1
            out[key] = self._node(next(self._events), here)
        return out

    def _key(self, event: Any) -> str:
        self._check_properties(event)
        key = self._scalar(event) if isinstance(event, ScalarEvent) else event
        if not isinstance(key, str):
            found = "a mapping or a list" if key is event else _shown(key)
            raise self._refusal(
                event, "a key is not text", found=found, expected="text", fix="put it in quotes"
            )
        return key

    def _list(self, path: Keys) -> list[Any]:
        out: list[Any] = []
        while not isinstance(event := next(self._events), SequenceEndEvent):
            here = (*path, len(out))
            self.lines[here] = event.start_mark.line + 1
            out.append(self._node(event, here))
        return out

    def _refusal(self, event: Any, what: str, fix: str = _FIX, **facts: object) -> UsageError:
        return _refusal(self.label, event.start_mark.line + 1, what, fix=fix, **facts)


def _events(text: str, label: str) -> Iterator[Any]:
    line = 1
    try:
        for event in YAML(typ="safe", pure=True).parse(text):
            line = event.start_mark.line + 1
            yield event
    except Exception as e:  # ruamel's own, and whatever a malformed escape makes it stumble over
        raise _syntax_refusal(text, label, line, e) from None


def _syntax_refusal(text: str, label: str, line: int, error: Exception) -> UsageError:
    """Says where and why ruamel gave up; ``line`` is how far it had come."""
    reason = "a malformed value"
    if isinstance(error, ReaderError):
        line = text.count("\n", 0, error.position) + 1
        reason = f"the character {error.character:#04x}, which no text file has"
    elif isinstance(error, MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        line, reason = mark.line + 1, error.problem or error.context
        start = mark.index - mark.column
        if text[mark.index : mark.index + 1] == "\t" or re.match(" *\t", text[start:]):
            return _refusal(label, line, "a tab where only spaces may stand", fix="indent with spaces")
    return _refusal(
        label, line, "not valid YAML", found=reason, fix="correct it; quotes make any text a value"
    )


def _encodes(text: str) -> bool:
    return not any("\ud800" <= c <= "\udfff" for c in text)


# setting


def _assign(data: dict[str, Any], assignment: str, label: str) -> Keys:
    """Changes one value in place and says which."""
    name, sign, text = assignment.partition("=")
    parts = name.strip().split(".")
    if not sign or not all(parts) or not _encodes(name) or len(parts) > DEEPEST:
        raise _refusal(label, None, "not of the form key=value", fix="write it like --set schedule.lr=0.01")
    node: Any = data
    path: Keys = ()
    for i, part in enumerate(parts):
        key = _slot(node, part, path, label)
        path = (*path, key)
        if i < len(parts) - 1:
            node = node.setdefault(key, {}) if isinstance(node, dict) else node[key]
    value = _Reader(text, label).document(path)
    if text.lstrip().startswith("#"):
        raise _refusal(label, None, "the value is only a comment", found=text, fix="put it in quotes")
    node[path[-1]] = value
    return path


def _slot(node: Any, part: str, path: Keys, label: str) -> str | int:
    """The key or index that a part of a path means in a mapping or a list."""
    if isinstance(node, dict):
        return part
    if not isinstance(node, list):
        fix = f"set '{_dotted(path)}' as a whole"
        raise _refusal(
            label, None, f"'{_dotted(path)}' has no keys", found=_kind(node), expected="a mapping", fix=fix
        )
    if not re.fullmatch("[0-9]{1,9}", part) or int(part) >= len(node):
        expected = f"an index from 0 to {len(node) - 1}" if node else "nothing: the list is empty"
        fix = f"set the whole list, like --set {_dotted(path)}=[a,b]"
        raise _refusal(label, None, f"'{_dotted(path)}' has no item '{part}'", expected=expected, fix=fix)
    return int(part)


# validating


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
            key = _dotted(path)
            raise _refusal(
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
    key = _dotted(problem.path)
    name = str(problem.path[-1]) if problem.path else ""
    line = _line(document, problem.path)
    set_here = line is None and _holds(document.data, problem.path) and problem.path != ()
    near = _nearest(problem.found, problem.names)
    what, expected, found = f"'{key}' has a value that does not fit", problem.expected, _shown(problem.found)
    fix = "put it in quotes" if _wants_quotes(problem) else "change the value"
    if problem.kind == "extra_forbidden":
        what, found = f"unknown key '{key}'", name
        fix = "correct or remove the key"
    elif problem.kind in ("missing", "union_tag_not_found"):
        what, found = f"the key '{key}' is missing", ""
        fix = f"add '{name}: ...'"
    elif problem.kind in ("value_error", "assertion_error"):
        what, expected = f"'{key}': {expected}" if key else expected, ""
    return _refusal(
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


# writing

_WORD = r"[A-Za-z0-9_./@+-](?:[A-Za-z0-9_./@+:-]*[A-Za-z0-9_./@+-])?"
_PLAIN = re.compile(rf"(?=[A-Za-z_/]){_WORD}(?: {_WORD})*")
# also what only older readers take for something else, so that all of them agree
_SPECIAL = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


def _block(value: Any, level: int) -> Iterator[str]:
    """The lines of a mapping or list that is not empty."""
    if level >= DEEPEST:
        raise _unwritable("", "deeper nesting", f"at most {DEEPEST} levels")
    margin = "  " * level
    if isinstance(value, Mapping):
        for key, own in value.items():
            head = f"{margin}{_key_text(key)}:"
            if _is_block(own):
                yield head
                yield from _block(own, level + 1)
            else:
                yield f"{head} {_scalar_text(own)}"
        return
    for own in value:
        inner = _block(own, level + 1) if _is_block(own) else iter((f"{margin}  {_scalar_text(own)}",))
        yield f"{margin}- {next(inner)[len(margin) + 2 :]}"
        yield from inner


def _is_block(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) and len(value) > 0


def _key_text(key: Any) -> str:
    if not isinstance(key, str):
        raise _unwritable(key, _kind(key), "text as a key")
    text = _text(key)
    if len(text) > _LONGEST_KEY:
        raise _unwritable(key, f"{len(text):,} characters", f"a key of at most {_LONGEST_KEY:,} characters")
    return text


def _scalar_text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping | list | tuple):
        return "{}" if isinstance(value, Mapping) else "[]"
    if isinstance(value, int) and abs(value) < 10 ** (_LONGEST_NUMBER - 1):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    raise _unwritable("", _kind(value), "text, a finite number, true, false, null, a mapping or a list")


def _text(text: str) -> str:
    """Unquoted where no reader could take it for anything else."""
    if not _encodes(text):
        raise _unwritable("", text, "text without halves of surrogate pairs")
    if _PLAIN.fullmatch(text) and text.lower() not in _SPECIAL:
        return text
    return f'"{"".join(map(_escaped, text))}"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    return character if character.isprintable() else f"\\U{ord(character):08x}"


# saying


def _dotted(path: Keys) -> str:
    return printable(".".join(map(str, path)))


def _shown(value: Any) -> str:
    """A value so that the text '5' and the number 5 look different."""
    if isinstance(value, dict | list):
        return _kind(value)
    return f"the text '{value}'" if isinstance(value, str) else json.dumps(value)


def _kind(value: Any) -> str:
    if isinstance(value, dict | list):
        count = f"of {len(value)}" if value else "without any"
        return f"a mapping {count} keys" if isinstance(value, dict) else f"a list {count} items"
    return "null" if value is None else f"a value of type {type(value).__name__}"


def _unwritable(key: object, found: str, expected: str) -> UsageError:
    return UsageError(
        "SPEC",
        "these data cannot be written as YAML that would be read back as they are",
        key=printable(key),
        found=found,
        expected=expected,
        fix="leave the value out",
    )


def _refusal(label: str, line: int | None, what: str, fix: str = _FIX, **facts: Any) -> UsageError:
    place = f"'{printable(label)}'" + (f", line {line}" if line else "")
    return UsageError("SPEC", f"{place}: {what}", fix=fix, **facts)
