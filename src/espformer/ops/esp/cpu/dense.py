"""Kernels of short sequences as matrices: ranks by tokens, or ranks by ranks.

``κ[r, i] = k(|s_r - x_i| · inv_bandwidth)`` for the sorted numbers s and the numbers x of all
tokens. Either these are in token order, so that nothing is gathered, or they are sorted too, so
that κ is a band (see `bands`). The numbers of masked tokens and of padding are infinite, so their
columns are zero. A matrix is a flat array whose rows and columns are padded to `stride`, a multiple
of eight.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from espformer.ops.esp.cpu.compiling import part, stand_alone
from espformer.ops.esp.cpu.rows import clear
from espformer.ops.esp.cpu.simd import (
    absolute,
    exp,
    fill,
    fold,
    load,
    store,
    total,
    transpose_tile,
    where_above,
)
from espformer.ops.esp.cpu.tiles import EIGHT, SIXTEEN

NEGLIGIBLE = -41.4  # exp of less: see `exponentials.NEGLIGIBLE`


class DenseKappa(NamedTuple):
    """κ of the n sorted numbers of one side of one slice, as a matrix."""

    n: int
    matrix: np.ndarray  # (stride · stride,): ranks by tokens
    order: np.ndarray  # (n,): the column at each rank
    tiles: np.ndarray  # (2, stride / 8): what is not negligible, see `bands`
    stride: int
    spare: np.ndarray  # (stride,): a number for every column


@part
def spread_out(x, order, n, fallback, stride, y):  # type: ignore[no-untyped-def]
    """Numbers by rank to numbers by column; columns of masked tokens get `fallback`."""
    for i in range(stride):
        y[i] = fallback
    for i in range(n):
        y[order[i]] = x[i]


@part
def columns_of(tiles, i):  # type: ignore[no-untyped-def]
    """The first and the last column that are written in row i, the last excluded.

    Products take pairs of tiles, so a tile at the end of a range has its neighbour written too.
    """
    first, last = tiles[0, i >> 3] & ~1, (tiles[1, i >> 3] + 1) & ~1
    return 8 * first, 8 * min(last, tiles.shape[1])


@part
def values_of(numbers, j, here, inv_bandwidth, squared, lanes):  # type: ignore[no-untyped-def]
    """κ between the number `here` and some of the numbers of all tokens, from j on."""
    number = numbers.dtype.type
    x = inv_bandwidth * (load(numbers, j, lanes) - fill(here, lanes))
    fall = number(-1) * (x * x if squared else absolute(x))
    return where_above(fall, number(NEGLIGIBLE), exp(fall))


@part
def scale_rows(matrix, scale, n, tiles, stride, out):  # type: ignore[no-untyped-def]
    """``out = diag(scale) matrix``."""
    stand_alone()
    for i in range(n):
        first, last = columns_of(tiles, i)
        row = i * stride
        for j in range(first, last - 8, 16):
            store(out, row + j, scale[i] * load(matrix, row + j, SIXTEEN))
        if (last - first) % 16:
            j = last - 8
            store(out, row + j, scale[i] * load(matrix, row + j, EIGHT))


@part
def set_rows(numbers, points, n, inv_bandwidth, squared, tiles, stride, known, scale, matrix):  # type: ignore[no-untyped-def]
    """``diag(scale) κ`` of the `numbers` of all tokens, of which `points` are the n sorted ones.

    Unless they are given, the scales are computed: those whose rows sum to one. All rows are summed
    before the first division, so that no sum waits for a division.
    """
    stand_alone()
    number = numbers.dtype.type
    for i in range(n):
        row_scale, row = (scale[i] if known else number(1)), i * stride
        first, last = columns_of(tiles, i)
        found = fill(number(0), SIXTEEN)
        for j in range(first, last - 8, 16):
            value = values_of(numbers, j, points[i], inv_bandwidth, squared, SIXTEEN)
            found = found + value
            store(matrix, row + j, row_scale * value)
        sums = fold(found)
        if (last - first) % 16:
            j = last - 8
            value = values_of(numbers, j, points[i], inv_bandwidth, squared, EIGHT)
            store(matrix, row + j, row_scale * value)
            sums = sums + value
        if not known:
            scale[i] = total(sums)
    if not known:
        for i in range(n):
            scale[i] = 1 / scale[i]
        scale_rows(matrix, scale, n, tiles, stride, matrix)


@part
def scale_both(matrix, row_scale, column_scale, n, tiles, stride, out):  # type: ignore[no-untyped-def]
    """``out = diag(row_scale) matrix diag(column_scale)``."""
    stand_alone()
    for i in range(n):
        first, last = columns_of(tiles, i)
        for j in range(first, last, 8):
            row = row_scale[i] * load(matrix, i * stride + j, EIGHT)
            store(out, i * stride + j, load(column_scale, j, EIGHT) * row)


@part
def multiply_column(kappa, x, y):  # type: ignore[no-untyped-def]
    """``y = κ x`` for one number per rank, in whole tiles: what lies behind n is overwritten.

    The sums of eight rows are added across lanes together.
    """
    stand_alone()
    stride, numbers, tiles, matrix = kappa.stride, kappa.spare, kappa.tiles, kappa.matrix
    spread_out(x, kappa.order, kappa.n, x.dtype.type(0), stride, numbers)
    zero = fill(x.dtype.type(0), EIGHT)
    for i in range(-(-kappa.n // 8)):
        r0, r1, r2, r3, r4, r5, r6, r7 = zero, zero, zero, zero, zero, zero, zero, zero
        for j in range(8 * tiles[0, i], 8 * tiles[1, i], 8):
            number, at = load(numbers, j, EIGHT), 8 * i * stride + j
            r0 = r0 + load(matrix, at, EIGHT) * number
            r1 = r1 + load(matrix, at + stride, EIGHT) * number
            r2 = r2 + load(matrix, at + 2 * stride, EIGHT) * number
            r3 = r3 + load(matrix, at + 3 * stride, EIGHT) * number
            r4 = r4 + load(matrix, at + 4 * stride, EIGHT) * number
            r5 = r5 + load(matrix, at + 5 * stride, EIGHT) * number
            r6 = r6 + load(matrix, at + 6 * stride, EIGHT) * number
            r7 = r7 + load(matrix, at + 7 * stride, EIGHT) * number
        s = transpose_tile(r0, r1, r2, r3, r4, r5, r6, r7)
        found = ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]))
        store(y, 8 * i, found)


@part
def squared_distances(x, y_columns, rows, columns, stride, out):  # type: ignore[no-untyped-def]
    """``out[i, j] = ‖x_i - y_j‖²`` of rows x and of y as columns, which are `stride` apart."""
    stand_alone()
    for i in range(rows):
        for j in range(0, stride, 8):
            found = fill(x.dtype.type(0), EIGHT)
            for k in range(columns):
                off = load(y_columns, k * stride + j, EIGHT) - fill(x[i * columns + k], EIGHT)
                found = found + off * off
            store(out, i * stride + j, found)


@part
def products(x, y, n, tiles, stride, along, across):  # type: ignore[no-untyped-def]
    """Sums of ``x y`` along the first n rows, and across them, of two matrices."""
    stand_alone()
    clear(across, stride)
    for i in range(n):
        found = fill(x.dtype.type(0), EIGHT)
        for j in range(8 * tiles[0, i >> 3], 8 * tiles[1, i >> 3], 8):
            product = load(x, i * stride + j, EIGHT) * load(y, i * stride + j, EIGHT)
            found = found + product
            store(across, j, load(across, j, EIGHT) + product)
        along[i] = total(found)


@part
def subtract_from_rows(x, y, n, tiles, stride):  # type: ignore[no-untyped-def]
    """``y_i -= (x_i · y_i) 1`` for the first n rows of two matrices."""
    stand_alone()
    for i in range(n):
        found = fill(x.dtype.type(0), EIGHT)
        for j in range(8 * tiles[0, i >> 3], 8 * tiles[1, i >> 3], 8):
            found = found + load(x, i * stride + j, EIGHT) * load(y, i * stride + j, EIGHT)
        along = fill(total(found), EIGHT)
        for j in range(8 * tiles[0, i >> 3], 8 * tiles[1, i >> 3], 8):
            store(y, i * stride + j, load(y, i * stride + j, EIGHT) - along)


@part
def add_scaled(x, weight, count, out):  # type: ignore[no-untyped-def]
    """``out += weight x``."""
    stand_alone()
    for i in range(0, count, 8):
        store(out, i, load(out, i, EIGHT) + weight * load(x, i, EIGHT))


@part
def couple(matrix, targets, sources, weights, rows, stride, out):  # type: ignore[no-untyped-def]
    """``T matrix`` of pairs (row, column), or ``Tᵀ matrix`` of (column, row)."""
    stand_alone()
    clear(out, rows * stride)
    for i in range(len(weights)):
        if weights[i] != 0:  # with weight zero, one of the two may be padding
            to, place = targets[i] * stride, sources[i] * stride
            for j in range(0, stride, 8):
                row = load(out, to + j, EIGHT)
                store(out, to + j, row + weights[i] * load(matrix, place + j, EIGHT))


@part
def pack(matrix, centre, order, n, width, out):  # type: ignore[no-untyped-def]
    """Rows minus `centre`, of the tokens that take part; `out` has rows of `width`, and is zero."""
    stand_alone()
    for i in range(n):
        token = order[i]
        for j in range(matrix.shape[1]):
            out[token * width + j] = matrix[token, j] - centre[j]


@part
def unpack(rows, width, order, n, matrix):  # type: ignore[no-untyped-def]
    """Rows of `width` of the tokens that take part; others stay as they are."""
    stand_alone()
    for i in range(n):
        token = order[i]
        for j in range(matrix.shape[1]):
            matrix[token, j] = rows[token * width + j]


@part
def kernel_slope(kappa, matrix, d_matrix, numbers, points, inv_bandwidth, squared, columns, slopes):  # type: ignore[no-untyped-def]
    """Derivatives of ``Σ d_matrix κ`` in ``s_r · inv_bandwidth``, by rank; `matrix` is κ.

    κ[r, i] depends on the number at rank r and, with the opposite sign, on that of column i.
    Between equal numbers the derivative is zero. `columns` is a buffer for one number per column.
    """
    stand_alone()
    n, order, tiles, stride = kappa.n, kappa.order, kappa.tiles, kappa.stride
    number = numbers.dtype.type
    zero, two = number(0), number(2)
    clear(columns, stride)
    for i in range(n):
        here, found = fill(points[i], EIGHT), fill(zero, EIGHT)
        for j in range(8 * tiles[0, i >> 3], 8 * tiles[1, i >> 3], 8):
            x = inv_bandwidth * (load(numbers, j, EIGHT) - here)
            value = load(matrix, i * stride + j, EIGHT)
            if squared:
                value = where_above(value, zero, two * (x * value))
            else:
                value = where_above(x, zero, value) - where_above(number(-1) * x, zero, value)
            force = value * load(d_matrix, i * stride + j, EIGHT)
            found = found + force
            store(columns, j, load(columns, j, EIGHT) - force)
        slopes[i] = total(found)
    for i in range(n):
        slopes[i] += columns[order[i]]
