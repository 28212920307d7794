"""Compiled loops over few-bit numbers. Imported only where numba is installed, and when first needed.

A block is worked on in pieces of fixed size, so that sums are the same whatever the number of threads.
Several codes to a byte are worked on in planes (all first codes, all second codes, ...): the order is
restored once a tile, not once a vector.

The threads are torch's own: a second pool of threads beside it would fight it for the cores, since the
threads of both wait for work by spinning. So the loops are compiled to one plain C function, which torch's
OpenMP library is asked to run on all its threads, and which takes pieces off a shared counter.
"""

# mypy: ignore-errors

import ctypes
from functools import cache
from pathlib import Path

import numba
import numpy
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

GROUP = 64
TILE = 4096
PIECE = 16 * TILE
ADD_DENSE, DOTS_DENSE, ADD_PACKED, DOTS_PACKED = range(4)
_f32 = numpy.float32


@intrinsic
def _bfloat16(typing_context, value):
    """A bfloat16 is the upper half of a float32."""

    def code(context, builder, signature, arguments):
        wide = builder.zext(arguments[0], ir.IntType(32))
        return builder.bitcast(builder.shl(wide, ir.Constant(ir.IntType(32), 16)), ir.FloatType())

    return types.float32(types.uint16), code


@intrinsic
def _float16(typing_context, value):
    def code(context, builder, signature, arguments):
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), code


@intrinsic
def _pointer(typing_context, address):
    """The memory at an address."""

    def code(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), code


@intrinsic
def _taken(typing_context, address):
    """The number at an address, which grows by one: no two threads are given the same."""

    def code(context, builder, signature, arguments):
        counter = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.int64), code


_compiled = numba.njit(fastmath=True, nogil=True, cache=True, error_model="numpy")


@_compiled
def _add_dense(out, values, half, coefficient):
    if half:
        for j in range(out.size):
            out[j] += coefficient * _float16(values[j])
    else:
        for j in range(out.size):
            out[j] += coefficient * _bfloat16(values[j])


@_compiled
def _dot_dense(values, half, gradient):
    total = _f32(0)
    if half:
        for j in range(gradient.size):
            total += gradient[j] * _float16(values[j])
    else:
        for j in range(gradient.size):
            total += gradient[j] * _bfloat16(values[j])
    return total


@_compiled
def _add_bytes(out, codes, scales, coefficient):
    for group in range(scales.size):
        factor = coefficient * _bfloat16(scales[group])
        source = codes[group * GROUP : (group + 1) * GROUP]
        target = out[group * GROUP : (group + 1) * GROUP]
        for j in range(GROUP):
            target[j] += factor * (_f32(source[j]) - _f32(128))


@_compiled
def _dot_bytes(codes, scales, gradient):
    total = _f32(0)
    for group in range(scales.size):
        source = codes[group * GROUP : (group + 1) * GROUP]
        target = gradient[group * GROUP : (group + 1) * GROUP]
        inside = _f32(0)
        for j in range(GROUP):
            inside += target[j] * (_f32(source[j]) - _f32(128))
        total += inside * _bfloat16(scales[group])
    return total


@_compiled
def _add_nibbles(planes, codes, scales, coefficient):
    for group in range(scales.size):
        factor = coefficient * _bfloat16(scales[group])
        source = codes[group * 32 : (group + 1) * 32]
        low, high = planes[0, group * 32 : (group + 1) * 32], planes[1, group * 32 : (group + 1) * 32]
        for j in range(32):
            low[j] += factor * (_f32(source[j] & 15) - _f32(8))
            high[j] += factor * (_f32(source[j] >> 4) - _f32(8))


@_compiled
def _dot_nibbles(planes, codes, scales):
    total = _f32(0)
    for group in range(scales.size):
        source = codes[group * 32 : (group + 1) * 32]
        low, high = planes[0, group * 32 : (group + 1) * 32], planes[1, group * 32 : (group + 1) * 32]
        inside = _f32(0)
        for j in range(32):
            inside += low[j] * (_f32(source[j] & 15) - _f32(8)) + high[j] * (_f32(source[j] >> 4) - _f32(8))
        total += inside * _bfloat16(scales[group])
    return total


@_compiled
def _add_pairs(planes, codes, scales, coefficient):
    """Codes of two bits."""
    for group in range(scales.size):
        factor = coefficient * _bfloat16(scales[group])
        source = codes[group * 16 : (group + 1) * 16]
        for plane in range(4):
            target = planes[plane, group * 16 : (group + 1) * 16]
            shift = numpy.uint8(2 * plane)
            for j in range(16):
                target[j] += factor * (_f32((source[j] >> shift) & 3) - _f32(1.5))


@_compiled
def _dot_pairs(planes, codes, scales):
    total = _f32(0)
    for group in range(scales.size):
        source = codes[group * 16 : (group + 1) * 16]
        inside = _f32(0)
        for plane in range(4):
            target = planes[plane, group * 16 : (group + 1) * 16]
            shift = numpy.uint8(2 * plane)
            for j in range(16):
                inside += target[j] * (_f32((source[j] >> shift) & 3) - _f32(1.5))
        total += inside * _bfloat16(scales[group])
    return total


@_compiled
def _to_planes(planes, flat):
    """Every first number, every second number, ...; zeros where the last group is not full."""
    each = planes.shape[0]
    full = flat.size // each
    for plane in range(each):
        target = planes[plane]
        for j in range(full):
            target[j] = flat[j * each + plane]
        for j in range(full, target.size):
            target[j] = 0
        if full * each + plane < flat.size:
            target[full] = flat[full * each + plane]


@_compiled
def _from_planes(flat, planes):
    each = planes.shape[0]
    full = flat.size // each
    for plane in range(each):
        source = planes[plane]
        for j in range(full):
            flat[j * each + plane] = source[j]
        if full * each + plane < flat.size:
            flat[full * each + plane] = source[full]


@_compiled
def _packed_row(add, planes, codes, scales, bits, coefficient):
    """One vector's tile: added to the planes, or its product with them."""
    if bits == 8:
        if not add:
            return _dot_bytes(codes, scales, planes[0])
        _add_bytes(planes[0], codes, scales, coefficient)
    elif bits == 4:
        if not add:
            return _dot_nibbles(planes, codes, scales)
        _add_nibbles(planes, codes, scales, coefficient)
    else:
        if not add:
            return _dot_pairs(planes, codes, scales)
        _add_pairs(planes, codes, scales, coefficient)
    return _f32(0)


# Rows are cut out as a[i, first:last], which the compiler knows to be contiguous; a[:, first:last][i] is not.


@_compiled
def _dense_piece(task, piece, add):
    size, rows, half = task[3], task[5], task[6] != 0
    work = numba.carray(_pointer(task[2]), (size,), numpy.float32)
    values = numba.carray(_pointer(task[4]), (rows, task[7]), numpy.uint16)
    coefficients = numba.carray(_pointer(task[8]), (rows,), numpy.float32)
    sums = numba.carray(_pointer(task[9]), (task[1], rows), numpy.float64)
    for start in range(piece * PIECE, min(size, (piece + 1) * PIECE), TILE):
        stop = min(start + TILE, size)
        for i in range(rows):
            if add:
                _add_dense(work[start:stop], values[i, start:stop], half, coefficients[i])
            else:
                sums[piece, i] += _dot_dense(values[i, start:stop], half, work[start:stop])


@_compiled
def _packed_piece(task, piece, add):
    size, rows, bits = task[3], task[5], task[6]
    each = 8 // bits
    groups = (size + GROUP - 1) // GROUP
    work = numba.carray(_pointer(task[2]), (size,), numpy.float32)
    codes = numba.carray(_pointer(task[4]), (rows, task[7]), numpy.uint8)
    coefficients = numba.carray(_pointer(task[8]), (rows,), numpy.float32)
    sums = numba.carray(_pointer(task[9]), (task[1], rows), numpy.float64)
    scales = numba.carray(_pointer(task[10]), (rows, groups), numpy.uint16)
    planes = numpy.empty((each, TILE // each), numpy.float32)
    for start in range(piece * PIECE, min(size, (piece + 1) * PIECE), TILE):
        stop = min(start + TILE, size)
        first, last = start // GROUP, (stop + GROUP - 1) // GROUP
        _to_planes(planes, work[start:stop])
        for i in range(rows):
            own = codes[i, first * GROUP // each : last * GROUP // each]
            sums[piece, i] += _packed_row(add, planes, own, scales[i, first:last], bits, coefficients[i])
        if add:
            _from_planes(work[start:stop], planes)


@numba.cfunc("void(voidptr)", cache=True)
def _work(address):
    """What every thread does: take the next piece until there is none."""
    task = numba.carray(address, (12,), numpy.int64)
    while True:
        piece = _taken(task[11])
        if piece >= task[1]:
            return
        kind = task[0]
        if kind <= DOTS_DENSE:
            _dense_piece(task, piece, kind == ADD_DENSE)
        else:
            _packed_piece(task, piece, kind == ADD_PACKED)


def run(kind, work, stored, form, coefficients=None, scales=None):
    """Add to ``work``, or return the products with it; ``form`` is 1 for float16, or the bits of a code."""
    rows, size = stored.shape[0], work.size
    pieces = -(-size // PIECE)
    if coefficients is None:
        coefficients = numpy.zeros(rows, numpy.float32)
    sums = numpy.zeros((pieces, rows))
    counter = numpy.zeros(1, numpy.int64)
    empty = numpy.zeros(0)
    tensors = [work, stored, coefficients, sums, empty if scales is None else scales, counter]
    if not all(t.flags.c_contiguous for t in tensors):
        raise ValueError("the compiled path reads contiguous memory only")
    at_work, at_stored, at_coefficients, at_sums, at_scales, at_counter = (t.ctypes.data for t in tensors)
    task = numpy.array(
        [
            *(kind, pieces, at_work, size, at_stored, rows, form, stored.shape[1]),
            *(at_coefficients, at_sums, at_scales, at_counter),
        ],
        dtype=numpy.int64,
    )
    threads = min(torch.get_num_threads(), pieces)
    parallel = _openmp() if threads > 1 else None
    if parallel is None:
        _work.ctypes(task.ctypes.data)
    else:
        parallel(ctypes.c_void_p(_work.address), ctypes.c_void_p(task.ctypes.data), threads, 0)
    return sums.sum(axis=0)


@cache
def _openmp():
    """The entry of torch's OpenMP library through which compilers start parallel regions, if it has one."""
    for file in sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*")):
        try:
            entry = ctypes.CDLL(str(file)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        entry.restype = None
        entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        return entry
    return None
