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

FEW = 96  # numbers whose ranks are counted


@intrinsic
def _bits(typingctx, x):  # type: ignore[no-untyped-def]
    """The bits of a float as an unsigned integer of 64 bits."""
    width = x.bitwidth

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        bits = builder.bitcast(args[0], ir.IntType(width))
        return bits if width == 64 else builder.zext(bits, ir.IntType(64))

    return types.uint64(x), generate


@part
def sort_tokens(numbers, tokens, n, order, points, keys, spare_keys, spare):  # type: ignore[no-untyped-def]
    """Writes the tokens in ascending order of their numbers to `order`, and these to `points`.

    `tokens` are the n that take part, ascending; equal numbers keep their order. `keys`,
    `spare_keys` (uint64) and `spare` (int32) are room for n each.
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
            for j in range(i):
                rank += keys[j] <= key
            for j in range(i + 1, n):
                rank += keys[j] < key
            order[rank] = tokens[i]
    else:
        for i in range(n):
            order[i] = tokens[i]
        _sort_by_digits(keys, order, spare_keys, spare, n, np.int64(numbers.itemsize))
    for i in range(n):
        points[i] = numbers[order[i]]


@part
def _sort_by_digits(keys, order, spare_keys, spare, n, digits):  # type: ignore[no-untyped-def]
    """Sorts by the lowest `digits` bytes."""
    stand_alone()
    counts = np.zeros((digits, 256), np.int32)
    for i in range(n):
        key = keys[i]
        for digit in range(digits):
            counts[digit, (key >> np.uint64(8 * digit)) & np.uint64(255)] += 1
    moved = False
    for digit in range(digits):
        shift = np.uint64(8 * digit)
        count = counts[digit]
        source_keys, source = (spare_keys, spare) if moved else (keys, order)
        if count[(source_keys[0] >> shift) & np.uint64(255)] == n:
            continue  # all have the same digit here
        first = np.int32(0)
        for value in range(256):
            count[value], first = first, first + count[value]
        target_keys, target = (keys, order) if moved else (spare_keys, spare)
        for i in range(n):
            key = source_keys[i]
            value = (key >> shift) & np.uint64(255)
            place = count[value]
            count[value] = place + 1
            target_keys[place], target[place] = key, source[i]
        moved = not moved
    if moved:
        for i in range(n):
            order[i] = spare[i]
