"""Soft plans applied to rows: ``weight · query_scale · κ_q (mid_scale · κ_k (key_scale · x))``.

The torch twins are :func:`espformer.ops.esp.linear.apply_plans` and
:func:`espformer.ops.esp.linear.slice_costs`, and of what they are made of
:class:`espformer.ops.esp.coupling.Coupling` and
:class:`espformer.ops.esp.sorted_kernel.ChunkStates`. This file reads from top to bottom:

1. :class:`Plan`, and :class:`Pieces`, of which a plan is made between sides of two lengths.
2. States, which carry the contribution of other chunks: `sums_kernel`, `link_kernel` and
   `scan_kernel`; how ranks are divided into :class:`Chunks`; and :func:`chunk_states`, which
   launches all of it.
3. `apply_kernel` and `cross_kernel`, for a chunk and its states.
4. :class:`PlanKernels`, which launches them for some slices, as :class:`ShortPlanKernels` does its
   own for narrow rows and :class:`RecurrencePlanKernels` for float32 rows; and what other files
   call:

   - :func:`apply_plans`: ``Σ_l weight_l A_lᵀ B_l V``;
   - :func:`cross_plans`: ``Σ_i q_i · (A_lᵀ B_l K)_i`` for every slice, the part of the slice costs
     that is not a column;
   - :func:`plan_gradients`: the backward of both.

Rank n of the keys is matched with rank n of the queries, so the program that computes a chunk of
``W = mid_scale · κ_k x`` also multiplies it by κ_q. Slices are processed in groups, so that their
states stay below `SCRATCH_BYTES`.

**Pieces.** A monotone coupling of N ≠ M ranks cuts both sides into the same pieces: piece s belongs
to query rank query_ranks[s] and key rank key_ranks[s], and has the weight weights[s]. In terms of
pieces, a plan is between sides of equal length. A key rank with several pieces is an operand only
at its first piece (`key_scale` is zero at the others), and a query rank with several pieces is read
only at its first piece (`query_scale`):

    (A T B v)_i = Σ_s κ_q(i, query_ranks[s]) · weights[s] · Σ_j κ_k(key_ranks[s], j) v_j.

Pieces of one rank have the same point. They are ties, which exert no force on each other.

**States.** `sums_kernel` sums every chunk by itself, evaluated at its far end; `scan_kernel`
carries these sums from chunk to chunk, in place. The operand of κ_q is W, whose sums are needed
before W has been computed. Within a chunk they are

    Σ_n in_n W_n = Σ_j [Σ_n κ_nj mid_scale_n in_n] x_j
                   + [Σ_n in_n mid_scale_n out_n] · (states of x),

with `in` the coefficient into a state of κ_q and `out` the one out of a state of κ_k. This adds a
few rows to the matrix that sums x anyway, and a small matrix of links per chunk. So a program reads
its rows once for both, and W is never stored.

**Backward.** The gradients of ``⟨g, plan x⟩`` come from the same program, run once for each side.
The transposed plan applied to g is the gradient of x. All other gradients follow from the small
matrices ``M = W gᵀ`` of a chunk and ``W statesᵀ``:

    slope of the queries' points:   Σ_j κ_q'_nj (M_nj + M_jn),
    gradient of `mid_scale`:        Σ_j κ_q_nj M_nj  over `mid_scale` of rank n,
    gradient of `query_scale`:      Σ_j κ_q_nj M_jn  over `query_scale` of rank n.

The tensor cores sum over columns, and κ' stays in float32.

The gradient of the inverse bandwidth is ``Σ_n s_n ds_n``, whose terms nearly cancel. So it is
summed pair by pair: distances within a chunk, and, for points in other chunks, the part of the
distance that lies in this chunk. :meth:`PlanKernels.grad` adds the distance over whole chunks.
"""

from __future__ import annotations

import cmath
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from espformer.ops.common.cuda import Limits
from espformer.ops.common.triton import (
    INTERPRETED,
    Launch,
    Shape,
    ceil_div,
    once,
    power_of_2,
    width_arguments,
)
from espformer.ops.esp.coupling import Coupling
from espformer.ops.esp.cuda import recurrences
from espformer.ops.esp.cuda.recurrences import RecurrencePlanKernels
from espformer.ops.esp.triton import short_plan
from espformer.ops.esp.triton.normalise import SortedSide
from espformer.ops.esp.triton.primitives import (
    COUNTS,
    LOG2E,
    STATE_BLOCK,
    add_rows,
    chunk_kappa,
    chunk_kappa_slope,
    distances_in_chunk,
    exp2,
    exponential_table,
    gap_unit,
    kappa_at,
    load_points,
    load_ranks,
    load_rows,
    load_side,
    load_states,
    point_at,
    product,
    program_chunk,
    rotation,
    safe_divide,
    state_coefficients,
    table_entry,
    times_kappa,
    times_states,
    to_wide_range,
    transposed_product,
)
from espformer.ops.esp.triton.short_plan import ShortPlanKernels

States = tuple[Tensor | None, Tensor | None]  # of x for κ_k, and of W for κ_q
Group = tuple[slice, slice]  # some heads, and some of their slices

# More would not fit in the L2 cache, fewer would need more launches.
SCRATCH_BYTES = {"absolute": 80 << 20, "squared": 160 << 20}
# Ranks per chunk for 16-bit and for 32-bit rows (32-bit rows are split in three parts, which takes
# registers).
CHUNK = {2: 64, 4: 16}
LEAST = 16  # the fewest that tensor cores take
# Chunks whose states a scan loads together: for real poles, for complex ones.
AHEAD = 8, 4
# The number of programs that a scan should have, and the minimum number of loads of each.
SCANNING = 2048
LEAST_LOADS = 8
# For 16-bit rows: warps that sum a chunk (other programs have one for 16 ranks), and registers of a
# thread. "rows" is a plan applied, "grad" has the slope and either rows or scales, "all" has all
# three, or `query_scale`. More registers, and fewer programs fit on a multiprocessor.
SUMMING_WARPS = {"absolute": 1, "squared": 2}
REGISTERS = {
    "absolute": {"sums": 128, "rows": 96, "cross": 128, "grad": 128, "all": 168},
    "squared": {"sums": 160, "rows": 128, "cross": 128, "grad": 128, "all": 168},
}


class Plan(NamedTuple):
    """The plan of every slice, from keys to queries, by rank:

    ``diag(query_scale) κ_q diag(mid_scale) κ_k diag(key_scale)``; rank n of the queries is matched
    with rank n of the keys.
    """

    query_points: Tensor  # (batch, L, ranks), as all that follows
    key_points: Tensor
    query_order: Tensor  # int32: the token of each rank
    key_order: Tensor
    inv_bandwidth: Tensor  # (batch,)
    mid_scale: Tensor
    key_scale: Tensor | None  # None where it is one
    query_scale: Tensor | None
    metric: str

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All fields but the metric."""
        return self[:-1]

    def transposed(self) -> Plan:
        """The same plan from queries to keys."""
        return Plan(
            self.key_points, self.query_points, self.key_order, self.query_order,
            self.inv_bandwidth, self.mid_scale, self.query_scale, self.key_scale, self.metric,
        )  # fmt: skip

    def part(self, group: Group | None) -> Plan:
        """The plans of some slices of some heads."""
        if group is None:
            return self
        flat: tuple[Any, ...] = (*(_part(x, group) for x in self.tensors()), self.metric)
        return Plan(*flat)


def _part(x: Tensor | None, group: Group) -> Tensor | None:
    return x if x is None else x[group[0]] if x.dim() == 1 else x[group]


class Pieces(NamedTuple):
    """The pieces of a monotone coupling, for every slice: (batch, L, pieces)."""

    query_ranks: Tensor  # the query rank of each piece
    key_ranks: Tensor
    weights: Tensor  # (batch or 1, 1, pieces)
    first_of_query: Tensor  # likewise: one at the first piece of every query rank, else zero
    first_of_key: Tensor

    @staticmethod
    def of(coupling: Coupling, batch: int, slices: int) -> Pieces:
        query_ranks, key_ranks = (
            ranks.unsqueeze(1).expand(batch, slices, -1)
            for ranks in (coupling.rows, coupling.columns)
        )
        first = _first_pieces(coupling.rows), _first_pieces(coupling.columns)
        return Pieces(query_ranks, key_ranks, coupling.weights.unsqueeze(1), *first)

    def plan(
        self, queries: SortedSide, keys: SortedSide, inv_bandwidth: Tensor, balanced: bool,
        metric: str,
    ) -> Plan:  # fmt: skip
        """The plans from keys to queries, piece to piece."""
        query_ranks, key_ranks = self.query_ranks, self.key_ranks
        query_scales = queries.scales.gather(-1, query_ranks)
        key_scales = keys.scales.gather(-1, key_ranks)
        return Plan(
            queries.points.gather(-1, query_ranks),
            keys.points.gather(-1, key_ranks),
            queries.order.gather(-1, query_ranks),
            keys.order.gather(-1, key_ranks),
            inv_bandwidth,
            query_scales * key_scales * self.weights,
            self._outer_scale(key_scales, self.first_of_key, balanced),
            self._outer_scale(query_scales, self.first_of_query, balanced),
            metric,
        )

    @staticmethod
    def _outer_scale(scales: Tensor, first: Tensor, balanced: bool) -> Tensor:
        """`query_scale` or `key_scale` of the plans: zero but at first pieces."""
        return (scales * first if balanced else first.expand(scales.shape)).contiguous()

    def gradients(
        self, queries: SortedSide, keys: SortedSide, d_points: tuple[Tensor, Tensor],
        d_outer_scales: tuple[Tensor, Tensor] | None, d_mid_scale: Tensor,
    ) -> list[tuple[Tensor, Tensor | None]]:  # fmt: skip
        """Gradients of points and scales of the queries, and of the keys, from those by piece.

        `d_outer_scales` are those of `query_scale` and `key_scale`, if these are scales of the
        sides.
        """
        scales = (
            queries.scales.gather(-1, self.query_ranks),
            keys.scales.gather(-1, self.key_ranks),
        )
        d_mid_scale = d_mid_scale * self.weights
        found: list[tuple[Tensor, Tensor | None]] = []
        for i, (side, ranks, first) in enumerate(
            (
                (queries, self.query_ranks, self.first_of_query),
                (keys, self.key_ranks, self.first_of_key),
            )
        ):
            d_scales = d_mid_scale * scales[1 - i]
            if d_outer_scales is not None:
                d_scales += d_outer_scales[i] * first
            found.append(
                (
                    torch.zeros_like(side.points).scatter_add_(-1, ranks, d_points[i]),
                    torch.zeros_like(side.scales).scatter_add_(-1, ranks, d_scales),
                )
            )
        return found


def _first_pieces(ranks: Tensor) -> Tensor:
    """One at the first piece of every rank, else zero: (batch or 1, 1, pieces)."""
    new = ranks[:, 1:] != ranks[:, :-1]
    return torch.nn.functional.pad(new.float(), (1, 0), value=1.0).unsqueeze(1)


@triton.jit
def store_states(
    states_ptr, chunk, states, d, D, STATE_ROWS: tl.constexpr, FIRST_ROW: tl.constexpr = 0
):
    """Rows of a matrix of sums, from FIRST_ROW on, as the states of a chunk."""
    r = tl.arange(0, STATE_BLOCK)[:, None] - FIRST_ROW
    at = (chunk * STATE_ROWS + r) * D + d[None, :]
    tl.store(states_ptr + at, states, mask=(r >= 0) & (r < STATE_ROWS) & (d[None, :] < D))


@triton.jit
def store_sums(
    states_ptr, next_states_ptr, chunk, x, into, next_into, d, WIDTH, COMPLEX: tl.constexpr,
    STATE_ROWS: tl.constexpr, WITH_NEXT: tl.constexpr, STACKED: tl.constexpr,
    FIRST_ROW: tl.constexpr,
):  # fmt: skip
    """The sums of a block of columns of x, for one κ or for two (:func:`sums_kernel`).

    STACKED: `into` has the rows of the second κ too, from FIRST_ROW on.
    """
    if WITH_NEXT:
        x = to_wide_range(x)
    sums = product(into, x, COMPLEX)
    store_states(states_ptr, chunk, sums, d, WIDTH, STATE_ROWS)
    if WITH_NEXT:
        if not STACKED:
            sums = product(next_into, x, COMPLEX)
        store_states(next_states_ptr, chunk, sums, d, WIDTH, STATE_ROWS, FIRST_ROW)


@triton.jit(do_not_specialize=COUNTS)
def sums_kernel(
    x_ptr,  # (B, TOKENS, WIDTH)
    order_ptr,  # (B, L, N) int32: the token of each rank
    scale_ptr,  # (B, L, N) float32, or None: ones
    points_ptr,  # (B, L, N) float32, of the κ that multiplies x
    next_points_ptr,  # (B, L, N) float32, of the κ after it, if WITH_NEXT
    mid_scale_ptr,  # (B, L, N) float32
    TABLE: tl.constexpr,
    inv_bandwidth_ptr,  # (B,) float32
    states_ptr,  # (B, L, CHUNKS, STATE_ROWS, WIDTH)
    next_states_ptr,  # (B, L, CHUNKS, STATE_ROWS, WIDTH), if WITH_NEXT
    links_ptr,  # (B, L, CHUNKS, STATE_ROWS, STATE_ROWS) float32, if WITH_NEXT
    N, TOKENS, HEADS, L, CHUNKS, START, COUNT, D8, D: tl.constexpr, COMPLEX: tl.constexpr,
    STATE_ROWS: tl.constexpr, WITH_NEXT: tl.constexpr, EVEN: tl.constexpr, BLOCK_D: tl.constexpr,
    SPAN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Sums of the rows x of each chunk, evaluated at its last point (left) and its first point
    (right).

    WITH_NEXT: also the sums of ``mid_scale · κx`` for the κ of the next points, without the
    contribution of the states of x. That is added later, through the links.
    """
    WIDTH = D if D > 0 else D8 * 8
    pair, head, chunk = program_chunk(HEADS, L, START, COUNT)
    begin = chunk * SPAN
    n = begin + tl.arange(0, C)
    rank_offset = pair * N
    x_ptr += head * TOKENS * WIDTH
    if scale_ptr is not None:
        scale_ptr += rank_offset
    inv_bandwidth = tl.load(inv_bandwidth_ptr + head)
    fp32_rows: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    tokens, points, first, last = load_side(
        points_ptr + rank_offset, order_ptr + rank_offset, begin, N, C, EVEN
    )
    into = state_coefficients(
        TABLE, points, first, last, inv_bandwidth, "in", COMPLEX, STATE_ROWS, fp32_rows
    )
    into = tl.trans(into)
    stacked: tl.constexpr = WITH_NEXT and 2 * STATE_ROWS <= STATE_BLOCK
    first_row: tl.constexpr = STATE_ROWS if stacked else 0
    if WITH_NEXT:
        mid_scale = load_ranks(mid_scale_ptr + rank_offset, n, N, EVEN)
        next_points, next_first, next_last = load_points(
            next_points_ptr + rank_offset, begin, N, C, EVEN
        )
        next_into = mid_scale[:, None] * state_coefficients(
            TABLE, next_points, next_first, next_last, inv_bandwidth, "in", COMPLEX, STATE_ROWS,
            fp32_rows, first_row,
        )  # fmt: skip
        x = load_rows(x_ptr, scale_ptr, tokens, n, N, tl.arange(0, BLOCK_D), WIDTH, EVEN)
        kappa, _ = chunk_kappa(points, first, last, None, inv_bandwidth, COMPLEX, fp32_rows)
        r = tl.arange(0, STATE_BLOCK) - first_row
        kept = (r >= 0) & (r < STATE_ROWS)
        links_ptr += (pair * CHUNKS + chunk) * STATE_ROWS * STATE_ROWS
        if COMPLEX:
            read = state_coefficients(
                TABLE, points, first, last, inv_bandwidth, "out", COMPLEX, STATE_ROWS, fp32_rows
            )
            link = tl.dot(tl.trans(next_into), read, input_precision="tf32x3")
            column = tl.arange(0, STATE_BLOCK)[None, :]
            to_ptr = links_ptr + r[:, None] * STATE_ROWS + column
            tl.store(to_ptr, link, mask=kept[:, None] & (column < STATE_ROWS))
        # κ in 16 bits is accurate enough, as for W: all coefficients have the same error.
        next_into = product(tl.trans(next_into), kappa.to(to_wide_range(x).dtype), COMPLEX)
        if not COMPLEX:  # a state of a real pole is like a row at the first or the last rank
            i = tl.arange(0, C)[None, :]
            to_ptr = links_ptr + r[:, None] * STATE_ROWS + tl.where(i == 0, 0, 1)
            tl.store(to_ptr, next_into, mask=kept[:, None] & ((i == 0) | (i == C - 1)))
        if stacked:
            into += next_into
    states_ptr += pair * CHUNKS * STATE_ROWS * WIDTH
    if next_states_ptr is not None:
        next_states_ptr += pair * CHUNKS * STATE_ROWS * WIDTH
    if not WITH_NEXT:
        next_into = into
        x = load_rows(x_ptr, scale_ptr, tokens, n, N, tl.arange(0, BLOCK_D), WIDTH, EVEN)
    store_sums(
        states_ptr, next_states_ptr, chunk, x, into, next_into, tl.arange(0, BLOCK_D), WIDTH,
        COMPLEX, STATE_ROWS, WITH_NEXT, stacked, first_row,
    )  # fmt: skip
    if D > 0:
        for start in tl.static_range(BLOCK_D, D, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            x = load_rows(x_ptr, scale_ptr, tokens, n, N, d, WIDTH, EVEN)
            store_sums(
                states_ptr, next_states_ptr, chunk, x, into, next_into, d, WIDTH, COMPLEX,
                STATE_ROWS, WITH_NEXT, stacked, first_row,
            )  # fmt: skip
    else:
        for start in tl.range(BLOCK_D, WIDTH, BLOCK_D, num_stages=1):
            d = start + tl.arange(0, BLOCK_D)
            x = load_rows(x_ptr, scale_ptr, tokens, n, N, d, WIDTH, EVEN)
            store_sums(
                states_ptr, next_states_ptr, chunk, x, into, next_into, d, WIDTH, COMPLEX,
                STATE_ROWS, WITH_NEXT, stacked, first_row,
            )  # fmt: skip


@triton.jit
def complex_decay(TABLE: tl.constexpr, x, r, STATE_ROWS: tl.constexpr, FP32_ROWS: tl.constexpr):
    """``exp(-p x)`` of the pole of state row r, real and imaginary part."""
    x = tl.minimum(x, 40.0)
    size = exp2(table_entry(TABLE, 0, r, STATE_ROWS) * (x * -LOG2E))
    re, im = rotation(table_entry(TABLE, 1, r, STATE_ROWS) * x, FP32_ROWS)
    return size * re, size * im


@triton.jit(do_not_specialize=COUNTS)
def link_kernel(
    states_ptr,  # (B, L, CHUNKS, STATE_ROWS, WIDTH)
    next_states_ptr,  # (B, L, CHUNKS, STATE_ROWS, WIDTH)
    links_ptr,  # (B, L, CHUNKS, STATE_ROWS, STATE_ROWS) float32
    D8, D: tl.constexpr, STATE_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds to the sums of every chunk the contribution of the first κ's states, through the
    links.
    """
    WIDTH = D if D > 0 else D8 * 8
    chunk = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, STATE_BLOCK)
    inside = (r[:, None] < STATE_ROWS) & (r[None, :] < STATE_ROWS)
    link_ptr = links_ptr + (chunk * STATE_ROWS + r[:, None]) * STATE_ROWS + r[None, :]
    link = tl.load(link_ptr, mask=inside, other=0.0)
    for start in tl.range(0, WIDTH, BLOCK_D, num_stages=1):
        d = start + tl.arange(0, BLOCK_D)
        states = load_states(states_ptr, chunk, d, WIDTH, STATE_ROWS)
        own = load_states(next_states_ptr, chunk, d, WIDTH, STATE_ROWS)
        own = tl.dot(link, states, own, input_precision="tf32x3")
        store_states(next_states_ptr, chunk, own, d, WIDTH, STATE_ROWS)


@triton.jit
def real_decay(x, k, STATE_ROWS: tl.constexpr):
    """Decay over a distance x of a real state (k = 0), or of its ties (k = 1)."""
    decay = exp2(x * -LOG2E)
    if STATE_ROWS > 2:  # a tie carries on while the point stays the same
        decay = tl.where(k == 0, decay, tl.where(x == 0, 1.0, 0.0))[:, None]
    return decay


@triton.jit
def carry_in_point(points_ptr, i, rightwards, N, CHUNKS, C: tl.constexpr):
    """The point at the near end of the i-th chunk of a scan, where the carry-in is evaluated."""
    return point_at(points_ptr, tl.where(rightwards, i * C, (CHUNKS - i) * C - 1), N)


@triton.jit(do_not_specialize=("L", "CHUNKS", "SEGMENTS", "LENGTH", "D8"))
def scan_kernel(
    points_ptr,  # (B, L, N) float32
    TABLE: tl.constexpr,
    inv_bandwidth_ptr,  # (B,) float32
    states_ptr,  # (B, L, CHUNKS, STATE_ROWS, WIDTH)
    prev_states_ptr,  # (B, L, CHUNKS, STATE_ROWS, WIDTH), of the κ before, if WITH_LINKS
    links_ptr,  # (B, L, CHUNKS, STATE_ROWS, STATE_ROWS) float32, if WITH_LINKS
    ends_ptr,  # (B, L, 2, SEGMENTS, STATE_ROWS // 2, WIDTH) float32, or None
    N, L, CHUNKS, SEGMENTS, LENGTH, D8, D: tl.constexpr, COMPLEX: tl.constexpr,
    STATE_ROWS: tl.constexpr, WITH_LINKS: tl.constexpr, ENDS_ONLY: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr, AHEAD: tl.constexpr,
    FP32_ROWS: tl.constexpr,
):  # fmt: skip
    """Replaces the chunks' own sums by the states that enter them, in place.

    A tile is (states of one direction, columns): the poles, or the state and its ties. AHEAD chunks
    are loaded before the first of them is overwritten, so that loads overlap. WITH_LINKS: for a
    real pole, which has two states, this kernel also does the work of `link_kernel`.

    If sequences are long and few, `ends` holds the carry-out of each segment of LENGTH chunks. A
    launch with ENDS_ONLY scans every segment with zero carry-in and writes its carry-out. The decay
    to the start of a later segment follows from the points, so the second launch scans all segments
    in parallel.
    """
    WIDTH = D if D > 0 else D8 * 8
    pair = (tl.program_id(0) // SEGMENTS).to(tl.int64)
    segment = tl.program_id(0) % SEGMENTS
    rightwards = tl.program_id(1) == 0
    points_ptr += pair * N
    states_ptr += pair * CHUNKS * STATE_ROWS * WIDTH
    if WITH_LINKS:
        prev_states_ptr += pair * CHUNKS * STATE_ROWS * WIDTH
        links_ptr += pair * CHUNKS * STATE_ROWS * STATE_ROWS
    inv_bandwidth = tl.load(inv_bandwidth_ptr + pair // L)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    k = tl.arange(0, BLOCK_R)
    if COMPLEX:
        row = 2 * k + tl.where(rightwards, 0, STATE_ROWS // 2)
        inside = (k[:, None] < STATE_ROWS // 4) & (d[None, :] < WIDTH)
        end_at = (2 * k)[:, None] * WIDTH + d[None, :]
    else:
        row = 2 * k + tl.where(rightwards, 0, 1)
        inside = (k[:, None] < STATE_ROWS // 2) & (d[None, :] < WIDTH)
        end_at = k[:, None] * WIDTH + d[None, :]
    state = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    state_im = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    begin = segment * LENGTH
    end = tl.minimum(begin + LENGTH, CHUNKS)
    if ends_ptr is not None:
        ends_ptr += (pair * 2 + tl.program_id(1)) * SEGMENTS * (STATE_ROWS // 2) * WIDTH
        if not ENDS_ONLY:
            start = carry_in_point(points_ptr, begin, rightwards, N, CHUNKS, C)
            # Sum the carry-outs of earlier segments, decayed to the start of this one.
            for earlier in range(0, segment):
                carry_out_point = carry_in_point(
                    points_ptr, (earlier + 1) * LENGTH, rightwards, N, CHUNKS, C
                )
                x = tl.abs(start - carry_out_point) * inv_bandwidth
                carry_out_ptr = ends_ptr + earlier * (STATE_ROWS // 2) * WIDTH + end_at
                end_re = tl.load(carry_out_ptr, mask=inside, other=0.0)
                if COMPLEX:
                    end_im = tl.load(carry_out_ptr + WIDTH, mask=inside, other=0.0)
                    decay_re, decay_im = complex_decay(
                        TABLE, x, row[:, None], STATE_ROWS, FP32_ROWS
                    )
                    state += decay_re * end_re - decay_im * end_im
                    state_im += decay_re * end_im + decay_im * end_re
                else:
                    state += real_decay(x, k, STATE_ROWS) * end_re
    for i in range(begin, end, AHEAD):
        # All loads come before the first store, because the compiler moves no load across a store.
        owns = ()
        gaps = ()
        for u in tl.static_range(AHEAD):
            here = i + u < CHUNKS
            chunk = tl.where(rightwards, i + u, CHUNKS - 1 - i - u)
            at = (chunk * STATE_ROWS + row)[:, None] * WIDTH + d[None, :]
            own = tl.load(states_ptr + at, mask=inside & here, other=0.0).to(tl.float32)
            if COMPLEX:
                owns = owns + (own, tl.load(states_ptr + at + WIDTH, mask=inside & here, other=0.0))
            else:
                if WITH_LINKS:
                    left_ptr = prev_states_ptr + chunk * STATE_ROWS * WIDTH + d
                    left = tl.load(left_ptr, mask=(d < WIDTH) & here, other=0.0).to(tl.float32)
                    right = tl.load(left_ptr + WIDTH, mask=(d < WIDTH) & here, other=0.0).to(
                        tl.float32
                    )
                    link_ptr = links_ptr + (chunk * STATE_ROWS + row) * STATE_ROWS
                    own += tl.load(link_ptr, mask=here, other=0.0)[:, None] * left[None, :]
                    own += tl.load(link_ptr + 1, mask=here, other=0.0)[:, None] * right[None, :]
                owns = owns + (own,)
            # Distances from where the state and the chunk's sums are evaluated to the near end of
            # the next chunk.
            near_end = point_at(points_ptr, chunk * C + tl.where(rightwards, 0, C - 1), N)
            far_end = point_at(points_ptr, chunk * C + tl.where(rightwards, C - 1, 0), N)
            beyond = point_at(points_ptr, chunk * C + tl.where(rightwards, C, -1), N)
            across, step = tl.abs(beyond - near_end), tl.abs(beyond - far_end)
            gaps = gaps + (across * inv_bandwidth, step * inv_bandwidth)
        for u in tl.static_range(AHEAD):
            chunk = tl.where(rightwards, i + u, CHUNKS - 1 - i - u)
            at = (chunk * STATE_ROWS + row)[:, None] * WIDTH + d[None, :]
            mask = inside & (i + u < CHUNKS)
            across, step = gaps[2 * u], gaps[2 * u + 1]
            if not ENDS_ONLY:
                tl.store(states_ptr + at, state, mask=mask)
            if COMPLEX:
                if not ENDS_ONLY:
                    tl.store(states_ptr + at + WIDTH, state_im, mask=mask)
                own, own_im = owns[2 * u], owns[2 * u + 1]
                re, im = complex_decay(TABLE, across, row[:, None], STATE_ROWS, FP32_ROWS)
                s_re, s_im = complex_decay(TABLE, step, row[:, None], STATE_ROWS, FP32_ROWS)
                next_state = re * state - im * state_im + s_re * own - s_im * own_im
                state_im = re * state_im + im * state + s_re * own_im + s_im * own
                state = next_state
            else:
                state = (
                    real_decay(across, k, STATE_ROWS) * state
                    + real_decay(step, k, STATE_ROWS) * owns[u]
                )
    if ENDS_ONLY:
        ends_ptr += segment * (STATE_ROWS // 2) * WIDTH
        tl.store(ends_ptr + end_at, state, mask=inside)
        if COMPLEX:
            tl.store(ends_ptr + end_at + WIDTH, state_im, mask=inside)


def chunk_size(ranks: int, dtype: torch.dtype) -> int:
    """Ranks per chunk: fewer for short sequences."""
    return min(CHUNK[dtype.itemsize], max(LEAST, power_of_2(ranks)))


def column_block(width: int, fp32_rows: bool) -> int:
    """Columns per block: a power of two that wastes few columns."""
    if fp32_rows:
        return min(32, max(16, power_of_2(width)))
    return 64 if width % 64 == 0 else 32


def segment_length(chunks: int, ahead: int, scans: int) -> int:
    """Chunks per scan segment: all, unless scans are few and long.

    A program reads the carry-outs of all earlier segments one at a time, and scans its own segment
    twice, `ahead` chunks at a time. The square root balances these two costs; segments are used
    only if they save time.
    """
    steps = ceil_div(chunks, ahead)
    segments = min(SCANNING // max(1, scans), math.isqrt(2 * steps))
    own = max(LEAST_LOADS, ceil_div(steps, max(1, segments)))
    worth = 2 * own + ceil_div(steps, own) < steps
    return (own if worth else steps) * ahead


@functools.cache
def state_table(metric: str, fp32_rows: bool) -> tuple[float, ...]:
    """The TABLE of :func:`espformer.ops.esp.triton.primitives.state_coefficients`.

    Eight numbers for every state row: the pole (Re, Im), then size and phase of the coefficients
    into a state, out of it, and of its slope.
    """
    table = exponential_table(metric, fp32_rows)
    numbers: list[float] = []
    for direction in (-1, 1):  # a state on the left pulls to the left
        for weight, pole in zip(table.weights, table.poles, strict=True):
            w, p = complex(weight), complex(pole)
            slope = direction * w * p
            for quarter in (0.0, math.pi / 2):  # the real part, and minus the imaginary part
                numbers += [
                    p.real, p.imag, 1.0, -quarter, abs(w), cmath.phase(w) + quarter,
                    abs(slope), cmath.phase(slope) + quarter,
                ]  # fmt: skip
    return tuple(numbers)


@dataclass(frozen=True, eq=False)  # one object for every shape: the key of what is made of it
class Chunks:
    """How the ranks of some plans are divided into chunks, and how kernels are launched on them."""

    batch: int
    slices: int
    ranks: int
    metric: str
    dtype: torch.dtype  # of the rows

    @staticmethod
    @once
    def of(shape: Shape, metric: str, dtype: torch.dtype) -> Chunks:
        """Of plans whose points are (batch, slices, ranks), on rows of this dtype."""
        batch, slices, ranks = shape
        return Chunks(batch, slices, ranks, metric, dtype)

    @functools.cached_property
    def span(self) -> int:
        """Ranks of a chunk."""
        return chunk_size(self.ranks, self.dtype)

    @functools.cached_property
    def count(self) -> int:
        """Chunks of a sequence."""
        return ceil_div(self.ranks, self.span)

    @functools.cached_property
    def fp32_rows(self) -> bool:
        return self.dtype.itemsize == 4

    @functools.cached_property
    def complex(self) -> bool:
        """Whether poles are complex numbers."""
        return self.metric != "absolute"

    @property
    def table(self) -> tuple[float, ...]:
        return state_table(self.metric, self.fp32_rows)

    def state_rows(self, ties: bool) -> int:
        """State rows per chunk, both directions together; zero if there is only one chunk.

        Only the absolute metric treats ties separately.
        """
        if self.count == 1:
            return 0
        if self.metric == "absolute":
            return 4 if ties else 2
        return 4 * len(exponential_table(self.metric, self.fp32_rows).poles)

    def state_dtype(self) -> torch.dtype:
        """The dtype of states: 16 bits for 16-bit rows and a real pole; float32 if large weights
        cancel.

        The interpreter has no bfloat16, and takes float32 for what needs its range
        (`to_wide_range`).
        """
        short = not self.fp32_rows and not self.complex and not INTERPRETED
        return torch.bfloat16 if short else torch.float32

    def scratch_bytes(self, width: int, backward: bool) -> int:
        """Scratch memory of one slice: its states, and rows of its own if it must not add them."""
        state_rows = self.state_rows(ties=backward)
        each = width * self.state_dtype().itemsize + state_rows * 4
        scratch = (4 if backward else 2) * self.count * state_rows * each
        if torch.are_deterministic_algorithms_enabled():
            scratch += (2 if backward else 1) * self.ranks * width * 4
        return scratch

    def by_chunk(self, total: Tensor) -> Tensor:
        """A buffer for one sum per chunk; if there is only one chunk, the buffer of the total
        itself.
        """
        if self.count == 1:
            return total
        return total.new_empty(self.batch, self.slices, self.count)

    def launches(self, kernel: Any, name: str, width: int, **options: Any) -> list[Launch]:
        """Launches of a kernel on all chunks, or on the full ones and on the last one apart.

        Masks cost a sixth of all instructions (in `sums` less than another launch), and a short
        last chunk does not need a program for 64 ranks.
        """
        block_d = column_block(width, self.fp32_rows)
        full = self.ranks // self.span if width % block_d == 0 else 0
        parts = [(0, self.count, self.span)]
        if 0 < full < self.count:
            rest = chunk_size(self.ranks % self.span, self.dtype)
            if rest < self.span or (full > 1 and name != "sums"):
                parts = [(0, full, self.span), (full, 1, rest)]
        launches = []
        for start, count, ranks in parts:
            launch = Launch(
                kernel, (self.batch * self.slices * count,), N=self.ranks, HEADS=self.batch,
                L=self.slices, CHUNKS=self.count, START=start, COUNT=count, TABLE=self.table,
                COMPLEX=self.complex, BLOCK_D=block_d, SPAN=self.span, C=ranks,
                EVEN=start + count <= full, **width_arguments(width), **options,
                **self._tuned(name, ranks),
            )  # fmt: skip
            launches.append(launch)
        return launches

    def _tuned(self, name: str, ranks: int) -> dict[str, int]:
        """Warps per program, and registers per thread, for this number of ranks."""
        if self.fp32_rows:
            return {"num_warps": 1 if name == "sums" else 2}
        warps = ranks // 16
        if name == "sums":
            warps = min(warps, SUMMING_WARPS[self.metric])
        return {"num_warps": warps, "maxnreg": REGISTERS[self.metric][name]}


def chunk_states(
    chunks: Chunks, plan: Plan, x: Tensor, with_next: bool, ties: bool
) -> tuple[Tensor | None, Tensor | None]:
    """States of rows x of the keys for κ_k and, if `with_next`, of ``mid_scale · κ_k x`` for κ_q.

    (batch, L, chunks, state rows, width) each; None where there is one chunk.
    """
    _, tokens, width = x.shape
    state_rows = chunks.state_rows(ties)
    if state_rows == 0:
        return None, None
    shape = (chunks.batch, chunks.slices, chunks.count, state_rows)
    states = torch.empty(*shape, width, device=x.device, dtype=chunks.state_dtype())
    next_states = links = None
    if with_next:
        next_states = torch.empty_like(states)
        links = torch.empty(*shape, state_rows, device=x.device, dtype=torch.float32)
    for sums in _sums(chunks, state_rows, tokens, width, with_next):
        sums(
            x, plan.key_order, plan.key_scale, plan.key_points, plan.query_points, plan.mid_scale,
            plan.inv_bandwidth, states, next_states, links,
        )  # fmt: skip
    _scan(chunks, plan.key_points, plan.inv_bandwidth, states, None, None)
    if next_states is not None and chunks.complex:
        _link(chunks, state_rows, width)(states, next_states, links)
        _scan(chunks, plan.query_points, plan.inv_bandwidth, next_states, None, None)
    elif next_states is not None:
        _scan(chunks, plan.query_points, plan.inv_bandwidth, next_states, states, links)
    return states, next_states


@once
def _sums(
    chunks: Chunks, state_rows: int, tokens: int, width: int, with_next: bool
) -> list[Launch]:
    return chunks.launches(
        sums_kernel, "sums", width, TOKENS=tokens, STATE_ROWS=state_rows, WITH_NEXT=with_next
    )


@once
def _link(chunks: Chunks, state_rows: int, width: int) -> Launch:
    return Launch(
        link_kernel, (chunks.batch * chunks.slices * chunks.count,), STATE_ROWS=state_rows,
        BLOCK_D=column_block(width, chunks.fp32_rows), num_warps=1, **width_arguments(width),
    )  # fmt: skip


def _scan(
    chunks: Chunks, points: Tensor, inv_bandwidth: Tensor, states: Tensor,
    prev_states: Tensor | None, links: Tensor | None,
) -> None:  # fmt: skip
    """Replaces the sums of every chunk by the states that enter it, in place."""
    state_rows, width = states.shape[-2:]
    segments, scans = _scans(chunks, state_rows, width, prev_states is not None)
    ends = None
    if segments > 1:
        shape = (chunks.batch * chunks.slices, 2, segments, state_rows // 2, width)
        ends = states.new_empty(shape, dtype=torch.float32)
    for scan in scans:
        scan(points, inv_bandwidth, states, prev_states, links, ends)


@once
def _scans(
    chunks: Chunks, state_rows: int, width: int, with_links: bool
) -> tuple[int, list[Launch]]:
    """Segments that are scanned at the same time, and launches: of several, their ends first."""
    block_d = min(64, max(16, power_of_2(width)))
    ahead = min(AHEAD[chunks.complex], power_of_2(chunks.count))
    pairs, columns = chunks.batch * chunks.slices, ceil_div(width, block_d)
    length = segment_length(chunks.count, ahead, 2 * pairs * columns)
    segments = ceil_div(chunks.count, length)
    launches = []
    for ends_only in (False,) if segments == 1 else (True, False):
        launch = Launch(
            scan_kernel, (pairs * segments, 2, columns), TABLE=chunks.table, N=chunks.ranks,
            L=chunks.slices, CHUNKS=chunks.count, SEGMENTS=segments, LENGTH=length,
            COMPLEX=chunks.complex, STATE_ROWS=state_rows, WITH_LINKS=with_links,
            ENDS_ONLY=ends_only, BLOCK_R=power_of_2(state_rows // (4 if chunks.complex else 2)),
            BLOCK_D=block_d, C=chunks.span, AHEAD=ahead, FP32_ROWS=chunks.fp32_rows, num_warps=1,
            **width_arguments(width),
        )  # fmt: skip
        launches.append(launch)
    return segments, launches


@triton.jit
def chunk_forces(kappa, gap, m, with_gaps, COMPLEX: tl.constexpr):
    """``Σ_j κ'_nj m_nj``; and, if requested, the same sum weighted by the distances."""
    force = chunk_kappa_slope(kappa, gap, COMPLEX) * m
    total = tl.sum(force, 1)
    times_gap = total
    if with_gaps is not None:
        times_gap = tl.sum(force * gap, 1)
    return total, times_gap


@triton.jit
def add_chunk_gradients(
    slope, mid_dots, query_dots, d_inv_bandwidth, w, g, kappa, gap, inv_bandwidth,
    d_mid_scale_ptr, d_query_scale_ptr, d_inv_bandwidth_ptr, COMPLEX: tl.constexpr,
):  # fmt: skip
    """Adds what pairs within a chunk contribute to the gradients on the side of the queries, for a
    block of columns of W and g: (ranks, columns).

    The first four are sums by rank so far; those whose pointer is None are not needed.
    """
    m = transposed_product(w, g)
    if d_mid_scale_ptr is not None:
        mid_dots += tl.sum(kappa * m, 1)
    if d_query_scale_ptr is None:
        m = transposed_product(g, w, m)
    slope_here, force_gap = chunk_forces(kappa, gap, m, d_inv_bandwidth_ptr, COMPLEX)
    slope += slope_here
    if d_inv_bandwidth_ptr is not None:  # a pair is seen from both sides
        d_inv_bandwidth -= force_gap * (0.5 / gap_unit(inv_bandwidth, COMPLEX))
    if d_query_scale_ptr is not None:
        # Mᵀ is not added to M: its rows are needed separately, and M and the sum would not fit in
        # registers together.
        m = transposed_product(g, w)
        query_dots += tl.sum(kappa * m, 1)
        slope_here, force_gap = chunk_forces(kappa, gap, m, d_inv_bandwidth_ptr, COMPLEX)
        slope += slope_here
        if d_inv_bandwidth_ptr is not None:
            d_inv_bandwidth -= force_gap * (0.5 / gap_unit(inv_bandwidth, COMPLEX))
    return slope, mid_dots, query_dots, d_inv_bandwidth


@triton.jit(do_not_specialize=COUNTS)
def apply_kernel(
    # The rows that the plan is applied to, and the plan (:class:`Plan`).
    x_ptr,  # (B, KEYS, WIDTH): rows of the keys
    key_order_ptr,  # (B, L, N) int32: the token of each rank
    key_scale_ptr,  # (B, L, N) float32, or None: ones
    key_points_ptr,  # (B, L, N) float32
    query_order_ptr,  # (B, L, N) int32
    query_scale_ptr,  # (B, L, N) float32, or None: ones
    query_points_ptr,  # (B, L, N) float32
    mid_scale_ptr,  # (B, L, N) float32
    TABLE: tl.constexpr,
    inv_bandwidth_ptr,  # (B,) float32
    weight_ptr,  # (B, L) float32
    # States of x for κ_k and of W for κ_q, if there are several chunks.
    x_states_ptr,  # (B, L, CHUNKS, STATE_ROWS, WIDTH)
    w_states_ptr,  # (B, L, CHUNKS, STATE_ROWS, WIDTH)
    # Forward: the plan applied to x.
    out_ptr,  # (B, QUERIES, WIDTH) float32 if ATOMIC, else (B, L, QUERIES, WIDTH); or None
    # Backward: upstream rows of the queries and their states for κ_q, and gradients.
    g_ptr,  # (B, QUERIES, WIDTH), or None: none of what follows
    g_states_ptr,  # (B, L, CHUNKS, STATE_ROWS, WIDTH)
    d_points_ptr,  # (B, L, N) float32: of the queries' points
    d_query_scale_ptr,  # (B, L, N) float32, or None
    d_mid_scale_ptr,  # (B, L, N) float32, or None
    totals_ptr,  # (B, L, CHUNKS) float32, or None: ⟨g, plan x⟩ without the weight
    d_inv_bandwidth_ptr,  # (B, L, CHUNKS) float32, or None: what each chunk adds to it
    # Sizes of the problem and of chunks; `primitives.py` says what they are.
    N, KEYS, QUERIES, HEADS, L, CHUNKS, START, COUNT, D8, D: tl.constexpr, COMPLEX: tl.constexpr,
    STATE_ROWS: tl.constexpr, ATOMIC: tl.constexpr, EVEN: tl.constexpr, BLOCK_D: tl.constexpr,
    SPAN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Adds the plan of one slice, applied to the rows x of the keys, to the rows of the queries.

    With rows g also the gradients of ``weight · ⟨g, plan x⟩`` on the side of the queries.
    """
    WIDTH = D if D > 0 else D8 * 8
    pair, head, chunk = program_chunk(HEADS, L, START, COUNT)
    begin = chunk * SPAN
    n = begin + tl.arange(0, C)
    rank_offset = pair * N
    x_ptr += head * KEYS * WIDTH
    if key_scale_ptr is not None:
        key_scale_ptr += rank_offset
    if query_scale_ptr is not None:
        query_scale_ptr += rank_offset
    state_offset = pair * CHUNKS * STATE_ROWS * WIDTH
    if x_states_ptr is not None:
        x_states_ptr += state_offset
    if w_states_ptr is not None:
        w_states_ptr += state_offset
    if g_ptr is not None:
        g_ptr += head * QUERIES * WIDTH
    if g_states_ptr is not None:
        g_states_ptr += state_offset
    # All loads come first: the compiler does not move loads across tensor core products.
    k_tokens, k_points, k_first, k_last = load_side(
        key_points_ptr + rank_offset, key_order_ptr + rank_offset, begin, N, C, EVEN
    )
    q_tokens, q_points, q_first, q_last = load_side(
        query_points_ptr + rank_offset, query_order_ptr + rank_offset, begin, N, C, EVEN
    )
    mid_scale = load_ranks(mid_scale_ptr + rank_offset, n, N, EVEN)
    inv_bandwidth = tl.load(inv_bandwidth_ptr + head)
    weight = tl.load(weight_ptr + pair)
    # W and its states carry `weight`, unless totals are stored: these exclude it, so the results
    # are multiplied instead.
    w_weight, result_weight = weight, 1.0
    if totals_ptr is not None:
        w_weight, result_weight = 1.0, weight
    w_scale = mid_scale * w_weight
    fp32_rows: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    slope = tl.zeros((C,), tl.float32)
    mid_dots = tl.zeros((C,), tl.float32)
    query_dots = tl.zeros((C,), tl.float32)
    d_inv_bandwidth = tl.zeros((C,), tl.float32)
    for start in tl.range(0, WIDTH, BLOCK_D, num_stages=1):
        d = start + tl.arange(0, BLOCK_D)
        x = load_rows(x_ptr, key_scale_ptr, k_tokens, n, N, d, WIDTH, EVEN)
        x_states = load_states(x_states_ptr, chunk, d, WIDTH, STATE_ROWS)
        w_states = load_states(w_states_ptr, chunk, d, WIDTH, STATE_ROWS)
        if g_ptr is not None:
            g = to_wide_range(load_rows(g_ptr, query_scale_ptr, q_tokens, n, N, d, WIDTH, EVEN))
            g_states = load_states(g_states_ptr, chunk, d, WIDTH, STATE_ROWS)
        kappa, _, read = kappa_at(
            TABLE, k_points, k_first, k_last, inv_bandwidth, x, x_states, COMPLEX, STATE_ROWS
        )
        w = times_kappa(kappa, x, read, x_states, COMPLEX, STATE_ROWS)
        w = (w * w_scale[:, None]).to(to_wide_range(x).dtype)
        kappa, gap, read = kappa_at(
            TABLE, q_points, q_first, q_last, inv_bandwidth, x, x_states, COMPLEX, STATE_ROWS
        )
        if g_ptr is not None:
            slope, mid_dots, query_dots, d_inv_bandwidth = add_chunk_gradients(
                slope, mid_dots, query_dots, d_inv_bandwidth, w, g, kappa, gap, inv_bandwidth,
                d_mid_scale_ptr, d_query_scale_ptr, d_inv_bandwidth_ptr, COMPLEX,
            )  # fmt: skip
            if STATE_ROWS > 0:  # pairs with ranks of other chunks, through their states
                w_dots = times_states(w, g_states, COMPLEX)
                if d_mid_scale_ptr is not None:
                    mid_dots += tl.sum(read * w_dots, 1)
                g_dots = times_states(g, w_states, COMPLEX) * w_weight
                if d_query_scale_ptr is not None:
                    query_dots += tl.sum(read * g_dots, 1)
                slopes = state_coefficients(
                    TABLE, q_points, q_first, q_last, inv_bandwidth, "slope", COMPLEX, STATE_ROWS,
                    fp32_rows,
                )  # fmt: skip
                pull = slopes * (w_dots + g_dots)
                slope += tl.sum(pull, 1)
                if d_inv_bandwidth_ptr is not None:
                    prev_last = point_at(query_points_ptr + rank_offset, begin - 1, N)
                    distances = distances_in_chunk(q_points, prev_last, q_last, COMPLEX, STATE_ROWS)
                    d_inv_bandwidth += tl.sum(pull * distances, 1)
        if out_ptr is not None:
            y = times_kappa(kappa, w, read * w_weight, w_states, COMPLEX, STATE_ROWS)
            add_rows(
                out_ptr, query_scale_ptr, y * result_weight, q_tokens, pair, head, n, N, QUERIES, d,
                WIDTH, ATOMIC, EVEN,
            )  # fmt: skip
    if g_ptr is not None:
        inside = n < N
        tl.store(
            d_points_ptr + rank_offset + n, slope * (result_weight * inv_bandwidth), mask=inside
        )
        if d_query_scale_ptr is not None:
            query_scale = tl.load(query_scale_ptr + n, mask=inside, other=0.0)
            d_query_scale = safe_divide(query_dots * result_weight, query_scale)
            tl.store(d_query_scale_ptr + rank_offset + n, d_query_scale, mask=inside)
        if totals_ptr is not None:
            tl.store(totals_ptr + pair * CHUNKS + chunk, tl.sum(mid_dots, 0))
        if d_inv_bandwidth_ptr is not None:
            to_ptr = d_inv_bandwidth_ptr + pair * CHUNKS + chunk
            tl.store(to_ptr, tl.sum(d_inv_bandwidth, 0) * result_weight)
        if d_mid_scale_ptr is not None:
            d_mid_scale = safe_divide(mid_dots * result_weight, mid_scale)
            tl.store(d_mid_scale_ptr + rank_offset + n, d_mid_scale, mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def cross_kernel(
    x_ptr,  # (B, KEYS, WIDTH): rows of the keys
    key_order_ptr,  # (B, L, N) int32
    key_scale_ptr,  # (B, L, N) float32, or None: ones
    key_points_ptr,  # (B, L, N) float32
    g_ptr,  # (B, QUERIES, WIDTH): rows of the queries
    query_order_ptr,  # (B, L, N) int32
    query_scale_ptr,  # (B, L, N) float32, or None: ones
    query_points_ptr,  # (B, L, N) float32
    mid_scale_ptr,  # (B, L, N) float32
    TABLE: tl.constexpr,
    inv_bandwidth_ptr,  # (B,) float32
    x_states_ptr,  # (B, L, CHUNKS, STATE_ROWS, WIDTH): states of x for κ_k
    g_states_ptr,  # likewise, of g for κ_q
    totals_ptr,  # (B, L, CHUNKS) float32
    N, KEYS, QUERIES, HEADS, L, CHUNKS, START, COUNT, D8, D: tl.constexpr, COMPLEX: tl.constexpr,
    STATE_ROWS: tl.constexpr, EVEN: tl.constexpr, BLOCK_D: tl.constexpr, SPAN: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """``⟨g, plan x⟩ = Σ_n mid_scale_n (κ_k x)_n · (κ_q g)_n``, one partial sum per chunk."""
    WIDTH = D if D > 0 else D8 * 8
    pair, head, chunk = program_chunk(HEADS, L, START, COUNT)
    begin = chunk * SPAN
    n = begin + tl.arange(0, C)
    rank_offset = pair * N
    x_ptr += head * KEYS * WIDTH
    g_ptr += head * QUERIES * WIDTH
    if key_scale_ptr is not None:
        key_scale_ptr += rank_offset
    if query_scale_ptr is not None:
        query_scale_ptr += rank_offset
    state_offset = pair * CHUNKS * STATE_ROWS * WIDTH
    if x_states_ptr is not None:
        x_states_ptr += state_offset
    if g_states_ptr is not None:
        g_states_ptr += state_offset
    k_tokens, k_points, k_first, k_last = load_side(
        key_points_ptr + rank_offset, key_order_ptr + rank_offset, begin, N, C, EVEN
    )
    q_tokens, q_points, q_first, q_last = load_side(
        query_points_ptr + rank_offset, query_order_ptr + rank_offset, begin, N, C, EVEN
    )
    mid_scale = load_ranks(mid_scale_ptr + rank_offset, n, N, EVEN)
    inv_bandwidth = tl.load(inv_bandwidth_ptr + head)
    mid_dots = tl.zeros((C,), tl.float32)
    for start in tl.range(0, WIDTH, BLOCK_D, num_stages=1):
        d = start + tl.arange(0, BLOCK_D)
        x = load_rows(x_ptr, key_scale_ptr, k_tokens, n, N, d, WIDTH, EVEN)
        g = load_rows(g_ptr, query_scale_ptr, q_tokens, n, N, d, WIDTH, EVEN)
        x_states = load_states(x_states_ptr, chunk, d, WIDTH, STATE_ROWS)
        g_states = load_states(g_states_ptr, chunk, d, WIDTH, STATE_ROWS)
        kappa, _, read = kappa_at(
            TABLE, k_points, k_first, k_last, inv_bandwidth, x, x_states, COMPLEX, STATE_ROWS
        )
        y = times_kappa(kappa, x, read, x_states, COMPLEX, STATE_ROWS)
        kappa, _, read = kappa_at(
            TABLE, q_points, q_first, q_last, inv_bandwidth, x, x_states, COMPLEX, STATE_ROWS
        )
        z = times_kappa(kappa, g, read, g_states, COMPLEX, STATE_ROWS)
        mid_dots += tl.sum(y * z, 1)
    tl.store(totals_ptr + pair * CHUNKS + chunk, tl.sum(mid_dots * mid_scale, 0))


class PlanGradients(NamedTuple):
    """Buffers for the gradients of plans; None for what needs no gradient."""

    weight: Tensor | None  # (batch, L)
    inv_bandwidth: Tensor | None  # (batch, L), to be summed over slices
    query_points: Tensor  # (batch, L, ranks), as all that follows
    key_points: Tensor
    mid_scale: Tensor | None
    key_scale: Tensor | None
    query_scale: Tensor | None

    @staticmethod
    def new(
        plan: Plan, scales: bool, weight: bool, inv_bandwidth: bool
    ) -> tuple[Tensor, PlanGradients]:
        """All those by rank as one tensor, (3 or 5, batch, L, ranks), and the buffers in it; with
        others that are requested.

        In the order of the queries' points, the keys' points, if requested the `scales` of queries
        and of keys, and the scale between them.
        """
        like, shape = plan.key_points, plan.key_points.shape[:2]
        ranked = like.new_empty(5 if scales else 3, *like.shape)
        query_points, key_points, *of_sides, mid_scale = ranked.unbind(0)
        query_scale, key_scale = of_sides or (None, None)
        return ranked, PlanGradients(
            like.new_empty(shape) if weight else None,
            like.new_empty(shape) if inv_bandwidth else None,
            query_points, key_points, mid_scale, key_scale, query_scale,
        )  # fmt: skip

    def summed_inv_bandwidth(self) -> Tensor | None:
        """The gradient of the inverse bandwidth over all slices, (batch,)."""
        return None if self.inv_bandwidth is None else self.inv_bandwidth.sum(-1)

    def transposed(self) -> PlanGradients:
        """Those of :meth:`Plan.transposed` on the side of its queries, which are the keys."""
        return PlanGradients(
            None, None, self.key_points, self.query_points, None, self.query_scale, self.key_scale
        )

    def part(self, group: Group | None) -> PlanGradients:
        """The buffers of some slices of some heads."""
        if group is None:
            return self
        return PlanGradients(*(None if x is None else x[group] for x in self))  # type: ignore[arg-type]


class PlanKernels:
    """The plans of some slices on rows of a dtype: launches of the chunk kernels."""

    def __init__(self, plan: Plan, dtype: torch.dtype) -> None:
        self.plan = plan
        self.chunks = Chunks.of(plan.key_points.shape, plan.metric, dtype)

    def apply(self, x: Tensor, weight: Tensor, out: Tensor, ties: bool = False) -> States:
        """Adds ``Σ_l weight_l plan_l x`` to `out`, or to a row per slice if it has slices.

        Returns the states of x; with those of `ties` :meth:`grad` can go on from them.
        """
        states = chunk_states(self.chunks, self.plan, x, with_next=True, ties=ties)
        self._apply(self.plan, x, weight, states, out, ties=ties)
        return states

    def cross(self, g: Tensor, x: Tensor, out: Tensor) -> None:
        """``⟨g, plan_l x⟩`` of every slice to `out`, (batch, L)."""
        chunks, plan = self.chunks, self.plan
        x_states, _ = chunk_states(chunks, plan, x, with_next=False, ties=False)
        g_states, _ = chunk_states(chunks, plan.transposed(), g, with_next=False, ties=False)
        totals = chunks.by_chunk(out)
        for launch in _cross_launches(chunks, x.shape[-2], g.shape[-2], x.shape[-1]):
            launch(
                x, plan.key_order, plan.key_scale, plan.key_points, g, plan.query_order,
                plan.query_scale, plan.query_points, plan.mid_scale, plan.inv_bandwidth, x_states,
                g_states, totals,
            )  # fmt: skip
        if chunks.count > 1:
            torch.sum(totals, -1, out=out)

    def grad(
        self, g: Tensor, x: Tensor, weight: Tensor, dx: Tensor | None, dg: Tensor | None,
        found: PlanGradients, x_states: States | None = None,
    ) -> None:  # fmt: skip
        """Gradients of ``Σ_l weight_l ⟨g, plan_l x⟩``: adds to dx and dg, writes to `found`."""
        chunks, plan, transposed = self.chunks, self.plan, self.plan.transposed()
        if x_states is None:
            x_states = chunk_states(chunks, plan, x, with_next=True, ties=True)
        g_states = chunk_states(chunks, transposed, g, with_next=True, ties=True)
        totals = None if found.weight is None else chunks.by_chunk(found.weight)
        by_chunk = of_queries = of_keys = None
        if found.inv_bandwidth is not None:
            by_chunk = plan.mid_scale.new_empty(2, chunks.batch, chunks.slices, chunks.count)
            of_queries, of_keys = by_chunk.unbind(0)
        self._apply(
            plan, x, weight, x_states, dg, g, g_states[0],
            found._replace(weight=totals, inv_bandwidth=of_queries),
        )  # fmt: skip
        self._apply(
            transposed, g, weight, g_states, dx, x, x_states[0],
            found.transposed()._replace(inv_bandwidth=of_keys),
        )  # fmt: skip
        if totals is not None and chunks.count > 1:
            torch.sum(totals, -1, out=found.weight)
        if found.inv_bandwidth is not None and by_chunk is not None:
            torch.sum(by_chunk, (0, -1), out=found.inv_bandwidth)
            if chunks.count > 1:
                across = self._across_chunks(plan.query_points, x_states[1], g_states[0])
                across += self._across_chunks(plan.key_points, g_states[1], x_states[0])
                found.inv_bandwidth.addcmul_(weight, across)

    def _apply(
        self, plan: Plan, x: Tensor, weight: Tensor, states: States, out: Tensor | None,
        g: Tensor | None = None, g_states: Tensor | None = None,
        found: PlanGradients | None = None, ties: bool = True,
    ) -> None:  # fmt: skip
        """The plan from keys to queries, and with g its gradients on the side of the queries.

        `found` has buffers for these; by chunk for the weight and the inverse bandwidth.
        """
        d_points = d_query_scale = d_mid_scale = totals = d_inv_bandwidth = None
        if found is not None:
            d_points, d_query_scale = found.query_points, found.query_scale
            d_mid_scale, totals, d_inv_bandwidth = (
                found.mid_scale, found.weight, found.inv_bandwidth
            )  # fmt: skip
        name = "rows"
        if g is not None:
            few = (out is None or d_mid_scale is None) and d_query_scale is None
            name = "grad" if few else "all"
        query_rows = out if g is None else g
        assert query_rows is not None
        atomic = out is None or out.dim() == 3
        _, keys, width = x.shape
        for launch in _apply_launches(
            self.chunks, name, keys, query_rows.shape[-2], width, ties, atomic
        ):
            launch(
                x, plan.key_order, plan.key_scale, plan.key_points, plan.query_order,
                plan.query_scale, plan.query_points, plan.mid_scale, plan.inv_bandwidth, weight,
                *states, out, g, g_states, d_points, d_query_scale, d_mid_scale, totals,
                d_inv_bandwidth,
            )  # fmt: skip

    def _across_chunks(self, points: Tensor, x: Tensor | None, y: Tensor | None) -> Tensor:
        """The part of the gradient of `inv_bandwidth` from distances over whole chunks: (batch, L).

        For each chunk, this is the force between the ranks left and right of it, from the states of
        both operands, times the distance from the end of the previous chunk to its own end.
        """
        assert x is not None
        assert y is not None
        chunks = self.chunks
        first, last = points[..., :: chunks.span], points[..., chunks.span - 1 :: chunks.span]
        if chunks.ranks % chunks.span:
            last = torch.cat([last, points[..., -1:]], -1)
        prev_last = torch.cat([first[..., :1], last[..., :-1]], -1)
        scaled_length = ((last - first) * self.plan.inv_bandwidth.view(-1, 1, 1)).clamp(max=40)
        table = exponential_table(chunks.metric, chunks.fp32_rows)
        (x_left, x_right), (y_left, y_right) = self._directions(x), self._directions(y)
        products = (x_left * y_right + y_left * x_right).sum(-1)
        force = torch.zeros_like(scaled_length)
        for r, (weight, pole) in enumerate(zip(table.weights, table.poles, strict=True)):
            # Python numbers: a tensor would have to be copied to the device.
            term = torch.exp(scaled_length * -pole) * products[..., r] * (-weight * pole)
            force += term.real if chunks.complex else term
        return (force * (last - prev_last)).sum(-1)

    def _directions(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """States from the left and from the right, (batch, L, chunks, poles, width)."""
        if not self.chunks.complex:
            return states[..., :1, :].float(), states[..., 1:2, :].float()
        parts = states.unflatten(-2, (2, -1, 2))
        left, right = torch.complex(parts[..., 0, :], parts[..., 1, :]).unbind(-3)
        return left, right


@once
def _apply_launches(
    chunks: Chunks, name: str, keys: int, queries: int, width: int, ties: bool, atomic: bool
) -> list[Launch]:
    state_rows = chunks.state_rows(ties)
    return chunks.launches(
        apply_kernel, name, width, KEYS=keys, QUERIES=queries, STATE_ROWS=state_rows, ATOMIC=atomic
    )


@once
def _cross_launches(chunks: Chunks, keys: int, queries: int, width: int) -> list[Launch]:
    state_rows = chunks.state_rows(ties=False)
    return chunks.launches(
        cross_kernel, "cross", width, KEYS=keys, QUERIES=queries, STATE_ROWS=state_rows
    )


Kernels = PlanKernels | ShortPlanKernels | RecurrencePlanKernels


@once
def _grouped(
    shape: Shape, width: int, dtype: torch.dtype, metric: str, backward: bool,
    with_inv_bandwidth: bool, deterministic: bool, scratch: int, device_limits: Limits | None,
) -> tuple[type[Kernels], list[Group | None]]:  # fmt: skip
    """Which kernels apply plans of (batch, slices, ranks), and to which parts of them at once.

    Parts have scratch memory that fits: whole heads or some slices of one. None is all of them.
    """
    batch, slices, ranks = shape
    kind: type[Kernels] = PlanKernels
    if recurrences.fits(shape, width, metric, with_inv_bandwidth, deterministic, device_limits):
        kind, pairs = RecurrencePlanKernels, batch * slices  # there is no scratch memory
    elif short_plan.fits(shape, width, dtype, metric, with_inv_bandwidth):
        kind, pairs = ShortPlanKernels, batch * slices  # there is no scratch memory
    else:
        each = Chunks.of(shape, metric, dtype).scratch_bytes(width, backward)
        pairs = max(1, scratch // max(1, each))
    if batch * slices <= pairs:
        return kind, [None] if batch * slices else []
    heads, part = (pairs // slices, slices) if pairs >= slices else (1, pairs)
    return kind, [
        (slice(b, min(b + heads, batch)), slice(l, min(l + part, slices)))
        for b in range(0, batch, heads)
        for l in range(0, slices, part)
    ]


def _grouping(
    x: Tensor, shape: Shape, metric: str, backward: bool, with_inv_bandwidth: bool = False
) -> tuple[type[Kernels], list[Group | None]]:
    """:func:`_grouped` for rows x; `with_inv_bandwidth` says that its gradient is asked for."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return _grouped(
        shape, x.shape[-1], x.dtype, metric, backward, with_inv_bandwidth, deterministic,
        SCRATCH_BYTES[metric], recurrences.limits(x),
    )  # fmt: skip


def _groups(
    x: Tensor, plan: Plan, backward: bool = False, with_inv_bandwidth: bool = False
) -> Iterator[tuple[Group | None, Kernels]]:
    """Parts of (batch, slices) whose scratch fits, and their kernels."""
    shape = plan.key_points.shape
    kind, groups = _grouping(x, shape, plan.metric, backward, with_inv_bandwidth)
    for group in groups:
        yield group, kind(plan.part(group), x.dtype)


def _heads(x: Tensor, group: Group | None) -> Tensor:
    """The heads of a group."""
    return x if group is None else x[group[0]]


def _row_buffer(out: Tensor, group: Group | None, slices: int) -> Tensor:
    """The buffer for the rows of a group: `out` itself, or separate rows per slice if the order of
    additions must not matter (deterministic algorithms).
    """
    rows = _heads(out, group)
    if not torch.are_deterministic_algorithms_enabled():
        return rows
    count = slices if group is None else group[1].stop - group[1].start
    return out.new_zeros(len(rows), count, *out.shape[1:])


def _collect(out: Tensor | None, group: Group | None, rows: Tensor | None) -> None:
    """Adds the separate rows of a group's slices to `out`, if there are any."""
    if out is not None and rows is not None and rows.dim() == 4:
        here = _heads(out, group)
        here += rows.sum(1)


def apply_plans(
    value: Tensor, weight: Tensor, queries: int, plan: Plan, keep_states: bool
) -> tuple[Tensor, States]:
    """``Σ_l weight_l A_lᵀ B_l V``, (batch, queries, d), in the dtype of `value`.

    With `keep_states`, which requires that all slices form one group, also returns the states of V,
    so that the backward pass need not recompute them.
    """
    out = value.new_zeros(value.shape[0], queries, value.shape[-1], dtype=torch.float32)
    states: States = (None, None)
    for group, kernels in _groups(value, plan, backward=keep_states):
        rows = _row_buffer(out, group, weight.shape[1])
        weights = weight if group is None else weight[group]
        states = kernels.apply(_heads(value, group), weights, rows, ties=keep_states)
        _collect(out, group, rows)
    return out.to(value.dtype), states if keep_states else (None, None)


def keeps_states(value: Tensor, shape: Shape, metric: str) -> bool:
    """Whether states of plans of (batch, slices, ranks) are few enough to keep them."""
    kind, groups = _grouping(value, shape, metric, backward=True)
    return kind is PlanKernels and groups == [None]


def cross_plans(query: Tensor, key: Tensor, plan: Plan) -> Tensor:
    """``Σ_i q_i · (A_lᵀ B_l K)_i``: (batch, L)."""
    totals = plan.query_points.new_empty(plan.query_points.shape[:2])
    for group, kernels in _groups(key, plan):
        out = totals if group is None else totals[group]
        kernels.cross(_heads(query, group), _heads(key, group), out)
    return totals


def plan_gradients(
    plan: Plan, upstream: Tensor, weight: Tensor, value: Tensor, d_value: Tensor | None,
    d_upstream: Tensor | None, found: PlanGradients, states: States | None = None,
) -> None:  # fmt: skip
    """Gradients of ``Σ_l weight_l ⟨upstream, plan_l V⟩``: adds to `d_value` and `d_upstream`, which
    are float32, and writes to `found`.

    `states`, if given, are those of V that :func:`apply_plans` kept for all slices. They are
    recomputed if the slices now form several groups (deterministic mode was switched on after the
    forward). The gradients of `upstream` and of the weight exclude each other.
    """
    slices = weight.shape[1]
    learnt = found.inv_bandwidth is not None
    for group, kernels in _groups(value, plan, True, learnt):
        value_rows, upstream_rows = (
            None if x is None else _row_buffer(x, group, slices) for x in (d_value, d_upstream)
        )
        kernels.grad(
            _heads(upstream, group), _heads(value, group),
            weight if group is None else weight[group], value_rows, upstream_rows,
            found.part(group),
            states if group is None else None,
        )  # fmt: skip
        _collect(d_value, group, value_rows)
        _collect(d_upstream, group, upstream_rows)
