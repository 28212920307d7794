"""Figures on the command line: from records, and from a file of coefficients."""

from __future__ import annotations

import json

import pytest
import runs
from made_records import run

from aniso.compose import Coefficients
from aniso.record_files import read_record


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A directory with a run of few-shot learning."""
    from aniso.cli import main

    root = tmp_path_factory.mktemp("figures")
    assert main([*runs.shelf(root / "shelf").few_shot("-o", str(root / "run"))]) == 0
    return root / "run"


def test_the_record_of_a_run_keeps_its_coefficients(fitted):
    matrix = read_record(fitted / "record.json").coefficients.matrix
    found = Coefficients.load(fitted / "coefficients.safetensors")
    assert matrix.vectors == found.vectors and [b.name for b in matrix.blocks] == list(found.blocks)
    assert matrix.rows[0] == pytest.approx(found.matrix()[0].tolist(), rel=1e-3, abs=matrix.scale / 4096)
    assert any(value for row in matrix.rows for value in row)


def test_report_writes_the_named_figures_only(fitted, aniso, tmp_path):
    names = ("coefficient-heatmap", "few-shot-curves")
    asked = [word for name in names for word in ("--figure", name)]
    ran = aniso("report", fitted / "record.json", *asked, "-o", tmp_path / "out", "--json")
    assert ran.code == 0, ran.err
    files = [f"{name}.{kind}" for name in names for kind in ("png", "svg")]
    assert json.loads(ran.out)["files"] == files
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == files


def test_figures_that_cannot_be_drawn_are_refused_before_anything_is_written(aniso, tmp_path):
    (tmp_path / "r.json").write_text(json.dumps(run().content()))
    for name, mention in (("venn", "at least two methods"), ("ven", "you meant venn")):
        ran = aniso("report", tmp_path / "r.json", "--figure", name, "-o", tmp_path / "out")
        assert ran.code == 2 and mention in ran.err and not (tmp_path / "out").exists()


def test_coefficients_of_a_file_or_a_run_are_drawn(fitted, aniso, tmp_path):
    for source in (fitted, fitted / "coefficients.safetensors"):
        out = tmp_path / f"{source.stem}.svg"
        ran = aniso("coefficients", "show", source, "--figure", out)
        assert ran.code == 0 and b"<svg" in out.read_bytes() and f"wrote {out}" in ran.out
        assert aniso("coefficients", "show", source, "--figure", out).code == 2
        assert aniso("coefficients", "show", source, "--figure", out, "--overwrite", "--json").code == 0
    ran = aniso("coefficients", "show", fitted, "--figure", tmp_path / "x.gif")
    assert ran.code == 2 and ".png or .svg" in ran.err
