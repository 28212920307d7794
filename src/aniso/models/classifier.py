"""Image classifiers of transformers and timm: their features and their own head."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from aniso.errors import InputError, UnsafeError, UsageError, printable
from aniso.json_value import JsonObject
from aniso.models.architectures import IMAGE_CLASSIFIER
from aniso.models.encoder import Encoder, Family
from aniso.models.hugging_face import bounded, fitting_pixels
from aniso.models.input_size import require_input_size
from aniso.models.loading import building, built, fill, filled, needs, network_of
from aniso.models.settings import Limits, Settings
from aniso.models.transforms import Pixels
from aniso.weights import Ref, WeightSource, open_weights
from aniso.weights.directory import read_json, transformers_config


def load_directory(path: Path, name: str, weights: Ref | None = None) -> Encoder:
    """Load a transformers classifier (ViT, ResNet, ConvNeXt, ...), or one that timm pushed to the hub."""
    config = read_json(path / "config.json")
    if _is_timm(config):
        return _timm_directory(path, config, path if weights is None else weights, name)
    _require_library()
    IMAGE_CLASSIFIER.require(config.get("model_type"), path)
    source = open_weights(path if weights is None else weights)
    network: Any = filled(network_of(path, config, IMAGE_CLASSIFIER, source), source)
    _require_one_head(network)
    family = Family(features_before_head, own_head=_own_head, own_classes=_class_names(network.config))
    model_config, _ = transformers_config(config)
    encoder = Encoder(name, network.float(), family, fitting_pixels(path, network), model_config)
    encoder.home = path
    return encoder


def _class_names(config: Any) -> tuple[str, ...]:
    """Return the names of a classifier's classes, or their numbers where its file has no names."""
    if config.id2label is None:
        return tuple(str(i) for i in range(config.num_labels or 0))
    labels = {int(i): str(label) for i, label in config.id2label.items()}
    return tuple(labels[i] for i in sorted(labels))


def _is_timm(config: Mapping[str, Any]) -> bool:
    """True if a directory holds a timm model, as timm pushes it to the hub or as transformers wraps it."""
    return config.get("model_type") == "timm_wrapper" or (
        "architecture" in config and "model_type" not in config
    )


def _timm_directory(path: Path, config: JsonObject, weights: Ref, name: str) -> Encoder:
    """Load a timm model from a directory: a registered architecture with plain settings."""
    file, architecture = printable(path / "config.json"), str(config.get("architecture"))
    if set(architecture) & set("/:\\"):
        raise UnsafeError(
            "DIR-CONFIG",
            f"'{file}' names a model from elsewhere, which might run its own code",
            key="architecture",
            found=printable(architecture),
            expected="an architecture of timm's",
            fix="use a model whose configuration names known architectures",
        )
    _timm()
    source = open_weights(weights)
    settings = Settings(file, Limits.of(source))
    pixels = settings.plain(_some(config.get("pretrained_cfg"), _TIMM_PIXELS), "pretrained_cfg.")
    for part in ("pretrained_cfg", "model_args"):
        settings.require_no_reference(config.get(part), f"{part}.")
    settings.require_no_reference({key: config[key] for key in config if key not in _TIMM_PARTS}, "")
    with building(name):
        arguments = settings.plain(dict(cast(Any, config.get("model_args") or {})), "model_args.")
        arguments = {key: arguments[key] for key in arguments if key not in _TIMM_RUNTIME}
    classes = settings.value("num_classes", config.get("num_classes"))
    if classes is not None:
        arguments["num_classes"] = classes
    labels = config.get("label_names") or list(_some(config.get("id2label")).values())
    names = tuple(str(label) for label in labels) if isinstance(labels, list) else ()
    return _timm_encoder(architecture, source, name, arguments, pixels, names)


LABELS = ("num_classes", "label_names", "label_descriptions", "id2label", "label2id", "num_labels")
"""Keys of config.json that are about the head."""
_TIMM_PARTS = ("pretrained_cfg", "model_args", "label_names", "label_descriptions", "id2label", "label2id")
_TIMM_RUNTIME = ("device", "dtype", "scriptable", "exportable", "no_jit")  # where and how, not what
_TIMM_PIXELS = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode")


def _some(config: object, keys: Collection[str] | None = None) -> JsonObject:
    """Return the entries of an object with these keys; an empty one if the value is no object."""
    if not isinstance(config, dict):
        return {}
    return {key: config[key] for key in config if keys is None or key in keys}


def load_timm(architecture: str, weights: Ref | None, name: str) -> Encoder:
    """Load a timm classifier by its name, with weights from a file, a directory or a hub id."""
    _timm()
    if weights is None:
        raise UsageError(
            "MODEL-WEIGHTS", f"{architecture} needs weights", fix="weights='timm/NAME' or a file"
        )
    return _timm_encoder(architecture, open_weights(weights), name, {}, {}, ())


def _timm_encoder(
    architecture: str,
    source: WeightSource,
    name: str,
    arguments: Mapping[str, Any],
    pixels: Mapping[str, Any],
    classes: tuple[str, ...],
) -> Encoder:
    timm = _timm()
    if architecture not in timm.list_models():
        raise UsageError(
            "MODEL-NAME", f"timm has no model '{printable(architecture)}'", fix="timm.list_models()"
        )
    with building(name):
        settings = {"num_classes": _rows_of_head(source) or 1000, **arguments}
        timm_network = built(source, lambda: timm.create_model(architecture, pretrained=False, **settings))
        sizes = bounded(name, _timm_pixels(timm_network, pixels))
        default = _timm_pixels(timm_network, {}).size
        require_input_size(name, timm_network, sizes.size, default)
    network = (
        _Prefixed(timm_network) if any(key.startswith(_PREFIX) for key in source.tensors) else timm_network
    )
    fill(network, source)
    classes = classes or tuple(str(i) for i in range(timm_network.num_classes))
    _require_one_head(network)
    return Encoder(
        name, network.float(), Family(features_before_head, own_head=_own_head, own_classes=classes), sizes
    )


_PREFIX = "timm_model."


class _Prefixed(nn.Module):
    """A timm network under the names of transformers' timm wrapper."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.timm_model = network

    def forward(self, images: Tensor) -> Any:
        return self.timm_model(images)

    def get_classifier(self) -> Any:
        network: Any = self.timm_model
        return network.get_classifier()


def _timm() -> Any:
    try:
        import timm
    except ImportError:
        raise needs("openclip", "timm") from None
    return timm


def _require_library() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise needs("hf", "transformers") from None


def _rows_of_head(source: WeightSource) -> int | None:
    """Return the number of classes of the head in the weights, or None if they have none."""
    names = ("head.weight", "fc.weight", "classifier.weight", "head.fc.weight")
    keys = (*names, *(f"{_PREFIX}{name}" for name in names))
    shapes = [source.tensors[key].shape for key in keys if key in source.tensors]
    return next((shape[0] for shape in shapes if shape), None)


def _timm_pixels(network: Any, config: Any) -> Pixels:
    from timm.data.config import resolve_data_config

    data: Any = resolve_data_config(config, model=network)  # type: ignore[no-untyped-call]
    return Pixels(
        int(data["input_size"][-1]),
        tuple(data["mean"]),
        tuple(data["std"]),
        "bilinear" if data["interpolation"] == "bilinear" else "bicubic",
        "squash" if data.get("crop_mode") == "squash" else "shortest",
        float(data["crop_pct"]),
    )


def _last(network: Any) -> nn.Module:
    """Return the last layer of a classifier of either library."""
    if hasattr(network, "get_classifier"):
        last: nn.Module = network.get_classifier()
        return last
    return network.classifier if hasattr(network, "classifier") else network.head  # type: ignore[no-any-return]


def _require_one_head(network: Any) -> None:
    """Raise unless the classifier has one last layer, whose input are the features."""
    names = ("classifier", "head", "get_classifier")
    last = _last(network) if any(hasattr(network, name) for name in names) else None
    if not isinstance(last, nn.Module) or hasattr(network, "dist_head"):
        raise InputError(
            "MODEL-NAME",
            f"{type(network).__name__} has no head, or more than one",
            expected="a classifier with one head",
            fix="choose another model: those trained by distillation often come without it, too",
        )


def features_before_head(network: Any, images: Tensor) -> Tensor:
    """Return the input of the last layer, which are the features for every architecture, one row each."""
    return input_of_head(network, images).flatten(1)


def input_of_head(network: Any, images: Tensor) -> Tensor:
    """Return the input of the last layer, whatever its shape."""
    seen: list[Tensor] = []
    handle = _last(network).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        network(images)
    finally:
        handle.remove()
    return seen[0]


def remove_head(network: Any) -> None:
    """Replace the last layer of a classifier of either library by one that does nothing."""
    inner = getattr(network, "timm_model", network)
    if hasattr(inner, "reset_classifier"):
        inner.reset_classifier(0)
    elif hasattr(network, "classifier"):
        network.classifier = nn.Identity()
    else:
        network.head = nn.Identity()


def headless_network(path: Path, config: JsonObject, source: WeightSource) -> Any:
    """Build the network that config.json describes, without its head, with weights from ``source``."""
    if _is_timm(config):
        return _timm_directory(path, {**config, "num_classes": 0}, source, printable(path))._network
    _require_library()
    IMAGE_CLASSIFIER.require(config.get("model_type"), path)
    network: Any = network_of(path, config, IMAGE_CLASSIFIER, source)
    _require_one_head(network)
    remove_head(network)
    return filled(network, source)


_DO_NOTHING = (nn.Sequential, nn.Flatten, nn.Dropout, nn.Identity)
"""Layers that do nothing to flat features in evaluation mode."""


def _own_head(network: Any) -> tuple[Tensor, Tensor | None]:
    parts = [m for m in _last(network).modules() if not isinstance(m, _DO_NOTHING)]
    linear = [m for m in parts if isinstance(m, nn.Linear)]
    if len(linear) != 1 or len(parts) != 1:
        raise InputError(
            "MODEL-CLASSES",
            f"the head of {type(network).__name__} is not one linear layer",
            found=", ".join(type(m).__name__ for m in parts[:8]),
            fix="use its features with a head learned on them",
        )
    return linear[0].weight, linear[0].bias
