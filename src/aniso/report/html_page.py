"""One HTML file that needs nothing else: no network, names as plain text, no script but aniso's own."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from aniso.errors import printable
from aniso.report.figures.canvas import HeatMapData
from aniso.report.page_module import desk_style, hash_source, module_source
from aniso.report.tables import Estimate, Table, shown

_PNG = b"\x89PNG"
MOST_BYTES = 2_000_000
"""Of a page. Figures that do not fit are links to their files instead."""
_BOOT = "\nenhanceReport(document);\n"

COLOURS = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #ffffff; --faint: #5f6670; --line: #d9dce1;
  --shade: #f4f5f7; --link: #0b5cad; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --paper: #16181c; --faint: #9aa2ad;
  --line: #353a42; --shade: #1f2228; --link: #7db7f0; } }
"""
STYLE = (
    COLOURS
    + """* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 1rem; }
h2 { font-size: 1.2rem; line-height: 1.3; margin: 2.5rem 0 .6rem; }
p { max-width: 44rem; margin: .5rem 0; }
nav ul { list-style: none; margin: 0; padding: 0; columns: 18rem; }
a { color: var(--link); text-decoration: none; }
a:hover { text-decoration: underline; }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: separate; border-spacing: 0; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--faint); padding-bottom: .4rem; }
th, td { padding: .3rem .75rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: baseline; overflow-wrap: normal; }
th { font-weight: 600; min-width: 4.5rem; }
thead th { border-bottom-width: 2px; vertical-align: bottom; }
tbody th { font-weight: 400; min-width: 9rem; }
td:not(.n) { min-width: 11rem; }
.scroll tr > th:first-child { position: sticky; left: 0; background: var(--paper); }
.matrix thead th, .matrix .n { min-width: 2.6rem; padding: .3rem .4rem; text-align: center; }
.matrix thead th:first-child { text-align: left; }
.matrix abbr { text-decoration: none; cursor: help; }
.matrix .zero { color: var(--faint); }
.n { text-align: right; white-space: nowrap; }
thead .n { white-space: normal; }
.notes { color: var(--faint); font-size: .85rem; padding-left: 1.1rem; margin: .4rem 0; max-width: 50rem; }
figure { margin: 1rem 0; }
img { display: block; max-width: 100%; height: auto; background: #fff; border-radius: 6px; }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: 1rem; }
.gallery figure { margin: 0; min-width: 0; }
.gallery img { width: 96px; }
.gallery blockquote { margin: 0; font-size: .85rem; }
figcaption { color: var(--faint); font-size: .85rem; line-height: 1.4; margin-top: .3rem; }
figcaption b { display: block; color: var(--ink); font-weight: 600; }
figcaption small { display: block; font-size: .75rem; margin-top: .15rem; }
pre { background: var(--shade); border-radius: 6px; padding: .75rem 1rem; overflow-x: auto; font-size: .85rem;
  overflow-wrap: normal; }
@media (max-width: 30rem) { th, td { padding: .3rem .45rem; } tbody th { min-width: 7rem; } }
"""
)
_SHADES = 8
STYLE += "".join(  # style attributes are forbidden by the page's own policy
    f".right{i} {{ background: rgba(0, 114, 178, {0.55 * i / _SHADES:.3f}); }}\n"
    f".wrong{i} {{ background: rgba(213, 94, 0, {0.55 * i / _SHADES:.3f}); }}\n"
    for i in range(1, _SHADES + 1)
)


@dataclass(frozen=True)
class GalleryItem:
    """A thumbnail as JPEG, or a text, and its caption: what it was taken for, what it is, and its name."""

    content: bytes | str
    title: str
    detail: str
    name: str

    @property
    def caption(self) -> str:
        return f"{self.title} ({self.detail}): {self.name}"


@dataclass(frozen=True)
class PageFigure:
    """A PNG or SVG image, its caption, and the file of the same image that lies beside the page."""

    image: bytes
    caption: str = ""
    file: str = ""
    """Empty if there is none; the image is then part of the page however large that becomes."""


@dataclass(frozen=True)
class Section:
    """A heading and, in this order, the paragraphs, table, figures, gallery and commands below it."""

    heading: str
    paragraphs: tuple[str, ...] = ()
    table: Table | None = None
    figures: tuple[PageFigure, ...] = ()
    commands: tuple[str, ...] = ()
    gallery: tuple[GalleryItem, ...] = ()
    is_matrix: bool = False
    """True if the table has a row and a column for every class, which are numbered and shaded."""
    experiment: str = ""
    """Sections of one experiment share their toggles."""
    methods: tuple[str, ...] = ()
    """Methods of the experiment that can be hidden; rows and columns of tables have their names."""
    method: str = ""
    """The method that the whole section is about."""
    by_seed: Mapping[int, Table] = field(default_factory=dict)
    """The table again for each seed alone; the page's toggles show one of them in its place."""
    map_data: HeatMapData | None = None
    """The numbers of the first figure, if that is a heat map."""


def page(title: str, sections: Sequence[Section], most_bytes: int = MOST_BYTES) -> str:
    """Return the whole page as text.

    Figures are part of it as long as it stays below ``most_bytes``: first those that stand below a table,
    then the others, in order. The remaining ones are links to their files.
    """
    shown = [[_link(section, figure) for figure in section.figures] for section in sections]
    note = (
        "{} of {} figures are files beside this page, which links to them: "
        f"with them it would be larger than {most_bytes / 1e6:g} MB."
    )
    left = most_bytes - len(_page(title, sections, shown, note).encode())
    places = [(n, i) for n, section in enumerate(sections) for i in range(len(section.figures))]
    linked = 0
    for n, i in sorted(places, key=lambda place: sections[place[0]].table is None):
        drawn = _figure(sections[n], sections[n].figures[i], i)
        cost = len(drawn.encode()) - len(shown[n][i].encode())
        if cost <= left or not sections[n].figures[i].file:
            shown[n][i], left = drawn, left - cost
        else:
            linked += 1
    return _page(title, sections, shown, note.format(linked, len(places)) if linked else "")


def _page(title: str, sections: Sequence[Section], figures: Sequence[Sequence[str]], note: str = "") -> str:
    style, script = STYLE + desk_style(), module_source() + _BOOT
    policy = (
        f"default-src 'none'; img-src data:; style-src {hash_source(style)}; script-src {hash_source(script)}"
    )
    numbered = enumerate(zip(sections, figures, strict=True))
    body = "\n".join(part for i, (section, shown) in numbered for part in _section(i, section, shown))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(title)}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{_text(title)}</h1>
{_contents(sections)}
{f"<p>{_text(note)}</p>" if note else ""}
{body}
</main>
<script type="module">{script}</script>
</body>
</html>
"""


def _text(text: str) -> str:
    """Escape untrusted text: control characters are spelt out, markup is escaped."""
    return html.escape(printable(text, len(text) * 10 + 1))


def _contents(sections: Sequence[Section]) -> str:
    if len(sections) < 3:
        return ""
    items = "".join(f'<li><a href="#s{i}">{_text(s.heading)}</a></li>' for i, s in enumerate(sections))
    return f"<nav><ul>{items}</ul></nav>"


def _section(number: int, section: Section, figures: Sequence[str]) -> Iterator[str]:
    yield f'<section id="s{number}"{_attributes(section)}>\n<h2>{_text(section.heading)}</h2>'
    yield from (f"<p>{_text(paragraph)}</p>" for paragraph in section.paragraphs)
    if section.table is not None:
        yield '<div data-seed="">'
        yield from _matrix(section.table) if section.is_matrix else _table(section.table, section.heading)
        yield "</div>"
    for seed, table in section.by_seed.items():
        yield f'<div data-seed="{seed}" hidden>'
        yield from _table(table, section.heading)
        yield "</div>"
    yield from figures
    if section.gallery:
        yield f'<div class="gallery">{"".join(map(_gallery_item, section.gallery))}</div>'
    if section.commands:
        lines = "\n".join(_text(command) for command in section.commands)
        yield f"<pre><code>{lines}</code></pre>"
    yield "</section>"


def _attributes(section: Section) -> str:
    """Return what toggles of methods and seeds need to know about a section."""
    words = {"experiment": section.experiment, "method": section.method}
    if section.methods:
        words["methods"] = json.dumps(section.methods)
    return "".join(f' data-{name}="{_text(value)}"' for name, value in words.items() if value)


def _map_json(data: HeatMapData) -> str:
    """Return the numbers of a heat map with four digits; no markup can end the element that holds them."""
    values = {
        name: [[None if x != x else float(f"{x:.4g}") for x in row] for row in rows]
        for name, rows in data.values.items()
    }
    columns = [{"label": label, "kind": b.kind, "depth": b.depth} for label, b in data.columns]
    content = {"rows": data.rows, "columns": columns, "values": values}
    text = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" data-map>{text}</script>'


def _figure(section: Section, figure: PageFigure, place: int) -> str:
    image = figure.image
    png = image.startswith(_PNG)
    kind, width = ("png", f' width="{_pixels(image) // 2}"') if png else ("svg+xml", "")
    encoded = base64.b64encode(_reduced(image) if png else image).decode()
    below = f"<figcaption>{_text(figure.caption)}</figcaption>" if figure.caption else ""
    source = f"data:image/{kind};base64,{encoded}"
    alternative = _text(figure.caption or section.heading)
    numbers = _map_json(section.map_data) if place == 0 and section.map_data is not None else ""
    return f'<figure><img alt="{alternative}"{width} src="{source}">{below}{numbers}</figure>'


def _link(section: Section, figure: PageFigure) -> str:
    caption = _text(figure.caption or section.heading)
    return f'<p><a href="{_text(quote(figure.file))}">{caption}</a> (figure in a file)</p>'


def _gallery_item(item: GalleryItem) -> str:
    words = f"<b>{_text(item.title)}</b>{_text(item.detail)}<small>{_text(item.name)}</small>"
    caption = f"<figcaption>{words}</figcaption>"
    if isinstance(item.content, str):
        return f"<figure><blockquote>{_text(item.content)}</blockquote>{caption}</figure>"
    data = base64.b64encode(item.content).decode()
    alternative = _text(item.caption)
    return f'<figure><img alt="{alternative}" src="data:image/jpeg;base64,{data}">{caption}</figure>'


def _reduced(png: bytes) -> bytes:
    """Return a PNG with a palette of 256 colours, a third of the bytes: a page holds many figures."""
    from PIL import Image

    out = io.BytesIO()
    with Image.open(io.BytesIO(png)) as image:
        plain = image.convert("RGB").quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        plain.save(out, "PNG", optimize=True)
    return min(out.getvalue(), png, key=len)


def _pixels(png: bytes) -> int:
    """Return the width in the file's header; at half of it, a figure's text is as large as the page's."""
    return int.from_bytes(png[16:20])


def _matrix(table: Table) -> Iterator[str]:
    """A table of counts, rows by columns of the same names: columns have the numbers of rows."""
    names = table.columns[1:]
    head = "".join(
        f'<th scope="col"><abbr title="{_text(name)}">{i}</abbr></th>' for i, name in enumerate(names, 1)
    )
    yield '<div class="scroll"><table class="matrix">'
    yield f"<thead><tr><th>{_text(table.columns[0])}</th>{head}</tr></thead><tbody>"
    for i, row in enumerate(table.rows, 1):
        counts = [cell.mean if isinstance(cell, Estimate) else 0.0 for cell in row[1:]]
        total = sum(counts) or 1.0
        cells = (_count(n, n / total, is_right=i == j) for j, n in enumerate(counts, 1))
        yield f'<tr><th scope="row">{i} {_text(shown(row[0]))}</th>{"".join(cells)}</tr>'
    yield "</tbody></table></div>"


def _count(count: float, share: float, *, is_right: bool) -> str:
    """A cell of a matrix, shaded by its share of the row."""
    if not count:
        return '<td class="n zero">·</td>'
    return (
        f'<td class="n {"right" if is_right else "wrong"}{max(1, round(_SHADES * share))}">{count:,.0f}</td>'
    )


def _table(table: Table, heading: str) -> Iterator[str]:
    classes = [' class="n"' if number else "" for number in table.numeric]
    head = "".join(
        f'<th scope="col"{c}>{_text(name)}</th>' for name, c in zip(table.columns, classes, strict=True)
    )
    caption = "" if table.title == heading else f"<caption>{_text(table.title)}</caption>"
    yield f'<div class="scroll"><table>{caption}'
    yield f"<thead><tr>{head}</tr></thead><tbody>"
    for row in table.rows:
        first = f'<th scope="row">{_text(shown(row[0]))}</th>'
        rest = (f"<td{c}>{_text(shown(v))}</td>" for v, c in zip(row[1:], classes[1:], strict=True))
        yield f"<tr>{first}{''.join(rest)}</tr>"
    yield "</tbody></table></div>"
    if table.notes:
        yield '<ul class="notes">' + "".join(f"<li>{_text(note)}</li>" for note in table.notes) + "</ul>"
