"""Rows of numbers in blocks of columns: how they are packed, picked, coupled and compared.

A block holds `lanes` columns of all rows, row after row in a flat array; the last block of a
matrix is filled up with zeros.
"""

from __future__ import annotations

from espformer.ops.esp.cpu.compiling import part, stand_alone
from espformer.ops.esp.cpu.simd import fill, load, store, swap_halves, total


@part
def clear(x, count):  # type: ignore[no-untyped-def]
    """Zeros; a loop compiles in a fraction of the time of ``x[:count] = 0``."""
    for i in range(count):
        x[i] = 0


@part
def copy(x, count, y):  # type: ignore[no-untyped-def]
    for i in range(count):
        y[i] = x[i]


@part
def set_ones(x):  # type: ignore[no-untyped-def]
    for i in range(len(x)):
        x[i] = 1
    return x


@part
def number_ranks(x):  # type: ignore[no-untyped-def]
    """0, 1, 2, …"""
    for i in range(len(x)):
        x[i] = i
    return x


@part
def clear_blocks(blocks):  # type: ignore[no-untyped-def]
    stand_alone()
    for block in range(blocks.shape[0]):
        for i in range(blocks.shape[1]):
            blocks[block, i] = 0


@part
def pack(matrix, centre, blocks, lanes):  # type: ignore[no-untyped-def]
    """Copies ``matrix - centre`` into blocks."""
    stand_alone()
    rows, columns = matrix.shape
    width = 8 * len(lanes)
    for block in range(blocks.shape[0]):
        start = block * width
        many = min(width, columns - start)
        for i in range(rows):
            for j in range(many):
                blocks[block, i * width + j] = matrix[i, start + j] - centre[start + j]
            for j in range(many, width):
                blocks[block, i * width + j] = 0


@part
def unpack(blocks, matrix, lanes):  # type: ignore[no-untyped-def]
    stand_alone()
    rows, columns = matrix.shape
    width = 8 * len(lanes)
    for block in range(blocks.shape[0]):
        start = block * width
        many = min(width, columns - start)
        for i in range(rows):
            for j in range(many):
                matrix[i, start + j] = blocks[block, i * width + j]


@part
def squared_norms(blocks, n, squares, lanes):  # type: ignore[no-untyped-def]
    """``‖row‖²`` of packed rows."""
    stand_alone()
    width = 8 * len(lanes)
    clear(squares, n)
    for block in range(blocks.shape[0]):
        for i in range(n):
            row = load(blocks[block], i * width, lanes)
            squares[i] += total(row * row)


@part
def scatter(rows, n, order, scale, weight, out, lanes):  # type: ignore[no-untyped-def]
    """``out[order_n] += weight scale_n rows_n``."""
    stand_alone()
    width = 8 * len(lanes)
    for i in range(n):
        place = order[i] * width
        row = load(out, place, lanes) + (weight * scale[i]) * load(rows, i * width, lanes)
        store(out, place, row)


@part
def couple(y, scale, pairs, out, rows, lanes):  # type: ignore[no-untyped-def]
    """``T (scale y)``: `rows` of them."""
    _couple(y, scale, pairs.rows, pairs.columns, pairs.weights, out, rows, lanes)


@part
def couple_back(y, scale, pairs, out, rows, lanes):  # type: ignore[no-untyped-def]
    """``Tᵀ (scale y)``."""
    _couple(y, scale, pairs.columns, pairs.rows, pairs.weights, out, rows, lanes)


@part
def _couple(y, scale, targets, sources, weights, out, rows, lanes):  # type: ignore[no-untyped-def]
    width = 8 * len(lanes)
    clear(out, rows * width)
    for i in range(len(weights)):
        if weights[i] != 0:  # else one of the two may be padding
            source, place = sources[i], targets[i] * width
            share = weights[i] * scale[source]
            store(out, place, load(out, place, lanes) + share * load(y, source * width, lanes))


@part
def weighted_product(x, y, n, scale, lanes):  # type: ignore[no-untyped-def]
    """``Σ_n scale_n x_n · y_n``."""
    stand_alone()
    width = 8 * len(lanes)
    found = fill(scale.dtype.type(0), lanes)
    for i in range(n):
        found = found + scale[i] * (load(x, i * width, lanes) * load(y, i * width, lanes))
    return total(found)


@part
def add_products(x, p, y, n, scale, weight, out, p_scale, p_out, lanes):  # type: ignore[no-untyped-def]
    """``out_n += weight scale_n x_n · y_n`` and ``p_out_n += p_scale_n p_n · y_n``."""
    stand_alone()
    width = 8 * len(lanes)
    for i in range(n):
        row = load(y, i * width, lanes)
        out[i] += weight * scale[i] * total(load(x, i * width, lanes) * row)
        p_out[i] += p_scale[i] * total(load(p, i * width, lanes) * row)


@part
def add_products_with_tokens(x, order, y, n, scale, out, lanes):  # type: ignore[no-untyped-def]
    """``out_n += scale_n x[order_n] · y_n``."""
    stand_alone()
    width = 8 * len(lanes)
    for i in range(n):
        found = total(load(x, order[i] * width, lanes) * load(y, i * width, lanes))
        out[i] += scale[i] * found


@part
def add_crossed_products(x, y, n, out, lanes):  # type: ignore[no-untyped-def]
    """``out_n += x_n · y_n``, with the halves of x crossed."""
    stand_alone()
    width = 8 * len(lanes)
    for i in range(n):
        out[i] += total(swap_halves(load(x, i * width, lanes)) * load(y, i * width, lanes))
