"""CLIP as Hugging Face's transformers have it: a directory with config.json."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from torch import Tensor

from aniso.errors import InputError, printable
from aniso.models.encoder import Encoder, Family
from aniso.models.loading import fill, needs
from aniso.models.transforms import CLIP_MEAN, CLIP_STD, Pixels
from aniso.weights import Ref, WeightSource, open_weights
from aniso.weights.directory import read_json, transformers_config

CLIP, CLIP_VISION = "clip", "clip_vision_model"


def load(path: Path, name: str, weights: Ref | None = None) -> Encoder:
    """The encoder in a directory; ``weights`` from elsewhere replace its own, as far as they go."""
    try:
        from transformers import CLIPConfig, CLIPModel, CLIPVisionConfig, CLIPVisionModelWithProjection
    except ImportError:
        raise needs("hf", "transformers") from None
    said = read_json(path / "config.json")
    config, _ = transformers_config(said)
    network: Any
    if said.get("model_type") == CLIP_VISION:
        network = CLIPVisionModelWithProjection(CLIPVisionConfig.from_dict(said))
        family = Family(_image)
    else:
        network = CLIPModel(CLIPConfig.from_dict(said))
        family = Family(_image, _text, HuggingFaceTokens(path, network.config.text_config))
    _filled(network, open_weights(path) if weights is None else None, path, weights)
    return Encoder(name, network.float(), family, pixels_of(path, network), config)


def _filled(network: Any, own: WeightSource | None, path: Path, weights: Ref | None) -> None:
    if own is not None:
        fill(network, own)
        return
    assert weights is not None
    tuned = open_weights(weights)
    if not any("text_model" in key for key in tuned.tensors) and hasattr(network, "text_model"):
        fill(network, open_weights(path))  # an image encoder alone: text stays the base's
    fill(network, tuned, optional=("text_model.", "text_projection.", "logit_scale"))


def _image(network: Any, images: Tensor) -> Tensor:
    features: Tensor = network.visual_projection(network.vision_model(pixel_values=images).pooler_output)
    return features


def _text(network: Any, ids: Tensor) -> Tensor:
    features: Tensor = network.text_projection(network.text_model(input_ids=ids).pooler_output)
    return features


def pixels_of(path: Path, network: Any) -> Pixels:
    """What preprocessor_config.json says, and CLIP's usual values for what it does not."""
    file = path / "preprocessor_config.json"
    said = read_json(file) if file.is_file() else {}
    config = getattr(network.config, "vision_config", network.config)
    size = int(getattr(config, "image_size", 224) or 224)
    mean, std = (said.get(f"image_{what}") for what in ("mean", "std"))
    return Pixels(
        size,
        _three(mean) or CLIP_MEAN,
        _three(std) or CLIP_STD,
        "bilinear" if said.get("resample") == 2 else "bicubic",
        "shortest" if said.get("do_center_crop", True) else "squash",
    )


def _three(values: object) -> tuple[float, float, float] | None:
    if isinstance(values, list) and len(values) == 3 and all(isinstance(v, int | float) for v in values):
        return float(values[0]), float(values[1]), float(values[2])
    return None


@final
class HuggingFaceTokens:
    """A CLIP tokenizer from a directory. One that is not there must not become an empty one."""

    def __init__(self, path: Path, text_config: Any) -> None:
        self._path = path
        self._size = int(text_config.vocab_size)
        self._length = int(text_config.max_position_embeddings)
        self._loaded: Any = None

    @property
    def _tokenizer(self) -> Any:
        """Read when first used: an encoder that is never asked for text needs no tokenizer."""
        if self._loaded is None:
            self._loaded = self._read()
        return self._loaded

    def _read(self) -> Any:
        from transformers import CLIPTokenizer

        present = [n for n in ("tokenizer.json", "vocab.json", "merges.txt") if (self._path / n).is_file()]
        if "tokenizer.json" in present or {"vocab.json", "merges.txt"} <= set(present):
            made = CLIPTokenizer.from_pretrained(str(self._path), local_files_only=True)
            if len(made) == self._size:
                return made
            present.append(f"{len(made)} tokens")
        raise InputError(
            "MODEL-TOKENIZER",
            f"'{printable(self._path)}' has no tokenizer that fits its text tower",
            expected=f"tokenizer.json, or vocab.json and merges.txt, with {self._size} tokens",
            found=", ".join(present) or "none",
            fix="download the whole repository: hf download OWNER/NAME",
        )

    @property
    def fingerprint(self) -> str:
        text = self._tokenizer.backend_tokenizer.to_str()
        return hashlib.sha256(f"{self._length}\n{text}".encode()).hexdigest()

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, list[int]]:
        made = self._tokenizer(
            list(texts), padding="longest", truncation=True, max_length=self._length, return_tensors="pt"
        )
        ids: Tensor = made["input_ids"]
        cut = []
        if ids.shape[1] == self._length:  # only then may a text have been too long
            lengths = [len(row) for row in self._tokenizer(list(texts), truncation=False)["input_ids"]]
            cut = [i for i, length in enumerate(lengths) if length > self._length]
        return ids, cut

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": None}
