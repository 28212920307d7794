"""Compiled CPU loops over stored task vectors. Imported only where numba is installed, when first needed.

Groups of 64 elements are processed in registers (``lanes``): numbers of several vectors, one after the other,
are expanded, scaled and summed.

Memory is fastest when it is read in few places at once and in long runs. So a piece of the block that fits
into the second-level cache is processed with six vectors, then with the next six, and data is prefetched.

Pieces have a fixed size, so that sums do not depend on the number of threads. The threads are torch's own: a
second thread pool would compete with it for the cores, since the threads of both spin while they wait. So the
loops are compiled to plain C functions, which torch's OpenMP library runs on all its threads, and which take
pieces off a shared counter.

Plain numba takes 1.3 to 6.6 times as long with 21 vectors, and as long for products with 32-bit vectors
(benchmarks/results/kernels_plain.json).
"""

# mypy: ignore-errors

import ctypes
from functools import cache

import numba
import numpy
import torch

from aniso.compose._engine.torch_internals import openmp_libraries
from aniso.compose._kernels.lanes import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    GROUP,
    GROUP_BYTES,
    WIDTH,
    add_products,
    bfloat16,
    fetch_add,
    group_bytes,
    load_group,
    load_in_planes,
    load_numbers,
    multiply_add,
    planes,
    pointer,
    prefetch,
    store_group,
    write_sum,
    zeros,
)

__all__ = ["BFLOAT16", "FLOAT16", "FLOAT32", "add", "add_and_dots", "dots"]

PIECE = 512  # groups; what they are added to or multiplied with stays in the second-level cache
BUNDLE = 6  # vectors at most that are processed together
EXACT = 64  # groups whose products are summed in 32 bits
AHEAD = 4096  # bytes between what is prefetched and what is processed

_TASK = numpy.dtype(
    [
        (name, numpy.int64)
        for name in (
            *("counter", "pieces", "groups", "rows"),
            *("stored", "stored_step", "scales", "scales_step"),
            *("coefficients", "base", "out", "gradient", "sums"),
        )
    ]
)
"""The arguments of a loop: addresses and sizes. Steps are from one vector to the next."""

_compiled = numba.njit(fastmath=True, nogil=True, cache=True, error_model="numpy")


@_compiled
def _fill_scales(room, task, row, first):
    """Fill in the scale of each group's codes in a piece; 1 for dense numbers."""
    for i in range(len(room)):
        if task.scales == 0:
            room[i] = 1
        else:
            at = task.scales + (row + i) * task.scales_step + 2 * first
            scales = numba.carray(pointer(at), (room.shape[1],), numpy.uint16)
            for g in range(scales.size):
                room[i, g] = bfloat16(scales[g])


@_compiled
def _add_up(sums, lanes):
    """Add the 32-bit sums to the 64-bit sums, and reset them."""
    for k in range(len(lanes)):
        for i in range(sums.size):
            for j in range(WIDTH):
                sums[i] += lanes[k, i, j]
                lanes[k, i, j] = 0


@cache
def _loop(form, adds, multiplies):
    """Return the function that every thread runs: process the next piece until there is none.

    ``adds`` computes ``out = base + sum of coefficient * stored``; the base, much larger than the sum, is
    added last, so that little is rounded away. ``multiplies`` computes ``sums = sum over elements of stored *
    gradient``. With both, the stored numbers are read once.
    """
    each, step = planes(form), group_bytes(form)

    @numba.cfunc("void(voidptr)", cache=True)  # all in one: calls of other closures could not be cached
    def loop(address):
        task = numba.carray(address, (1,), _TASK)[0]
        coefficients = numba.carray(pointer(task.coefficients), (task.rows,), numpy.float32)
        room = numpy.empty((BUNDLE, PIECE), numpy.float32)
        kept = numpy.empty(PIECE * GROUP, numpy.float32)
        lanes = numpy.zeros((PIECE // EXACT, BUNDLE, WIDTH), numpy.float32)
        nothing = numpy.zeros(GROUP, numpy.float32)
        bundles = max(1, -(-task.rows // BUNDLE))
        piece = fetch_add(task.counter)
        while piece < task.pieces:
            first = piece * PIECE
            groups = min(PIECE, task.groups - first)
            sums = numba.carray(pointer(task.sums + 8 * piece * task.rows), (task.rows,), numpy.float64)
            for bundle in range(bundles):
                row, end = task.rows * bundle // bundles, task.rows * (bundle + 1) // bundles
                scales = room[: end - row, :groups]
                _fill_scales(scales, task, row, first)
                for g in range(groups):
                    at = task.stored + row * task.stored_step + (first + g) * step
                    here, so_far = GROUP_BYTES * (first + g), kept.ctypes.data + GROUP_BYTES * g
                    total = load_group(so_far) if adds and row else zeros()
                    gradient = load_in_planes(task.gradient + here, each) if multiplies else zeros()
                    for i in range(end - row):
                        prefetch(at + AHEAD, step)
                        numbers = load_numbers(at, form)
                        if adds:
                            total = multiply_add(total, numbers, coefficients[row + i] * scales[i, g])
                        if multiplies:
                            add_products(lanes[g // EXACT, i].ctypes.data, gradient, numbers, scales[i, g])
                        at += task.stored_step
                    if adds and end == task.rows:
                        base = task.base + here if task.base else nothing.ctypes.data
                        write_sum(task.out + here, base, total, each)
                    elif adds:
                        store_group(so_far, total)
                _add_up(sums[row:end], lanes)
            piece = fetch_add(task.counter)

    return loop


def add(form, out, base, stored, coefficients, scales=None):
    """Compute ``out = base + sum of coefficient * stored``; without a base, the sum alone."""
    _run(form, stored, scales, coefficients=coefficients, base=base, out=out)


def dots(form, stored, gradient, scales=None):
    """Return the inner product of each vector with a gradient."""
    return _run(form, stored, scales, gradient=gradient)


def add_and_dots(form, out, base, stored, coefficients, gradient, scales=None):
    """Do ``add`` and return ``dots``, in one pass over the stored numbers."""
    return _run(form, stored, scales, coefficients=coefficients, base=base, out=out, gradient=gradient)


def _run(form, stored, scales, *, coefficients=None, base=None, out=None, gradient=None):
    """Run a loop over all full groups, and over the last, incomplete group padded with zeros."""
    loop = _loop(form, out is not None, gradient is not None)
    work = [base, out, gradient]
    size = next(w.size for w in work if w is not None)
    sums = _run_full(loop, stored, scales, coefficients, *work)
    left = size % GROUP
    if left:
        padded = [None if w is None else _padded(w[-left:], GROUP) for w in work]
        group, each = size // GROUP, group_bytes(form)
        codes = _padded(stored.view(numpy.uint8)[:, group * each :], each)
        last = None if scales is None else scales[:, group:].copy()
        sums += _run_full(loop, codes, last, coefficients, *padded)
        if out is not None:
            out[-left:] = padded[1][:left]
    return sums


def _padded(values, length):
    padded = numpy.zeros((*values.shape[:-1], length), values.dtype)
    padded[..., : values.shape[-1]] = values
    return padded


def _run_full(loop, stored, scales, coefficients, base, out, gradient):
    """Run a loop over all full groups on torch's threads; returns the sums of products."""
    size = next(w.size for w in (out, gradient) if w is not None)
    groups, rows = size // GROUP, len(stored)
    pieces = -(-groups // PIECE)
    sums = numpy.zeros((pieces, rows))
    counter = numpy.zeros(1, numpy.int64)
    arrays = (stored, scales, coefficients, base, out, gradient)
    if not all(a is None or a.flags.c_contiguous for a in arrays):
        raise ValueError("the compiled path reads contiguous memory only")
    task = numpy.zeros(1, _TASK)
    task[0] = (
        *(counter.ctypes.data, pieces, groups, rows),
        *(stored.ctypes.data, stored.strides[0]),
        *((0, 0) if scales is None else (scales.ctypes.data, scales.strides[0])),
        *(0 if a is None else a.ctypes.data for a in (coefficients, base, out, gradient)),
        sums.ctypes.data,
    )
    threads = min(torch.get_num_threads(), pieces)
    parallel = _openmp() if threads > 1 else None
    if parallel is None:
        loop.ctypes(task.ctypes.data)
    else:
        parallel(ctypes.c_void_p(loop.address), ctypes.c_void_p(task.ctypes.data), threads, 0)
    return sums.sum(axis=0)


@cache
def _openmp():
    """Return the function of torch's OpenMP library that starts parallel regions, if it has one."""
    for file in openmp_libraries():
        try:
            entry = ctypes.CDLL(str(file)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        entry.restype = None
        entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        return entry
    return None
