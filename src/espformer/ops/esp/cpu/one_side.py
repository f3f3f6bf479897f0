"""Soft sorts of rows. One side of the plan is the identity and is never formed.

With κ of the sorted numbers of one row, ``o`` and ``i`` its scales and P the order, sorting and the
way back are the two derivatives of one bilinear form of rows X of tokens and Y of ranks,

    F(X, Y) = Σ_n o_n Y_n · (κ i P X)_n,    A X = o κ i P X,    Aᵀ Y = Pᵀ i κ o Y.

The unit of the temperature is dealt with here too (`measuring`): a call of a thousand numbers takes
less time than a dozen tensor operations would.
"""

from __future__ import annotations

import numpy as np

from espformer.ops.esp.cpu.compiling import kernel, part, stand_alone
from espformer.ops.esp.cpu.gradients import (
    LEFT,
    LEFT_SLOPE,
    add_slopes_of_pairs,
    backprop_product,
    bandwidth_gradient,
    scales_gradient,
)
from espformer.ops.esp.cpu.kappa import (
    multiply,
    multiply_column,
    multiply_column_with_slope,
    multiply_with_slope,
)
from espformer.ops.esp.cpu.measuring import FACTOR, FREE, MEAN, SPREAD, measure
from espformer.ops.esp.cpu.normalising import balance_steps, row_scales
from espformer.ops.esp.cpu.rows import (
    clear,
    clear_blocks,
    copy,
    number_ranks,
    pack,
    scatter,
    set_ones,
    unpack,
)
from espformer.ops.esp.cpu.simd import load, total
from espformer.ops.esp.cpu.soft_plan import (
    COUNTS,
    D_K_ROWS,
    K_ROWS,
    MIXED,
    Q_ROWS,
    RANKS,
    SPARE,
    TOKENS,
    UNIT,
    kappa_of,
)
from espformer.ops.esp.cpu.sort import sort_tokens


@part
def sort_row(settings, unit, numbers, mask, side, shapes, head, tokens, ones, buffers):  # type: ignore[no-untyped-def]
    """Sorts the numbers of one row that take part, and finds the scales of κ; gives that back."""
    stand_alone()
    n, first = numbers.shape[1], np.int64(0)
    if mask.shape[1] > 0:
        n = 0
        for i in range(numbers.shape[1]):
            if mask[head, i]:
                tokens[n] = i
                n += 1
    side.lengths[head] = n
    inv_bandwidth = 1.0
    order, points = side.order[head, 0], side.points[head, 0]
    if n > 0:
        sort_tokens(
            numbers[head], tokens, n, order, points, buffers.keys, buffers.integers[SPARE],
            buffers.integers[COUNTS],
        )  # fmt: skip
        t = np.float64(unit.temperatures[head % len(unit.temperatures)])
        inv_bandwidth = measure(points, n, t, unit, shapes[head])
    settings.inv_bandwidth[head] = inv_bandwidth
    if np.isnan(inv_bandwidth):
        copy(tokens, n, order)
        clear(points, n)
    kappa = kappa_of(settings, side, head, 0, buffers, first)
    scales = side.scales[head, 0]
    if settings.balanced:
        x, r = buffers.steps[0], buffers.steps[1]
        balance_steps(kappa, ones, settings.exponents, x, r, buffers.columns[0, MIXED])
        copy(x[len(settings.exponents)], n, scales)
    else:
        row_scales(kappa, ones, scales)
    return kappa


@kernel
def sort_numbers(
    h0, h1, l0, l1, settings, unit, numbers, mask, side, shapes, buffers
):  # type: ignore[no-untyped-def] # fmt: skip
    """Sorts (batch, N) numbers of the tokens that take part, and finds the scales of κ."""
    tokens, ones = number_ranks(buffers.integers[TOKENS]), set_ones(buffers.columns[0, UNIT])
    for head in range(h0, h1):
        sort_row(settings, unit, numbers, mask, side, shapes, head, tokens, ones, buffers)


@part
def fill_nan(rows, places, n):  # type: ignore[no-untyped-def]
    """Sets rows to NaN at these places, and to zero elsewhere."""
    stand_alone()
    for i in range(rows.shape[0]):
        for j in range(rows.shape[1]):
            rows[i, j] = 0
    for i in range(n):
        for j in range(rows.shape[1]):
            rows[places[i], j] = np.nan


@part
def fill_nan_gradients(
    inv_bandwidth, order, ranks, n, back, rows_wanted, d_rows, d_numbers, d_temperature
):  # type: ignore[no-untyped-def]
    """Sets all gradients of a row of numbers with NaN to NaN; whether it is one."""
    stand_alone()
    if not np.isnan(inv_bandwidth):
        return False
    if rows_wanted:
        fill_nan(d_rows, ranks if back else order, n)
    for i in range(min(n, len(d_numbers))):
        d_numbers[order[i]] = np.nan
    d_temperature[0] = np.nan
    return True


@kernel
def mix_rows(
    h0, h1, l0, l1, settings, side, value, back, centre, out, buffers, lanes
):  # type: ignore[no-untyped-def] # fmt: skip
    """``A V``, or ``Aᵀ V`` if `back`: (batch, N, d); NaN for rows that hold one."""
    unit, ranks = set_ones(buffers.columns[0, UNIT]), number_ranks(buffers.integers[RANKS])
    blocks, out_blocks, y = buffers.blocks[K_ROWS], buffers.blocks[D_K_ROWS], buffers.rows[0]
    one, first = unit.dtype.type(1), np.int64(0)
    for head in range(h0, h1):
        n, order = side.lengths[head], side.order[head, 0]
        if np.isnan(settings.inv_bandwidth[head]):
            fill_nan(out[head], order if back else ranks, n)
            continue
        scales = side.scales[head, 0]
        inner = scales if settings.balanced else unit
        clear_blocks(out_blocks)
        if n > 0:
            pack(value[head], centre, blocks, lanes)
            kappa = kappa_of(settings, side, head, 0, buffers, first)
            for block in range(blocks.shape[0]):
                if back:
                    multiply(kappa, blocks[block], ranks, scales, y, lanes)
                    scatter(y, n, order, inner, one, out_blocks[block], lanes)
                else:
                    multiply(kappa, blocks[block], order, inner, y, lanes)
                    scatter(y, n, ranks, scales, one, out_blocks[block], lanes)
        unpack(out_blocks, out[head], lanes)


@part
def add_row_products(x, slope, y, n, scale, out, slopes, lanes):  # type: ignore[no-untyped-def]
    """``out_n += y_n · x_n`` and ``slopes_n += scale_n y_n · slope_n``."""
    stand_alone()
    width = 8 * len(lanes)
    for i in range(n):
        row = load(y, i * width, lanes)
        out[i] += total(load(x, i * width, lanes) * row)
        slopes[i] += scale[i] * total(load(slope, i * width, lanes) * row)


# Rows of the buffer for columns, beside those that `scales_gradient` works in.
D_OUT, D_IN, SLOPES = range(10, 13)


@part
def to_numbers(settings, unit, side, head, slopes, shape, d_numbers):  # type: ignore[no-untyped-def]
    """From derivatives in ``u_n = s_n / w`` to those in the numbers; gives back that in t.

    With a bandwidth ``w = t σ`` every number also moves the spread,
    ``dσ/ds_n = (s_n - mean) / (n σ)``, and what depends on u alone has the derivative
    ``-Σ u_n slopes_n / σ`` in it.
    """
    stand_alone()
    n, order, points = side.lengths[head], side.order[head, 0], side.points[head, 0]
    inv_bandwidth = np.float64(settings.inv_bandwidth[head])
    factor, mean, spread = shape[FACTOR], shape[MEAN], shape[SPREAD]
    pulls, spread_pull = bandwidth_gradient(points, n, slopes), 0.0
    if unit.in_spreads and shape[FREE] > 0 and spread > 0:
        spread_pull = pulls / (n * spread * spread)
    scale = inv_bandwidth * factor
    if unit.in_spreads and spread == 0:
        scale = 0.0
    for i in range(n):
        found = scale * (np.float64(slopes[i]) - spread_pull * (points[i] - mean))
        d_numbers[order[i]] = min(max(found, -unit.greatest), unit.greatest)
    if shape[FREE] == 0:
        return 0.0
    t = np.float64(unit.temperatures[head % len(unit.temperatures)])
    root = 0.5 if unit.squared and not unit.in_spreads else 1.0
    found = -root * inv_bandwidth * pulls / t
    return min(max(found, -unit.greatest), unit.greatest)


@kernel
def mix_gradient(
    h0, h1, l0, l1, settings, unit, side, shapes, x, y, back, rows_wanted, centre, d_rows,
    d_numbers, d_temperatures, buffers, lanes,
):  # type: ignore[no-untyped-def] # fmt: skip
    """Gradients of F(X, Y): of the rows that were mixed, of the numbers and of the temperatures.

    `x` and `y` are values and upstream gradients; the other way round if `back`.
    """
    columns, pairs, rows = buffers.columns[0], buffers.pairs[0], buffers.rows
    ones, ranks = set_ones(columns[UNIT]), number_ranks(buffers.integers[RANKS])
    x_blocks, y_blocks, d_blocks = (
        buffers.blocks[Q_ROWS],
        buffers.blocks[K_ROWS],
        buffers.blocks[D_K_ROWS],
    )
    d_out, d_in, slopes = columns[D_OUT], columns[D_IN], columns[SLOPES]
    one, first, nothing = ones.dtype.type(1), np.int64(0), ones[:0]
    for head in range(h0, h1):
        n, order, scales = side.lengths[head], side.order[head, 0], side.scales[head, 0]
        if fill_nan_gradients(
            settings.inv_bandwidth[head], order, ranks, n, back, rows_wanted, d_rows[head],
            d_numbers[head], d_temperatures[head:],
        ):  # fmt: skip
            continue
        inner = scales if settings.balanced else ones
        clear_blocks(d_blocks)
        if n > 0:
            pack(x[head], centre, x_blocks, lanes)
            pack(y[head], centre, y_blocks, lanes)
            kappa = kappa_of(settings, side, head, 0, buffers, first)
            for column in (d_out, d_in, slopes):
                clear(column, n)
            for block in range(x_blocks.shape[0]):
                left = rows[LEFT]
                if settings.slopes:
                    multiply_with_slope(
                        kappa, x_blocks[block], order, inner, left, rows[LEFT_SLOPE], lanes
                    )
                    add_row_products(
                        left, rows[LEFT_SLOPE], y_blocks[block], n, scales, d_out, slopes, lanes
                    )
                elif back and rows_wanted:
                    multiply(kappa, x_blocks[block], order, inner, left, lanes)
                if back and rows_wanted:
                    scatter(left, n, ranks, scales, one, d_blocks[block], lanes)
                d_x = d_blocks[block] if rows_wanted and not back else nothing
                ins = d_in if settings.balanced else nothing
                backprop_product(
                    kappa, x_blocks[block], order, inner, y_blocks[block], ranks, scales, rows,
                    settings, ones, slopes, ins, d_x, lanes,
                )  # fmt: skip
            if settings.slopes:
                scales_gradient(
                    kappa, scales, settings.balanced, settings.exponents, ones, columns, pairs,
                    buffers.steps, d_out, d_in,
                )  # fmt: skip
                add_slopes_of_pairs(kappa, pairs, ranks, ones, slopes)
                d_temperatures[head] = to_numbers(
                    settings, unit, side, head, slopes, shapes[head], d_numbers[head]
                )  # fmt: skip
        if rows_wanted:
            unpack(d_blocks, d_rows[head], lanes)


# Rows of the buffer for columns, of one or two columns of values: in rank order, and mixed.
AT_RANK, PRODUCT_OF, SLOPE_OF, UPSTREAM, SLOPE_OF_ONES = range(5)


@kernel
def mix_columns(
    h0, h1, l0, l1, settings, unit, numbers, mask, value, back, side, shapes, out, buffers
):  # type: ignore[no-untyped-def] # fmt: skip
    """`sort_numbers` and `mix_rows` in one, for few columns and rows that sum to one."""
    tokens, ones = number_ranks(buffers.integers[TOKENS]), set_ones(buffers.columns[0, UNIT])
    at_rank, mixed = buffers.columns[1, AT_RANK], buffers.columns[1, PRODUCT_OF]
    ranks = number_ranks(buffers.integers[RANKS])
    for head in range(h0, h1):
        kappa = sort_row(settings, unit, numbers, mask, side, shapes, head, tokens, ones, buffers)
        n, order, scales = side.lengths[head], side.order[head, 0], side.scales[head, 0]
        if np.isnan(settings.inv_bandwidth[head]):
            fill_nan(out[head], order if back else ranks, n)
            continue
        if mask.shape[1] > 0:
            fill_nan(out[head], order, np.int64(0))
        for c in range(value.shape[2]):
            for i in range(n):
                at_rank[i] = value[head, i, c] * scales[i] if back else value[head, order[i], c]
            multiply_column(kappa, at_rank, mixed)
            for i in range(n):
                if back:
                    out[head, order[i], c] = mixed[i]
                else:
                    out[head, i, c] = scales[i] * mixed[i]


@kernel
def columns_gradient(
    h0, h1, l0, l1, settings, unit, side, shapes, x, y, back, rows_wanted, d_rows, d_numbers,
    d_temperatures, buffers,
):  # type: ignore[no-untyped-def] # fmt: skip
    """`mix_gradient` for few columns and rows that sum to one; `d_rows` holds zeros."""
    ones, columns = set_ones(buffers.columns[0, UNIT]), buffers.columns[1]
    ranks, first = number_ranks(buffers.integers[RANKS]), np.int64(0)
    at_rank, mixed, pulled = columns[AT_RANK], columns[PRODUCT_OF], columns[SLOPE_OF]
    upstream, of_ones = columns[UPSTREAM], columns[SLOPE_OF_ONES]
    d_out, slopes = columns[D_OUT], columns[SLOPES]
    for head in range(h0, h1):
        n, order, scales = side.lengths[head], side.order[head, 0], side.scales[head, 0]
        if fill_nan_gradients(
            settings.inv_bandwidth[head], order, ranks, n, back, rows_wanted, d_rows[head],
            d_numbers[head], d_temperatures[head:],
        ):  # fmt: skip
            continue
        if n == 0:
            continue
        kappa = kappa_of(settings, side, head, 0, buffers, first)
        clear(d_out, n)
        clear(slopes, n)
        for c in range(x.shape[2]):
            for i in range(n):
                at_rank[i] = x[head, order[i], c]
                upstream[i] = scales[i] * y[head, i, c]
            multiply_column_with_slope(kappa, at_rank, mixed, pulled)
            for i in range(n):
                d_out[i] += y[head, i, c] * mixed[i]
                slopes[i] += upstream[i] * pulled[i]
                if back and rows_wanted:
                    d_rows[head, i, c] = scales[i] * mixed[i]
            multiply_column_with_slope(kappa, upstream, mixed, pulled)
            for i in range(n):
                slopes[i] += at_rank[i] * pulled[i]
                if rows_wanted and not back:
                    d_rows[head, order[i], c] = mixed[i]
        if settings.slopes:
            multiply_column_with_slope(kappa, ones, mixed, of_ones)
            for i in range(n):
                upstream[i] = -d_out[i] * scales[i] * scales[i]
            multiply_column_with_slope(kappa, upstream, mixed, pulled)
            for i in range(n):
                slopes[i] += upstream[i] * of_ones[i] + pulled[i]
            d_temperatures[head] = to_numbers(
                settings, unit, side, head, slopes, shapes[head], d_numbers[head]
            )
