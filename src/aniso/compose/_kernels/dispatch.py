"""Calls the compiled CPU kernels where numba is installed and they are faster than torch.

Numbers are expanded, scaled and added in registers. Everything here has a plain torch counterpart in
``DeltaStack`` that gives the same numbers up to rounding.
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
# elements; torch is as fast with fewer 32-bit elements, and with one vector alone, as in baking: there the
# kernels would only cost the memory of the compiler
_LARGE = 1 << 16


@cache
def is_installed() -> bool:
    """Return True if numba is installed; it is imported when a kernel is first needed."""
    return importlib.util.find_spec("numba") is not None


def has_kernel(stored: Tensor, *work: Tensor) -> bool:
    """Return True if there is a kernel for these dtypes and devices, and it is faster than torch."""
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
    """Compute ``out = base + sum of coefficient * stored``; packed vectors have scales.

    ``base`` may be ``out`` itself; None stands for zeros.
    """
    own, work, start = _flat(coefficients), out.numpy(), None if base is None else base.detach().numpy()
    _kernels().add(_form(stored, packing), work, start, _numbers(stored), own, _scales(scales))
    torch.autograd.graph.increment_version(out)


def dots(
    stored: Tensor, gradient: Tensor, packing: Packing | None = None, scales: Tensor | None = None
) -> Tensor:
    """Return ``<stored, gradient>`` for each vector, as one column."""
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
    """Do ``add`` and return ``dots``, with the same bits, while the stored numbers are read once."""
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
        from aniso.compose._kernels import numba_cpu  # numba takes a second to import
    except (ImportError, RuntimeError, SystemError) as e:  # too old or new for numpy, or no cache directory
        warnings.warn(f"numba cannot be used, so compositions are slower: {e}", stacklevel=2)
        return None
    return numba_cpu


def _form(stored: Tensor, packing: Packing | None) -> int:
    if packing is not None:
        return packing.bits
    k = _kernels()
    forms = {torch.float16: k.FLOAT16, torch.bfloat16: k.BFLOAT16, torch.float32: k.FLOAT32}
    return int(forms[stored.dtype])


def _numbers(stored: Tensor) -> Any:
    """Return a numpy view; numpy has no bfloat16."""
    return (stored.view(torch.uint16) if stored.dtype == torch.bfloat16 else stored.detach()).numpy()


def _scales(scales: Tensor | None) -> Any:
    return None if scales is None else _numbers(scales.contiguous())
