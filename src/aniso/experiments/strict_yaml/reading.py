"""YAML 1.2 text to plain data, with the line of every key.

ruamel.yaml splits the text into events, and only this module gives them a meaning. So no file can name a
class to build or expand an alias a billion times, and the class ``no`` is not read as false.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML, events
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.reader import ReaderError

from aniso.errors import InputError, UsageError, printable

Data = dict[str, Any]
"""Plain data: text, numbers, true, false, null, lists and mappings of these."""
Keys = tuple[str | int, ...]
"""The path to a value: keys of mappings, and indices of lists from 0."""

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_DIGITS = 100  # characters of a number; a longer whole number would become infinite as a float
_FIX = "correct it, then try again"


@dataclass(frozen=True)
class Document:
    """A YAML 1.2 file as plain data, with the line (from 1) of every key and every item of a list."""

    label: str
    data: Data
    lines: Mapping[Keys, int]


def read_yaml(path: Path) -> Document:
    """Read the mapping in a file of at most 1 MiB."""
    label, content = printable(path), _content(path)
    try:
        return parse_yaml(content.decode("utf-8"), label)
    except UnicodeDecodeError as e:
        line = content.count(b"\n", 0, e.start) + 1
        byte = f"byte {content[e.start]:#04x}"
        raise refusal(label, line, "not UTF-8", found=byte, fix="save it as UTF-8") from None


def parse_yaml(text: str, label: str) -> Document:
    """Read the mapping in a text; ``label`` is its name in errors."""
    if len(text) > MAX_BYTES:
        raise _too_large(label, len(text))
    reader = _Reader(text.removeprefix("\ufeff"), label)
    data = reader.document(())
    if not isinstance(data, dict):
        what = "the file is empty" if data is None else "the top level is not a mapping"
        fix = "write 'key: value' lines"
        raise refusal(label, None, what, found=shown(data), expected="a mapping", fix=fix)
    return Document(label, data, reader.lines)


def with_values(document: Document, assignments: Sequence[str]) -> Document:
    """Return the document with values replaced or added, as by ``schedule.lr=0.01`` or ``tasks.0=dtd``.

    Dots divide the path, whole numbers are indices of a list from 0, and the value is read as YAML 1.2.
    Values that were set have no line; the last of several assignments to one key holds.
    """
    data, lines = copy.deepcopy(document.data), dict(document.lines)
    for assignment in assignments:
        path = _assign(data, assignment)
        lines = {keys: line for keys, line in lines.items() if keys[: len(path)] != path}
    return Document(document.label, data, lines)


def refusal(label: str, line: int | None, what: str, fix: str = _FIX, **facts: Any) -> UsageError:
    """Return the error for something wrong in a line of a file."""
    place = f"'{printable(label)}'" + (f", line {line}" if line else "")
    return UsageError("SPEC", f"{place}: {what}", fix=fix, **facts)


def shown(value: Any) -> str:
    """Return a value for messages, where the text '5' and the number 5 look different."""
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    return f"the text '{value}'" if isinstance(value, str) else json.dumps(value, default=repr)


def dotted(path: Keys) -> str:
    """Return a path as text, such as ``tasks.0.name``."""
    return printable(".".join(map(str, path)))


def is_encodable(text: str) -> bool:
    """Return False for text with half of a surrogate pair, which no file can hold."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _too_large(label: str, size: int) -> UsageError:
    limit = f"at most {MAX_BYTES:,} bytes"
    return refusal(label, None, "the file is too large", found=f"{size:,} bytes", expected=limit)


def _content(path: Path) -> bytes:
    """Read a regular file; importing ``aniso.weights`` for that would take the seconds that torch takes."""
    label = printable(path)
    try:
        # non-blocking, so that opening a FIFO returns and can be refused
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode):
                if status.st_size > MAX_BYTES:
                    raise _too_large(label, status.st_size)
                return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise InputError("FILE-MISSING", f"'{label}' does not exist", fix="check the path") from None
    except IsADirectoryError:
        pass
    except OSError as e:
        fix = "check the path and its permissions"
        raise InputError("FILE-ACCESS", f"'{label}' cannot be opened", reason=e.strerror, fix=fix) from None
    raise InputError("FILE-KIND", f"'{label}' is not a regular file", fix="name a YAML file")


# Scalars, as the core schema of YAML 1.2 resolves them

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
    """Return the value of an unquoted word; a ValueError says what is wrong with it."""
    if text in _WORDS:
        return _WORDS[text]
    whole = _WHOLE.fullmatch(text)
    if whole or _FLOAT.fullmatch(text):
        if len(text) > MAX_DIGITS:
            raise ValueError(f"a number has more than {MAX_DIGITS} characters")
        value = int(text, _BASES.get(text[:2], 10)) if whole else float(text)
        if math.isfinite(value):
            return value
    elif not _NOT_FINITE.fullmatch(text):
        return text
    raise ValueError("numbers must be finite")


class _Reader:
    """Builds plain data from the events of one text."""

    def __init__(self, text: str, label: str) -> None:
        self.label = label
        self.lines: dict[Keys, int] = {}
        self._events = _parsed(text, label)

    def document(self, path: Keys) -> Any:
        """Return the value of the only document, which lies at ``path``; None for an empty text."""
        next(self._events)
        start = next(self._events)
        if isinstance(start, events.StreamEndEvent):
            return None
        if start.tags or start.version not in (None, (1, 2)):
            raise self._refusal(
                start, "directives are not supported", fix="remove the lines that begin with %"
            )
        value = self._node(next(self._events), path)
        next(self._events)
        after = next(self._events)
        if isinstance(after, events.DocumentStartEvent):
            raise self._refusal(after, "a second document begins", fix="write one document per file")
        return value

    def _node(self, event: Any, path: Keys) -> Any:
        self._require_plain(event)
        if isinstance(event, events.ScalarEvent):
            return self._scalar(event)
        if len(path) >= MAX_DEPTH:
            raise self._refusal(event, "nested too deeply", expected=f"at most {MAX_DEPTH} levels")
        return self._mapping(path) if isinstance(event, events.MappingStartEvent) else self._list(path)

    def _require_plain(self, event: Any) -> None:
        alias = isinstance(event, events.AliasEvent)
        if alias or event.anchor is not None:
            fix = "write the value out, or put a text that begins with * or & in quotes"
            found = f"{'*' if alias else '&'}{event.anchor}"
            raise self._refusal(event, "anchors are not supported", found=found, fix=fix)
        if event.tag is not None:
            fix = "remove the tag, or put a text that begins with ! in quotes"
            raise self._refusal(event, "tags are not supported", found=event.tag, fix=fix)

    def _scalar(self, event: Any) -> Any:
        text = event.value
        if not is_encodable(text):
            raise self._refusal(event, "half of a surrogate pair is no character", found=text)
        if event.style:  # quoted, or a block of text
            return text
        try:
            return _resolved(text)
        except ValueError as e:
            fix = "write another number, or quote it to make it text"
            raise self._refusal(event, str(e), found=text, fix=fix) from None

    def _mapping(self, path: Keys) -> Data:
        out: Data = {}
        while not isinstance(event := next(self._events), events.MappingEndEvent):
            self._require_plain(event)
            key = self._scalar(event) if isinstance(event, events.ScalarEvent) else {}
            if not isinstance(key, str):
                raise self._refusal(event, "a key is not text", found=shown(key), fix="put it in quotes")
            here = (*path, key)
            if key in out:
                first = f"the same key in line {self.lines[here]}"
                fix = "remove one of the two"
                raise self._refusal(event, "duplicate key", key=dotted(here), found=first, fix=fix)
            self.lines[here] = event.start_mark.line + 1
            out[key] = self._node(next(self._events), here)
        return out

    def _list(self, path: Keys) -> list[Any]:
        out: list[Any] = []
        while not isinstance(event := next(self._events), events.SequenceEndEvent):
            here = (*path, len(out))
            self.lines[here] = event.start_mark.line + 1
            out.append(self._node(event, here))
        return out

    def _refusal(self, event: Any, what: str, fix: str = _FIX, **facts: object) -> UsageError:
        return refusal(self.label, event.start_mark.line + 1, what, fix=fix, **facts)


def _parsed(text: str, label: str) -> Iterator[Any]:
    """Yield ruamel's events; its errors become ours, with their line."""
    line, reason = 1, "a malformed value"
    try:
        for event in YAML(typ="safe", pure=True).parse(text):
            line = event.start_mark.line + 1
            yield event
        return
    except ReaderError as e:
        line = text.count("\n", 0, e.position) + 1
        reason = f"the character {e.character:#04x}, which no text file has"
    except MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        line, reason = mark.line + 1, e.problem or e.context
        before = text[mark.index - mark.column :]
        if text[mark.index : mark.index + 1] == "\t" or re.match(" *\t", before):
            raise refusal(
                label, line, "a tab where only spaces may stand", fix="indent with spaces"
            ) from None
    except Exception:
        pass
    fix = "correct it; quotes make any text a value"
    raise refusal(label, line, "not valid YAML", found=reason, fix=fix)


# Single values, as from a command line


def _assign(data: Data, assignment: str) -> Keys:
    """Change one value in place and return its path."""
    label = f"--set {printable(assignment)}"
    name, sign, text = assignment.partition("=")
    parts = name.strip().split(".")
    if not sign or not all(parts) or not is_encodable(name) or len(parts) > MAX_DEPTH:
        raise refusal(label, None, "not of the form key=value", fix="write it like --set schedule.lr=0.01")
    node: Any = data
    path: Keys = ()
    for i, part in enumerate(parts):
        key = _key(node, part, path, label)
        path = (*path, key)
        if i < len(parts) - 1:
            node = node.setdefault(key, {}) if isinstance(node, dict) else node[key]
    value = _Reader(text, label).document(path)
    if text.lstrip().startswith("#"):
        raise refusal(label, None, "the value is only a comment", found=text, fix="put it in quotes")
    node[path[-1]] = value
    return path


def _key(node: Any, part: str, path: Keys, label: str) -> str | int:
    """Return the key or index that a part of a path means in a mapping or a list."""
    if isinstance(node, dict):
        return part
    here = dotted(path)
    if not isinstance(node, list):
        fix = f"set '{here}' as a whole"
        raise refusal(label, None, f"'{here}' has no keys", found=shown(node), expected="a mapping", fix=fix)
    if not re.fullmatch("[0-9]{1,9}", part) or int(part) >= len(node):
        expected = f"an index from 0 to {len(node) - 1}" if node else "nothing: the list is empty"
        fix = f"set the whole list, like --set {here}=[a,b]"
        raise refusal(label, None, f"'{here}' has no item '{part}'", expected=expected, fix=fix)
    return int(part)
