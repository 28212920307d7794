"""Dtypes by their names in safetensors."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from aniso.errors import NumericalError

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
"""Bits of every dtype that a safetensors header may name, so that any file can be listed."""

TORCH: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""The dtypes that can be read into a tensor."""

NAMES = {dtype: name for name, dtype in TORCH.items()}

FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
"""The dtypes of weights; others are buffers or quantised."""

_MANTISSA_BITS = {"F16": 10, "BF16": 7, "F32": 23, "F64": 52}


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without a copy."""
    # not reshape(-1): a tensor of one element may keep any stride
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(cast(Any, flat.view(torch.uint8).numpy()))


def relative_rounding(dtype: str) -> float:
    """Return the relative rounding error of a dtype, root mean square over log-uniform values."""
    # ulp^2/12 over the mean square of a log-uniform significand in [1, 2), which is 3 / (2 ln 2)
    return float(2.0 ** -_MANTISSA_BITS[dtype] / math.sqrt(12 * 3 / (2 * math.log(2))))


def narrowed(values: Tensor, dtype: torch.dtype, whose: str, key: str) -> Tensor:
    """Convert values to another float dtype; raises if one leaves its range."""
    limit = torch.finfo(dtype).max
    largest = float(values.abs().max()) if values.numel() else 0.0
    if not largest <= limit:
        raise NumericalError(
            "VECTOR-RANGE",
            f"{whose}: values leave the range of {str(dtype).removeprefix('torch.')}",
            key=key,
            found=f"{largest:.4g}",
            expected=f"at most {limit:.4g}",
            fix="use --dtype bf16 or fp32, or a smaller coefficient",
        )
    return values.to(dtype)
