"""Markdown tables, and text that is safe within them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = False) -> str:
    """Return a table; with ``numbers`` all columns but the first are aligned to the right."""
    rule = ["---", *(("---:" if numbers else "---") for _ in head[1:])]
    lines = [head, rule, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plain(text: str) -> str:
    """Return text of the program as one line of Markdown, for a table: no HTML, no columns."""
    line = " ".join(str(text).split()).replace("``", "`")
    parts = line.split("`")
    for i in range(0, len(parts), 2):  # outside of code
        parts[i] = parts[i].replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_").replace("[", "\\[")
    return "`".join(parts).replace("|", "\\|")
