"""Plans of slices applied to rows: what is sorted, what slices cost, and the output.

In rank order ``N · U_l = A_lᵀ T B_l`` with ``A = diag(q_out) κ_q diag(q_in)``, and B likewise.
Every kernel works on the heads ``[h0, h1)`` and the slices ``[l0, l1)`` alone: threads share these
among each other. The torch twins are `slice_costs` and `apply_plans` of
:mod:`espformer.ops.esp.linear`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from espformer.ops.esp.cpu.compiling import kernel, part, stand_alone
from espformer.ops.esp.cpu.kappa import multiply, multiply_column, new_kappa, set_kappa
from espformer.ops.esp.cpu.normalising import balance_steps, room, row_scales
from espformer.ops.esp.cpu.rows import (
    clear,
    clear_blocks,
    copy,
    couple,
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
    stretched: bool  # one of inv_bandwidth, too
    exponents: np.ndarray  # of the balancing steps


class Plan(NamedTuple):
    """``q_in κ_q q_out T k_out κ_k k_in``: the plan of one slice, for rows of tokens."""

    kappa_q: tuple
    kappa_k: tuple
    q_order: np.ndarray
    k_order: np.ndarray
    q_in: np.ndarray
    q_out: np.ndarray
    k_in: np.ndarray
    k_out: np.ndarray
    pairs: Pairs


@part
def plan_of(settings, q_room, k_room, unit, queries, keys, pairs, head, l):  # type: ignore[no-untyped-def]
    """The plan of a slice; its kernels live in the rooms."""
    stand_alone()
    n, m = queries.lengths[head], keys.lengths[head]
    width, hard, average = settings.inv_bandwidth[head], settings.hard, settings.average
    kappa_q = set_kappa(q_room, queries.points[head, l], n, width, hard, average, settings.slopes)
    kappa_k = set_kappa(k_room, keys.points[head, l], m, width, hard, average, settings.slopes)
    q_out, k_out = queries.scales[head, l], keys.scales[head, l]
    q_in, k_in = (q_out, k_out) if settings.balanced else (unit, unit)
    own = Pairs(pairs.rows[head], pairs.columns[head], pairs.weights[head])
    return Plan(
        kappa_q, kappa_k, queries.order[head, l], keys.order[head, l],
        q_in, q_out, k_in, k_out, own,
    )  # fmt: skip


@kernel
def sort_side(h0, h1, l0, l1, table, poles, settings, numbers, mask, side):  # type: ignore[no-untyped-def]
    """Sorts (batch, L, N) numbers of the tokens that take part, and finds the scales of κ."""
    count = numbers.shape[2]
    tokens, spare = numbered(count), np.empty(count, np.int32)
    keys, spare_keys = np.empty(count, np.uint64), np.empty(count, np.uint64)
    unit = ones(count, numbers.dtype)
    kappa_room = new_kappa(table, poles, count)
    steps = len(settings.exponents)
    kept = (steps + 1 if settings.balanced else 0, room(count))
    x, r = np.empty(kept, numbers.dtype), np.empty(kept, numbers.dtype)
    powers = np.empty(room(count), numbers.dtype)
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
            order, points, scales = side.order[head, l], side.points[head, l], side.scales[head, l]
            sort_tokens(numbers[head, l], tokens, n, order, points, keys, spare_keys, spare)
            kappa = set_kappa(
                kappa_room, points, n, settings.inv_bandwidth[head],
                settings.hard, settings.average, settings.slopes,
            )  # fmt: skip
            if settings.balanced:
                balance_steps(kappa, unit, settings.exponents, x, r, powers)
                copy(x[steps], n, scales)
            else:
                row_scales(kappa, unit, scales)


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
    """``A1``: all ones if rows are normalised, nearly so if balanced."""
    stand_alone()
    if balanced:
        multiply_column(kappa, scale_in, sums)
        for i in range(kappa.n):
            sums[i] *= scale_out[i]


@part
def mix_squares(kappa, order, scale_in, squares, at_rank, mixed):  # type: ignore[no-untyped-def]
    """``κ diag(in) ‖x‖²``, in rank order."""
    stand_alone()
    for i in range(kappa.n):
        at_rank[i] = scale_in[i] * squares[order[i]]
    multiply_column(kappa, at_rank, mixed)


@kernel
def slice_costs(
    h0, h1, l0, l1, table, poles, settings, queries, keys, pairs, query, key, centre, costs, lanes
):  # type: ignore[no-untyped-def] # fmt: skip
    """``D_l = (1/n) Σ_n [(A‖q‖²) (TB1) + (TᵀA1) (B‖k‖²) - 2 (AQ) · (TBK)]``, (batch, L).

    Both clouds are moved by `centre`, (batch, m), which changes no difference.
    """
    rows, columns, width = query.shape[1], key.shape[1], 8 * len(lanes)
    number = query.dtype
    q_blocks = new_blocks(rows, query.shape[2], number, lanes)
    k_blocks = new_blocks(columns, key.shape[2], number, lanes)
    y_q, y_k = np.empty(rows * width, number), np.empty(columns * width, number)
    coupled = np.empty(rows * width if pairs.rows.shape[1] else 0, number)
    most = max(rows, columns)
    unit, mid = ones(most, number), np.empty(most, number)
    at_rank, mixed = np.empty(most, number), np.empty(most, number)
    q_squares, k_squares = np.empty(rows, number), np.empty(columns, number)
    q_sums, k_sums = ones(rows, number), ones(columns, number)
    q_spare, k_spare = ones(rows, number), ones(columns, number)
    q_room, k_room = new_kappa(table, poles, rows), new_kappa(table, poles, columns)
    for head in range(h0, h1):
        n, m = queries.lengths[head], keys.lengths[head]
        if n == 0 or m == 0:
            for l in range(l0, l1):
                costs[head, l] = 0
            continue
        pack(query[head], centre[head], q_blocks, lanes)
        pack(key[head], centre[head], k_blocks, lanes)
        squared_norms(q_blocks, rows, q_squares, lanes)
        squared_norms(k_blocks, columns, k_squares, lanes)
        for l in range(l0, l1):
            plan = plan_of(settings, q_room, k_room, unit, queries, keys, pairs, head, l)
            row_sums(plan.kappa_q, plan.q_in, plan.q_out, settings.balanced, q_sums)
            row_sums(plan.kappa_k, plan.k_in, plan.k_out, settings.balanced, k_sums)
            own = plan.pairs
            met_q = couple_column(own.rows, own.columns, own.weights, k_sums, q_spare)
            met_k = couple_column(own.columns, own.rows, own.weights, q_sums, k_spare)
            cost = number.type(0)
            mix_squares(plan.kappa_q, plan.q_order, plan.q_in, q_squares, at_rank, mixed)
            for i in range(n):
                cost += plan.q_out[i] * mixed[i] * met_q[i]
            mix_squares(plan.kappa_k, plan.k_order, plan.k_in, k_squares, at_rank, mixed)
            for i in range(m):
                cost += plan.k_out[i] * mixed[i] * met_k[i]
            is_coupled = len(plan.pairs.rows) > 0
            for i in range(n):
                mid[i] = plan.q_out[i] if is_coupled else plan.q_out[i] * plan.k_out[i]
            for block in range(len(q_blocks)):
                multiply(plan.kappa_q, q_blocks[block], plan.q_order, plan.q_in, y_q, lanes)
                multiply(plan.kappa_k, k_blocks[block], plan.k_order, plan.k_in, y_k, lanes)
                if is_coupled:
                    couple(y_k, plan.k_out, plan.pairs, coupled, n, lanes)
                cost -= 2 * weighted_product(y_q, coupled if is_coupled else y_k, n, mid, lanes)
            costs[head, l] = cost / n


@kernel
def apply_plans(
    h0, h1, l0, l1, table, poles, settings, queries, keys, pairs, value, weights, out, lanes
):  # type: ignore[no-untyped-def] # fmt: skip
    """``Σ_l weights_l A_lᵀ T B_l V``: values (batch, M, d) to (batch, N, d)."""
    rows, columns, width = out.shape[1], value.shape[1], 8 * len(lanes)
    number = value.dtype
    v_blocks = new_blocks(columns, value.shape[2], number, lanes)
    out_blocks = new_blocks(rows, value.shape[2], number, lanes)
    y_k, y_q = np.empty(columns * width, number), np.empty(rows * width, number)
    coupled = np.empty(rows * width if pairs.rows.shape[1] else 0, number)
    most = max(rows, columns)
    unit, mid = ones(most, number), np.empty(most, number)
    ranks, no_centre = numbered(most), zeros(value.shape[2], number)
    q_room, k_room = new_kappa(table, poles, rows), new_kappa(table, poles, columns)
    for head in range(h0, h1):
        n, m = queries.lengths[head], keys.lengths[head]
        if n == 0 or m == 0:
            clear_blocks(out[head])
            continue
        pack(value[head], no_centre, v_blocks, lanes)
        clear_blocks(out_blocks)
        for l in range(l0, l1):
            plan = plan_of(settings, q_room, k_room, unit, queries, keys, pairs, head, l)
            is_coupled = len(plan.pairs.rows) > 0
            for i in range(n):
                mid[i] = plan.q_out[i] if is_coupled else plan.q_out[i] * plan.k_out[i]
            for block in range(len(v_blocks)):
                multiply(plan.kappa_k, v_blocks[block], plan.k_order, plan.k_in, y_k, lanes)
                if is_coupled:
                    couple(y_k, plan.k_out, plan.pairs, coupled, n, lanes)
                multiply(plan.kappa_q, coupled if is_coupled else y_k, ranks, mid, y_q, lanes)
                scatter(y_q, n, plan.q_order, plan.q_in, weights[head, l], out_blocks[block], lanes)
        unpack(out_blocks, out[head], lanes)
