"""Gradients of plans of short sequences, as matrices; the formulas are in `short_plan`."""

from __future__ import annotations

import numpy as np

from espformer.ops.esp.cpu.bands import (
    inner_product,
    mix_two,
    multiply_tiles,
    transpose_tiles,
)
from espformer.ops.esp.cpu.compiling import kernel, part, stand_alone
from espformer.ops.esp.cpu.dense import (
    couple,
    kernel_slope,
    pack,
    products,
    scale_both,
    spread_out,
    subtract_from_rows,
    unpack,
)
from espformer.ops.esp.cpu.gradients import bandwidth_gradient
from espformer.ops.esp.cpu.normalising import balance_gradient, balance_steps
from espformer.ops.esp.cpu.rows import clear, number_ranks, set_ones
from espformer.ops.esp.cpu.short_plan import (
    add_plan,
    in_rank_order,
    set_costs,
    set_multiples,
    set_places,
    set_plan,
    set_side,
    start_head,
)
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
    FORCES,
    FORCES_AT,
    K_PLACES,
    K_ROWS,
    K_TILES,
    LEFT,
    MEAN,
    MIXED,
    ONES,
    OUT_ROWS,
    P_TILES,
    PLAN,
    Q_NUMBERS,
    Q_PLACES,
    Q_ROWS,
    Q_TILES,
    RIGHT,
    ROWS,
    SLOPES,
    TURNED,
    V_ROWS,
)
from espformer.ops.esp.cpu.soft_plan import RANKS
from espformer.ops.esp.cpu.tiles import multiply, transpose


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
    scale_both(d_soft, scale, by_token, n, kappa.tiles, stride, d_soft)
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
    unit, places = scale.dtype.type(1), buffers.integers[ROWS]
    mix_two(d_soft, unit, found, unit, places, tiles, stride, d_soft)


@part
def set_transpose(banded, weight, cost_weight, matrices, places, tiles, stride):  # type: ignore[no-untyped-def]
    """``dPᵀ``, which is ``weight Eᵀ + cost_weight Cᵀ``."""
    if banded:
        transpose_tiles(matrices[D_PLAN], tiles[P_TILES], stride, matrices[D_PLAN_T])
    else:
        forces_t, costs_t = matrices[FORCES_AT], matrices[COSTS_AT]
        every, out = tiles[P_TILES], matrices[D_PLAN_T]
        mix_two(forces_t, weight, costs_t, cost_weight, places, every, stride, out)


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


@part
def largest(weights):  # type: ignore[no-untyped-def]
    """The slice of the largest weight."""
    stand_alone()
    best = 0
    for l in range(1, len(weights)):
        if weights[l] > weights[best]:
            best = l
    return best


@kernel
def short_gradient(
    h0, h1, l0, l1, settings, queries, keys, pairs, tau, upstream, out, weights, query, key, value,
    centre, origin, d_query, d_key, d_value, d_query_points, d_key_points, d_q_inv_bandwidth,
    d_k_inv_bandwidth, d_logits, buffers,
):  # type: ignore[no-untyped-def] # fmt: skip
    """All gradients, which hold zeros; those of queries and keys are empty without costs.

    `d_q_inv_bandwidth` and `d_k_inv_bandwidth`, (batch, L), are those of inv_bandwidth by side.
    """
    stride, width, matrices, rows = buffers.stride, buffers.width, buffers.matrices, buffers.rows
    mean, plan, size = matrices[MEAN], matrices[PLAN], buffers.stride * buffers.stride
    forces, costs, tiles = matrices[FORCES], matrices[COSTS], buffers.tiles
    with_costs, number, banded = d_query.shape[1] > 0, mean.dtype.type, settings.banded
    d_costs = matrices[D_COSTS] if with_costs else matrices[D_COSTS, :0]
    set_ones(buffers.columns[ONES])
    integers, places = buffers.integers, buffers.integers[Q_PLACES]
    number_ranks(integers[RANKS])
    set_multiples(stride, integers[ROWS])
    set_multiples(stride, places)
    row_step, step = (np.int64(1), stride) if banded else (stride, np.int64(1))  # of a head's
    first, second, one = np.int64(0), np.int64(1), np.int64(1)
    for head in range(h0, h1):
        n, m = queries.lengths[head], keys.lengths[head]
        if n == 0 or m == 0:
            continue
        q_order, k_order = queries.order[head, 0], keys.order[head, 0]
        clear(rows[V_ROWS], stride * width)
        pack(value[head], origin[head], k_order, m, width, rows[V_ROWS])
        if banded:
            start_head(queries, keys, head, integers, stride)
        transpose(rows[V_ROWS], stride, width, rows[TURNED])
        clear(rows[V_ROWS], stride * width)
        pack(upstream[head], origin[head], q_order, n, width, rows[V_ROWS])
        own, transposed = (matrices[FORCES_AT], forces) if banded else (forces, matrices[FORCES_AT])
        multiply(rows[V_ROWS], width, one, rows[TURNED], value.shape[2], stride, stride, own)
        transpose(own, stride, stride, transposed)
        expected = 0.0
        for i in range(n):
            for j in range(upstream.shape[2]):
                expected += upstream[head, q_order[i], j] * out[head, q_order[i], j]
        if with_costs:
            set_costs(banded, query, key, centre, queries, keys, head, buffers)
            if not banded:
                transpose(costs, stride, stride, matrices[COSTS_AT])
        clear(mean, size)
        clear(d_costs, len(d_costs))
        best, others = largest(weights[head]), 0.0
        for i in range(weights.shape[1]):
            # The slice of the largest weight comes last, in the place of the last one.
            l = best if i == weights.shape[1] - 1 else i + (i >= best)
            weight = weights[head, l]
            if weight == 0:
                continue
            if banded and pairs.rows.shape[1]:
                clear(matrices[RIGHT], size)
            kappa_q = set_side(settings, queries, head, l, True, buffers, first)
            kappa_k = set_side(settings, keys, head, l, True, buffers, second)
            if banded:
                q_ranked, k_ranked = queries.order[head, l], keys.order[head, l]
                set_places(q_ranked, n, k_ranked, m, integers, stride)
            set_plan(settings, pairs, head, n, buffers)
            k_places = integers[K_PLACES]
            own = in_rank_order(banded, forces, k_places, stride, matrices[FORCES_AT])
            gained = inner_product(own, places, plan, tiles[P_TILES], stride)
            # Gradients of logits sum to zero. For a weight of almost one the difference would be
            # rounding, which τ and the costs multiply.
            d_logit = -others if l == best else weight * (gained - expected)
            others += d_logit
            d_logits[head, l] = d_logit
            cost_weight = number(-tau * d_logit / n)
            add_plan(
                banded, plan, tiles[P_TILES], integers, stride, weight, mean, cost_weight, d_costs
            )
            if not settings.slopes:
                continue
            other = costs
            if with_costs:
                other = in_rank_order(banded, costs, k_places, stride, matrices[COSTS_AT])
            mix_two(
                own, weight, other, cost_weight, places, tiles[P_TILES], stride, matrices[D_PLAN]
            )
            set_transpose(banded, weight, cost_weight, matrices, places, tiles, stride)
            set_sides_gradient(banded, pairs, head, m, matrices, tiles, stride)
            d_q_inv_bandwidth[head, l] = side_gradient(
                settings, queries, head, l, kappa_q, buffers, first, d_query_points[head, l]
            )
            d_k_inv_bandwidth[head, l] = side_gradient(
                settings, keys, head, l, kappa_k, buffers, second, d_key_points[head, l]
            )
        multiply(mean, step, row_step, rows[V_ROWS], stride, stride, width, rows[OUT_ROWS])
        unpack(rows[OUT_ROWS], width, k_order, m, d_value[head])
        if with_costs:
            q_rows, k_rows = rows[Q_ROWS], rows[K_ROWS]
            distances_gradient(
                d_costs, q_rows, k_rows, row_step, step, q_order, n, buffers, d_query[head]
            )
            distances_gradient(
                d_costs, k_rows, q_rows, step, row_step, k_order, m, buffers, d_key[head]
            )
