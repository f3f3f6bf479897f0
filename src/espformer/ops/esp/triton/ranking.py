"""Points of every slice in rank order: projected, sorted, and in units of their spread.

The torch twins are :func:`espformer.ops.esp.linear.sort_tokens` and
:func:`espformer.ops.esp.problem.spread`.

**Forward**, for rows of at most 1024 tokens two launches: one makes the points ``p = scale · Θ x``,
as words that can be sorted (`sort.py`), one sorts them and divides them by their spread. Longer
rows are sorted in runs, and divided by a launch of their own, for which points are in order: the
largest are the two ends, and measured from the one in the middle, which is within a spread of the
mean, one pass finds both mean and variance.

**Backward.** With ``y = p / s``, s the standard deviation of the n points that take part,

    dp_i = (g_i - (Σ_j g_j y_j) (y_i - ȳ) / n) / s,

without the second term where the points have no spread. By token it is the gradient of the tokens
themselves if slices are axes; else

    dx_n = scale · Σ_l dp_ln θ_l,     dθ_l = scale · Σ_n dp_ln x_n.

- ``espformer::rank_points``: sorted points, the token at each rank, and the spread; its backward,
  ``espformer::unrank_points``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from espformer.ops.common.autograd import refuse_double_backward
from espformer.ops.common.custom_op import operator
from espformer.ops.common.launch import Launch, Shape, ceil_div, once, power_of_2, width_arguments
from espformer.ops.esp.triton.sort import LEAST_SHARE, LEAST_SIZE, sort_points, spread_of


@triton.jit
def mean_and_variance(points_ptr, length, size, N, BLOCK: tl.constexpr):
    """Of the first `length` points: the one in the middle, and mean and variance measured from it.

    In units of `size`.
    """
    middle = tl.load(points_ptr + length // 2)
    sums = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, length, BLOCK):
        n = start + tl.arange(0, BLOCK)
        x = tl.load(points_ptr + n, mask=n < length, other=0.0) / size - middle / size
        x = tl.where(n < length, x, 0.0)
        sums += x
        squares += x * x
    count = tl.maximum(length, 1)
    mean = tl.sum(sums, 0) / count
    return middle, mean, tl.sum(squares, 0) / count - mean * mean


@triton.jit(do_not_specialize=("L",))
def spread_kernel(
    points_ptr,  # (B, L, N) float32, sorted
    lengths_ptr,  # (B,) int32, or None
    spread_ptr,  # (B, L) float32
    N, L, LEAST_SIZE: tl.constexpr, LEAST_SHARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Points of one slice in units of their spread, in place."""
    pair = tl.program_id(0).to(tl.int64)
    points_ptr += pair * N
    length = N
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + pair // L)
    first, last = tl.load(points_ptr), tl.load(points_ptr + tl.maximum(length - 1, 0))
    size = tl.maximum(tl.maximum(tl.abs(first), tl.abs(last)), LEAST_SIZE)
    _, _, variance = mean_and_variance(points_ptr, length, size, N, BLOCK)
    spread = spread_of(variance, size, LEAST_SHARE)
    tl.store(spread_ptr + pair, spread)
    tl.debug_barrier()  # what was measured is overwritten
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        x = tl.load(points_ptr + n, mask=n < N, other=0.0)
        tl.store(points_ptr + n, x / spread, mask=n < N)


@triton.jit(do_not_specialize=("L",))
def point_grad_kernel(
    upstream_ptr,  # (B, L, N) float32, by rank
    points_ptr,  # (B, L, N) float32: in units of the spread, if there is one
    order_ptr,  # (B, L, N) int32
    spread_ptr,  # (B, L) float32, or None
    lengths_ptr,  # (B,) int32, or None
    dp_ptr,  # by token: (B, L, N) float32, or the tokens' own (B, N, L) if TOKENS_FIRST
    N, L, scale, TOKENS_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`scale` times the gradient of the points of one slice; zero at padding."""
    pair = tl.program_id(0).to(tl.int64)
    upstream_ptr += pair * N
    points_ptr += pair * N
    length = N
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + pair // L)
    middle, mean, slope, spread = 0.0, 0.0, 0.0, 1.0
    if spread_ptr is not None:
        middle, mean, variance = mean_and_variance(points_ptr, length, 1.0, N, BLOCK)
        products = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, length, BLOCK):
            n = start + tl.arange(0, BLOCK)
            g = tl.load(upstream_ptr + n, mask=n < length, other=0.0)
            products += g * tl.load(points_ptr + n, mask=n < length, other=0.0)
        # In units of itself a spread is one, and points without one are far closer.
        slope = tl.where(variance > 0.5, tl.sum(products, 0) / tl.maximum(length, 1), 0.0)
        spread = tl.load(spread_ptr + pair)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        g = tl.load(upstream_ptr + n, mask=n < length, other=0.0)
        if spread_ptr is not None:
            y = tl.load(points_ptr + n, mask=n < length, other=0.0)
            # Not y less the centre: far from zero that would be rounded, for all ranks alike.
            g = tl.where(n < length, g - slope * ((y - middle) - mean), 0.0) / spread
        token = tl.load(order_ptr + pair * N + n, mask=n < N, other=0)
        if TOKENS_FIRST:
            to = dp_ptr + (pair // L * N + token) * L + pair % L
        else:
            to = dp_ptr + pair * N + token
        tl.store(to, (g * scale).to(dp_ptr.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=("D8", "L"))
def back_project_kernel(
    dp_ptr,  # (B, L, N) float32, by token
    slices_ptr,  # (B or 1, L, WIDTH) float32
    dx_ptr,  # (B, N, WIDTH)
    N, L, D8, D: tl.constexpr, SHARED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``dx_n = Σ_l dp_ln θ_l``."""
    WIDTH = D if D > 0 else D8 * 8
    batch = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    dp_ptr += batch * L * N
    if not SHARED:
        slices_ptr += batch * L * WIDTH
    dx = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for l in range(L):  # not unrolled: that would spill
        theta = tl.load(slices_ptr + l * WIDTH + d, mask=d < WIDTH, other=0.0)
        dx += tl.load(dp_ptr + l * N + n, mask=n < N, other=0.0)[:, None] * theta[None, :]
    inside = (n[:, None] < N) & (d[None, :] < WIDTH)
    to = dx_ptr + (batch * N + n[:, None]) * WIDTH + d[None, :]
    tl.store(to, dx.to(dx_ptr.dtype.element_ty), mask=inside)


LEAST_BLOCK, MOST_BLOCK = 32, 4096


def _row_launch(kernel: Any, batch: int, slices: int, ranks: int, **constants: Any) -> Launch:
    """A kernel with one program for every row of points."""
    block = min(MOST_BLOCK, max(LEAST_BLOCK, power_of_2(ranks)))
    return Launch(
        kernel, (batch * slices,), N=ranks, L=slices, BLOCK=block, num_warps=max(1, block // 512),
        **constants,
    )  # fmt: skip


@once
def _spreads(shape: Shape) -> Launch:
    return _row_launch(spread_kernel, *shape, LEAST_SIZE=LEAST_SIZE, LEAST_SHARE=LEAST_SHARE)


@once
def _point_grads(shape: Shape, scale: float, tokens_first: bool) -> Launch:
    return _row_launch(point_grad_kernel, *shape, scale=scale, TOKENS_FIRST=tokens_first)


@once
def _back_projection(batch: int, count: int, tokens: int, width: int, shared: bool) -> Launch:
    block_d = power_of_2(width)
    block_n = max(1, min(64, 4096 // block_d))
    return Launch(
        back_project_kernel, (batch, ceil_div(tokens, block_n)), N=tokens, L=count, SHARED=shared,
        BLOCK_N=block_n, BLOCK_D=block_d, **width_arguments(width),
    )  # fmt: skip


def masked_lengths(mask: Tensor | None) -> Tensor | None:
    """How many tokens of every sequence take part, (batch,)."""
    return None if mask is None else mask.sum(-1, dtype=torch.int32)


@operator("rank_points")
def rank_points(
    x: Tensor, slices: Tensor | None, mask: Tensor | None, lengths: Tensor | None, scale: float,
    in_spreads: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Sorts the tokens of every slice.

    Args:
        x: (batch, N, m).
        slices: Θ, (batch or 1, L, m) in float32; None means the axes.
        mask: (batch, N), True where a token takes part.
        lengths: how many do, (batch,) in int32, if there is a mask.
        scale: what x is multiplied by.
        in_spreads: whether points are divided by their spread.

    Returns:
        Sorted points in float32 and the token at each rank in int32, both (batch, L, N), padding
        last; and the spread, (batch, L), or nothing. A slice that holds NaN or an infinity is all
        NaN.
    """
    points, order, spread = sort_points(x, slices, mask, lengths, scale, in_spreads)
    if spread is None:
        spread = points.new_empty(points.shape[:2] if in_spreads else 0)
        if in_spreads:
            _spreads(points.shape)(points, lengths, spread)
    return points, order, spread


@rank_points.register_fake
def _(
    x: Tensor, slices: Tensor | None, mask: Tensor | None, lengths: Tensor | None, scale: float,
    in_spreads: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    shape = (x.shape[0], x.shape[2] if slices is None else slices.shape[-2], x.shape[1])
    points = x.new_empty(shape, dtype=torch.float32)
    spread = points.new_empty(shape[:2] if in_spreads else 0)
    return points, x.new_empty(shape, dtype=torch.int32), spread


@operator("unrank_points")
def unrank_points(
    upstream: Tensor, points: Tensor, order: Tensor, spread: Tensor, x: Tensor,
    slices: Tensor | None, lengths: Tensor | None, scale: float, with_slices: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of x and of the slices, the latter empty unless asked for."""
    batch, count, tokens = points.shape
    dx = torch.empty_like(x)
    dp = dx if slices is None else torch.empty_like(points)
    _point_grads(points.shape, scale, slices is None)(
        upstream, points, order, spread if spread.numel() else None, lengths, dp
    )
    if slices is None:
        return dx, points.new_empty(0)
    back_project = _back_projection(batch, count, tokens, x.shape[-1], slices.shape[0] == 1)
    back_project(dp, slices, dx)
    if not with_slices:
        return dx, points.new_empty(0)
    d_slices = torch.bmm(dp, x.float())
    return dx, d_slices.sum(0, keepdim=True) if slices.shape[0] == 1 else d_slices


@unrank_points.register_fake
def _(
    upstream: Tensor, points: Tensor, order: Tensor, spread: Tensor, x: Tensor,
    slices: Tensor | None, lengths: Tensor | None, scale: float, with_slices: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    d_slices = slices if with_slices else None
    return x.new_empty(x.shape), points.new_empty(0 if d_slices is None else d_slices.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, slices, _, lengths, ctx.scale, _ = inputs
    ctx.save_for_backward(*output, x, slices, lengths)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


@refuse_double_backward("espformer::rank_points")
def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    if grads[0] is None:
        return (None,) * 6
    with_slices = ctx.needs_input_grad[1]
    dx, d_slices = unrank_points(grads[0], *ctx.saved_tensors, ctx.scale, with_slices)
    return dx, d_slices if with_slices else None, None, None, None, None


rank_points.register_autograd(_backward, setup_context=_setup)
