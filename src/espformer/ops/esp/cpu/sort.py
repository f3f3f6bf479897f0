"""A stable sort of the numbers of one slice, several times as fast as a general sort.

Of few numbers every one counts those below it, without a branch that could be mispredicted. Many
are put into buckets of equal width, by a counting sort, and those that share a bucket are then
moved past each other one by one. Where there would be too much to move, as with numbers that crowd
together far from others, and where numbers are not finite, they are sorted by their bits instead:
those of a float, with the sign taken care of, are an integer that sorts as the float does.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.extending import intrinsic

from espformer.ops.esp.cpu.compiling import part, relaxed, stand_alone

FEW = 20  # numbers whose ranks are counted
MOVES = 8  # of numbers in buckets, on average, until their bits are looked at


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

    `tokens` are the n that take part, ascending; equal numbers keep their order. `keys` (uint64)
    has space for twice n, `spare` (int32) for n, and `counts` for 256 times 8.
    """
    stand_alone()
    zero = numbers.dtype.type(0)  # which makes -0 a 0
    top = np.uint64(1) << np.uint64(8 * numbers.itemsize - 1)
    if n <= FEW:
        for i in range(n):
            keys[i] = _sortable(numbers[tokens[i]] + zero, top)
        for i in range(n):
            key = keys[i]
            rank = 0
            for j in range(n):
                rank += (keys[j] < key) | ((keys[j] == key) & (j < i))
            order[rank] = tokens[i]
            points[rank] = numbers[tokens[i]]
        return
    for i in range(n):
        points[i] = numbers[tokens[i]]
    lowest, width = _range(points, n)
    if _share_out(points, n, lowest, width, keys, counts):
        for i in range(n):
            order[i] = tokens[np.uint32(keys[i])]
            points[i] = numbers[order[i]]
        if _settle(points, order, n):
            return
    for i in range(n):
        keys[i], order[i] = _sortable(numbers[tokens[i]] + zero, top), tokens[i]
    _sort_by_bits(keys, order, spare, counts, n, np.int64(numbers.itemsize))
    for i in range(n):
        points[i] = numbers[order[i]]


@part
def _sortable(x, top):  # type: ignore[no-untyped-def]
    """An integer that sorts as the float does; `top` is the bit of its sign."""
    bits = _bits(x)
    return (bits ^ (top | (top - np.uint64(1)))) if bits & top else (bits | top)


@relaxed("reassoc")
def _range(x, n):  # type: ignore[no-untyped-def]
    """The least number, and how far the largest is from it: NaN if any is not finite."""
    stand_alone()
    lowest = highest = x[0]
    nonfinite_marker = x.dtype.type(0)
    for i in range(n):
        lowest, highest = min(lowest, x[i]), max(highest, x[i])
        nonfinite_marker += x[i] * x.dtype.type(0)
    return np.float64(lowest), np.float64(highest) - np.float64(lowest) + nonfinite_marker


@part
def _share_out(x, n, lowest, width, keys, counts):  # type: ignore[no-untyped-def]
    """Places of numbers in the order of their buckets, in the lower halves of `keys`.

    False if there are no such buckets.
    """
    stand_alone()
    # So many that most numbers are alone in theirs.
    bits = 7 if n <= 80 else 9 if n <= 256 else 11 if n <= 1024 else 8
    passes = 1 if n <= 1024 else 2 if n <= 1 << 14 else 3
    scale = 0.0
    if width > 0:
        scale = ((1 << (bits * passes)) - 1) / width
    if not scale < 1e300 or not width < 1e300:
        return False
    low = np.uint64(32)
    for i in range(n):
        bucket = np.uint64(np.uint32((np.float64(x[i]) - lowest) * scale))
        keys[i] = (bucket << low) | np.uint64(i)
    last, source, target = np.uint64((1 << bits) - 1), np.uint64(0), np.uint64(n)
    for _ in range(passes):
        for i in range(1 << bits):
            counts[i] = 0
        for i in range(n):
            counts[(keys[source + np.uint64(i)] >> low) & last] += 1
        first = 0
        for i in range(1 << bits):
            counts[i], first = first, first + counts[i]
        for i in range(n):
            key = keys[source + np.uint64(i)]
            digit = (key >> low) & last
            place = counts[digit]
            counts[digit] = place + 1
            keys[target + np.uint64(place)] = key
        low += np.uint64(bits)
        source, target = target, source
    if source:
        for i in range(n):
            keys[i] = keys[n + i]
    return True


@part
def _settle(points, order, n):  # type: ignore[no-untyped-def]
    """Moves numbers down past larger ones; False, and no order, if that would take long."""
    stand_alone()
    left = MOVES * n
    for i in range(1, n):
        x = points[i]
        if points[i - 1] > x:
            token, j = order[i], i
            while j > 0 and points[j - 1] > x:
                points[j], order[j] = points[j - 1], order[j - 1]
                j -= 1
            points[j], order[j] = x, token
            left -= i - j
            if left < 0:
                return False
    return True


@part
def _sort_by_bits(keys, order, spare, counts, n, digits):  # type: ignore[no-untyped-def]
    """Sorts by the lowest `digits` bytes, to and fro between `order` and `spare`."""
    stand_alone()
    for i in range(256 * digits):
        counts[i] = 0
    for i in range(n):
        key = keys[i]
        for digit in range(digits):
            counts[256 * digit + np.int64((key >> np.uint64(8 * digit)) & np.uint64(255))] += 1
    source, target = 0, n  # offsets in `keys` of the input and of the output of a pass
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
