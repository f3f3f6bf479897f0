"""Gradients of the plans of slices, by the same recurrences, computing everything again.

Output and costs are sums of one bilinear form of rows X of queries and Y of keys,

    F_l(X, Y) = Σ_n q_out_n (κ_q q_in X)_n · (T k_out κ_k k_in Y)_n:

the output is its derivative in X at Y = V, and the costs are F_l(Q, K) beside two columns. With
``left = κ_q q_in X``, ``right = κ_k k_in Y`` the upstream gradients of these two products are
``e = k_out Tᵀ q_out left`` and ``h = q_out T k_out right``, and with κ symmetric

    dX = q_in κ_q h,    ds_q = h · (κ' q_in X) + q_in X · (κ' h),    and the same of the keys.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from espformer.ops.esp.cpu.compiling import kernel, part, stand_alone
from espformer.ops.esp.cpu.kappa import (
    multiply,
    multiply_column,
    multiply_with_slope,
    new_kappa,
    stretch,
)
from espformer.ops.esp.cpu.normalising import balance_gradient, balance_steps, room
from espformer.ops.esp.cpu.rows import (
    add_products,
    add_products_with_tokens,
    clear,
    clear_blocks,
    copy,
    couple,
    couple_back,
    new_blocks,
    numbered,
    ones,
    pack,
    scatter,
    squared_norms,
    unpack,
    weighted_product,
    zeros,
)
from espformer.ops.esp.cpu.simd import LANES
from espformer.ops.esp.cpu.soft_plan import couple_column, mix_squares, plan_of, row_sums

COLUMNS = LANES[16]  # of pairs: eight steps of balancing, where they start, squares, row sums
SQUARES, SUMS = 14, 15


class SideGradient(NamedTuple):
    """What arrives at one side of every slice, by rank; the first is t ds until it is done."""

    slopes: np.ndarray  # (batch, L, N)
    scales_out: np.ndarray  # (batch, L, N)
    scales_in: np.ndarray  # (batch, L, N); empty unless balanced
    inv_bandwidth: np.ndarray  # (batch, L)


class Wanted(NamedTuple):
    """Which gradients are computed."""

    slopes: bool  # of the numbers that are sorted
    inv_bandwidth: bool


class Rows(NamedTuple):
    """Room for the products of one block."""

    left: np.ndarray
    left_slope: np.ndarray
    right: np.ndarray
    right_slope: np.ndarray
    coupled_left: np.ndarray  # Tᵀ q_out left, where there is a coupling
    coupled_right: np.ndarray
    product: np.ndarray
    product_slope: np.ndarray


@part
def new_rows(rows, columns, is_coupled, number, width):  # type: ignore[no-untyped-def]
    q, k, most = rows * width, columns * width, max(rows, columns) * width
    return Rows(
        np.empty(q, number), np.empty(q, number), np.empty(k, number), np.empty(k, number),
        np.empty(k if is_coupled else 0, number), np.empty(q if is_coupled else 0, number),
        np.empty(most, number), np.empty(most, number),
    )  # fmt: skip


@part
def form_gradient(
    plan, x, y, weight, wanted, rows, ranks, e_scale, h_scale, unit, q_grad, k_grad, head, l,
    d_x, d_y, lanes,
):  # type: ignore[no-untyped-def] # fmt: skip
    """Adds the gradient of ``weight F_l(X, Y)`` of one block; gives back F_l(X, Y).

    `d_x` may be empty. `e_scale` and `h_scale` are room for one number per rank, `unit` ones.
    """
    stand_alone()
    stand_alone()
    n, m = plan.kappa_q.n, plan.kappa_k.n
    q_slopes, k_slopes = q_grad.slopes[head, l], k_grad.slopes[head, l]
    q_outs, k_outs = q_grad.scales_out[head, l], k_grad.scales_out[head, l]
    balanced = q_grad.scales_in.shape[1] > 0
    is_coupled = len(plan.pairs.rows) > 0
    if wanted.slopes:
        multiply_with_slope(
            plan.kappa_q, x, plan.q_order, plan.q_in, rows.left, rows.left_slope, lanes
        )
        multiply_with_slope(
            plan.kappa_k, y, plan.k_order, plan.k_in, rows.right, rows.right_slope, lanes
        )
    else:
        multiply(plan.kappa_q, x, plan.q_order, plan.q_in, rows.left, lanes)
        multiply(plan.kappa_k, y, plan.k_order, plan.k_in, rows.right, lanes)
    if is_coupled:
        couple(rows.right, plan.k_out, plan.pairs, rows.coupled_right, n, lanes)
        couple_back(rows.left, plan.q_out, plan.pairs, rows.coupled_left, m, lanes)
        e_rows, h_rows = rows.coupled_left, rows.coupled_right
        copy(plan.k_out, m, e_scale)
        copy(plan.q_out, n, h_scale)
    else:
        e_rows, h_rows = rows.left, rows.right
        for i in range(n):
            e_scale[i] = h_scale[i] = plan.q_out[i] * plan.k_out[i]
    found = weighted_product(rows.left, h_rows, n, h_scale, lanes)
    for i in range(m):
        e_scale[i] *= weight
    for i in range(n):
        h_scale[i] *= weight
    if wanted.slopes:
        # Without a coupling the rows of the other side have not met their own scale yet.
        add_products(
            rows.left, h_rows, n, unit if is_coupled else plan.k_out, weight, q_outs, lanes
        )
        add_products(
            rows.right, e_rows, m, unit if is_coupled else plan.q_out, weight, k_outs, lanes
        )
        one = unit.dtype.type(1)
        add_products(rows.left_slope, h_rows, n, h_scale, one, q_slopes, lanes)
        add_products(rows.right_slope, e_rows, m, e_scale, one, k_slopes, lanes)
    if wanted.inv_bandwidth:
        q_grad.inv_bandwidth[head, l] += stretch(
            plan.kappa_q, x, plan.q_order, plan.q_in, h_rows, ranks, h_scale, lanes
        )
        k_grad.inv_bandwidth[head, l] += stretch(
            plan.kappa_k, y, plan.k_order, plan.k_in, e_rows, ranks, e_scale, lanes
        )
    if wanted.slopes:
        _pull_back(
            plan.kappa_q, x, plan.q_order, plan.q_in, h_rows, ranks, h_scale, rows,
            q_slopes, balanced, q_grad.scales_in, head, l, unit, d_x, lanes,
        )  # fmt: skip
        _pull_back(
            plan.kappa_k, y, plan.k_order, plan.k_in, e_rows, ranks, e_scale, rows,
            k_slopes, balanced, k_grad.scales_in, head, l, unit, d_y, lanes,
        )  # fmt: skip
    else:
        one = unit.dtype.type(1)
        if len(d_x):
            multiply(plan.kappa_q, h_rows, ranks, h_scale, rows.product, lanes)
            scatter(rows.product, n, plan.q_order, plan.q_in, one, d_x, lanes)
        multiply(plan.kappa_k, e_rows, ranks, e_scale, rows.product, lanes)
        scatter(rows.product, m, plan.k_order, plan.k_in, one, d_y, lanes)
    return found


@part
def _pull_back(
    kappa, x, order, scale_in, p, ranks, p_scale, rows, slopes, balanced, scales_in, head, l, unit,
    d_x, lanes,
):  # type: ignore[no-untyped-def] # fmt: skip
    """From the upstream gradient ``p_scale p`` of ``κ in x`` to dx, and its part of the slopes."""
    stand_alone()
    n = kappa.n
    multiply_with_slope(kappa, p, ranks, p_scale, rows.product, rows.product_slope, lanes)
    add_products_with_tokens(x, order, rows.product_slope, n, scale_in, slopes, lanes)
    if balanced:
        add_products_with_tokens(x, order, rows.product, n, unit, scales_in[head, l], lanes)
    if len(d_x):
        scatter(rows.product, n, order, scale_in, unit.dtype.type(1), d_x, lanes)


@kernel
def plans_gradient(
    h0, h1, l0, l1, table, settings, queries, keys, pairs, x, y, centre, weights, wanted,
    q_grad, k_grad, forms, d_x, d_y, lanes,
):  # type: ignore[no-untyped-def] # fmt: skip
    """Gradients of ``Σ_l weights_l F_l(X - centre, Y - centre)``, and the forms F_l, (batch, L).

    Adds to `q_grad` and `k_grad`, writes d_x (batch, N, d), unless it is empty, and d_y.
    """
    rows_x, rows_y, width = x.shape[1], y.shape[1], 8 * len(lanes)
    number = x.dtype
    x_blocks = new_blocks(rows_x, x.shape[2], number, lanes)
    y_blocks = new_blocks(rows_y, y.shape[2], number, lanes)
    d_x_blocks = new_blocks(rows_x if d_x.shape[1] else 0, x.shape[2], number, lanes)
    d_y_blocks = new_blocks(rows_y, y.shape[2], number, lanes)
    rows = new_rows(rows_x, rows_y, pairs.rows.shape[1] > 0, number, width)
    most = max(rows_x, rows_y)
    unit, ranks = ones(most, number), numbered(most)
    e_scale, h_scale = np.empty(most, number), np.empty(most, number)
    q_room, k_room = new_kappa(table, rows_x, number), new_kappa(table, rows_y, number)
    for head in range(h0, h1):
        clear_blocks(d_x_blocks)
        clear_blocks(d_y_blocks)
        if queries.lengths[head] > 0 and keys.lengths[head] > 0:
            pack(x[head], centre[head], x_blocks, lanes)
            pack(y[head], centre[head], y_blocks, lanes)
            for l in range(l0, l1):
                plan = plan_of(
                    settings, wanted.slopes, q_room, k_room, unit, queries, keys, pairs,
                    head, l,
                )  # fmt: skip
                found = number.type(0)
                # A slice without weight, dropped or dear, has no gradient.
                for block in range(len(x_blocks) if weights[head, l] != 0 else 0):
                    found += form_gradient(
                        plan, x_blocks[block], y_blocks[block], weights[head, l], wanted, rows,
                        ranks, e_scale, h_scale, unit, q_grad, k_grad, head, l,
                        d_x_blocks[block], d_y_blocks[block], lanes,
                    )  # fmt: skip
                forms[head, l] = found
        else:
            for l in range(l0, l1):
                forms[head, l] = 0
        if d_x.shape[1]:
            unpack(d_x_blocks, d_x[head], lanes)
        unpack(d_y_blocks, d_y[head], lanes)


class Columns(NamedTuple):
    """Room for what is one number per rank, on one side."""

    squares: np.ndarray  # ‖x‖² of the tokens
    d_squares: np.ndarray
    sums: np.ndarray  # A1
    met: np.ndarray  # what ranks of this side receive of the other's A1
    d_met: np.ndarray
    at_rank: np.ndarray
    mixed: np.ndarray
    d_scale: np.ndarray
    operands: np.ndarray  # pairs (x, p) of products κx: rows of `COLUMNS`
    gradients: np.ndarray
    product: np.ndarray
    slopes: np.ndarray
    other_slopes: np.ndarray
    x: np.ndarray  # (steps + 1, N) of the balancing
    r: np.ndarray


@part
def new_columns(count, steps, number):  # type: ignore[no-untyped-def]
    n, width = room(count), 8 * len(COLUMNS)
    return Columns(
        zeros(n, number), zeros(n, number), ones(n, number), ones(n, number),
        zeros(n, number), zeros(n, number), zeros(n, number), zeros(n, number),
        zeros(n * width, number), zeros(n * width, number), np.empty(n * width, number),
        np.empty(n * width, number), np.empty(n * width, number),
        np.empty((steps, n), number), np.empty((steps, n), number),
    )  # fmt: skip


@part
def _squares_gradient(kappa, order, scale_in, scale_out, weight, columns, d_out, d_in):  # type: ignore[no-untyped-def]
    """Of ``weight Σ_n out_n (κ in ‖x‖²)_n met_n``."""
    stand_alone()
    stand_alone()
    n, width = kappa.n, 8 * len(COLUMNS)
    at_rank, mixed = columns.at_rank, columns.mixed
    mix_squares(kappa, order, scale_in, columns.squares, at_rank, mixed)
    for i in range(n):
        columns.operands[i * width + SQUARES] = at_rank[i]
        if len(d_out):
            d_out[i] += weight * columns.met[i] * mixed[i]
        columns.d_met[i] = weight * scale_out[i] * mixed[i]
        at_rank[i] = weight * scale_out[i] * columns.met[i]
        columns.gradients[i * width + SQUARES] = at_rank[i]
    multiply_column(kappa, at_rank, mixed)
    for i in range(n):
        columns.d_squares[order[i]] += scale_in[i] * mixed[i]
        if len(d_in):
            d_in[i] += columns.squares[order[i]] * mixed[i]


@part
def _sums_gradient(kappa, scale_in, scale_out, columns, d_sums, d_out, d_in):  # type: ignore[no-untyped-def]
    """Of the row sums ``out κ in``; they are constant unless balanced."""
    stand_alone()
    n, width = kappa.n, 8 * len(COLUMNS)
    at_rank, mixed = columns.at_rank, columns.mixed
    for i in range(n):
        d_out[i] += d_sums[i] * columns.sums[i] / scale_out[i]
        at_rank[i] = d_sums[i] * scale_out[i]
        columns.operands[i * width + SUMS] = scale_in[i]
        columns.gradients[i * width + SUMS] = at_rank[i]
    multiply_column(kappa, at_rank, mixed)
    for i in range(n):
        d_in[i] += mixed[i]


@part
def _scales_gradient(kappa, scale_out, balanced, exponents, unit, columns, d_out, d_in):  # type: ignore[no-untyped-def]
    """From the gradient of the scales to pairs that pull at the points."""
    stand_alone()
    n, width = kappa.n, 8 * len(COLUMNS)
    if balanced:
        balance_steps(kappa, unit, exponents, columns.x, columns.r, columns.mixed)
        for i in range(n):
            columns.d_scale[i] = d_out[i] + d_in[i]
        balance_gradient(
            kappa, exponents, columns.x, columns.r, columns.d_scale, columns.at_rank,
            columns.mixed, (columns.operands, columns.gradients), width,
        )  # fmt: skip
    else:
        for i in range(n):
            columns.operands[i * width] = 1
            columns.gradients[i * width] = -d_out[i] * scale_out[i] * scale_out[i]


@part
def _finish_side(
    kappa, order, columns, slopes, ranks, unit, wanted, inv_bandwidth, d_inv, d_numbers
):  # type: ignore[no-untyped-def]
    """Lets the pairs pull, and brings the slopes of one slice to its tokens."""
    stand_alone()
    n = kappa.n
    for operand, other, into in (
        (columns.operands, columns.gradients, columns.slopes),
        (columns.gradients, columns.operands, columns.other_slopes),
    ):
        multiply_with_slope(kappa, operand, ranks, unit, columns.product, into, COLUMNS)
        add_products(into, other, n, unit, unit.dtype.type(1), slopes, COLUMNS)
    for i in range(n):
        d_numbers[order[i]] = inv_bandwidth * slopes[i]
    if wanted.inv_bandwidth:
        d_inv += stretch(
            kappa, columns.operands, ranks, unit, columns.gradients, ranks, unit, COLUMNS
        )
    return d_inv


@kernel
def finish_gradient(
    h0, h1, l0, l1, table, settings, queries, keys, pairs, query, key, centre, d_costs, wanted,
    q_grad, k_grad, d_query, d_key, d_query_numbers, d_key_numbers, lanes,
):  # type: ignore[no-untyped-def] # fmt: skip
    """Gradients of what is one number per rank: squares, row sums, scales; then of the numbers.

    `d_costs` (batch, L) is empty without costs; `d_query` and `d_key` are added to.
    """
    rows, columns, number = query.shape[1], key.shape[1], query.dtype
    with_costs = d_costs.shape[1] > 0
    steps = len(settings.exponents) + 1 if settings.balanced else 0
    q, k = new_columns(rows, steps, number), new_columns(columns, steps, number)
    most = max(rows, columns)
    unit, ranks = ones(room(most), number), numbered(most)
    q_room, k_room = new_kappa(table, rows, number), new_kappa(table, columns, number)
    q_blocks = new_blocks(rows, query.shape[2], number, lanes)
    k_blocks = new_blocks(columns, key.shape[2], number, lanes)
    empty = np.empty(0, number)
    for head in range(h0, h1):
        n, m = queries.lengths[head], keys.lengths[head]
        if n == 0 or m == 0:
            continue
        if with_costs:
            pack(query[head], centre[head], q_blocks, lanes)
            pack(key[head], centre[head], k_blocks, lanes)
            squared_norms(q_blocks, rows, q.squares, lanes)
            squared_norms(k_blocks, columns, k.squares, lanes)
            clear(q.d_squares, rows)
            clear(k.d_squares, columns)
        for l in range(l0, l1):
            plan = plan_of(
                settings, wanted.slopes, q_room, k_room, unit, queries, keys, pairs, head, l
            )
            q_out, k_out = q_grad.scales_out[head, l], k_grad.scales_out[head, l]
            q_in = q_grad.scales_in[head, l] if settings.balanced else empty
            k_in = k_grad.scales_in[head, l] if settings.balanced else empty
            if with_costs:
                weight = d_costs[head, l] / n
                row_sums(plan.kappa_q, plan.q_in, plan.q_out, settings.balanced, q.sums)
                row_sums(plan.kappa_k, plan.k_in, plan.k_out, settings.balanced, k.sums)
                copy(couple_column(plan.pairs, k.sums, q.met, False), n, q.met)
                copy(couple_column(plan.pairs, q.sums, k.met, True), m, k.met)
                _squares_gradient(
                    plan.kappa_q, plan.q_order, plan.q_in, plan.q_out, weight, q, q_out, q_in
                )
                _squares_gradient(
                    plan.kappa_k, plan.k_order, plan.k_in, plan.k_out, weight, k, k_out, k_in
                )
                if settings.balanced:
                    d_k_sums = couple_column(plan.pairs, q.d_met, k.met, True)
                    d_q_sums = couple_column(plan.pairs, k.d_met, q.met, False)
                    _sums_gradient(plan.kappa_q, plan.q_in, plan.q_out, q, d_q_sums, q_out, q_in)
                    _sums_gradient(plan.kappa_k, plan.k_in, plan.k_out, k, d_k_sums, k_out, k_in)
            if wanted.slopes:
                _scales_gradient(
                    plan.kappa_q, plan.q_out, settings.balanced, settings.exponents, unit, q,
                    q_out, q_in,
                )  # fmt: skip
                _scales_gradient(
                    plan.kappa_k, plan.k_out, settings.balanced, settings.exponents, unit, k,
                    k_out, k_in,
                )  # fmt: skip
                inv_bandwidth = settings.inv_bandwidth[head]
                q_grad.inv_bandwidth[head, l] = _finish_side(
                    plan.kappa_q, plan.q_order, q, q_grad.slopes[head, l], ranks, unit, wanted,
                    inv_bandwidth, q_grad.inv_bandwidth[head, l], d_query_numbers[head, l],
                )  # fmt: skip
                k_grad.inv_bandwidth[head, l] = _finish_side(
                    plan.kappa_k, plan.k_order, k, k_grad.slopes[head, l], ranks, unit, wanted,
                    inv_bandwidth, k_grad.inv_bandwidth[head, l], d_key_numbers[head, l],
                )  # fmt: skip
        if with_costs:
            for i in range(rows):
                for j in range(query.shape[2]):
                    d_query[head, i, j] += (
                        2 * q.d_squares[i] * (query[head, i, j] - centre[head, j])
                    )
            for i in range(columns):
                for j in range(key.shape[2]):
                    d_key[head, i, j] += 2 * k.d_squares[i] * (key[head, i, j] - centre[head, j])
