"""Products with the kernel ``κ[n, j] = exp(-(s_n - s_j)² / t)`` of sorted numbers, by states.

The torch twin is :mod:`espformer.ops.esp.sorted_kernel`. Ranks are cut into chunks. Inside one the
kernel is exact, and between chunks it is ``Re Σ_r w_r exp(-p_r x)`` with one state per pole and
side, measured at the first number of a chunk (from the left) or at its last (from the right).
All coefficients of a rank stand in one row, so that a chunk of the product is a small matrix,

    y = M · (rows of the chunk, states from both sides),

with the columns (chunk; Re left, Re right, Im left, Im right), and another one for the slope.
Short sequences are one chunk, without states.
"""

from __future__ import annotations

import numpy as np

from espformer.ops.esp.cpu.compiling import part, stand_alone
from espformer.ops.esp.cpu.rows import clear
from espformer.ops.esp.cpu.simd import (
    LANES,
    cos,
    exp,
    fill,
    load,
    sin,
    store,
    swap_halves,
    total,
    where_above,
)

CHUNK, SHORT = 16, 40
EIGHT = LANES[8]
FARTHEST = 20.0  # widths: from here on every pole is negligible


@part
def chunk_of(n):  # type: ignore[no-untyped-def]
    """Ranks in a chunk."""
    return n if n <= SHORT else CHUNK


@part
def states_of(n, table):  # type: ignore[no-untyped-def]
    """States that arrive at a chunk, real and imaginary parts of both sides: none if it is one."""
    return 0 if n <= SHORT else 16 * len(table.lanes)


@part
def stride_of(n, table):  # type: ignore[no-untyped-def]
    """Numbers in a row of coefficients."""
    return -(-chunk_of(n) // 8) * 8 + states_of(n, table)


@part
def _waves(table, left, right):  # type: ignore[no-untyped-def]
    """``exp(-p x)``, real and imaginary parts, of the poles at `left`, then at `right` widths."""
    number = table.decays.dtype.type
    x = min(left, number(FARTHEST)) * load(table.is_left, 0, table.lanes)
    x = x + min(right, number(FARTHEST)) * load(table.is_right, 0, table.lanes)
    falling = load(table.decays, 0, table.lanes) * x
    size = where_above(falling, number(-41.4), exp(falling))
    angle = load(table.turns, 0, table.lanes) * x
    return size * cos(angle), size * sin(angle)


@part
def set_chunks(table, points, n, inv_bandwidth, with_slope, room):  # type: ignore[no-untyped-def]
    """The coefficients of every rank, and what is left of states from chunk to chunk."""
    stand_alone()
    number = points.dtype.type
    chunk, states, stride = chunk_of(n), states_of(n, table), stride_of(n, table)
    padded = stride - states
    half = 8 * len(table.lanes)
    here = room.here
    for start in range(0, n, chunk):
        end = min(start + chunk, n)
        for i in range(padded):
            here[i] = points[min(start + i, end - 1)]
        first, last = points[start], points[end - 1]
        for i in range(start, end):
            row = i * stride
            for j in range(0, padded, 8):
                x = inv_bandwidth * (load(here, j, EIGHT) - fill(points[i], EIGHT))
                fall = number(-1) * (x * x)
                value = where_above(fall, number(-41.4), exp(fall))
                store(room.reading, row + j, value)
                if with_slope:
                    store(room.pulling, row + j, number(2) * (x * value))
            for j in range(end - start, padded):
                room.reading[row + j] = 0
                if with_slope:
                    room.pulling[row + j] = 0
            if states:
                re, im = _waves(
                    table, (points[i] - first) * inv_bandwidth, (last - points[i]) * inv_bandwidth
                )
                # What a rank sends to the right goes by its last number, which the right reads by.
                store(room.into, i * states, swap_halves(re))
                store(room.into, i * states + half, swap_halves(im))
                w, v = load(table.weights, 0, table.lanes), load(table.weights, half, table.lanes)
                store(room.reading, row + padded, w * re - v * im)
                store(room.reading, row + padded + half, number(-1) * (w * im + v * re))
                if with_slope:
                    w, v = load(table.slopes, 0, table.lanes), load(table.slopes, half, table.lanes)
                    store(room.pulling, row + padded, w * re - v * im)
                    store(room.pulling, row + padded + half, number(-1) * (w * im + v * re))
        if states:
            # From here to the next chunk for the left, to the one before for the right.
            before, after = points[max(start - 1, 0)], points[min(end, n - 1)]
            offset = (start // chunk) * 2 * states
            re, im = _waves(table, (after - first) * inv_bandwidth, (last - before) * inv_bandwidth)
            store(room.hops, offset, re)
            store(room.hops, offset + half, im)
            re, im = _waves(table, (after - last) * inv_bandwidth, (first - before) * inv_bandwidth)
            store(room.hops, offset + states, re)
            store(room.hops, offset + states + half, im)


@part
def _gather(x, order, scale, start, end, out, lanes):  # type: ignore[no-untyped-def]
    width = 8 * len(lanes)
    for i in range(start, end):
        store(out, (i - start) * width, scale[i] * load(x, order[i] * width, lanes))


@part
def _combine(matrix, first_row, stride, rows, terms, z, y, lanes):  # type: ignore[no-untyped-def]
    """``y[first_row + i] = Σ_k matrix[first_row + i, k] z[k]``, four rows at a time."""
    width = 8 * len(lanes)
    zero = fill(matrix.dtype.type(0), lanes)
    for i in range(first_row, first_row + rows, 4):
        a, b, c, d = zero, zero, zero, zero
        at = i * stride
        for k in range(terms):
            row = load(z, k * width, lanes)
            a = a + matrix[at + k] * row
            b = b + matrix[at + stride + k] * row
            c = c + matrix[at + 2 * stride + k] * row
            d = d + matrix[at + 3 * stride + k] * row
        left = first_row + rows - i
        store(y, i * width, a)
        if left > 1:
            store(y, (i + 1) * width, b)
        if left > 2:
            store(y, (i + 2) * width, c)
        if left > 3:
            store(y, (i + 3) * width, d)


@part
def _hand_on(room, start, end, index, states, offset, z, state, lanes):  # type: ignore[no-untyped-def]
    """What the next chunk receives: ``hop · inflow + longer hop · state``, for one of the sides.

    The poles of a side are the columns ``[offset, offset + states / 4)`` of the real parts, and as
    many of the imaginary ones; `state` holds real parts, then imaginary ones.
    """
    width, count, half = 8 * len(lanes), states // 4, states // 2
    zero = fill(state.dtype.type(0), lanes)
    far, near = index * 2 * states, index * 2 * states + states
    for r in range(0, count, 2):
        re, im, re_2, im_2 = zero, zero, zero, zero
        for i in range(start, end):
            row, at = load(z, (i - start) * width, lanes), i * states + offset + r
            re = re + room.into[at] * row
            im = im + room.into[at + half] * row
            re_2 = re_2 + room.into[at + 1] * row
            im_2 = im_2 + room.into[at + half + 1] * row
        for pole, own_re, own_im in ((r, re, im), (r + 1, re_2, im_2)):
            place, other = pole * width, (count + pole) * width
            was_re, was_im = load(state, place, lanes), load(state, other, lanes)
            c, s = room.hops[far + offset + pole], room.hops[far + half + offset + pole]
            e, f = room.hops[near + offset + pole], room.hops[near + half + offset + pole]
            store(state, place, c * was_re - s * was_im + (e * own_re - f * own_im))
            store(state, other, c * was_im + s * was_re + (e * own_im + f * own_re))


@part
def multiply(kernel, x, order, scale, y, slope, lanes):  # type: ignore[no-untyped-def]
    """``y_n = Σ_j κ[n, j] scale_j x[order_j]``; unless `slope` is empty, its derivative in s_n."""
    stand_alone()
    n, room, table = kernel.n, kernel.chunks, kernel.table
    number = y.dtype.type
    width = 8 * len(lanes)
    chunk, states, stride = chunk_of(n), states_of(n, table), stride_of(n, table)
    padded, quarter = stride - states, states // 4
    count = -(-n // chunk)
    z = np.empty(stride * width, y.dtype)
    clear(z, stride * width)
    arriving = np.empty(count * 2 * quarter * width, y.dtype)
    state = np.empty(2 * quarter * width, y.dtype)
    clear(state, len(state))
    if states:
        for index in range(count):
            for i in range(2 * quarter):
                place = i * width
                store(arriving, index * 2 * quarter * width + place, load(state, place, lanes))
            start, end = index * chunk, min((index + 1) * chunk, n)
            _gather(x, order, scale, start, end, z, lanes)
            _hand_on(room, start, end, index, states, 0, z, state, lanes)
        clear(state, len(state))
    for index in range(count - 1, -1, -1):
        start, end = index * chunk, min((index + 1) * chunk, n)
        _gather(x, order, scale, start, end, z, lanes)
        for i in range(end - start, padded):
            store(z, i * width, fill(number(0), lanes))
        for i in range(quarter):
            for part_, side in ((0, 0), (1, 2)):
                source = (index * 2 * quarter + part_ * quarter + i) * width
                target = (padded + side * quarter + i) * width
                store(z, target, load(arriving, source, lanes))
                source, target = (part_ * quarter + i) * width, target + quarter * width
                store(z, target, load(state, source, lanes))
        _combine(room.reading, start, stride, end - start, stride, z, y, lanes)
        if len(slope):
            _combine(room.pulling, start, stride, end - start, stride, z, slope, lanes)
        if states:
            _hand_on(room, start, end, index, states, quarter, z, state, lanes)


@part
def multiply_column(kernel, x, y):  # type: ignore[no-untyped-def]
    """``y = κ x`` for one number per rank: the same, with all poles in the lanes."""
    stand_alone()
    n, room, table = kernel.n, kernel.chunks, kernel.table
    lanes = table.lanes
    half = 8 * len(lanes)
    chunk, states, stride = chunk_of(n), states_of(n, table), stride_of(n, table)
    padded, quarter = stride - states, states // 4
    count = -(-n // chunk)
    z = np.empty(stride, y.dtype)
    clear(z, stride)
    arriving = np.empty(count * 2 * quarter, y.dtype)
    zero = fill(y.dtype.type(0), lanes)
    for way in range(2 if states else 1):
        re, im = zero, zero
        for step in range(count):
            index = step if way == 0 and states else count - 1 - step
            start, end = index * chunk, min((index + 1) * chunk, n)
            if states:
                store(z, padded, re)
                store(z, padded + half, im)
            if way == 0 and states:  # what arrives from the left is the first half of the lanes
                for i in range(quarter):
                    arriving[index * 2 * quarter + i] = z[padded + i]
                    arriving[index * 2 * quarter + quarter + i] = z[padded + half + i]
            else:
                for i in range(quarter):
                    z[padded + i] = arriving[index * 2 * quarter + i]
                    z[padded + half + i] = arriving[index * 2 * quarter + quarter + i]
                for i in range(padded):
                    z[i] = x[start + i] if start + i < end else 0
                for i in range(start, end):
                    found = fill(y.dtype.type(0), EIGHT)
                    for k in range(0, stride, 8):
                        found = found + load(room.reading, i * stride + k, EIGHT) * load(
                            z, k, EIGHT
                        )
                    y[i] = total(found)
            if states:
                own_re, own_im = zero, zero
                for i in range(start, end):
                    own_re = own_re + x[i] * load(room.into, i * states, lanes)
                    own_im = own_im + x[i] * load(room.into, i * states + half, lanes)
                at = index * 2 * states
                c, s = load(room.hops, at, lanes), load(room.hops, at + half, lanes)
                at += states
                e, f = load(room.hops, at, lanes), load(room.hops, at + half, lanes)
                was_re, was_im = re, im
                re = c * was_re - s * was_im + (e * own_re - f * own_im)
                im = c * was_im + s * was_re + (e * own_im + f * own_re)


@part
def stretch(kernel, x, x_order, x_scale, p, p_order, p_scale, lanes):  # type: ignore[no-untyped-def]
    """``Σ_{j<n} (s_n - s_j) k'(s_n - s_j) (p_n · x_j + x_n · p_j)``, added up pair by pair.

    States of one side alone, from rank to rank, with their first moments, which obey
    ``H'_n = E_n (H'_{n-1} + gap_n H_{n-1})``. The order of rows: real and imaginary parts of H and
    H', of x and then of p, for every pole.
    """
    stand_alone()
    n, points, table = kernel.n, kernel.points, kernel.table
    number = points.dtype.type
    width, half = 8 * len(lanes), 8 * len(table.lanes)
    poles = half // 2
    state = np.empty(poles * 8 * width, points.dtype)
    clear(state, len(state))
    pulls = fill(number(0), lanes)
    waves = np.empty(2 * half, points.dtype)
    for i in range(n):
        x_row = x_scale[i] * load(x, x_order[i] * width, lanes)
        p_row = p_scale[i] * load(p, p_order[i] * width, lanes)
        gap = points[i] - points[max(i - 1, 0)]
        re, im = _waves(table, gap * kernel.inv_bandwidth, number(0))
        store(waves, 0, re)
        store(waves, half, im)
        for r in range(poles):
            c, s = waves[r], waves[half + r]
            w, v = table.slopes[r], table.slopes[half + r]
            for operand in range(2):
                at = (8 * r + 4 * operand) * width
                sum_re, sum_im = load(state, at, lanes), load(state, at + width, lanes)
                re_ = load(state, at + 2 * width, lanes) + gap * sum_re
                im_ = load(state, at + 3 * width, lanes) + gap * sum_im
                moment_re, moment_im = c * re_ - s * im_, c * im_ + s * re_
                store(state, at + 2 * width, moment_re)
                store(state, at + 3 * width, moment_im)
                row, other = (x_row, p_row) if operand == 0 else (p_row, x_row)
                pulls = pulls + other * (w * moment_re - v * moment_im)
                store(state, at, c * sum_re - s * sum_im + row)
                store(state, at + width, c * sum_im + s * sum_re)
    return total(pulls)
