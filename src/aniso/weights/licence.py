"""The licence that a model's directory states in its card."""

from __future__ import annotations

import re
from pathlib import Path

_CARD = "README.md"
_LARGEST = 1 << 20
_FRONT = re.compile(r"\A---\r?\n(.*?)\r?\n---", re.DOTALL)
_LICENCE = re.compile(r"^license:[ \t]*['\"]?([A-Za-z0-9][A-Za-z0-9.+-]{0,60})['\"]?[ \t]*$", re.MULTILINE)


def stated_licence(home: Path | None) -> str | None:
    """Return the licence in the front matter of a directory's README.md, or None if there is none."""
    card = None if home is None else home / _CARD
    try:
        if card is None or not card.is_file() or card.stat().st_size > _LARGEST:
            return None
        front = _FRONT.match(card.read_text("utf-8", errors="replace"))
    except OSError:
        return None
    found = _LICENCE.search(front[1]) if front else None
    return found[1].lower() if found else None
