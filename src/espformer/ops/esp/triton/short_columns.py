"""Products of κ with one column, and their slopes, for many short sequences in the absolute metric.

The torch twin is :class:`espformer.ops.esp.linear.SoftMixing`. These are the products of
`normalise.py`, which chooses between its own scans, `dense_columns.py` and this kernel
(:func:`fits`). A column is a row of one number, so the kernel is that of `short_plan.py` for
BLOCK_D = 1: a warp holds the whole sequence, one group of neighbouring ranks per lane. Errors of
single steps add up, so it normalises for 16-bit rows alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from espformer.ops.common.triton import Shape
from espformer.ops.esp.triton import short_plan
from espformer.ops.esp.triton.primitives import LOG2E, column_operands, of_other_side, one_over
from espformer.ops.esp.triton.short_plan import (
    backwards,
    group_decays,
    rank_decays,
    rank_points,
    scan_pair,
    times_kappa,
)

LEAST_PAIRS = 1024  # (head, slice) pairs; with fewer, four warps for each may be faster


@triton.jit(do_not_specialize=("N", "L", "HEADS"))
def short_column_kernel(
    x_ptr,  # (B, L, N) float32, or None: ones
    p_ptr,  # (B, L, N) float32, for a slope; or None
    d_mid_ptr,  # (HEADS, L, N) float32: of the product of two sides' scales; or None
    points_ptr,  # (B, L, N) float32
    lengths_ptr,  # (HEADS,) int32, or None: all N
    inv_bandwidth_ptr,  # (HEADS,) float32
    y_ptr,  # (B, L, N) float32: κx, or scales, which are read for their slope; or None
    slope_ptr,  # (B, L, N) float32, or None
    N, L, HEADS, R: tl.constexpr, G: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """What :func:`espformer.ops.esp.triton.normalise.column_kernel` computes, for one slice."""
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
    if p_ptr is not None:
        p_ptr += pair * N
    points_ptr += pair * N
    inv_bandwidth = tl.load(inv_bandwidth_ptr + head)
    rate = inv_bandwidth * LOG2E
    points = rank_points(points_ptr, N, R, G)
    u, x = (), ()
    for r in tl.static_range(R):
        n = tl.arange(0, G) * R + r
        u_here, x_here = column_operands(
            x_ptr, p_ptr, d_mid_ptr, other_ptr, y_ptr, n, n < N, length
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
        sums = times_kappa(x, decays, before, behind, R, G, 1, LEVELS)
        for r in tl.static_range(R):
            n = tl.arange(0, G) * R + r
            y = tl.sum(sums[r], 1)
            if x_ptr is None:
                y = one_over(y, n < length)
            tl.store(y_ptr + n, y, mask=n < N)


def fits(shape: Shape, metric: str) -> bool:
    """Whether to hold sequences of points, (batch, slices, ranks), in registers."""
    batch, slices, ranks = shape
    many = batch * slices >= LEAST_PAIRS
    return metric == "absolute" and many and ranks <= short_plan.MOST_RANKS


def config(shape: Shape, heads: int) -> dict[str, int]:
    """Arguments of the kernel; `heads` are those of one side."""
    _, slices, ranks = shape
    groups = short_plan.config(ranks, 1)
    groups.pop("BLOCK_D")
    return {"N": ranks, "L": slices, "HEADS": heads, "num_warps": 1, **groups}
