"""Soft sorts and ranks of numbers, and of rows of values by numbers, without attention.

The torch twins are :meth:`espformer.sorting.rows.SoftSort.sort_numbers`, ``expected_ranks`` and,
for values, attention between numbers and ranks (`espformer/sorting/rows.py`). With s the sorted
numbers, in units of the kernel's width, κ their kernel, ``z = 1 / κ1`` (`normalise.py`) and P the
permutation that sorts them,

    out = z · κx         the soft sort, x the sorted numbers,
    r = κ(z c) / κz      the expected rank of the number at rank i, c the ranks, centred and scaled,
    out = z · κ P v      sorted values: rows of tokens to rows of ranks,
    out = Pᵀ κ (z · v)   values back: rows of ranks to rows of tokens.

Everything is a product of κ with one column, in the absolute metric and float32. Attention between
numbers and ranks takes some forty launches. This file reads from top to bottom:

1. Short rows of up to 4,096 numbers, each held by one program: one launch forward, one backward.
2. Soft sorts and ranks of numbers as torch operators, with their fake and autograd rules:
   ``espformer::sort_numbers`` and ``espformer::rank_numbers``. Longer rows take a handful of
   launches, of `sort.py` and `normalise.py`.
3. Up to 16 columns of values, sorted by short rows: again one launch each way, as the operator
   ``espformer::mix_rows``.

**Scans.** A row of a thousand numbers is nothing for a GPU, so the number of launches is what it
costs. A segment of ranks is known by the point s of its last rank and by sums ``u`` that have
decayed to that point. Of two segments that follow each other, the sums are joined as

    u = exp(-|s_2 - s_1|) u_1 + u_2,

for all ranks at once by ``tl.associative_scan``, in both directions. Decays are computed from the
points of the segments, not step by step, so that errors do not add up along a row.

**Ties.** κ' leaves out equal points. Sums over all ranks but those that are tied with the last one
(`untied`) are joined likewise: the first segment counts as a whole if it ends at another point,
and as far as it is untied itself if it ends at the same.

**Values.** A program takes one column of values after another. Both directions are
``out_scale · κ (in_scale · v)`` with one of the scales z and the other one. So the gradients of a
column v with upstream g, both with their scales, are κg for v, the slope of ``gᵀ κ v`` for the
points, and ``g · κv`` or ``v · κg`` over z for z.

Ranks past the end repeat the last point, and their numbers are zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from espformer.ops.common.operators import operator, refuse_double_backward
from espformer.ops.common.triton import Launch, Shape, once, power_of_2
from espformer.ops.esp.triton.normalise import (
    bandwidth_gradient,
    columns,
    row_scales,
    row_scales_backward,
    sorted_slope,
)
from espformer.ops.esp.triton.primitives import LOG2E, exp2_minus_abs, one_over, rounded_product
from espformer.ops.esp.triton.sort import (
    LEAST_SHARE,
    Words,
    any_infinite,
    decode_points,
    make_words,
    masked_lengths,
    point_gradients,
    repeat_last,
    row_spread,
    sort_points,
    sort_words,
    sortable,
    word_index,
    words_config,
)

METRIC, FP32_ROWS = "absolute", True
ARGUMENTS = "Tensor numbers, Tensor inv_bandwidth, Tensor? mask, bool in_spreads"
# The least size of numbers that have a spread. They are not scaled to be near one first, so it is
# as small as its inverse allows.
LEAST_SIZE = 4 * torch.finfo(torch.float32).tiny
MOST_NUMBERS = 4096  # of a row: eight for each of 512 threads, with 128 registers each
LEAST_BLOCK, MOST_WARPS, THREAD_NUMBERS = 32, 16, 4
INFINITY = Words.of(torch.float32, 1, False, 1.0).infinity
MOST_ROW_WIDTH = 16


@triton.jit
def join(s, u, x, s_next, u_next, x_next):
    """Two segments of ranks as one: its last point, and sums of u and x at that point."""
    decay = exp2_minus_abs(s_next - s)
    return s_next, decay * u + u_next, decay * x + x_next


@triton.jit
def join_untied(
    s, u, x, u_untied, x_untied, s_next, u_next, x_next, u_untied_next, x_untied_next
):  # fmt: skip
    """:func:`join`, and sums without the ranks that are tied with the last one."""
    decay = exp2_minus_abs(s_next - s)
    u_decayed, x_decayed = decay * u, decay * x
    return (
        s_next,
        u_decayed + u_next,
        x_decayed + x_next,
        tl.where(s == s_next, u_untied, u_decayed) + u_untied_next,
        tl.where(s == s_next, x_untied, x_decayed) + x_untied_next,
    )


@triton.jit
def from_middle(points, n, length):
    """Points measured from the one in the middle, which leaves the most digits to differences."""
    return points - tl.sum(tl.where(n == length // 2, points, 0.0), 0)


@triton.jit
def scan_times_kappa(u, x, s):
    """κu and κx, for points s in units of the kernel's width, to the base 2."""
    _, u_before, x_before = tl.associative_scan((s, u, x), 0, join)
    _, u_behind, x_behind = tl.associative_scan((s, u, x), 0, join, reverse=True)
    return u_before + u_behind - u, x_before + x_behind - x


@triton.jit
def kappa_and_slope(u, x, s):
    """κu, κx, and ``u · κ'x + x · κ'u``: the gradient of ``uᵀ κ x`` in units of the kernel's
    width.
    """
    none = tl.zeros_like(s)
    _, u_before, x_before, u_left, x_left = tl.associative_scan(
        (s, u, x, none, none), 0, join_untied
    )
    _, u_behind, x_behind, u_right, x_right = tl.associative_scan(
        (s, u, x, none, none), 0, join_untied, reverse=True
    )
    slope = u * (x_right - x_left) + x * (u_right - u_left)
    return u_before + u_behind - u, x_before + x_behind - x, slope


@triton.jit
def sort_row(
    numbers_ptr, inv_bandwidth_ptr, mask_ptr, points_ptr, order_ptr, spread_ptr, N,
    INFINITY: tl.constexpr, LEAST_SIZE: tl.constexpr, LEAST_SHARE: tl.constexpr,
    BLOCK: tl.constexpr, VECTOR: tl.constexpr, VECTORS: tl.constexpr, DIMS: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """Sorts the row of this program, and stores its points, tokens and spread.

    Returns how many numbers take part, and by rank tokens, numbers, which are zero at padding, and
    points in units of the kernel's width, to the base 2.
    """
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    at = row * N + n
    inside = n < N
    present = inside
    if mask_ptr is not None:
        present = tl.load(mask_ptr + at, mask=inside, other=0) != 0
    length = tl.sum(present.to(tl.int32), 0)
    numbers = tl.load(numbers_ptr + at, mask=present, other=0.0)
    word = make_words(sortable(numbers, present, 32), n, 32)
    bad = any_infinite(word, 32, INFINITY)
    word = sort_words(word, BLOCK, VECTOR, VECTORS, DIMS, HELD)
    token = word_index(word, 32)
    points = decode_points(repeat_last(word, n, length), bad, length, 1.0, 32, tl.float32)
    x = tl.where(n < length, points, 0.0)
    if spread_ptr is not None:
        spread = row_spread(points, n, length, LEAST_SIZE, LEAST_SHARE)
        tl.store(spread_ptr + row, spread)
        points /= spread
    tl.store(order_ptr + at, token, mask=inside)
    tl.store(points_ptr + at, points, mask=inside)
    rate = tl.load(inv_bandwidth_ptr + row) * LOG2E
    return length, token, x, rounded_product(from_middle(points, n, length), rate)


@triton.jit
def number_gradients(slope, points, here, inv_bandwidth, row, spread_ptr, d_inv_bandwidth_ptr):
    """Gradients of the numbers, by rank, from those of their points in units of the kernel's width;
    stores that of the bandwidth.
    """
    slope *= inv_bandwidth
    count = tl.maximum(tl.sum(here.to(tl.int32), 0), 1)
    mean = tl.sum(tl.where(here, points, 0.0), 0) / count
    centred = tl.where(here, points - mean, 0.0)
    bandwidth_dot = tl.sum(slope * centred, 0)
    if d_inv_bandwidth_ptr is not None:
        tl.store(d_inv_bandwidth_ptr + row, bandwidth_dot / inv_bandwidth)
    if spread_ptr is not None:
        # Divided by the spread, points have a spread of one; or nearly none, and no gradient.
        flat = tl.sum(centred * centred, 0) <= 0.5 * count
        slope = (slope - bandwidth_dot / count * centred) / tl.load(spread_ptr + row)
        slope = tl.where(flat, 0.0, slope)
    return slope


@triton.jit
def centred_ranks(n, length):
    """Ranks around zero and near one; and the middle and the scale that they had."""
    middle, scale = (length + 1) * 0.5, tl.maximum(length, 1).to(tl.float32)
    return (n + 1 - middle) / scale, middle, scale


@triton.jit
def short_numbers_kernel(
    numbers_ptr,  # (B, N) float32
    inv_bandwidth_ptr,  # (B,) float32
    mask_ptr,  # (B, N) bytes, or None: all take part
    out_ptr,  # (B, N) float32: softly sorted; or expected ranks, by token
    points_ptr,  # (B, N) float32
    order_ptr,  # (B, N) int32
    spread_ptr,  # (B,) float32, or None
    z_ptr,  # (B, N) float32: 1 / κ1
    sums_ptr,  # (B, N) float32: κx of sorted numbers x; or κz
    expected_ptr,  # (B, N) float32: expected ranks by rank, centred; or None: numbers are sorted
    N, INFINITY: tl.constexpr, LEAST_SIZE: tl.constexpr, LEAST_SHARE: tl.constexpr,
    BLOCK: tl.constexpr, VECTOR: tl.constexpr, VECTORS: tl.constexpr, DIMS: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """Sorts or ranks one row softly, and keeps what its gradients need."""
    length, token, x, s = sort_row(
        numbers_ptr, inv_bandwidth_ptr, mask_ptr, points_ptr, order_ptr, spread_ptr, N,
        INFINITY, LEAST_SIZE, LEAST_SHARE, BLOCK, VECTOR, VECTORS, DIMS, HELD,
    )  # fmt: skip
    n = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64) * N
    inside, here = n < N, n < length
    weights, sums = scan_times_kappa(tl.where(here, 1.0, 0.0), x, s)
    z = one_over(weights, here)
    tl.store(z_ptr + row + n, z, mask=inside)
    if expected_ptr is None:
        tl.store(out_ptr + row + n, tl.where(here, sums * z, 0.0), mask=inside)
    else:
        centred, middle, scale = centred_ranks(n, length)
        sums, moments = scan_times_kappa(z, z * centred, s)
        expected = moments / tl.where(here, sums, 1.0)
        tl.store(expected_ptr + row + n, expected, mask=inside)
        ranks = tl.where(here, expected * scale + middle, 0.0)
        tl.store(out_ptr + row + token, ranks, mask=inside)
    tl.store(sums_ptr + row + n, sums, mask=inside)


@triton.jit
def short_numbers_grad_kernel(
    upstream_ptr,  # (B, N) float32: of what the forward kernel stored in `out`
    numbers_ptr,  # (B, N) float32; or None: of ranks
    inv_bandwidth_ptr,  # (B,) float32
    points_ptr,  # (B, N) float32, and so on, as the forward kernel left them
    order_ptr,  # (B, N) int32
    spread_ptr,  # (B,) float32, or None
    z_ptr,  # (B, N) float32
    sums_ptr,  # (B, N) float32
    expected_ptr,  # (B, N) float32; or None: of sorted numbers
    d_numbers_ptr,  # (B, N) float32
    d_inv_bandwidth_ptr,  # (B,) float32, or None
    N, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of the numbers of one row, with the formulas of :func:`sort_numbers_backward` and
    :func:`rank_numbers_backward`, and of the bandwidth.
    """
    row = tl.program_id(0).to(tl.int64)
    at = row * N
    n = tl.arange(0, BLOCK)
    inside = n < N
    z = tl.load(z_ptr + at + n, mask=inside, other=0.0)
    here = z != 0.0  # NaN included
    length = tl.sum(here.to(tl.int32), 0)
    token = tl.load(order_ptr + at + n, mask=inside, other=0)
    points = from_middle(tl.load(points_ptr + at + tl.minimum(n, N - 1)), n, length)
    sums = tl.load(sums_ptr + at + n, mask=here, other=1.0)
    inv_bandwidth = tl.load(inv_bandwidth_ptr + row)
    s = rounded_product(points, inv_bandwidth * LOG2E)
    if expected_ptr is None:
        p = tl.load(upstream_ptr + at + n, mask=here, other=0.0) * z
        x = tl.load(numbers_ptr + at + token, mask=here, other=0.0)
        direct, _, slope = kappa_and_slope(p, x, s)
        scaled_dz = p * sums * z
    else:
        centred, _, scale = centred_ranks(n, length)
        expected = tl.load(expected_ptr + at + n, mask=here, other=0.0)
        a = tl.load(upstream_ptr + at + token, mask=here, other=0.0) * scale / sums
        of_moments, _, slope = kappa_and_slope(a, z * centred, s)
        of_sums, _, more = kappa_and_slope(-a * expected, z, s)
        slope += more
        scaled_dz = (centred * of_moments + of_sums) * z * z
        direct = tl.zeros_like(s)
    # Of z = 1 / κ1 with the gradient dz it is the slope of -(z² dz)ᵀ κ1.
    _, _, more = kappa_and_slope(-scaled_dz, tl.where(here, 1.0, 0.0), s)
    slope = number_gradients(
        slope + more, points, here, inv_bandwidth, row, spread_ptr, d_inv_bandwidth_ptr
    )
    tl.store(d_numbers_ptr + at + token, slope + direct, mask=inside)


def row_fits(shape: Shape) -> bool:
    """Whether a program holds a whole row of numbers, (batch, N)."""
    return shape[-1] <= MOST_NUMBERS


def block_config(count: int) -> dict[str, int]:
    """Launch configuration of a program that holds a row of so many numbers."""
    block = max(LEAST_BLOCK, power_of_2(count))
    warps = min(MOST_WARPS, max(1, block // (32 * THREAD_NUMBERS)))
    return {"BLOCK": block, "num_warps": warps}


def sort_block_config(count: int) -> dict[str, int]:
    """The same with what :func:`espformer.ops.esp.triton.sort.sort_words` needs."""
    config = block_config(count)
    return words_config(config["BLOCK"], config["num_warps"], 4)


@once
def _short_numbers(shape: Shape) -> Launch:
    return Launch(
        short_numbers_kernel, shape[:1], N=shape[1], INFINITY=INFINITY, LEAST_SIZE=LEAST_SIZE,
        LEAST_SHARE=LEAST_SHARE, **sort_block_config(shape[1]),
    )  # fmt: skip


@once
def _short_numbers_grad(shape: Shape) -> Launch:
    return Launch(short_numbers_grad_kernel, shape[:1], N=shape[1], **block_config(shape[1]))


def _mix_short_numbers(
    numbers: Tensor, inv_bandwidth: Tensor, mask: Tensor | None, in_spreads: bool, ranks: bool
) -> tuple[Tensor | None, ...]:
    """Results of the operators ``sort_numbers`` and ``rank_numbers``, for short rows."""
    batch, count = numbers.shape
    column = batch, 1, count
    out = torch.empty_like(numbers)
    points, z, sums = (numbers.new_empty(column) for _ in range(3))
    order = numbers.new_empty(column, dtype=torch.int32)
    spread = numbers.new_empty(batch, 1) if in_spreads else None
    expected = numbers.new_empty(column) if ranks else None
    flags = None if mask is None else mask.view(torch.uint8)
    _short_numbers(numbers.shape)(
        numbers, inv_bandwidth, flags, out, points, order, spread, z, sums, expected
    )
    found = out, points, order, spread, z, sums
    return (*found, expected) if ranks else found


def _short_number_gradients(
    upstream: Tensor, numbers: Tensor | None, points: Tensor, order: Tensor, spread: Tensor | None,
    z: Tensor, sums: Tensor, expected: Tensor | None, inv_bandwidth: Tensor,
    with_inv_bandwidth: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gradients of the numbers and, if asked for, of `inv_bandwidth`, from what
    :func:`_mix_short_numbers` kept: `numbers` of sorted ones, `expected` of ranks.
    """
    d_numbers = torch.empty_like(upstream)
    d_inv_bandwidth = torch.empty_like(inv_bandwidth) if with_inv_bandwidth else None
    if spread is not None and not spread.numel():  # as torch operators return None
        spread = None
    _short_numbers_grad(upstream.shape)(
        upstream, numbers, inv_bandwidth, points, order, spread, z, sums, expected, d_numbers,
        d_inv_bandwidth,
    )  # fmt: skip
    return d_numbers, d_inv_bandwidth


def _times_kernel(x: Tensor, points: Tensor, inv_bandwidth: Tensor) -> Tensor:
    """``κx``, (batch, 1, N)."""
    y = torch.empty_like(points)
    column = columns(points.shape, inv_bandwidth.shape[0], METRIC, FP32_ROWS)
    column(x, None, None, points, None, inv_bandwidth, y, None)
    return y


def _sort(
    numbers: Tensor, inv_bandwidth: Tensor, mask: Tensor | None, in_spreads: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Points, tokens and spread of :func:`sort_points`, and z."""
    lengths = masked_lengths(mask)
    points, order, spread = sort_points(
        numbers.unsqueeze(-1), None, None, mask, lengths, 1.0, in_spreads
    )
    return points, order, spread, row_scales(points, lengths, inv_bandwidth, METRIC, FP32_ROWS)


def _to_tokens(ranked: Tensor, order: Tensor) -> Tensor:
    """A column by rank, (batch, 1, N), as one by token, (batch, N)."""
    ranked = ranked.squeeze(1)
    return torch.empty_like(ranked).scatter_(-1, order.squeeze(1).long(), ranked)


def _numbers_gradient(
    slope: Tensor, more: Tensor, points: Tensor, order: Tensor, spread: Tensor | None,
    mask: Tensor | None,
) -> Tensor:  # fmt: skip
    """The gradient of the numbers, (batch, N), from the two parts of that of their points."""
    batch, _, tokens = points.shape
    spread = spread if spread is not None and spread.numel() else None
    return point_gradients(
        slope, more, points, order, spread, points.view(batch, tokens, 1), None, None,
        masked_lengths(mask), 1.0, False,
    )[0].squeeze(-1)  # fmt: skip


@operator("sort_numbers", f"({ARGUMENTS}) -> ({', '.join(['Tensor'] * 6)})", keeps=True)
def sort_numbers(
    numbers: Tensor, inv_bandwidth: Tensor, mask: Tensor | None, in_spreads: bool
) -> tuple[Tensor | None, ...]:
    """Numbers (batch, N), softly sorted; padding is zero, and comes last.

    Also returns what the backward pass needs: points, tokens and spreads, z, and κx.
    """
    if row_fits(numbers.shape):
        return _mix_short_numbers(numbers, inv_bandwidth, mask, in_spreads, ranks=False)
    points, order, spread, z = _sort(numbers, inv_bandwidth, mask, in_spreads)
    x = numbers.unsqueeze(1).gather(-1, order.long())
    sums = _times_kernel(x, points, inv_bandwidth)
    return sums.squeeze(1) * z.squeeze(1), points, order, spread, z, sums


@operator(
    "sort_numbers_backward",
    "(Tensor upstream, Tensor numbers, Tensor points, Tensor order, Tensor? spread, Tensor z, "
    "Tensor sums, Tensor inv_bandwidth, Tensor? mask, bool with_inv_bandwidth) -> (Tensor, Tensor)",
)
def sort_numbers_backward(
    upstream: Tensor, numbers: Tensor, points: Tensor, order: Tensor, spread: Tensor | None,
    z: Tensor, sums: Tensor, inv_bandwidth: Tensor, mask: Tensor | None, with_inv_bandwidth: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gradients of the numbers and, if asked for, of `inv_bandwidth`.

    Of ``gᵀ (z · κx)``, with ``p = z g``: κp for x, the slope of ``pᵀ κ x`` for the points, and that
    of z, whose upstream is ``g · κx``.
    """
    if row_fits(numbers.shape):
        return _short_number_gradients(
            upstream, numbers, points, order, spread, z, sums, None, inv_bandwidth,
            with_inv_bandwidth,
        )  # fmt: skip
    tokens = order.long()
    p = upstream.unsqueeze(1) * z
    x = numbers.unsqueeze(1).gather(-1, tokens)
    slope = sorted_slope(p, x, points, inv_bandwidth, METRIC, FP32_ROWS)
    dz = upstream.unsqueeze(1) * sums
    z_slope = row_scales_backward(dz, z, points, inv_bandwidth, METRIC, FP32_ROWS)
    d_numbers = _numbers_gradient(slope, z_slope, points, order, spread, mask)
    d_numbers += _to_tokens(_times_kernel(p, points, inv_bandwidth), order)
    if not with_inv_bandwidth:
        return d_numbers, None
    return d_numbers, bandwidth_gradient(slope + z_slope, points, inv_bandwidth)


def _centred_ranks(z: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | float, Tensor | float]:
    """Ranks around zero and near one; and the middle and the scale that they had, of every row.

    Sums of such ranks do not cancel, and leave no precision unused.
    """
    tokens = z.shape[-1]
    ranks = torch.arange(1, tokens + 1, dtype=z.dtype, device=z.device)
    if mask is None:
        middle: Tensor | float = (tokens + 1) / 2
        scale: Tensor | float = max(1, tokens)
    else:
        count = mask.sum(-1, dtype=z.dtype).view(-1, 1, 1)
        middle, scale = (count + 1) / 2, count.clamp(min=1)
    return (ranks - middle) / scale, middle, scale


@operator("rank_numbers", f"({ARGUMENTS}) -> ({', '.join(['Tensor'] * 7)})", keeps=True)
def rank_numbers(
    numbers: Tensor, inv_bandwidth: Tensor, mask: Tensor | None, in_spreads: bool
) -> tuple[Tensor | None, ...]:
    """Expected ranks of numbers (batch, N), counted from one; those of padding are zero.

    Also returns what the backward pass needs: points, tokens and spreads, z, κz, and the centred
    expected ranks by rank.
    """
    if row_fits(numbers.shape):
        return _mix_short_numbers(numbers, inv_bandwidth, mask, in_spreads, ranks=True)
    points, order, spread, z = _sort(numbers, inv_bandwidth, mask, in_spreads)
    centred, middle, scale = _centred_ranks(z, mask)
    mass = _times_kernel(z, points, inv_bandwidth)
    if mask is not None:
        mass.masked_fill_(mass == 0, 1)  # where no number takes part
    expected = _times_kernel(z * centred, points, inv_bandwidth).div_(mass)
    out = _to_tokens(expected * scale + middle, order)
    if mask is not None:
        out = out.masked_fill(~mask, 0)
    return out, points, order, spread, z, mass, expected


@operator(
    "rank_numbers_backward",
    "(Tensor upstream, Tensor points, Tensor order, Tensor? spread, Tensor z, Tensor mass, "
    "Tensor expected, Tensor inv_bandwidth, Tensor? mask, bool with_inv_bandwidth) "
    "-> (Tensor, Tensor)",
)
def rank_numbers_backward(
    upstream: Tensor, points: Tensor, order: Tensor, spread: Tensor | None, z: Tensor,
    mass: Tensor, expected: Tensor, inv_bandwidth: Tensor, mask: Tensor | None,
    with_inv_bandwidth: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gradients of the numbers and, if asked for, of `inv_bandwidth`.

    Of ``gᵀ r`` with ``r = κ(z c) / κz``: with ``a = g / κz`` and ``b = -a r`` those of
    ``aᵀ κ (z c) + bᵀ κ z``.
    """
    if row_fits(upstream.shape):
        return _short_number_gradients(
            upstream, None, points, order, spread, z, mass, expected, inv_bandwidth,
            with_inv_bandwidth,
        )  # fmt: skip
    centred, _, scale = _centred_ranks(z, mask)
    a = upstream.unsqueeze(1).gather(-1, order.long()) * scale / mass
    if mask is not None:
        a = a.masked_fill(z == 0, 0)
    b = -a * expected
    slope = sorted_slope(a, z * centred, points, inv_bandwidth, METRIC, FP32_ROWS)
    slope += sorted_slope(b, z, points, inv_bandwidth, METRIC, FP32_ROWS)
    dz = _times_kernel(a, points, inv_bandwidth).mul_(centred)
    dz += _times_kernel(b, points, inv_bandwidth)
    z_slope = row_scales_backward(dz, z, points, inv_bandwidth, METRIC, FP32_ROWS)
    d_numbers = _numbers_gradient(slope, z_slope, points, order, spread, mask)
    if not with_inv_bandwidth:
        return d_numbers, None
    return d_numbers, bandwidth_gradient(slope + z_slope, points, inv_bandwidth)


def _fake(columns: int) -> Callable[..., tuple[Tensor, ...]]:
    """The fake rule of an operator that keeps this many columns besides what the sort gives."""

    def fake(
        numbers: Tensor, inv_bandwidth: Tensor, mask: Tensor | None, in_spreads: bool
    ) -> tuple[Tensor, ...]:
        batch, tokens = numbers.shape
        points = numbers.new_empty(batch, 1, tokens)
        order = torch.empty_like(points, dtype=torch.int32)
        spread = numbers.new_empty((batch, 1) if in_spreads else 0)
        kept = [torch.empty_like(points) for _ in range(columns)]
        return numbers.new_empty(numbers.shape), points, order, spread, *kept

    return fake


sort_numbers.register_fake(_fake(2))
rank_numbers.register_fake(_fake(3))


def _fake_gradients(*args: Any) -> tuple[Tensor, Tensor]:
    upstream, inv_bandwidth, with_inv_bandwidth = args[0], args[-3], args[-1]
    shape = inv_bandwidth.shape if with_inv_bandwidth else 0
    return upstream.new_empty(upstream.shape), inv_bandwidth.new_empty(shape)


sort_numbers_backward.register_fake(_fake_gradients)
rank_numbers_backward.register_fake(_fake_gradients)


def _setup_sort(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    numbers, inv_bandwidth, mask, _ = inputs
    ctx.save_for_backward(numbers, *output[1:], inv_bandwidth, mask)


def _setup_rank(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, inv_bandwidth, mask, _ = inputs
    ctx.save_for_backward(*output[1:], inv_bandwidth, mask)


def _gradients(backward: Any) -> Any:
    """The autograd rule of an operator, from the operator that computes its gradients."""

    @refuse_double_backward("espformer's linear-time attention")
    def gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if grads[0] is None:
            return (None,) * 4
        with_inv_bandwidth = ctx.needs_input_grad[1]
        d_numbers, d_inv_bandwidth = backward(grads[0], *ctx.saved_tensors, with_inv_bandwidth)
        return d_numbers, d_inv_bandwidth if with_inv_bandwidth else None, None, None

    return gradients


sort_numbers.register_autograd(_gradients(sort_numbers_backward), setup_context=_setup_sort)
rank_numbers.register_autograd(_gradients(rank_numbers_backward), setup_context=_setup_rank)


@triton.jit(do_not_specialize=("D",))
def short_rows_kernel(
    numbers_ptr,  # (B, N) float32
    values_ptr,  # (B, N, D) float32: by token, or by rank if BACK
    inv_bandwidth_ptr,  # (B,) float32
    mask_ptr,  # (B, N) bytes, or None: all take part
    out_ptr,  # (B, N, D) float32: by rank, or by token if BACK; zero at padding
    points_ptr,  # (B, N) float32
    order_ptr,  # (B, N) int32
    spread_ptr,  # (B,) float32, or None
    z_ptr,  # (B, N) float32
    N, D, BACK: tl.constexpr, INFINITY: tl.constexpr, LEAST_SIZE: tl.constexpr,
    LEAST_SHARE: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, VECTORS: tl.constexpr,
    DIMS: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Sorts one row of numbers, and its values with it, two columns at a time."""
    length, token, _, s = sort_row(
        numbers_ptr, inv_bandwidth_ptr, mask_ptr, points_ptr, order_ptr, spread_ptr, N,
        INFINITY, LEAST_SIZE, LEAST_SHARE, BLOCK, VECTOR, VECTORS, DIMS, HELD,
    )  # fmt: skip
    n = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64) * N
    inside, here = n < N, n < length
    ones = tl.where(here, 1.0, 0.0)
    weights, _ = scan_times_kappa(ones, ones, s)
    z = one_over(weights, here)
    tl.store(z_ptr + row + n, z, mask=inside)
    values_ptr += row * D
    out_ptr += row * D
    source, target = (n if BACK else token) * D, (token if BACK else n) * D
    in_scale, out_scale = z if BACK else ones, ones if BACK else z
    for d in range(0, D, 2):
        two = d + 1 < D
        first = tl.load(values_ptr + source + d, mask=here, other=0.0) * in_scale
        second = tl.load(values_ptr + source + d + 1, mask=here & two, other=0.0) * in_scale
        first, second = scan_times_kappa(first, second, s)
        first = tl.where(here, first * out_scale, 0.0)
        second = tl.where(here, second * out_scale, 0.0)
        tl.store(out_ptr + target + d, first, mask=inside)
        tl.store(out_ptr + target + d + 1, second, mask=inside & two)


@triton.jit(do_not_specialize=("D",))
def short_rows_grad_kernel(
    upstream_ptr,  # (B, N, D) float32: of `out`
    values_ptr,  # (B, N, D) float32, and so on, as the forward kernel took and left them
    inv_bandwidth_ptr,  # (B,) float32
    points_ptr,  # (B, N) float32
    order_ptr,  # (B, N) int32
    spread_ptr,  # (B,) float32, or None
    z_ptr,  # (B, N) float32
    d_numbers_ptr,  # (B, N) float32
    d_values_ptr,  # (B, N, D) float32
    d_inv_bandwidth_ptr,  # (B,) float32, or None
    N, D, BACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of the numbers of one row, of their values, and of the bandwidth."""
    row = tl.program_id(0).to(tl.int64)
    at = row * N
    n = tl.arange(0, BLOCK)
    inside = n < N
    z = tl.load(z_ptr + at + n, mask=inside, other=0.0)
    here = z != 0.0  # NaN included
    token = tl.load(order_ptr + at + n, mask=inside, other=0)
    points = tl.load(points_ptr + at + tl.minimum(n, N - 1))
    points = from_middle(points, n, tl.sum(here.to(tl.int32), 0))
    inv_bandwidth = tl.load(inv_bandwidth_ptr + row)
    s = rounded_product(points, inv_bandwidth * LOG2E)
    upstream_ptr += at * D
    values_ptr += at * D
    d_values_ptr += at * D
    ones = tl.where(here, 1.0, 0.0)
    source, target = (n if BACK else token) * D, (token if BACK else n) * D
    in_scale, out_scale = z if BACK else ones, ones if BACK else z
    slope = tl.zeros_like(s)
    z_dz = tl.zeros_like(s)  # z times the gradient of z
    for d in range(D):
        g = tl.load(upstream_ptr + target + d, mask=here, other=0.0) * out_scale
        v = tl.load(values_ptr + source + d, mask=here, other=0.0) * in_scale
        g_sums, v_sums, more = kappa_and_slope(g, v, s)
        slope += more
        z_dz += v * g_sums if BACK else g * v_sums
        d_values = tl.where(here, g_sums * in_scale, 0.0)
        tl.store(d_values_ptr + source + d, d_values, mask=inside)
    # Of z = 1 / κ1 with the gradient dz it is the slope of -(z² dz)ᵀ κ1.
    _, _, more = kappa_and_slope(-z * z_dz, ones, s)
    slope = number_gradients(
        slope + more, points, here, inv_bandwidth, row, spread_ptr, d_inv_bandwidth_ptr
    )
    tl.store(d_numbers_ptr + at + token, slope, mask=inside)


def values_fit(shape: Shape) -> bool:
    """Whether these kernels take values of this shape, (batch, N, d)."""
    return 0 < shape[2] <= MOST_ROW_WIDTH and row_fits(shape[:2])


@once
def _short_rows(shape: Shape, back: bool) -> Launch:
    batch, count, width = shape
    return Launch(
        short_rows_kernel, (batch,), N=count, D=width, BACK=back, INFINITY=INFINITY,
        LEAST_SIZE=LEAST_SIZE, LEAST_SHARE=LEAST_SHARE, **sort_block_config(count),
    )  # fmt: skip


@once
def _short_rows_grad(shape: Shape, back: bool) -> Launch:
    batch, count, width = shape
    config = block_config(count)
    return Launch(short_rows_grad_kernel, (batch,), N=count, D=width, BACK=back, **config)


@operator(
    "mix_rows",
    "(Tensor numbers, Tensor values, Tensor inv_bandwidth, Tensor? mask, bool in_spreads, "
    "bool back) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    keeps=True,
)
def mix_rows(
    numbers: Tensor, values: Tensor, inv_bandwidth: Tensor, mask: Tensor | None, in_spreads: bool,
    back: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Values (batch, N, d), softly sorted by numbers (batch, N), or from ranks `back` to tokens.

    Also returns what the backward pass needs: points, tokens and spreads, and z.
    """
    out = torch.empty_like(values)
    points, z = torch.empty_like(numbers), torch.empty_like(numbers)
    order = torch.empty_like(numbers, dtype=torch.int32)
    spread = torch.empty_like(inv_bandwidth) if in_spreads else None
    flags = None if mask is None else mask.view(torch.uint8)
    short_rows = _short_rows(values.shape, back)
    short_rows(numbers, values, inv_bandwidth, flags, out, points, order, spread, z)
    return out, points, order, spread, z


@operator(
    "mix_rows_backward",
    "(Tensor upstream, Tensor values, Tensor points, Tensor order, Tensor? spread, Tensor z, "
    "Tensor inv_bandwidth, bool back, bool with_inv_bandwidth) -> (Tensor, Tensor, Tensor)",
)
def mix_rows_backward(
    upstream: Tensor, values: Tensor, points: Tensor, order: Tensor, spread: Tensor | None,
    z: Tensor, inv_bandwidth: Tensor, back: bool, with_inv_bandwidth: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of the numbers, of the values and, if asked for, of `inv_bandwidth`."""
    d_numbers, d_values = torch.empty_like(points), torch.empty_like(values)
    d_inv_bandwidth = torch.empty_like(inv_bandwidth) if with_inv_bandwidth else None
    if spread is not None and not spread.numel():  # as torch operators return None
        spread = None
    _short_rows_grad(values.shape, back)(
        upstream, values, inv_bandwidth, points, order, spread, z, d_numbers, d_values,
        d_inv_bandwidth,
    )  # fmt: skip
    return d_numbers, d_values, d_inv_bandwidth


@mix_rows.register_fake
def _(
    numbers: Tensor, values: Tensor, inv_bandwidth: Tensor, mask: Tensor | None, in_spreads: bool,
    back: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    points, z = (numbers.new_empty(numbers.shape) for _ in range(2))
    order = numbers.new_empty(numbers.shape, dtype=torch.int32)
    spread = inv_bandwidth.new_empty(inv_bandwidth.shape if in_spreads else 0)
    return values.new_empty(values.shape), points, order, spread, z


@mix_rows_backward.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    values, points, inv_bandwidth, with_inv_bandwidth = args[1], args[2], args[6], args[-1]
    shape = inv_bandwidth.shape if with_inv_bandwidth else 0
    d_numbers, d_values = (x.new_empty(x.shape) for x in (points, values))
    return d_numbers, d_values, inv_bandwidth.new_empty(shape)


def _setup_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, values, inv_bandwidth, _, _, ctx.back = inputs
    ctx.save_for_backward(values, *output[1:], inv_bandwidth)


@refuse_double_backward("espformer's linear-time attention")
def _row_gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    if grads[0] is None:
        return (None,) * 6
    with_inv_bandwidth = ctx.needs_input_grad[2]
    d_numbers, d_values, d_inv_bandwidth = mix_rows_backward(
        grads[0], *ctx.saved_tensors, ctx.back, with_inv_bandwidth
    )
    return d_numbers, d_values, d_inv_bandwidth if with_inv_bandwidth else None, None, None, None


mix_rows.register_autograd(_row_gradients, setup_context=_setup_rows)
