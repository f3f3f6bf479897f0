"""Plans of short sequences as matrices, of tokens by tokens, one for each slice.

For N tokens a plan ``P_l = A_lᵀ T B_l`` takes N³ multiplications, and everything else follows from
it with N² for each slice: costs are ``D_l = Σ C P_l / n`` with ``C[i, j] = ‖q_i - k_j‖²``, and
values are multiplied once for a head, by ``G = Σ_l σ_l P_l``. Recurrences take N d a few dozen
times. The gradient of a plan is ``dP_l = σ_l E + c_l C`` with ``E[i, j] = dout_i · v_j``, so

    dA = T B dPᵀ,    dB = Tᵀ A dP,    dV = Gᵀ dout,    dC = Σ_l c_l P_l,

where ``c_l = -τ σ_l (Σ P_l E - Σ G E) / n``, and ``Σ G E = Σ dout · out`` is known beforehand: one
loop over the slices is enough, forward and backward.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from espformer.ops.esp.cpu.compiling import kernel, part, stand_alone
from espformer.ops.esp.cpu.dense import (
    DenseKappa,
    add_scaled,
    couple,
    inner_product,
    mix_two,
    multiply,
    pack,
    products,
    pull,
    scale_columns,
    scale_rows,
    set_matrix,
    set_rows,
    spread_out,
    squared_distances,
    subtract_from_rows,
    transpose,
    unpack,
)
from espformer.ops.esp.cpu.gradients import bandwidth_gradient
from espformer.ops.esp.cpu.normalising import balance_gradient, balance_steps
from espformer.ops.esp.cpu.rows import clear, copy, number_ranks, set_ones
from espformer.ops.esp.cpu.soft_plan import COUNTS, SPARE, TOKENS
from espformer.ops.esp.cpu.sort import sort_tokens
from espformer.ops.esp.cpu.workspace import DIGITS

# Rows of the room for matrices: kernels of both sides, what they are scaled to, what the coupling
# makes of it, the plan, its gradient and those of both sides; matrices of a head, and transposes.
KAPPA_Q, KAPPA_K, LEFT, RIGHT, MET, PLAN, IDENTITY, COSTS, MEAN = range(9)
D_PLAN, D_PLAN_T, D_LEFT, D_RIGHT, D_MET, FORCES, FORCES_T, COSTS_T, D_COSTS = range(9, 18)
FORWARD, ALL = MEAN + 1, D_COSTS + 1

# Rows of the room for columns.
ONES, Q_NUMBERS, K_NUMBERS, BY_TOKEN, MIXED, SLOPES, D_SCALE, ACROSS = range(8)

Q_ROWS, K_ROWS, V_ROWS, OUT_ROWS, TURNED = range(5)  # of the room for rows of tokens


class ShortRoom(NamedTuple):
    """Scratch arrays, reused from head to head; all their entries are finite."""

    keys: np.ndarray  # uint64: what is sorted, twice
    integers: np.ndarray  # (3, …): tokens, their order, counts
    columns: np.ndarray  # (8, stride + 8): one number per rank, or per token
    steps: np.ndarray  # (2, steps, whole): x and r of the balancing
    pairs: np.ndarray  # (1, stride · 2 · steps): operands of the balancing, and upstream gradients
    operands: np.ndarray  # (steps · stride): the former, by token
    matrices: np.ndarray  # (…, stride · stride)
    rows: np.ndarray  # (5, stride · width): rows of tokens
    stride: int
    width: int


def new_short_room(
    tokens: int, columns: int, dtype: np.dtype, steps: int, matrices: int
) -> ShortRoom:
    """Room for up to so many tokens, whose rows have up to so many columns."""
    stride, width, whole = (-(-x // to) * to for x, to in ((tokens, 8), (columns, 8), (tokens, 16)))
    made = np.ones((2, steps, whole), dtype)
    squares = np.zeros((matrices, stride * stride), dtype)
    squares[IDENTITY, :: stride + 1] = 1
    return ShortRoom(
        np.empty(2 * tokens, np.uint64), np.empty((3, max(tokens, DIGITS)), np.int32),
        np.zeros((8, whole), dtype), made, np.zeros((1, (stride + 1) * 2 * steps), dtype),
        np.zeros(steps * stride, dtype),
        squares, np.zeros((5, stride * width), dtype),
        stride, width,
    )  # fmt: skip


@part
def set_side(settings, side, head, l, known, room, which):  # type: ignore[no-untyped-def]
    """Writes the soft sort of one side of a slice, whose numbers are sorted, to LEFT or RIGHT.

    It is ``diag(scale) κ``, or ``diag(scale) κ diag(scale)`` if balanced. The scales are computed
    unless they are given. Returns κ, which is computed only for balanced sorts.
    """
    n, order, points = side.lengths[head], side.order[head, l], side.points[head, l]
    stride, inv_bandwidth, scale = room.stride, settings.inv_bandwidth[head], side.scales[head, l]
    numbers, soft = room.columns[Q_NUMBERS + which], room.matrices[LEFT + which]
    spread_out(points, order, n, points.dtype.type(np.inf), stride, numbers)
    kappa = DenseKappa(n, room.matrices[KAPPA_Q + which], order, stride, room.columns[BY_TOKEN])
    squared = settings.squared
    if settings.balanced:
        set_matrix(numbers, points, n, inv_bandwidth, squared, stride, kappa.matrix)
        if not known:
            x, r = room.steps[0], room.steps[1]
            mixed, ones = room.columns[MIXED], room.columns[ONES]
            balance_steps(kappa, ones, settings.exponents, x, r, mixed)
            copy(x[len(settings.exponents)], n, scale)
        scale_rows(kappa.matrix, scale, n, stride, soft)
        spread_out(scale, order, n, scale.dtype.type(0), stride, kappa.spare)
        scale_columns(soft, kappa.spare, n, stride, soft)
    else:
        set_rows(numbers, points, n, inv_bandwidth, squared, stride, known, scale, soft)
    return kappa


@part
def sort_and_set(settings, numbers, mask, side, head, l, room, which):  # type: ignore[no-untyped-def]
    """Sorts the numbers of one side of a slice, and writes its soft sort to LEFT or RIGHT."""
    n, tokens = side.lengths[head], room.integers[TOKENS]
    if mask.shape[1] > 0:
        n = 0
        for i in range(numbers.shape[2]):
            if mask[head, i]:
                tokens[n] = i
                n += 1
    else:
        number_ranks(tokens[:n])
    sort_tokens(
        numbers[head, l], tokens, n, side.order[head, l], side.points[head, l], room.keys,
        room.integers[SPARE], room.integers[COUNTS],
    )  # fmt: skip
    set_side(settings, side, head, l, False, room, which)


@part
def set_plan(pairs, head, n, room):  # type: ignore[no-untyped-def]
    """``P = Aᵀ T B``; ``T B`` is in the row MET, unless T is the identity."""
    stride, matrices = room.stride, room.matrices
    met = matrices[RIGHT]
    if pairs.rows.shape[1]:
        met = matrices[MET]
        couple(
            matrices[RIGHT], pairs.rows[head], pairs.columns[head], pairs.weights[head], n, stride,
            met,
        )  # fmt: skip
    one = np.int64(1)
    multiply(matrices[LEFT], one, stride, met, n, stride, stride, matrices[PLAN])


@part
def set_costs(query, key, centre, queries, keys, head, room):  # type: ignore[no-untyped-def]
    """Packs queries and keys, and writes ``C[i, j] = ‖q_i - k_j‖²``."""
    q_order, k_order = queries.order[head, 0], keys.order[head, 0]
    n, m = queries.lengths[head], keys.lengths[head]
    rows, stride, width = room.rows, room.stride, room.width
    clear(rows[Q_ROWS], stride * width)
    clear(rows[K_ROWS], stride * width)
    pack(query[head], centre[head], q_order, n, width, rows[Q_ROWS])
    pack(key[head], centre[head], k_order, m, width, rows[K_ROWS])
    transpose(rows[K_ROWS], stride, width, room.matrices[IDENTITY], rows[TURNED])
    squared_distances(rows[Q_ROWS], rows[TURNED], stride, width, stride, room.matrices[COSTS])


@kernel
def attend_short(
    h0, h1, l0, l1, settings, queries, keys, pairs, tau, query, key, value, query_points,
    key_points, query_mask, key_mask, slice_logits, centre, origin, out, weights, room,
):  # type: ignore[no-untyped-def] # fmt: skip
    """The output (batch, N, d), which holds zeros, the weights of the slices and both sides.

    Slices are weighted as they come (online softmax): the previous sum is rescaled when a larger
    logit appears.
    """
    stride, width, matrices = room.stride, room.width, room.matrices
    mean, plan, size = matrices[MEAN], matrices[PLAN], room.stride * room.stride
    set_ones(room.columns[ONES])
    first, second, one = np.int64(0), np.int64(1), np.int64(1)
    for head in range(h0, h1):
        n, m = queries.lengths[head], keys.lengths[head]
        empty = n == 0 or m == 0
        clear(mean, size)
        best, total = -np.inf, 0.0
        for l in range(query_points.shape[1]):
            logit = np.float64(0)
            if slice_logits.shape[1] > 0:
                logit = np.float64(slice_logits[head, l])
            if not empty:
                sort_and_set(settings, query_points, query_mask, queries, head, l, room, first)
                sort_and_set(settings, key_points, key_mask, keys, head, l, room, second)
                if l == 0 and tau != 0:
                    set_costs(query, key, centre, queries, keys, head, room)
                if logit != -np.inf:
                    set_plan(pairs, head, n, room)
                    if tau != 0:
                        logit -= tau * (inner_product(matrices[COSTS], plan, size) / n)
            weights[head, l] = logit
            if logit == -np.inf:
                continue
            if logit > best:
                factor = np.exp(best - logit)
                total *= factor
                for i in range(size):
                    mean[i] *= mean.dtype.type(factor)
                best = logit
            share = np.exp(logit - best)
            total += share
            if not empty:
                add_scaled(plan, mean.dtype.type(share), size, mean)
        for l in range(query_points.shape[1]):
            weights[head, l] = np.exp(weights[head, l] - best) / total
        if empty:
            continue
        rows, inverse = room.rows, mean.dtype.type(1 / total)
        clear(rows[V_ROWS], stride * width)
        pack(value[head], origin[head], keys.order[head, 0], m, width, rows[V_ROWS])
        multiply(mean, stride, one, rows[V_ROWS], value.shape[1], stride, width, rows[OUT_ROWS])
        for i in range(stride * width):
            rows[OUT_ROWS, i] *= inverse
        unpack(rows[OUT_ROWS], width, queries.order[head, 0], n, out[head])


@part
def balanced_gradient(kappa, settings, scale, soft, d_soft, room):  # type: ignore[no-untyped-def]
    """From the gradient of ``diag(x) κ diag(x)`` to that of κ, through the steps that find x."""
    stand_alone()
    n, order, stride, columns = kappa.n, kappa.order, kappa.stride, room.columns
    by_token, d_scale, across = kappa.spare, columns[D_SCALE], columns[ACROSS]
    products(soft, d_soft, n, stride, d_scale, across)
    for i in range(n):
        d_scale[i] = (d_scale[i] + across[order[i]]) / scale[i]
    x, r, exponents, pairs = room.steps[0], room.steps[1], settings.exponents, room.pairs
    many, one = len(exponents) + 1, np.int64(1)
    balance_steps(kappa, columns[ONES], exponents, x, r, columns[MIXED])
    balance_gradient(kappa, exponents, x, r, d_scale, columns[SLOPES], columns[MIXED], pairs, many)
    spread_out(scale, order, n, scale.dtype.type(0), stride, by_token)
    scale_rows(d_soft, scale, n, stride, d_soft)
    scale_columns(d_soft, by_token, n, stride, d_soft)
    # The gradient of a product κx is a pair of columns, p and x: dκ = p xᵀ, with x by token.
    operands, found = room.operands, room.matrices[PLAN]
    clear(operands, many * stride)
    for step in range(many):
        for i in range(n):
            operands[step * stride + order[i]] = pairs[0, 2 * many * i + step]
    multiply(pairs[0, many:], 2 * many, one, operands, many, stride, stride, found)
    add_scaled(found, scale.dtype.type(1), n * stride, d_soft)


@part
def side_gradient(settings, side, head, l, kappa, room, which, d_points):  # type: ignore[no-untyped-def]
    """From the gradient of a soft sort to that of its points; gives back that of inv_bandwidth.

    Of ``S = diag(1/κ1) κ`` it is ``dκ = diag(1/κ1) (dS - (S · dS) 1ᵀ)``, and what multiplies it is
    the derivative of κ: S takes the place of κ, and the scales of κ cancel.
    """
    n, order, points, scale = (
        kappa.n, side.order[head, l], side.points[head, l], side.scales[head, l],
    )  # fmt: skip
    soft, d_soft = room.matrices[LEFT + which], room.matrices[D_LEFT + which]
    inv_bandwidth, slopes = settings.inv_bandwidth[head], room.columns[SLOPES]
    matrix = soft
    if settings.balanced:
        balanced_gradient(kappa, settings, scale, soft, d_soft, room)
        matrix = kappa.matrix
    else:
        subtract_from_rows(soft, d_soft, n, kappa.stride)
    pull(
        matrix, d_soft, room.columns[Q_NUMBERS + which], points, order, n, inv_bandwidth,
        settings.squared, kappa.stride, room.columns[ACROSS], slopes,
    )  # fmt: skip
    for i in range(n):
        d_points[order[i]] = inv_bandwidth * slopes[i]
    return bandwidth_gradient(points, n, slopes)


@part
def distances_gradient(d_costs, rows, others, row_step, step, order, n, room, d_rows):  # type: ignore[no-untyped-def]
    """``2 Σ_j dC[i, j] (x_i - y_j)`` of rows x and y, for the tokens that take part."""
    stand_alone()
    stride, width, out = room.stride, room.width, room.rows[OUT_ROWS]
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
    d_logits, room,
):  # type: ignore[no-untyped-def] # fmt: skip
    """All gradients, which hold zeros; those of queries and keys are empty without costs.

    `q_widths` and `k_widths` (batch, L) are gradients of inv_bandwidth.
    """
    stride, width, matrices, rows = room.stride, room.width, room.matrices, room.rows
    mean, plan, size = matrices[MEAN], matrices[PLAN], room.stride * room.stride
    forces, costs = matrices[FORCES], matrices[COSTS]
    with_costs, number = d_query.shape[1] > 0, mean.dtype.type
    set_ones(room.columns[ONES])
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
        transpose(forces, stride, stride, matrices[IDENTITY], matrices[FORCES_T])
        expected = 0.0
        for i in range(n):
            for j in range(upstream.shape[2]):
                expected += upstream[head, q_order[i], j] * out[head, q_order[i], j]
        if with_costs:
            set_costs(query, key, centre, queries, keys, head, room)
            transpose(costs, stride, stride, matrices[IDENTITY], matrices[COSTS_T])
        clear(mean, size)
        clear(matrices[D_COSTS], size)
        for l in range(weights.shape[1]):
            weight = weights[head, l]
            if weight == 0:
                continue
            kappa_q = set_side(settings, queries, head, l, True, room, first)
            kappa_k = set_side(settings, keys, head, l, True, room, second)
            set_plan(pairs, head, n, room)
            d_logit = weight * (inner_product(plan, forces, size) - expected)
            d_logits[head, l] = d_logit
            add_scaled(plan, weight, size, mean)
            share = number(-tau * d_logit / n)
            if with_costs:
                add_scaled(plan, share, size, matrices[D_COSTS])
            if not settings.slopes:
                continue
            mix_two(forces, weight, costs, share, size, matrices[D_PLAN])
            mix_two(matrices[FORCES_T], weight, matrices[COSTS_T], share, size, matrices[D_PLAN_T])
            met = matrices[MET] if pairs.rows.shape[1] else matrices[RIGHT]
            multiply(met, stride, one, matrices[D_PLAN_T], stride, stride, stride, matrices[D_LEFT])
            d_met = matrices[D_MET] if pairs.rows.shape[1] else matrices[D_RIGHT]
            multiply(matrices[LEFT], stride, one, matrices[D_PLAN], stride, stride, stride, d_met)
            if pairs.rows.shape[1]:
                couple(
                    d_met, pairs.columns[head], pairs.rows[head], pairs.weights[head], m, stride,
                    matrices[D_RIGHT],
                )  # fmt: skip
            q_widths[head, l] = side_gradient(
                settings, queries, head, l, kappa_q, room, first, d_query_points[head, l]
            )
            k_widths[head, l] = side_gradient(
                settings, keys, head, l, kappa_k, room, second, d_key_points[head, l]
            )
        multiply(mean, one, stride, rows[V_ROWS], stride, stride, width, rows[OUT_ROWS])
        unpack(rows[OUT_ROWS], width, k_order, m, d_value[head])
        if with_costs:
            d_costs = matrices[D_COSTS]
            distances_gradient(
                d_costs, rows[Q_ROWS], rows[K_ROWS], stride, one, q_order, n, room, d_query[head]
            )
            distances_gradient(
                d_costs, rows[K_ROWS], rows[Q_ROWS], one, stride, k_order, m, room, d_key[head]
            )
