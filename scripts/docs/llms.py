"""``llms.txt``: all pages of the site with a sentence each, for programs that read Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_LONGEST = 200


def llms_text(nav: list[Any], pages: Mapping[str, str]) -> str:
    """Return the list of pages by section; those that are in no section come last."""
    lines = [
        "# aniso",
        "",
        "> Compose fine-tuned models: one learned coefficient per task vector and parameter block. A Python "
        "library with a command line. Every page is also there as Markdown, under the names below.",
    ]
    shown: set[str] = set()
    for entry in nav:
        ((section, content),) = entry.items()
        lines += ["", f"## {section}", ""]
        for path in _paths(content):
            shown.add(path)
            lines.append(_row(path, pages[path]))
    rest = sorted(path for path in pages if path not in shown)
    lines += ["", "## Optional", "", *(_row(path, pages[path]) for path in rest)]
    return "\n".join(lines) + "\n"


def _paths(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
        return
    for entry in content:
        for value in entry.values() if isinstance(entry, dict) else (entry,):
            yield from _paths(value)


def _row(path: str, text: str) -> str:
    sentence = first_sentence(text)
    return f"- [{title(text)}]({path})" + (f": {sentence}" if sentence else "")


def title(text: str) -> str:
    """Return the first heading of a page."""
    found = re.search(r"^# (.+)$", text, re.MULTILINE)
    return found.group(1) if found else ""


def first_sentence(text: str) -> str:
    """Return the first sentence of prose of a page, without links and emphasis."""
    body = re.sub(r"^```.*?^```$", "", text.partition("\n")[2], flags=re.DOTALL | re.MULTILINE)
    for block in re.split(r"\n\s*\n", body):
        line = " ".join(block.split())
        if line and line[0] not in "#|!:<-?":
            line = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line).replace("**", "")
            return line[:_LONGEST].split(". ")[0].rstrip(".") + "."
    return ""
