"""Vectors of numbers in registers, for numba: ``f = decay * f + load(rows, offset, lanes)``.

Loops over the columns of a row are too short for a compiler to vectorise well, and a state that
is carried from row to row would go through memory at every step. So kernels hold a block of
columns in one value of type `Vector`, which LLVM maps to whatever registers the processor has.

The number of lanes is part of the type: it is passed around as a tuple whose length counts
eights, ``LANES[32]``, which costs nothing when the kernel runs.
"""

from __future__ import annotations

import math
import operator
import struct
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.extending import intrinsic, lower_builtin, models, register_model
from numba.core.typing.templates import AbstractTemplate, infer_global, signature

LANES = {8 * n: (0,) * n for n in (1, 2, 4)}


class Vector(types.Type):
    """`lanes` numbers of one dtype."""

    def __init__(self, dtype: types.Float, lanes: int) -> None:
        self.dtype, self.lanes = dtype, lanes
        super().__init__(f"Vector({dtype}, {lanes})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, _llvm(vector))


def _llvm(vector: Vector) -> ir.VectorType:
    return ir.VectorType(_number(vector), vector.lanes)


def _number(vector: Vector) -> ir.Type:
    return ir.FloatType() if vector.dtype.bitwidth == 32 else ir.DoubleType()


def _splat(builder: Any, number: Any, vector: Vector) -> Any:
    """A number in every lane."""
    kind = _llvm(vector)
    index = ir.Constant(ir.IntType(32), 0)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), number, index)
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), vector.lanes), None)
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)


def _constant(x: float, vector: Vector) -> Any:
    if vector.dtype.bitwidth == 32:
        x = struct.unpack("f", struct.pack("f", x))[0]
    return ir.Constant(_llvm(vector), [ir.Constant(_number(vector), x)] * vector.lanes)


def _call(builder: Any, name: str, result: Any, operands: list[Any], **flags: Any) -> Any:
    kind = ir.FunctionType(result, [x.type for x in operands])
    return builder.call(
        cgutils.get_or_insert_function(builder.module, kind, name), operands, **flags
    )


def _math(builder: Any, name: str, vector: Vector, *operands: Any) -> Any:
    """An LLVM intrinsic of vectors: ``llvm.<name>.v32f32``."""
    suffix = f"v{vector.lanes}f{vector.dtype.bitwidth}"
    return _call(builder, f"llvm.{name}.{suffix}", _llvm(vector), list(operands))


def _address(context: Any, builder: Any, kind: Any, array: Any, offset: Any, vector: Vector) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    pointer = builder.gep(data, [offset], source_etype=_number(vector))
    return builder.bitcast(pointer, _llvm(vector).as_pointer())


@intrinsic
def load(typingctx, array, offset, lanes):  # type: ignore[no-untyped-def]
    """The numbers of a flat array from `offset` on."""
    vector = Vector(array.dtype, 8 * lanes.count)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        index = context.cast(builder, args[1], offset, types.intp)
        address = _address(context, builder, array, args[0], index, vector)
        return builder.load(address, align=vector.dtype.bitwidth // 8, typ=_llvm(vector))

    return vector(array, offset, lanes), generate


@intrinsic
def store(typingctx, array, offset, value):  # type: ignore[no-untyped-def]
    """Writes a vector into a flat array, from `offset` on."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        index = context.cast(builder, args[1], offset, types.intp)
        address = _address(context, builder, array, args[0], index, value)
        builder.store(args[2], address, align=value.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, offset, value), generate


@intrinsic
def fill(typingctx, number, lanes):  # type: ignore[no-untyped-def]
    """The same number in every lane."""
    vector = Vector(number, 8 * lanes.count)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _splat(builder, args[0], vector)

    return vector(number, lanes), generate


@intrinsic
def pick(typingctx, array, offset, lanes):  # type: ignore[no-untyped-def]
    """The number at `offset`, which is not negative, in every lane: nothing is looked at beside."""
    vector = Vector(array.dtype, 8 * lanes.count)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        index = context.cast(builder, args[1], offset, types.intp)
        data = context.make_array(array)(context, builder, args[0]).data
        address = builder.gep(data, [index], source_etype=_number(vector))
        number = builder.load(address, align=vector.dtype.bitwidth // 8, typ=_number(vector))
        return _splat(builder, number, vector)

    return vector(array, offset, lanes), generate


@intrinsic
def total(typingctx, value):  # type: ignore[no-untyped-def]
    """The sum of the lanes."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        number = _number(value)
        name = f"llvm.vector.reduce.fadd.v{value.lanes}f{value.dtype.bitwidth}"
        operands = [ir.Constant(number, -0.0), args[0]]
        return _call(builder, name, number, operands, fastmath=("reassoc",))

    return value.dtype(value), generate


def _arithmetic(symbol: Any, name: str) -> None:
    """Defines an operator for vectors, and for a vector and a number."""

    @infer_global(symbol)
    class Typing(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            vectors = [x for x in args if isinstance(x, Vector)]
            if len(args) == 2 and vectors:
                vector = vectors[0]
                number = vector.dtype
                return signature(vector, *(x if isinstance(x, Vector) else number for x in args))
            return None

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        x, y = (
            value if isinstance(kind, Vector) else _splat(builder, value, sig.return_type)
            for value, kind in zip(args, sig.args, strict=True)
        )
        # A product and a sum may become one instruction, with one rounding.
        return getattr(builder, name)(x, y, flags=("contract",))

    for kinds in ((Vector, Vector), (types.Float, Vector), (Vector, types.Float)):
        lower_builtin(symbol, *kinds)(generate)


for _symbol, _name in (
    (operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):  # fmt: skip
    _arithmetic(_symbol, _name)


def _horner(builder: Any, vector: Vector, x: Any, coefficients: list[float]) -> Any:
    """``c_0 + c_1 x + c_2 x² + …``."""
    value = _constant(coefficients[-1], vector)
    for c in coefficients[-2::-1]:
        value = _math(builder, "fmuladd", vector, value, x, _constant(c, vector))
    return value


# ln 2 as a sum of two: the first has so few digits that a product with an exponent is exact.
_LN2 = {32: (0.693359375, -2.12194440e-4), 64: (6.93145751953125e-1, 1.42860682030941723212e-6)}
_MANTISSA = {32: 23, 64: 52}


def _integers(vector: Vector) -> tuple[Any, Any]:
    """The integers of as many bits, and a function that makes a vector of one of them."""
    kind = ir.VectorType(ir.IntType(vector.dtype.bitwidth), vector.lanes)
    return kind, lambda x: ir.Constant(kind, [ir.Constant(kind.element, x)] * vector.lanes)


def _exponential(builder: Any, vector: Vector, x: Any) -> Any:
    """``e^x``, within an ulp or two: ``x = k ln 2 + r`` and a Taylor polynomial of r."""
    bits = vector.dtype.bitwidth
    lowest, highest = (-87.0, 88.0) if bits == 32 else (-708.0, 709.0)
    x = _math(builder, "maxnum", vector, x, _constant(lowest, vector))
    x = _math(builder, "minnum", vector, x, _constant(highest, vector))
    k = _math(builder, "rint", vector, builder.fmul(x, _constant(1 / math.log(2), vector)))
    minus_k = builder.fneg(k)
    r = x
    for share in _LN2[bits]:
        r = _math(builder, "fmuladd", vector, minus_k, _constant(share, vector), r)
    terms = 8 if bits == 32 else 14
    value = _horner(builder, vector, r, [1 / math.factorial(i) for i in range(terms)])
    kind, integer = _integers(vector)
    bias, mantissa = (127 if bits == 32 else 1023), _MANTISSA[bits]
    exponent = builder.add(builder.fptosi(k, kind), integer(bias))
    power = builder.bitcast(builder.shl(exponent, integer(mantissa)), _llvm(vector))
    return builder.fmul(value, power)


def _logarithm(builder: Any, vector: Vector, x: Any) -> Any:
    """``log x`` of a normal number: ``x = 2^k m`` and ``log m = 2 artanh((m - 1) / (m + 1))``."""
    bits = vector.dtype.bitwidth
    kind, integer = _integers(vector)
    mantissa = _MANTISSA[bits]
    as_integer = builder.bitcast(x, kind)
    # From sqrt(1/2) on, so that m is nearest to one.
    start = {32: 0x3F3504F3, 64: 0x3FE6A09E667F3BCD}[bits]
    shifted = builder.sub(as_integer, integer(start))
    k = builder.ashr(shifted, integer(mantissa))
    m = builder.bitcast(builder.sub(as_integer, builder.shl(k, integer(mantissa))), _llvm(vector))
    one = _constant(1.0, vector)
    s = builder.fdiv(builder.fsub(m, one), builder.fadd(m, one))
    terms = 6 if bits == 32 else 12
    series = _horner(builder, vector, builder.fmul(s, s), [2 / (2 * i + 1) for i in range(terms)])
    k = builder.sitofp(k, _llvm(vector))
    high, low = (builder.fmul(k, _constant(share, vector)) for share in _LN2[bits])
    return builder.fadd(builder.fadd(builder.fmul(s, series), low), high)


def _sine_and_cosine(builder: Any, vector: Vector, x: Any) -> tuple[Any, Any]:
    """For ``|x|`` up to some hundreds: ``x = k π/2 + r`` and Taylor polynomials of r."""
    bits = vector.dtype.bitwidth
    k = _math(builder, "rint", vector, builder.fmul(x, _constant(2 / math.pi, vector)))
    minus_k = builder.fneg(k)
    parts = (
        (1.5703125, 4.837512969970703125e-4, 7.549789948768648e-8) if bits == 32
        else (1.57079625129699707031, 7.54978941586159635335e-8, 5.39030285815811905290e-15)
    )  # fmt: skip
    r = x
    for share in parts:
        r = _math(builder, "fmuladd", vector, minus_k, _constant(share, vector), r)
    square = builder.fmul(r, r)
    terms = 6 if bits == 32 else 10
    signs = [(-1) ** i for i in range(terms)]
    sine = [s / math.factorial(2 * i + 1) for i, s in enumerate(signs)]
    cosine = [s / math.factorial(2 * i) for i, s in enumerate(signs)]
    sine = builder.fmul(r, _horner(builder, vector, square, sine))
    cosine = _horner(builder, vector, square, cosine)
    kind, integer = _integers(vector)
    quarter = builder.fptosi(k, kind)
    odd = builder.icmp_signed("!=", builder.and_(quarter, integer(1)), integer(0))
    down = builder.icmp_signed("!=", builder.and_(quarter, integer(2)), integer(0))
    left = builder.icmp_signed(
        "!=", builder.and_(builder.add(quarter, integer(1)), integer(2)), integer(0)
    )
    sine, cosine = builder.select(odd, cosine, sine), builder.select(odd, sine, cosine)
    return (
        builder.select(down, builder.fneg(sine), sine),
        builder.select(left, builder.fneg(cosine), cosine),
    )


def _function(compute: Any) -> Any:
    @intrinsic
    def apply(typingctx, x):  # type: ignore[no-untyped-def]
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return compute(builder, x, args[0])

        return x(x), generate

    return apply


exp = _function(_exponential)
log = _function(_logarithm)
absolute = _function(lambda builder, vector, x: _math(builder, "fabs", vector, x))
sin = _function(lambda builder, vector, x: _sine_and_cosine(builder, vector, x)[0])
cos = _function(lambda builder, vector, x: _sine_and_cosine(builder, vector, x)[1])


@intrinsic
def where_above(typingctx, x, bound, value):  # type: ignore[no-untyped-def]
    """`value` in lanes where ``x > bound`` (a number), zero in the others."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        above = builder.fcmp_ordered(">", args[0], _splat(builder, args[1], x))
        return builder.select(above, args[2], _constant(0.0, value))

    return value(x, bound, value), generate


@intrinsic
def swap_halves(typingctx, x):  # type: ignore[no-untyped-def]
    """The second half of the lanes, then the first."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        index, half = ir.IntType(32), x.lanes // 2
        order = [*range(half, x.lanes), *range(half)]
        mask = ir.Constant(ir.VectorType(index, x.lanes), [ir.Constant(index, i) for i in order])
        return builder.shuffle_vector(args[0], ir.Constant(_llvm(x), ir.Undefined), mask)

    return x(x), generate


@intrinsic
def fold(typingctx, x):  # type: ignore[no-untyped-def]
    """The sum of the two halves of the lanes."""
    vector = Vector(x.dtype, x.lanes // 2)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        index, half = ir.IntType(32), vector.lanes
        low, high = (
            builder.shuffle_vector(
                args[0], ir.Constant(_llvm(x), ir.Undefined),
                ir.Constant(ir.VectorType(index, half), [ir.Constant(index, i) for i in order]),
            )
            for order in (range(half), range(half, 2 * half))
        )  # fmt: skip
        return builder.fadd(low, high)

    return vector(x), generate


@intrinsic
def transpose_tile(typingctx, r0, r1, r2, r3, r4, r5, r6, r7):  # type: ignore[no-untyped-def]
    """The transpose of eight vectors of eight lanes, as a tuple of eight vectors.

    Each of the three rounds brings together what comes from twice as many vectors, by shuffles
    that are one instruction each for float32 in registers of 256 bits.
    """
    index = ir.IntType(32)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        def shuffle(x: Any, y: Any, order: tuple[int, ...]) -> Any:
            mask = ir.Constant(ir.VectorType(index, 8), [ir.Constant(index, i) for i in order])
            return builder.shuffle_vector(x, y, mask)

        pairs, fours = [], []
        for x, y in zip(args[::2], args[1::2], strict=True):
            low = shuffle(x, y, (0, 8, 1, 9, 4, 12, 5, 13))
            pairs.append((low, shuffle(x, y, (2, 10, 3, 11, 6, 14, 7, 15))))
        for above, below in zip(pairs[::2], pairs[1::2], strict=True):
            fours.append([
                shuffle(x, y, order)
                for x, y in zip(above, below, strict=True)
                for order in ((0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15))
            ])  # fmt: skip
        found = [
            shuffle(x, y, order)
            for order in ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
            for x, y in zip(*fours, strict=True)
        ]
        return context.make_tuple(builder, sig.return_type, found)

    return types.UniTuple(r0, 8)(*(r0,) * 8), generate
