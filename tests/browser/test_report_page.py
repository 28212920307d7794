"""The report in a browser: sorted tables, values on heat maps, toggles; complete without JavaScript."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pictures
import pytest

from aniso.coefficient_matrix import BlockLabel
from aniso.report import Estimate, PageFigure, Section, Table, page
from aniso.report.figures.canvas import HeatMapData

Page = Any
PNG = pictures.encoded(1, side=80)
NAMES = ("search", "learned</script><b>", "fine-tuned")


def table(*numbers: float) -> Table:
    rows = tuple((name, Estimate(x, 0.1)) for name, x in zip(NAMES, numbers, strict=True))
    return Table("accuracy", ("method", "mean"), (*rows, ("missing", None)))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    blocks = tuple((f"{i} mlp", BlockLabel(f"b.{i}", "mlp weight", i)) for i in range(3))
    values = {"": [[0.5, -0.25, float("nan")]], "0": [[0.75, -0.25, float("nan")]]}
    columns = Table("by task", ("task", *NAMES), (("a", *(Estimate(x) for x in (1.0, 2.0, 3.0))),))
    named = {"experiment": "addition", "methods": NAMES}
    sections = [
        Section("addition", table=table(9.5, 10.5, -3.0), by_seed={0: table(1.0, 2.0, 3.0)}, **named),
        Section("by task", table=columns, **named),
        Section(
            "coefficients",
            figures=(PageFigure(PNG, "a map"),),
            method="search",
            map_data=HeatMapData(("cars<i>",), blocks, values),
            **named,
        ),
    ]
    path = tmp_path_factory.mktemp("report") / "index.html"
    path.write_text(page("Report", sections))
    return path


@pytest.fixture
def shown(browser: Any, written: Path) -> Iterator[Page]:
    opened = browser.new_page()
    said: list[str] = []
    asked: list[str] = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(written.as_uri())
    yield opened
    assert said == []
    assert [url for url in asked if not url.startswith(("data:", written.as_uri()))] == []
    opened.close()


def column(page: Page, selector: str = "#s0 [data-seed='']") -> list[str]:
    return page.locator(f"{selector} tbody tr:visible th").all_inner_texts()


def test_tables_are_sorted_by_their_numbers(shown):
    head = shown.locator("#s0 [data-seed=''] thead").get_by_role("button", name="mean")
    head.click()
    assert column(shown) == [NAMES[1], NAMES[0], NAMES[2], "missing"]
    assert shown.locator("#s0 [data-seed=''] th[aria-sort]").get_attribute("aria-sort") == "descending"
    head.focus()
    shown.keyboard.press("Enter")
    assert column(shown) == [NAMES[2], NAMES[0], NAMES[1], "missing"]
    head.click()
    assert column(shown) == [*NAMES, "missing"]


def test_methods_are_hidden_in_rows_columns_and_sections(shown):
    methods = shown.get_by_role("group", name="Methods")
    methods.get_by_role("button", name="search").click()
    assert column(shown) == [NAMES[1], NAMES[2], "missing"]
    assert shown.locator("#s1 thead th:visible").all_inner_texts() == ["task", NAMES[1], NAMES[2]]
    assert shown.locator("#s1 tbody td:visible").all_inner_texts() == ["2.0", "3.0"]
    assert shown.locator("#s2").is_hidden()
    methods.get_by_role("button", name="search").click()
    assert column(shown) == [*NAMES, "missing"] and shown.locator("#s2").is_visible()


def test_one_seed_is_shown_alone_in_tables_and_maps(shown):
    assert shown.locator("#s2 img").is_hidden()
    field = shown.locator("#s2 .field")
    field.focus()
    shown.keyboard.press("Home")
    reading = shown.locator("#s2 .reading")
    assert reading.inner_text() == "cars<i> \N{MIDDLE DOT} 0 mlp (mlp weight): 0.5"
    shown.get_by_role("group", name="Seeds").get_by_role("button", name="0").click()
    assert reading.inner_text().endswith(": 0.75")
    assert shown.locator("#s0 [data-seed='0'] td").first.is_visible()
    assert shown.locator("#s0 [data-seed=''] td").first.is_hidden()
    shown.keyboard.press("Tab")
    field.focus()
    shown.keyboard.press("End")
    assert reading.inner_text().endswith(": none")
    box = shown.locator("#s2 canvas").first.bounding_box()
    shown.mouse.move(box["x"] + box["width"] / 2, box["y"] + 30)
    assert reading.inner_text().endswith("1 mlp (mlp weight): \N{MINUS SIGN}0.25")


def test_the_page_is_complete_without_javascript(browser, written):
    context = browser.new_context(java_script_enabled=False)
    opened = context.new_page()
    opened.goto(written.as_uri())
    assert opened.locator("#s2 img").is_visible()
    assert column(opened) == [*NAMES, "missing"]
    assert opened.locator("#s0 [data-seed='0']").is_hidden()
    assert "10.5 ± 0.1" in opened.inner_text("body")
    context.close()


def test_the_page_needs_nothing_else_and_its_script_is_small(written):
    text = written.read_text()
    assert not re.search(r"(src|href)=\"(?!#|data:)", text)
    assert len(text) < 120_000  # style and module; two megabytes are left for figures
    assert "unsafe" not in text.split("</head>")[0]
    assert "</script><b>" not in text
