"""Configuration files for converted CLIP models; most values follow from the shapes of the tensors."""

from __future__ import annotations

from dataclasses import dataclass

from aniso.errors import UsageError
from aniso.json_value import JsonObject
from aniso.vectors.block_source import ACTIVATIONS, agreed_activation
from aniso.vectors.naming import OPEN_CLIP, TEXT, VISION, expanded, layers_of, recognise
from aniso.weights import WeightSource


@dataclass(frozen=True)
class _VisionTower:
    width: int
    patch: int
    image: int
    layers: int
    mlp: int
    embed: int
    heads: int


@dataclass(frozen=True)
class _TextTower:
    width: int
    vocabulary: int
    context: int
    layers: int
    mlp: int
    heads: int


def clip_sizes(source: WeightSource) -> tuple[int, int, int]:
    """Return the sizes of a complete CLIP: images in pixels, the vocabulary, and texts in tokens."""
    vision, text, _ = _towers(source)
    return vision.image, text.vocabulary, text.context


def clip_config(source: WeightSource, to: str, activation: str | None) -> tuple[JsonObject, list[str]]:
    """Return the configuration that ``huggingface`` or ``open_clip`` needs, and notes on assumed values."""
    agreed = agreed_activation(source, activation)
    if agreed not in ACTIVATIONS:
        raise UsageError(
            "CKPT-ACTIVATION",
            f"'{source.label}' does not say which of the two activations it was trained with",
            found=agreed,
            expected="quick_gelu (OpenAI's weights) or gelu",
            fix="add --activation quick_gelu or --activation gelu",
        )
    vision, text, notes = _towers(source)
    config = _hugging_face_config if to == "huggingface" else _open_clip_config
    return config(vision, text, str(agreed)), notes


def _towers(source: WeightSource) -> tuple[_VisionTower, _TextTower, list[str]]:
    """The sizes of both towers of a complete model."""
    names = recognise(source.tensors)
    shapes = {name: source.tensors[key].shape for name, key in names.keys.items()}
    is_open_clip = names.scheme == OPEN_CLIP
    rules = {
        rule.open_clip: rule for rules in (VISION, TEXT) for rule in expanded(rules, layers_of(rules, shapes))
    }

    def shape(name: str) -> tuple[int, ...]:
        rule = rules[name]
        stored = shapes[rule.open_clip if is_open_clip else rule.hugging_face[0]]
        return stored[::-1] if rule.transposed and not is_open_clip else stored

    notes: list[str] = []

    def heads(tower: str, named: int | None, width: int) -> int:
        if named is not None:
            return named
        assumed = max(1, width // 64)
        notes.append(f"{tower} tower: {assumed} attention heads, by CLIP's rule of width / 64")
        return assumed

    named = source.info.config.heads
    conv = shape("visual.conv1.weight")
    positions = shape("visual.positional_embedding")[0] - 1
    vision = _VisionTower(
        width=conv[0],
        patch=conv[2],
        image=conv[2] * round(positions**0.5),
        layers=layers_of(VISION, shapes),
        mlp=shape("visual.transformer.resblocks.0.mlp.c_fc.weight")[0],
        embed=shape("visual.proj")[1],
        heads=heads("vision", named[0], conv[0]),
    )
    vocabulary, width = shape("token_embedding.weight")
    text = _TextTower(
        width=width,
        vocabulary=vocabulary,
        context=shape("positional_embedding")[0],
        layers=layers_of(TEXT, shapes),
        mlp=shape("transformer.resblocks.0.mlp.c_fc.weight")[0],
        heads=heads("text", named[1], width),
    )
    return vision, text, notes


def _hugging_face_config(vision: _VisionTower, text: _TextTower, activation: str) -> JsonObject:
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": vision.embed,
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_act": activation,
            "hidden_size": vision.width,
            "intermediate_size": vision.mlp,
            "num_hidden_layers": vision.layers,
            "num_attention_heads": vision.heads,
            "image_size": vision.image,
            "patch_size": vision.patch,
            "projection_dim": vision.embed,
        },
        "text_config": {
            "model_type": "clip_text_model",
            "hidden_act": activation,
            "hidden_size": text.width,
            "intermediate_size": text.mlp,
            "num_hidden_layers": text.layers,
            "num_attention_heads": text.heads,
            "max_position_embeddings": text.context,
            "vocab_size": text.vocabulary,
            "projection_dim": vision.embed,
            # CLIP's tokenizers end with the tokens for the beginning and the end of a text
            "bos_token_id": text.vocabulary - 2,
            # 2 makes transformers pool the token with the largest id, as open_clip does
            "eos_token_id": 2,
        },
    }


def _open_clip_config(vision: _VisionTower, text: _TextTower, activation: str) -> JsonObject:
    return {
        "model_cfg": {
            "embed_dim": vision.embed,
            "quick_gelu": activation == "quick_gelu",
            "vision_cfg": {
                "image_size": vision.image,
                "layers": vision.layers,
                "width": vision.width,
                "head_width": vision.width // vision.heads,
                "mlp_ratio": vision.mlp / vision.width,
                "patch_size": vision.patch,
            },
            "text_cfg": {
                "context_length": text.context,
                "vocab_size": text.vocabulary,
                "width": text.width,
                "heads": text.heads,
                "layers": text.layers,
                "mlp_ratio": text.mlp / text.width,
            },
        },
        "preprocess_cfg": {
            "mean": [0.48145466, 0.4578275, 0.40821073],
            "std": [0.26862954, 0.26130258, 0.27577711],
        },
    }
