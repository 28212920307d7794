"""The device that a command runs on."""

from __future__ import annotations

import torch

from aniso.errors import UsageError, printable


def find_device(name: str | None) -> torch.device:
    """Return the device asked for; else the GPU, if there is one."""
    wanted = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=wanted).device
    except (RuntimeError, AssertionError) as e:
        raise UsageError(
            "USAGE",
            f"there is no device '{printable(wanted)}'",
            reason=str(e).splitlines()[0][:200],
            fix="--device cpu",
        ) from None
