"""A group of 64 numbers in vector registers, as LLVM intrinsics for the loops in ``numba_cpu``.

The group is written in vectors of 512 bits: left to itself, the compiler uses half of that width and adds up
the elements of a vector in every group. Codes of less than a byte are processed in planes (all first codes of
the bytes, all second codes, ...): the order is restored once per group, not once per vector.

numba caches compiled loops by the time stamp of ``numba_cpu.py``: touch that file after a change here.
"""

# mypy: ignore-errors

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

GROUP = 64
LINE = 64  # bytes of a cache line
WIDTH = 16  # elements of a vector of 512 bits; shorter ones are used in pairs on machines without these

# A form says how numbers are stored: the bits of a code, or one of these.
FLOAT16, BFLOAT16, FLOAT32 = 16, 17, 32
_DENSE_BYTES = {FLOAT16: 2 * GROUP, BFLOAT16: 2 * GROUP, FLOAT32: 4 * GROUP}

_i32, _i64 = ir.IntType(32), ir.IntType(64)
_floats = ir.VectorType(ir.FloatType(), WIDTH)
_words = ir.VectorType(_i32, WIDTH)
_four = ir.ArrayType(_floats, GROUP // WIDTH)
GROUP_BYTES = 4 * GROUP  # of 32-bit numbers


def group_bytes(form):
    """Return the bytes of a stored group."""
    return _DENSE_BYTES.get(form) or GROUP * form // 8


def planes(form):
    """Return the number of codes in a byte."""
    return 1 if form in _DENSE_BYTES else 8 // form


# A group in registers, as a type for variables of compiled code


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
            # subtracted as bytes, of which a register holds the most
            number = builder.sitofp(builder.sext(builder.sub(own, _all(bytes_, middle)), _words), _floats)
            yield builder.fsub(number, _all(_floats, 0.5)) if bits == 2 else number


@intrinsic
def zeros(typing_context):
    def code(context, builder, signature, arguments):
        return _joined(builder, [_all(_floats, 0.0)] * _four.count)

    return _lanes(), code


@intrinsic(prefer_literal=True)
def load_numbers(typing_context, address, form):
    """Load a group of stored numbers, in planes."""
    read = _dense_numbers if form.literal_value in _DENSE_BYTES else _packed_numbers

    def code(context, builder, signature, arguments):
        return _joined(builder, read(builder, arguments[0], form.literal_value))

    return _lanes(types.int64, form), code


@intrinsic(prefer_literal=True)
def load_in_planes(typing_context, address, planes):
    """Load a group of float32 numbers, in planes."""
    each = planes.literal_value

    def code(context, builder, signature, arguments):
        wide = ir.VectorType(ir.FloatType(), each * WIDTH)
        found = [_read(builder, arguments[0], 4 * i * WIDTH, wide) for i in range(0, _four.count, each)]
        orders = [range(plane, each * WIDTH, each) for plane in range(each)]
        return _joined(builder, [_picked(builder, v, list(order)) for v in found for order in orders])

    return _lanes(types.int64, planes), code


@intrinsic(prefer_literal=True)
def write_sum(typing_context, address, base, lanes, planes):
    """Write a group of float32 numbers: those at ``base`` plus lanes that are in planes."""
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
def multiply_add(typing_context, total, lanes, factor):
    """Return ``total + factor * lanes``."""

    def code(context, builder, signature, arguments):
        total, lanes = (_split(builder, a) for a in arguments[:2])
        factor = _everywhere(builder, arguments[2])
        return _joined(
            builder, [_multiply_add(builder, b, factor, a) for a, b in zip(total, lanes, strict=True)]
        )

    return _lanes(_lanes, _lanes, types.float32), code


@intrinsic
def load_group(typing_context, address):
    """Load a group that ``store_group`` stored."""

    def code(context, builder, signature, arguments):
        steps = range(0, GROUP_BYTES, 4 * WIDTH)
        return _joined(builder, [_read(builder, arguments[0], at, _floats) for at in steps])

    return _lanes(types.int64), code


@intrinsic
def store_group(typing_context, address, lanes):
    """Store a group at an address."""

    def code(context, builder, signature, arguments):
        for i, vector in enumerate(_split(builder, arguments[1])):
            builder.store(vector, _at(builder, arguments[0], 4 * WIDTH * i, _floats), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, _lanes), code


@intrinsic
def add_products(typing_context, address, one, other, factor):
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
def prefetch(typing_context, address, size):
    """Prefetch memory to the second-level cache; any address is allowed."""
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
def bfloat16(typing_context, value):
    def code(context, builder, signature, arguments):
        wide = builder.zext(arguments[0], _i32)
        return builder.bitcast(builder.shl(wide, ir.Constant(_i32, 16)), ir.FloatType())

    return types.float32(types.uint16), code


@intrinsic
def pointer(typing_context, address):
    """Return an address as a pointer."""

    def code(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), code


@intrinsic
def fetch_add(typing_context, address):
    """Return the number at an address and increase it by one, atomically."""

    def code(context, builder, signature, arguments):
        counter = builder.inttoptr(arguments[0], _i64.as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(_i64, 1), "monotonic")

    return types.int64(types.int64), code
