"""Alignment of an image tower with a frozen text tower: the loss, the first projection, exact resume."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy
import pytest
import sentences
import torch
from PIL import Image
from torch.nn import functional
from towers import timm_directory

from aniso.cli import main
from aniso.data.captions import caption_split, read_captions
from aniso.errors import InputError, UsageError
from aniso.learn import evaluate
from aniso.learn.align import RECIPE, AlignOptions, align, align_towers, ridge
from aniso.learn.objectives.image_text import ImageText
from aniso.learn.objectives.term_inputs import TermInputs
from aniso.models import load_model
from aniso.models.dual_encoder import join_towers
from aniso.models.image_tower import load_tower

pytest.importorskip("timm")
COLOURS = {"the cat sat": (250, 20, 20), "rain": (20, 20, 250), "a bird sang": (20, 240, 20)}


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """Towers with random weights, and noisy images of three colours with a caption each."""
    root = tmp_path_factory.mktemp("align")
    timm_directory(root / "image")
    sentences.save(root / "text")
    lines = ["image,caption"]
    rng = numpy.random.default_rng(0)
    for caption, colour in COLOURS.items():
        for i in range(8):
            pixels = numpy.clip(rng.normal(colour, 30, (32, 32, 3)), 0, 255).astype("uint8")
            name = f"{caption.replace(' ', '-')}-{i}.png"
            Image.fromarray(pixels).save(root / name)
            lines.append(f"{name},{caption}")
    (root / "pairs.csv").write_text("\n".join(lines) + "\n")
    return root


def dual(root):
    return join_towers("dual", load_tower(root / "image"), load_model(root / "text"), size=32)


def options(**changes):
    schedule = replace(RECIPE, epochs=3, batch_size=8, warmup_steps=2)
    return AlignOptions(**{"schedule": schedule, **changes})


def test_the_loss_is_the_mean_of_both_directions(material):
    split = caption_split([read_captions(material / "pairs.csv")])
    torch.manual_seed(0)
    captions = functional.normalize(torch.randn(3, 5), dim=-1)
    features, labels = torch.randn(4, 5), torch.tensor([0, 2, 0, 1])
    term = ImageText(split, captions)
    scaled = 7.0 * functional.normalize(features, dim=-1)
    found = term.loss(TermInputs((features,), (scaled,), labels))
    logits = (scaled @ captions.T).double()
    of_images = [-(logits[i] - logits[i].logsumexp(0))[labels[i]] for i in range(4)]
    of_captions = []
    for c in range(3):
        own = [i for i in range(4) if labels[i] == c]
        of_captions.append(-sum(logits[i, c] - logits[:, c].logsumexp(0) for i in own) / len(own))
    wanted = (sum(of_images) / 4 + sum(of_captions) / 3) / 2
    assert float(found) == pytest.approx(float(wanted), rel=1e-5)


def test_ridge_recovers_a_linear_map_and_shrinks_with_the_penalty():
    torch.manual_seed(0)
    features = torch.randn(200, 6, dtype=torch.float64)
    weight, bias = torch.randn(3, 6, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    found, shift = ridge(features, features @ weight.T + bias, penalty=1e-9)
    torch.testing.assert_close(found, weight, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(shift, bias, rtol=1e-6, atol=1e-6)
    small, _ = ridge(features, features @ weight.T + bias, penalty=10.0)
    assert small.norm() < 0.2 * weight.norm()


def test_alignment_learns_captions_and_leaves_text_and_statistics(material, tmp_path):
    split = caption_split([read_captions(material / "pairs.csv")])
    encoder = dual(material)
    texts, statistics = encoder.text_features(list(COLOURS)), encoder.state_dict()
    statistics = {key: value.clone() for key, value in statistics.items() if "running" in key}
    done = align(encoder, split, options())
    assert done.losses[-1] < done.losses[0]
    assert evaluate(done.model, split).value > 0.9
    assert torch.equal(done.model.text_features(list(COLOURS)), texts)
    assert all(torch.equal(done.weights.read(key), value) for key, value in statistics.items())
    assert done.model.logit_scale != pytest.approx(1 / 0.07, abs=1e-6)


def test_the_logit_scale_never_exceeds_a_hundred(material):
    split = caption_split([read_captions(material / "pairs.csv")])
    encoder = dual(material)
    head = ImageText(split, torch.zeros(3, 16)).classifier(encoder)
    parameter = dict(encoder.named_parameters())["logit_scale"]
    with torch.no_grad():
        parameter.fill_(math.log(1e4))
    features = torch.randn(2, 16)
    assert float(head.logits(features).norm(dim=-1).max()) == pytest.approx(100, rel=1e-4)


def test_resume_is_exact(material, tmp_path):
    split = caption_split([read_captions(material / "pairs.csv")])
    whole = align(dual(material), split, options())
    seen = []

    def stop(row):
        seen.append(row)
        if row.epoch == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        align(dual(material), split, options(directory=tmp_path / "run", epoch_done=stop))
    again = align(dual(material), split, options(directory=tmp_path / "run", resume=True))
    assert all(torch.equal(whole.weights.read(key), again.weights.read(key)) for key in whole.weights.tensors)


def test_the_command_writes_a_directory_that_classifies(material, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["align", str(material / "image"), str(material / "text"), "--pairs", str(material / "pairs.csv")]
    assert main([*words, "--size", "32", "--epochs", "2", "--batch-size", "8", "-o", str(out)]) == 0
    loaded = load_model(out)
    split = caption_split([read_captions(material / "pairs.csv")])
    assert evaluate(loaded, split).value > 0.5
    capsys.readouterr()
    assert main([*words, "--size", "32", "-o", str(out)]) != 0
    assert "--overwrite" in capsys.readouterr().err


def test_captions_that_are_too_long_are_an_error_unless_they_may_be_cut(material, tmp_path):
    long = " ".join(["rain"] * 40)
    rows = [line for line in (material / "pairs.csv").read_text().splitlines() if "rain" not in line]
    (material / "long.csv").write_text("\n".join([*rows, f"rain-0.png,{long}"]) + "\n")
    split = caption_split([read_captions(material / "long.csv")])
    with pytest.raises(InputError, match="longer than the text tower") as caught:
        align(dual(material), split, options())
    assert caught.value.code == "DATA-CAPTION"
    align(dual(material), split, options(cut_captions=True, schedule=replace(RECIPE, epochs=1, batch_size=8)))


def test_a_directory_that_exists_is_refused_before_anything_is_read(material, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("keep")
    with pytest.raises(UsageError):
        align_towers(tmp_path / "none", tmp_path / "none", [tmp_path / "none"], tmp_path / "out")
