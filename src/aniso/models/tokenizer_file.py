"""Tokenizers read from a directory as data: no class, file or repository that a file names is ever loaded."""

from __future__ import annotations

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from aniso.errors import AnisoError
from aniso.json_value import JsonObject
from aniso.models.tokenizer_growth import require_bounded_growth
from aniso.weights.directory import read_json
from aniso.weights.files import RawFile
from aniso.weights.jsontext import parse_object

_LARGEST = 256 << 20  # bytes; the largest in use, with 260,000 tokens, have 35 million
_MOST_VALUES = 6_000_000  # the largest in use have 2.4 million, most of them in pairs to merge
_MOST_ADDED = 1 << 18  # letters of all special tokens that settings add
_MARKS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word")
_CLIP = "CLIPTokenizer"


class TokenizerError(ValueError):
    """The files of a tokenizer are damaged, or belong to another model."""


class LateTokenizer(ABC):
    """Reads a tokenizer when it is first used: an image encoder without prompts needs none."""

    _loaded: Any = None

    @property
    def _tokenizer(self) -> Any:
        if self._loaded is None:
            self._loaded = self._read()
        return self._loaded

    @abstractmethod
    def _read(self) -> Any: ...

    def __getstate__(self) -> JsonObject:
        return {**self.__dict__, "_loaded": None}


@final
@dataclass(frozen=True, eq=False)
class TokenizerFile:
    """A tokenizer in the format of the tokenizers library, which holds no code, and its special tokens."""

    backend: Any
    marks: Mapping[str, str | None]
    """``bos_token``, ``eos_token``, ``pad_token`` and the like."""

    @classmethod
    def read(cls, path: Path, size: int | None = None) -> TokenizerFile:
        """Read ``tokenizer.json``; with ``size``, every id has to be smaller than that."""
        return _checked(path, lambda tokenizers: tokenizers.Tokenizer.from_str(_text(path)), size)

    @classmethod
    def read_clip(cls, path: Path, size: int | None = None) -> TokenizerFile:
        """Read a CLIP's tokenizer from ``tokenizer.json``, or from ``vocab.json`` and ``merges.txt``."""
        if (path / "tokenizer.json").is_file():
            return cls.read(path, size)
        return _checked(path, lambda _: _clip(path), size, _CLIP)

    def __len__(self) -> int:
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def id_of(self, mark: str) -> int | None:
        token = self.marks.get(mark)
        found: int | None = None if token is None else self.backend.token_to_id(token)
        return found

    @property
    def bos_token_id(self) -> int | None:
        return self.id_of("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self.id_of("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self.id_of("pad_token")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def batch(self, texts: Sequence[str], length: int) -> tuple[Tensor, list[int]]:
        """Return ids of at most ``length`` columns, padded at the end, and the texts that were truncated."""
        rows = [self.encode(text) for text in texts]
        cut = [i for i, row in enumerate(rows) if len(row) > length]
        if cut:
            self.backend.enable_truncation(length)
            try:
                short = {i: self.encode(texts[i]) for i in cut}
            finally:
                self.backend.no_truncation()
            rows = [short.get(i, row) for i, row in enumerate(rows)]
        width = max(map(len, rows), default=0)
        padding = self.pad_token_id or 0
        return torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows]), cut


def backend_text(backend: Any) -> str:
    """Return a tokenizer as JSON, without the padding and truncation of the last call."""
    settings: JsonObject = json.loads(backend.to_str())
    return json.dumps({key: settings[key] for key in settings if key not in ("padding", "truncation")})


def _checked(path: Path, make: Any, size: int | None, default_class: str | None = None) -> TokenizerFile:
    """Build a tokenizer and add special tokens that its settings name and its vocabulary lacks."""
    import tokenizers

    try:
        backend = make(tokenizers)
        backend.no_padding()  # a file may request rows of any length
        backend.no_truncation()
        marks, more = _special(path, backend, default_class)
        if sum(len(token.content) for token in more) > _MOST_ADDED:
            raise TokenizerError(f"its settings add special tokens of more than {_MOST_ADDED:,} letters")
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        backend.add_special_tokens([token for token in more if token.content not in known])
        made = TokenizerFile(backend, marks)
        if size is not None and len(made) <= size:
            largest = max([*backend.get_vocab(with_added_tokens=True).values(), *made.encode("")], default=0)
            if largest >= size:
                raise TokenizerError(f"a token has the id {largest}")
    except (TokenizerError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except (
        BaseException
    ) as e:  # the tokenizers library has no narrower one; its panics are not even Exceptions
        raise TokenizerError((str(e) or type(e).__name__).splitlines()[0]) from None
    return made


def _text(path: Path) -> str:
    file = RawFile(path / "tokenizer.json")
    if file.size > _LARGEST:
        raise TokenizerError(f"{file.size:,} bytes long")
    data = bytes(file.read(0, file.size))
    require_bounded_growth(parse_object(data, largest=_LARGEST, most_values=_MOST_VALUES))
    return data.decode()


def _clip(path: Path) -> Any:
    from transformers import CLIPTokenizer

    vocabulary: Any = read_json(path / "vocab.json")
    file = RawFile(path / "merges.txt")
    if file.size > _LARGEST:
        raise TokenizerError(f"merges.txt is {file.size:,} bytes long")
    lines = file.read(0, file.size).decode().splitlines()
    pairs: Any = [tuple(line.split()) for line in lines if line.strip() and not line.startswith("#version")]
    return CLIPTokenizer(vocab=vocabulary, merges=pairs).backend_tokenizer


def _special(path: Path, backend: Any, default_class: str | None) -> tuple[dict[str, str | None], list[Any]]:
    """Return special tokens by purpose, and all that the settings name; these override defaults."""
    settings = _settings(path)
    marks: dict[str, str | None] = {}
    for mark, token in _defaults(path, settings, default_class).items():
        marks[mark] = token if backend.token_to_id(token) is not None else None
    named = {mark: _token(settings[mark]) for mark in _MARKS if mark in settings}
    marks |= {mark: None if token is None else token.content for mark, token in named.items()}
    lists = [settings.get(key) for key in ("additional_special_tokens", "extra_special_tokens")]
    more = [_token(entry) for entries in lists if isinstance(entries, list) for entry in entries]
    return marks, [token for token in (*named.values(), *more) if token is not None]


def _settings(path: Path) -> JsonObject:
    """Read the files beside a tokenizer; special_tokens_map.json only where older versions need it."""
    settings: JsonObject = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (path / name).is_file() and "added_tokens_decoder" not in settings:
            try:
                settings |= read_json(path / name)
            except AnisoError as e:
                raise TokenizerError(e.message) from None
    return settings


def _token(value: object) -> Any:
    """Return a special token, which is written as text or as an object with its content."""
    from tokenizers import AddedToken

    flags: dict[str, bool] = {}
    if isinstance(value, dict):
        flags = {flag: value[flag] for flag in _FLAGS if isinstance(value.get(flag), bool)}
        value = value.get("content")
    return AddedToken(value, special=True, **flags) if isinstance(value, str) and value else None


def _defaults(path: Path, settings: Mapping[str, Any], default_class: str | None) -> dict[str, str]:
    """Return the default special tokens of a class of transformers, for files that name none.

    The class is looked up in the library's own table and not built; only its signature is read.
    """
    from transformers.models.auto import tokenization_auto as library

    table: Mapping[str, str | None] = library.TOKENIZER_MAPPING_NAMES
    name = settings.get("tokenizer_class") or default_class or table.get(_model_type(path))
    known = {found.removesuffix("Fast") for found in table.values() if found}
    if not isinstance(name, str) or name.removesuffix("Fast") not in known:
        return {}
    kind = library.tokenizer_class_from_name(name.removesuffix("Fast"))
    parameters = inspect.signature(kind.__init__).parameters if kind is not None else {}
    return {
        mark: str(parameters[mark].default)
        for mark in _MARKS
        if mark in parameters and isinstance(parameters[mark].default, str)
    }


def _model_type(path: Path) -> str:
    if not (path / "config.json").is_file():
        return ""
    try:
        return str(read_json(path / "config.json").get("model_type"))
    except AnisoError as e:
        raise TokenizerError(e.message) from None
