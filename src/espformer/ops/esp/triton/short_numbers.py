"""Soft sorts and ranks of short rows of numbers: one launch, in which a program holds a whole row.

These are the columns of `numbers.py`, which chooses between its own launches and these kernels
(:func:`fits`); the torch twins are the same. A row of a thousand numbers is nothing for a GPU, so
the number of launches is what it costs.

**Scans.** A stretch of ranks is known by the point s of its last rank and by sums ``u`` that have
decayed to that point. Of two stretches that follow each other, the sums are joined as

    u = exp(-|s_2 - s_1|) u_1 + u_2,

for all ranks at once by ``tl.associative_scan``, in both directions. Decays are computed from the
points of the stretches, not step by step, so that errors do not add up along a row.

**Ties.** κ' leaves out equal points. Sums over all ranks but those that are tied with the last one
(`untied`) are joined likewise: the first stretch counts as a whole if it ends at another point,
and as far as it is untied itself if it ends at the same.

Ranks past the end repeat the last point, and their numbers are zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from espformer.ops.common.triton import Launch, Shape, once, power_of_2
from espformer.ops.esp.triton.primitives import LOG2E, exp2_minus_abs, one_over, rounded_product
from espformer.ops.esp.triton.sort import (
    LEAST_SHARE,
    Words,
    any_infinite,
    decode_points,
    make_words,
    repeat_last,
    row_spread,
    sort_words,
    sortable,
    word_index,
)

# The least size of numbers that have a spread. They are not scaled to be near one first, so it is
# as small as its inverse allows.
LEAST_SIZE = 4 * torch.finfo(torch.float32).tiny
MOST_NUMBERS = 4096  # of a row: eight for each of 512 threads, with 128 registers each
LEAST_BLOCK, MOST_WARPS, THREAD_NUMBERS = 32, 16, 4
INFINITY = Words.of(torch.float32, 1, False, 1.0).infinity


@triton.jit
def join(s, u, x, s_next, u_next, x_next):
    """Two stretches of ranks as one: its last point, and sums of u and x at that point."""
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
def times_kappa(u, x, s):
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
    stretch = tl.sum(slope * centred, 0)
    if d_inv_bandwidth_ptr is not None:
        tl.store(d_inv_bandwidth_ptr + row, stretch / inv_bandwidth)
    if spread_ptr is not None:
        # Divided by the spread, points have a spread of one; or nearly none, and no gradient.
        flat = tl.sum(centred * centred, 0) <= 0.5 * count
        slope = (slope - stretch / count * centred) / tl.load(spread_ptr + row)
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
    weights, sums = times_kappa(tl.where(here, 1.0, 0.0), x, s)
    z = one_over(weights, here)
    tl.store(z_ptr + row + n, z, mask=inside)
    if expected_ptr is None:
        tl.store(out_ptr + row + n, tl.where(here, sums * z, 0.0), mask=inside)
    else:
        centred, middle, scale = centred_ranks(n, length)
        sums, moments = times_kappa(z, z * centred, s)
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
    """Gradients of the numbers of one row, as `numbers.py` has their formulas, and of the
    bandwidth.
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


def fits(shape: Shape) -> bool:
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
    held = config["BLOCK"] // (32 * config["num_warps"])
    vector = min(4, held)  # words that a thread loads at once
    return config | {
        "VECTOR": vector, "VECTORS": held // vector, "DIMS": config["BLOCK"].bit_length() - 1,
        "HELD": held.bit_length() - 1,
    }  # fmt: skip


@once
def _forward(shape: Shape) -> Launch:
    return Launch(
        short_numbers_kernel, shape[:1], N=shape[1], INFINITY=INFINITY, LEAST_SIZE=LEAST_SIZE,
        LEAST_SHARE=LEAST_SHARE, **sort_block_config(shape[1]),
    )  # fmt: skip


@once
def _backward(shape: Shape) -> Launch:
    return Launch(short_numbers_grad_kernel, shape[:1], N=shape[1], **block_config(shape[1]))


def mix(
    numbers: Tensor, inv_bandwidth: Tensor, mask: Tensor | None, in_spreads: bool, ranks: bool
) -> tuple[Tensor | None, ...]:
    """What the operators ``sort_numbers`` and ``rank_numbers`` return."""
    batch, count = numbers.shape
    column = batch, 1, count
    out = torch.empty_like(numbers)
    points, z, sums = (numbers.new_empty(column) for _ in range(3))
    order = numbers.new_empty(column, dtype=torch.int32)
    spread = numbers.new_empty(batch, 1) if in_spreads else None
    expected = numbers.new_empty(column) if ranks else None
    flags = None if mask is None else mask.view(torch.uint8)
    _forward(numbers.shape)(
        numbers, inv_bandwidth, flags, out, points, order, spread, z, sums, expected
    )
    found = out, points, order, spread, z, sums
    return (*found, expected) if ranks else found


def gradients(
    upstream: Tensor, numbers: Tensor | None, points: Tensor, order: Tensor, spread: Tensor | None,
    z: Tensor, sums: Tensor, expected: Tensor | None, inv_bandwidth: Tensor,
    with_inv_bandwidth: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gradients of the numbers and, if asked for, of `inv_bandwidth`, from what :func:`mix` kept:
    `numbers` of sorted ones, `expected` of ranks.
    """
    d_numbers = torch.empty_like(upstream)
    d_inv_bandwidth = torch.empty_like(inv_bandwidth) if with_inv_bandwidth else None
    if spread is not None and not spread.numel():  # as torch operators return None
        spread = None
    _backward(upstream.shape)(
        upstream, numbers, inv_bandwidth, points, order, spread, z, sums, expected, d_numbers,
        d_inv_bandwidth,
    )  # fmt: skip
    return d_numbers, d_inv_bandwidth
