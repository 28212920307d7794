"""Checks of a built site: nothing comes from another host, no page is heavy, every link leads somewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

HEAVIEST = 300_000
"""Bytes of one HTML page, without what all pages share."""
_LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src", "object": "data"}
_METADATA = {"canonical", "prev", "next", "alternate"}


class _Page(HTMLParser):
    """Addresses that a page loads, links that it has, and the anchors that it defines."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "link" and found.get("rel", "") in _METADATA:
            return
        address = found.get(_LOADED.get(tag, ""), "")
        if address:
            self.loaded.append(address)
        if tag == "a" and found.get("href"):
            self.linked.append(found["href"])


def problems(site: Path) -> list[str]:
    """Return what is wrong with a site, one line each; none if all is well."""
    pages = {path: _read(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        if path.stat().st_size > HEAVIEST:
            found.append(f"{name}: {path.stat().st_size:,} bytes, more than {HEAVIEST:,}")
        found += [f"{name}: loads {address}" for address in page.loaded if "//" in address]
        found += [f"{name}: {reason}" for reason in _broken(path, page, pages)]
    return found


def sizes(site: Path) -> str:
    """Return the number of pages, the size of the site, and its heaviest page."""
    pages = {path: path.stat().st_size for path in site.rglob("*.html")}
    heaviest = max(pages, key=lambda path: pages[path])
    total = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    name = heaviest.relative_to(site)
    return f"{len(pages)} pages, {total / 1e6:.1f} MB; the heaviest is {name}, {pages[heaviest] / 1e3:.0f} kB"


def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text())
    return page


def _broken(path: Path, page: _Page, pages: dict[Path, _Page]) -> Iterator[str]:
    for address in (*page.loaded, *page.linked):
        if ":" in address or address.startswith(("//", "/")):
            continue
        file, anchor = urldefrag(address)
        target = (path.parent / unquote(file.partition("?")[0])).resolve() if file else path
        if not target.exists():
            yield f"links {address}, which does not exist"
        elif anchor and target in pages and unquote(anchor) not in pages[target].anchors:
            yield f"links {address}, which has no such anchor"


if __name__ == "__main__":
    lines = problems(Path(sys.argv[1]).resolve())
    print("\n".join(lines) or sizes(Path(sys.argv[1])))
    sys.exit(bool(lines))
