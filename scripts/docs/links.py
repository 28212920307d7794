"""Where files of the repository are on the documentation site, and links between them."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = "docs/"
MOVED = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "docs/adr": "adr/index.md",
    "changelog.d": "project/changelog.md",
}
"""Files that are somewhere else on the site than in the repository."""
COPIED = (
    "SECURITY.md",
    "CONTRIBUTING.md",
    "experiments/*.md",
    "experiments/*/*.md",
    "benchmarks/README.md",
    "examples/README.md",
)
"""Pages outside of docs/ that the site has as they are."""
_LINK = re.compile(r"(\]\()([^)\s#]+)?(#[^)\s]*)?(\))")
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


def copied_pages() -> dict[str, str]:
    """Return the site's path of every page outside of docs/, by its path in the repository."""
    found = sorted(path for pattern in COPIED for path in ROOT.glob(pattern))
    names = [path.relative_to(ROOT).as_posix() for path in found]
    return {name: site_path(name) for name in names}


def site_path(path: str) -> str:
    """Return where a file of the repository is on the site."""
    return MOVED.get(path, path.removeprefix(DOCS))


def repository_path(path: str) -> str:
    """Return where a page of the site is in the repository, for resolving its links."""
    for source, moved in MOVED.items():
        if moved == path and source.endswith(".md") and source != "README.md":
            return source
    return path if path.startswith(("experiments/", "benchmarks/", "examples/")) else DOCS + path


def linked_file(target: str) -> str | None:
    """Return the file that a link to a path of the repository leads to; None if there is nothing to show.

    A directory of an experiment is shown by its spec.
    """
    path = ROOT / target
    if path.is_dir() and target not in MOVED:
        inside = [name for name in ("README.md", "spec.yaml") if (path / name).is_file()]
        return f"{target}/{inside[0]}" if inside else None
    return target


def rewritten(text: str, page: str, known: set[str]) -> tuple[str, set[str]]:
    """Return a page's Markdown with links of the repository made links of the site.

    ``page`` is the page's path on the site and ``known`` are all paths there. Also returns the files of the
    repository that are linked and not on the site yet.
    """
    home = posixpath.dirname(repository_path(page))
    missing: set[str] = set()

    def replace(match: re.Match[str]) -> str:
        start, link, anchor, end = match.groups()
        if not link or ":" in link:
            return match.group()
        beside = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
        if beside in known:
            return match.group()
        target = posixpath.normpath(posixpath.join(home, link))
        shown = linked_file(target)
        if shown is None:
            return "]{ .no-link }"
        place = site_path(shown)
        if place not in known and (ROOT / shown).is_file():
            missing.add(shown)
        relative = posixpath.relpath(place, posixpath.dirname(page) or ".")
        return f"{start}{relative}{anchor or ''}{end}"

    parts = _CODE.split(text)
    for i in range(0, len(parts), 2):  # outside of code
        parts[i] = _LINK.sub(replace, parts[i])
    return _unlinked("".join(parts)), missing


def _unlinked(text: str) -> str:
    """Return text with links that lead nowhere as plain words."""
    return re.sub(r"\[([^\[\]]*)\]\{ \.no-link \}", r"\1", text)
