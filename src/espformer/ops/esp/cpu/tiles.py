"""Tiles of matrices that stay in registers: products, and transposes.

A matrix is a flat array of rows. A tile has eight rows, and eight columns or sixteen.
"""

from __future__ import annotations

import numpy as np

from espformer.ops.esp.cpu.compiling import part, stand_alone
from espformer.ops.esp.cpu.simd import LANES, fill, load, pick, store, transpose_tile

EIGHT, SIXTEEN = LANES[8], LANES[16]


@part
def multiply_tile(left, at, row_step, step, right, place, stride, count, out, to, lanes):  # type: ignore[no-untyped-def]
    """``out[i, :] = Σ_k left[i · row_step + k · step] right[k, :]``: eight rows, k below `count`.

    `at`, `place` and `to` are where the three begin; rows of right and of out are `stride` apart.
    """
    zero = fill(out.dtype.type(0), lanes)
    r0, r1, r2, r3, r4, r5, r6, r7 = zero, zero, zero, zero, zero, zero, zero, zero
    for _ in range(count):
        row = load(right, place, lanes)
        r0 = r0 + pick(left, at, lanes) * row
        r1 = r1 + pick(left, at + row_step, lanes) * row
        r2 = r2 + pick(left, at + 2 * row_step, lanes) * row
        r3 = r3 + pick(left, at + 3 * row_step, lanes) * row
        r4 = r4 + pick(left, at + 4 * row_step, lanes) * row
        r5 = r5 + pick(left, at + 5 * row_step, lanes) * row
        r6 = r6 + pick(left, at + 6 * row_step, lanes) * row
        r7 = r7 + pick(left, at + 7 * row_step, lanes) * row
        at += step
        place += stride
    store_rows(out, to, stride, (r0, r1, r2, r3, r4, r5, r6, r7))


@part
def store_rows(out, to, stride, rows):  # type: ignore[no-untyped-def]
    """Writes eight vectors, `stride` apart."""
    store(out, to, rows[0])
    store(out, to + stride, rows[1])
    store(out, to + 2 * stride, rows[2])
    store(out, to + 3 * stride, rows[3])
    store(out, to + 4 * stride, rows[4])
    store(out, to + 5 * stride, rows[5])
    store(out, to + 6 * stride, rows[6])
    store(out, to + 7 * stride, rows[7])


@part
def load_transposed(matrix, at, stride):  # type: ignore[no-untyped-def]
    """The transpose of the tile that begins at `at`: one vector for each of its columns."""
    return transpose_tile(
        load(matrix, at, EIGHT),
        load(matrix, at + stride, EIGHT),
        load(matrix, at + 2 * stride, EIGHT),
        load(matrix, at + 3 * stride, EIGHT),
        load(matrix, at + 4 * stride, EIGHT),
        load(matrix, at + 5 * stride, EIGHT),
        load(matrix, at + 6 * stride, EIGHT),
        load(matrix, at + 7 * stride, EIGHT),
    )


@part
def load_transposed_rows(matrix, places, first, column):  # type: ignore[no-untyped-def]
    """The same of eight rows that begin at `places`, from the `first` of these on.

    Indices are unsigned: numba would look whether each of them counts from the end.
    """
    at = np.uintp(first)
    return transpose_tile(
        load(matrix, places[at] + column, EIGHT),
        load(matrix, places[at + np.uintp(1)] + column, EIGHT),
        load(matrix, places[at + np.uintp(2)] + column, EIGHT),
        load(matrix, places[at + np.uintp(3)] + column, EIGHT),
        load(matrix, places[at + np.uintp(4)] + column, EIGHT),
        load(matrix, places[at + np.uintp(5)] + column, EIGHT),
        load(matrix, places[at + np.uintp(6)] + column, EIGHT),
        load(matrix, places[at + np.uintp(7)] + column, EIGHT),
    )


@part
def multiply(left, row_step, step, right, count, rows, columns, out):  # type: ignore[no-untyped-def]
    """``out[i, :] = Σ_k left[i · row_step + k · step] right[k, :]``, with k up to `count`.

    Rows and columns are padded to a multiple of eight.
    """
    stand_alone()
    for i in range(0, rows, 8):
        for j in range(0, columns - 8, 16):
            multiply_tile(
                left, i * row_step, row_step, step, right, j, columns, count, out, i * columns + j,
                SIXTEEN,
            )  # fmt: skip
        if columns % 16:
            j = columns - 8
            multiply_tile(
                left, i * row_step, row_step, step, right, j, columns, count, out, i * columns + j,
                EIGHT,
            )  # fmt: skip


@part
def transpose(matrix, rows, columns, out):  # type: ignore[no-untyped-def]
    """The transpose of a matrix; rows and columns are padded to a multiple of eight."""
    stand_alone()
    for i in range(0, rows, 8):
        for j in range(0, columns, 8):
            store_rows(out, j * rows + i, rows, load_transposed(matrix, i * columns + j, columns))
