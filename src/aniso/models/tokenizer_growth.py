"""An upper bound on how much longer the steps of a tokenizer make a text, from its file alone.

Every step may be harmless and their sequence not: fourteen replacements of "a" by "aaaa" make 268 million
letters of one, and the tokenizers library ends the process when memory runs out. So the growth of every
step is bounded from above, and a file is refused if the product is absurd.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

# ALBERT's steps may have 72: 18 letters for an Arabic ligature, twice for replaced and for marked spaces.
_MOST = 256
_MOST_TOKENS = 64  # a template adds two or three special tokens
_MOST_ADDED = 1 << 26  # letters of all added tokens, which the library normalises as soon as it reads a file
_LONGEST_AFFIX = 64  # letters of what stands before or after every piece of a word, such as "##" and "</w>"


class GrowthError(ValueError):
    """A tokenizer could make a text longer than memory."""


def require_bounded_growth(tokenizer: Mapping[str, Any]) -> None:
    """Raise ``GrowthError`` if the tokenizer in ``tokenizer.json`` could make a text very much longer."""
    normalised = _growth(tokenizer.get("normalizer"))
    text = normalised * _growth(tokenizer.get("pre_tokenizer"))
    for part, growth, most in (
        ("normalizer and pre_tokenizer", text, _MOST),
        ("decoder", _growth(tokenizer.get("decoder")), _MOST),
        ("post_processor", _growth(tokenizer.get("post_processor")), _MOST_TOKENS),
    ):
        if growth > most:
            times = f"{growth:,.0f}" if growth < 1e15 else "10^15 or more"
            raise GrowthError(f"{part} can make a text {times} times as long, more than {most} times")
    if normalised * _added_letters(tokenizer.get("added_tokens")) > _MOST_ADDED:
        raise GrowthError("the added tokens are too long, once they are normalised")
    model = tokenizer.get("model")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if isinstance(model, dict) and _letters(model.get(key)) > _LONGEST_AFFIX:
            raise GrowthError(f"{key} has more than {_LONGEST_AFFIX} letters")


def _growth(step: object) -> float:
    """Return an upper bound of how many letters or tokens a step makes of one."""
    if step is None:
        return 1.0
    if not isinstance(step, dict) or not isinstance(step.get("type"), str):
        raise GrowthError("a step has no type")  # the library guesses it from the fields
    if step["type"] != "Sequence":
        return _own(step)
    parts = [part for value in step.values() if isinstance(value, list) for part in value]
    return math.prod(map(_growth, parts))  # infinite at worst


def _own(step: Mapping[str, Any]) -> float:
    kind = step.get("type")
    if kind == "Replace":
        return _replaced(step)
    if kind == "Precompiled":
        return _mapped(step.get("precompiled_charsmap"))
    if kind == "TemplateProcessing":
        return _templated(step)
    if kind in ("ByteLevel", "Metaspace", "BertNormalizer", "BertProcessing", "RobertaProcessing"):
        return 2.0  # two letters for a byte, a mark before each word, spaces around letters, two tokens
    return 1.0 + max(_letters(step.get(key)) for key in ("content", "prepend", "append", "prefix", "suffix"))


def _replaced(step: Mapping[str, Any]) -> float:
    """Return the growth of a replacement; a regular expression may also match the empty string."""
    content, pattern = _letters(step.get("content")), step.get("pattern")
    text = pattern.get("String") if isinstance(pattern, dict) else pattern
    if isinstance(text, str) and text:
        return max(1.0, content / len(text))
    return 1.0 + content


def _mapped(table: object) -> float:
    """Return the growth of SentencePiece's table: base64 of a length, an index, and zero-ended texts."""
    try:
        raw = base64.b64decode(table, validate=True) if isinstance(table, str) else b""
    except ValueError:
        return 1.0  # the library refuses it
    texts = raw[4 + int.from_bytes(raw[:4], "little") // 4 * 4 :].split(b"\0")
    return max(1.0, *(len(text.decode("utf-8", "replace")) for text in texts))


def _templated(step: Mapping[str, Any]) -> float:
    """Return the growth of a template: the text as often as it occurs, plus every special token."""
    pieces, special = step.get("single"), step.get("special_tokens")
    if not isinstance(pieces, list):
        return 1.0
    total = 0
    for piece in pieces:
        name = piece.get("SpecialToken", {}).get("id") if isinstance(piece, dict) else None
        token = special.get(name) if isinstance(special, dict) and isinstance(name, str) else None
        ids = token.get("ids") if isinstance(token, dict) else None
        total += len(ids) if isinstance(ids, list) else 1
    return float(max(1, total))


def _added_letters(tokens: object) -> int:
    entries = tokens if isinstance(tokens, list) else []
    return sum(_letters(entry.get("content")) for entry in entries if isinstance(entry, dict))


def _letters(value: object) -> int:
    return len(value) if isinstance(value, str) else 0
