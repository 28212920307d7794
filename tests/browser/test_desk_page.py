"""The desk in a browser: by mouse and keyboard, in two tabs, with large maps, and when the server dies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import desks
import pictures
import pytest
import runs

from aniso.explore import Desk, DeskServer

Page = Any
DIFFERENCE = "A \N{MINUS SIGN} B"
SLOW = 20_000  # milliseconds that anything may take on a busy machine


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    shelf = runs.shelf(tmp_path_factory.mktemp("shelf"))
    out = tmp_path_factory.mktemp("out") / "models"
    return desks.photo_desk(shelf, task=str(shelf.data / "cars"), out=out)


@pytest.fixture(scope="module")
def server(desk: Desk) -> Iterator[DeskServer]:
    with DeskServer(desk).running() as running:
        yield running


@contextmanager
def opened(browser: Any, server: DeskServer, **options: Any) -> Iterator[Page]:
    """A page whose console must stay silent, and which must ask nobody but its server."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    context.set_default_timeout(SLOW)
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(server.url)
    page.get_by_role("heading", level=1).wait_for()
    page.locator(".slider").first.wait_for()
    yield page
    own = f"http://127.0.0.1:{server.port}/"
    assert [url for url in asked if not url.startswith((own, "data:", f"blob:{own[:-1]}"))] == []
    expected = getattr(page, "expected_messages", [])
    assert expected is None or said == expected
    context.close()


@pytest.fixture
def page(browser: Any, server: DeskServer) -> Iterator[Page]:
    with opened(browser, server) as found:
        yield found


def eventually(page: Page, condition: Callable[[], bool]) -> None:
    for _ in range(SLOW // 50):
        if condition():
            return
        page.wait_for_timeout(50)
    raise AssertionError("it never happened")


def command(page: Page) -> str:
    return page.get_by_label("Command", exact=True).inner_text()


def measured(page: Page) -> str:
    """The score of A once the whole sample is measured."""
    score = page.locator('.score[data-slot="A"]')
    eventually(page, lambda: re.search(r"of \d+$", score.inner_text()) is not None)
    return score.inner_text()


def test_a_slider_by_its_label_changes_numbers_map_and_command(page):
    measured(page)
    before = page.locator(".items").inner_text()
    picture = page.locator(".field canvas").first.screenshot()
    page.get_by_label("cars", exact=True).fill("1.2")
    assert page.get_by_label("cars, number").input_value() == "1.2"
    eventually(page, lambda: "cars=1.2" in command(page))
    eventually(page, lambda: page.locator(".items").inner_text() != before)
    assert page.locator(".field canvas").first.screenshot() != picture


def test_arrow_keys_move_a_slider_and_undo_and_redo_take_it_back(page):
    slider = page.get_by_label("dtd", exact=True)
    number = page.get_by_label("dtd, number")
    slider.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert number.input_value() == "0.03"
    page.keyboard.press("Control+z")  # steps in quick succession are one
    assert number.input_value() == "0"
    assert page.get_by_role("button", name="Undo").is_disabled()
    page.keyboard.press("Control+Shift+z")
    assert number.input_value() == "0.03"
    page.get_by_role("button", name="Undo").click()
    page.get_by_label("cars, number").fill("0.7")
    page.keyboard.press("Tab")
    assert page.get_by_label("cars", exact=True).input_value() == "0.7"
    page.get_by_role("button", name="Reset").click()
    assert page.get_by_label("cars, number").input_value() == "0"
    page.get_by_role("button", name="Undo").click()
    assert page.get_by_label("cars, number").input_value() == "0.7"


def test_history_and_moves_of_the_module(page, server):
    """The module's own functions, on small tables."""
    found = page.evaluate(
        """async () => {
        const module = await import('data:text/javascript,export default 1').catch(() => null);
        return module === null;
    }"""
    )
    assert found  # the page's policy lets no other script in
    page.expected_messages = None
    script = Path(__file__).parents[2] / "src/aniso/report/desk.js"
    other = page.context.new_page()  # a page of our own, without that policy
    other.set_content(
        f'<script type="module">{script.read_text()}\nwindow.m = {{History, moved, mean}};</script>'
    )
    other.wait_for_function("window.m")
    steps = other.evaluate(
        """() => {
        const h = new m.History(0), seen = [];
        for (const x of [1, 2, 3]) h.push(x);
        h.push(4, 'slider', 1000); h.push(5, 'slider', 1100); h.push(6, 'slider', 9000);
        while (h.undo()) seen.push(h.values);
        while (h.redo()) seen.push(h.values);
        h.undo(); h.push(9); seen.push(h.redo(), h.values);
        return seen;
    }"""
    )
    assert steps == [5, 3, 2, 1, 0, 1, 2, 3, 5, 6, False, 9]
    table = [[0.2, 0.4, None], [1.0, 1.0, 1.0]]
    moved = other.evaluate(
        """(t) => ['shift', 'scale', 'set'].map((mode) => m.moved(t, [[0, 0], [0, 1]], 0.6, mode))""", table
    )
    assert moved[0] == [[0.5, 0.7, None], [1, 1, 1]]
    assert moved[1] == [[0.4, 0.8, None], [1, 1, 1]]
    assert moved[2] == [[0.6, 0.6, None], [1, 1, 1]]
    assert table[0][0] == 0.2
    other.close()


def test_layers_and_kinds_have_sliders(page):
    page.get_by_role("tab", name="Layers").click()
    page.get_by_label("layer 0", exact=True).fill("0.5")
    eventually(page, lambda: ".0.*=0.5" in command(page))
    page.get_by_role("tab", name="Layers").focus()
    page.keyboard.press("ArrowRight")
    assert page.get_by_role("tab", name="Kinds of block").get_attribute("aria-selected") == "true"
    page.get_by_label("of", exact=True).select_option("dtd")
    page.get_by_label("A slider moves the mean").select_option("set: make equal")
    page.get_by_label("norm", exact=True).fill("0.25")
    eventually(page, lambda: "=0.25" in command(page) and not re.search(r"cars\S*=0.25", command(page)))


def test_cells_are_selected_with_the_brush_and_the_keyboard(page):
    canvas = page.locator(".field canvas").first
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 4, box["y"] + 26)
    page.mouse.down()
    page.mouse.move(box["x"] + 60, box["y"] + 50, steps=3)
    page.mouse.up()
    label = page.locator(".selected label")
    assert "selected cells" in label.inner_text()
    page.locator(".selected input[type=number]").fill("0.4")
    page.keyboard.press("Tab")
    eventually(page, lambda: "=0.4" in command(page))
    field = page.locator(".field").first
    field.focus()
    page.keyboard.press("Escape")
    assert page.locator(".selected").is_hidden()
    page.keyboard.press("Home")
    page.keyboard.press("PageDown")
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Shift+ArrowRight")
    assert "3 selected cells (1 \N{MULTIPLICATION SIGN} 3)" in label.inner_text()
    page.keyboard.press("+")
    eventually(page, lambda: command(page).count("=0.05") >= 1)
    assert "photos" in page.locator(".reading").first.inner_text()


def test_a_and_b_are_compared(page):
    measured(page)
    page.get_by_label("cars", exact=True).fill("1.1")
    page.get_by_role("button", name="B: Show B").click()
    assert page.get_by_label("cars, number").input_value() == "0"
    eventually(page, lambda: DIFFERENCE in page.locator(".accuracy p").first.inner_text())
    page.locator("h1").click()
    page.keyboard.press("x")
    assert page.get_by_label("cars, number").input_value() == "1.1"
    page.get_by_role("button", name="Copy to other").click()
    page.keyboard.press("x")
    assert page.get_by_label("cars, number").input_value() == "1.1"
    page.get_by_role("button", name=DIFFERENCE).click()
    page.locator(".field").first.focus()
    page.keyboard.press("Home")
    assert page.locator(".reading").first.inner_text().endswith(": 0")


def test_a_preset_is_applied(page):
    page.get_by_label("Preset").select_option("mean")
    eventually(page, lambda: page.get_by_label("cars, number").input_value() == "0.25")
    page.get_by_role("button", name="Undo").click()
    assert page.get_by_label("cars, number").input_value() == "0"


def test_saved_coefficients_equal_those_of_the_command_line(page, desk, tmp_path):
    page.get_by_label("signs", exact=True).fill("0.3")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save coefficients").click()
    assert download.value.suggested_filename == "coefficients.safetensors"
    download.value.save_as(tmp_path / "saved")
    eventually(page, lambda: "signs=0.3" in command(page))
    line = command(page).splitlines()[0].split()
    from aniso.cli import main

    assert main([*line[1:-1], str(tmp_path / "made.safetensors")]) == 0
    assert (tmp_path / "saved").read_bytes() == (tmp_path / "made.safetensors").read_bytes()


def test_a_model_is_baked(page, desk):
    page.get_by_label("cars", exact=True).fill("0.2")
    page.get_by_role("button", name="Bake").click()
    eventually(
        page, lambda: "wrote" in page.locator(".card").last.inner_text() or "wrote" in page.inner_text("body")
    )
    assert (desk.files.out / "model-1.safetensors").is_file()


def test_own_images_are_predicted_and_broken_ones_named(page):
    before = page.locator(".item").count()
    mine = {"name": "mine.png", "mimeType": "image/png", "buffer": pictures.encoded(1)}
    page.locator("#new-image").set_input_files([mine])
    eventually(page, lambda: page.locator(".item").count() == before + 1)
    eventually(page, lambda: page.locator(".item").last.locator(".rank").count() == 2)
    page.get_by_role("button", name="Remove mine.png").click()
    eventually(page, lambda: page.locator(".item").count() == before)
    page.expected_messages = [
        "Failed to load resource: the server responded with a status of 422 (Unprocessable Entity)"
    ]
    page.locator("#new-image").set_input_files([{**mine, "name": "broken.png", "buffer": b"no image"}])
    eventually(page, lambda: "broken.png" in page.locator(".problem").inner_text())


def test_a_wrong_token_opens_nothing(browser, server):
    page = browser.new_page()
    answer = page.goto(f"http://127.0.0.1:{server.port}/?token=wrong")
    assert answer.status == 403 and page.locator(".slider").count() == 0
    page.close()


def test_two_tabs_keep_their_own_state(browser, server):
    with opened(browser, server) as one, opened(browser, server) as two:
        one.get_by_label("cars", exact=True).fill("0.9")
        two.get_by_label("dtd", exact=True).fill("-0.5")
        eventually(one, lambda: "cars=0.9" in command(one) and "dtd" not in command(one))
        eventually(two, lambda: "dtd=-0.5" in command(two) and "cars" not in command(two))
        assert measured(one) and measured(two)


def test_a_server_that_stops_while_a_slider_is_dragged_is_reported(browser, desk):
    with DeskServer(desk).running() as server, opened(browser, server) as page:
        page.expected_messages = None
        measured(page)
        server._http.shutdown()
        server.release()
        for value in ("0.1", "0.2", "0.3"):
            page.get_by_label("cars", exact=True).fill(value)
        eventually(page, lambda: "does not answer" in page.locator(".problem").inner_text())
        assert page.get_by_label("cars, number").input_value() == "0.3"  # nothing is lost
        page.get_by_role("button", name="Undo").click()
        assert page.get_by_label("cars, number").input_value() != "0.3"


@pytest.mark.parametrize(("vectors", "layers", "each", "more"), [(21, 12, 12, 8), (24, 6, 16, 7)])
def test_large_maps_fit_a_desk_and_a_telephone(browser, vectors, layers, each, more):
    blocks = layers * each + more
    assert (vectors, blocks) in ((21, 152), (24, 103))
    desk = desks.bank_desk(desks.layered_bank(vectors, layers, each, more))
    with DeskServer(desk).running() as server:
        for width in (1280, 390):
            with opened(browser, server, viewport={"width": width, "height": 800}) as page:
                label = page.locator(".field").first.get_attribute("aria-label")
                assert label.startswith(f"Coefficients: {vectors} rows by {blocks} columns")
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                page.get_by_label("task3", exact=True).fill("0.5")
                page.locator(".field").first.focus()
                page.keyboard.press("End")
                page.keyboard.press("PageDown")
                assert page.locator(".reading").first.inner_text().startswith(f"task{vectors - 1} ")
                eventually(
                    page, lambda: page.evaluate("document.querySelectorAll('.names .strip').length") >= 3
                )
                page.locator("summary").click()
                eventually(page, lambda: page.locator("details canvas").count() >= 1)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_light_and_dark(browser, server, scheme):
    with opened(browser, server, color_scheme=scheme) as page:
        found = page.evaluate(
            """() => ['h1', '.slider label', '.faint', '.names div', 'button'].map((s) => {
            const e = document.querySelector(s);
            let at = e, ground = 'rgba(0, 0, 0, 0)';
            while (at && ground === 'rgba(0, 0, 0, 0)') {
                ground = getComputedStyle(at).backgroundColor;
                at = at.parentElement;
            }
            return [getComputedStyle(e).color, ground];
        })"""
        )
        for ink, ground in found:
            assert contrast(ink, ground) >= 4.5, (ink, ground)


def contrast(one: str, two: str) -> float:
    lights = sorted(_light(c) for c in (one, two))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def _light(colour: str) -> float:
    parts = [int(x) / 255 for x in re.findall(r"\d+", colour)[:3]]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
