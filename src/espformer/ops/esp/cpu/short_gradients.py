"""Gradients of plans of short sequences, as matrices; the formulas are in `short_plan`."""

from __future__ import annotations

import numpy as np

from espformer.ops.esp.cpu.bands import (
    inner_product,
    mix_two,
    multiply_tiles,
    transpose_ranges,
)
from espformer.ops.esp.cpu.compiling import kernel, part, stand_alone
from espformer.ops.esp.cpu.dense import (
    couple,
    kernel_slope,
    multiply,
    pack,
    products,
    scale_columns,
    scale_rows,
    spread_out,
    subtract_from_rows,
    transpose,
    unpack,
)
from espformer.ops.esp.cpu.gradients import bandwidth_gradient
from espformer.ops.esp.cpu.normalising import balance_gradient, balance_steps
from espformer.ops.esp.cpu.rows import clear, number_ranks, set_ones
from espformer.ops.esp.cpu.short_plan import add_plan, in_rank_order, set_costs, set_plan, set_side
from espformer.ops.esp.cpu.short_workspace import (
    ACROSS,
    ANY,
    C_TILES,
    COSTS,
    COSTS_AT,
    COUPLED,
    D_COSTS,
    D_COUPLED,
    D_LEFT,
    D_PLAN,
    D_PLAN_T,
    D_RIGHT,
    D_SCALE,
    DIAGONAL,
    FORCES,
    FORCES_AT,
    IDENTITY,
    K_ROWS,
    K_TILES,
    LEFT,
    MEAN,
    MIXED,
    ONES,
    OUT_ROWS,
    P_TILES,
    P_TILES_T,
    PLAN,
    Q_NUMBERS,
    Q_ROWS,
    Q_TILES,
    RIGHT,
    SLOPES,
    TURNED,
    V_ROWS,
)
from espformer.ops.esp.cpu.soft_plan import RANKS


@part
def balanced_gradient(kappa, settings, scale, soft, d_soft, buffers):  # type: ignore[no-untyped-def]
    """From the gradient of ``diag(x) κ diag(x)`` to that of κ, through the steps that find x."""
    stand_alone()
    n, order, stride, columns = kappa.n, kappa.order, kappa.stride, buffers.columns
    by_token, d_scale, across = kappa.spare, columns[D_SCALE], columns[ACROSS]
    products(soft, d_soft, n, kappa.tiles, stride, d_scale, across)
    for i in range(n):
        d_scale[i] = (d_scale[i] + across[order[i]]) / scale[i]
    x, r, exponents, pairs = buffers.steps[0], buffers.steps[1], settings.exponents, buffers.pairs
    many, one = len(exponents) + 1, np.int64(1)
    balance_steps(kappa, columns[ONES], exponents, x, r, columns[MIXED])
    balance_gradient(kappa, exponents, x, r, d_scale, columns[SLOPES], columns[MIXED], pairs, many)
    spread_out(scale, order, n, scale.dtype.type(0), stride, by_token)
    scale_rows(d_soft, scale, n, kappa.tiles, stride, d_soft)
    scale_columns(d_soft, by_token, n, kappa.tiles, stride, d_soft)
    # The gradient of a product κx is a pair of columns, p and x: dκ = p xᵀ, with x by token.
    operands, found = buffers.operands, buffers.matrices[D_PLAN]
    clear(operands, many * stride)
    for step in range(many):
        for i in range(n):
            operands[step * stride + order[i]] = pairs[0, 2 * many * i + step]
    tiles, every = kappa.tiles, buffers.tiles[ANY]
    multiply_tiles(
        pairs[0, many:], 2 * many, one, operands, many, stride, every, every, tiles, found
    )
    mix_two(d_soft, scale.dtype.type(1), found, scale.dtype.type(1), tiles, stride, d_soft)


@part
def set_transpose(banded, weight, share, matrices, tiles, stride):  # type: ignore[no-untyped-def]
    """``dPᵀ``, which is ``weight Eᵀ + share Cᵀ``."""
    one = np.int64(1)
    if banded:
        transpose_ranges(tiles[P_TILES], tiles[P_TILES_T])
        multiply_tiles(
            matrices[D_PLAN], one, stride, matrices[IDENTITY], stride, stride, tiles[P_TILES_T],
            tiles[DIAGONAL], tiles[P_TILES_T], matrices[D_PLAN_T],
        )  # fmt: skip
    else:
        forces_t, costs_t = matrices[FORCES_AT], matrices[COSTS_AT]
        mix_two(forces_t, weight, costs_t, share, tiles[P_TILES], stride, matrices[D_PLAN_T])


@part
def set_sides_gradient(banded, pairs, head, m, matrices, tiles, stride):  # type: ignore[no-untyped-def]
    """``dA = T B dPᵀ`` and ``dB = Tᵀ A dP``, for the tiles of A and of B."""
    one, every, coupled = np.int64(1), tiles[ANY], pairs.rows.shape[1] > 0
    right, ranges = matrices[RIGHT], tiles[K_TILES]
    if coupled:
        right, ranges = matrices[COUPLED], tiles[C_TILES]
    multiply_tiles(
        right, stride, one, matrices[D_PLAN_T], stride, stride, ranges, every, tiles[Q_TILES],
        matrices[D_LEFT],
    )  # fmt: skip
    d_right = matrices[D_COUPLED] if coupled else matrices[D_RIGHT]
    if coupled and banded:
        clear(d_right, stride * stride)
    multiply_tiles(
        matrices[LEFT], stride, one, matrices[D_PLAN], stride, stride, tiles[Q_TILES], every,
        ranges, d_right,
    )  # fmt: skip
    if coupled:
        couple(
            d_right, pairs.columns[head], pairs.rows[head], pairs.weights[head], m, stride,
            matrices[D_RIGHT],
        )  # fmt: skip


@part
def side_gradient(settings, side, head, l, kappa, buffers, which, d_points):  # type: ignore[no-untyped-def]
    """From the gradient of a soft sort to that of its points; gives back that of inv_bandwidth.

    Of ``S = diag(1/κ1) κ`` it is ``dκ = diag(1/κ1) (dS - (S · dS) 1ᵀ)``, and what multiplies it is
    the derivative of κ: S takes the place of κ, and the scales of κ cancel.
    """
    n, order, points, scale = (
        kappa.n, side.order[head, l], side.points[head, l], side.scales[head, l],
    )  # fmt: skip
    soft, d_soft = buffers.matrices[LEFT + which], buffers.matrices[D_LEFT + which]
    inv_bandwidth, slopes = settings.inv_bandwidth[head], buffers.columns[SLOPES]
    matrix = soft
    if settings.balanced:
        balanced_gradient(kappa, settings, scale, soft, d_soft, buffers)
        matrix = kappa.matrix
    else:
        subtract_from_rows(soft, d_soft, n, kappa.tiles, kappa.stride)
    kernel_slope(
        kappa, matrix, d_soft, buffers.columns[Q_NUMBERS + which], points, inv_bandwidth,
        settings.squared, buffers.columns[ACROSS], slopes,
    )  # fmt: skip
    for i in range(n):
        d_points[order[i]] = inv_bandwidth * slopes[i]
    return bandwidth_gradient(points, n, slopes)


@part
def distances_gradient(d_costs, rows, others, row_step, step, order, n, buffers, d_rows):  # type: ignore[no-untyped-def]
    """``2 Σ_j dC[i, j] (x_i - y_j)`` of rows x and y, for the tokens that take part."""
    stand_alone()
    stride, width, out = buffers.stride, buffers.width, buffers.rows[OUT_ROWS]
    multiply(d_costs, row_step, step, others, stride, stride, width, out)
    for i in range(n):
        token = order[i]
        along = d_costs.dtype.type(0)
        for j in range(stride):
            along += d_costs[token * row_step + j * step]
        for j in range(d_rows.shape[1]):
            place = token * width + j
            d_rows[token, j] = 2 * (along * rows[place] - out[place])


@kernel
def short_gradient(
    h0, h1, l0, l1, settings, queries, keys, pairs, tau, upstream, out, weights, query, key, value,
    centre, origin, d_query, d_key, d_value, d_query_points, d_key_points, q_widths, k_widths,
    d_logits, buffers,
):  # type: ignore[no-untyped-def] # fmt: skip
    """All gradients, which hold zeros; those of queries and keys are empty without costs.

    `q_widths` and `k_widths` (batch, L) are gradients of inv_bandwidth.
    """
    stride, width, matrices, rows = buffers.stride, buffers.width, buffers.matrices, buffers.rows
    mean, plan, size = matrices[MEAN], matrices[PLAN], buffers.stride * buffers.stride
    forces, costs, tiles = matrices[FORCES], matrices[COSTS], buffers.tiles
    with_costs, number, banded = d_query.shape[1] > 0, mean.dtype.type, settings.banded
    set_ones(buffers.columns[ONES])
    number_ranks(buffers.integers[RANKS])
    first, second, one = np.int64(0), np.int64(1), np.int64(1)
    for head in range(h0, h1):
        n, m = queries.lengths[head], keys.lengths[head]
        if n == 0 or m == 0:
            continue
        q_order, k_order = queries.order[head, 0], keys.order[head, 0]
        clear(rows[V_ROWS], stride * width)
        pack(value[head], origin[head], k_order, m, width, rows[V_ROWS])
        transpose(rows[V_ROWS], stride, width, matrices[IDENTITY], rows[TURNED])
        clear(rows[V_ROWS], stride * width)
        pack(upstream[head], origin[head], q_order, n, width, rows[V_ROWS])
        multiply(rows[V_ROWS], width, one, rows[TURNED], value.shape[2], stride, stride, forces)
        if not settings.banded:
            transpose(forces, stride, stride, matrices[IDENTITY], matrices[FORCES_AT])
        expected = 0.0
        for i in range(n):
            for j in range(upstream.shape[2]):
                expected += upstream[head, q_order[i], j] * out[head, q_order[i], j]
        if with_costs:
            set_costs(query, key, centre, queries, keys, head, buffers)
            if not settings.banded:
                transpose(costs, stride, stride, matrices[IDENTITY], matrices[COSTS_AT])
        clear(mean, size)
        clear(matrices[D_COSTS], size)
        for l in range(weights.shape[1]):
            weight = weights[head, l]
            if weight == 0:
                continue
            if settings.banded and pairs.rows.shape[1]:
                clear(matrices[RIGHT], size)
            kappa_q = set_side(settings, queries, head, l, True, buffers, first)
            kappa_k = set_side(settings, keys, head, l, True, buffers, second)
            set_plan(settings, pairs, head, n, buffers)
            q_ranks, k_ranks = queries.order[head, l], keys.order[head, l]
            own = in_rank_order(
                banded, forces, q_ranks, n, k_ranks, m, tiles[P_TILES], stride, matrices[FORCES_AT]
            )
            d_logit = weight * (inner_product(plan, own, tiles[P_TILES], stride) - expected)
            d_logits[head, l] = d_logit
            add_plan(banded, plan, weight, q_ranks, n, k_ranks, m, tiles[P_TILES], stride, mean)
            share = number(-tau * d_logit / n)
            if with_costs:
                add_plan(
                    banded, plan, share, q_ranks, n, k_ranks, m, tiles[P_TILES], stride,
                    matrices[D_COSTS],
                )  # fmt: skip
            if not settings.slopes:
                continue
            other = costs
            if with_costs:
                other = in_rank_order(
                    banded, costs, q_ranks, n, k_ranks, m, tiles[P_TILES], stride,
                    matrices[COSTS_AT],
                )  # fmt: skip
            mix_two(own, weight, other, share, tiles[P_TILES], stride, matrices[D_PLAN])
            set_transpose(banded, weight, share, matrices, tiles, stride)
            set_sides_gradient(banded, pairs, head, m, matrices, tiles, stride)
            q_widths[head, l] = side_gradient(
                settings, queries, head, l, kappa_q, buffers, first, d_query_points[head, l]
            )
            k_widths[head, l] = side_gradient(
                settings, keys, head, l, kappa_k, buffers, second, d_key_points[head, l]
            )
        multiply(mean, one, stride, rows[V_ROWS], stride, stride, width, rows[OUT_ROWS])
        unpack(rows[OUT_ROWS], width, k_order, m, d_value[head])
        if with_costs:
            d_costs = matrices[D_COSTS]
            distances_gradient(
                d_costs, rows[Q_ROWS], rows[K_ROWS], stride, one, q_order, n, buffers, d_query[head]
            )
            distances_gradient(
                d_costs, rows[K_ROWS], rows[Q_ROWS], one, stride, k_order, m, buffers, d_key[head]
            )
