"""Plans of short sequences as matrices, of tokens by tokens, one for each slice.

For N tokens a plan ``P_l = A_lᵀ T B_l`` takes N³ multiplications, and everything else follows from
it with N² for each slice: costs are ``D_l = Σ C P_l / n`` with ``C[i, j] = ‖q_i - k_j‖²``, and
values are multiplied once for a head, by ``G = Σ_l σ_l P_l``. Recurrences take N d a few dozen
times. The gradient of a plan is ``dP_l = σ_l E + c_l C`` with ``E[i, j] = dout_i · v_j``, so

    dA = T B dPᵀ,    dB = Tᵀ A dP,    dV = Gᵀ dout,    dC = Σ_l c_l P_l,

where ``c_l = -τ σ_l (Σ P_l E - Σ G E) / n``, and ``Σ G E = Σ dout · out`` is known beforehand: one
loop over the slices is enough, forward and backward.

If `settings.banded`, both sides of P_l are in rank order. Then A, B and P_l are bands (see
`bands`), and products take a fraction of N³. In exchange C and E are brought into rank order for
every slice, and P_l into token order when it is added to G and dC. To move whole rows, not single
numbers, these four are kept transposed, key tokens by query tokens.
"""

from __future__ import annotations

import numpy as np

from espformer.ops.esp.cpu.bands import (
    add_columns,
    clear_outside,
    couple_ranges,
    inner_product,
    multiply_tiles,
    set_near_tiles,
    set_product_ranges,
    sort_columns,
    transpose_ranges,
)
from espformer.ops.esp.cpu.compiling import kernel, part, stand_alone
from espformer.ops.esp.cpu.dense import (
    DenseKappa,
    add_scaled,
    couple,
    pack,
    scale_both,
    set_rows,
    spread_out,
    squared_distances,
    unpack,
)
from espformer.ops.esp.cpu.normalising import balance_steps
from espformer.ops.esp.cpu.rows import clear, copy, number_ranks, set_ones
from espformer.ops.esp.cpu.short_workspace import (
    BY_TOKEN,
    C_TILES,
    C_TILES_T,
    COSTS,
    COSTS_AT,
    COUPLED,
    K_PLACES,
    K_ROWS,
    K_TILES,
    KAPPA_Q,
    LEFT,
    MEAN,
    MIXED,
    ONES,
    OUT_ROWS,
    P_TILES,
    PLAN,
    Q_NUMBERS,
    Q_PLACES,
    Q_RANKS,
    Q_ROWS,
    Q_TILES,
    REACH,
    REACH_OF_FLOAT32,
    RIGHT,
    ROWS,
    TURNED,
    V_ROWS,
)
from espformer.ops.esp.cpu.soft_plan import COUNTS, RANKS, SPARE, TOKENS
from espformer.ops.esp.cpu.sort import sort_tokens
from espformer.ops.esp.cpu.tiles import multiply, transpose


@part
def set_side(settings, side, head, l, known, buffers, which):  # type: ignore[no-untyped-def]
    """Writes the soft sort of one side of a slice, whose numbers are sorted, to LEFT or RIGHT.

    It is ``diag(scale) κ``, or ``diag(scale) κ diag(scale)`` if balanced. The scales are computed
    unless they are given. Returns κ, which is computed only for balanced sorts.
    """
    n, order, points = side.lengths[head], side.order[head, l], side.points[head, l]
    stride, inv_bandwidth, scale = (
        buffers.stride,
        settings.inv_bandwidth[head],
        side.scales[head, l],
    )
    numbers, soft = buffers.columns[Q_NUMBERS + which], buffers.matrices[LEFT + which]
    tiles, squared = buffers.tiles[Q_TILES + which], settings.squared
    if settings.banded:
        order = buffers.integers[RANKS]
        reach = points.dtype.type(REACH if points.itemsize == 8 else REACH_OF_FLOAT32)
        reach = np.sqrt(reach) if squared else reach
        set_near_tiles(points, n, reach / inv_bandwidth, tiles)
    spread_out(points, order, n, points.dtype.type(np.inf), stride, numbers)
    kappa = DenseKappa(
        n, buffers.matrices[KAPPA_Q + which], order, tiles, stride, buffers.columns[BY_TOKEN]
    )
    if settings.balanced:
        ones = buffers.columns[ONES]
        set_rows(
            numbers, points, n, inv_bandwidth, squared, tiles, stride, True, ones, kappa.matrix
        )
        if not known:
            x, r, mixed = buffers.steps[0], buffers.steps[1], buffers.columns[MIXED]
            balance_steps(kappa, ones, settings.exponents, x, r, mixed)
            copy(x[len(settings.exponents)], n, scale)
        spread_out(scale, order, n, scale.dtype.type(0), stride, kappa.spare)
        scale_both(kappa.matrix, scale, kappa.spare, n, tiles, stride, soft)
    else:
        set_rows(numbers, points, n, inv_bandwidth, squared, tiles, stride, known, scale, soft)
    return kappa


@part
def sort_and_set(settings, numbers, mask, side, head, l, buffers, which):  # type: ignore[no-untyped-def]
    """Sorts the numbers of one side of a slice, and writes its soft sort to LEFT or RIGHT."""
    n, tokens = side.lengths[head], buffers.integers[TOKENS]
    if mask.shape[1] > 0:
        n = 0
        for i in range(numbers.shape[2]):
            if mask[head, i]:
                tokens[n] = i
                n += 1
    else:
        number_ranks(tokens[:n])
    sort_tokens(
        numbers[head, l], tokens, n, side.order[head, l], side.points[head, l], buffers.keys,
        buffers.integers[SPARE], buffers.integers[COUNTS],
    )  # fmt: skip
    set_side(settings, side, head, l, False, buffers, which)


@part
def set_plan(settings, pairs, head, n, buffers):  # type: ignore[no-untyped-def]
    """``P = Aᵀ T B``; ``T B`` is in the row COUPLED, unless T is the identity."""
    stride, matrices, tiles = buffers.stride, buffers.matrices, buffers.tiles
    right, ranges, across = matrices[RIGHT], tiles[K_TILES], tiles[K_TILES]
    if pairs.rows.shape[1]:
        right, ranges, across = matrices[COUPLED], tiles[C_TILES], tiles[C_TILES_T]
        couple(
            matrices[RIGHT], pairs.rows[head], pairs.columns[head], pairs.weights[head], n, stride,
            right,
        )  # fmt: skip
        if settings.banded:
            couple_ranges(
                pairs.rows[head], pairs.columns[head], pairs.weights[head], tiles[K_TILES], ranges
            )
            transpose_ranges(ranges, across)
    if settings.banded:
        set_product_ranges(tiles[Q_TILES], across, tiles[P_TILES])
    one = np.int64(1)
    multiply_tiles(
        matrices[LEFT], one, stride, right, n, stride, tiles[Q_TILES], across, tiles[P_TILES],
        matrices[PLAN],
    )  # fmt: skip


@part
def set_multiples(step, x):  # type: ignore[no-untyped-def]
    """0, step, 2 step, …"""
    for i in range(len(x)):
        x[i] = i * step


@part
def set_rest(order, n, stride, marks, places):  # type: ignore[no-untyped-def]
    """Writes the rows without a token that takes part behind the first n places."""
    stand_alone()
    clear(marks, stride)
    for i in range(n):
        marks[order[i]] = 1
    for i in range(stride):
        if marks[i] == 0:
            places[n] = i * stride
            n += 1


@part
def start_head(queries, keys, head, integers, stride):  # type: ignore[no-untyped-def]
    """Writes what the places of all slices of a head have in common."""
    n, marks, q_places = queries.lengths[head], integers[SPARE], integers[Q_PLACES]
    set_rest(queries.order[head, 0], n, stride, marks, q_places)
    set_rest(keys.order[head, 0], keys.lengths[head], stride, marks, integers[K_PLACES])
    for i in range(n, stride):
        integers[Q_RANKS, q_places[i] // stride] = i * stride


@part
def set_places(q_order, n, k_order, m, integers, stride):  # type: ignore[no-untyped-def]
    """Writes the places of the tokens of one slice."""
    stand_alone()
    q_places, k_places, ranks = integers[Q_PLACES], integers[K_PLACES], integers[Q_RANKS]
    for i in range(n):
        q_places[i] = q_order[i] * stride
        ranks[q_order[i]] = i * stride
    for i in range(m):
        k_places[i] = k_order[i] * stride


@part
def in_rank_order(banded, matrix, k_places, stride, out):  # type: ignore[no-untyped-def]
    """A matrix of a head with the columns of the plan of a slice; its rows stay in token order."""
    if not banded:
        return matrix
    sort_columns(matrix, k_places, stride, out)
    return out


@part
def add_plan(banded, plan, tiles, integers, stride, weight, out, other_weight, other):  # type: ignore[no-untyped-def]
    """Adds ``weight P`` to a matrix of a head, and to `other` likewise unless it is empty."""
    if banded:
        clear_outside(plan, tiles, stride)
        q_ranks, k_places = integers[Q_RANKS], integers[K_PLACES]
        add_columns(plan, q_ranks, k_places, stride, weight, out, other_weight, other)
    else:
        add_scaled(plan, weight, stride * stride, out)
        if len(other) > 0:
            add_scaled(plan, other_weight, stride * stride, other)


@part
def set_costs(banded, query, key, centre, queries, keys, head, buffers):  # type: ignore[no-untyped-def]
    """Packs queries and keys, and writes ``C[i, j] = ‖q_i - k_j‖²``, transposed if banded."""
    q_order, k_order = queries.order[head, 0], keys.order[head, 0]
    n, m = queries.lengths[head], keys.lengths[head]
    rows, stride, width = buffers.rows, buffers.stride, buffers.width
    clear(rows[Q_ROWS], stride * width)
    clear(rows[K_ROWS], stride * width)
    pack(query[head], centre[head], q_order, n, width, rows[Q_ROWS])
    pack(key[head], centre[head], k_order, m, width, rows[K_ROWS])
    left, right = (K_ROWS, Q_ROWS) if banded else (Q_ROWS, K_ROWS)
    transpose(rows[right], stride, width, rows[TURNED])
    squared_distances(rows[left], rows[TURNED], stride, width, stride, buffers.matrices[COSTS])


@kernel
def attend_short(
    h0, h1, l0, l1, settings, queries, keys, pairs, tau, query, key, value, query_points,
    key_points, query_mask, key_mask, slice_logits, centre, origin, out, weights, buffers,
):  # type: ignore[no-untyped-def] # fmt: skip
    """The output (batch, N, d), which holds zeros, the weights of the slices and both sides.

    Slices are weighted as they come (online softmax): the previous sum is rescaled when a larger
    logit appears.
    """
    stride, width, matrices = buffers.stride, buffers.width, buffers.matrices
    banded, integers, p_tiles = settings.banded, buffers.integers, buffers.tiles[P_TILES]
    mean, plan, size = matrices[MEAN], matrices[PLAN], buffers.stride * buffers.stride
    set_ones(buffers.columns[ONES])
    number_ranks(integers[RANKS])
    set_multiples(stride, integers[ROWS])
    set_multiples(stride, integers[Q_PLACES])
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
                if banded and pairs.rows.shape[1]:
                    clear(matrices[RIGHT], size)
                sort_and_set(settings, query_points, query_mask, queries, head, l, buffers, first)
                sort_and_set(settings, key_points, key_mask, keys, head, l, buffers, second)
                if l == 0 and banded:
                    start_head(queries, keys, head, integers, stride)
                if l == 0 and tau != 0:
                    set_costs(banded, query, key, centre, queries, keys, head, buffers)
                if logit != -np.inf:
                    if banded:
                        q_order, k_order = queries.order[head, l], keys.order[head, l]
                        set_places(q_order, n, k_order, m, integers, stride)
                    set_plan(settings, pairs, head, n, buffers)
                    if tau != 0:
                        costs = in_rank_order(
                            banded, matrices[COSTS], integers[K_PLACES], stride, matrices[COSTS_AT]
                        )
                        cost = inner_product(costs, integers[Q_PLACES], plan, p_tiles, stride)
                        logit -= tau * (cost / n)
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
                share_of_plan = mean.dtype.type(share)
                add_plan(
                    banded, plan, p_tiles, integers, stride, share_of_plan, mean, share_of_plan,
                    mean[:0],
                )  # fmt: skip
        for l in range(query_points.shape[1]):
            weights[head, l] = np.exp(weights[head, l] - best) / total
        if empty:
            continue
        rows, inverse = buffers.rows, mean.dtype.type(1 / total)
        clear(rows[V_ROWS], stride * width)
        pack(value[head], origin[head], keys.order[head, 0], m, width, rows[V_ROWS])
        row_step, step = (one, stride) if banded else (stride, one)
        multiply(mean, row_step, step, rows[V_ROWS], value.shape[1], stride, width, rows[OUT_ROWS])
        for i in range(stride * width):
            rows[OUT_ROWS, i] *= inverse
        unpack(rows[OUT_ROWS], width, queries.order[head, 0], n, out[head])
