"""Dual encoders: an image tower and a frozen text tower with features in one space.

A directory of a dual encoder has

* ``config.json`` with the model type, and ``model.safetensors`` with the image tower (``visual.``), the
  projections (``visual_projection.``, ``text_projection.``) and the logarithm of the logit scale;
* ``preprocessor_config.json``: how images are prepared;
* ``image/config.json``: the architecture of the image tower;
* ``text/``: the text tower, a directory of its own, of a sentence encoder or of a CLIP.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from aniso.errors import InputError, UsageError, printable
from aniso.json_value import JsonObject
from aniso.models import hugging_face, sentence_encoder
from aniso.models.encoder import Encoder, Family, FrozenNetwork
from aniso.models.image_tower import DEFAULT_SIZE, ImageTower, build_tower, tower_features, visual_part
from aniso.models.image_tower import MODEL_TYPE as MODEL_TYPE
from aniso.models.input_size import require_input_size
from aniso.models.loading import fill
from aniso.models.sentence_modules import sentence_files
from aniso.models.transforms import Pixels
from aniso.weights import Ref, WeightSource, open_weights, save_safetensors
from aniso.weights.atomic import atomic_directory, atomic_file
from aniso.weights.directory import read_json
from aniso.weights.files import RawFile

SCALE = 100.0
"""The largest logit scale, as in CLIP."""
OURS = re.compile(r"config\.json|model\.safetensors|preprocessor_config\.json|README\.md|image|text")
_CLIP_FILES = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"),
    *("special_tokens_map.json", "preprocessor_config.json"),
)
_START = 1 / 0.07  # CLIP's first logit scale


@final
class DualNetwork(nn.Module):
    """The trained half of a dual encoder: image tower, projections and logit scale."""

    def __init__(self, visual: nn.Module, image_width: int, text_width: int, source: _Shapes) -> None:
        super().__init__()
        self.visual = visual
        self.visual_projection = source.projection("visual_projection", image_width)
        self.text_projection = source.projection("text_projection", text_width)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(_START)))

    def forward(self, images: Tensor) -> Tensor:
        return _image(self, images)


@final
class _Shapes:
    """The projections of a network, by the tensors of a file."""

    def __init__(self, source: WeightSource) -> None:
        self._tensors = source.tensors
        self._label = source.label

    def projection(self, name: str, width: int) -> nn.Module:
        info = self._tensors.get(f"{name}.weight")
        if info is None:
            return nn.Identity()
        if len(info.shape) != 2 or info.shape[1] != width:
            raise InputError(
                "CKPT-SHAPE",
                f"'{self._label}' has a projection that does not fit its tower",
                key=f"{name}.weight",
                found=info.shape,
                expected=f"(…, {width})",
                fix="use the weights that belong to this configuration",
            )
        return nn.Linear(width, info.shape[0], bias=f"{name}.bias" in self._tensors)


@final
class _TextSide(nn.Module):
    """The frozen text tower with its projection."""

    def __init__(self, text: Encoder, projection: nn.Module) -> None:
        super().__init__()
        frozen = text.family.frozen
        self.tower = text._network if frozen is None else frozen.network
        self.projection = projection


def load_directory(path: Path, name: str, weights: Ref | None = None) -> Encoder:
    """Load the dual encoder in a directory.

    ``weights`` from elsewhere, such as a fine-tuned copy, replace its image tower and projection; class
    weights are always made by the directory's own.
    """
    _require_schema(path)
    source = open_weights(path)
    pixels = hugging_face.processor_pixels(path, DEFAULT_SIZE)
    tower = build_tower(path / "image", visual_part(source), pixels)
    require_input_size(path, tower.network, pixels.size, pixels.size)
    text = _text_encoder(path / "text")
    network = DualNetwork(tower.network, tower.width, text_width(text), _Shapes(source))
    fill(network, source)
    if weights is not None:
        fill(network, open_weights(weights), optional=("text_projection.", "logit_scale"))
    if isinstance(weights, str | Path):
        name = f"{name}:{Path(weights).name}"
    return _encoder(name, network, text, pixels)


def join_towers(name: str, tower: ImageTower, text: Encoder, *, size: int, project: bool = True) -> Encoder:
    """Join an image tower and a text tower; ``project`` adds a projection from image to text features.

    The projection is all zeros until something is learned.
    """
    require_text(text)
    width = text_width(text)
    if not project and tower.width != width:
        raise UsageError(
            "MODEL-TOWER",
            "the two towers have features of different widths, and there is no projection",
            found=f"{tower.width} of images, {width} of texts",
            fix="leave out --no-projection",
        )
    pixels = Pixels(size, tower.pixels.mean, tower.pixels.std, tower.pixels.interpolation)
    require_input_size(name, tower.network, size, tower.pixels.size)
    shapes: dict[str, Tensor] = {}
    if project:
        shapes = {
            "visual_projection.weight": torch.zeros(width, tower.width),
            "visual_projection.bias": torch.zeros(width),
        }
    network = DualNetwork(tower.network, tower.width, width, _Shapes(open_weights(shapes)))
    if project:
        network.visual_projection.load_state_dict(
            {key.removeprefix("visual_projection."): value for key, value in shapes.items()}
        )
    return _encoder(name, network, text, pixels)


def without_projection(encoder: Encoder) -> Encoder:
    """Return the same dual encoder with the features of the image tower itself, before its projection."""
    family = replace(encoder.family, item=_tower)
    return Encoder(f"{encoder.name}, tower", encoder._network, family, encoder.transforms)


def require_text(text: Encoder) -> None:
    """Raise if an encoder gives no features of texts."""
    if not text.has_text:
        raise UsageError(
            "MODEL-TEXT",
            f"'{printable(text.name)}' has no text tower",
            fix="a sentence encoder, or a complete CLIP",
        )


@torch.no_grad()
def text_width(text: Encoder) -> int:
    """Return the number of features of a text."""
    require_text(text)
    return int(text.text_features(["a"]).shape[-1])


def _encoder(name: str, network: DualNetwork, text: Encoder, pixels: Pixels) -> Encoder:
    side = _TextSide(text, network.text_projection)
    assert text.family.text is not None
    text_features = partial(_text, features=text.family.text)
    scale = math.exp(float(network.logit_scale.detach()))
    family = Family(
        _image, text_features, text.family.tokens, frozen=FrozenNetwork(side), logit_scale=min(scale, SCALE)
    )
    return Encoder(name, network.float(), family, pixels)


def _image(network: Any, images: Tensor) -> Tensor:
    features: Tensor = network.visual_projection(tower_features(network.visual, images))
    return features


def _tower(network: Any, images: Tensor) -> Tensor:
    return tower_features(network.visual, images)


def _text(side: Any, ids: Tensor, features: Callable[[Any, Tensor], Tensor]) -> Tensor:
    projected: Tensor = side.projection(features(side.tower, ids))
    return projected


def _text_encoder(path: Path) -> Encoder:
    if sentence_encoder.recognises(path):
        return sentence_encoder.load_directory(path, path.name)
    return hugging_face.load(path, path.name)


def _require_schema(path: Path) -> None:
    found = read_json(path / "config.json").get("schema")
    if found != 1:
        raise InputError(
            "DIR-CONFIG",
            f"'{printable(path)}' is a dual encoder of another version",
            key="schema",
            found=printable(found),
            expected="1",
            fix="pip install --upgrade aniso",
        )


# writing


def dual_encoder_files(tower: JsonObject, pixels: Pixels, text: Path) -> dict[str, bytes]:
    """Return the files of a dual encoder beside its weights, by relative path; ``text`` is a directory."""
    config: JsonObject = {"model_type": MODEL_TYPE, "schema": 1, "library_name": "aniso"}
    made = {
        "config.json": config,
        "preprocessor_config.json": hugging_face.processor_settings(pixels),
        "image/config.json": tower,
    }
    files = {name: (json.dumps(value, indent=2) + "\n").encode() for name, value in made.items()}
    return files | {f"text/{name}": content for name, content in _text_files(text).items()}


def copied_files(home: Path) -> dict[str, bytes]:
    """Return the files of a dual encoder's directory beside its weights, for a copy with other weights."""
    pixels = hugging_face.processor_pixels(home, DEFAULT_SIZE)
    return dual_encoder_files(read_json(home / "image/config.json"), pixels, home / "text")


def _text_files(text: Path) -> dict[str, bytes]:
    """Return the files of a text tower: configuration, tokenizer and weights."""
    weights = text / "model.safetensors"
    if not weights.is_file():
        raise InputError(
            "DIR-EMPTY",
            f"the text tower '{printable(text)}' has no model.safetensors",
            fix="aniso convert its weights to safetensors first",
        )
    if sentence_encoder.recognises(text):
        small = sentence_files(text)
    else:
        names = [name for name in _CLIP_FILES if (text / name).is_file()]
        small = {name: _content(text / name) for name in names}
    return {**small, weights.name: _content(weights)}


def _content(path: Path) -> bytes:
    file = RawFile(path)
    return bytes(file.read(0, file.size))


def save_directory(
    out: Path, weights: Mapping[str, Tensor], files: Mapping[str, bytes], *, overwrite: bool = False
) -> None:
    """Write the directory of a dual encoder: its weights, and the files of ``dual_encoder_files``."""
    with atomic_directory(out, overwrite=overwrite, ours=OURS) as unfinished:
        save_safetensors(unfinished / "model.safetensors", dict(weights), {"format": "pt"})
        for name, content in files.items():
            (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(unfinished / name) as file:
                file.stream.write(content)
