"""Soft plans applied to rows: ``weight · query_scale · κ_q (mid_scale · κ_k (key_scale · x))``.

The torch twins are :func:`espformer.ops.esp.linear.apply_plans` and
:func:`espformer.ops.esp.linear.slice_costs`.

Rank n of the keys is matched with rank n of the queries, so the program that computes a chunk of
``W = mid_scale · κ_k x`` also multiplies it by κ_q.

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

- :func:`apply_plans`: ``Σ_l weight_l A_lᵀ B_l V``;
- :func:`cross_plans`: ``Σ_i q_i · (A_lᵀ B_l K)_i`` for every slice, the part of the slice costs
  that is not a column;
- :func:`plan_gradients`: the backward of both.

Slices are processed in groups, so that their states stay below `SCRATCH_BYTES`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from espformer.ops.common.triton import Launch, Shape, once
from espformer.ops.esp.triton import short_plan
from espformer.ops.esp.triton.primitives import (
    COUNTS,
    add_rows,
    chunk_kappa_slope,
    distances_in_chunk,
    exponential_table,
    gap_unit,
    kappa_at,
    load_ranks,
    load_rows,
    load_side,
    load_states,
    point_at,
    program_chunk,
    safe_divide,
    state_coefficients,
    times_kappa,
    times_states,
    to_wide_range,
    transposed_product,
)
from espformer.ops.esp.triton.short_plan import ShortPlanKernels
from espformer.ops.esp.triton.states import Chunks, chunk_states

States = tuple[Tensor | None, Tensor | None]  # of x for κ_k, and of W for κ_q
Group = tuple[slice, slice]  # some heads, and some of their slices

# More would not fit in the L2 cache, fewer would need more launches.
SCRATCH_BYTES = {"absolute": 80 << 20, "squared": 160 << 20}


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
    ranks = pair * N
    x_ptr += head * KEYS * WIDTH
    if key_scale_ptr is not None:
        key_scale_ptr += ranks
    if query_scale_ptr is not None:
        query_scale_ptr += ranks
    states = pair * CHUNKS * STATE_ROWS * WIDTH
    if x_states_ptr is not None:
        x_states_ptr += states
    if w_states_ptr is not None:
        w_states_ptr += states
    if g_ptr is not None:
        g_ptr += head * QUERIES * WIDTH
    if g_states_ptr is not None:
        g_states_ptr += states
    # All loads come first: the compiler does not move loads across tensor core products.
    k_tokens, k_points, k_first, k_last = load_side(
        key_points_ptr + ranks, key_order_ptr + ranks, begin, N, C, EVEN
    )
    q_tokens, q_points, q_first, q_last = load_side(
        query_points_ptr + ranks, query_order_ptr + ranks, begin, N, C, EVEN
    )
    mid_scale = load_ranks(mid_scale_ptr + ranks, n, N, EVEN)
    inv_bandwidth = tl.load(inv_bandwidth_ptr + head)
    weight = tl.load(weight_ptr + pair)
    # W has the weight, and so do its states where they are read. Only totals are wanted without
    # it: then it multiplies results instead.
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
                    before = point_at(query_points_ptr + ranks, begin - 1, N)
                    distances = distances_in_chunk(q_points, before, q_last, COMPLEX, STATE_ROWS)
                    d_inv_bandwidth += tl.sum(pull * distances, 1)
        if out_ptr is not None:
            y = times_kappa(kappa, w, read * w_weight, w_states, COMPLEX, STATE_ROWS)
            add_rows(
                out_ptr, query_scale_ptr, y * result_weight, q_tokens, pair, head, n, N, QUERIES, d,
                WIDTH, ATOMIC, EVEN,
            )  # fmt: skip
    if g_ptr is not None:
        inside = n < N
        tl.store(d_points_ptr + ranks + n, slope * (result_weight * inv_bandwidth), mask=inside)
        if d_query_scale_ptr is not None:
            query_scale = tl.load(query_scale_ptr + n, mask=inside, other=0.0)
            d_query_scale = safe_divide(query_dots * result_weight, query_scale)
            tl.store(d_query_scale_ptr + ranks + n, d_query_scale, mask=inside)
        if totals_ptr is not None:
            tl.store(totals_ptr + pair * CHUNKS + chunk, tl.sum(mid_dots, 0))
        if d_inv_bandwidth_ptr is not None:
            to = d_inv_bandwidth_ptr + pair * CHUNKS + chunk
            tl.store(to, tl.sum(d_inv_bandwidth, 0) * result_weight)
        if d_mid_scale_ptr is not None:
            d_mid_scale = safe_divide(mid_dots * result_weight, mid_scale)
            tl.store(d_mid_scale_ptr + ranks + n, d_mid_scale, mask=inside)


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
    ranks = pair * N
    x_ptr += head * KEYS * WIDTH
    g_ptr += head * QUERIES * WIDTH
    if key_scale_ptr is not None:
        key_scale_ptr += ranks
    if query_scale_ptr is not None:
        query_scale_ptr += ranks
    states = pair * CHUNKS * STATE_ROWS * WIDTH
    if x_states_ptr is not None:
        x_states_ptr += states
    if g_states_ptr is not None:
        g_states_ptr += states
    k_tokens, k_points, k_first, k_last = load_side(
        key_points_ptr + ranks, key_order_ptr + ranks, begin, N, C, EVEN
    )
    q_tokens, q_points, q_first, q_last = load_side(
        query_points_ptr + ranks, query_order_ptr + ranks, begin, N, C, EVEN
    )
    mid_scale = load_ranks(mid_scale_ptr + ranks, n, N, EVEN)
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
    mid_scale: Tensor
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
        states = chunk_states(self.chunks, self.plan, x, through=True, ties=ties)
        self._apply(self.plan, x, weight, states, out, ties=ties)
        return states

    def cross(self, g: Tensor, x: Tensor, out: Tensor) -> None:
        """``⟨g, plan_l x⟩`` of every slice to `out`, (batch, L)."""
        chunks, plan = self.chunks, self.plan
        x_states, _ = chunk_states(chunks, plan, x, through=False, ties=False)
        g_states, _ = chunk_states(chunks, plan.transposed(), g, through=False, ties=False)
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
        self, g: Tensor, x: Tensor, weight: Tensor, dx: Tensor, dg: Tensor | None,
        found: PlanGradients, x_states: States | None = None,
    ) -> None:  # fmt: skip
        """Gradients of ``Σ_l weight_l ⟨g, plan_l x⟩``: adds to dx and dg, writes to `found`."""
        chunks, plan, transposed = self.chunks, self.plan, self.plan.transposed()
        if x_states is None:
            x_states = chunk_states(chunks, plan, x, through=True, ties=True)
        g_states = chunk_states(chunks, transposed, g, through=True, ties=True)
        totals = None if found.weight is None else chunks.by_chunk(found.weight)
        by_chunk = of_queries = of_keys = None
        if found.inv_bandwidth is not None:
            by_chunk = plan.mid_scale.new_empty(2, chunks.batch, chunks.slices, chunks.count)
            of_queries, of_keys = by_chunk.unbind(0)
        self._apply(
            plan, x, weight, x_states, dg, g, g_states[0], d_points=found.query_points,
            d_query_scale=found.query_scale, d_mid_scale=found.mid_scale, totals=totals,
            d_inv_bandwidth=of_queries,
        )  # fmt: skip
        self._apply(
            transposed, g, weight, g_states, dx, x, x_states[0], d_points=found.key_points,
            d_query_scale=found.key_scale, d_inv_bandwidth=of_keys,
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
        g: Tensor | None = None, g_states: Tensor | None = None, *,
        d_points: Tensor | None = None, d_query_scale: Tensor | None = None,
        d_mid_scale: Tensor | None = None, totals: Tensor | None = None,
        d_inv_bandwidth: Tensor | None = None, ties: bool = True,
    ) -> None:  # fmt: skip
        """The plan from keys to queries, and with g its gradients on the side of the queries."""
        name = "rows"
        if g is not None:
            few = (out is None or d_mid_scale is None) and d_query_scale is None
            name = "grad" if few else "all"
        rows = out if g is None else g
        assert rows is not None
        atomic = out is None or out.dim() == 3
        _, keys, width = x.shape
        for launch in _apply_launches(self.chunks, name, keys, rows.shape[-2], width, ties, atomic):
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
        before = torch.cat([first[..., :1], last[..., :-1]], -1)
        span = ((last - first) * self.plan.inv_bandwidth.view(-1, 1, 1)).clamp(max=40)
        table = exponential_table(chunks.metric, chunks.fp32_rows)
        (x_left, x_right), (y_left, y_right) = self._directions(x), self._directions(y)
        products = (x_left * y_right + y_left * x_right).sum(-1)
        force = torch.zeros_like(span)
        for r, (weight, pole) in enumerate(zip(table.weights, table.poles, strict=True)):
            # Python numbers: a tensor would have to be copied to the device.
            term = torch.exp(span * -pole) * products[..., r] * (-weight * pole)
            force += term.real if chunks.complex else term
        return (force * (last - before)).sum(-1)

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
    rows = chunks.state_rows(ties)
    return chunks.launches(
        apply_kernel, name, width, KEYS=keys, QUERIES=queries, STATE_ROWS=rows, ATOMIC=atomic
    )


@once
def _cross_launches(chunks: Chunks, keys: int, queries: int, width: int) -> list[Launch]:
    rows = chunks.state_rows(ties=False)
    return chunks.launches(
        cross_kernel, "cross", width, KEYS=keys, QUERIES=queries, STATE_ROWS=rows
    )


Kernels = PlanKernels | ShortPlanKernels


@once
def _grouped(
    shape: Shape, width: int, dtype: torch.dtype, metric: str, backward: bool,
    with_inv_bandwidth: bool, pieces: bool, deterministic: bool, scratch: int,
) -> tuple[type[Kernels], list[Group | None]]:  # fmt: skip
    """Which kernels apply plans of (batch, slices, ranks), and to which parts of them at once.

    Parts have scratch memory that fits: whole heads or some slices of one. None is all of them.
    """
    batch, slices, ranks = shape
    kind: type[Kernels] = PlanKernels
    if short_plan.fits(shape, width, dtype, metric, with_inv_bandwidth, pieces):
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
    x: Tensor, shape: Shape, metric: str, backward: bool, with_inv_bandwidth: bool = False,
    pieces: bool = False,
) -> tuple[type[Kernels], list[Group | None]]:  # fmt: skip
    """:func:`_grouped` for rows x.

    `with_inv_bandwidth` says that its gradient is asked for, `pieces` that ranks are matched piece
    to piece.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    return _grouped(
        shape, x.shape[-1], x.dtype, metric, backward, with_inv_bandwidth, pieces, deterministic,
        SCRATCH_BYTES[metric],
    )  # fmt: skip


def _groups(
    x: Tensor, queries: int, plan: Plan, backward: bool = False, with_inv_bandwidth: bool = False
) -> Iterator[tuple[Group | None, Kernels]]:
    """Parts of (batch, slices) whose scratch fits, and their kernels."""
    shape = plan.key_points.shape
    pieces = not x.shape[-2] == queries == shape[-1]
    kind, groups = _grouping(x, shape, plan.metric, backward, with_inv_bandwidth, pieces)
    for group in groups:
        yield group, kind(plan.part(group), x.dtype)


def _heads(x: Tensor, group: Group | None) -> Tensor:
    """The heads of a group."""
    return x if group is None else x[group[0]]


def _room(out: Tensor, group: Group | None, slices: int) -> Tensor:
    """The buffer for the rows of a group: `out` itself, or separate rows per slice if the order of
    additions must not matter (deterministic algorithms).
    """
    rows = _heads(out, group)
    if not torch.are_deterministic_algorithms_enabled():
        return rows
    count = slices if group is None else group[1].stop - group[1].start
    return out.new_zeros(len(rows), count, *out.shape[1:])


def _collect(out: Tensor, group: Group | None, rows: Tensor) -> None:
    """Adds the separate rows of a group's slices to `out`, if there are any."""
    if rows.dim() == 4:
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
    for group, kernels in _groups(value, queries, plan, backward=keep_states):
        rows = _room(out, group, weight.shape[1])
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
    for group, kernels in _groups(key, query.shape[-2], plan):
        out = totals if group is None else totals[group]
        kernels.cross(_heads(query, group), _heads(key, group), out)
    return totals


def plan_gradients(
    plan: Plan, upstream: Tensor, weight: Tensor, value: Tensor, d_value: Tensor,
    d_upstream: Tensor | None, found: PlanGradients, states: States | None = None,
) -> None:  # fmt: skip
    """Gradients of ``Σ_l weight_l ⟨upstream, plan_l V⟩``: adds to `d_value` and `d_upstream`, which
    are float32, and writes to `found`.

    `states` of V are those that :func:`apply_plans` kept. The gradients of `upstream` and of the
    weight exclude each other.
    """
    slices = weight.shape[1]
    queries, learnt = upstream.shape[-2], found.inv_bandwidth is not None
    for group, kernels in _groups(value, queries, plan, True, learnt):
        rows = _room(d_value, group, slices)
        upstream_rows = None if d_upstream is None else _room(d_upstream, group, slices)
        kernels.grad(
            _heads(upstream, group), _heads(value, group),
            weight if group is None else weight[group], rows, upstream_rows, found.part(group),
            states,
        )  # fmt: skip
        _collect(d_value, group, rows)
        if d_upstream is not None and upstream_rows is not None:
            _collect(d_upstream, group, upstream_rows)
