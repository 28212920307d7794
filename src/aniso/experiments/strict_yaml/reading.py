"""Text to plain data.

ruamel.yaml splits the text into events; what they mean is decided here alone. So no file can name a class
to build, repeat itself a billion times, or have the class ``no`` read as false.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

from aniso.errors import UsageError
from aniso.experiments.strict_yaml.document import (
    DEEPEST,
    FIX,
    LARGEST,
    LONGEST_NUMBER,
    SMALL,
    Document,
    Keys,
    dotted,
    encodes,
    kind_of,
    refusal,
    shown,
)


def read_yaml(path: Path) -> Document:
    """The one mapping in a file of at most a megabyte."""
    from aniso.weights.files import RawFile  # it brings torch, which checking a text can do without

    file = RawFile(path)
    if file.size > LARGEST:
        found = f"{file.size:,} bytes"
        raise refusal(file.label, None, "the file is too large", found=found, expected=SMALL)
    raw = file.read(0, file.size)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as e:
        line = raw.count(b"\n", 0, e.start) + 1
        found = f"byte {raw[e.start]:#04x}"
        raise refusal(file.label, line, "not UTF-8", found=found, fix="save it as UTF-8") from None
    return parse_yaml(text, file.label)


def parse_yaml(text: str, label: str) -> Document:
    """The one mapping in a text; ``label`` is how errors call it."""
    if len(text) > LARGEST:
        found = f"{len(text):,} characters"
        raise refusal(label, None, "the text is too large", found=found, expected=SMALL)
    reader = Reader(text.removeprefix("\ufeff"), label)
    data = reader.document(())
    if not isinstance(data, dict):
        what = "the file is empty" if data is None else "the top level is not a mapping"
        fix = "write 'key: value' lines"
        raise refusal(label, None, what, found=kind_of(data), expected="a mapping", fix=fix)
    return Document(label, data, reader.lines)


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
        if len(text) > LONGEST_NUMBER:
            raise ValueError(f"a number has more than {LONGEST_NUMBER} characters")
        value = int(text, _BASES.get(text[:2], 10)) if whole else float(text)
        if math.isfinite(value):
            return value
    elif not _NOT_FINITE.fullmatch(text):
        return text
    raise ValueError("numbers must be finite")


class Reader:
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
        if not encodes(text):
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
                raise self._refusal(event, "duplicate key", key=dotted(here), found=first, fix=fix)
            self.lines[here] = event.start_mark.line + 1
            out[key] = self._node(next(self._events), here)
        return out

    def _key(self, event: Any) -> str:
        self._check_properties(event)
        key = self._scalar(event) if isinstance(event, ScalarEvent) else event
        if not isinstance(key, str):
            found = "a mapping or a list" if key is event else shown(key)
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

    def _refusal(self, event: Any, what: str, fix: str = FIX, **facts: object) -> UsageError:
        return refusal(self.label, event.start_mark.line + 1, what, fix=fix, **facts)


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
            return refusal(label, line, "a tab where only spaces may stand", fix="indent with spaces")
    return refusal(
        label, line, "not valid YAML", found=reason, fix="correct it; quotes make any text a value"
    )
