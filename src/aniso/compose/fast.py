"""The fast path for few-bit vectors on a CPU: numba kernels, used where numba is installed.

Few-bit numbers are expanded, scaled and added in registers. Everything here has a plain torch counterpart in
``stack.py`` that gives the same numbers up to rounding; dense 32-bit vectors do not need it, because torch's
own products already run at the memory's speed.
"""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from aniso.vectors import Packing

_STORED = (torch.uint8, torch.bfloat16, torch.float16)


@cache
def is_installed() -> bool:
    return importlib.util.find_spec("numba") is not None


def can_read(stored: Tensor, work: Tensor) -> bool:
    """Whether there is a kernel for what is stored and what is computed with."""
    return (
        stored.dtype in _STORED
        and work.dtype == torch.float32
        and work.is_contiguous()
        and stored.is_contiguous()
        and stored.device.type == work.device.type == "cpu"
        and is_installed()
        and _kernels() is not None
    )


def add_dense(out: Tensor, values: Tensor, coefficients: Tensor) -> None:
    """``out += coefficients @ values`` for values of 16 bits."""
    k = _kernels()
    k.run(k.ADD_DENSE, out.numpy(), _bits(values), _is_half(values), _floats(coefficients))
    torch.autograd.graph.increment_version(out)


def dots_dense(values: Tensor, gradient: Tensor) -> Tensor:
    """``values @ gradient`` as one column, for values of 16 bits."""
    k = _kernels()
    return _column(k.run(k.DOTS_DENSE, gradient.detach().numpy(), _bits(values), _is_half(values)))


def add_packed(out: Tensor, codes: Tensor, scales: Tensor, coefficients: Tensor, packing: Packing) -> None:
    """``out += sum of coefficient * unpacked``."""
    k = _kernels()
    k.run(k.ADD_PACKED, out.numpy(), codes.numpy(), packing.bits, _floats(coefficients), _bits(scales))
    torch.autograd.graph.increment_version(out)


def dots_packed(codes: Tensor, scales: Tensor, gradient: Tensor, packing: Packing) -> Tensor:
    """``<unpacked, gradient>`` for each vector, as one column."""
    k = _kernels()
    work = gradient.detach().numpy()
    return _column(k.run(k.DOTS_PACKED, work, codes.numpy(), packing.bits, scales=_bits(scales)))


@cache
def _kernels() -> Any:
    try:
        from aniso.compose import fast_kernels  # numba takes a second to import
    except (ImportError, RuntimeError, SystemError) as e:  # of another age than numpy, or nowhere to cache
        warnings.warn(f"numba cannot be used, so few-bit vectors are slower: {e}", stacklevel=2)
        return None
    return fast_kernels


def _is_half(values: Tensor) -> int:
    return int(values.dtype == torch.float16)


def _bits(values: Tensor) -> Any:
    return values.view(torch.uint16).contiguous().numpy()


def _floats(values: Tensor) -> Any:
    return values.detach().to(torch.float32).contiguous().numpy()


def _column(sums: Any) -> Tensor:
    return torch.from_numpy(sums).to(torch.float32).unsqueeze(1)
