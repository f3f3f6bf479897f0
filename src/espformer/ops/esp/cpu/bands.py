"""Matrices that vanish away from a band, in tiles of eight rows and eight columns.

A kernel of sorted numbers is negligible between numbers that are far apart, so a block of ranks
meets only the blocks near its own. What is not negligible is a range of tiles for each row of
tiles: an array (2, tiles) of first and last ones, the last excluded. The ranges of a kernel hold
for its columns as well, because distances are symmetric. Tiles outside their range are never read.
"""

from __future__ import annotations

import numpy as np

from espformer.ops.esp.cpu.compiling import part, stand_alone
from espformer.ops.esp.cpu.simd import LANES, fill, load, pick, store, total

EIGHT = LANES[8]


@part
def set_all_tiles(ranges, many):  # type: ignore[no-untyped-def]
    """Ranges that hold all of `many` tiles."""
    for i in range(ranges.shape[1]):
        ranges[0, i], ranges[1, i] = 0, many


@part
def set_near_tiles(points, n, reach, ranges):  # type: ignore[no-untyped-def]
    """Ranges of the tiles of n sorted numbers that are within `reach` of each other."""
    stand_alone()
    many = -(-n // 8)
    first, last = np.int64(0), np.int64(0)
    for i in range(ranges.shape[1]):
        if i >= many:
            ranges[0, i], ranges[1, i] = many, many
            continue
        low, high = points[8 * i], points[min(8 * i + 8, n) - 1]
        while first < i and low - points[8 * first + 7] > reach:
            first += 1
        while last < many and points[8 * last] - high <= reach:
            last += 1
        ranges[0, i], ranges[1, i] = first, last


@part
def couple_ranges(targets, sources, weights, ranges, out):  # type: ignore[no-untyped-def]
    """Ranges of ``T matrix``, of those of a matrix."""
    stand_alone()
    for i in range(out.shape[1]):
        out[0, i], out[1, i] = out.shape[1], 0
    for i in range(len(weights)):
        if weights[i] != 0:
            row, source = targets[i] // 8, sources[i] // 8
            out[0, row] = min(out[0, row], ranges[0, source])
            out[1, row] = max(out[1, row], ranges[1, source])


@part
def transpose_ranges(ranges, out):  # type: ignore[no-untyped-def]
    """The rows of tiles of every column of tiles: from the first to the last that has it."""
    stand_alone()
    for j in range(out.shape[1]):
        out[0, j], out[1, j] = out.shape[1], 0
    for i in range(ranges.shape[1]):
        for j in range(ranges[0, i], ranges[1, i]):
            out[0, j], out[1, j] = min(out[0, j], i), max(out[1, j], i + 1)


@part
def set_product_ranges(rows, columns, out):  # type: ignore[no-untyped-def]
    """Tiles of a product that are sums of any, of ranges of summands by row and by column."""
    stand_alone()
    many = out.shape[1]
    for i in range(many):
        out[0, i], out[1, i] = many, 0
        for j in range(many):
            if max(rows[0, i], columns[0, j]) < min(rows[1, i], columns[1, j]):
                out[0, i], out[1, i] = min(out[0, i], j), j + 1


@part
def multiply_tiles(left, row_step, step, right, count, stride, k_rows, k_columns, tiles, out):  # type: ignore[no-untyped-def]
    """``out[i, :] = Σ_k left[i · row_step + k · step] right[k, :]``, k below `count`, in tiles.

    `k_rows` and `k_columns` are ranges of k, in eights, for rows of tiles and for columns; the sum
    is over what both have.
    """
    stand_alone()
    zero = fill(out.dtype.type(0), EIGHT)
    for i in range(tiles.shape[1]):
        for j in range(tiles[0, i], tiles[1, i]):
            first = 8 * max(k_rows[0, i], k_columns[0, j])
            last = min(8 * min(k_rows[1, i], k_columns[1, j]), count)
            r0, r1, r2, r3, r4, r5, r6, r7 = zero, zero, zero, zero, zero, zero, zero, zero
            at, place = 8 * i * row_step + first * step, first * stride + 8 * j
            for _ in range(first, last):
                row = load(right, place, EIGHT)
                r0 = r0 + pick(left, at, EIGHT) * row
                r1 = r1 + pick(left, at + row_step, EIGHT) * row
                r2 = r2 + pick(left, at + 2 * row_step, EIGHT) * row
                r3 = r3 + pick(left, at + 3 * row_step, EIGHT) * row
                r4 = r4 + pick(left, at + 4 * row_step, EIGHT) * row
                r5 = r5 + pick(left, at + 5 * row_step, EIGHT) * row
                r6 = r6 + pick(left, at + 6 * row_step, EIGHT) * row
                r7 = r7 + pick(left, at + 7 * row_step, EIGHT) * row
                at += step
                place += stride
            place = 8 * (i * stride + j)
            store(out, place, r0)
            store(out, place + stride, r1)
            store(out, place + 2 * stride, r2)
            store(out, place + 3 * stride, r3)
            store(out, place + 4 * stride, r4)
            store(out, place + 5 * stride, r5)
            store(out, place + 6 * stride, r6)
            store(out, place + 7 * stride, r7)


@part
def gather(matrix, rows, n, columns, m, tiles, stride, out):  # type: ignore[no-untyped-def]
    """``out[i, j] = matrix[rows_i, columns_j]`` for i < n and j < m, zeros beyond, of some tiles.

    Places are unsigned: numba would look whether each of them counts from the end.
    """
    stand_alone()
    for i in range(8 * tiles.shape[1]):
        first, last = 8 * tiles[0, i >> 3], 8 * tiles[1, i >> 3]
        known = first
        if i < n:
            known, source = min(last, m), rows[i] * stride
            for j in range(first, known):
                place = np.uintp(source + columns[np.uintp(j)])
                out[np.uintp(i * stride + j)] = matrix[place]
        for j in range(known, last):
            out[np.uintp(i * stride + j)] = 0


@part
def scatter(matrix, rows, n, columns, m, tiles, stride, weight, out):  # type: ignore[no-untyped-def]
    """``out[rows_i, columns_j] += weight matrix[i, j]`` for i < n and j < m, of some tiles."""
    stand_alone()
    for i in range(n):
        target = rows[i] * stride
        for j in range(8 * tiles[0, i >> 3], min(8 * tiles[1, i >> 3], m)):
            place = np.uintp(target + columns[np.uintp(j)])
            out[place] += weight * matrix[np.uintp(i * stride + j)]


@part
def is_full(tiles):  # type: ignore[no-untyped-def]
    """Whether a band has all tiles; ranges ascend."""
    many = tiles.shape[1]
    return tiles[0, many - 1] == 0 and tiles[1, 0] == many


@part
def inner_product(x, y, tiles, stride):  # type: ignore[no-untyped-def]
    """``Σ x y`` over some tiles; all of them are one long row."""
    stand_alone()
    found, rows, full = fill(x.dtype.type(0), EIGHT), 8 * tiles.shape[1], is_full(tiles)
    for i in range(1 if full else rows):
        first = 0 if full else i * stride + 8 * tiles[0, i >> 3]
        last = rows * stride if full else i * stride + 8 * tiles[1, i >> 3]
        for place in range(first, last, 8):
            found = found + load(x, place, EIGHT) * load(y, place, EIGHT)
    return total(found)


@part
def mix_two(x, a, y, b, tiles, stride, out):  # type: ignore[no-untyped-def]
    """``out = a x + b y`` in some tiles."""
    stand_alone()
    rows, full = 8 * tiles.shape[1], is_full(tiles)
    for i in range(1 if full else rows):
        first = 0 if full else i * stride + 8 * tiles[0, i >> 3]
        last = rows * stride if full else i * stride + 8 * tiles[1, i >> 3]
        for place in range(first, last, 8):
            store(out, place, a * load(x, place, EIGHT) + b * load(y, place, EIGHT))
