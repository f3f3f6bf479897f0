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
    LANES,
    absolute,
    exp,
    fill,
    load,
    pick,
    store,
    total,
    where_above,
)

EIGHT = LANES[8]
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
def set_matrix(numbers, points, n, inv_bandwidth, squared, tiles, stride, matrix):  # type: ignore[no-untyped-def]
    """κ of the `numbers` of all tokens, of which `points` are the n sorted ones."""
    stand_alone()
    number = numbers.dtype.type
    for i in range(n):
        here = fill(points[i], EIGHT)
        for j in range(8 * tiles[0, i >> 3], 8 * tiles[1, i >> 3], 8):
            x = inv_bandwidth * (load(numbers, j, EIGHT) - here)
            fall = number(-1) * (x * x if squared else absolute(x))
            store(matrix, i * stride + j, where_above(fall, number(NEGLIGIBLE), exp(fall)))


@part
def scale_rows(matrix, scale, n, tiles, stride, out):  # type: ignore[no-untyped-def]
    """``out = diag(scale) matrix``."""
    stand_alone()
    for i in range(n):
        for j in range(8 * tiles[0, i >> 3], 8 * tiles[1, i >> 3], 8):
            store(out, i * stride + j, scale[i] * load(matrix, i * stride + j, EIGHT))


@part
def set_rows(numbers, points, n, inv_bandwidth, squared, tiles, stride, known, scale, matrix):  # type: ignore[no-untyped-def]
    """``diag(scale) κ``, whose rows sum to one; the scales are computed unless they are given.

    All rows are summed before the first division, so that no sum waits for a division.
    """
    stand_alone()
    number = numbers.dtype.type
    for i in range(n):
        here = fill(points[i], EIGHT)
        share = fill(scale[i] if known else number(1), EIGHT)
        found = fill(number(0), EIGHT)
        for j in range(8 * tiles[0, i >> 3], 8 * tiles[1, i >> 3], 8):
            x = inv_bandwidth * (load(numbers, j, EIGHT) - here)
            fall = number(-1) * (x * x if squared else absolute(x))
            value = where_above(fall, number(NEGLIGIBLE), exp(fall))
            found = found + value
            store(matrix, i * stride + j, share * value)
        if not known:
            scale[i] = total(found)
    if not known:
        for i in range(n):
            scale[i] = 1 / scale[i]
        scale_rows(matrix, scale, n, tiles, stride, matrix)


@part
def scale_columns(matrix, scale, n, tiles, stride, out):  # type: ignore[no-untyped-def]
    """``out = matrix diag(scale)``."""
    stand_alone()
    for i in range(n):
        for j in range(8 * tiles[0, i >> 3], 8 * tiles[1, i >> 3], 8):
            row = load(matrix, i * stride + j, EIGHT)
            store(out, i * stride + j, load(scale, j, EIGHT) * row)


@part
def multiply_column(kappa, x, y):  # type: ignore[no-untyped-def]
    """``y = κ x`` for one number per rank."""
    stand_alone()
    stride, numbers, tiles = kappa.stride, kappa.spare, kappa.tiles
    spread_out(x, kappa.order, kappa.n, x.dtype.type(0), stride, numbers)
    for i in range(kappa.n):
        found = fill(x.dtype.type(0), EIGHT)
        for j in range(8 * tiles[0, i >> 3], 8 * tiles[1, i >> 3], 8):
            row = load(kappa.matrix, i * stride + j, EIGHT)
            found = found + row * load(numbers, j, EIGHT)
        y[i] = total(found)


@part
def multiply(left, row_step, step, right, count, rows, columns, out):  # type: ignore[no-untyped-def]
    """``out[i, :] = Σ_k left[i · row_step + k · step] right[k, :]``, with k up to `count`.

    Blocks of eight rows and eight columns stay in registers; rows are padded to a multiple of
    eight.
    """
    stand_alone()
    zero = fill(out.dtype.type(0), EIGHT)
    for i in range(0, rows, 8):
        for j in range(0, columns, 8):
            r0, r1, r2, r3, r4, r5, r6, r7 = zero, zero, zero, zero, zero, zero, zero, zero
            at, place = i * row_step, j
            for _ in range(count):
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
                place += columns
            place = i * columns + j
            store(out, place, r0)
            store(out, place + columns, r1)
            store(out, place + 2 * columns, r2)
            store(out, place + 3 * columns, r3)
            store(out, place + 4 * columns, r4)
            store(out, place + 5 * columns, r5)
            store(out, place + 6 * columns, r6)
            store(out, place + 7 * columns, r7)


@part
def transpose(matrix, rows, columns, identity, out):  # type: ignore[no-untyped-def]
    """By a product with the identity, `rows` by `rows`: faster than moving numbers one by one."""
    one = np.int64(1)
    multiply(matrix, one, columns, identity, rows, columns, rows, out)


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
