"""The order of the numbers of one slice: stable, and several times as fast as a general sort.

The bits of a float, with the sign taken care of, are an integer that sorts as the float does.
Of few numbers every one counts those below it, without a branch that could be mispredicted; many
are sorted by their digits to the base 256, the lowest first.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.extending import intrinsic

from espformer.ops.esp.cpu.compiling import part, stand_alone

FEW = 72  # numbers whose ranks are counted


@intrinsic
def _bits(typingctx, x):  # type: ignore[no-untyped-def]
    """The bits of a float as an unsigned integer of 64 bits."""
    width = x.bitwidth

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        bits = builder.bitcast(args[0], ir.IntType(width))
        return bits if width == 64 else builder.zext(bits, ir.IntType(64))

    return types.uint64(x), generate


@part
def sort_tokens(numbers, tokens, n, order, points, keys, spare, counts):  # type: ignore[no-untyped-def]
    """Writes the tokens in ascending order of their numbers to `order`, and these to `points`.

    `tokens` are the n that take part, ascending; equal numbers keep their order. `keys` (uint64) is
    room for twice n, `spare` (int32) for n, and `counts` for 256 times 8.
    """
    stand_alone()
    zero = numbers.dtype.type(0)
    top = np.uint64(1) << np.uint64(8 * numbers.itemsize - 1)
    ones = top | (top - np.uint64(1))
    for i in range(n):
        x = numbers[tokens[i]] + zero  # -0 becomes 0
        bits = _bits(x)
        keys[i] = (bits ^ ones) if bits & top else (bits | top)
    if n <= FEW:
        for i in range(n):
            key = keys[i]
            rank = 0
            for j in range(n):
                rank += (keys[j] < key) | ((keys[j] == key) & (j < i))
            order[rank] = tokens[i]
    else:
        for i in range(n):
            order[i] = tokens[i]
        _sort_by_digits(keys, order, spare, counts, n, np.int64(numbers.itemsize))
    for i in range(n):
        points[i] = numbers[order[i]]


@part
def _sort_by_digits(keys, order, spare, counts, n, digits):  # type: ignore[no-untyped-def]
    """Sorts by the lowest `digits` bytes, to and fro between `order` and `spare`."""
    stand_alone()
    for i in range(256 * digits):
        counts[i] = 0
    for i in range(n):
        key = keys[i]
        for digit in range(digits):
            counts[256 * digit + np.int64((key >> np.uint64(8 * digit)) & np.uint64(255))] += 1
    source, target = 0, n  # where in `keys` the numbers stand, and go
    for digit in range(digits):
        shift, base = np.uint64(8 * digit), 256 * digit
        if counts[base + np.int64((keys[source] >> shift) & np.uint64(255))] == n:
            continue  # all have the same digit here
        first = 0
        for value in range(base, base + 256):
            counts[value], first = first, first + counts[value]
        for i in range(n):
            key = keys[source + i]
            value = base + np.int64((key >> shift) & np.uint64(255))
            place = counts[value]
            counts[value] = place + 1
            keys[target + place] = key
            if source == 0:
                spare[place] = order[i]
            else:
                order[place] = spare[i]
        source, target = target, source
    if source:
        for i in range(n):
            order[i] = spare[i]
