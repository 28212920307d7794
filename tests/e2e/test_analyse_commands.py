"""``aniso analyse``: tables, JSON and figures, and mistakes that are reported early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import runs
import tiny
import torch

from aniso.vectors import Bank

Aniso = Callable[..., Any]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> runs.Shelf:
    """With a bank that stores mean features."""
    made = runs.shelf(tmp_path_factory.mktemp("shelf"))
    g = torch.Generator().manual_seed(4)
    Bank.load(made.bank).with_features({name: torch.randn(tiny.EMBED, generator=g) for name in runs.VECTORS})
    return made


def tasks(shelf: runs.Shelf, *names: str) -> tuple[object, ...]:
    return tuple(word for name in names for word in ("--task", shelf.data / name))


def commands(shelf: runs.Shelf) -> dict[str, tuple[object, ...]]:
    two = tasks(shelf, "cars", "dtd")
    return {
        "similarity": ("similarity", "--bank", shelf.bank),
        "by kind": ("similarity", "--bank", shelf.bank, "--by", "kind"),
        "disentanglement": ("disentanglement", *shelf.base, *two),
        "significance": ("significance", *shelf.base, *two),
        "distributions": ("distributions", "--model", shelf.model, *two),
        "stored": ("distributions", "--bank", shelf.bank),
        "both": ("distributions", *shelf.base, *tasks(shelf, "photos")),
    }


@pytest.mark.parametrize(
    "name", ["similarity", "by kind", "disentanglement", "significance", "distributions", "stored", "both"]
)
def test_commands_print_a_table_and_draw_a_figure(name, shelf, aniso, tmp_path):
    for ending, begin in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        out = tmp_path / f"figure{ending}"
        ran = aniso("analyse", *commands(shelf)[name], "-o", out)
        assert ran.code == 0, ran.err
        assert "cars" in ran.out and "dtd" in ran.out
        assert f"figure written to {out}" in ran.out
        assert out.read_bytes().startswith(begin)


def test_similarity_as_json(shelf, done):
    found = done("analyse", *commands(shelf)["by kind"])
    bank = Bank.load(shelf.bank)
    assert found["vectors"] == list(runs.VECTORS)
    assert found["cosine"][0][1] == pytest.approx(bank["cars"].cosine(bank["dtd"]), abs=1e-6)
    assert found["figure"] is None
    assert "norm" in found["by_kind"]
    assert "by_kind" not in done("analyse", *commands(shelf)["similarity"])


def test_disentanglement_as_json(shelf, done):
    found = done("analyse", *commands(shelf)["disentanglement"])
    (none, there), (back, zero) = found["error"]
    assert none is None and zero is None
    assert found["mean"] == pytest.approx((there + back) / 2)
    assert (found["tasks"], found["images"], found["scale"]) == (
        ["cars", "dtd"],
        {"cars": 12, "dtd": 12},
        1.0,
    )
    still = done("analyse", *commands(shelf)["disentanglement"], "--scale", 0)
    assert still["mean"] == 0


def test_disentanglement_with_coefficients_of_a_file(shelf, aniso, done, tmp_path):
    file, command = tmp_path / "c.safetensors", commands(shelf)["disentanglement"]
    made = aniso("coefficients", "make", "cars=1", "dtd=1", "signs=5", "--bank", shelf.bank, "-o", file)
    assert made.code == 0, made.err
    found = done("analyse", *command, "--coefficients", file)
    assert found["error"] == done("analyse", *command)["error"]
    assert found["scale"] is None
    ran = aniso("analyse", *command, "--coefficients", file, "--scale", 1)
    assert ran.code == 2 and "not both" in ran.err


def test_significance_as_json(shelf, done):
    found = done("analyse", *commands(shelf)["significance"])
    assert found["vectors"] == list(runs.VECTORS)
    for i, task in enumerate(found["tasks"]):
        own = found["significance"][i][found["vectors"].index(task)]
        assert own == (None if found["zero_shot"][task] == found["fine_tuned"][task] else 1)
    assert len(found["mean"]) == len(runs.VECTORS)


def test_distributions_as_json(shelf, done):
    found = done("analyse", *commands(shelf)["distributions"])
    assert [own["name"] for own in found["tasks"]] == ["cars", "dtd"]
    assert found["explained_variance"] == [pytest.approx(1), 0]
    both = done("analyse", *commands(shelf)["both"])["tasks"]
    assert {own["name"] for own in both if own["covariance"]} == {"photos"}
    assert {own["name"] for own in both} == set(runs.VECTORS)


def test_tasks_can_be_named_like_vectors(shelf, done):
    named = ("--task", f"signs={shelf.data / 'photos'}", *tasks(shelf, "cars"))
    assert done("analyse", "disentanglement", *shelf.base, *named)["tasks"] == ["signs", "cars"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--task", "{data}/photos", "--task", "{data}/photos"), "given twice"),
        (("--task", "other={data}/photos", "--task", "{data}/cars"), "no vector 'other'"),
        (("--task", "{data}/cars", "--task", "{data}/dtd", "-o", "{data}/figure.pdf"), ".png or .svg"),
        (("--task", "{data}/cars", "--task", "{data}/dtd", "-o", "{data}/there.png"), "exists"),
    ],
)
def test_mistakes_name_what_to_type(words, message, shelf, aniso):
    (shelf.data / "there.png").touch()
    given = [word.format(data=shelf.data) for word in words]
    ran = aniso("analyse", "disentanglement", *shelf.base, *given)
    assert ran.code == 2
    assert message in ran.err and "fix" in ran.err


def test_a_bank_without_features_is_refused(aniso, tmp_path):
    made = runs.shelf(tmp_path / "plain")
    ran = aniso("analyse", "distributions", "--bank", made.bank)
    assert ran.code == 2 and "stores no features" in ran.err
