"""The public face: few names, all of which exist, and namespaces for what comes in kinds."""

from __future__ import annotations

import pytest

import aniso
from aniso.errors import UsageError
from aniso.vectors import Bank


@pytest.mark.parametrize("name", aniso.__all__)
def test_every_public_name_exists_and_has_a_docstring(name):
    found = getattr(aniso, name)
    assert name == "__version__" or found.__doc__


def test_the_face_is_small():
    assert len(aniso.__all__) <= 45


@pytest.mark.parametrize(
    ("namespace", "names"),
    [
        ("objectives", {"CrossEntropy", "FixMatch", "SAR", "Entropy", "Contrastive", "LanguageLoss"}),
        ("heads", {"TipAdapter", "LPP", "LinearProbe", "load_head"}),
        ("selection", {"Random", "FeatureSimilarity", "WholeGradient", "BlockwiseGradient", "Pursuit"}),
        ("keep", {"Last", "Best", "Lowest"}),
    ],
)
def test_namespaces_hold_their_kinds(namespace, names):
    assert all(hasattr(getattr(aniso, namespace), name) for name in names)


def test_banks_that_come_along_load_by_name():
    assert "mini" in aniso.list_banks()
    assert len(Bank.load("mini")) == 21
    with pytest.raises(UsageError, match="BANK-NAME"):
        Bank.load("mini-unheard-of")


def test_a_directory_wins_over_a_name(tmp_path, monkeypatch):
    Bank.load("mini").only("mnist").save(tmp_path / "mini")
    monkeypatch.chdir(tmp_path)
    assert Bank.load("mini").names == ("mnist",)


def test_models_and_tasks_are_listed():
    assert aniso.list_models()[0] == "mini"
    assert {"cars", "mnist"} <= set(aniso.list_tasks())
