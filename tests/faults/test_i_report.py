"""Tables I2 and I4: records from strangers, hostile names, and reports too large, too small or with holes."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import re
import time
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from aniso.report import (
    PageFigure,
    Record,
    Section,
    Table,
    bars,
    boxes,
    build,
    heat_map,
    page,
    read_records,
    table,
)
from aniso.report.page_module import module_source

DASH = "\N{EN DASH}"
HOSTILE = [
    "</script><img src=x onerror=alert(1)>",
    '"><svg/onload=alert(1)>',
    "</style></title><base href=//evil>",
    "=cmd|' /C calc'!A0",
    "a|b\n## not a heading `code` [link](javascript:x) <b>",
    "$\\frac{1}{0}$ $x^$",
    "_underscore",
    "../../etc/passwd",
    "\x1b[31m red \x00 \u202e reversed",
    "名前 🎉",
    "x" * 5000,
    "",
]


def raw(**changes):
    parts = {
        "schema": 1,
        "id": "1",
        "experiment": "few-shot",
        "label": "learned",
        "spec": {"setting": "few-shot", "model": "mini", "method": "coefficients", "task": "a", "shots": 4},
        "metrics": {"accuracy": {"a": {"correct": 1, "total": 2, "accuracy": 0.5}}, "zero_shot": {"a": 0.2}},
        "inputs": {"model": "m", "data": {"a": "d"}},
        "status": "ok",
    }
    return parts | changes


def spec(**changes):
    return raw()["spec"] | changes


def metrics(**changes):
    return {"accuracy": {"a": raw()["metrics"]["accuracy"]["a"] | changes}}


def record(**changes):
    return Record.model_validate_json(json.dumps(raw(**changes)))


class Page(HTMLParser):
    """Every tag and attribute of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.links, self.scripts = set(), set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)


OURS = {
    *("html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "p", "nav", "ul", "li", "a"),
    *(
        "section",
        "div",
        "table",
        "caption",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "figure",
        "img",
        "figcaption",
    ),
    *("pre", "code", "script"),
}


def require_harmless(text):
    seen = Page(text)
    assert seen.tags <= OURS
    assert seen.attributes <= {
        *(
            "lang",
            "charset",
            "http-equiv",
            "content",
            "name",
            "id",
            "class",
            "scope",
            "href",
            "alt",
            "src",
            "width",
        ),
        *("type", "hidden", "data-experiment", "data-methods", "data-method", "data-seed", "data-map"),
    }
    module = [content for attributes, content in seen.scripts if attributes["type"] == "module"]
    assert module == [module_source() + "\nenhanceReport(document);\n"]
    for attributes, content in seen.scripts[:-1]:
        assert attributes["type"] == "application/json" and json.loads(content)
    assert all(re.fullmatch(r"#s\d+|data:image/(png|svg\+xml);base64,[\w+/=]+", link) for link in seen.links)
    assert "\x1b" not in text and "\x00" not in text and "\u202e" not in text


# I2: what is read


@pytest.mark.parametrize(
    ("content", "mention"),
    [
        (b"", "EOF"),
        (b"{", "EOF"),
        (b"[1]", "object"),
        (b"\xff\xfe\x00", "JSON"),
        (b'{"a":' * 20000, "recursion"),
        (json.dumps(raw(schema=2)).encode(), "schema"),
        (json.dumps({k: v for k, v in raw().items() if k != "schema"}).encode(), "schema"),
        (json.dumps(raw(id=5)).encode(), "id"),
        (json.dumps(raw(spec=spec(setting=""))).encode(), "setting"),
        (json.dumps(raw(spec=spec(method=""))).encode(), "method"),
        (json.dumps(raw(spec=spec(task=None))).encode(), "task"),
        (json.dumps(raw(spec=spec(shots=None))).encode(), "shots"),
        (json.dumps(raw(spec=spec(shots="4"))).encode(), "shots"),
        (json.dumps(raw(spec=spec(task="b"))).encode(), "no accuracy of b"),
        (json.dumps(raw(metrics=metrics(accuracy=float("nan")))).encode(), "accuracy"),
        (json.dumps(raw(metrics=metrics(accuracy=1.5))).encode(), "accuracy"),
        (json.dumps(raw(metrics=metrics(accuracy=0.9))).encode(), "1 of 2 is not 0.9"),
        (json.dumps(raw(metrics=metrics(total=0))).encode(), "total"),
        (json.dumps(raw(metrics=metrics(right="xyz"))).encode(), "right"),
        (json.dumps(raw(metrics=metrics(right="3"))).encode(), "right"),
        (json.dumps(raw(metrics=metrics(right="4"))).encode(), "right"),
        (json.dumps(raw(coefficients={"kind": {"x": [1, 2, 3]}})).encode(), "kind"),
        (json.dumps(raw(coefficients={"kind": {"x": [5, 4, 3, 2, 1]}})).encode(), "order"),
    ],
)
def test_what_is_no_record_is_refused_by_name(tmp_path, refused, content, mention):
    (tmp_path / "odd.json").write_bytes(content)
    with refused("RECORD", 3, "odd.json", mention):
        read_records([tmp_path])


def test_missing_and_special_files_are_refused(tmp_path, refused):
    with refused("RECORD", 3, "gone.json", "no such file"):
        read_records([tmp_path / "gone.json"])
    os.mkfifo(tmp_path / "pipe.json")
    with refused("RECORD", 3, "pipe.json"):
        read_records([tmp_path / "pipe.json"])
    assert read_records([tmp_path]) == []


# I4: what is written


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_name_stays_a_name_everywhere(name):
    accuracy = {name: {"correct": 1, "total": 2, "accuracy": 0.5}}
    odd = record(
        experiment=name,
        label=name,
        spec=spec(task=name, model=name),
        metrics={"accuracy": accuracy, "zero_shot": {name: 0.2}},
        coefficients={"kind": {name: [0, 0, 0, 0, 1]}, "depth": {}},
        inputs={"model": name, "bank": name, "data": {name: name}},
        versions={name: name},
        notes=[name],
    )
    failed = record(experiment=name, label=name, status=name or "?", spec=spec(seed=1), id="2")
    files = build([odd, failed], name)
    require_harmless(files["index.html"].decode())
    for file, content in files.items():
        assert re.fullmatch(r"[a-z0-9-]+\.(md|csv|html|png|svg)", file) and len(file) < 200
        if file.endswith(".svg"):
            tags = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(content).iter()}
            assert not tags & {"script", "image", "a", "foreignObject"}
        if file.endswith(".md"):
            require_plain(content.decode())


def require_plain(text):
    """Tables keep their width, and no markup of the names is left."""
    for line in text.splitlines():
        assert line.isprintable()
    bare = re.sub(r"\\.", "", re.sub(r"!\[.*?[^\\]\]\([a-z0-9-]+\.png\)", "", text))
    assert not re.search(r"[`<\[$]", bare)
    widths = [re.sub(r"\\.", "", line).count("|") for line in text.splitlines() if line.startswith("|")]
    assert set(widths) <= {3, 4, 5} and not re.search(r"^## not", text, re.M)


@pytest.mark.parametrize("name", ["=1+1", "+1", "-x", "@x", "\tx", " =1", "-1.5e3"])
def test_csv_cells_are_never_formulas(name):
    made = Table("t", ("m", "x"), ((name, "1"),)).csv()
    cell = list(csv.reader(io.StringIO(made)))[1][0]
    number = name in ("+1", "-1.5e3")
    assert cell == (name if number else f"'{name}".replace("\t", "\\t"))


@pytest.mark.parametrize("name", HOSTILE)
def test_csv_cells_hold_no_control_characters(name):
    made = Table("t", ("m", name), ((name, "1"), ("a\x1b]0;title\x07\x9bb", "2"))).csv()
    assert all(line.isprintable() for line in made.splitlines()) and len(made.splitlines()) == 3
    assert "a\\x1b]0;title\\x07\\x9bb" in made


def test_the_page_allows_its_own_style_and_module_and_nothing_else():
    text = page("t", [Section("s", ("p",))])
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.S)
    (script,) = re.findall(r'<script type="module">(.*?)</script>', text, re.S)
    hashes = [base64.b64encode(hashlib.sha256(own.encode()).digest()).decode() for own in (style, script)]
    policy = "default-src 'none'; img-src data:; style-src 'sha256-{}'; script-src 'sha256-{}'"
    assert f'<meta http-equiv="Content-Security-Policy" content="{policy.format(*hashes)}">' in text
    assert text.count("<script") == 1 and "eval(" not in script and "innerHTML" not in script
    assert "http:" not in text and "https:" not in text and "url(" not in text


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_figures_with_hostile_names(kind):
    assert bars({name: dict.fromkeys(HOSTILE, 0.5) for name in HOSTILE}, HOSTILE[5], kind=kind)
    assert boxes({name: [0, 0, 0, 0, 0] for name in HOSTILE}, HOSTILE[8], kind=kind)
    rows = [[0.0] * len(HOSTILE)] * len(HOSTILE)
    drawn = heat_map(rows, HOSTILE, HOSTILE, kind=kind)
    if kind == "svg":
        ElementTree.fromstring(drawn)


def test_a_thousand_vectors_and_blocks_fit_on_a_page():
    values = [[((i * 7919 + j * 104729) % 1000) / 500 - 1 for j in range(1000)] for i in range(1000)]
    names = [f"a rather long name of block {i}" for i in range(1000)]
    begun = time.monotonic()
    drawn = heat_map(values, names, names)
    text = page("large", [Section("heat map", figures=(PageFigure(drawn),))])
    assert len(text) < 10 << 20
    assert time.monotonic() - begun < 120  # minutes would mean a label for every cell


def test_many_boxes_and_bars_are_still_drawn():
    assert boxes({str(i): [0, 1, 2, 3, 4] for i in range(300)})
    assert boxes({f"kind {i}": [0, 1, 2, 3, 4] for i in range(300)})
    assert bars({f"task {i}": {f"method {j}": 0.5 for j in range(9)} for i in range(40)})


def test_no_records_are_no_report(refused):
    with refused("RECORD", 2, "there is nothing to report"):
        build([], "t")
    with refused("RECORD", 2, "there is nothing to report"):
        table([])


def test_a_single_run_is_a_report():
    files = build([record()], "t")
    assert (
        b"1 seed, no interval" in files["table-few-shot.md"] and b"\xc2\xb1" not in files["table-few-shot.md"]
    )


def test_only_failed_runs_are_a_report_of_failures():
    files = build([record(status="out of memory", metrics={})], "t")
    assert b"ended as 'out of memory'" in files["table-few-shot.md"]


def test_holes_are_dashes_on_every_page():
    files = build([record(), record(id="2", label="other", spec=spec(shots=8))], "t")
    text = files["table-few-shot.md"].decode()
    assert f"| 50.0 | {DASH} |" in text and f"| {DASH} | 50.0 |" in text
    assert "learned (8 shots): no run" in text and "other (4 shots): no run" in text
    assert f'<td class="n">{DASH}</td>' in files["index.html"].decode()


def test_experiments_that_differ_only_in_odd_characters_get_files_of_their_own():
    files = build(
        [record(experiment="a/b"), record(id="2", experiment="a b"), record(id="3", experiment="?")]
    )
    assert {"table-a-b.md", "table-a-b-2.md", "table-experiment.md"} <= files.keys()
