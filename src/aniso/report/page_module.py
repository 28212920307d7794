"""The ES module and the style that the desk, the report and the notebook widget share."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources


@cache
def module_source() -> str:
    """Return the module's text; it can stand inside of a page."""
    return _text("desk.js")


@cache
def desk_style() -> str:
    """Return the style of maps, sliders and cards."""
    return _text("desk.css")


def hash_source(text: str) -> str:
    """Return the expression of a content security policy that allows this inline text alone."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _text(name: str) -> str:
    return (resources.files("aniso.report") / name).read_text(encoding="utf-8")
