"""The desk without a browser: tables, recipes, presets, geometry, predictions."""

from __future__ import annotations

import base64
import io
import shlex
import sys
from pathlib import Path

import desks
import pictures
import pytest
import runs
import torch
from PIL import Image

from aniso.assignment_text import Assignment, parse_assignment, short_number
from aniso.cli import main
from aniso.compose import Coefficients, Composition, Partition
from aniso.experiments.assignments import assigned_coefficients
from aniso.explore import Desk, DeskOptions, open_desk
from aniso.explore.geometry import Geometry
from aniso.explore.items import MOST
from aniso.explore.table import CoefficientTable
from aniso.explore.widget import desk_widget, reply
from aniso.learn import evaluate
from aniso.learn.analysis import cosine_similarity
from aniso.learn.starts import least_squares
from aniso.vectors import Bank


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> runs.Shelf:
    return runs.shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture(scope="module")
def desk(shelf: runs.Shelf) -> Desk:
    return desks.photo_desk(shelf)


@pytest.fixture(scope="module")
def learned(shelf: runs.Shelf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("learned") / "run"
    assert main([*shelf.few_shot("-o", str(out))]) == 0
    return out


def changed(desk: Desk, cells: dict[tuple[str, int], float], **vectors: float) -> desks.Table:
    table = desks.constant(desk, **vectors)
    for (vector, column), value in cells.items():
        table[desk.table.vectors.index(vector)][column] = value
    return table


# text


@pytest.mark.parametrize("value", [0.0, 1.0, -0.35, 0.1, 1e-8, 3.4e38, 1 / 3, 0.30000001192092896])
def test_a_short_number_is_read_back_as_the_same_float32(value):
    assert torch.tensor(float(short_number(value))) == torch.tensor(value)
    assert len(short_number(0.1)) == 3


def test_assignments_are_written_as_they_are_read():
    for text in ("cars=0.4", "cars/visual.proj=-1", "a.b-c/*.attn.*=1e-05"):
        assert str(parse_assignment(text)) == text


@pytest.mark.parametrize("text", ["cars", "=1", "cars=", "cars=x", "cars/=1", "cars=nan", "cars=inf", "/b=1"])
def test_other_texts_are_no_assignments(text, refused):
    with refused("USAGE", 2, "VECTOR=NUMBER"):
        parse_assignment(text)


def test_later_assignments_win_and_blocks_make_a_table(shelf, refused):
    bank = Bank.load(shelf.bank)
    plain = assigned_coefficients(bank, [Assignment("cars", 0.5), Assignment("dtd", 0.1)])
    assert plain.partition == Partition.whole() and plain.values.tolist() == pytest.approx([0.5, 0.1])
    block = bank.layout.blocks[3].name
    mixed = assigned_coefficients(bank, [Assignment("cars", 0.5), Assignment("cars", 0.2, block)])
    assert mixed.partition == Partition.blocks() and mixed.vectors == ("cars",)
    assert mixed.of("cars", block).item() == pytest.approx(0.2)
    assert mixed.of("cars", bank.layout.blocks[4].name).item() == 0.5
    over = assigned_coefficients(bank, [Assignment("dtd", 1.0)], mixed)
    assert over.vectors == ("cars", "dtd") and over.of("cars", block).item() == pytest.approx(0.2)
    with refused("COEF-LAYOUT", 3, "no block"):
        assigned_coefficients(bank, [Assignment("cars", 1.0, "nothing*")])
    parts = Coefficients.zeros(bank, Partition.random(2, 0))
    with refused("COEF-PARTITION", 2, "several"):
        assigned_coefficients(bank, [Assignment("cars", 1.0)], parts)


# tables


def test_a_table_of_another_shape_or_with_other_cells_is_refused(desk, refused):
    table = desks.constant(desk)
    with refused("COEF-VALUES", 3, "another size"):
        desk.measure(table[1:])
    with refused("COEF-VALUES", 3, "other cells"):
        desk.measure([[None, *row[1:]] for row in table])
    with refused("COEF-VALUES", 3, "too large"):
        desk.measure([[101.0, *row[1:]] for row in table])


# files and commands


def saved_by_command(desk: Desk, table: desks.Table, directory: Path, monkeypatch) -> bytes:
    """The file that the command of the page writes; a here-document is standard input."""
    line, _, rest = str(desk.command(table)["make"]).partition(" <<'END'\n")
    words = shlex.split(line)
    assert words[0] == "aniso" and (not rest or rest.endswith("\nEND"))
    monkeypatch.setattr("sys.stdin", io.StringIO(rest.removesuffix("END")))
    monkeypatch.chdir(directory)
    assert main([*words[1:], "--overwrite"]) == 0
    return (directory / "coefficients.safetensors").read_bytes()


def test_saved_coefficients_equal_the_file_of_the_command_byte_for_byte(
    desk, learned, shelf, tmp_path, monkeypatch
):
    opened = desks.photo_desk(shelf, learned)
    start = opened.describe()["values"]
    nudged = [list(row) for row in start]
    nudged[0][2] += 0.25
    noise = torch.Generator().manual_seed(0)
    count = len(desk.table.blocks)
    scattered = {("dtd", j): float(torch.randn((), generator=noise)) for j in range(0, count, 2)}
    states = [
        (desk, desks.constant(desk)),
        (desk, desks.constant(desk, cars=0.4, dtd=-1.0)),
        (desk, changed(desk, {("cars", j): 0.3 for j in range(5)}, dtd=0.1)),
        (opened, start),
        (opened, nudged),
        (desk, changed(desk, scattered, cars=1 / 3)),
    ]
    for i, (own, table) in enumerate(states):
        assert own.coefficients(table).to_bytes() == saved_by_command(own, table, tmp_path, monkeypatch), i
        wanted = own.table.read(table)
        kept = own.coefficients(table)
        for vector, row in zip(own.table.vectors, wanted, strict=True):
            for block, value in zip(own.table.blocks, row.tolist(), strict=True):
                found = kept.of(vector, block.name).item() if vector in kept.vectors else 0.0
                assert found == value
    assert "<<'END'" in str(desk.command(states[-1][1])["make"])


def test_commands_are_short_where_blocks_share_a_pattern(desk):
    layers = {("cars", j): 0.3 for j, block in enumerate(desk.table.blocks) if block.depth == 0}
    recipe = desk.recipe(changed(desk, layers, dtd=0.5))
    assert [a.vector for a in recipe.assignments].count("cars") == 2  # 0, and the layer
    assert recipe.assignments[1].pattern.endswith(".0.*")


def test_a_desk_over_a_run_starts_at_its_coefficients(shelf, learned):
    desk = desks.photo_desk(shelf, learned)
    found = Coefficients.load(learned / "coefficients.safetensors")
    assert torch.equal(desk.table.read(desk.describe()["values"]), found.matrix())
    assert desk.recipe(desk.describe()["values"]).assignments == ()  # nothing but --from
    assert desk.title == "Run run"


def test_coefficients_that_a_desk_cannot_move_are_refused(shelf, tmp_path, refused):
    path = tmp_path / "parts.safetensors"
    Coefficients.zeros(Bank.load(shelf.bank), Partition.random(2, 0)).save(path)
    with refused("COEF-PARTITION", 2, "--partition blocks"):
        desks.photo_desk(shelf, path, bank=str(shelf.bank))
    with refused("USAGE", 2, "--bank"):
        desks.photo_desk(shelf, path)


def test_baking_writes_the_model_that_the_command_writes(shelf, tmp_path, refused):
    desk = desks.photo_desk(shelf, out=tmp_path / "out")
    table = desks.constant(desk, cars=0.5)
    first, second = desk.bake(table), desk.bake(table)
    assert (first.name, second.name) == ("model-1.safetensors", "model-2.safetensors")
    mix = str(tmp_path / "mix.safetensors")
    desk.coefficients(table).save(mix)
    bank, base, out = str(shelf.bank), str(shelf.model), str(tmp_path / "by-command.safetensors")
    assert main(["bake", mix, "--bank", bank, "--base", base, "-o", out]) == 0
    from safetensors.torch import load_file

    ours, theirs = load_file(first), load_file(out)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with refused("USAGE", 2, "-o DIR"):
        desks.photo_desk(shelf).bake(table)


# presets


def test_presets_are_what_their_names_say(desk, shelf):
    bank = Bank.load(shelf.bank)
    names = [preset.name for preset in desk.presets.all()]
    assert names[:1] == ["base"] and {"mean", "task-arithmetic", "least-squares"} <= {*names}
    assert "vector:dtd" in names and "learned" not in names
    assert desk.presets.values("base").abs().sum() == 0
    assert desk.presets.values("mean").unique().tolist() == [1 / len(bank)]
    assert desk.presets.values("task-arithmetic").unique().tolist() == pytest.approx([0.3])
    one = desk.presets.values("vector:dtd")
    assert one[desk.table.vectors.index("dtd")].unique().tolist() == [1.0]
    assert float(one.sum()) == len(desk.table.blocks)
    solved = least_squares(bank).coefficients.matrix()
    assert torch.equal(desk.presets.values("least-squares"), solved)


# geometry


def test_norm_and_interference_of_known_vectors():
    """Two orthogonal vectors, one that equals the first, and one that is its opposite."""
    base = {"a.weight": torch.tensor([[3.0, 4.0]])}
    deltas = {"x": [1.0, 0.0], "y": [0.0, 1.0], "same": [1.0, 0.0], "opposite": [-1.0, 0.0]}
    tuned = {name: {"a.weight": base["a.weight"] + torch.tensor([d])} for name, d in deltas.items()}
    bank = Bank.build(base, tuned, allow_distant=True)
    table = CoefficientTable.of(bank)
    geometry = Geometry.of(bank, table)
    size = 5.0 if geometry.relative else 1.0

    def at(**values: float) -> tuple[float, float]:
        column = torch.tensor([[values.get(name, 0.0)] for name in table.vectors])
        found = geometry.at(column)
        return float(found.norms[0]) * size, float(found.interference[0])

    assert at(x=1, y=1) == pytest.approx((2**0.5, 0.0), abs=1e-6)
    assert at(x=2, same=1) == pytest.approx((3.0, 1.0), abs=1e-6)
    assert at(x=1, opposite=1) == pytest.approx((0.0, -1.0), abs=1e-6)
    norm, interference = at(x=0.5)
    assert norm == pytest.approx(0.5, abs=1e-6) and interference != interference  # one vector: undefined


def test_similarity_of_the_desk_is_that_of_aniso_analyse(desk, shelf):
    desk.compute_geometry()
    found = desk.geometry()
    whole = cosine_similarity(Bank.load(shelf.bank)).whole
    for row, expected in zip(found["cosines"], whole.values, strict=True):
        assert row == pytest.approx(list(expected), abs=1e-12)  # summed in another order
    assert len(desk.measure(desks.constant(desk, cars=1.0))["norms"]) == len(desk.table.blocks)


# predictions


def test_incremental_composition_equals_a_full_one_bit_for_bit(desk, shelf):
    """After any sequence of moves the weights are those of a new composition."""
    generator = torch.Generator().manual_seed(1)
    table = desk.table.filled(0.0)
    predictor = desk.predictor
    predictor._set(table)
    blocks = len(desk.table.blocks)
    for step in range(8):
        rows = [int(torch.randint(len(table), (), generator=generator))]
        columns = [step % blocks, (5 * step) % blocks] if step % 2 else list(range(blocks))
        table = table.clone()
        table[rows[0], columns] += float(torch.randn((), generator=generator))
        assert predictor._set(table) == len({*columns})
        assert predictor._set(table) == 0
        fresh = Composition(predictor._encoder, Bank.load(shelf.bank), desk.table.index.partition)
        fresh.values.data.copy_(desk.table.flat(table))
        kept, full = predictor.composition.weights(), fresh.weights()
        assert kept.keys() == full.keys()
        assert all(torch.equal(kept[name], full[name]) for name in full)


def test_only_moved_blocks_are_composed_again(desk):
    first = desks.constant(desk, cars=0.7, dtd=0.123)
    assert desk.measure(first, 60)["recomposed"] > 1
    moved = [list(row) for row in first]
    moved[0][3] = 0.9
    assert desk.measure(moved, 60)["recomposed"] == 1


def test_accuracy_is_that_of_evaluate_and_does_not_depend_on_the_time_it_gets(shelf, monkeypatch):
    monkeypatch.setattr("aniso.explore.predictor.CHUNK", 2)
    given = {"sample": 100, "task": str(shelf.data / "cars")}
    desk = desks.photo_desk(shelf, **given)
    table = desks.constant(desk, cars=0.8, photos=-0.3)
    first = desk.measure(table, 0.0)
    assert (first["done"], first["complete"]) == (2, False)  # at least one chunk
    answers = [desk.measure(table, 0.0) for _ in range(first["total"])]
    last = answers[-1]
    assert last["complete"] and last["done"] == last["total"]
    at_once = desks.photo_desk(shelf, **given).measure(table, 60)
    assert (at_once["correct"], at_once["done"]) == (last["correct"], last["done"])
    predictor = desk.predictor
    composition = Composition(predictor._encoder, Bank.load(shelf.bank))
    composition.values.data.copy_(desk.table.flat(desk.table.read(table)))
    expected = evaluate(composition, predictor._sample, head=predictor._classifier)
    assert (last["correct"], last["total"]) == (expected.correct, expected.total)
    assert tuple(last["interval"]) == expected.interval


def test_two_tabs_do_not_disturb_each_other(desk):
    one, two = desks.constant(desk, cars=1.5), desks.constant(desk, dtd=-1.5)
    alone = [desk.measure(table, 60) for table in (one, two)]
    again = [desk.measure(table, 60) for table in (one, two, one, two)]
    for i, found in enumerate(again):
        assert found["items"] == alone[i % 2]["items"] and found["correct"] == alone[i % 2]["correct"]


def test_items_are_added_predicted_and_removed(shelf):
    desk = desks.photo_desk(shelf)
    assert [item["label"] for item in desk.item_list()] and desk.describe()["item_kind"] == "images"
    added = desk.predictor.items.add_image(pictures.encoded(3), "mine.png")
    found = desk.measure(desks.constant(desk))["items"]
    assert found[-1]["number"] == added.number
    assert sum(p for _, p in found[-1]["ranked"]) == pytest.approx(1.0)  # two classes
    desk.predictor.items.remove(added.number)
    assert len(desk.measure(desks.constant(desk))["items"]) == len(found) - 1


def test_hostile_images_are_refused_with_a_plain_message(shelf, refused):
    items = desks.photo_desk(shelf).predictor.items
    before = items.all
    flat = io.BytesIO()
    Image.new("1", (14_000, 14_000)).save(flat, "PNG")
    with refused("IMAGE-BOMB", 4, "bomb.png"):
        items.add_image(flat.getvalue(), "bomb.png")
    whole = pictures.encoded(1)
    for content in (b"", b"<svg/>", b"\x89PNG\r\n\x1a\n", whole[: len(whole) // 2]):
        with refused("IMAGE-READ", 3, "evil"):
            items.add_image(content, "evil\x1b.png")
    with refused("DATA-ITEM", 2, "takes images"):
        items.add_text("a text")
    assert items.all == before
    while len(items.all) < MOST:
        items.add_image(whole, "one.png")
    with refused("DATA-ITEM", 5, str(MOST)):
        items.add_image(whole, "one.png")


def test_a_desk_without_a_task_needs_no_model(shelf):
    desk = open_desk(DeskOptions(str(shelf.bank)))
    assert desk.predictor is None and not desk.describe()["can_bake"]
    assert desk.measure(desks.constant(desk, cars=1.0))["complete"]
    assert "--base BASE" in str(desk.command(desks.constant(desk))["bake"])


def test_the_command_reports_mistakes_before_it_serves(aniso, tmp_path, shelf):
    assert aniso("explore", tmp_path / "nothing").code == 3
    assert aniso("explore", shelf.bank, "--task", shelf.data / "photos").code == 2  # no base
    assert aniso("explore", shelf.bank, "--bank", shelf.bank).code == 2


# notebooks


def test_a_notebook_asks_with_the_same_requests(desk, shelf):
    table = desks.constant(desk, cars=0.4)
    found, files = reply(desk, {"id": 7, "path": "/measure", "body": {"values": table}})
    assert found["id"] == 7 and found["answer"]["items"] == desk.measure(table)["items"] and files == []
    assert reply(desk, {"id": 8, "path": "/desk", "body": None})[0]["answer"]["vectors"] == [*runs.VECTORS]
    saved = reply(desk, {"id": 9, "path": "/save", "body": {"values": table}})
    assert saved == ({"id": 9}, [desk.coefficients(table).to_bytes()])
    fresh = desks.photo_desk(shelf)
    image = {"name": "mine.png", "content": base64.b64encode(pictures.encoded(4)).decode()}
    added = reply(fresh, {"id": 1, "path": "/items/image", "body": image})[0]["answer"]["items"]
    assert added[-1]["name"] == "mine.png"
    for path, body in (("/nothing", None), ("/measure", 3), ("/items/image", {**image, "content": "!"})):
        assert reply(fresh, {"id": 2, "path": path, "body": body})[0]["problem"]
    assert "no preset" in reply(fresh, {"id": 3, "path": "/preset", "body": {"name": "x"}})[0]["problem"]
    assert reply(fresh, "nonsense")[0]["problem"]


def test_the_widget_answers_messages(desk):
    pytest.importorskip("anywidget", reason="needs anywidget: pip install 'aniso[notebook]'")
    widget = desk_widget(desk)
    sent: list[object] = []
    widget.send = lambda content, buffers=None: sent.append(content)
    widget._handle_custom_msg({"id": 1, "path": "/geometry", "body": None}, [])
    assert sent[0]["id"] == 1 and "export default" in widget._esm


def test_a_missing_anywidget_is_named(desk, monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "anywidget", None)
    with refused("MODEL-LIBRARY", 2, "aniso[notebook]"):
        desk_widget(desk)
