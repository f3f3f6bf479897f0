"""Soft plans on narrow rows: recurrences from rank to rank, one lane per (head, slice, column).

The torch twins are those of `soft_plan.py`, whose functions choose between its own kernels, these
ones (:func:`fits`) and, for shorter sequences, those of `short_plan.py`. A chunk's κ costs the same
however few columns it multiplies. If rows are narrow and sequences are many, recurrences from rank
to rank cost less than products with κ: with ``a_n = exp(-(s_n - s_{n-1}))``, in the absolute
metric,

    before_n = a_n (before_{n-1} + x_{n-1}),    behind_n = a_{n+1} (behind_{n+1} + x_{n+1}),
    (κx)_n = before_n + x_n + behind_n,         (κ'x)_n = behind_n - before_n.

A program scans the ranks of a few slices three times, with one lane per column:

    to the right:   before_n of x;                        keeps before_n + x_n
    to the left:    behind_n of x, so W_n = mid_scale · (κ_k x)_n is known,
                    and behind_n of W on the other side;  keeps W_n and its behind_n
    to the right:   before_n of W, so (κ_q W)_n is known, which is added to its token.

The backward pass scans x (from keys to queries) and g (from queries to keys) together. At every
rank both ``W = mid_scale · κ_k x`` and ``P = mid_scale · κ_q g`` are known, and

    slope of the queries' points:   W_n · (κ_q' g)_n + g_n · (κ_q' W)_n,
    gradient of `mid_scale`:        (κ_k x)_n · (κ_q g)_n,
    gradient of `query_scale`:      g_n · (κ_q W)_n  over `query_scale` of rank n,

and the mirror image for the keys. Equal points are excluded from κ' (``untied``): this sum does not
change while the point stays the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from espformer.ops.common.triton import Launch, Shape, ceil_div, once, power_of_2, width_arguments
from espformer.ops.esp.triton.primitives import COUNTS, INTERPRETED, LOG2E, exp2

if TYPE_CHECKING:
    from espformer.ops.esp.triton.soft_plan import Plan, PlanGradients

MOST_WIDTH = 16
LEAST_PAIRS = 4096  # (head, slice) pairs; with fewer the GPU would be idle
SCRATCH_BYTES = 1 << 29
# Ranks whose loads do not wait for each other, in the forward and in the backward, and registers
# of the backward: a few spill, and 16 warps share a multiprocessor instead of 12.
UNROLL, UNROLL_GRAD, REGISTERS_GRAD = 16, 8, 128
LANES = 32


@triton.jit
def step(sums, untied, row, gap, rate):
    """Sums at the next rank, at a distance ``gap``; `row` is the row of the rank that the scan
    leaves.

    All are (slices, columns); `untied` excludes ranks with the same point.
    """
    sums = exp2(tl.abs(gap) * -rate)[:, None] * (sums + row)
    return sums, tl.where((gap == 0)[:, None], untied, sums)


@triton.jit
def start_scan(G: tl.constexpr, BLOCK_D: tl.constexpr):
    """Initial values of a scan: sums, sums without ties, and the previous row, all zero."""
    shape: tl.constexpr = (G, BLOCK_D)
    return tl.zeros(shape, tl.float32), tl.zeros(shape, tl.float32), tl.zeros(shape, tl.float32)


@triton.jit
def load_rank(x_ptr, order_ptr, scale_ptr, points_ptr, at: tl.constexpr, inside, columns, WIDTH):
    """At a rank of every slice: its point, its token, its scale, and the token's row.

    All are zero past the end. Pointers are per slice, `x_ptr` also per column. The rank is the
    offset `at`, a compile-time constant, which costs no instruction.
    """
    point = tl.load(points_ptr + at, mask=inside, other=0.0)
    token = tl.load(order_ptr + at, mask=inside, other=0)
    row = tl.load(x_ptr + token[:, None] * WIDTH, mask=inside & columns, other=0.0)
    scale = tl.full(token.shape, 1.0, tl.float32)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + at, mask=inside, other=0.0)
    return point, token, scale, row.to(tl.float32)


@triton.jit
def store_row(to, row, mask):
    """Stores float32 rows in the dtype of the scratch memory."""
    tl.store(to, row.to(to.dtype.element_ty), mask=mask)


@triton.jit
def load_row(there, mask):
    """Rows of the scratch memory in float32."""
    return tl.load(there, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def program_pairs(PAIRS, L, N, G: tl.constexpr):
    """The (head, slice) pairs of this program, which of them exist, their heads and first ranks."""
    pair = tl.program_id(0).to(tl.int64) * G + tl.arange(0, G)
    there = pair < PAIRS
    pair = tl.minimum(pair, PAIRS - 1)
    return pair, there, pair // L, pair * N


@triton.jit
def store_sums_before(
    x_ptr, order_ptr, scale_ptr, points_ptr, out_ptr, N, there, columns, rate, WIDTH,
    G: tl.constexpr, BLOCK_D: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The first scan: writes ``before_n + x_n`` of every rank to `out`."""
    before, _, row = start_scan(G, BLOCK_D)
    last = tl.load(points_ptr)
    for start in range(0, N, UNROLL):
        found = ()
        for u in tl.static_range(UNROLL):
            found = found + (
                load_rank(
                    x_ptr, order_ptr, scale_ptr, points_ptr, u, start + u < N, columns, WIDTH
                ),
            )
        for u in tl.static_range(UNROLL):
            point, _, scale, x = found[u]
            before, _ = step(before, before, row, point - last, rate)
            row = x * scale[:, None]
            last = point
            store_row(out_ptr + u * WIDTH, before + row, there & columns & (start + u < N))
        points_ptr += UNROLL
        order_ptr += UNROLL
        if scale_ptr is not None:
            scale_ptr += UNROLL
        out_ptr += UNROLL * WIDTH


@triton.jit(do_not_specialize=(*COUNTS, "PAIRS"))
def narrow_apply_kernel(
    x_ptr,  # (B, KEYS, WIDTH): rows of the keys
    key_order_ptr,  # (B, L, N) int32: the token of each rank
    key_scale_ptr,  # (B, L, N) float32, or None: ones
    key_points_ptr,  # (B, L, N) float32
    query_order_ptr,  # (B, L, N) int32
    query_scale_ptr,  # (B, L, N) float32, or None: ones
    query_points_ptr,  # (B, L, N) float32
    mid_scale_ptr,  # (B, L, N) float32
    inv_bandwidth_ptr,  # (B,) float32
    weight_ptr,  # (B, L) float32
    w_ptr,  # (B, L, N, WIDTH): room for W
    behind_ptr,  # (B, L, N, WIDTH): room for its sums from behind
    out_ptr,  # (B, QUERIES, WIDTH) float32
    PAIRS, N, KEYS, QUERIES, L, D8, D: tl.constexpr, G: tl.constexpr, BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Adds the plans of G slices, applied to the rows x of the keys, to the rows of the queries."""
    WIDTH = D if D > 0 else D8 * 8
    pair, there, head, ranks = program_pairs(PAIRS, L, N, G)
    d = tl.arange(0, BLOCK_D)[None, :]
    columns = d < WIDTH
    there = there[:, None]
    rate = tl.load(inv_bandwidth_ptr + head) * LOG2E
    weight = tl.load(weight_ptr + pair)
    x_ptr = x_ptr + ((head * KEYS * WIDTH)[:, None] + d)
    out_ptr = out_ptr + ((head * QUERIES * WIDTH)[:, None] + d)
    w_ptr = w_ptr + ((ranks * WIDTH)[:, None] + d)
    behind_ptr = behind_ptr + ((ranks * WIDTH)[:, None] + d)
    key_points_ptr = key_points_ptr + ranks
    key_order_ptr = key_order_ptr + ranks
    if key_scale_ptr is not None:
        key_scale_ptr += ranks
    query_points_ptr = query_points_ptr + ranks
    store_sums_before(
        x_ptr, key_order_ptr, key_scale_ptr, key_points_ptr, w_ptr, N, there, columns, rate, WIDTH,
        G, BLOCK_D, UNROLL,
    )  # fmt: skip
    tl.debug_barrier()

    x_behind, _, x_row = start_scan(G, BLOCK_D)
    w_behind, _, w_row = start_scan(G, BLOCK_D)
    k_last = tl.load(key_points_ptr + (N - 1))
    q_last = tl.load(query_points_ptr + (N - 1))
    for block in range(tl.cdiv(N, UNROLL)):
        start = (tl.cdiv(N, UNROLL) - 1 - block) * UNROLL
        w_here = w_ptr + start * WIDTH
        behind_here = behind_ptr + start * WIDTH
        points_here = query_points_ptr + start
        mid_scale_here = mid_scale_ptr + ranks + start
        scale_here = None
        if key_scale_ptr is not None:
            scale_here = key_scale_ptr + start
        found = ()
        for u in tl.static_range(UNROLL - 1, -1, -1):
            inside = start + u < N
            key = load_rank(
                x_ptr, key_order_ptr + start, scale_here, key_points_ptr + start, u, inside,
                columns, WIDTH,
            )  # fmt: skip
            q_point = tl.load(points_here + u, mask=inside, other=0.0)
            mid_scale = tl.load(mid_scale_here + u, mask=inside, other=0.0)
            x_sums = load_row(w_here + u * WIDTH, inside & columns)
            found = found + ((key, q_point, mid_scale, x_sums),)
        for u in tl.static_range(UNROLL - 1, -1, -1):
            key, q_point, mid_scale, x_sums = found[UNROLL - 1 - u]
            k_point, _, scale, x = key
            x_behind, _ = step(x_behind, x_behind, x_row, k_last - k_point, rate)
            w_behind, _ = step(w_behind, w_behind, w_row, q_last - q_point, rate)
            x_row = x * scale[:, None]
            w_row = (x_sums + x_behind) * mid_scale[:, None]
            k_last = k_point
            q_last = q_point
            mask = there & columns & (start + u < N)
            store_row(w_here + u * WIDTH, w_row, mask)
            store_row(behind_here + u * WIDTH, w_behind, mask)
    tl.debug_barrier()

    w_before, _, w_row = start_scan(G, BLOCK_D)
    q_last = tl.load(query_points_ptr)
    for start in range(0, N, UNROLL):
        points_here = query_points_ptr + start
        order_here = query_order_ptr + ranks + start
        w_here = w_ptr + start * WIDTH
        behind_here = behind_ptr + start * WIDTH
        found = ()
        for u in tl.static_range(UNROLL):
            inside = start + u < N
            q_point = tl.load(points_here + u, mask=inside, other=0.0)
            token = tl.load(order_here + u, mask=inside, other=0)
            scale = weight
            if query_scale_ptr is not None:
                scale *= tl.load(query_scale_ptr + ranks + (start + u), mask=inside, other=0.0)
            w = load_row(w_here + u * WIDTH, inside & columns)
            behind = load_row(behind_here + u * WIDTH, inside & columns)
            found = found + ((q_point, token, scale, w, behind),)
        for u in tl.static_range(UNROLL):
            q_point, token, scale, w, behind = found[u]
            w_before, _ = step(w_before, w_before, w_row, q_point - q_last, rate)
            w_row = w
            q_last = q_point
            y = (w_before + w + behind) * scale[:, None]
            mask = there & columns & (start + u < N)
            tl.atomic_add(out_ptr + token[:, None] * WIDTH, y, mask=mask, sem="relaxed")


@triton.jit(do_not_specialize=(*COUNTS, "PAIRS"))
def narrow_grad_kernel(
    x_ptr,  # (B, KEYS, WIDTH): rows of the keys
    key_order_ptr,  # (B, L, N) int32: the token of each rank
    key_scale_ptr,  # (B, L, N) float32, or None: ones
    key_points_ptr,  # (B, L, N) float32
    g_ptr,  # (B, QUERIES, WIDTH): rows of the queries
    query_order_ptr,  # (B, L, N) int32
    query_scale_ptr,  # (B, L, N) float32, or None: ones
    query_points_ptr,  # (B, L, N) float32
    mid_scale_ptr,  # (B, L, N) float32
    inv_bandwidth_ptr,  # (B,) float32
    weight_ptr,  # (B, L) float32, or None: only totals are asked for
    w_ptr,  # (B, L, N, WIDTH): room for W
    p_ptr,  # (B, L, N, WIDTH): room for P
    w_behind_ptr,  # (B, L, N, WIDTH): room for sums of W from behind; None without a weight
    p_behind_ptr,  # (B, L, N, WIDTH): likewise, of P
    dx_ptr,  # (B, KEYS, WIDTH) float32; None without a weight
    dg_ptr,  # (B, QUERIES, WIDTH) float32, or None
    d_key_points_ptr,  # (B, L, N) float32; None without a weight, as all that follow
    d_query_points_ptr,  # (B, L, N) float32
    d_mid_scale_ptr,  # (B, L, N) float32
    d_key_scale_ptr,  # (B, L, N) float32, or None
    d_query_scale_ptr,  # (B, L, N) float32, or None
    totals_ptr,  # (B, L) float32, or None: ⟨g, plan x⟩ without the weight
    PAIRS, N, KEYS, QUERIES, L, D8, D: tl.constexpr, G: tl.constexpr, BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """``⟨g, plan x⟩`` of G slices and, with a weight, all gradients of ``weight · ⟨g, plan x⟩``."""
    WIDTH = D if D > 0 else D8 * 8
    pair, there_pair, head, ranks = program_pairs(PAIRS, L, N, G)
    d = tl.arange(0, BLOCK_D)[None, :]
    columns = d < WIDTH
    there = there_pair[:, None]
    inv_bandwidth = tl.load(inv_bandwidth_ptr + head)
    rate = inv_bandwidth * LOG2E
    x_ptr = x_ptr + ((head * KEYS * WIDTH)[:, None] + d)
    g_ptr = g_ptr + ((head * QUERIES * WIDTH)[:, None] + d)
    w_ptr = w_ptr + ((ranks * WIDTH)[:, None] + d)
    p_ptr = p_ptr + ((ranks * WIDTH)[:, None] + d)
    key_points_ptr = key_points_ptr + ranks
    key_order_ptr = key_order_ptr + ranks
    if key_scale_ptr is not None:
        key_scale_ptr += ranks
    query_points_ptr = query_points_ptr + ranks
    query_order_ptr = query_order_ptr + ranks
    if query_scale_ptr is not None:
        query_scale_ptr += ranks
    weight = tl.full((G,), 1.0, tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + pair)
        w_behind_ptr = w_behind_ptr + ((ranks * WIDTH)[:, None] + d)
        p_behind_ptr = p_behind_ptr + ((ranks * WIDTH)[:, None] + d)
        d_key_points_ptr = d_key_points_ptr + ranks
        d_query_points_ptr = d_query_points_ptr + ranks
        dx_ptr = dx_ptr + ((head * KEYS * WIDTH)[:, None] + d)
        if dg_ptr is not None:
            dg_ptr = dg_ptr + ((head * QUERIES * WIDTH)[:, None] + d)
    store_sums_before(
        x_ptr, key_order_ptr, key_scale_ptr, key_points_ptr, w_ptr, N, there, columns, rate, WIDTH,
        G, BLOCK_D, UNROLL,
    )  # fmt: skip
    store_sums_before(
        g_ptr, query_order_ptr, query_scale_ptr, query_points_ptr, p_ptr, N, there, columns, rate,
        WIDTH, G, BLOCK_D, UNROLL,
    )  # fmt: skip
    tl.debug_barrier()

    x_sums, x_untied, x = start_scan(G, BLOCK_D)
    g_sums, g_untied, g = start_scan(G, BLOCK_D)
    w_sums, w_untied, w = start_scan(G, BLOCK_D)
    p_sums, p_untied, p = start_scan(G, BLOCK_D)
    total = tl.zeros((G,), tl.float32)
    k_last = tl.load(key_points_ptr + (N - 1))
    q_last = tl.load(query_points_ptr + (N - 1))
    for block in range(tl.cdiv(N, UNROLL)):
        start = (tl.cdiv(N, UNROLL) - 1 - block) * UNROLL
        w_here = w_ptr + start * WIDTH
        p_here = p_ptr + start * WIDTH
        mid_scale_here = mid_scale_ptr + ranks + start
        k_scale_here = None
        if key_scale_ptr is not None:
            k_scale_here = key_scale_ptr + start
        q_scale_here = None
        if query_scale_ptr is not None:
            q_scale_here = query_scale_ptr + start
        found = ()
        for u in tl.static_range(UNROLL - 1, -1, -1):
            inside = start + u < N
            key = load_rank(
                x_ptr, key_order_ptr + start, k_scale_here, key_points_ptr + start, u, inside,
                columns, WIDTH,
            )  # fmt: skip
            query = load_rank(
                g_ptr, query_order_ptr + start, q_scale_here, query_points_ptr + start, u, inside,
                columns, WIDTH,
            )  # fmt: skip
            mid_scale = tl.load(mid_scale_here + u, mask=inside, other=0.0)
            y_part = load_row(w_here + u * WIDTH, inside & columns)
            z_part = load_row(p_here + u * WIDTH, inside & columns)
            found = found + ((key, query, mid_scale, y_part, z_part),)
        for u in tl.static_range(UNROLL - 1, -1, -1):
            key, query, mid_scale, y_part, z_part = found[UNROLL - 1 - u]
            k_point, _, k_scale, x_row = key
            q_point, _, q_scale, g_row = query
            k_gap = k_last - k_point
            q_gap = q_last - q_point
            x_sums, x_untied = step(x_sums, x_untied, x, k_gap, rate)
            g_sums, g_untied = step(g_sums, g_untied, g, q_gap, rate)
            k_last = k_point
            q_last = q_point
            y = y_part + x_sums
            z = z_part + g_sums
            dots = tl.sum(y * z, 1)
            total += dots * mid_scale
            x = x_row * k_scale[:, None]
            g = g_row * q_scale[:, None]
            if weight_ptr is not None:
                w_sums, w_untied = step(w_sums, w_untied, w, q_gap, rate)
                p_sums, p_untied = step(p_sums, p_untied, p, k_gap, rate)
                w = y * mid_scale[:, None]
                p = z * mid_scale[:, None]
                inside = there_pair & (start + u < N)
                mask = inside[:, None] & columns
                store_row(w_here + u * WIDTH, w, mask)
                store_row(p_here + u * WIDTH, p, mask)
                store_row(w_behind_ptr + start * WIDTH + u * WIDTH, w_sums, mask)
                store_row(p_behind_ptr + start * WIDTH + u * WIDTH, p_sums, mask)
                d_mid_scale = tl.where(mid_scale == 0, 0.0, dots * weight)
                tl.store(d_mid_scale_ptr + ranks + start + u, d_mid_scale, mask=inside)
                q_pull = tl.sum(w * g_untied + g * w_untied, 1)
                k_pull = tl.sum(p * x_untied + x * p_untied, 1)
                tl.store(d_query_points_ptr + start + u, q_pull, mask=inside)
                tl.store(d_key_points_ptr + start + u, k_pull, mask=inside)
    if totals_ptr is not None:
        tl.store(totals_ptr + pair, total, mask=there_pair)

    if weight_ptr is not None:
        tl.debug_barrier()
        x_sums, x_untied, x = start_scan(G, BLOCK_D)
        g_sums, g_untied, g = start_scan(G, BLOCK_D)
        w_sums, w_untied, w = start_scan(G, BLOCK_D)
        p_sums, p_untied, p = start_scan(G, BLOCK_D)
        k_last = tl.load(key_points_ptr)
        q_last = tl.load(query_points_ptr)
        force_unit = weight * inv_bandwidth
        for start in range(0, N, UNROLL):
            k_scale_here = None
            if key_scale_ptr is not None:
                k_scale_here = key_scale_ptr + start
            q_scale_here = None
            if query_scale_ptr is not None:
                q_scale_here = query_scale_ptr + start
            found = ()
            for u in tl.static_range(UNROLL):
                inside = start + u < N
                mask = inside & columns
                key = load_rank(
                    x_ptr, key_order_ptr + start, k_scale_here, key_points_ptr + start, u, inside,
                    columns, WIDTH,
                )  # fmt: skip
                query = load_rank(
                    g_ptr, query_order_ptr + start, q_scale_here, query_points_ptr + start, u,
                    inside, columns, WIDTH,
                )  # fmt: skip
                w_row = load_row(w_ptr + start * WIDTH + u * WIDTH, mask)
                p_row = load_row(p_ptr + start * WIDTH + u * WIDTH, mask)
                w_behind = load_row(w_behind_ptr + start * WIDTH + u * WIDTH, mask)
                p_behind = load_row(p_behind_ptr + start * WIDTH + u * WIDTH, mask)
                q_pull = tl.load(d_query_points_ptr + start + u, mask=inside, other=0.0)
                k_pull = tl.load(d_key_points_ptr + start + u, mask=inside, other=0.0)
                rows = (w_row, p_row, w_behind, p_behind)
                found = found + ((key, query, rows, q_pull, k_pull),)
            for u in tl.static_range(UNROLL):
                key, query, rows, q_pull, k_pull = found[u]
                k_point, k_token, k_scale, x_row = key
                q_point, q_token, q_scale, g_row = query
                w_row, p_row, w_behind, p_behind = rows
                k_gap = k_point - k_last
                q_gap = q_point - q_last
                k_last = k_point
                q_last = q_point
                x_sums, x_untied = step(x_sums, x_untied, x, k_gap, rate)
                g_sums, g_untied = step(g_sums, g_untied, g, q_gap, rate)
                w_sums, w_untied = step(w_sums, w_untied, w, q_gap, rate)
                p_sums, p_untied = step(p_sums, p_untied, p, k_gap, rate)
                x = x_row * k_scale[:, None]
                g = g_row * q_scale[:, None]
                w = w_row
                p = p_row
                inside = there_pair & (start + u < N)
                mask = inside[:, None] & columns
                q_pull -= tl.sum(w * g_untied + g * w_untied, 1)
                k_pull -= tl.sum(p * x_untied + x * p_untied, 1)
                tl.store(d_query_points_ptr + start + u, q_pull * force_unit, mask=inside)
                tl.store(d_key_points_ptr + start + u, k_pull * force_unit, mask=inside)
                kp = p_sums + p + p_behind
                if d_key_scale_ptr is not None:
                    d_scale = tl.where(k_scale == 0, 0.0, tl.sum(x_row * kp, 1) * weight)
                    tl.store(d_key_scale_ptr + ranks + (start + u), d_scale, mask=inside)
                dx = kp * (k_scale * weight)[:, None]
                tl.atomic_add(dx_ptr + k_token[:, None] * WIDTH, dx, mask=mask, sem="relaxed")
                kw = w_sums + w + w_behind
                if d_query_scale_ptr is not None:
                    d_scale = tl.where(q_scale == 0, 0.0, tl.sum(g_row * kw, 1) * weight)
                    tl.store(d_query_scale_ptr + ranks + (start + u), d_scale, mask=inside)
                if dg_ptr is not None:
                    dg = kw * (q_scale * weight)[:, None]
                    tl.atomic_add(dg_ptr + q_token[:, None] * WIDTH, dg, mask=mask, sem="relaxed")


def fits(
    shape: Shape, width: int, dtype: torch.dtype, metric: str,
    with_inv_bandwidth: bool = False,
) -> bool:  # fmt: skip
    """Whether to use recurrences: for narrow 16-bit rows, many slices and one real pole.

    The shape is that of points, (batch, slices, ranks). Errors of single steps add up, which would
    matter for float32 rows. The gradient of the temperature and deterministic sums use chunks.
    """
    batch, slices, ranks = shape
    return (
        metric == "absolute"
        and width <= MOST_WIDTH
        and dtype.itemsize == 2
        and min(batch * slices, pairs_at_once(ranks, width, dtype, backward=True)) >= LEAST_PAIRS
        and not with_inv_bandwidth
        and not torch.are_deterministic_algorithms_enabled()
    )


def pairs_at_once(ranks: int, width: int, dtype: torch.dtype, backward: bool) -> int:
    """The number of (head, slice) pairs that fit in the scratch memory, with two or four arrays of
    rows each.
    """
    each = (4 if backward else 2) * ranks * width * dtype.itemsize
    return max(1, SCRATCH_BYTES // max(1, each))


@once
def _launch(
    gradients: bool, batch: int, slices: int, ranks: int, keys: int, queries: int, width: int
) -> Launch:
    """Launches a kernel; a program processes as many slices as fit in its lanes."""
    block_d = power_of_2(width)
    together = LANES // block_d
    pairs = batch * slices
    kernel: Any = narrow_apply_kernel
    tuned: dict[str, int] = {"UNROLL": UNROLL}
    if gradients:
        kernel, tuned = narrow_grad_kernel, {"UNROLL": UNROLL_GRAD, "maxnreg": REGISTERS_GRAD}
    return Launch(
        kernel, (ceil_div(pairs, together),), PAIRS=pairs, N=ranks, KEYS=keys, QUERIES=queries,
        L=slices, G=together, BLOCK_D=block_d, num_warps=1, **tuned, **width_arguments(width),
    )  # fmt: skip


class NarrowPlanKernels:
    """The plans of some slices on narrow rows of a dtype: launches of the recurrences."""

    def __init__(self, plan: Plan, dtype: torch.dtype) -> None:
        self.plan, self.dtype = plan, dtype
        self.batch, self.slices, self.ranks = plan.key_points.shape

    def apply(
        self, x: Tensor, weight: Tensor, out: Tensor, ties: bool = False
    ) -> tuple[None, None]:
        """Adds ``Σ_l weight_l plan_l x`` to `out`. There are no states, and ties need none."""
        plan = self.plan
        self._launch(
            False, x, out,
            x, plan.key_order, plan.key_scale, plan.key_points, plan.query_order, plan.query_scale,
            plan.query_points, plan.mid_scale, plan.inv_bandwidth, weight, *self._scratch(x, 2),
            out,
        )  # fmt: skip
        return None, None

    def cross(self, g: Tensor, x: Tensor, out: Tensor) -> None:
        """``⟨g, plan_l x⟩`` of every slice to `out`, (batch, L)."""
        self._grad(g, x, None, self._scratch(x, 2), *(None,) * 7, out)

    def grad(
        self, g: Tensor, x: Tensor, weight: Tensor, dx: Tensor, dg: Tensor | None,
        found: PlanGradients, x_states: object = None,
    ) -> None:  # fmt: skip
        """Gradients of ``Σ_l weight_l ⟨g, plan_l x⟩``: adds to dx and dg, writes to `found`."""
        self._grad(
            g, x, weight, self._scratch(x, 4), dx, dg, found.key_points, found.query_points,
            found.mid_scale, found.key_scale, found.query_scale, found.weight,
        )  # fmt: skip

    def _grad(
        self, g: Tensor, x: Tensor, weight: Tensor | None, scratch: list[Tensor],
        *found: Tensor | None,
    ) -> None:  # fmt: skip
        plan = self.plan
        rooms = (*scratch, None, None)[:4]
        self._launch(
            True, x, g,
            x, plan.key_order, plan.key_scale, plan.key_points, g, plan.query_order,
            plan.query_scale, plan.query_points, plan.mid_scale, plan.inv_bandwidth, weight,
            *rooms, *found,
        )  # fmt: skip

    def _scratch(self, x: Tensor, arrays: int) -> list[Tensor]:
        """A buffer for rows by rank, in a type with the range of float32, since they are sums over
        many tokens.
        """
        dtype = self.dtype
        if dtype == torch.float16:
            dtype = torch.float32 if INTERPRETED else torch.bfloat16
        shape = (self.batch, self.slices, self.ranks, x.shape[-1])
        return [torch.empty(shape, device=x.device, dtype=dtype) for _ in range(arrays)]

    def _launch(self, gradients: bool, x: Tensor, g: Tensor, *tensors: Tensor | None) -> None:
        shape = self.batch, self.slices, self.ranks
        _launch(gradients, *shape, x.shape[-2], g.shape[-2], x.shape[-1])(*tensors)
