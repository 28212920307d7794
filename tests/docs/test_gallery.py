"""The gallery can be drawn again: records allow its figures, and its page is current."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from aniso.report import FIGURES
from aniso.report.figures import plan_figure

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("gallery", ROOT / "scripts" / "gallery.py")
gallery = importlib.util.module_from_spec(_spec)
sys.modules["gallery"] = gallery  # where dataclasses look up their annotations
_spec.loader.exec_module(gallery)


def test_every_figure_is_in_the_gallery_or_said_to_be_missing():
    shown = {picture.figure for picture in gallery.PICTURES if picture.figure}
    assert shown | set(gallery.NOT_SHOWN) == set(FIGURES) and not shown & set(gallery.NOT_SHOWN)


@pytest.mark.parametrize("picture", gallery.PICTURES, ids=lambda picture: picture.name)
def test_a_picture_is_small_and_its_records_allow_its_figure(picture):
    content = (gallery.PLACE / f"{picture.name}.png").read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) <= gallery.LARGEST
    if picture.figure:
        assert len(plan_figure(picture.figure, gallery.records_of(picture))) == 1


def test_the_page_is_current_and_no_picture_is_left_over():
    assert gallery.PAGE.read_text() == gallery.page()
    names = {f"{picture.name}.png" for picture in gallery.PICTURES}
    assert {path.name for path in gallery.PLACE.iterdir()} == names


def test_a_picture_is_drawn_again_in_few_colours():
    picture = next(picture for picture in gallery.PICTURES if picture.name == "random-bases")
    content = gallery.drawn(picture)
    assert content.startswith(b"\x89PNG") and len(content) <= gallery.LARGEST
