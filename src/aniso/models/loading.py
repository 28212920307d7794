"""Weights from any file into a network that was built from a configuration."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from aniso.errors import InputError, UsageError, printable
from aniso.vectors.naming import recognise
from aniso.weights import WeightSource


def fill(network: nn.Module, source: WeightSource, *, optional: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Copy every tensor by name; nothing may be missing or left over. Returns notes.

    Names that begin with one of ``optional`` may be missing: a fine-tuned image encoder often comes without
    the text tower, which then stays as it is.
    """
    wanted = dict(network.state_dict())
    names = _matched(source, wanted)
    missing = [name for name in wanted if name not in names and not name.startswith(optional or ("\0",))]
    extra = [key for key in source.tensors if key not in set(names.values()) and source.tensors[key].is_float]
    extra = [key for key in extra if key not in source.aliases]
    if missing or extra:
        raise InputError(
            "CKPT-KEYS",
            f"'{source.label}' does not fit the model {type(network).__name__}",
            missing=_some(missing),
            extra=_some(extra),
            fix="name the architecture that these weights are of, or rename with aniso convert",
        )
    with torch.no_grad():
        for name, key in names.items():
            if source.tensors[key].shape != tuple(wanted[name].shape):
                raise InputError(
                    "CKPT-SHAPE",
                    f"'{source.label}' does not fit the model {type(network).__name__}",
                    key=printable(key),
                    expected=tuple(wanted[name].shape),
                    found=source.tensors[key].shape,
                    fix="name the architecture that these weights are of",
                )
            wanted[name].copy_(source.read(key))  # state dicts share memory with the network
    left = [
        key for key in source.tensors if key not in set(names.values()) and not source.tensors[key].is_float
    ]
    return (f"buffers not used: {', '.join(left[:3])}",) if left else ()


def _matched(source: WeightSource, wanted: Mapping[str, object]) -> dict[str, str]:
    """The network's names to the file's: as they are, or without what stands before them."""
    plain = {name: name for name in wanted if name in source.tensors}
    standard = recognise(source.tensors).keys
    return max(plain, {name: key for name, key in standard.items() if name in wanted}, key=len)


def _some(names: list[str]) -> str:
    shown = printable(", ".join(names[:4]))
    return f"{shown} … {len(names) - 4} more" if len(names) > 4 else shown


def needs(extra: str, package: str) -> UsageError:
    """The error for a library that is not installed."""
    return UsageError(
        "MODEL-LIBRARY",
        f"this model needs {package}, which is not installed",
        fix=f"pip install 'aniso[{extra}]'",
    )
