"""Image towers: image classifiers of timm or transformers without their head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from aniso.errors import InputError, printable
from aniso.json_value import JsonObject
from aniso.models import classifier
from aniso.models.hugging_face import processor_pixels
from aniso.models.input_size import on_meta
from aniso.models.transforms import Pixels
from aniso.weights import Ref, WeightSource, open_weights
from aniso.weights.directory import read_json
from aniso.weights.source import Renamed

MODEL_TYPE = "aniso_dual_encoder"
"""The model type of a dual encoder in its config.json."""
VISUAL = "visual."
DEFAULT_SIZE = 224  # pixels, if the preprocessing names none
_TIMM = "timm:"


@final
@dataclass(frozen=True)
class ImageTower:
    """A network that gives one row of features per image, and how to build it again."""

    network: nn.Module
    config: JsonObject
    """Its config.json: an architecture of timm, or a configuration of transformers."""
    pixels: Pixels
    width: int
    """Number of features."""


def load_tower(name: str | Path, weights: Ref | None = None) -> ImageTower:
    """Load ``timm:NAME`` with weights, or the directory of a classifier, and take its head off.

    The directory may also be that of a dual encoder, whose image tower is taken.
    """
    text = str(name)
    if text.startswith(_TIMM):
        architecture = text.removeprefix(_TIMM)
        encoder = classifier.load_timm(architecture, weights, text)
        config: JsonObject = {"architecture": architecture}
    else:
        path = Path(text).expanduser()
        if not (path / "config.json").is_file():
            raise InputError(
                "MODEL-NAME",
                f"'{printable(text)}' is no image tower",
                expected="timm:NAME, or a directory of an image classifier with config.json",
                fix="timm:NAME --image-weights FILE",
            )
        config = dict(read_json(path / "config.json"))
        if config.get("model_type") == MODEL_TYPE:
            source = open_weights(path if weights is None else weights)
            return build_tower(path / "image", visual_part(source), processor_pixels(path, DEFAULT_SIZE))
        encoder = classifier.load_directory(path, path.resolve().name, weights)
    transforms: Any = encoder.transforms
    return _tower(encoder._network, config, transforms.pixels, text)


def visual_part(source: WeightSource) -> WeightSource:
    """Return the weights of the image tower of a dual encoder, under the tower's own names."""
    names = {key.removeprefix(VISUAL): key for key in source.tensors if key.startswith(VISUAL)}
    return Renamed(source, names, source.info)


def build_tower(directory: Path, source: WeightSource, pixels: Pixels) -> ImageTower:
    """Build the tower that a directory's config.json describes, with weights from ``source``."""
    config = read_json(directory / "config.json")
    network = classifier.headless_network(directory, config, source)
    return _tower(network, config, pixels, str(directory))


def tower_features(network: Any, images: Tensor) -> Tensor:
    """Return one row of features per image."""
    # convolutions are faster so, depthwise ones most of all; others do not depend on it
    return classifier.features_before_head(network, images.contiguous(memory_format=torch.channels_last))


def _tower(network: Any, config: JsonObject, pixels: Pixels, where: str) -> ImageTower:
    classifier.remove_head(network)
    plain = {key: value for key, value in config.items() if key not in classifier.LABELS}
    return ImageTower(network.float(), plain, pixels, _width(network, pixels.size, where))


def _width(network: nn.Module, size: int, where: str) -> int:
    """Return the number of features, from a pass on the meta device; raises if there is no pooling."""
    empty, images = on_meta(network, size)
    with torch.no_grad():
        shape = tuple(classifier.input_of_head(empty, images).shape)
    if len(shape) == 2 or (len(shape) == 4 and shape[2:] == (1, 1)):
        return shape[1]
    raise InputError(
        "MODEL-TOWER",
        f"the image tower '{printable(where)}' has no pooling",
        found=f"features of shape {' x '.join(map(str, shape[1:]))} for an image",
        expected="one row of features per image",
        fix="use an architecture with global pooling",
    )
