"""Compiled CPU loops over stored task vectors. Imported only where numba is installed, when first needed.

A group of 64 elements is worked on in registers: numbers of a few vectors, one after the other, are expanded,
scaled and summed. The group is spelled out in the machine's own vectors, because left to itself the compiler
uses half of their width and adds up their elements in every group. Several codes to a byte are worked on in
planes (all first codes, all second codes, ...): the order is restored once a group, not once a vector.

Memory gives its best when it is read in few places at once, and in long runs. So a piece of the block that
fits into the second cache is gone through with six vectors, then with the next six, and what will be read
next is asked for ahead of time.

Pieces have a fixed size, so that sums are the same whatever the number of threads. The threads are torch's
own: a second pool of threads beside it would fight it for the cores, since the threads of both wait for work
by spinning. So the loops are compiled to plain C functions, which torch's OpenMP library is asked to run on
all its threads, and which take pieces off a shared counter.
"""

# mypy: ignore-errors

import ctypes
from functools import cache

import numba
import numpy
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

from aniso.compose._engine.torch_internals import openmp_libraries

GROUP = 64
PIECE = 512  # groups; what they are added to or multiplied with stays in the second cache
BUNDLE = 6  # vectors at most that are worked on together
EXACT = 64  # groups whose products are summed in 32 bits
AHEAD = 4096  # bytes between what is asked for and what is worked on
LINE = 64  # bytes that memory is read in
WIDTH = 16  # elements of a vector of 512 bits; shorter ones are used in pairs where there are no such

# A form says how numbers are stored: the bits of a code, or one of these.
FLOAT16, BFLOAT16, FLOAT32 = 16, 17, 32
_DENSE_BYTES = {FLOAT16: 2 * GROUP, BFLOAT16: 2 * GROUP, FLOAT32: 4 * GROUP}

_i32, _i64 = ir.IntType(32), ir.IntType(64)
_floats = ir.VectorType(ir.FloatType(), WIDTH)
_words = ir.VectorType(_i32, WIDTH)
_four = ir.ArrayType(_floats, GROUP // WIDTH)
_GROUP_BYTES = 4 * GROUP  # of 32-bit numbers


def group_bytes(form):
    return _DENSE_BYTES.get(form) or GROUP * form // 8


def planes(form):
    return 1 if form in _DENSE_BYTES else 8 // form


# A group in registers, as a type that compiled code can have variables of


class _Lanes(types.Type):
    def __init__(self):
        super().__init__(name="Lanes")


_lanes = _Lanes()


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager, own):
        super().__init__(manager, own, _four)


def _joined(builder, vectors):
    out = ir.Constant(_four, ir.Undefined)
    for i, vector in enumerate(vectors):
        out = builder.insert_value(out, vector, i)
    return out


def _split(builder, lanes):
    return [builder.extract_value(lanes, i) for i in range(_four.count)]


def _at(builder, address, offset, kind):
    return builder.inttoptr(builder.add(address, ir.Constant(_i64, offset)), kind.as_pointer())


def _read(builder, address, offset, kind):
    return builder.load(_at(builder, address, offset, kind), align=1, typ=kind)


def _all(kind, value):
    return ir.Constant(kind, [value] * kind.count)


def _everywhere(builder, number):
    nothing = ir.Constant(_floats, ir.Undefined)
    first = builder.insert_element(nothing, number, ir.Constant(_i32, 0))
    return builder.shuffle_vector(first, nothing, _all(_words, 0))


def _picked(builder, vector, order):
    order = ir.Constant(ir.VectorType(_i32, len(order)), order)
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), order)


def _multiply_add(builder, a, b, c):
    kind = ir.FunctionType(_floats, [_floats] * 3)
    known = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{WIDTH}f32")
    return builder.call(known, [a, b, c])


def _dense_numbers(builder, address, form):
    for i in range(_four.count):
        if form == FLOAT32:
            yield _read(builder, address, 4 * WIDTH * i, _floats)
        elif form == FLOAT16:
            half = _read(builder, address, 2 * WIDTH * i, ir.VectorType(ir.HalfType(), WIDTH))
            yield builder.fpext(half, _floats)
        else:  # a bfloat16 is the upper half of a float32
            upper = _read(builder, address, 2 * WIDTH * i, ir.VectorType(ir.IntType(16), WIDTH))
            yield builder.bitcast(builder.shl(builder.zext(upper, _words), _all(_words, 16)), _floats)


def _packed_numbers(builder, address, bits):
    bytes_ = ir.VectorType(ir.IntType(8), WIDTH)
    middle = 1 if bits == 2 else 2 ** (bits - 1)
    for i in range(_four.count * bits // 8):
        codes = _read(builder, address, WIDTH * i, bytes_)
        for shift in range(0, 8, bits):  # the first code of a byte is in its lowest bits
            own = builder.and_(builder.lshr(codes, _all(bytes_, shift)), _all(bytes_, 2**bits - 1))
            # taken from bytes, of which a register holds the most
            number = builder.sitofp(builder.sext(builder.sub(own, _all(bytes_, middle)), _words), _floats)
            yield builder.fsub(number, _all(_floats, 0.5)) if bits == 2 else number


@intrinsic
def _zeros(typing_context):
    def code(context, builder, signature, arguments):
        return _joined(builder, [_all(_floats, 0.0)] * _four.count)

    return _lanes(), code


@intrinsic(prefer_literal=True)
def _numbers(typing_context, address, form):
    """A group of stored numbers, in planes."""
    read = _dense_numbers if form.literal_value in _DENSE_BYTES else _packed_numbers

    def code(context, builder, signature, arguments):
        return _joined(builder, read(builder, arguments[0], form.literal_value))

    return _lanes(types.int64, form), code


@intrinsic(prefer_literal=True)
def _in_planes(typing_context, address, planes):
    """A group of plain numbers, in planes."""
    each = planes.literal_value

    def code(context, builder, signature, arguments):
        wide = ir.VectorType(ir.FloatType(), each * WIDTH)
        found = [_read(builder, arguments[0], 4 * i * WIDTH, wide) for i in range(0, _four.count, each)]
        orders = [range(plane, each * WIDTH, each) for plane in range(each)]
        return _joined(builder, [_picked(builder, v, list(order)) for v in found for order in orders])

    return _lanes(types.int64, planes), code


@intrinsic(prefer_literal=True)
def _write_sum(typing_context, address, base, lanes, planes):
    """A group of plain numbers, written as those at ``base`` and lanes that are in planes."""
    each = planes.literal_value

    def code(context, builder, signature, arguments):
        address, base, lanes, _ = arguments
        vectors = _split(builder, lanes)
        wide = ir.VectorType(ir.FloatType(), each * WIDTH)
        order = [WIDTH * (j % each) + j // each for j in range(each * WIDTH)]
        for i in range(0, _four.count, each):
            own = vectors[i : i + each]
            while len(own) > 1:
                own = [_beside(builder, a, b) for a, b in zip(own[::2], own[1::2], strict=True)]
            total = builder.fadd(_read(builder, base, 4 * i * WIDTH, wide), _picked(builder, own[0], order))
            builder.store(total, _at(builder, address, 4 * i * WIDTH, wide), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, _lanes, planes), code


def _beside(builder, a, b):
    both = list(range(2 * a.type.count))
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_i32, len(both)), both))


@intrinsic
def _plus(typing_context, total, lanes, factor):
    """``total + factor * lanes``"""

    def code(context, builder, signature, arguments):
        total, lanes = (_split(builder, a) for a in arguments[:2])
        factor = _everywhere(builder, arguments[2])
        return _joined(
            builder, [_multiply_add(builder, b, factor, a) for a, b in zip(total, lanes, strict=True)]
        )

    return _lanes(_lanes, _lanes, types.float32), code


@intrinsic
def _kept(typing_context, address):
    """A group as it was kept at an address."""

    def code(context, builder, signature, arguments):
        steps = range(0, _GROUP_BYTES, 4 * WIDTH)
        return _joined(builder, [_read(builder, arguments[0], at, _floats) for at in steps])

    return _lanes(types.int64), code


@intrinsic
def _keep(typing_context, address, lanes):
    """Keep a group at an address."""

    def code(context, builder, signature, arguments):
        for i, vector in enumerate(_split(builder, arguments[1])):
            builder.store(vector, _at(builder, arguments[0], 4 * WIDTH * i, _floats), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, _lanes), code


@intrinsic
def _collect(typing_context, address, one, other, factor):
    """Add ``factor * one * other`` to the sums at an address, one for each element of a vector."""

    def code(context, builder, signature, arguments):
        first, *rest = zip(*(_split(builder, a) for a in arguments[1:3]), strict=True)
        product = builder.fmul(*first)
        for a, b in rest:
            product = _multiply_add(builder, a, b, product)
        sums = _read(builder, arguments[0], 0, _floats)
        sums = _multiply_add(builder, product, _everywhere(builder, arguments[3]), sums)
        builder.store(sums, _at(builder, arguments[0], 0, _floats), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, _lanes, _lanes, types.float32), code


@intrinsic(prefer_literal=True)
def _ask_for(typing_context, address, size):
    """Have memory brought nearer, to the second cache; any address will do."""
    lines = range(0, size.literal_value, LINE)

    def code(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, _i32, _i32, _i32])
        known = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        for line in lines:
            where = builder.inttoptr(builder.add(arguments[0], ir.Constant(_i64, line)), cgutils.voidptr_t)
            builder.call(known, [where, *(ir.Constant(_i32, v) for v in (0, 2, 1))])
        return context.get_dummy_value()

    return types.void(types.int64, size), code


@intrinsic
def _bfloat16(typing_context, value):
    def code(context, builder, signature, arguments):
        wide = builder.zext(arguments[0], _i32)
        return builder.bitcast(builder.shl(wide, ir.Constant(_i32, 16)), ir.FloatType())

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
        counter = builder.inttoptr(arguments[0], _i64.as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(_i64, 1), "monotonic")

    return types.int64(types.int64), code


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
"""What is to be done: addresses and sizes. Steps are from one vector to the next."""

_compiled = numba.njit(fastmath=True, nogil=True, cache=True, error_model="numpy")


@_compiled
def _fill_scales(room, task, row, first):
    """What each group's codes are multiplied by in a piece; dense numbers are what they are."""
    for i in range(len(room)):
        if task.scales == 0:
            room[i] = 1
        else:
            at = task.scales + (row + i) * task.scales_step + 2 * first
            scales = numba.carray(_pointer(at), (room.shape[1],), numpy.uint16)
            for g in range(scales.size):
                room[i, g] = _bfloat16(scales[g])


@_compiled
def _add_up(sums, lanes):
    """In 64 bits, what 32 were enough for."""
    for k in range(len(lanes)):
        for i in range(sums.size):
            for j in range(WIDTH):
                sums[i] += lanes[k, i, j]
                lanes[k, i, j] = 0


@cache
def _loop(form, adds, multiplies):
    """What every thread does: take the next piece until there is none.

    To add is ``out = base + sum of coefficient * stored``; the base is much larger than what is added and
    comes last, so that little is rounded away. To multiply is ``sums = sum over elements of stored *
    gradient``. Both at once read what is stored once.
    """
    each, step = planes(form), group_bytes(form)

    @numba.cfunc("void(voidptr)", cache=True)  # all in one: calls of other closures could not be cached
    def loop(address):
        task = numba.carray(address, (1,), _TASK)[0]
        coefficients = numba.carray(_pointer(task.coefficients), (task.rows,), numpy.float32)
        room = numpy.empty((BUNDLE, PIECE), numpy.float32)
        kept = numpy.empty(PIECE * GROUP, numpy.float32)
        lanes = numpy.zeros((PIECE // EXACT, BUNDLE, WIDTH), numpy.float32)
        nothing = numpy.zeros(GROUP, numpy.float32)
        bundles = max(1, -(-task.rows // BUNDLE))
        piece = _taken(task.counter)
        while piece < task.pieces:
            first = piece * PIECE
            groups = min(PIECE, task.groups - first)
            sums = numba.carray(_pointer(task.sums + 8 * piece * task.rows), (task.rows,), numpy.float64)
            for bundle in range(bundles):
                row, end = task.rows * bundle // bundles, task.rows * (bundle + 1) // bundles
                scales = room[: end - row, :groups]
                _fill_scales(scales, task, row, first)
                for g in range(groups):
                    at = task.stored + row * task.stored_step + (first + g) * step
                    here, so_far = _GROUP_BYTES * (first + g), kept.ctypes.data + _GROUP_BYTES * g
                    total = _kept(so_far) if adds and row else _zeros()
                    gradient = _in_planes(task.gradient + here, each) if multiplies else _zeros()
                    for i in range(end - row):
                        _ask_for(at + AHEAD, step)
                        numbers = _numbers(at, form)
                        if adds:
                            total = _plus(total, numbers, coefficients[row + i] * scales[i, g])
                        if multiplies:
                            _collect(lanes[g // EXACT, i].ctypes.data, gradient, numbers, scales[i, g])
                        at += task.stored_step
                    if adds and end == task.rows:
                        base = task.base + here if task.base else nothing.ctypes.data
                        _write_sum(task.out + here, base, total, each)
                    elif adds:
                        _keep(so_far, total)
                _add_up(sums[row:end], lanes)
            piece = _taken(task.counter)

    return loop


def add(form, out, base, stored, coefficients, scales=None):
    """``out = base + sum of coefficient * stored``, from zero if there is no base; vectors by elements."""
    _run(form, stored, scales, coefficients=coefficients, base=base, out=out)


def dots(form, stored, gradient, scales=None):
    """The product of each vector with a gradient."""
    return _run(form, stored, scales, gradient=gradient)


def add_and_dots(form, out, base, stored, coefficients, gradient, scales=None):
    """Both, in one pass."""
    return _run(form, stored, scales, coefficients=coefficients, base=base, out=out, gradient=gradient)


def _run(form, stored, scales, *, coefficients=None, base=None, out=None, gradient=None):
    """What is asked for over all full groups, and over what is left filled up with zeros."""
    loop = _loop(form, out is not None, gradient is not None)
    work = [base, out, gradient]
    size = next(w.size for w in work if w is not None)
    sums = _run_full(loop, stored, scales, coefficients, *work)
    left = size % GROUP
    if left:
        filled = [None if w is None else _filled_up(w[-left:], GROUP) for w in work]
        group, each = size // GROUP, group_bytes(form)
        codes = _filled_up(stored.view(numpy.uint8)[:, group * each :], each)
        own = None if scales is None else scales[:, group:].copy()
        sums += _run_full(loop, codes, own, coefficients, *filled)
        if out is not None:
            out[-left:] = filled[1][:left]
    return sums


def _filled_up(values, length):
    filled = numpy.zeros((*values.shape[:-1], length), values.dtype)
    filled[..., : values.shape[-1]] = values
    return filled


def _run_full(loop, stored, scales, coefficients, base, out, gradient):
    """Run a loop over all full groups on torch's threads; returns the sums, if it makes any."""
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
    """The entry of torch's OpenMP library through which compilers start parallel regions, if it has one."""
    for file in openmp_libraries():
        try:
            entry = ctypes.CDLL(str(file)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        entry.restype = None
        entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        return entry
    return None
