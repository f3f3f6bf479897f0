"""Matrices that vanish away from a band, in tiles of eight rows and eight columns.

A kernel of sorted numbers is negligible between numbers that are far apart, so a block of ranks
meets only the blocks near its own. What is not negligible is a range of tiles for each row of
tiles: an array (2, tiles) of first and last ones, the last excluded. The ranges of a kernel hold
for its columns as well, because distances are symmetric. Tiles outside their range are never read.
"""

from __future__ import annotations

import numpy as np

from espformer.ops.esp.cpu.compiling import part, stand_alone
from espformer.ops.esp.cpu.simd import fill, load, store, total
from espformer.ops.esp.cpu.tiles import (
    EIGHT,
    SIXTEEN,
    load_transposed,
    load_transposed_rows,
    multiply_tile,
    store_rows,
)


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
    is over what both have. Tiles are taken in pairs, so `right` is known in the neighbours of its
    tiles too, see `dense.columns_of`, and some tiles of `out` beside its range are overwritten.
    """
    stand_alone()
    many = tiles.shape[1]
    for i in range(many):
        for j in range(tiles[0, i] & ~1, tiles[1, i], 2):
            other = min(j + 1, many - 1)
            first = 8 * max(k_rows[0, i], min(k_columns[0, j], k_columns[0, other]))
            last = 8 * min(k_rows[1, i], max(k_columns[1, j], k_columns[1, other]))
            terms, at = min(last, count) - first, 8 * i * row_step + first * step
            place, to = first * stride + 8 * j, 8 * (i * stride + j)
            if other > j:
                multiply_tile(
                    left, at, row_step, step, right, place, stride, terms, out, to, SIXTEEN
                )
            else:
                multiply_tile(left, at, row_step, step, right, place, stride, terms, out, to, EIGHT)


@part
def transpose_tiles(matrix, tiles, stride, out):  # type: ignore[no-untyped-def]
    """The transpose of some tiles."""
    stand_alone()
    for i in range(tiles.shape[1]):
        for j in range(tiles[0, i], tiles[1, i]):
            found = load_transposed(matrix, 8 * (i * stride + j), stride)
            store_rows(out, 8 * (j * stride + i), stride, found)


@part
def clear_outside(matrix, tiles, stride):  # type: ignore[no-untyped-def]
    """Zeros in all tiles but some."""
    stand_alone()
    zero = fill(matrix.dtype.type(0), EIGHT)
    for i in range(8 * tiles.shape[1]):
        for j in range(0, min(8 * tiles[0, i >> 3], stride), 8):
            store(matrix, i * stride + j, zero)
        for j in range(8 * tiles[1, i >> 3], stride, 8):
            store(matrix, i * stride + j, zero)


@part
def sort_columns(transposed, places, stride, out):  # type: ignore[no-untyped-def]
    """``out[i, j] = transposed[places_j + i]``: the row at places_j becomes column j.

    Whole rows are read, and transposed in registers. Columns would be moved number by number.
    """
    stand_alone()
    for i in range(0, stride, 8):
        for j in range(0, stride, 8):
            store_rows(out, i * stride + j, stride, load_transposed_rows(transposed, places, j, i))


@part
def add_to_rows(x, weight, out, places, first, column):  # type: ignore[no-untyped-def]
    """Adds eight vectors to as many rows that begin at `places`, from the `first` of these on."""
    at = np.uintp(first)
    for i in range(8):
        place = places[at + np.uintp(i)] + column
        store(out, place, load(out, place, EIGHT) + weight * x[i])


@part
def add_columns(matrix, q_ranks, k_places, stride, weight, out, other_weight, other):  # type: ignore[no-untyped-def]
    """``out[k_places_j + i] += weight matrix[q_ranks_i + j]``, the reverse of `sort_columns` for a
    matrix with sorted rows; to `other` likewise, unless it is empty.
    """
    stand_alone()
    two = len(other) > 0
    for j in range(0, stride, 8):
        for i in range(0, stride, 8):
            x = load_transposed_rows(matrix, q_ranks, i, j)
            add_to_rows(x, weight, out, k_places, j, i)
            if two:
                add_to_rows(x, other_weight, other, k_places, j, i)


@part
def inner_product(x, places, y, tiles, stride):  # type: ignore[no-untyped-def]
    """``Σ x[places_i + j] y[i, j]`` over some tiles; four sums, so that none waits for the last."""
    stand_alone()
    zero = fill(x.dtype.type(0), EIGHT)
    a, b, c, d = zero, zero, zero, zero
    for i in range(0, 8 * tiles.shape[1], 4):
        at = np.uintp(i)
        x0, x1 = places[at], places[at + np.uintp(1)]
        x2, x3 = places[at + np.uintp(2)], places[at + np.uintp(3)]
        for j in range(8 * tiles[0, i >> 3], 8 * tiles[1, i >> 3], 8):
            place = i * stride + j
            a = a + load(x, x0 + j, EIGHT) * load(y, place, EIGHT)
            b = b + load(x, x1 + j, EIGHT) * load(y, place + stride, EIGHT)
            c = c + load(x, x2 + j, EIGHT) * load(y, place + 2 * stride, EIGHT)
            d = d + load(x, x3 + j, EIGHT) * load(y, place + 3 * stride, EIGHT)
    return total((a + b) + (c + d))


@part
def mix_two(x, a, y, b, places, tiles, stride, out):  # type: ignore[no-untyped-def]
    """``out[i, j] = a x[places_i + j] + b y[places_i + j]`` in some tiles."""
    stand_alone()
    for i in range(8 * tiles.shape[1]):
        source, target = places[np.uintp(i)], i * stride
        for j in range(8 * tiles[0, i >> 3], 8 * tiles[1, i >> 3], 8):
            row = a * load(x, source + j, EIGHT) + b * load(y, source + j, EIGHT)
            store(out, target + j, row)
