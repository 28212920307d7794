"""Plain image classifiers of transformers and timm: features, and a head of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from aniso.errors import InputError, UsageError, printable
from aniso.models.encoder import Encoder, Family
from aniso.models.hugging_face import pixels_of
from aniso.models.loading import building, fill, filled, needs, network_of
from aniso.models.transforms import Pixels
from aniso.weights import Ref, WeightSource, open_weights
from aniso.weights.directory import read_json, transformers_config

# arguments of timm's own that would open a file, or choose one
_TIMMS_OWN = (
    "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict", "pretrained_filter_fn",
    "checkpoint_path", "cache_dir", "num_classes",
)  # fmt: skip


def load_directory(path: Path, name: str, weights: Ref | None = None) -> Encoder:
    """A transformers classifier (ViT, ResNet, ConvNeXt, ...), or one that timm pushed to the hub."""
    said = read_json(path / "config.json")
    if "architecture" in said and "model_type" not in said:
        return load_timm(str(said["architecture"]), path if weights is None else weights, name, said)
    network: Any = network_of(
        path,
        said,
        lambda library, config: library.AutoModelForImageClassification,
        what="model that gives image features",
        expected="a CLIP or an image classifier",
    )
    network = filled(network, open_weights(path if weights is None else weights))
    labels = {int(i): str(label) for i, label in network.config.id2label.items()}
    classes = tuple(labels[i] for i in sorted(labels))
    _require_one_head(network)
    family = Family(_features, own_head=_own_head, own_classes=classes)
    config, _ = transformers_config(said)
    return Encoder(name, network.float(), family, pixels_of(path, network), config)


def load_timm(
    architecture: str, weights: Ref | None, name: str, said: dict[str, Any] | None = None
) -> Encoder:
    """A timm classifier by its name, with weights from a file, a directory or a hub id."""
    try:
        import timm
    except ImportError:
        raise needs("openclip", "timm") from None
    said = said or {}
    if weights is None:
        raise UsageError(
            "MODEL-WEIGHTS", f"which weights should {architecture} have?", fix="weights='timm/NAME' or a file"
        )
    source = open_weights(weights)
    if architecture not in timm.list_models():
        raise UsageError(
            "MODEL-NAME", f"timm has no model '{printable(architecture)}'", fix="timm.list_models()"
        )
    with building(name):
        settings = dict(said.get("model_args") or {})
        settings = {key: settings[key] for key in settings if key not in _TIMMS_OWN}
        settings["num_classes"] = said.get("num_classes", _rows_of_head(source) or 1000)
        network: Any = timm.create_model(architecture, pretrained=False, **settings)
    fill(network, source)
    with building(name):
        pixels = _timm_pixels(network, said.get("pretrained_cfg") or {})
    classes = tuple(str(n) for n in said.get("label_names") or ()) or tuple(
        str(i) for i in range(network.num_classes)
    )
    _require_one_head(network)
    return Encoder(name, network.float(), Family(_features, own_head=_own_head, own_classes=classes), pixels)


def _rows_of_head(source: WeightSource) -> int | None:
    """How many classes the weights know, by the names timm has for a head."""
    names = ("head.weight", "fc.weight", "classifier.weight", "head.fc.weight")
    return next((source.tensors[name].shape[0] for name in names if name in source.tensors), None)


def _timm_pixels(network: Any, said: Any) -> Pixels:
    from timm.data.config import resolve_data_config

    data: Any = resolve_data_config(said, model=network)  # type: ignore[no-untyped-call]
    return Pixels(
        int(data["input_size"][-1]),
        tuple(data["mean"]),
        tuple(data["std"]),
        "bilinear" if data["interpolation"] == "bilinear" else "bicubic",
        "squash" if data.get("crop_mode") == "squash" else "shortest",
        float(data["crop_pct"]),
    )


def _last(network: Any) -> nn.Module:
    """The last layer of a classifier, whatever its library calls it."""
    if hasattr(network, "get_classifier"):
        found: nn.Module = network.get_classifier()
        return found
    return network.classifier if hasattr(network, "classifier") else network.head  # type: ignore[no-any-return]


def _require_one_head(network: Any) -> None:
    """Features are what goes into the last layer, so there must be just one."""
    own = ("classifier", "head", "get_classifier")
    last = _last(network) if any(hasattr(network, name) for name in own) else None
    if not isinstance(last, nn.Module) or hasattr(network, "dist_head"):
        raise InputError(
            "MODEL-NAME",
            f"{type(network).__name__} has no layer, or more than one, that gives its classes",
            expected="a classifier with one head",
            fix="choose another model: those trained by distillation often come without it, too",
        )


def _features(network: Any, images: Tensor) -> Tensor:
    """What goes into the last layer: right for every architecture, since nothing but that layer follows."""
    seen: list[Tensor] = []
    handle = _last(network).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        network(images)
    finally:
        handle.remove()
    return seen[0].flatten(1)


_DO_NOTHING = (nn.Sequential, nn.Flatten, nn.Dropout, nn.Identity)
"""Beside a linear layer, to features that are flat, at evaluation."""


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
