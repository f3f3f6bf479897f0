"""Products with the kernel ``κ[n, j] = exp(-(s_n - s_j)² / t)`` of sorted numbers, by states.

The torch twin is :mod:`espformer.ops.esp.sorted_kernel`. Ranks are cut into chunks. Inside one the
kernel is exact, and between chunks it is ``Re Σ_r w_r exp(-p_r x)`` with one state per pole and
side, evaluated at the first number of a chunk (from the left) or at its last (from the right). All
coefficients of a rank are stored in one row, so that the product with a chunk is a small matrix
product,

    y = M · (rows of the chunk, states from both sides),

with the columns (chunk; Re left, Re right, Im left, Im right), and another one for the slope.
Short sequences are one chunk, without states.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from espformer.ops.esp.cpu.compiling import part, stand_alone
from espformer.ops.esp.cpu.rows import clear
from espformer.ops.esp.cpu.simd import (
    LANES,
    cos,
    exp,
    fill,
    load,
    pick,
    sin,
    store,
    swap_halves,
    total,
    where_above,
)

# Rows of the table of poles; every one holds the poles of the left, then those of the right.
DECAYS, ANGULAR_RATES, WEIGHTS, SLOPES, IS_LEFT, IS_RIGHT = 0, 1, 2, 4, 6, 7

CHUNK, SHORT = 16, 40
EIGHT = LANES[8]
FARTHEST = 20.0  # bandwidths: from here on every pole is negligible
NEGLIGIBLE = -41.4  # exp of less: see `exponentials.NEGLIGIBLE`


class Layout(NamedTuple):
    """The layout of the coefficients of n ranks in one flat array."""

    chunk: int  # ranks in a chunk
    padded: int  # as many columns, in eights
    states: int  # that arrive at a chunk: both parts of both sides; none if there is one chunk
    stride: int  # of a row of coefficients
    pulling: int  # where those of the slope start
    into: int  # where those of what a rank adds to the states start
    hops: int  # where those from chunk to chunk start: far and near for every chunk


@part
def layout_of(n, lanes):  # type: ignore[no-untyped-def]
    chunk = n if n <= SHORT else CHUNK
    states = 0 if n <= SHORT else 16 * len(lanes)
    padded = -(-chunk // 8) * 8
    stride = padded + states
    rows = n + 4  # a few are read beyond the last
    into = 2 * rows * stride
    return Layout(chunk, padded, states, stride, rows * stride, into, into + n * states)


def buffer_sizes(count: int, poles: int, width: int) -> tuple[int, int]:
    """The size of the coefficients of up to `count` ranks, and of the scratch memory of
    products.
    """
    states = 2 * poles
    stride = max(SHORT + 8, CHUNK + states)
    coefficients = 2 * (count + 4) * stride + count * states + (count // CHUNK + 2) * 2 * states
    # A chunk with its states; what arrives from the left; the states of one side.
    beside = stride + (count // CHUNK + 2) * states // 2 + 4 * states
    return coefficients, beside * width + 2 * states


@part
def _decays(table, lanes, left, right):  # type: ignore[no-untyped-def]
    """``exp(-p x)``, real and imaginary parts: poles at `left`, then at `right` bandwidths."""
    number = table.dtype.type
    x = min(left, number(FARTHEST)) * load(table[IS_LEFT], 0, lanes)
    x = x + min(right, number(FARTHEST)) * load(table[IS_RIGHT], 0, lanes)
    fall = load(table[DECAYS], 0, lanes) * x
    size = where_above(fall, number(NEGLIGIBLE), exp(fall))
    angle = load(table[ANGULAR_RATES], 0, lanes) * x
    return size * cos(angle), size * sin(angle)


@part
def _weigh(table, weights, lanes, re, im, out, at):  # type: ignore[no-untyped-def]
    """``Re(w H)`` is the product of the two parts of the state H with these coefficients."""
    w, v = load(table[weights], 0, lanes), load(table[weights + 1], 0, lanes)
    store(out, at, w * re - v * im)
    store(out, at + 8 * len(lanes), table.dtype.type(-1) * (w * im + v * re))


@part
def set_chunks(table, lanes, points, n, inv_bandwidth, with_slope, coefficients, here):  # type: ignore[no-untyped-def]
    """The coefficients of every rank, and the decays of states from chunk to chunk.

    `here` is a buffer for the numbers of one chunk.
    """
    stand_alone()
    number = points.dtype.type
    at = layout_of(n, lanes)
    half = 8 * len(lanes)
    for start in range(0, n, at.chunk):
        end = min(start + at.chunk, n)
        for i in range(at.padded):
            here[i] = points[min(start + i, end - 1)]
        first, last = points[start], points[end - 1]
        for i in range(start, end):
            row = i * at.stride
            for j in range(0, at.padded, 8):
                x = inv_bandwidth * (load(here, j, EIGHT) - fill(points[i], EIGHT))
                fall = number(-1) * (x * x)
                value = where_above(fall, number(NEGLIGIBLE), exp(fall))
                store(coefficients, row + j, value)
                if with_slope:
                    store(coefficients, at.pulling + row + j, number(2) * (x * value))
            for j in range(end - start, at.padded):
                coefficients[row + j] = 0
                if with_slope:
                    coefficients[at.pulling + row + j] = 0
            if at.states:
                left = (points[i] - first) * inv_bandwidth
                right = (last - points[i]) * inv_bandwidth
                re, im = _decays(table, lanes, left, right)
                # The state that goes right is evaluated at the last number, so it takes the decays
                # over `right`: the halves are swapped.
                place = at.into + i * at.states
                store(coefficients, place, swap_halves(re))
                store(coefficients, place + half, swap_halves(im))
                row += at.padded
                _weigh(table, WEIGHTS, lanes, re, im, coefficients, row)
                if with_slope:
                    _weigh(table, SLOPES, lanes, re, im, coefficients, at.pulling + row)
        if at.states:
            # From here to the next chunk for the left, to the one before for the right.
            before, after = points[max(start - 1, 0)], points[min(end, n - 1)]
            place = at.hops + (start // at.chunk) * 2 * at.states
            for left, right in ((first, last), (last, first)):
                re, im = _decays(
                    table, lanes, (after - left) * inv_bandwidth, (right - before) * inv_bandwidth
                )
                store(coefficients, place, re)
                store(coefficients, place + half, im)
                place += at.states


@part
def _gather(x, order, scale, start, end, out, lanes):  # type: ignore[no-untyped-def]
    width = 8 * len(lanes)
    for i in range(start, end):
        store(out, (i - start) * width, scale[i] * load(x, order[i] * width, lanes))


@part
def _combine(matrix, start, first_row, stride, rows, z, y, lanes):  # type: ignore[no-untyped-def]
    """``y[first_row + i] = Σ_k matrix[first_row + i, k] z[k]``, four rows at a time.

    The matrix begins at `start` of a flat array, and its rows are `stride` apart.
    """
    stand_alone()
    width = 8 * len(lanes)
    zero = fill(matrix.dtype.type(0), lanes)
    for i in range(first_row, first_row + rows, 4):
        a, b, c, d = zero, zero, zero, zero
        at = start + i * stride
        for k in range(stride):
            row = load(z, k * width, lanes)
            a = a + pick(matrix, at + k, lanes) * row
            b = b + pick(matrix, at + stride + k, lanes) * row
            c = c + pick(matrix, at + 2 * stride + k, lanes) * row
            d = d + pick(matrix, at + 3 * stride + k, lanes) * row
        left = first_row + rows - i
        store(y, i * width, a)
        if left > 1:
            store(y, (i + 1) * width, b)
        if left > 2:
            store(y, (i + 2) * width, c)
        if left > 3:
            store(y, (i + 3) * width, d)


@part
def _add(x, y):  # type: ignore[no-untyped-def]
    """``x + y`` and its rounding error (compensated summation), since thousands of chunks add to a
    state.
    """
    found = x + y
    back = found - x
    return found, (x - (found - back)) + (y - back)


@part
def _carry(coefficients, at, start, end, index, offset, z, state, lanes):  # type: ignore[no-untyped-def]
    """The state that the next chunk receives, ``near decay · own sum + far decay · state``, for one
    side.

    The poles of a side are the columns ``[offset, offset + states / 4)`` of the real parts, and as
    many of the imaginary ones; `state` holds real parts, then imaginary ones, and then of both what
    rounding has taken so far.
    """
    stand_alone()
    width, count, half = 8 * len(lanes), at.states // 4, at.states // 2
    zero = fill(state.dtype.type(0), lanes)
    far = at.hops + index * 2 * at.states + offset
    near = far + at.states
    for r in range(0, count, 2):
        re, im, re_2, im_2 = zero, zero, zero, zero
        for i in range(start, end):
            row, place = load(z, (i - start) * width, lanes), at.into + i * at.states + offset + r
            re = re + pick(coefficients, place, lanes) * row
            im = im + pick(coefficients, place + half, lanes) * row
            re_2 = re_2 + pick(coefficients, place + 1, lanes) * row
            im_2 = im_2 + pick(coefficients, place + half + 1, lanes) * row
        for pole, own_re, own_im in ((r, re, im), (r + 1, re_2, im_2)):
            place, other = pole * width, (count + pole) * width
            was_re, was_im = load(state, place, lanes), load(state, other, lanes)
            lost_re = load(state, place + 2 * count * width, lanes)
            lost_im = load(state, other + 2 * count * width, lanes)
            c, s = coefficients[far + pole], coefficients[far + half + pole]
            e, f = coefficients[near + pole], coefficients[near + half + pole]
            kept, more = c * was_re - s * was_im, e * own_re - f * own_im
            found, lost = _add(kept, more + (c * lost_re - s * lost_im))
            store(state, place, found)
            store(state, place + 2 * count * width, lost)
            kept, more = c * was_im + s * was_re, e * own_im + f * own_re
            found, lost = _add(kept, more + (c * lost_im + s * lost_re))
            store(state, other, found)
            store(state, other + 2 * count * width, lost)


@part
def _move(source, start, target, to, rows, lanes):  # type: ignore[no-untyped-def]
    """Copies rows."""
    width = 8 * len(lanes)
    for i in range(rows):
        store(target, (to + i) * width, load(source, (start + i) * width, lanes))


@part
def multiply(kappa, x, order, scale, y, slope, lanes):  # type: ignore[no-untyped-def]
    """``y_n = Σ_j κ[n, j] scale_j x[order_j]``; unless `slope` is empty, its derivative in s_n."""
    stand_alone()
    n, coefficients = kappa.n, kappa.coefficients
    width = 8 * len(lanes)
    at = layout_of(n, kappa.lanes)
    chunk, padded, quarter = at.chunk, at.padded, at.states // 4
    start_of_all = np.int64(0)  # a literal zero would be a type of its own, compiled once more
    count, many = -(-n // chunk), 2 * quarter  # chunks, and states of one side
    z = kappa.scratch
    arriving = z[at.stride * width :]
    state = arriving[count * many * width :]
    clear(z, at.stride * width)
    clear(state, 2 * many * width)
    if quarter:
        for index in range(count):
            _move(state, start_of_all, arriving, index * many, many, lanes)
            start, end = index * chunk, min((index + 1) * chunk, n)
            _gather(x, order, scale, start, end, z, lanes)
            _carry(coefficients, at, start, end, index, start_of_all, z, state, lanes)
        clear(state, 2 * many * width)
    for index in range(count - 1, -1, -1):
        start, end = index * chunk, min((index + 1) * chunk, n)
        _gather(x, order, scale, start, end, z, lanes)
        for i in range((end - start) * width, padded * width):
            z[i] = 0
        for half in range(2):  # real parts, then imaginary ones
            to = padded + 2 * half * quarter
            _move(arriving, index * many + half * quarter, z, to, quarter, lanes)
            _move(state, half * quarter, z, to + quarter, quarter, lanes)
        _combine(coefficients, start_of_all, start, at.stride, end - start, z, y, lanes)
        if len(slope):
            _combine(coefficients, at.pulling, start, at.stride, end - start, z, slope, lanes)
        if quarter:
            _carry(coefficients, at, start, end, index, quarter, z, state, lanes)


@part
def multiply_column(kappa, x, y):  # type: ignore[no-untyped-def]
    """``y = κ x`` for one number per rank: the same, with all poles in the lanes."""
    multiply_column_with_slope(kappa, x, y, y[:0])


@part
def multiply_column_with_slope(kappa, x, y, slope):  # type: ignore[no-untyped-def]
    """The same, and unless `slope` is empty the derivative in ``s_n · inv_bandwidth``."""
    stand_alone()
    n, coefficients, lanes = kappa.n, kappa.coefficients, kappa.lanes
    half = 8 * len(lanes)
    at = layout_of(n, lanes)
    chunk, padded, states = at.chunk, at.padded, at.states
    count, quarter = -(-n // chunk), states // 4
    z = kappa.scratch
    arriving = z[at.stride :]
    clear(z, at.stride)
    zero = fill(y.dtype.type(0), lanes)
    for way in range(0 if states else 1, 2):  # to the right, then to the left
        re, im, lost_re, lost_im = zero, zero, zero, zero
        for step in range(count):
            index = count - 1 - step if way else step
            start, end = index * chunk, min((index + 1) * chunk, n)
            from_left = index * 2 * quarter
            if states:
                store(z, padded, re)
                store(z, padded + half, im)
            if not way:
                for i in range(quarter):
                    arriving[from_left + i] = z[padded + i]
                    arriving[from_left + quarter + i] = z[padded + half + i]
            else:
                for i in range(quarter):
                    z[padded + i] = arriving[from_left + i]
                    z[padded + half + i] = arriving[from_left + quarter + i]
                for i in range(padded):
                    z[i] = x[start + i] if start + i < end else 0
                for i in range(start, end):
                    found = fill(y.dtype.type(0), EIGHT)
                    for k in range(0, at.stride, 8):
                        row = load(coefficients, i * at.stride + k, EIGHT)
                        found = found + row * load(z, k, EIGHT)
                    y[i] = total(found)
                    if len(slope):
                        found = fill(y.dtype.type(0), EIGHT)
                        place = at.pulling + i * at.stride
                        for k in range(0, at.stride, 8):
                            found = found + load(coefficients, place + k, EIGHT) * load(z, k, EIGHT)
                        slope[i] = total(found)
            if states:
                own_re, own_im = zero, zero
                for i in range(start, end):
                    place = at.into + i * states
                    own_re = own_re + x[i] * load(coefficients, place, lanes)
                    own_im = own_im + x[i] * load(coefficients, place + half, lanes)
                place = at.hops + index * 2 * states
                c, s = load(coefficients, place, lanes), load(coefficients, place + half, lanes)
                place += states
                e, f = load(coefficients, place, lanes), load(coefficients, place + half, lanes)
                more = e * own_re - f * own_im + (c * lost_re - s * lost_im)
                more_im = e * own_im + f * own_re + (c * lost_im + s * lost_re)
                kept, kept_im = c * re - s * im, c * im + s * re
                re, lost_re = _add(kept, more)
                im, lost_im = _add(kept_im, more_im)
