"""Plans of slices applied to rows: what is sorted, what slices cost, and the output.

In rank order ``N · U_l = A_lᵀ T B_l`` with ``A = diag(q_out) κ_q diag(q_in)``, and B likewise.
Every kernel processes the heads ``[h0, h1)`` and the slices ``[l0, l1)``, which are divided among
threads. The torch twins are `slice_costs` and `apply_plans` of :mod:`espformer.ops.esp.linear`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from espformer.ops.esp.cpu.compiling import kernel, part, stand_alone
from espformer.ops.esp.cpu.kappa import Kappa, multiply, multiply_column, set_kappa
from espformer.ops.esp.cpu.normalising import balance_steps, row_scales
from espformer.ops.esp.cpu.rows import (
    clear,
    clear_blocks,
    copy,
    couple,
    number_ranks,
    pack,
    scatter,
    set_ones,
    squared_norms,
    unpack,
    weighted_product,
)
from espformer.ops.esp.cpu.sort import sort_tokens


class Side(NamedTuple):
    """Queries or keys in the order of every slice; ranks past a sequence's length mean nothing."""

    lengths: np.ndarray  # (batch,): tokens that take part
    order: np.ndarray  # (batch, L, N), int32: the token at each rank
    points: np.ndarray  # (batch, L, N): the sorted numbers
    scales: np.ndarray  # (batch, L, N): what rows of κ are multiplied by


class Pairs(NamedTuple):
    """The coupling T by its non-zeros; without any it is the identity."""

    rows: np.ndarray  # (batch, pairs), or (pairs,) of one sequence
    columns: np.ndarray
    weights: np.ndarray


class Settings(NamedTuple):
    """How numbers are compared."""

    inv_bandwidth: np.ndarray  # (batch,)
    hard: bool
    average: bool  # tied tokens share, if hard
    balanced: bool  # columns sum to one as well; not if hard
    slopes: bool  # a gradient of the points is wanted
    exponents: np.ndarray  # of the balancing steps
    table: np.ndarray  # of poles
    poles: tuple[int, ...]  # lanes for them; none for the absolute metric, and hard sorts
    squared: bool  # whether distances are, for kernels that are compiled for both metrics
    banded: bool  # whether matrices of short sequences are bands


class Plan(NamedTuple):
    """``q_in κ_q q_out T k_out κ_k k_in``: the plan of one slice, for rows of tokens."""

    kappa_q: Kappa
    kappa_k: Kappa
    q_order: np.ndarray
    k_order: np.ndarray
    q_in: np.ndarray
    q_out: np.ndarray
    k_in: np.ndarray
    k_out: np.ndarray
    pairs: Pairs


# Rows of the buffer for columns; `gradients` has rows of its own, for either side.
MID, UNIT, Q_SPARE, K_SPARE, Q_SUMS, K_SUMS, Q_SQUARES, K_SQUARES, AT_RANK, MIXED = range(10)

TOKENS, SPARE, COUNTS, RANKS = range(4)  # rows of the buffer for integers
Q_ROWS, K_ROWS, D_Q_ROWS, D_K_ROWS = range(4)  # of the buffer for blocks


@part
def kappa_of(settings, side, head, l, buffers, which):  # type: ignore[no-untyped-def]
    """The kernel of one side of a slice."""
    return set_kappa(
        settings, side.points[head, l], side.lengths[head], settings.inv_bandwidth[head],
        buffers.decays[which], buffers.coefficients[which], buffers.scratch,
    )  # fmt: skip


@part
def plan_of(settings, queries, keys, pairs, head, l, buffers):  # type: ignore[no-untyped-def]
    """The plan of a slice; its kernels live in the buffers."""
    q_out, k_out = queries.scales[head, l], keys.scales[head, l]
    unit = buffers.columns[0, UNIT]
    q_in, k_in = (q_out, k_out) if settings.balanced else (unit, unit)
    first, second = np.int64(0), np.int64(1)
    return Plan(
        kappa_of(settings, queries, head, l, buffers, first),
        kappa_of(settings, keys, head, l, buffers, second),
        queries.order[head, l], keys.order[head, l], q_in, q_out, k_in, k_out,
        Pairs(pairs.rows[head], pairs.columns[head], pairs.weights[head]),
    )  # fmt: skip


@kernel
def sort_side(h0, h1, l0, l1, settings, numbers, mask, side, buffers):  # type: ignore[no-untyped-def]
    """Sorts (batch, L, N) numbers of the tokens that take part, and finds the scales of κ."""
    count, steps = numbers.shape[2], len(settings.exponents)
    tokens, unit = number_ranks(buffers.integers[TOKENS]), set_ones(buffers.columns[0, UNIT])
    first = np.int64(0)
    for head in range(h0, h1):
        n = count
        if mask.shape[1] > 0:
            n = 0
            for i in range(count):
                if mask[head, i]:
                    tokens[n] = i
                    n += 1
        side.lengths[head] = n
        if n == 0:
            continue
        for l in range(l0, l1):
            sort_tokens(
                numbers[head, l], tokens, n, side.order[head, l], side.points[head, l],
                buffers.keys, buffers.integers[SPARE], buffers.integers[COUNTS],
            )  # fmt: skip
            kappa = kappa_of(settings, side, head, l, buffers, first)
            if settings.balanced:
                x, r = buffers.steps[0], buffers.steps[1]
                balance_steps(kappa, unit, settings.exponents, x, r, buffers.columns[0, MIXED])
                copy(x[steps], n, side.scales[head, l])
            else:
                row_scales(kappa, unit, side.scales[head, l])


@part
def couple_column(targets, sources, weights, x, y):  # type: ignore[no-untyped-def]
    """``y = T x`` of pairs (row, column), or ``Tᵀ x`` of (column, row); x itself without pairs."""
    stand_alone()
    if len(weights) == 0:
        return x
    clear(y, len(y))
    for i in range(len(weights)):
        if weights[i] != 0:
            y[targets[i]] += weights[i] * x[sources[i]]
    return y


@part
def row_sums(kappa, scale_in, scale_out, balanced, sums):  # type: ignore[no-untyped-def]
    """The row sums ``A1``: all ones if rows are normalised, nearly so if balanced."""
    if balanced:
        multiply_column(kappa, scale_in, sums)
    for i in range(kappa.n):
        sums[i] = sums[i] * scale_out[i] if balanced else 1


@part
def mix_squares(kappa, order, scale_in, squares, at_rank, mixed):  # type: ignore[no-untyped-def]
    """``κ diag(in) ‖x‖²``, in rank order."""
    for i in range(kappa.n):
        at_rank[i] = scale_in[i] * squares[order[i]]
    multiply_column(kappa, at_rank, mixed)


@part
def column_costs(plan, balanced, columns):  # type: ignore[no-untyped-def]
    """``Σ_n (A‖q‖²) (TB1) + (TᵀA1) (B‖k‖²)``."""
    q_sums, k_sums, own = columns[Q_SUMS], columns[K_SUMS], plan.pairs
    row_sums(plan.kappa_q, plan.q_in, plan.q_out, balanced, q_sums)
    row_sums(plan.kappa_k, plan.k_in, plan.k_out, balanced, k_sums)
    coupled_k = couple_column(own.rows, own.columns, own.weights, k_sums, columns[Q_SPARE])
    coupled_q = couple_column(own.columns, own.rows, own.weights, q_sums, columns[K_SPARE])
    at_rank, mixed = columns[AT_RANK], columns[MIXED]
    cost = mixed.dtype.type(0)
    mix_squares(plan.kappa_q, plan.q_order, plan.q_in, columns[Q_SQUARES], at_rank, mixed)
    for i in range(plan.kappa_q.n):
        cost += plan.q_out[i] * mixed[i] * coupled_k[i]
    mix_squares(plan.kappa_k, plan.k_order, plan.k_in, columns[K_SQUARES], at_rank, mixed)
    for i in range(plan.kappa_k.n):
        cost += plan.k_out[i] * mixed[i] * coupled_q[i]
    return cost


@part
def set_mid_scale(plan, mid):  # type: ignore[no-untyped-def]
    """The scale between the two kernels: ``q_out · k_out``, or ``q_out`` if a coupling applied
    ``k_out``.
    """
    for i in range(plan.kappa_q.n):
        mid[i] = plan.q_out[i] if len(plan.pairs.rows) else plan.q_out[i] * plan.k_out[i]


@kernel
def slice_costs(
    h0, h1, l0, l1, settings, queries, keys, pairs, query, key, centre, costs, buffers, lanes
):  # type: ignore[no-untyped-def] # fmt: skip
    """``D_l = (1/n) Σ_n [(A‖q‖²) (TB1) + (TᵀA1) (B‖k‖²) - 2 (AQ) · (TBK)]``, (batch, L).

    Both clouds are centred at `centre`, (batch, m), which changes no distance.
    """
    columns = buffers.columns[0]
    set_ones(columns[UNIT])
    q_blocks, k_blocks = buffers.blocks[Q_ROWS], buffers.blocks[K_ROWS]
    y_q, y_k, coupled, mid = buffers.rows[0], buffers.rows[1], buffers.rows[2], columns[MID]
    for head in range(h0, h1):
        n, m = queries.lengths[head], keys.lengths[head]
        if n == 0 or m == 0:
            for l in range(l0, l1):
                costs[head, l] = 0
            continue
        pack(query[head], centre[head], q_blocks, lanes)
        pack(key[head], centre[head], k_blocks, lanes)
        squared_norms(q_blocks, query.shape[1], columns[Q_SQUARES], lanes)
        squared_norms(k_blocks, key.shape[1], columns[K_SQUARES], lanes)
        for l in range(l0, l1):
            plan = plan_of(settings, queries, keys, pairs, head, l, buffers)
            cost = column_costs(plan, settings.balanced, columns)
            set_mid_scale(plan, mid)
            for block in range(q_blocks.shape[0]):
                multiply(plan.kappa_q, q_blocks[block], plan.q_order, plan.q_in, y_q, lanes)
                multiply(plan.kappa_k, k_blocks[block], plan.k_order, plan.k_in, y_k, lanes)
                right = y_k
                if len(plan.pairs.rows):
                    couple(y_k, plan.k_out, plan.pairs, coupled, n, lanes)
                    right = coupled
                cost -= 2 * weighted_product(y_q, right, n, mid, lanes)
            costs[head, l] = cost / n


@kernel
def apply_plans(
    h0, h1, l0, l1, settings, queries, keys, pairs, value, weights, centre, out, buffers, lanes
):  # type: ignore[no-untyped-def] # fmt: skip
    """``Σ_l weights_l A_lᵀ T B_l (V - centre)``: values (batch, M, d) to (batch, N, d)."""
    set_ones(buffers.columns[0, UNIT])
    ranks, mid = number_ranks(buffers.integers[RANKS]), buffers.columns[0, MID]
    v_blocks, out_blocks = buffers.blocks[K_ROWS], buffers.blocks[D_Q_ROWS]
    y_q, y_k, coupled = buffers.rows[0], buffers.rows[1], buffers.rows[2]
    for head in range(h0, h1):
        n, m = queries.lengths[head], keys.lengths[head]
        clear_blocks(out_blocks)
        pack(value[head], centre[head], v_blocks, lanes)
        for l in range(l0, l1):
            if n == 0 or m == 0 or weights[head, l] == 0:  # no token, or a slice that was dropped
                continue
            plan = plan_of(settings, queries, keys, pairs, head, l, buffers)
            set_mid_scale(plan, mid)
            for block in range(v_blocks.shape[0]):
                multiply(plan.kappa_k, v_blocks[block], plan.k_order, plan.k_in, y_k, lanes)
                right = y_k
                if len(plan.pairs.rows):
                    couple(y_k, plan.k_out, plan.pairs, coupled, n, lanes)
                    right = coupled
                multiply(plan.kappa_q, right, ranks, mid, y_q, lanes)
                scatter(y_q, n, plan.q_order, plan.q_in, weights[head, l], out_blocks[block], lanes)
        unpack(out_blocks, out[head], lanes)
