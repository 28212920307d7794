"""Where a model's modules hold its tensors, and copies of a model that share them."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import nn

from aniso.compose._engine import torch_internals
from aniso.errors import InputError

TensorLocations = Mapping[str, list[tuple[nn.Module, str]]]
"""The modules and attributes that hold each tensor of the model; tied tensors have several."""


def copy_sharing_weights(model: nn.Module) -> nn.Module:
    """Return a copy of the modules that shares the weights' memory, and whose weights take no gradient."""
    shared = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    try:
        return copy.deepcopy(model, shared)
    except Exception as e:
        raise InputError(
            "MODEL-COPY",
            f"the model {type(model).__name__} cannot be copied",
            reason=e,
            fix="remove hooks and caches that hold results of a forward pass, or load the model afresh",
        ) from e


def tensor_locations(model: nn.Module, tied: Mapping[str, str]) -> TensorLocations:
    """Return the modules and attributes that hold each tensor; ``tied`` names map to the one that is kept."""
    out: dict[str, list[tuple[nn.Module, str]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        same = (module, *vars(module).get("same_as", ()))  # an encoder shares its network's dictionaries
        for attribute, _ in torch_internals.named_tensors(module):
            key = f"{prefix}.{attribute}" if prefix else attribute
            out.setdefault(tied.get(key, key), []).extend((one, attribute) for one in same)
    return out


def require_plain_attributes(model: nn.Module) -> None:
    """Refuse weights in plain lists or dictionaries, where composed ones cannot be installed."""
    for prefix, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            continue  # these keep such a list, which is refreshed
        for attribute, value in vars(module).items():
            if attribute in torch_internals.MODULE_DICTIONARIES:
                continue
            inside = value.values() if isinstance(value, dict) else value
            if isinstance(value, list | tuple | dict) and any(isinstance(v, nn.Parameter) for v in inside):
                raise InputError(
                    "MODEL-COPY",
                    f"the model {type(model).__name__} keeps weights in a plain container",
                    key=f"{prefix}.{attribute}".lstrip("."),
                    fix="use nn.ParameterList or nn.ParameterDict, or plain attributes",
                )
