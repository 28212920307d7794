"""The compiled CPU loops in plain numba, to compare with the hand-written vector code of ``_kernels``.

The interface is that of ``aniso.compose._kernels.numba_cpu``. A chunk of 1,024 elements stays in the first
cache: the numbers of one vector after the other are expanded into it, scaled and added. Loops are left to
the compiler, which may reorder sums (``fastmath``); there are no vector types, shuffles or prefetches.
"""

# mypy: ignore-errors

from functools import cache

import numba
import numpy

from aniso.compose._kernels import numba_cpu as reference
from aniso.compose._kernels.lanes import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    GROUP,
    bfloat16,
    fetch_add,
    group_bytes,
    planes,
    pointer,
)
from aniso.compose._kernels.numba_cpu import _TASK, PIECE

__all__ = ["BFLOAT16", "FLOAT16", "FLOAT32", "add", "add_and_dots", "dots"]
CHUNK = 16  # groups
_compiled = numba.njit(fastmath=True, nogil=True, cache=True, error_model="numpy")


@_compiled
def _add(total, numbers, factor):
    for e in range(numbers.size):
        total[e] += factor * numbers[e]


@_compiled
def _dot(numbers, gradient):
    product = numpy.float32(0)
    for e in range(numbers.size):
        product += numbers[e] * gradient[e]
    return product


@_compiled
def _sum(out, base, total, planes):
    if planes == 1:
        for e in range(out.size):
            out[e] = base[e] + total[e]
    else:
        part = out.size // planes
        for k in range(planes):
            for e in range(part):
                out[planes * e + k] = base[planes * e + k] + total[k * part + e]


@_compiled
def _in_planes(values, planes, room):
    part = values.size // planes
    for k in range(planes):
        for e in range(part):
            room[k * part + e] = values[planes * e + k]
    return room[: values.size]


@cache
def _expand(form):  # noqa: C901 - a loop for each form
    """Expand the stored numbers of ``groups`` groups at an address, scaled, into an array."""
    step = group_bytes(form)
    if form == BFLOAT16:

        @_compiled
        def expand(address, groups, scales, numbers, bits):
            source = numba.carray(pointer(address), (groups * GROUP,), numpy.uint16)
            for e in range(source.size):
                bits[e] = numpy.uint32(source[e]) << numpy.uint32(16)

    elif form == FLOAT16:

        @_compiled
        def expand(address, groups, scales, numbers, bits):
            source = numba.carray(pointer(address), (groups * GROUP,), numpy.uint16)
            for e in range(source.size):  # shifted to float32's fields, with an exponent too small by 112
                half = numpy.uint32(source[e])
                sign = (half & numpy.uint32(0x8000)) << numpy.uint32(16)
                bits[e] = ((half & numpy.uint32(0x7FFF)) << numpy.uint32(13)) | sign
            for e in range(source.size):
                numbers[e] *= numpy.float32(2.0**112)

    else:
        per_byte = 8 // form
        mask = numpy.uint8(2**form - 1)
        middle = numpy.float32(1.5 if form == 2 else 2 ** (form - 1))

        @_compiled
        def expand(address, groups, scales, numbers, bits):
            source = numba.carray(pointer(address), (groups, step), numpy.uint8)
            for g in range(groups):
                scale = bfloat16(scales[g])
                for k in range(per_byte):  # all first codes of the bytes, then all second ones
                    shift = numpy.uint8(k * form)
                    plane = numbers[(k * groups + g) * step : (k * groups + g + 1) * step]
                    for e in range(step):
                        code = (source[g, e] >> shift) & mask
                        plane[e] = (numpy.float32(numpy.int32(code)) - middle) * scale

    return expand


@cache
def _loop(form, adds, multiplies):  # noqa: C901 - one compiled function
    step = group_bytes(form)
    is_plain, each = form == FLOAT32, planes(form)
    expand = _expand(BFLOAT16 if is_plain else form)

    @numba.cfunc("void(voidptr)", fastmath=True, error_model="numpy")
    def loop(address):
        task = numba.carray(address, (1,), _TASK)[0]
        rows = task.rows
        coefficients = numba.carray(pointer(task.coefficients), (rows,), numpy.float32)
        room = numpy.empty(CHUNK * GROUP, numpy.float32)
        bits = room.view(numpy.uint32)
        whole = numpy.empty(CHUNK * GROUP, numpy.float32)
        zeros = numpy.zeros(CHUNK * GROUP, numpy.float32)
        turned = numpy.empty(CHUNK * GROUP, numpy.float32)
        piece = fetch_add(task.counter)
        while piece < task.pieces:
            end = min((piece + 1) * PIECE, task.groups)
            sums = numba.carray(pointer(task.sums + 8 * piece * rows), (rows,), numpy.float64)
            for first in range(piece * PIECE, end, CHUNK):
                groups = min(CHUNK, end - first)
                size = groups * GROUP
                offset = 4 * GROUP * first
                gradient = numba.carray(pointer(task.gradient + offset), (size,), numpy.float32)
                if multiplies and each > 1:
                    gradient = _in_planes(gradient, each, turned)
                total = whole[:size]
                total[:] = 0
                for row in range(rows):
                    stored = task.stored + row * task.stored_step + first * step
                    scales = numba.carray(
                        pointer(task.scales + row * task.scales_step + 2 * first), (groups,), numpy.uint16
                    )
                    if is_plain:
                        numbers = numba.carray(pointer(stored), (size,), numpy.float32)
                    else:
                        expand(stored, groups, scales, room, bits)
                        numbers = room[:size]
                    if adds:
                        _add(total, numbers, coefficients[row])
                    if multiplies:
                        sums[row] += _dot(numbers, gradient)
                if adds:
                    out = numba.carray(pointer(task.out + offset), (size,), numpy.float32)
                    if task.base != 0:
                        base = numba.carray(pointer(task.base + offset), (size,), numpy.float32)
                        _sum(out, base, total, each)
                    else:
                        _sum(out, zeros, total, each)
            piece = fetch_add(task.counter)

    return loop


def _with_plain_loops(function):
    def call(*arguments):
        known, reference._loop = reference._loop, _loop
        try:
            return function(*arguments)
        finally:
            reference._loop = known

    return call


add, dots, add_and_dots = map(_with_plain_loops, (reference.add, reference.dots, reference.add_and_dots))
