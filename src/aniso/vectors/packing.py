"""Quantised storage: groups of numbers share a scale, codes count steps of it.

Codes of 8 and 4 bits count whole steps on both sides of zero, as many as reach a group's largest number.
Codes of 2 bits have four levels at half steps, which is the better choice when there are so few.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from aniso.errors import UsageError, printable

GROUP = 64
SMALL = 4096  # blocks up to this size stay in full precision: together they are a thousandth of a model
# The best step of a four-level quantiser for normally distributed numbers, in standard deviations (Max 1960).
_TWO_BIT_STEP = 0.9957


_SVD = re.compile(r"svd:([1-9][0-9]{0,4})")


class Storage(StrEnum):
    """The storage of vectors on disk and in memory; low-rank vectors stay factored in all of them.

    There is also ``svd:K`` for every K: matrices as their K largest singular components.
    """

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"
    RESIDUAL4 = "residual4"
    RESIDUAL2 = "residual2"

    @classmethod
    def of(cls, name: str) -> Storage:
        """Return the storage of a name; raises an error that lists the names."""
        try:
            return cls(name)
        except ValueError:
            raise UsageError(
                "USAGE",
                f"there is no storage '{printable(name)}'",
                expected=f"{', '.join(cls)} or svd:K",
                fix="choose one of these",
            ) from None

    @classmethod
    def _missing_(cls, value: object) -> Storage | None:
        """Return ``svd:K``, which is not a fixed name."""
        if not isinstance(value, str) or not _SVD.fullmatch(value):
            return None
        storage = str.__new__(cls, value)
        storage._name_ = storage._value_ = str(value)
        return storage

    @property
    def rank(self) -> int | None:
        """The number of singular components of a matrix; None for storages that keep numbers of elements."""
        found = _SVD.fullmatch(self.value)
        return int(found[1]) if found else None

    @property
    def packing(self) -> Packing | None:
        bits = {"int8": 8, "int4": 4, "residual4": 4, "residual2": 2}.get(self.value)
        return None if bits is None else Packing(bits)

    @property
    def has_mean(self) -> bool:
        """True if the vectors' mean is stored once and differences to it are packed."""
        return self.value.startswith("residual")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of what is not packed."""
        return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.value, torch.float32)

    def bytes_per_element(self, vectors: int) -> float:
        """Return the bytes of an element of what is not factored."""
        packing = self.packing
        if packing is None:
            return float(self.dtype.itemsize)
        return packing.bits / 8 + 2 / GROUP + (2 / vectors if self.has_mean else 0)


@dataclass(frozen=True)
class Packing:
    """The number of bits of a code."""

    bits: int

    @property
    def per_byte(self) -> int:
        return 8 // self.bits

    @property
    def middle(self) -> float:
        """The offset that is subtracted from a code before it is scaled."""
        return 1.5 if self.bits == 2 else _top(self) + 1

    def code_bytes(self, numel: int) -> int:
        return -(-numel // GROUP) * GROUP // self.per_byte

    def groups(self, numel: int) -> int:
        return -(-numel // GROUP)


def pack(values: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """Return codes as bytes and one bfloat16 scale per group; the last group is padded with zeros."""
    flat = values.reshape(-1).to(torch.float32)
    short = -flat.numel() % GROUP
    if short:
        flat = torch.nn.functional.pad(flat, (0, short))
    groups = flat.reshape(-1, GROUP)
    if packing.bits == 2:
        step = groups.square().mean(dim=1, keepdim=True).sqrt_().mul_(_TWO_BIT_STEP)
    else:
        step = groups.abs().amax(dim=1, keepdim=True).div_(_top(packing))
    # round the scale first, so that codes are chosen for the scale that will be used
    scales = step.to(torch.bfloat16)
    steps = scales.to(torch.float32)
    inverse = torch.where(steps > 0, 1 / steps, 0.0)
    scaled = groups * inverse
    top = _top(packing)
    if packing.bits == 2:
        codes = scaled.add_(2).floor_().clamp_(0, 3)
    else:
        codes = scaled.round_().clamp_(-top, top).add_(top + 1)
    return _join(codes.to(torch.uint8).reshape(-1), packing), scales.reshape(-1)


def unpack(codes: Tensor, scales: Tensor, packing: Packing, numel: int) -> Tensor:
    """Return the numbers of codes and scales as float32."""
    numbers = _split(codes, packing).to(torch.float32)
    numbers -= packing.middle
    groups = numbers.reshape(-1, GROUP).mul_(scales.to(torch.float32).reshape(-1, 1))
    return groups.reshape(-1)[:numel]


def _top(packing: Packing) -> int:
    return int(2 ** (packing.bits - 1)) - 1


def _join(codes: Tensor, packing: Packing) -> Tensor:
    """Join several codes to a byte, the first in the lowest bits."""
    if packing.per_byte == 1:
        return codes
    columns = codes.reshape(-1, packing.per_byte)
    out = columns[:, 0].clone()
    for i in range(1, packing.per_byte):
        out |= columns[:, i] << (i * packing.bits)
    return out


def _split(codes: Tensor, packing: Packing) -> Tensor:
    if packing.per_byte == 1:
        return codes
    mask = 2**packing.bits - 1
    shifts = [(codes >> (i * packing.bits)) & mask for i in range(packing.per_byte)]
    return torch.stack(shifts, dim=1).reshape(-1)
