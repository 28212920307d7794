"""Calls compiled kernels where they are faster than torch: numba's on a CPU, Triton's on a CUDA device.

Numbers are expanded, scaled and added in registers. Everything here has a plain torch counterpart in
``DeltaStack`` that gives the same numbers up to rounding. The Triton kernel was run in Triton's interpreter
only, never on a GPU: it is tried when it is first needed, and left out if its results are not those of torch.
"""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from aniso.vectors import Packing
from aniso.vectors.packing import pack, unpack

_STORED = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)
# elements; torch is as fast with fewer 32-bit elements, and with one vector alone, as in baking: there the
# kernels would only cost the memory of the compiler
_LARGE = 1 << 16
_TOLERANCE = 1e-3  # of sums of a thousand products of about 1; a wrong code or scale is off by more


@cache
def is_installed() -> bool:
    """Return True if numba is installed; it is imported when a kernel is first needed."""
    return importlib.util.find_spec("numba") is not None


def compiler(device: torch.device) -> str | None:
    """Return the package that compiles kernels for a device, if there is one and it is installed."""
    if device.type == "cpu":
        return "numba" if is_installed() else None
    return "triton" if device.type == "cuda" and importlib.util.find_spec("triton") is not None else None


def has_kernel(stored: Tensor, *work: Tensor) -> bool:
    """Return True if there is a kernel for these dtypes and devices, and it is faster than torch."""
    return (
        stored.dtype in _STORED
        and all(w.dtype == torch.float32 for w in work)
        and all(t.is_contiguous() and t.device == stored.device for t in work)
        and stored.is_contiguous()
        and (_has_gpu_kernel(stored) if _is_on_gpu(stored) else _has_cpu_kernel(stored, work[0]))
    )


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def _has_cpu_kernel(stored: Tensor, work: Tensor) -> bool:
    is_large = len(stored) > 1 and work.numel() >= _LARGE
    return (stored.dtype != torch.float32 or is_large) and is_installed() and _kernels() is not None


def _has_gpu_kernel(stored: Tensor) -> bool:
    # 32-bit numbers need no unpacking: torch multiplies them as they are
    if stored.dtype == torch.float32 or compiler(stored.device) is None:
        return False
    return gpu_kernel_works(stored.device)


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
    start = None if base is None else base.detach()
    if _is_on_gpu(stored):
        _gpu_kernels().run(stored, packing, scales, coefficients=coefficients, base=start, out=out)
        return
    own, work = _flat(coefficients), out.numpy()
    first = None if start is None else start.numpy()
    _kernels().add(_form(stored, packing), work, first, _numbers(stored), own, _scales(scales))
    torch.autograd.graph.increment_version(out)


def dots(
    stored: Tensor, gradient: Tensor, packing: Packing | None = None, scales: Tensor | None = None
) -> Tensor:
    """Return ``<stored, gradient>`` for each vector, as one column."""
    work = gradient.detach()
    if _is_on_gpu(stored):
        products: Tensor = _gpu_kernels().run(stored, packing, scales, gradient=work)
        return products
    sums = _kernels().dots(_form(stored, packing), _numbers(stored), work.numpy(), _scales(scales))
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
    start, work = base.detach(), gradient.detach()
    if _is_on_gpu(stored):
        products: Tensor = _gpu_kernels().run(
            stored, packing, scales, coefficients=coefficients, base=start, out=out, gradient=work
        )
        return products
    sums = _kernels().add_and_dots(
        _form(stored, packing),
        out.numpy(),
        start.numpy(),
        _numbers(stored),
        _flat(coefficients),
        work.numpy(),
        _scales(scales),
    )
    torch.autograd.graph.increment_version(out)
    return _column(sums)


@cache
def gpu_kernel_works(device: torch.device) -> bool:
    """Return True if the Triton kernel compiles for a device and gives what torch gives there.

    It warns where it does not. There may be no C compiler, and no test has run the kernel on a GPU.
    """
    try:
        wrong = max(_gpu_error(packing, device) for packing in (None, Packing(8), Packing(4), Packing(2)))
    except Exception as e:  # compilers fail in ways of their own
        warnings.warn(f"the Triton kernel cannot be used, so packed vectors are slower: {e}", stacklevel=2)
        return False
    if wrong > _TOLERANCE:
        warnings.warn(
            f"the Triton kernel is wrong by {wrong:.1g} on {device} and is not used, so packed vectors are "
            "slower: please report it with the output of aniso doctor",
            stacklevel=2,
        )
    return wrong <= _TOLERANCE


def _gpu_error(packing: Packing | None, device: torch.device) -> float:
    """Return the largest error of the Triton kernel on a small example with a known result."""
    generator = torch.Generator().manual_seed(0)
    numel = 1100  # a piece and a part of one, and a last group that is not full
    numbers = torch.randn(3, numel, generator=generator).to(torch.bfloat16).float()
    base, gradient = torch.randn(2, numel, generator=generator)
    coefficients = torch.randn(3, generator=generator)
    stored, scales = numbers.to(torch.bfloat16), None
    if packing is not None:
        packed = [pack(row, packing) for row in numbers]
        stored, scales = (torch.stack(own) for own in zip(*packed, strict=True))
        numbers = torch.stack([unpack(codes, own, packing, numel) for codes, own in packed])
    out = torch.empty(numel, device=device)
    products = _gpu_kernels().run(
        stored.to(device),
        packing,
        None if scales is None else scales.to(device),
        coefficients=coefficients.to(device),
        base=base.to(device),
        out=out,
        gradient=gradient.to(device),
    )
    exact = numbers.double()
    errors = (
        out.cpu() - (base + coefficients.double() @ exact),
        products.cpu()[:, 0] - exact @ gradient.double(),
    )
    return max(float(error.abs().max()) for error in errors)


@cache
def _gpu_kernels() -> Any:
    from aniso.compose._kernels import triton_gpu  # triton takes a second to import

    return triton_gpu


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
