"""CLIP models of Hugging Face transformers: a directory with config.json."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from torch import Tensor

from aniso.errors import InputError, printable
from aniso.json_value import JsonObject, as_object
from aniso.models.architectures import CLIP as CLIPS
from aniso.models.encoder import Encoder, Family
from aniso.models.input_size import require_input_size
from aniso.models.loading import building, fill, transformers_network
from aniso.models.tokenizer_file import LateTokenizer, TokenizerError, TokenizerFile, backend_text
from aniso.models.transforms import CLIP_MEAN, CLIP_STD, Pixels
from aniso.weights import Ref, WeightSource, open_weights
from aniso.weights.directory import read_json, transformers_config

CLIP, CLIP_VISION = "clip", "clip_vision_model"
_WIDEST = 8192  # pixels; the largest models in use take 1,024


def load(path: Path, name: str, weights: Ref | None = None) -> Encoder:
    """Load the encoder in a directory; ``weights`` replace its own, as far as they go."""
    config = read_json(path / "config.json")
    tuned = None if weights is None else open_weights(weights)
    whole = tuned if tuned is not None and _has_text(tuned) else open_weights(path)
    with building(path):
        network = transformers_network(path, config, CLIPS, whole)
    family = Family(_image)
    if config.get("model_type") == CLIP:
        family = Family(_image, _text, HuggingFaceTokens(path, network.config.text_config))
    _fill(network, whole, path, tuned)
    model_config, _ = transformers_config(config)
    if isinstance(weights, str | Path):
        name = f"{name}:{Path(weights).name}"
    encoder = Encoder(name, network.float(), family, fitting_pixels(path, network), model_config)
    encoder.home = path
    return encoder


def _has_text(source: WeightSource) -> bool:
    return any("text_model" in key for key in source.tensors)


def _fill(network: Any, whole: WeightSource, path: Path, tuned: WeightSource | None) -> None:
    """Fill in a complete model, then, if ``tuned`` is only an image encoder, that one over it."""
    if tuned is None:
        _require_projection(network, whole, path)
        fill(network, whole)
        return
    activation = transformers_config(network.config.to_dict())[0].activation
    if tuned.info.config.activation not in (None, activation):
        raise InputError(
            "CKPT-ACTIVATION",
            f"'{tuned.label}' was trained with another activation than '{printable(path)}'",
            expected=activation,
            found=tuned.info.config.activation,
            fix="choose weights that were tuned from this model",
        )
    fill(network, whole)
    if whole is not tuned:  # only an image encoder: the rest stays the base's
        fill(
            network, tuned, optional=("text_model.", "text_projection.", "logit_scale", "visual_projection.")
        )


def _require_projection(network: Any, source: WeightSource, path: Path) -> None:
    if not any(key.endswith("visual_projection.weight") for key in source.tensors):
        raise InputError(
            "CKPT-KEYS",
            f"'{printable(path)}' holds an image encoder without its projection",
            missing="visual_projection.weight",
            likely="a fine-tuned CLIPVisionModel, to be used with the CLIP it was tuned from",
            fix=f"load_model(BASE, weights='{printable(path)}'), or make a task vector of it",
        )


def _image(network: Any, images: Tensor) -> Tensor:
    features: Tensor = network.visual_projection(network.vision_model(pixel_values=images).pooler_output)
    return features


def _text(network: Any, ids: Tensor) -> Tensor:
    features: Tensor = network.text_projection(network.text_model(input_ids=ids).pooler_output)
    return features


def fitting_pixels(path: Path, network: Any) -> Pixels:
    """Return the preprocessing of a directory; raises if the network does not accept images of that size."""
    config = getattr(network.config, "vision_config", network.config)
    built_for = _side(getattr(config, "image_size", None))
    pixels = processor_pixels(path, built_for or 224)
    require_input_size(path, getattr(network, "vision_model", network), pixels.size, built_for)
    return pixels


def processor_pixels(path: Path, size: int) -> Pixels:
    """Return the settings of the image processor in a directory; ``size`` is the network's own."""
    processor = _processor(path)
    _require_standard(path, processor)
    resized, cropped = processor.get("size"), processor.get("crop_size")
    both = isinstance(resized, dict) and "height" in resized
    short = _side(resized) or size
    crops = bool(processor.get("do_center_crop", cropped is not None or not processor))
    share = processor.get("crop_pct")
    if isinstance(share, float) and not crops:  # ConvNeXT's rule, which ResNets have, too
        size, margin, squash = short, share if short < 384 else 1.0, short >= 384
    elif crops:
        size = _side(cropped) or size
        # a little more, so that dividing again gives the whole number
        margin, squash = 1.0 if short == size else size / (short + 0.01), both
    else:
        size, margin, squash = short, 1.0, both or isinstance(resized, int)
    pixels = Pixels(
        size,
        three(processor.get("image_mean")) or CLIP_MEAN,
        three(processor.get("image_std")) or CLIP_STD,
        "bilinear" if processor.get("resample") == 2 else "bicubic",
        "squash" if squash else "shortest",
        margin,
    )
    return bounded(path, pixels)


def processor_settings(pixels: Pixels) -> JsonObject:
    """Return preprocessing as a preprocessor_config.json, which ``processor_pixels`` reads back."""
    side = int(pixels.size / pixels.margin)
    size: JsonObject = {"shortest_edge": side}
    if pixels.resize == "squash":
        size = {"height": side, "width": side}
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": size,
        "resample": 2 if pixels.interpolation == "bilinear" else 3,
        "do_center_crop": True,
        "crop_size": {"height": pixels.size, "width": pixels.size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(pixels.mean),
        "image_std": list(pixels.std),
    }


def bounded(where: object, pixels: Pixels) -> Pixels:
    """Return the preprocessing of a file; raises if images would be absurdly large."""
    wide = pixels.size / pixels.margin if pixels.margin > 0 else math.inf
    values = (*pixels.mean, *pixels.std)
    sizes = 0 < pixels.size <= _WIDEST and wide <= _WIDEST
    if not sizes or not all(map(math.isfinite, values)) or not all(pixels.std):
        raise InputError(
            "DIR-CONFIG",
            f"'{printable(where)}' prepares images in a way that is not supported",
            found=printable(f"size {pixels.size}, margin {pixels.margin}, std {pixels.std}"),
            expected=f"at most {_WIDEST} pixels on a side, and finite values to normalise with",
            fix="use the model's own library for its images",
        )
    return pixels


def _require_standard(path: Path, processor: JsonObject) -> None:
    """Raise for preprocessing steps that aniso does not have; skipping them would change every image."""
    standard: dict[str, tuple[object, ...]] = {
        **{f"do_{step}": (None, True) for step in ("resize", "rescale", "normalize")},
        "do_flip_channel_order": (None, False),
        "resample": (None, 2, 3),
    }
    odd = [
        f"{name} = {processor[name]}"
        for name, values in standard.items()
        if processor.get(name) not in values
    ]
    factor = processor.get("rescale_factor")
    if isinstance(factor, float) and abs(factor * 255 - 1) > 1e-3:
        odd.append(f"rescale_factor = {factor}")
    if odd:
        raise InputError(
            "DIR-CONFIG",
            f"'{printable(path)}' prepares images in a way that is not supported",
            found=[printable(line) for line in odd],
            expected="resized (bilinear or bicubic), divided by 255, normalised; red, green, blue",
            fix="use the model's own library for its images",
        )


def _processor(path: Path) -> JsonObject:
    """Read the image processor's file, or, from transformers 5 on, its part of the processor's file."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (path / name).is_file():
            fields = read_json(path / name)
            return as_object(fields.get("image_processor")) or fields
    return {}


def _side(value: object) -> int | None:
    """Return the side of a square, written as a number or under one of several names."""
    if isinstance(value, dict):
        value = next((value[name] for name in ("shortest_edge", "height") if name in value), None)
    return value if isinstance(value, int) and value > 0 else None


def three(values: object) -> tuple[float, float, float] | None:
    """Return three floats, one per colour channel, or None if the value is something else."""
    if (
        isinstance(values, list | tuple)
        and len(values) == 3
        and all(isinstance(v, int | float) for v in values)
    ):
        return float(values[0]), float(values[1]), float(values[2])
    return None


@final
class HuggingFaceTokens(LateTokenizer):
    """A CLIP tokenizer from a directory; a missing one raises an error."""

    def __init__(self, path: Path, text_config: Any) -> None:
        self._path = path
        self._size = int(text_config.vocab_size)
        self._length = int(text_config.max_position_embeddings)

    def _read(self) -> TokenizerFile:
        present = [n for n in ("tokenizer.json", "vocab.json", "merges.txt") if (self._path / n).is_file()]
        if "tokenizer.json" in present or {"vocab.json", "merges.txt"} <= set(present):
            try:
                tokenizer = TokenizerFile.read_clip(self._path, self._size)
            except TokenizerError as e:
                present.append(f"damaged ({printable(e)})")
            else:
                if len(tokenizer) == self._size and tokenizer.pad_token_id is not None:
                    return tokenizer
                present.append(f"{len(tokenizer)} tokens")
        raise InputError(
            "MODEL-TOKENIZER",
            f"'{printable(self._path)}' has no tokenizer that fits its text tower",
            expected=f"tokenizer.json, or vocab.json and merges.txt, with {self._size} tokens",
            found=", ".join(present) or "none",
            fix="download the whole repository: hf download OWNER/NAME",
        )

    @property
    def fingerprint(self) -> str:
        text = backend_text(self._tokenizer.backend)
        return hashlib.sha256(f"{self._length}\n{text}".encode()).hexdigest()

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, list[int]]:
        tokenizer: tuple[Tensor, list[int]] = self._tokenizer.batch(texts, self._length)
        return tokenizer
