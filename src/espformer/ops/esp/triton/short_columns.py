"""Products of κ with one column, and their slopes, for short sequences.

The torch twin is :class:`espformer.ops.esp.linear.SoftMixing`. The kernels of `normalise.py` and
`costs.py` scan a column once for every pole and direction. Those here take the same arguments, and
the launchers of those choose between them. This file reads from top to bottom:

**In registers** (:func:`fits_registers`): many short sequences in the absolute metric. A column is
a row of one number, so the kernel is that of `short_plan.py` for BLOCK_D = 1: a warp holds the
whole sequence, one group of neighbouring ranks per lane. Errors of single steps add up, so it
normalises for 16-bit rows alone.

**Dense** (:func:`is_dense`): short sequences in the squared metric. Complex poles take many
instructions, and for a few hundred tokens computing κ itself takes fewer. So a program computes κ
of one slice, block by block, and sums along its rows,

    (κx)_n = Σ_j κ_nj x_j,        slope_n = Σ_j κ'_nj (u_n x_j + x_n u_j).

Points are sorted, so only blocks near the diagonal are visited (:func:`near_blocks`); at low
temperatures these are few. The absolute metric has one real pole, for which a scan is cheaper.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from espformer.ops.common.triton import Shape, ceil_div, power_of_2
from espformer.ops.esp.triton import short_plan
from espformer.ops.esp.triton.primitives import (
    LOG2E,
    column_operands,
    exp2_minus_square,
    gap_unit,
    load_squares,
    of_other_side,
    one_over,
)
from espformer.ops.esp.triton.short_plan import (
    backwards,
    group_decays,
    group_points,
    group_times_kappa,
    rank_decays,
    scan_pair,
)

LEAST_PAIRS = 1024  # (head, slice) pairs; with fewer, four warps for each may be faster
SLOPE = tl.constexpr(1.6651092223153954)  # κ' is gap · κ times 2 / √(log2 e)

REACH = tl.constexpr(4.898979485566356)  # 2^(-x²) is below 2^-24 from here on, and counts as zero

MOST_RANKS = 256  # of dense columns
BLOCK_M, BLOCK_N = 32, 16


@triton.jit(do_not_specialize=("N", "L", "HEADS"))
def short_column_kernel(
    x_ptr,  # (B, L, N) float32, or None: ones
    upstream_ptr,  # (B, L, N) float32, for a slope; or None
    d_mid_ptr,  # (HEADS, L, N) float32: of the product of two sides' scales; or None
    points_ptr,  # (B, L, N) float32
    lengths_ptr,  # (HEADS,) int32, or None: all N
    inv_bandwidth_ptr,  # (HEADS,) float32
    y_ptr,  # (B, L, N) float32: κx, or scales, which are read for their slope; or None
    slope_ptr,  # (B, L, N) float32, or None
    N, L, HEADS, R: tl.constexpr, G: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Results of :func:`espformer.ops.esp.triton.normalise.column_kernel`, for one slice."""
    pair = tl.program_id(0).to(tl.int64)
    head = pair // L % HEADS
    length = N
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + head)
    other_ptr = y_ptr
    if d_mid_ptr is not None:
        other_ptr = of_other_side(y_ptr, pair, N, HEADS * L)
        d_mid_ptr += pair % (HEADS * L) * N
    if x_ptr is not None:
        x_ptr += pair * N
    if y_ptr is not None:
        y_ptr += pair * N
    if upstream_ptr is not None:
        upstream_ptr += pair * N
    points_ptr += pair * N
    inv_bandwidth = tl.load(inv_bandwidth_ptr + head)
    rate = inv_bandwidth * LOG2E
    points = group_points(points_ptr, N, R, G)
    u, x = (), ()
    for r in tl.static_range(R):
        n = tl.arange(0, G) * R + r
        u_here, x_here = column_operands(
            x_ptr, upstream_ptr, d_mid_ptr, other_ptr, y_ptr, n, n < N, length
        )
        u = u + (u_here[:, None],)
        x = x + (x_here[:, None],)
    decays = rank_decays(points, rate, R)
    before = group_decays(points_ptr, points[0], N, rate, -1, R, LEVELS)
    behind = group_decays(points_ptr, points[R - 1], N, rate, 1, R, LEVELS)
    if slope_ptr is not None:
        left, _ = scan_pair(
            u, x, None, points_ptr, points, decays, before, N, -1, False, False, R, G, 1, LEVELS
        )
        right, _ = scan_pair(
            backwards(u, R), backwards(x, R), None, points_ptr, backwards(points, R),
            backwards(decays, R - 1), behind, N, 1, False, False, R, G, 1, LEVELS,
        )  # fmt: skip
        for r in tl.static_range(R):
            n = tl.arange(0, G) * R + r
            slope = (right[R - 1 - r][0] - left[r][0]) * inv_bandwidth
            tl.store(slope_ptr + pair * N + n, slope, mask=n < N)
    else:
        sums = group_times_kappa(x, decays, before, behind, R, G, 1, LEVELS)
        for r in tl.static_range(R):
            n = tl.arange(0, G) * R + r
            y = tl.sum(sums[r], 1)
            if x_ptr is None:
                y = one_over(y, n < length)
            tl.store(y_ptr + n, y, mask=n < N)


def fits_registers(shape: Shape, metric: str) -> bool:
    """Whether to hold sequences of points, (batch, slices, ranks), in registers."""
    batch, slices, ranks = shape
    many = batch * slices >= LEAST_PAIRS
    return metric == "absolute" and many and ranks <= short_plan.MOST_RANKS


def register_config(shape: Shape, heads: int) -> dict[str, int]:
    """Arguments of the kernel; `heads` are those of one side."""
    _, slices, ranks = shape
    groups = short_plan.config(ranks, 1)
    groups.pop("BLOCK_D")
    return {"N": ranks, "L": slices, "HEADS": heads, "num_warps": 1, **groups}


@triton.jit
def kappa_and_gap(points_ptr, n, j, N, rate):
    """κ between ranks n and j, and the scaled differences ``s_j - s_n``."""
    points = tl.load(points_ptr + tl.minimum(n, N - 1))
    others = tl.load(points_ptr + tl.minimum(j, N - 1))
    gap = (others[None, :] - points[:, None]) * rate
    return exp2_minus_square(gap), gap


@triton.jit
def near_blocks(
    points_ptr, first, last, reach, N, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The first and the last block of ranks within reach of points from `first` to `last`.

    All blocks, if points are NaN.
    """
    start = tl.arange(0, BLOCKS) * BLOCK
    there = start < N
    smallest = tl.load(points_ptr + start, mask=there, other=0.0)
    largest = tl.load(points_ptr + tl.minimum(start + BLOCK, N) - 1, mask=there, other=0.0)
    before = tl.sum((there & (largest < first - reach)).to(tl.int32), 0)
    after = tl.sum((there & (smallest > last + reach)).to(tl.int32), 0)
    return before, tl.cdiv(N, BLOCK) - after


@triton.jit
def row_block(points_ptr, start, N, rate, BLOCKS: tl.constexpr, M: tl.constexpr, J: tl.constexpr):
    """Ranks of a block, and which blocks of columns are near it."""
    first = tl.load(points_ptr + start)
    last = tl.load(points_ptr + tl.minimum(start + M, N) - 1)
    begin, end = near_blocks(points_ptr, first, last, REACH / rate, N, BLOCKS, J)
    return start + tl.arange(0, M), begin, end


@triton.jit(do_not_specialize=("L", "HEADS"))
def dense_column_kernel(
    x_ptr,  # (B, L, N) float32, or None: ones
    upstream_ptr,  # (B, L, N) float32, for a slope; or None
    d_mid_ptr,  # (HEADS, L, N) float32: of the product of two sides' scales; or None
    points_ptr,  # (B, L, N) float32
    lengths_ptr,  # (HEADS,) int32, or None
    inv_bandwidth_ptr,  # (HEADS,) float32
    y_ptr,  # (B, L, N) float32: scales, which are read for their slope; or None
    slope_ptr,  # (B, L, N) float32, or None
    N, L, HEADS, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """:func:`espformer.ops.esp.triton.normalise.column_kernel`, but for κx of a given x."""
    pair = tl.program_id(0).to(tl.int64)
    length = N
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + pair // L % HEADS)
    other_ptr = y_ptr
    if d_mid_ptr is not None:
        other_ptr = of_other_side(y_ptr, pair, N, HEADS * L)
        d_mid_ptr += pair % (HEADS * L) * N
    if x_ptr is not None:
        x_ptr += pair * N
    if y_ptr is not None:
        y_ptr += pair * N
    if upstream_ptr is not None:
        upstream_ptr += pair * N
    if slope_ptr is not None:
        slope_ptr += pair * N
    points_ptr += pair * N
    inv_bandwidth = tl.load(inv_bandwidth_ptr + pair // L % HEADS)
    rate = gap_unit(inv_bandwidth, True)
    for start in range(0, N, BLOCK_M):
        n, begin, end = row_block(points_ptr, start, N, rate, BLOCKS, BLOCK_M, BLOCK_N)
        u_here, x_here = column_operands(
            x_ptr, upstream_ptr, d_mid_ptr, other_ptr, y_ptr, n, n < N, length
        )
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for block in range(begin, end):
            j = block * BLOCK_N + tl.arange(0, BLOCK_N)
            u, x = column_operands(
                x_ptr, upstream_ptr, d_mid_ptr, other_ptr, y_ptr, j, j < N, length
            )
            kappa, gap = kappa_and_gap(points_ptr, n, j, N, rate)
            if slope_ptr is not None:
                both = u_here[:, None] * x[None, :] + x_here[:, None] * u[None, :]
                total += kappa * gap * both
            else:
                total += kappa * x[None, :]
        y = tl.sum(total, 1)
        if slope_ptr is not None:
            tl.store(slope_ptr + n, y * (SLOPE * inv_bandwidth), mask=n < N)
        else:
            tl.store(y_ptr + n, one_over(y, n < length), mask=n < N)


@triton.jit(do_not_specialize=("L", "HEADS"))
def dense_norm_costs_kernel(
    square_ptr,  # (B, N) float32, by token
    order_ptr,  # (B, L, N) int32
    out_scale_ptr,  # (B, L, N) float32
    in_scale_ptr,  # (B, L, N) float32, or None: ones
    points_ptr,  # (B, L, N) float32
    inv_bandwidth_ptr,  # (HEADS,) float32
    out_ptr,  # (B, L) float32
    N, L, HEADS, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """:func:`espformer.ops.esp.triton.costs.norm_costs_kernel`."""
    pair = tl.program_id(0).to(tl.int64)
    at = pair * N
    points_ptr += at
    square_ptr += pair // L * N
    rate = gap_unit(tl.load(inv_bandwidth_ptr + pair // L % HEADS), True)
    sums = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, N, BLOCK_M):
        n, begin, end = row_block(points_ptr, start, N, rate, BLOCKS, BLOCK_M, BLOCK_N)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for block in range(begin, end):
            j = block * BLOCK_N + tl.arange(0, BLOCK_N)
            x = load_squares(square_ptr, order_ptr + at, in_scale_ptr, at, j, j < N)
            kappa, _ = kappa_and_gap(points_ptr, n, j, N, rate)
            total += kappa * x[None, :]
        sums += tl.sum(total, 1) * tl.load(out_scale_ptr + at + n, mask=n < N, other=0.0)
    tl.store(out_ptr + pair, tl.sum(sums, 0))


@triton.jit(do_not_specialize=("L", "HEADS"))
def dense_norm_costs_grad_kernel(
    upstream_ptr,  # (HEADS, L) float32
    square_ptr,  # (B, N) float32, by token
    order_ptr,  # (B, L, N) int32
    out_scale_ptr,  # (B, L, N) float32
    in_scale_ptr,  # (B, L, N) float32, or None: ones
    points_ptr,  # (B, L, N) float32
    inv_bandwidth_ptr,  # (HEADS,) float32
    d_square_ptr,  # (B, N) if ATOMIC, else (B, L, N): every slice its own; by token
    d_out_scale_ptr,  # (B, L, N) float32
    d_in_scale_ptr,  # (B, L, N) float32, or None
    slope_ptr,  # (B, L, N) float32: the gradient of the points
    N, L, HEADS, ATOMIC: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """:func:`espformer.ops.esp.triton.costs.norm_costs_grad_kernel`."""
    pair = tl.program_id(0).to(tl.int64)
    at = pair * N
    points_ptr += at
    square_ptr += pair // L * N
    inv_bandwidth = tl.load(inv_bandwidth_ptr + pair // L % HEADS)
    rate = gap_unit(inv_bandwidth, True)
    upstream = tl.load(upstream_ptr + pair % (HEADS * L))
    for start in range(0, N, BLOCK_M):
        n, begin, end = row_block(points_ptr, start, N, rate, BLOCKS, BLOCK_M, BLOCK_N)
        inside = n < N
        u_here = tl.load(out_scale_ptr + at + n, mask=inside, other=0.0)
        x_here = load_squares(square_ptr, order_ptr + at, in_scale_ptr, at, n, inside)
        kappa_out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        slope = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for block in range(begin, end):
            j = block * BLOCK_N + tl.arange(0, BLOCK_N)
            u = tl.load(out_scale_ptr + at + j, mask=j < N, other=0.0)
            x = load_squares(square_ptr, order_ptr + at, in_scale_ptr, at, j, j < N)
            kappa, gap = kappa_and_gap(points_ptr, n, j, N, rate)
            kappa_out += kappa * u[None, :]
            sums += kappa * x[None, :]
            both = u_here[:, None] * x[None, :] + x_here[:, None] * u[None, :]
            slope += kappa * gap * both
        d_out_scale = tl.sum(sums, 1) * upstream
        tl.store(d_out_scale_ptr + at + n, d_out_scale, mask=inside)
        d_points = tl.sum(slope, 1) * (upstream * SLOPE * inv_bandwidth)
        tl.store(slope_ptr + at + n, d_points, mask=inside)
        d_square = tl.sum(kappa_out, 1) * upstream
        token = tl.load(order_ptr + at + n, mask=inside, other=0)
        if in_scale_ptr is not None:
            square = tl.load(square_ptr + token, mask=inside, other=0.0)
            tl.store(d_in_scale_ptr + at + n, d_square * square, mask=inside)
            d_square *= tl.load(in_scale_ptr + at + n, mask=inside, other=0.0)
        if ATOMIC:
            to_ptr = d_square_ptr + pair // L * N + token
            tl.atomic_add(to_ptr, d_square, mask=inside, sem="relaxed")
        else:
            tl.store(d_square_ptr + at + token, d_square, mask=inside)


def is_dense(shape: Shape, metric: str) -> bool:
    """Whether columns of so many points are summed from κ itself."""
    return metric == "squared" and shape[-1] <= MOST_RANKS


def dense_config(shape: Shape, heads: int) -> dict[str, Any]:
    """Arguments of dense kernels for so many heads of one side; B is that, or twice as much."""
    _, slices, ranks = shape
    return {
        "N": ranks, "L": slices, "HEADS": heads, "BLOCKS": power_of_2(ceil_div(ranks, BLOCK_N)),
        "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "num_warps": 1,
    }  # fmt: skip
