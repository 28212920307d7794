"""Load an encoder by name, from a directory or from the hub."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path

from aniso.errors import InputError, UsageError, printable
from aniso.models import classifier, dual_encoder, hugging_face, open_clip, sentence_encoder
from aniso.models.encoder import Encoder
from aniso.models.loading import require_activation
from aniso.weights import Ref, WeightSource, open_weights
from aniso.weights.directory import read_json
from aniso.weights.hub import fetch, looks_like_hub_id

MINI = "mini"
TIMM = "timm:"


def load_model(name: str | Path, weights: Ref | None = None, *, activation: str | None = None) -> Encoder:
    """Return an encoder of images or texts, with its class weights, views, layout and fingerprint.

    ``name`` is an open_clip architecture (``ViT-B-32`` with ``weights="openai"``), a directory or hub id of a
    CLIP, an image classifier, a sentence encoder or a dual encoder, ``timm:NAME``, or ``mini``, the small
    model that comes along. ``weights`` is a tag, a file, a directory or a hub id; without it, those of the
    directory.
    Everything is read as data; no code from a model's repository is ever run::

        model = load_model("ViT-B-32", weights="openai")
        model = load_model("sentence-transformers/all-MiniLM-L6-v2")
    """
    require_activation(activation)
    text = str(name)
    if not text:
        raise UsageError("MODEL-NAME", "the model has no name", fix="for example mini, or ViT-B-32")
    if text == MINI:
        return hugging_face.load(mini_directory(), MINI, weights)
    path = path_of(text)
    if path.is_dir():
        return _directory(path, path.resolve().name, weights, activation)
    if text.startswith(TIMM):
        return classifier.load_timm(text.removeprefix(TIMM), weights, text)
    if open_clip.is_name(text):
        return open_clip.load(text, weights, activation)
    if path.is_file():
        raise UsageError(
            "MODEL-NAME",
            f"'{printable(text)}' is a file of weights without an architecture",
            fix=f"load_model('ViT-B-32', weights='{printable(text)}')",
        )
    open_clip.require_for(text)
    if looks_like_hub_id(text):
        return _directory(fetch(text).path, text, weights, activation)
    near = open_clip.close_names(text)
    raise InputError(
        "MODEL-NAME",
        f"there is no model '{printable(text)}'",
        expected="an open_clip name, a directory, a hub id owner/name, timm:NAME, or mini",
        likely=f"you meant {' or '.join(near)}" if near else "",
        fix=f"{near[0]}" if near else "aniso doctor",
    )


def load_composed(base: str, weights: Ref) -> Encoder:
    """Return the encoder of a base with other weights; ``base`` may be NAME:TAG of open_clip's."""
    name, colon, _ = base.partition(":")
    by_tag = colon and not Path(base).exists() and open_clip.is_name(name)
    return load_model(name if by_tag else base, weights)


def path_of(text: str) -> Path:
    try:
        path = Path(text).expanduser()
        path.exists()
    except (OSError, RuntimeError) as e:  # too long, or ~user without a home
        raise InputError(
            "MODEL-NAME",
            f"there is no model '{printable(text)}'",
            reason=getattr(e, "strerror", None) or printable(e),
            expected="an open_clip name, a directory, a hub id owner/name, timm:NAME, or mini",
            fix="aniso doctor",
        ) from None
    return path


def mini_directory() -> Path:
    """Return the directory of the bundled small model."""
    return Path(str(resources.files("aniso.models") / MINI))


def base_weights(name: str) -> Ref:
    """Return the weights of a base: a path, mini, or open_clip's NAME:TAG such as ViT-B-32:openai."""
    if Path(name).exists():
        return name
    architecture, colon, tag = name.partition(":")
    if colon and open_clip.is_name(architecture):
        return load_model(architecture, tag)
    return str(mini_directory()) if name == MINI else name


def base_source(model: str, weights: str | None = None) -> WeightSource:
    """Return the weights of a base with its model's configuration and directory.

    ``model`` is a path, a hub id, mini, or a name of open_clip's, whose ``weights`` may be a tag; NAME:TAG
    is both in one. Other ``weights`` are a file, a directory or a hub id, in place of those of the model.
    """
    if model.startswith(TIMM):
        return open_weights(load_model(model, weights))
    if weights is None:
        return open_weights(base_weights(model))
    if not (Path(model).exists() or model == MINI or looks_like_hub_id(model)):
        return open_weights(load_model(model, weights))
    own, source = open_weights(base_weights(model)), open_weights(weights)
    source.info = replace(source.info, config=own.info.config, home=own.info.home)
    return source


def list_models() -> tuple[str, ...]:
    """Return the names that ``load_model`` takes: ``mini``, and open_clip's architectures if installed."""
    return (MINI, *open_clip.names())


def _directory(path: Path, name: str, weights: Ref | None, activation: str | None) -> Encoder:
    if (path / "open_clip_config.json").is_file():
        return open_clip.load_directory(path, name, weights, activation)
    if sentence_encoder.recognises(path):
        return sentence_encoder.load_directory(path, name, weights)
    if not (path / "config.json").is_file():
        raise InputError(
            "MODEL-NAME",
            f"'{printable(path)}' has no configuration file, so its architecture is unknown",
            expected="config.json or open_clip_config.json",
            fix=f"load_model('ViT-B-32', weights='{printable(path)}')",
        )
    kind = read_json(path / "config.json").get("model_type")
    if kind == dual_encoder.MODEL_TYPE:
        return dual_encoder.load_directory(path, name, weights)
    if kind not in (hugging_face.CLIP, hugging_face.CLIP_VISION):
        return classifier.load_directory(path, name, weights)
    encoder = hugging_face.load(path, name, weights)
    if activation and encoder.model_config.activation not in (None, activation):
        raise InputError(
            "CKPT-ACTIVATION",
            f"'{printable(name)}' has a different activation",
            expected=encoder.model_config.activation,
            found=activation,
            fix="leave the activation out",
        )
    return encoder
