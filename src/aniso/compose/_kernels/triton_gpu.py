"""One Triton kernel over stored task vectors, for CUDA devices. Imported only where it is used.

Each program processes a piece of the block and all vectors: numbers are expanded, scaled, added up and
multiplied in registers, so that codes are read once and nothing unpacked is written to memory.

It was never run on a GPU: tests run it in Triton's interpreter on a CPU, and compile it for two GPUs.
``dispatch`` therefore compares its results with plain torch when it is first used, and does without it if
they differ.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl

from aniso.vectors.packing import GROUP

PIECE = 1024  # elements of a program: sixteen groups
_WARPS = 4


@triton.jit
def stack_kernel(
    out,
    base,
    stored,
    scales,
    coefficients,
    gradient,
    sums,
    numel,
    rows,
    stored_step,
    scales_step,
    bits: tl.constexpr,
    middle: tl.constexpr,
    group: tl.constexpr,
    adds: tl.constexpr,
    has_base: tl.constexpr,
    multiplies: tl.constexpr,
    size: tl.constexpr,
):
    """``bits`` of a code, or 0 for floats. Steps are from one vector to the next."""
    piece = tl.program_id(0).to(tl.int64)
    at = piece * size + tl.arange(0, size)
    inside = at < numel
    total = tl.zeros((size,), tl.float32)
    if multiplies:
        grad = tl.load(gradient + at, mask=inside, other=0.0)
    for row in range(rows):
        here = tl.cast(row, tl.int64)
        if bits == 0:
            numbers = tl.load(stored + here * stored_step + at, mask=inside, other=0.0).to(tl.float32)
        else:
            each = 8 // bits
            joined = tl.load(stored + here * stored_step + at // each, mask=inside, other=0).to(tl.int32)
            # the first code of a byte is in its lowest bits
            codes = (joined >> ((at % each) * bits).to(tl.int32)) & ((1 << bits) - 1)
            scale = tl.load(scales + here * scales_step + at // group, mask=inside, other=0.0)
            numbers = (codes.to(tl.float32) - middle) * scale.to(tl.float32)
        if adds:
            total += tl.load(coefficients + row) * numbers
        if multiplies:
            tl.store(sums + piece * rows + row, tl.sum(numbers * grad, axis=0))
    if adds:
        if has_base:
            start = tl.load(base + at, mask=inside, other=0.0)
            # added last, so that little is rounded away; -0.0 stays what it is where nothing is added
            total = tl.where(total == 0.0, start, start + total)
        tl.store(out + at, total, mask=inside)


def run(stored, packing=None, scales=None, *, coefficients=None, base=None, out=None, gradient=None):
    """Compute ``out = base + sum of coefficient * stored``, and return ``<stored, gradient>``, each if given.

    Products are summed piece by piece in 32 bits and over pieces in 64, always in the same order.
    """
    work = gradient if out is None else out
    numel, rows = work.numel(), len(stored)
    pieces = triton.cdiv(numel, PIECE)
    sums = None if gradient is None else work.new_zeros(pieces, rows)
    if numel:
        with torch.cuda.device_of(work):
            stack_kernel[(pieces,)](
                out,
                base,
                stored,
                scales,
                None if coefficients is None else coefficients.detach().to(torch.float32).contiguous(),
                gradient,
                sums,
                numel,
                rows,
                stored.stride(0),
                0 if scales is None else scales.stride(0),
                bits=0 if packing is None else packing.bits,
                middle=0.0 if packing is None else packing.middle,
                group=GROUP,
                adds=out is not None,
                has_base=base is not None,
                multiplies=gradient is not None,
                size=PIECE,
                num_warps=_WARPS,
                enable_fp_fusion=True,
            )
    if out is not None:
        torch.autograd.graph.increment_version(out)
    return None if sums is None else sums.sum(0, dtype=torch.float64).to(torch.float32).unsqueeze(1)
