"""Hooks of MkDocs: generated pages, links of the repository, formulas, raw Markdown, checks of the result."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import links
import numbers_pages
import reference
from check import problems
from llms import llms_text
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
_FORMULA = re.compile(r"^```math\n(.*?)\n```$", re.DOTALL | re.MULTILINE)
_written: dict[str, str] = {}
"""Markdown of every page as it is on the site, by path."""


def on_config(config: Any) -> Any:
    """Add the generated pages of commands, modules and decisions to the navigation."""
    (section,) = [entry["Reference"] for entry in config.nav if "Reference" in entry]
    for entry in section:
        for title, path in entry.items() if isinstance(entry, dict) else ():
            folder = path.removesuffix("index.md")
            own = sorted(name for name in _generated() if name.startswith(folder) and name != path)
            entry[title] = [path, *own]
    return config


@cache
def _generated() -> dict[str, str]:
    return {**reference.pages(), **numbers_pages.pages()}


def on_files(files: Any, config: Any) -> Any:
    """Add generated pages, pages outside of docs/, and every file that a page links."""
    _written.clear()
    for path, text in _generated().items():
        files.append(File.generated(config, path, content=text))
    for source, place in links.copied_pages().items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    known = {file.src_uri for file in files}
    linked: set[str] = set()
    for file in files.documentation_pages():
        text, missing = links.rewritten(file.content_string, file.src_uri, known)
        _written[file.src_uri] = text
        linked |= missing
    for source in sorted(linked):
        files.append(File.generated(config, links.site_path(source), abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return a page with links of the site and formulas as MathML."""
    return _FORMULA.sub(_mathml, _without_front_matter(_written[page.file.src_uri]))


def _without_front_matter(text: str) -> str:
    return re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)


def _mathml(match: re.Match[str]) -> str:
    from latex2mathml.converter import convert

    return f'<div class="formula">{convert(match.group(1), display="block")}</div>'


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Return a page without the second colon that reStructuredText has before an example."""
    return html.replace("::</p>", ":</p>")


def on_post_build(config: Any) -> None:
    """Write raw Markdown and llms.txt beside the pages; fail on what ``check.py`` finds."""
    site = Path(config.site_dir)
    for unused in (*site.rglob("*.map"), *site.glob("assets/javascripts/lunr/**/*.js")):
        unused.unlink()  # source maps, and stemmers of other languages
    for path, text in _written.items():
        place = site / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    (site / "llms.txt").write_text(llms_text(config.nav, _written))
    found = problems(site)
    if found:
        raise PluginError("\n".join(found))
