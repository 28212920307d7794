"""From the command line to the loss of a batch, and to the model's forward pass, the way is short."""

from __future__ import annotations

import sys
from pathlib import Path

import runs

from aniso import Composition, CrossEntropy
from aniso.cli import main

ROOT = str(Path(sys.modules["aniso"].__file__).parent)
MOST = 20  # frames of aniso's own


def own_frames() -> int:
    frame, count = sys._getframe(2), 0
    while frame is not None:
        count += frame.f_code.co_filename.startswith(ROOT)
        frame = frame.f_back
    return count


def test_the_loss_of_a_batch_is_at_most_20_frames_below_the_command_line(tmp_path, monkeypatch):
    depths: dict[str, int] = {}

    def noted(cls: type, name: str) -> None:
        real = getattr(cls, name)

        def counting(*arguments, **options):
            depths[name] = max(depths.get(name, 0), own_frames() + 1)
            return real(*arguments, **options)

        monkeypatch.setattr(cls, name, counting)

    noted(CrossEntropy, "loss")
    noted(Composition, "forward")
    shelf = runs.shelf(tmp_path / "shelf")
    assert main([*shelf.few_shot("-o", str(tmp_path / "run"))]) == 0
    assert 5 < depths["loss"] <= MOST and 5 < depths["forward"] <= MOST, depths
