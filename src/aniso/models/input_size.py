"""The image size that a network accepts, tried on the meta device: no memory, no computation."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from aniso.errors import InputError, printable


def require_input_size(where: object, network: nn.Module, size: int, built_for: int | None) -> None:
    """Raise if images have a size that the network does not accept.

    Networks with a fixed table of positions, such as CLIP's, accept one size; convolutional ones accept any.
    """
    if built_for is None or size == built_for or _takes(network, size) or not _takes(network, built_for):
        return
    raise InputError(
        "DIR-CONFIG",
        f"'{printable(where)}' prepares images of a size that its model does not accept",
        found=f"images of {size} x {size} pixels, by the image processor's settings",
        expected=f"{built_for} x {built_for}, by the configuration of the model",
        fix="use the image processor settings that belong to this model",
    )


def _takes(network: nn.Module, size: int) -> bool:
    """True if a copy of the network on the meta device accepts images of this size."""
    empty, images = on_meta(network, size)
    try:
        with torch.no_grad():
            empty(images)
    except Exception:  # whatever a library raises for a wrong shape
        return False
    return True


def on_meta(network: nn.Module, size: int) -> tuple[Any, Tensor]:
    """Return a copy of the network on the meta device, and an image of this size for it."""
    held: dict[int, Any] = {id(own): _empty(own) for own in (*network.parameters(), *network.buffers())}
    config: Any = getattr(network, "config", None)
    images = torch.empty(1, getattr(config, "num_channels", 3), size, size, device="meta")
    return copy.deepcopy(network, held).eval(), images


def _empty(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
