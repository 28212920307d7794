"""Texts for training and evaluating language models: examples from files, and rows of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, final

import torch
from torch import Tensor

from aniso.data import sampling
from aniso.data.padding import NOTHING
from aniso.data.readers.texts import read_lines, read_text
from aniso.errors import InputError, UsageError, printable
from aniso.weights.jsontext import JsonError, parse_object

JSON_LINES = (".jsonl", ".ndjson")
_NOT_TEXT = (".json", ".csv", ".tsv", ".parquet", ".yaml", ".yml")
_KEYS = {"text", "prompt", "completion"}


@final
@dataclass(frozen=True)
class Example:
    """A prompt and its completion, or a text without a prompt."""

    prompt: str | None
    completion: str
    where: str
    """The file and line it comes from."""


def read_examples(path: str | Path) -> tuple[Example, ...]:
    """Read examples from JSON lines, ``{"prompt": …, "completion": …}`` or ``{"text": …}``.

    A file with any suffix but ``.jsonl`` and ``.ndjson`` is one long text; tables are refused.
    """
    path = Path(path)
    if path.suffix.lower() in _NOT_TEXT:
        raise InputError(
            "DATA-TEXT",
            f"'{printable(path)}' would be read as one long text",
            expected='lines {"prompt": "…", "completion": "…"} in a file .jsonl, or a text in a file .txt',
            fix="rename it, or write one example per line",
        )
    if path.suffix.lower() not in JSON_LINES:
        text = read_text(path)
        if not text.strip():
            raise InputError("DATA-TEXT", f"'{printable(path)}' holds no text", fix="name another file")
        return (Example(None, text, printable(path)),)
    lines = read_lines(path)
    if not lines:
        raise InputError("DATA-TEXT", f"'{printable(path)}' holds no examples", fix="name another file")
    return tuple(_example(line, where) for line, where in lines)


def _example(line: str, where: str) -> Example:
    try:
        fields = parse_object(line.encode())
    except JsonError as e:
        raise InputError(
            "DATA-TEXT", f"{where} is not a JSON object", reason=printable(e), fix="correct the line"
        ) from None
    keys = {"text"} if "text" in fields else {"prompt", "completion"}
    texts = {key: value for key, value in fields.items() if key in _KEYS and isinstance(value, str)}
    if keys != set(texts) or keys != set(fields) & _KEYS:
        raise InputError(
            "DATA-TEXT",
            f"{where} is not an example",
            expected='{"prompt": "…", "completion": "…"}, or {"text": "…"}',
            found=printable(", ".join(f"{key}: {type(value).__name__}" for key, value in fields.items())),
            fix="rename the keys; texts are strings",
        )
    if any("\ud800" <= letter <= "\udfff" for key in keys for letter in texts[key]):
        raise InputError(
            "DATA-TEXT",
            f"{where} is not valid text",
            found="half of a character (\\ud800 to \\udfff)",
            expected="UTF-8",
            fix="correct the line",
        )
    completion = texts["completion"] if "completion" in texts else texts["text"]
    if not completion.strip():
        raise InputError("DATA-TEXT", f"{where} has an empty text", fix="remove the line")
    return Example(texts.get("prompt"), completion, where)


Row = tuple[Tensor, Tensor]
"""Input tokens and target tokens; the model decides how they are aligned."""


@final
@dataclass(frozen=True, eq=False, repr=False)
class TextDataset:
    """Rows of input and target tokens, none longer than ``length``."""

    name: str
    rows: Sequence[Row]
    places: Sequence[str]
    """The file and line of every row."""
    length: int
    role: str = ""
    """train, val or test; a test split may not be learned from or selected by."""
    notes: tuple[str, ...] = ()
    item_kind: ClassVar[str] = "texts"
    default_batch_size: ClassVar[int] = 16  # the logits of every token take memory for the whole vocabulary

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.places):
            raise UsageError("DATA-TEXT", f"'{printable(self.name)}' has no rows", fix="name another file")

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"TextDataset({self.name}: {len(self)} rows, {self.tokens:,} target tokens)"

    @property
    def tokens(self) -> int:
        """The number of target tokens in all rows."""
        return sum(int((targets != NOTHING).sum()) for _, targets in self.rows)

    def opened(self, index: int) -> Row:
        return self.rows[index]

    def describe(self, index: int) -> str:
        return self.places[index]

    @cached_property
    def keys(self) -> tuple[int, ...]:
        """The number that seeds random choices about each row; equal rows have different keys."""
        return tuple(sampling.number(i, digest) for i, digest in enumerate(self.digests))

    @cached_property
    def manifest(self) -> str:
        """A hash that changes with any token."""
        return hashlib.sha256("".join(self.digests).encode()).hexdigest()

    @cached_property
    def digests(self) -> tuple[str, ...]:
        """The hash of every row; equal rows have equal hashes."""
        return tuple(map(_digest, self.rows))


def _digest(row: Row) -> str:
    parts = [b",".join(str(token).encode() for token in tokens.tolist()) for tokens in row]
    return hashlib.sha256(b";".join(parts)).hexdigest()


@final
@dataclass(frozen=True)
class Padded:
    """Pads rows to equal length, so that they can be stacked; models cut off unused padding."""

    length: int
    name: str = "tokens"

    def __call__(self, row: Row, rng: torch.Generator) -> Tensor:
        """Return two rows: input tokens and target tokens."""
        out = torch.full((2, self.length), NOTHING, dtype=torch.int32)
        for i, tokens in enumerate(row):
            out[i, : len(tokens)] = tokens
        return out

    def finish(self, stack: Tensor) -> Tensor:
        return stack.long()

    def lengths(self, items: object) -> None:
        """All rows have one length."""
