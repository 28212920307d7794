"""The desk as a widget of a notebook: in a shadow root, beside cells that hear keys, by messages."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import desks
import pytest
import runs

from aniso.explore import Desk
from aniso.explore.widget import reply, widget_style
from aniso.report.page_module import module_source

Page = Any

_SHOW = """async ([source, style, isShadow]) => {
  const module = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
  const host = document.getElementById("output");
  const place = isShadow ? host.attachShadow({ mode: "open" }) : document.head;
  const sheet = document.createElement("style");
  sheet.textContent = style;
  place.append(sheet);
  const el = document.createElement("div");
  (isShadow ? place : host).append(el);
  let listener;
  const model = {
    on: (_, heard) => { listener = heard; },
    send: async (message) => {
      const [answer, file] = await window.ask(message);
      const bytes = file === null ? null : Uint8Array.from(atob(file), (c) => c.charCodeAt(0));
      const whole = new Uint8Array([1, 2, 3, ...(bytes || []), 4]); // a buffer is a part of a larger message
      listener(answer, bytes ? [new DataView(whole.buffer, 3, bytes.length)] : []);
    },
  };
  window.heard = [];
  document.addEventListener("keydown", (event) => window.heard.push(event.key));
  module.default.render({ model, el });
}"""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    shelf = runs.shelf(tmp_path_factory.mktemp("shelf"))
    return desks.photo_desk(shelf, task=str(shelf.data / "cars"))


@pytest.fixture(params=["shadow root", "page"])
def notebook(request: pytest.FixtureRequest, browser: Any, desk: Desk) -> Iterator[Page]:
    """A page with a cell and the widget below it; its own colours and sizes are not the desk's."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(20_000)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)

    def ask(message: object) -> list[object]:
        answer, files = reply(desk, message)
        return [answer, base64.b64encode(files[0]).decode() if files else None]

    page.expose_function("ask", ask)
    page.goto("about:blank")
    page.set_content(
        "<style>:root { --ink: red; }</style><h1>Notebook</h1><textarea id='cell'></textarea>"
        "<div id='output' style='width: 700px'></div>"
    )
    page.evaluate(_SHOW, [module_source(), widget_style(), request.param == "shadow root"])
    page.get_by_label("cars", exact=True).wait_for()
    yield page
    assert problems == []
    context.close()


def _colours(page: Page) -> set[tuple[int, ...]]:
    """The colours of the first row of the map."""
    pixels = page.locator(".field canvas").first.evaluate(
        "c => Array.from(c.getContext('2d').getImageData(0, 25, c.width, 1).data)"
    )
    return {tuple(pixels[i : i + 3]) for i in range(0, len(pixels), 4)}


def test_the_widget_has_its_own_colours_and_leaves_those_of_the_page_alone(notebook):
    assert (239, 241, 244) in _colours(notebook)  # a coefficient of zero, as on the desk's own page
    notebook.get_by_label("cars", exact=True).fill("1")
    assert len(_colours(notebook)) > 1
    assert notebook.get_by_label("cars", exact=True).bounding_box()["width"] > 40
    ink = "getComputedStyle(document.documentElement).getPropertyValue('--ink').trim()"
    assert notebook.evaluate(ink) == "red"
    assert notebook.evaluate("getComputedStyle(document.documentElement).colorScheme") == "normal"


def test_the_widget_is_as_wide_as_its_cell_and_stacks_its_columns_there(notebook):
    scores, sliders = (notebook.locator(name).first.bounding_box() for name in (".accuracy", ".sliders"))
    assert scores["y"] < sliders["y"] and scores["width"] > 600  # one column, scores first


def test_keys_in_cells_do_not_move_the_desk_and_keys_of_the_desk_stay_there(notebook):
    number = notebook.get_by_label("cars, number")
    number.fill("0.5")
    notebook.keyboard.press("Tab")
    notebook.locator("#cell").focus()
    notebook.keyboard.press("x")
    notebook.keyboard.press("Control+z")
    assert number.input_value() == "0.5"
    assert notebook.get_by_role("button", name="Undo").is_enabled()
    heard = notebook.evaluate("window.heard.length")
    notebook.get_by_label("dtd", exact=True).focus()
    notebook.keyboard.press("ArrowRight")
    notebook.keyboard.press("Control+z")
    notebook.keyboard.press("Control+z")
    assert number.input_value() == "0"
    assert notebook.evaluate("window.heard.length") == heard


def test_saved_coefficients_are_the_bytes_of_the_message(notebook, desk):
    with notebook.expect_download() as download:
        notebook.get_by_role("button", name="Save coefficients").click()
    saved = Path(download.value.path()).read_bytes()
    base = reply(desk, {"id": 1, "path": "/preset", "body": {"name": "base"}})[0]["answer"]["values"]
    assert saved == desk.coefficients(base).to_bytes()
