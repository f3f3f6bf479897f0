"""Gradients of the plans of slices, by the same recurrences; everything is recomputed.

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
from espformer.ops.esp.cpu.kappa import multiply, multiply_column, multiply_with_slope
from espformer.ops.esp.cpu.normalising import balance_gradient, balance_steps
from espformer.ops.esp.cpu.rows import (
    add_crossed_products,
    add_products,
    add_products_with_tokens,
    clear,
    clear_blocks,
    copy,
    couple,
    couple_back,
    number_ranks,
    pack,
    scatter,
    set_ones,
    squared_norms,
    unpack,
    weighted_product,
)
from espformer.ops.esp.cpu.simd import LANES
from espformer.ops.esp.cpu.soft_plan import (
    D_K_ROWS,
    D_Q_ROWS,
    K_ROWS,
    Q_ROWS,
    RANKS,
    UNIT,
    couple_column,
    mix_squares,
    plan_of,
    row_sums,
)


class SideGradient(NamedTuple):
    """Gradients that arrive at one side of every slice, by rank."""

    slopes: np.ndarray  # (batch, L, N): derivatives in points times inv_bandwidth
    scales_out: np.ndarray  # (batch, L, N)
    scales_in: np.ndarray  # (batch, L, N); without slices unless balanced
    inv_bandwidth: np.ndarray  # (batch, L)


# Rows of the workspace for one block: κ_q q_in X and its slope, κ_k k_in Y and its slope, both
# after the coupling, and the product with an upstream gradient and its slope.
LEFT, LEFT_SLOPE, RIGHT, RIGHT_SLOPE, FROM_LEFT, FROM_RIGHT, PRODUCT, PRODUCT_SLOPE = range(8)


@part
def form_gradient(plan, x, y, weight, settings, rows, numbers, unit, slopes, outs, lanes):  # type: ignore[no-untyped-def]
    """Gradients of ``weight F_l(X, Y)`` of one block with respect to the products with X and Y.

    Adds to `slopes` and `outs`, one for either side. Leaves the upstream gradients in the rows
    FROM_LEFT (e) and FROM_RIGHT (h), with their scales in `numbers`. Gives back F_l(X, Y).
    """
    n, m = plan.kappa_q.n, plan.kappa_k.n
    left, right = rows[LEFT], rows[RIGHT]
    if settings.slopes:
        multiply_with_slope(plan.kappa_q, x, plan.q_order, plan.q_in, left, rows[LEFT_SLOPE], lanes)
        multiply_with_slope(
            plan.kappa_k, y, plan.k_order, plan.k_in, right, rows[RIGHT_SLOPE], lanes
        )
    else:
        multiply(plan.kappa_q, x, plan.q_order, plan.q_in, left, lanes)
        multiply(plan.kappa_k, y, plan.k_order, plan.k_in, right, lanes)
    e_scale, h_scale = numbers
    e_rows, h_rows, left_scale, right_scale = left, right, plan.q_out, plan.k_out
    if len(plan.pairs.rows):
        couple(right, plan.k_out, plan.pairs, rows[FROM_RIGHT], n, lanes)
        couple_back(left, plan.q_out, plan.pairs, rows[FROM_LEFT], m, lanes)
        e_rows, h_rows, left_scale, right_scale = rows[FROM_LEFT], rows[FROM_RIGHT], unit, unit
    # The coupling multiplies rows by the scale of their own side; without one this is still to do.
    for i in range(m):
        e_scale[i] = left_scale[i] * plan.k_out[i]
    for i in range(n):
        h_scale[i] = right_scale[i] * plan.q_out[i]
    found = weighted_product(left, h_rows, n, h_scale, lanes)
    for i in range(m):
        e_scale[i] *= weight
    for i in range(n):
        h_scale[i] *= weight
    if settings.slopes:
        add_products(
            left,
            rows[LEFT_SLOPE],
            h_rows,
            n,
            right_scale,
            weight,
            outs[0],
            h_scale,
            slopes[0],
            lanes,
        )
        add_products(
            right, rows[RIGHT_SLOPE], e_rows, m, left_scale, weight, outs[1], e_scale, slopes[1],
            lanes,
        )  # fmt: skip
    return found


@part
def backprop_product(
    kappa, x, order, scale_in, p, ranks, p_scale, rows, settings, unit, slopes, ins, d_x, lanes
):  # type: ignore[no-untyped-def]
    """From the upstream gradient ``p_scale p`` of ``κ in x`` to dx, and its part of the slopes.

    `ins` and `d_x` may be empty.
    """
    n, one, product = kappa.n, unit.dtype.type(1), rows[PRODUCT]
    if settings.slopes:
        multiply_with_slope(kappa, p, ranks, p_scale, product, rows[PRODUCT_SLOPE], lanes)
        add_products_with_tokens(x, order, rows[PRODUCT_SLOPE], n, scale_in, slopes, lanes)
        if len(ins):
            add_products_with_tokens(x, order, product, n, unit, ins, lanes)
    elif len(d_x):
        multiply(kappa, p, ranks, p_scale, product, lanes)
    if len(d_x):
        scatter(product, n, order, scale_in, one, d_x, lanes)


@kernel
def plans_gradient(
    h0, h1, l0, l1, settings, queries, keys, pairs, x, y, centre, weights, q_grad, k_grad, forms,
    d_x, d_y, buffers, lanes,
):  # type: ignore[no-untyped-def] # fmt: skip
    """Gradients of ``Σ_l weights_l F_l(X - centre, Y - centre)``, and the forms F_l, (batch, L).

    Adds to `q_grad` and `k_grad`, writes d_x (batch, N, d), unless it is empty, and d_y.
    """
    unit, ranks = set_ones(buffers.columns[0, UNIT]), number_ranks(buffers.integers[RANKS])
    e_scale, h_scale, rows = buffers.columns[0, 2], buffers.columns[0, 3], buffers.rows
    x_blocks, y_blocks = buffers.blocks[Q_ROWS], buffers.blocks[K_ROWS]
    d_x_blocks, d_y_blocks = buffers.blocks[D_Q_ROWS], buffers.blocks[D_K_ROWS]
    nothing = unit[:0]
    e_rows, h_rows = rows[LEFT], rows[RIGHT]
    if pairs.rows.shape[1]:
        e_rows, h_rows = rows[FROM_LEFT], rows[FROM_RIGHT]
    for head in range(h0, h1):
        if d_x.shape[1]:
            clear_blocks(d_x_blocks)
        clear_blocks(d_y_blocks)
        takes_part = queries.lengths[head] > 0 and keys.lengths[head] > 0
        if takes_part:
            pack(x[head], centre[head], x_blocks, lanes)
            pack(y[head], centre[head], y_blocks, lanes)
        for l in range(l0, l1):
            forms[head, l] = 0
            # A slice with weight zero (dropped, or very costly) has no gradient.
            if not takes_part or weights[head, l] == 0:
                continue
            plan = plan_of(settings, queries, keys, pairs, head, l, buffers)
            slopes = q_grad.slopes[head, l], k_grad.slopes[head, l]
            outs = q_grad.scales_out[head, l], k_grad.scales_out[head, l]
            q_ins, k_ins = nothing, nothing
            if settings.balanced and settings.slopes:
                q_ins, k_ins = q_grad.scales_in[head, l], k_grad.scales_in[head, l]
            for block in range(x_blocks.shape[0]):
                forms[head, l] += form_gradient(
                    plan, x_blocks[block], y_blocks[block], weights[head, l], settings, rows,
                    (e_scale, h_scale), unit, slopes, outs, lanes,
                )  # fmt: skip
                if settings.slopes or d_x.shape[1]:
                    d_x_block = d_x_blocks[block] if d_x.shape[1] else nothing
                    backprop_product(
                        plan.kappa_q, x_blocks[block], plan.q_order, plan.q_in, h_rows, ranks,
                        h_scale, rows, settings, unit, slopes[0], q_ins, d_x_block, lanes,
                    )  # fmt: skip
                backprop_product(
                    plan.kappa_k, y_blocks[block], plan.k_order, plan.k_in, e_rows, ranks,
                    e_scale, rows, settings, unit, slopes[1], k_ins, d_y_blocks[block], lanes,
                )  # fmt: skip
        if d_x.shape[1]:
            unpack(d_x_blocks, d_x[head], lanes)
        unpack(d_y_blocks, d_y[head], lanes)


# Rows of the workspace for one number per rank, on each side: ‖x‖² of the tokens and its gradient,
# A1, the other side's A1 after the coupling and its gradient, and scratch.
SQUARES, D_SQUARES, SUMS, COUPLED_SUMS, D_COUPLED_SUMS, AT_RANK, MIXED, D_SCALE = range(2, 10)

# Pairs (x, p) of operands of κ and their upstream gradients, which contribute to the gradient of
# the points, are columns of blocks: first the x of a block, then its p. They are the balancing
# steps and their start, or the normalisation; squares and row sums are the last two. The first two
# rows are space for products and slopes of one block.
PAIR_PRODUCTS, PAIR_SLOPES, PAIRS = range(3)
PAIR_LANES = LANES[16]
IN_BLOCK = 8  # pairs


@part
def squares_gradient(kappa, order, scale_in, scale_out, weight, columns, pairs, d_out, d_in):  # type: ignore[no-untyped-def]
    """Gradients of ``weight Σ_n out_n (κ in ‖x‖²)_n coupled_n``, with the coupled row sums of the
    other side; `d_out` and `d_in` may be empty.
    """
    at_rank, mixed, last = columns[AT_RANK], columns[MIXED], pairs[len(pairs) - 1]
    mix_squares(kappa, order, scale_in, columns[SQUARES], at_rank, mixed)
    for i in range(kappa.n):
        last[2 * i * IN_BLOCK + IN_BLOCK - 2] = at_rank[i]
        if len(d_out):
            d_out[i] += weight * columns[COUPLED_SUMS, i] * mixed[i]
        columns[D_COUPLED_SUMS, i] = weight * scale_out[i] * mixed[i]
        at_rank[i] = weight * scale_out[i] * columns[COUPLED_SUMS, i]
        last[2 * i * IN_BLOCK + 2 * IN_BLOCK - 2] = at_rank[i]
    multiply_column(kappa, at_rank, mixed)
    for i in range(kappa.n):
        columns[D_SQUARES, order[i]] += scale_in[i] * mixed[i]
        if len(d_in):
            d_in[i] += columns[SQUARES, order[i]] * mixed[i]


@part
def sums_gradient(kappa, scale_in, scale_out, columns, pairs, d_sums, d_out, d_in):  # type: ignore[no-untyped-def]
    """Gradients of the row sums ``out κ in``; they are constant unless balanced."""
    at_rank, mixed, last = columns[AT_RANK], columns[MIXED], pairs[len(pairs) - 1]
    for i in range(kappa.n):
        d_out[i] += d_sums[i] * columns[SUMS, i] / scale_out[i]
        at_rank[i] = d_sums[i] * scale_out[i]
        last[2 * i * IN_BLOCK + IN_BLOCK - 1] = scale_in[i]
        last[2 * i * IN_BLOCK + 2 * IN_BLOCK - 1] = at_rank[i]
    multiply_column(kappa, at_rank, mixed)
    for i in range(kappa.n):
        d_in[i] += mixed[i]


@part
def scales_gradient(
    kappa, scale_out, balanced, exponents, unit, columns, pairs, steps, d_out, d_in
):  # type: ignore[no-untyped-def]
    """Pairs (x, p) that contribute to the gradient of the points, from that of the scales."""
    if balanced:
        x, r = steps[0], steps[1]
        balance_steps(kappa, unit, exponents, x, r, columns[MIXED])
        for i in range(kappa.n):
            columns[D_SCALE, i] = d_out[i] + d_in[i]
        balance_gradient(
            kappa, exponents, x, r, columns[D_SCALE], columns[AT_RANK], columns[MIXED],
            pairs[PAIRS:], IN_BLOCK,
        )  # fmt: skip
    else:
        for i in range(kappa.n):
            pairs[PAIRS, 2 * i * IN_BLOCK] = 1
            pairs[PAIRS, (2 * i + 1) * IN_BLOCK] = -d_out[i] * scale_out[i] * scale_out[i]


@part
def add_slopes_of_pairs(kappa, pairs, ranks, unit, slopes):  # type: ignore[no-untyped-def]
    """``slopes += x · κ'p + p · κ'x`` of all pairs."""
    found = pairs[PAIR_SLOPES]
    for block in range(PAIRS, len(pairs)):
        own = pairs[block]
        multiply_with_slope(kappa, own, ranks, unit, pairs[PAIR_PRODUCTS], found, PAIR_LANES)
        add_crossed_products(own, found, kappa.n, slopes, PAIR_LANES)


@part
def points_gradient(kappa, order, pairs, slopes, ranks, unit, d_points):  # type: ignore[no-untyped-def]
    """Brings the slopes of one slice to its tokens; gives back the gradient of inv_bandwidth."""
    add_slopes_of_pairs(kappa, pairs, ranks, unit, slopes)
    for i in range(kappa.n):
        d_points[order[i]] = kappa.inv_bandwidth * slopes[i]
    return bandwidth_gradient(kappa.points, kappa.n, slopes)


@part
def bandwidth_gradient(points, n, slopes):  # type: ignore[no-untyped-def]
    """``Σ_n s_n slopes_n``, the gradient of inv_bandwidth: all depends on ``s · inv_bandwidth``.

    The slopes sum to zero, so the numbers can be taken relative to any one of them. Sums are in
    float64.
    """
    stand_alone()
    middle, found = np.float64(points[n // 2]), 0.0
    for i in range(n):
        found += (points[i] - middle) * slopes[i]
    return found


@part
def add_squares(rows, centre, d_squares, d_rows):  # type: ignore[no-untyped-def]
    """``d_rows += 2 (rows - centre) d_squares``."""
    stand_alone()
    for i in range(rows.shape[0]):
        for j in range(rows.shape[1]):
            d_rows[i, j] += 2 * d_squares[i] * (rows[i, j] - centre[j])


@kernel
def finish_gradient(
    h0, h1, l0, l1, settings, queries, keys, pairs, query, key, centre, d_costs,
    q_grad, k_grad, d_query_points, d_key_points, d_query, d_key, buffers,
):  # type: ignore[no-untyped-def] # fmt: skip
    """Gradients of all columns (squares, row sums, scales), then of the points.

    `d_costs` (batch, L) is empty without costs; `d_query` and `d_key` are added to.
    """
    rows, columns = query.shape[1], key.shape[1]
    with_costs, balanced = d_costs.shape[1] > 0, settings.balanced
    q, k = buffers.columns[0], buffers.columns[1]
    q_pairs, k_pairs = buffers.pairs[0], buffers.pairs[1]
    unit, ranks, nothing = set_ones(q[UNIT]), number_ranks(buffers.integers[RANKS]), q[UNIT, :0]
    q_blocks, k_blocks = buffers.blocks[Q_ROWS], buffers.blocks[K_ROWS]
    for head in range(h0, h1):
        n, m = queries.lengths[head], keys.lengths[head]
        if n == 0 or m == 0:
            continue
        if with_costs:
            pack(query[head], centre[head], q_blocks, PAIR_LANES)
            pack(key[head], centre[head], k_blocks, PAIR_LANES)
            squared_norms(q_blocks, rows, q[SQUARES], PAIR_LANES)
            squared_norms(k_blocks, columns, k[SQUARES], PAIR_LANES)
            clear(q[D_SQUARES], rows)
            clear(k[D_SQUARES], columns)
        for l in range(l0, l1):
            plan = plan_of(settings, queries, keys, pairs, head, l, buffers)
            kappa_q, kappa_k = plan.kappa_q, plan.kappa_k
            q_outs, k_outs = q_grad.scales_out[head, l], k_grad.scales_out[head, l]
            q_ins, k_ins = nothing, nothing
            if balanced and settings.slopes:
                q_ins, k_ins = q_grad.scales_in[head, l], k_grad.scales_in[head, l]
            if with_costs:
                weight = d_costs[head, l] / n
                row_sums(kappa_q, plan.q_in, plan.q_out, balanced, q[SUMS])
                row_sums(kappa_k, plan.k_in, plan.k_out, balanced, k[SUMS])
                own = plan.pairs
                copy(
                    couple_column(own.rows, own.columns, own.weights, k[SUMS], q[COUPLED_SUMS]),
                    n,
                    q[COUPLED_SUMS],
                )
                copy(
                    couple_column(own.columns, own.rows, own.weights, q[SUMS], k[COUPLED_SUMS]),
                    m,
                    k[COUPLED_SUMS],
                )
                squares_gradient(
                    kappa_q, plan.q_order, plan.q_in, plan.q_out, weight, q, q_pairs, q_outs, q_ins
                )
                squares_gradient(
                    kappa_k, plan.k_order, plan.k_in, plan.k_out, weight, k, k_pairs, k_outs, k_ins
                )
                if balanced and settings.slopes:
                    d_q_sums = couple_column(
                        own.rows, own.columns, own.weights, k[D_COUPLED_SUMS], q[COUPLED_SUMS]
                    )
                    d_k_sums = couple_column(
                        own.columns, own.rows, own.weights, q[D_COUPLED_SUMS], k[COUPLED_SUMS]
                    )
                    sums_gradient(
                        kappa_q, plan.q_in, plan.q_out, q, q_pairs, d_q_sums, q_outs, q_ins
                    )
                    sums_gradient(
                        kappa_k, plan.k_in, plan.k_out, k, k_pairs, d_k_sums, k_outs, k_ins
                    )
            if settings.slopes:
                scales_gradient(
                    kappa_q, plan.q_out, balanced, settings.exponents, unit, q, q_pairs,
                    buffers.steps, q_outs, q_ins,
                )  # fmt: skip
                scales_gradient(
                    kappa_k, plan.k_out, balanced, settings.exponents, unit, k, k_pairs,
                    buffers.steps, k_outs, k_ins,
                )  # fmt: skip
                q_grad.inv_bandwidth[head, l] = points_gradient(
                    kappa_q, plan.q_order, q_pairs, q_grad.slopes[head, l], ranks, unit,
                    d_query_points[head, l],
                )  # fmt: skip
                k_grad.inv_bandwidth[head, l] = points_gradient(
                    kappa_k, plan.k_order, k_pairs, k_grad.slopes[head, l], ranks, unit,
                    d_key_points[head, l],
                )  # fmt: skip
        if with_costs:
            add_squares(query[head], centre[head], q[D_SQUARES], d_query[head])
            add_squares(key[head], centre[head], k[D_SQUARES], d_key[head])
