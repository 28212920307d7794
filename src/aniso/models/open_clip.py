"""CLIP models of open_clip: by name and tag, or a directory with open_clip_config.json."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aniso.errors import InputError, UnsafeError, UsageError, printable
from aniso.json_value import JsonObject, as_object
from aniso.models.encoder import Encoder, Family
from aniso.models.hugging_face import bounded, three
from aniso.models.loading import building, built, fill, needs, require_activation
from aniso.models.open_clip_tokens import OpenClipTokens
from aniso.models.settings import Limits, Settings
from aniso.models.transforms import CLIP_MEAN, CLIP_STD, Pixels
from aniso.weights import Ref, WeightSource, open_weights
from aniso.weights.directory import open_clip_config, read_json
from aniso.weights.hub import fetch, is_offline, looks_like_hub_id

QUICK = "-quickgelu"
_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")


def is_name(name: str) -> bool:
    """True if open_clip has an architecture of that name; a slash may stand for a dash."""
    library = _library(required=False)
    return library is not None and clean(name) in library.list_models()


def names() -> list[str]:
    """Return the names of open_clip's architectures; none if it is not installed."""
    library = _library(required=False)
    return list(library.list_models()) if library is not None else []


def require_for(name: str) -> None:
    """Raise if the name looks like one of open_clip's and open_clip is not installed."""
    if _library(required=False) is None and re.fullmatch(r"(ViT-|RN\d)[\w/-]+|[\w-]+", name):
        raise needs("openclip", "open_clip")


def clean(name: str) -> str:
    return name.replace("/", "-")


def close_names(name: str) -> list[str]:
    library = _library(required=False)
    return difflib.get_close_matches(clean(name), library.list_models(), 3) if library else []


def load(name: str, weights: Ref | None, activation: str | None = None) -> Encoder:
    """Load an architecture by name, with weights from a tag (``openai``), a file, a directory or a hub id."""
    library = _library()
    architecture = clean(name)
    config = library.get_model_config(architecture)
    tag = library.get_pretrained_cfg(architecture, str(weights)) if isinstance(weights, str) else {}
    if not tag and isinstance(weights, str) and not _is_place(weights):
        raise _no_tag(library, architecture, weights)
    if weights is None:
        raise _no_tag(library, architecture, None)
    source = _open_tag(architecture, str(weights), tag) if tag else _opened(weights)
    require_activation(activation)
    quick = bool(config.get("quick_gelu", False))
    quick = _agreed(architecture, weights, quick, tag, source, activation)
    return _build(f"{architecture}:{_short(weights)}", {**config, "quick_gelu": quick}, source, tag)


def load_directory(
    path: Path, name: str, weights: Ref | None = None, activation: str | None = None
) -> Encoder:
    """Load a directory as open_clip pushes it to the hub; its configuration names the activation."""
    _library()
    file = read_json(path / "open_clip_config.json")
    config: Any = file.get("model_cfg", file)
    with building(path):
        config = {**config, "vision_cfg": dict(config["vision_cfg"]), "text_cfg": dict(config["text_cfg"])}
    source = _opened(path if weights is None else weights)
    own = _name(bool(config.get("quick_gelu")))
    require_activation(activation)
    if activation and activation != own:
        raise _mismatch(name, own, activation, "the directory's configuration")
    if weights is not None:
        _agreed(name, weights, own == "quick_gelu", {}, source, activation)
    with building(path):
        config = _plain_config(path, config, source)
    preprocess = file.get("preprocess_cfg")
    return _build(name, config, source, preprocess if isinstance(preprocess, dict) else {}, path)


def _plain_config(path: Path, config: Mapping[str, Any], source: WeightSource) -> JsonObject:
    """Return the configuration without references to anything outside of the directory.

    The name of a tokenizer is kept for messages only: its files must be in the directory.
    """
    text = dict(config["text_cfg"])
    tokenizer = text.pop("hf_tokenizer_name", None)
    if text.get("hf_model_name") is not None:
        raise _needs_another(path, text["hf_model_name"])
    settings = Settings(printable(path / "open_clip_config.json"), Limits.of(source))
    plain = settings.plain({**config, "text_cfg": text})
    if tokenizer:
        plain["text_cfg"] = {**as_object(plain["text_cfg"]), "hf_tokenizer_name": str(tokenizer)}
    return plain


def _needs_another(path: Path, tower: object) -> UnsafeError:
    """Return the error for a text tower whose configuration is in another repository."""
    library = _library()
    configs = {name: library.get_model_config(name) or {} for name in library.list_models()}
    same = [name for name in configs if configs[name].get("text_cfg", {}).get("hf_model_name") == tower]
    return UnsafeError(
        "DIR-CONFIG",
        f"'{printable(path / 'open_clip_config.json')}' asks for a text tower from another repository, "
        "and a directory never makes aniso fetch one",
        key="text_cfg.hf_model_name",
        found=printable(tower),
        expected="a text tower that the configuration itself describes",
        fix=f"load_model('{same[0] if same else 'ARCHITECTURE'}', weights='{printable(path)}')",
    )


def _build(
    name: str,
    config: Mapping[str, Any],
    source: WeightSource,
    preprocess: Mapping[str, Any],
    home: Path | None = None,
) -> Encoder:
    """Build a model and load its weights; ``home`` is its directory, None for open_clip's own list."""
    with building(name):
        network = built(source, lambda: _network(config))
    if not any(not key.startswith("visual.") for key in source.tensors):
        raise InputError(
            "CKPT-KEYS",
            f"'{source.label}' holds an image encoder without its text tower",
            fix="load the base, and make a task vector of this file: aniso vector make",
        )
    fill(network, source)
    size = network.visual.image_size
    encoder = Encoder(
        name,
        network.float(),
        Family(_image, _text, OpenClipTokens(config, home)),
        preprocess_pixels(name, int(size[0] if isinstance(size, tuple | list) else size), preprocess),
        open_clip_config({"model_cfg": dict(config)}),
    )
    encoder.home = home
    return encoder


def _network(config: Mapping[str, Any]) -> Any:
    """Build the architecture with random weights; nothing is downloaded."""
    from open_clip.model import CLIP, CustomTextCLIP

    settings = {k: v for k, v in config.items() if k not in ("custom_text", "multimodal_cfg")}
    settings["vision_cfg"] = {**settings["vision_cfg"], "timm_model_pretrained": False}
    if "timm_model_name" not in settings["vision_cfg"]:
        settings["vision_cfg"].pop("timm_model_pretrained")
    _require_known_towers(settings["vision_cfg"], settings["text_cfg"])
    if "hf_model_name" in settings["text_cfg"]:
        settings["text_cfg"] = {**settings["text_cfg"], "hf_model_pretrained": False}
    if "multimodal_cfg" in config:
        raise UsageError(
            "MODEL-NAME", "captioning models (CoCa) are not supported", fix="choose a CLIP: aniso doctor"
        )
    custom = config.get("custom_text") or "hf_model_name" in settings["text_cfg"]
    return CustomTextCLIP(**settings) if custom else CLIP(**settings)


def _require_known_towers(vision: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    """Raise for names that open_clip passes on to other libraries unchecked.

    timm would read any directory, and transformers would ask whether to run code.
    """
    name = vision.get("timm_model_name")
    if isinstance(name, str) and ":" in name:  # hf-hub:..., local-dir:...
        raise _foreign("timm_model_name", name, "an architecture of timm's")
    name = text.get("hf_model_name")
    if name is not None:
        from open_clip.hf_configs import arch_dict
        from transformers import PretrainedConfig

        if not isinstance(name, str) or not re.fullmatch(r"([\w.-]+/)?[\w-][\w.-]*", name) or _place(name):
            raise _foreign("hf_model_name", name, "a hub id, and no directory")
        config: Any = PretrainedConfig.get_config_dict(name, local_files_only=is_offline())[0]  # JSON alone
        kind = config.get("model_type")
        if kind not in arch_dict:  # others could name models in turn, or make transformers ask to run code
            raise _foreign("hf_model_name", f"{name} ({kind})", f"one of {', '.join(arch_dict)}")


def _foreign(key: str, found: object, expected: str) -> UnsafeError:
    return UnsafeError(
        "DIR-CONFIG",
        f"{key} names a model from elsewhere, which might run its own code",
        found=printable(found),
        expected=expected,
        fix="use a model whose configuration names known architectures",
    )


def _opened(weights: Ref) -> WeightSource:
    """Open weights; in a directory with files of several libraries, open_clip's."""
    path = _place(weights) if isinstance(weights, str | Path) else None
    if path is None and isinstance(weights, str) and looks_like_hub_id(weights):
        path = fetch(str(weights)).path
    own = next((path / file for file in _FILES if (path / file).is_file()), None) if path else None
    source = open_weights(weights if own is None else own)
    if own is not None and (own.parent / "open_clip_config.json").is_file():
        config = open_clip_config(read_json(own.parent / "open_clip_config.json"))
        source.info = replace(source.info, config=config)
    return source


def _open_tag(architecture: str, tag: str, config: Mapping[str, Any]) -> WeightSource:
    """Open the weights of a tag from the hub, whose files are data; never the pickled originals."""
    repository = str(config.get("hf_hub", "")).rstrip("/")
    if not repository:
        raise InputError(
            "MODEL-WEIGHTS",
            f"{architecture} with tag '{tag}' exists only as a file at {printable(config.get('url', '?'))}",
            fix=f"download it, aniso convert it, and use weights=FILE with {architecture}",
        )
    owner, name, *_ = repository.split("/")
    try:
        return _opened(f"{owner}/{name}")
    except InputError as e:
        if e.code not in ("HUB-OFFLINE", "HUB-FETCH"):
            raise
        raise InputError(
            "MODEL-WEIGHTS",
            f"the weights of {architecture}, tag '{tag}', are not on this machine and could not be fetched",
            reason=e.message,
            fix=f"hf download {owner}/{name}      (on a machine with a connection; then copy its cache)",
        ) from None


# activation


def _agreed(
    architecture: str,
    weights: Ref,
    quick: bool,
    tag: Mapping[str, Any],
    source: WeightSource,
    activation: str | None,
) -> bool:
    """True if the model is built with QuickGELU. A tag decides for a plain name; contradictions raise."""
    if tag:
        trained = bool(tag.get("quick_gelu", False))
        if quick and not trained:
            raise _mismatch(architecture, "gelu", "quick_gelu", f"the tag '{weights}'")
        if activation and activation != _name(trained):
            raise _mismatch(architecture, _name(trained), activation, f"the tag '{weights}'")
        return trained
    wanted = activation or _name(quick)
    named = source.info.config.activation
    if named and named != wanted:
        raise _mismatch(architecture, named, wanted, f"'{source.label}'")
    if not activation and not named and wanted == "gelu" and looks_like_openai(source):
        error = _mismatch(architecture, "quick_gelu", "gelu", f"'{source.label}' looks as if it")
        error.likely = "OpenAI's weights, or tuned from them: values in 16 bits and a logit scale of 100"
        error.fix += "; activation='gelu' if they are not OpenAI's"
        raise error
    return wanted == "quick_gelu"


def looks_like_openai(source: WeightSource) -> bool:
    """True if values fit 16 bits and the logit scale is 100, as in any copy of OpenAI's weights."""
    scale = next((key for key in source.tensors if key.endswith("logit_scale")), None)
    # the text tower's, which fine-tuning does not change
    weights = [key for key in source.tensors if key.endswith("in_proj_weight")]
    weight = min(weights, key=lambda key: "visual." in key, default=None)
    if scale is None or weight is None:
        return False
    hundred = abs(float(source.read(scale).float()) - math.log(100)) < 1e-3
    values = source.read(weight).float()
    return hundred and bool((values.to(torch.float16).float() == values).all())


def _name(quick: bool) -> str:
    return "quick_gelu" if quick else "gelu"


def _mismatch(architecture: str, expected: str, found: str, whose: str) -> InputError:
    plain = architecture.removesuffix(QUICK)
    return InputError(
        "CKPT-ACTIVATION",
        f"{architecture} would run with {found}, but {whose} was trained with {expected}",
        expected=expected,
        found=found,
        fix=f"use {plain + QUICK if expected == 'quick_gelu' else plain}, or pass activation='{expected}'",
    )


# features, preprocessing, paths


def _image(network: Any, images: Tensor) -> Tensor:
    out: Any = network.visual(images)
    features: Tensor = out[0] if isinstance(out, tuple) else out
    return features


def _text(network: Any, ids: Tensor) -> Tensor:
    features: Tensor = network.encode_text(ids)
    return features


def preprocess_pixels(name: object, size: int, config: Mapping[str, Any]) -> Pixels:
    """Return the settings of a ``preprocess_cfg``; ``size`` is the network's own."""
    pixels = Pixels(
        size,
        three(config.get("mean")) or CLIP_MEAN,
        three(config.get("std")) or CLIP_STD,
        "bilinear" if config.get("interpolation") == "bilinear" else "bicubic",
        "squash" if config.get("resize_mode") == "squash" else "shortest",
    )
    return bounded(name, pixels)


def _library(required: bool = True) -> Any:
    try:
        import open_clip
    except ImportError:
        if required:
            raise needs("openclip", "open_clip") from None
        return None
    return open_clip


def _is_place(weights: str) -> bool:
    return _place(weights) is not None or looks_like_hub_id(weights) or "/" in weights or "." in weights


def _place(weights: str | Path) -> Path | None:
    try:
        path = Path(weights).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # too long, or ~user without a home
        return None


def _short(weights: Ref) -> str:
    return Path(weights).name if isinstance(weights, str | Path) else "weights"


def _no_tag(library: Any, architecture: str, tag: str | None) -> UsageError:
    known = library.list_pretrained_tags_by_model(architecture)
    said = (
        f"{architecture} has no weights '{printable(tag)}'"
        if tag
        else f"which weights should {architecture} have?"
    )
    return UsageError(
        "MODEL-WEIGHTS",
        said,
        expected=", ".join(known) or "a file or a directory",
        fix=f"weights='{known[0] if known else 'FILE'}'",
    )
