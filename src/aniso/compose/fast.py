"""The fast path on a CPU: numba kernels, used where numba is installed.

Numbers are expanded, scaled and added in registers. Everything here has a plain torch counterpart in
``stack.py`` that gives the same numbers up to rounding.
"""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from aniso.vectors import Packing

_STORED = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)
# elements; torch is as good with less of its own format, and with one vector alone: there it would only
# cost the memory of the compiler, which baking does without
_LARGE = 1 << 16


@cache
def is_installed() -> bool:
    return importlib.util.find_spec("numba") is not None


def can_read(stored: Tensor, *work: Tensor) -> bool:
    """Whether there is a kernel for what is stored and what is computed with, and it is worth it."""
    return (
        stored.dtype in _STORED
        and (stored.dtype != torch.float32 or (len(stored) > 1 and work[0].numel() >= _LARGE))
        and all(w.dtype == torch.float32 for w in work)
        and all(t.is_contiguous() and t.device.type == "cpu" for t in (stored, *work))
        and is_installed()
        and _kernels() is not None
    )


def add(
    out: Tensor,
    base: Tensor | None,
    stored: Tensor,
    coefficients: Tensor,
    packing: Packing | None = None,
    scales: Tensor | None = None,
) -> None:
    """``out = base + sum of coefficient * stored``; packed vectors have scales. ``base`` may be ``out``, or
    nothing, which is zero.
    """
    own, work, start = _flat(coefficients), out.numpy(), None if base is None else base.detach().numpy()
    _kernels().add(_form(stored, packing), work, start, _numbers(stored), own, _scales(scales))
    torch.autograd.graph.increment_version(out)


def dots(
    stored: Tensor, gradient: Tensor, packing: Packing | None = None, scales: Tensor | None = None
) -> Tensor:
    """``<stored, gradient>`` for each vector, as one column."""
    work = gradient.detach().numpy()
    sums = _kernels().dots(_form(stored, packing), _numbers(stored), work, _scales(scales))
    return _column(sums)


def add_and_dots(
    out: Tensor,
    base: Tensor,
    stored: Tensor,
    coefficients: Tensor,
    gradient: Tensor,
    packing: Packing | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Both of these, to the same bits, while what is stored is read once."""
    own, work, start = _flat(coefficients), out.numpy(), base.detach().numpy()
    sums = _kernels().add_and_dots(
        _form(stored, packing),
        work,
        start,
        _numbers(stored),
        own,
        gradient.detach().numpy(),
        _scales(scales),
    )
    torch.autograd.graph.increment_version(out)
    return _column(sums)


def _flat(coefficients: Tensor) -> Any:
    return coefficients.detach().to(torch.float32).contiguous().numpy()


def _column(sums: Any) -> Tensor:
    return torch.from_numpy(sums).to(torch.float32).unsqueeze(1)


@cache
def _kernels() -> Any:
    try:
        from aniso.compose import fast_kernels  # numba takes a second to import
    except (ImportError, RuntimeError, SystemError) as e:  # of another age than numpy, or nowhere to cache
        warnings.warn(f"numba cannot be used, so compositions are slower: {e}", stacklevel=2)
        return None
    return fast_kernels


def _form(stored: Tensor, packing: Packing | None) -> int:
    if packing is not None:
        return packing.bits
    k = _kernels()
    forms = {torch.float16: k.FLOAT16, torch.bfloat16: k.BFLOAT16, torch.float32: k.FLOAT32}
    return int(forms[stored.dtype])


def _numbers(stored: Tensor) -> Any:
    """As numpy has them, which knows no bfloat16."""
    return (stored.view(torch.uint16) if stored.dtype == torch.bfloat16 else stored.detach()).numpy()


def _scales(scales: Tensor | None) -> Any:
    return None if scales is None else _numbers(scales.contiguous())
