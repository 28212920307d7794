"""LoRA adapters, made and written by PEFT."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from aniso.compose.lora.adapter_base import task_type
from aniso.data import sampling
from aniso.errors import UsageError
from aniso.learn._training.trainable import Trainable
from aniso.models import LanguageModel, Wrapped
from aniso.vectors import Kind
from aniso.weights.atomic import atomic_directory

ALPHA = 32
"""The paper's alpha, for every rank."""


@final
@dataclass(frozen=True)
class Adapter:
    """A LoRA on attention and MLP layers of a model's copy; ``trained`` is what ``fit`` takes."""

    trained: Trainable
    _wrapped: Any

    def save(self, directory: Path, *, overwrite: bool = False) -> None:
        """Write the adapter as PEFT does: adapter_config.json and adapter_model.safetensors."""
        with atomic_directory(directory, overwrite=overwrite) as place:
            self._wrapped.save_pretrained(place, save_embedding_layers=False)  # else PEFT asks the hub


Layers = Literal["attention", "mlp", "both"]
_KINDS: dict[Layers, tuple[Kind, ...]] = {
    "attention": (Kind.ATTENTION,),
    "mlp": (Kind.MLP,),
    "both": (Kind.ATTENTION, Kind.MLP),
}


def adapter(
    encoder: Wrapped, rank: int, *, layers: Layers = "both", alpha: int = ALPHA, seed: int = 0
) -> Adapter:
    """Return a new adapter on a copy of the encoder; it changes nothing until it is trained."""
    peft = _peft()
    if rank < 1:
        raise UsageError("USAGE", f"a LoRA cannot have rank {rank}", expected="1 or more", fix="--lora 16")
    own = copy.deepcopy(encoder)
    targets = _targets(own, layers)
    with torch.random.fork_rng([]):
        torch.manual_seed(
            sampling.number("lora", seed)
        )  # PEFT draws the factors from torch's global generator
        config = peft.LoraConfig(
            r=rank, lora_alpha=alpha, target_modules=targets, fan_in_fan_out=_inputs_first(own)
        )
        wrapped = peft.get_peft_model(own._network, config)
    stored = wrapped.peft_config["default"]
    stored.base_model_name_or_path = encoder.name  # not a path on this disk
    stored.task_type = task_type(encoder.model_config.architecture)  # AutoPeftModelFor... needs it
    tensors: dict[str, Tensor] = {name: p for name, p in own.named_parameters() if "lora_" in name}
    options = {"trained": "lora", "rank": rank, "alpha": alpha, "seed": seed, "peft": peft.__version__}
    options |= {} if layers == "both" else {"layers": layers}
    identity = {**encoder.identity(), **options}
    return Adapter(Trainable(own, tensors, identity), wrapped)


def _inputs_first(encoder: Wrapped) -> bool:
    """True if weights are stored as inputs x outputs, as in GPT-2."""
    return any(type(module).__name__ == "Conv1D" for module in encoder.modules())


def _targets(encoder: Wrapped, layers: Layers) -> list[str] | str:
    """Names of the layers to adapt; for a language model all linear layers but the last, found by PEFT."""
    if isinstance(encoder, LanguageModel) and layers == "both":
        return "all-linear"
    modules = dict(encoder._network.named_modules())
    keys = [part.key for b in encoder.layout.blocks if b.kind in _KINDS[layers] for part in b.parts]
    names = dict.fromkeys(key.removesuffix(".weight") for key in keys)
    if not names or not all(isinstance(modules.get(name), nn.Linear) for name in names):
        raise UsageError(
            "LORA-KIND",
            f"'{encoder.name}' keeps query, key and value in one tensor, which PEFT cannot adapt exactly",
            fix="use the model under Hugging Face's names: aniso convert --to huggingface",
        )
    return list(names)


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise UsageError(
            "MODEL-LIBRARY",
            "LoRA adapters need PEFT, which is not installed",
            fix="pip install 'aniso[peft]'",
        ) from None
    return peft
