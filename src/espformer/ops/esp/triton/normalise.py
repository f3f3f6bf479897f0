"""Soft sorts: points in rank order, with scales that make κ row-stochastic or doubly stochastic.

The torch twin is :class:`espformer.ops.esp.linear.SoftMixing`. :func:`sort_side` sorts tokens
(`sort.py`) and finds the scales, :func:`sort_side_backward` returns to the tokens. Queries and
keys of one shape are one *side* of twice as many heads, the keys after the queries, so that every
kernel is launched once for both.

**Columns.** A column is too thin for the tensor cores, so these kernels scan along the ranks:
blocks of ranks are scanned in parallel (``tl.associative_scan`` of (decay, sum) pairs), and a carry
goes from block to block. Per pole, with ``a_n = exp(-p (s_n - s_{n-1}))``,

    f_n = a_n (f_{n-1} + x_{n-1})  (rightwards),    b_n = a_{n+1} (b_{n+1} + x_{n+1})  (leftwards),
    (κx)_n = x_n + Re Σ_p w (f_n + b_n),             (κ'x)_n = Re Σ_p w p (b_n - f_n).

The sums exclude the rank itself: for an isolated point they are far smaller than x, and would be
lost in the rounding of a sum with x.
In the absolute metric, a separate scan finds the contribution of equal points to κ' and removes it;
its decay is one while the point stays the same and zero where it changes.

**Balanced scales** are x with ``x · κx = 1``, in one launch, and their gradient in two. Damped
steps converge to x (`espformer/ops/esp/balancing.py`). The gradient is that of the fixed point, not
of the steps, so no step is stored. Under the constraint ``x · κx = 1``, a change of κ changes x by

    (I + P) (dx / x) = -x · (dκ x),    P = diag(x) κ diag(x),

and an upstream gradient u requires the solution of ``(I + P) v = x · u``. The spectrum of ``I + P``
lies in [1, 2], so the same Chebyshev exponents are optimal here: with ``a = x · v``

    a ← a + ω (x² · (u - κa) - a)    from    a = 2/3 x² · u,

and the gradient of the points is the slope of ``-aᵀ κ x`` (the kernel stores -a, since the slope
needs -a). It differs from the gradient of the steps by a few 1e-6.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from espformer.ops.common.triton import Launch, Shape, once, power_of_2
from espformer.ops.esp.balancing import chebyshev_exponents
from espformer.ops.esp.triton import short_columns
from espformer.ops.esp.triton.primitives import (
    column_operands,
    exponential_table,
    of_other_side,
    one_over,
    rotation,
)
from espformer.ops.esp.triton.sort import point_gradients, sort_points

# Ranks per block of a scan: for four warps; or for one warp, which needs no barriers, if there are
# enough scans to fill the GPU.
BLOCK, CROWDED_BLOCK, LEAST_BLOCK = 1024, 256, 32
CROWD = 4096


@triton.jit
def real_step(a, u, b, v):
    """Joins two segments of ranks: their decays are a and b, their sums u and v."""
    return a * b, b * u + v


@triton.jit
def real_steps(a, u, x, b, v, y):
    """:func:`real_step` for two sums with one decay."""
    return a * b, b * u + v, b * x + y


@triton.jit
def complex_step(a_re, a_im, u_re, u_im, b_re, b_im, v_re, v_im):
    """:func:`real_step` for a complex pole."""
    return (
        a_re * b_re - a_im * b_im,
        a_re * b_im + a_im * b_re,
        b_re * u_re - b_im * u_im + v_re,
        b_re * u_im + b_im * u_re + v_im,
    )


@triton.jit
def complex_steps(
    a_re, a_im, u_re, u_im, x_re, x_im, b_re, b_im, v_re, v_im, y_re, y_im
):  # fmt: skip
    """:func:`real_steps` for a complex pole."""
    return (
        a_re * b_re - a_im * b_im,
        a_re * b_im + a_im * b_re,
        b_re * u_re - b_im * u_im + v_re,
        b_re * u_im + b_im * u_re + v_im,
        b_re * x_re - b_im * x_im + y_re,
        b_re * x_im + b_im * x_re + y_im,
    )


@triton.jit
def last_entry(x, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """The entry that the next block starts from."""
    last: tl.constexpr = 0 if REVERSE else BLOCK - 1
    return tl.sum(tl.where(tl.arange(0, BLOCK) == last, x, 0.0), 0, keep_dims=True)


@triton.jit
def previous_ranks(n, N, REVERSE: tl.constexpr):
    """The ranks that a scan came from, and whether there are any."""
    if REVERSE:
        return n + 1, n < N - 1
    return n - 1, (n > 0) & (n < N)


@triton.jit
def real_scan(
    u, x, a, carry_decay, carry,
    BOTH: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums over the previous ranks, starting from a carry-in, and the carry-out; of x too if BOTH.

    u and x are those of the previous ranks; `carry_decay` is that of the carry-in at a rank.
    """
    if BOTH:
        _, f, g = tl.associative_scan((a, a * u, a * x), 0, real_steps, reverse=REVERSE)
        f += carry_decay * carry[0]
        g += carry_decay * carry[1]
        after = (last_entry(f, REVERSE, BLOCK), last_entry(g, REVERSE, BLOCK))
    else:
        _, f = tl.associative_scan((a, a * u), 0, real_step, reverse=REVERSE)
        f += carry_decay * carry[0]
        g = f
        after = (last_entry(f, REVERSE, BLOCK),)
    return f, g, after


@triton.jit
def complex_multiply_add(f_re, f_im, d_re, d_im, s_re, s_im):
    """f + d s, of complex numbers."""
    return f_re + d_re * s_re - d_im * s_im, f_im + d_re * s_im + d_im * s_re


@triton.jit
def complex_scan(
    u, x, a_re, a_im, carry_decay_re, carry_decay_im, carry,
    BOTH: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """:func:`real_scan` for a complex pole."""
    if BOTH:
        _, _, f_re, f_im, g_re, g_im = tl.associative_scan(
            (a_re, a_im, a_re * u, a_im * u, a_re * x, a_im * x), 0, complex_steps, reverse=REVERSE
        )
        f_re, f_im = complex_multiply_add(
            f_re, f_im, carry_decay_re, carry_decay_im, carry[0], carry[1]
        )
        g_re, g_im = complex_multiply_add(
            g_re, g_im, carry_decay_re, carry_decay_im, carry[2], carry[3]
        )
        after = (last_entry(f_re, REVERSE, BLOCK), last_entry(f_im, REVERSE, BLOCK))
        after = after + (last_entry(g_re, REVERSE, BLOCK), last_entry(g_im, REVERSE, BLOCK))
    else:
        _, _, f_re, f_im = tl.associative_scan(
            (a_re, a_im, a_re * u, a_im * u), 0, complex_step, reverse=REVERSE
        )
        f_re, f_im = complex_multiply_add(
            f_re, f_im, carry_decay_re, carry_decay_im, carry[0], carry[1]
        )
        g_re, g_im = f_re, f_im
        after = (last_entry(f_re, REVERSE, BLOCK), last_entry(f_im, REVERSE, BLOCK))
    return f_re, f_im, g_re, g_im, after


@triton.jit
def pole_entry(TABLE: tl.constexpr, WHICH: tl.constexpr, pole, POLES: tl.constexpr):
    """One of the four table entries of a pole: weight and pole, Re and Im."""
    found = TABLE[WHICH]
    for i in tl.static_range(1, POLES):
        found = tl.where(pole == i, TABLE[4 * i + WHICH], found)
    return found


@triton.jit
def zero_carry(BOTH: tl.constexpr, COMPLEX: tl.constexpr):
    """The carry of u, of x if BOTH, where a scan starts; for a real pole then also of ties."""
    carry = ()
    for _ in tl.static_range((4 if BOTH else 2) if COMPLEX else (4 if BOTH else 1)):
        carry = carry + (tl.zeros((1,), tl.float32),)
    return carry


@triton.jit
def block_start(step, N, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """The first rank of the block of a scan step."""
    return (tl.cdiv(N, BLOCK) - 1 - step if REVERSE else step) * BLOCK


@triton.jit
def block_ranks(step, N, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """All ranks of that block."""
    return block_start(step, N, REVERSE, BLOCK) + tl.arange(0, BLOCK)


@triton.jit
def pole_decay(p_re, p_im, x):
    """``exp(-p x)``, real and imaginary part; zero far away, where angles would be large."""
    capped = tl.minimum(x, 40.0)
    size = tl.where(x <= 40.0, tl.exp(-p_re * capped), 0.0)
    re, im = rotation(p_im * capped, ACCURATE=True)
    return size * re, size * im


@triton.jit
def scan_block(
    u, x, points_ptr, step, N, inv_bandwidth, carry, pole, REVERSE: tl.constexpr,
    BOTH: tl.constexpr, TABLE: tl.constexpr, POLES: tl.constexpr, COMPLEX: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The contribution of one pole and direction to κu, κx, κ'u and κ'x, in one block of a scan.

    The rank itself is excluded: u and x are those of the previous ranks. Also returns the
    carry-out. x and slopes are used only if BOTH.
    """
    n = block_ranks(step, N, REVERSE, BLOCK)
    m, linked = previous_ranks(n, N, REVERSE)
    here = tl.load(points_ptr + tl.minimum(n, N - 1))
    there = tl.load(points_ptr + tl.maximum(tl.minimum(m, N - 1), 0))
    gap = tl.abs(here - there)
    # The carry-in comes from the rank before the block. Its decay at a rank is computed from the
    # points, not step by step, because the errors of the steps would add up.
    edge = block_start(step, N, REVERSE, BLOCK) + (BLOCK if REVERSE else -1)
    to_edge = tl.abs(here - tl.load(points_ptr + tl.maximum(tl.minimum(edge, N - 1), 0)))
    if COMPLEX:
        w_re, w_im = pole_entry(TABLE, 0, pole, POLES), pole_entry(TABLE, 1, pole, POLES)
        p_re, p_im = pole_entry(TABLE, 2, pole, POLES), pole_entry(TABLE, 3, pole, POLES)
        v_re = w_re * p_re - w_im * p_im
        v_im = w_re * p_im + w_im * p_re
        a_re, a_im = pole_decay(p_re, p_im, tl.where(linked, gap * inv_bandwidth, float("inf")))
        carry_decay_re, carry_decay_im = pole_decay(p_re, p_im, to_edge * inv_bandwidth)
        f_re, f_im, g_re, g_im, after = complex_scan(
            u, x, a_re, a_im, carry_decay_re, carry_decay_im, carry, BOTH, REVERSE, BLOCK
        )
        ku = w_re * f_re - w_im * f_im
        kx = w_re * g_re - w_im * g_im
        u_slope = v_re * f_re - v_im * f_im
        x_slope = v_re * g_re - v_im * g_im
    else:
        decay, carry_decay = tl.exp(-gap * inv_bandwidth), tl.exp(-to_edge * inv_bandwidth)
        decay = tl.where(linked, decay, 0.0)
        own = carry[:2] if BOTH else carry
        ku, kx, after = real_scan(u, x, decay, carry_decay, own, BOTH, REVERSE, BLOCK)
        u_slope, x_slope = ku, kx
        if BOTH:  # equal points are left out
            same = tl.where(linked & (gap == 0.0), 1.0, 0.0)
            carry_decay = tl.where(to_edge == 0.0, 1.0, 0.0)
            u_tied, x_tied, end = real_scan(
                u, x, same, carry_decay, carry[2:], BOTH, REVERSE, BLOCK
            )
            u_slope = ku - u_tied
            x_slope = kx - x_tied
            after = after + end
    if not REVERSE:
        u_slope = -u_slope
        x_slope = -x_slope
    return ku, kx, u_slope * inv_bandwidth, x_slope * inv_bandwidth, after


@triton.jit
def scan_pole(
    points_ptr, x_ptr, upstream_ptr, d_mid_ptr, other_ptr, y_ptr, slope_ptr, length, inv_bandwidth,
    N, pole, REVERSE: tl.constexpr, TABLE: tl.constexpr, POLES: tl.constexpr,
    COMPLEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scans one pole in one direction, for what :func:`column_kernel` computes.

    The first scan writes the contribution of its pole and direction to y or to the slope, and all
    others add theirs. If scales are wanted (no x, no slope), the last scan inverts the sum.
    """
    added = (pole > 0) | REVERSE
    carry = zero_carry(slope_ptr is not None, COMPLEX)
    for step in range(tl.cdiv(N, BLOCK)):
        n = block_ranks(step, N, REVERSE, BLOCK)
        inside = n < N
        u, x = column_operands(x_ptr, upstream_ptr, d_mid_ptr, other_ptr, y_ptr, n, inside, length)
        m, linked = previous_ranks(n, N, REVERSE)
        u_before, x_before = column_operands(
            x_ptr, upstream_ptr, d_mid_ptr, other_ptr, y_ptr, m, linked, length
        )
        y, _, u_slope, x_slope, carry = scan_block(
            u_before, x_before, points_ptr, step, N, inv_bandwidth, carry, pole, REVERSE,
            slope_ptr is not None, TABLE, POLES, COMPLEX, BLOCK,
        )  # fmt: skip
        if slope_ptr is not None:
            slope = u * x_slope + x * u_slope
            slope += tl.load(slope_ptr + n, mask=inside & added, other=0.0)
            tl.store(slope_ptr + n, slope, mask=inside)
        else:
            y += tl.where(added, tl.load(y_ptr + n, mask=inside & added, other=0.0), x)
            if REVERSE and x_ptr is None:
                y = tl.where(pole == POLES - 1, one_over(y, n < length), y)
            tl.store(y_ptr + n, y, mask=inside)


@triton.jit
def scan_column(
    points_ptr, x_ptr, upstream_ptr, d_mid_ptr, other_ptr, y_ptr, slope_ptr, length, inv_bandwidth,
    N, TABLE: tl.constexpr, POLES: tl.constexpr, COMPLEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scans every pole in both directions; afterwards y, or the slope, is complete."""
    for reverse in tl.static_range(2):
        for pole in range(POLES):
            scan_pole(
                points_ptr, x_ptr, upstream_ptr, d_mid_ptr, other_ptr, y_ptr, slope_ptr, length,
                inv_bandwidth, N, pole, reverse == 1, TABLE, POLES, COMPLEX, BLOCK,
            )  # fmt: skip
            tl.debug_barrier()  # the next scan reads what this one has written


@triton.jit(do_not_specialize=("L", "HEADS"))
def column_kernel(
    x_ptr,  # (B, L, N) float32, or None: ones
    upstream_ptr,  # (B, L, N) float32, for a slope; or None
    d_mid_ptr,  # (HEADS, L, N) float32: of the product of two sides' scales; or None
    points_ptr,  # (B, L, N) float32
    lengths_ptr,  # (HEADS,) int32, or None: all N
    inv_bandwidth_ptr,  # (HEADS,) float32
    y_ptr,  # (B, L, N) float32: κx, or scales, which are read for their slope; or None
    slope_ptr,  # (B, L, N) float32, or None
    N, L, HEADS, TABLE: tl.constexpr, POLES: tl.constexpr, COMPLEX: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A product of κ with one column, or the gradient of the points through one, for one slice:

    - of x alone: ``y = κx``;
    - of nothing: ``y = 1 / κ1``, the scales that make rows sum to one, with ones up to the length;
    - of x and an upstream u, to the slope: the gradient of ``uᵀ κ x``, ``u · κ'x + x · κ'u``;
    - of scales y and their gradients, to the slope: the gradient through these scales. That of y
      itself is the upstream, that of the product of both sides' scales is `d_mid`.

    All else is None. B is HEADS, or twice that: the keys of all heads follow the queries.
    """
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
    if slope_ptr is not None:
        slope_ptr += pair * N
    inv_bandwidth = tl.load(inv_bandwidth_ptr + head)
    scan_column(
        points_ptr + pair * N, x_ptr, upstream_ptr, d_mid_ptr, other_ptr, y_ptr, slope_ptr, length,
        inv_bandwidth, N, TABLE, POLES, COMPLEX, BLOCK,
    )  # fmt: skip


def column_config(shape: Shape, heads: int, metric: str, fp32_rows: bool) -> dict[str, Any]:
    """Arguments of the kernels that scan along the ranks: sizes, and the table of κ.

    The shape is that of points; `heads` are those of one side.
    """
    table = exponential_table(metric, fp32_rows)
    numbers = tuple(
        number
        for w, p in zip(table.weights, table.poles, strict=True)
        for number in (complex(w).real, complex(w).imag, complex(p).real, complex(p).imag)
    )
    _, slices, ranks = shape
    most = BLOCK if heads * slices < CROWD else CROWDED_BLOCK
    block = min(most, max(LEAST_BLOCK, power_of_2(ranks)))
    return {
        "N": ranks, "L": slices, "HEADS": heads, "TABLE": numbers, "POLES": len(table.poles),
        "COMPLEX": metric != "absolute", "BLOCK": block,
        "num_warps": max(1, block // 256),
    }  # fmt: skip


@once
def columns(shape: Shape, heads: int, metric: str, fp32_rows: bool) -> Launch:
    """Normalisers or a slope of every slice of points, by scans or by whole rows of κ."""
    grid = (shape[0] * shape[1],)
    if not fp32_rows and short_columns.fits_registers(shape, metric):
        config = short_columns.register_config(shape, heads)
        return Launch(short_columns.short_column_kernel, grid, **config)
    if short_columns.is_dense(shape, metric):
        config = short_columns.dense_config(shape, heads)
        return Launch(short_columns.dense_column_kernel, grid, **config)
    return Launch(column_kernel, grid, **column_config(shape, heads, metric, fp32_rows))


# Points below may be those of queries and keys together: (2 · batch, L, N).


def sorted_slope(
    u: Tensor, x: Tensor, points: Tensor, inv_bandwidth: Tensor, metric: str, fp32_rows: bool
) -> Tensor:
    """``u · κ'x + x · κ'u``: the gradient of ``uᵀ κ x`` in the points."""
    slope = torch.empty_like(points)
    column = columns(points.shape, inv_bandwidth.shape[0], metric, fp32_rows)
    column(x, u, None, points, None, inv_bandwidth, None, slope)
    return slope


def bandwidth_gradient(d_points: Tensor, points: Tensor, inv_bandwidth: Tensor) -> Tensor:
    """The gradient of the inverse bandwidth, (batch,), from that of the points that it scales."""
    # The terms nearly cancel, so points are centred and the sum is in float64.
    centred = points - points.mean(-1, keepdim=True)
    total = (d_points * centred).sum((1, 2), dtype=torch.float64)
    each = (total.view(-1, *inv_bandwidth.shape) / inv_bandwidth).to(d_points.dtype)
    return each.sum(0)


def row_scales(
    points: Tensor, lengths: Tensor | None, inv_bandwidth: Tensor, metric: str, fp32_rows: bool
) -> Tensor:
    """One over ``κ 1``, what makes a soft sort row-stochastic, (batch, L, N); zero at padding."""
    y = torch.empty_like(points)
    column = columns(points.shape, inv_bandwidth.shape[0], metric, fp32_rows)
    column(None, None, None, points, lengths, inv_bandwidth, y, None)
    return y


def row_scales_backward(
    upstream: Tensor | None, scales: Tensor, points: Tensor, inv_bandwidth: Tensor, metric: str,
    fp32_rows: bool, d_mid_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of the points.

    Scales of queries and keys together may have the gradient of their product, `d_mid_scale`,
    (batch, L, N), in addition to `upstream` or instead of it.
    """
    slope = torch.empty_like(points)
    column = columns(points.shape, inv_bandwidth.shape[0], metric, fp32_rows)
    column(None, upstream, d_mid_scale, points, None, inv_bandwidth, scales, slope)
    return slope


# The first step starts from ones, and has the exponent 1/2.
FORWARD = (0.5, *chebyshev_exponents())
BACKWARD = tuple(chebyshev_exponents())


@triton.jit(do_not_specialize=("L", "HEADS"))
def balance_kernel(
    z_ptr,  # (B, L, N) float32: the scales x, or -a where there is an upstream
    upstream_ptr,  # (B, L, N) float32, or None
    scale_ptr,  # (B, L, N) float32: the scales, for the backward
    points_ptr,  # (B, L, N) float32
    lengths_ptr,  # (HEADS,) int32, or None
    inv_bandwidth_ptr,  # (HEADS,) float32
    y_ptr,  # (B, L, N) float32: scratch for κz
    N, L, HEADS, EXPONENTS: tl.constexpr, STEPS: tl.constexpr, TABLE: tl.constexpr,
    POLES: tl.constexpr, COMPLEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Makes all steps of one slice: to its scales, or to -a, which their gradient needs."""
    pair = tl.program_id(0).to(tl.int64)
    head = pair // L % HEADS
    inv_bandwidth = tl.load(inv_bandwidth_ptr + head)
    length = N
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + head)
    points_ptr += pair * N
    z_ptr += pair * N
    y_ptr += pair * N
    if upstream_ptr is not None:
        upstream_ptr += pair * N
        scale_ptr += pair * N
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        z = tl.where(n < length, 1.0, 0.0)
        if upstream_ptr is not None:
            x = tl.load(scale_ptr + n, mask=n < N, other=0.0)
            z = x * x * tl.load(upstream_ptr + n, mask=n < N, other=0.0) * (-2 / 3)
        tl.store(z_ptr + n, z, mask=n < N)
    tl.debug_barrier()
    for step in range(STEPS):
        exponent = EXPONENTS[0]
        for i in tl.static_range(1, STEPS):
            exponent = tl.where(step == i, EXPONENTS[i], exponent)
        scan_column(
            points_ptr, z_ptr, None, None, None, y_ptr, None, length, inv_bandwidth, N, TABLE,
            POLES, COMPLEX, BLOCK,
        )  # fmt: skip
        for start in range(0, N, BLOCK):
            n = start + tl.arange(0, BLOCK)
            z = tl.load(z_ptr + n, mask=n < N, other=0.0)
            y = tl.load(y_ptr + n, mask=n < N, other=0.0)
            if upstream_ptr is None:
                sums = tl.where(n < length, z * y, 1.0)
                z *= tl.exp2(-exponent * tl.log2(sums))
            else:
                x = tl.load(scale_ptr + n, mask=n < N, other=0.0)
                u = tl.load(upstream_ptr + n, mask=n < N, other=0.0)
                z -= exponent * (x * x * (u + y) + z)
            tl.store(z_ptr + n, z, mask=n < N)
        tl.debug_barrier()


@once
def _balance(
    shape: Shape, heads: int, metric: str, fp32_rows: bool, exponents: tuple[float, ...]
) -> Launch:
    return Launch(
        balance_kernel, (shape[0] * shape[1],), EXPONENTS=exponents, STEPS=len(exponents),
        **column_config(shape, heads, metric, fp32_rows),
    )  # fmt: skip


def balanced_scales(
    points: Tensor, lengths: Tensor | None, inv_bandwidth: Tensor, metric: str, fp32_rows: bool
) -> Tensor:
    """x, so that ``diag(x) κ diag(x)`` is doubly stochastic, (batch, L, N); zero at padding."""
    x, y = torch.empty_like(points), torch.empty_like(points)
    balance = _balance(points.shape, inv_bandwidth.shape[0], metric, fp32_rows, FORWARD)
    balance(x, None, None, points, lengths, inv_bandwidth, y)
    return x


def balanced_scales_backward(
    upstream: Tensor, scales: Tensor, points: Tensor, inv_bandwidth: Tensor, metric: str,
    fp32_rows: bool,
) -> Tensor:  # fmt: skip
    """The gradient of the points."""
    a, y = torch.empty_like(points), torch.empty_like(points)
    balance = _balance(points.shape, inv_bandwidth.shape[0], metric, fp32_rows, BACKWARD)
    balance(a, upstream, scales, points, None, inv_bandwidth, y)
    return sorted_slope(a, scales, points, inv_bandwidth, metric, fp32_rows)


class Tokens(NamedTuple):
    """The tokens of one side, or of both if they have one shape, dtype and mask."""

    x: Tensor  # (batch, N, m)
    y: Tensor | None  # likewise: the keys, if x are the queries
    mask: Tensor | None  # (batch, N), of either
    lengths: Tensor | None  # (batch,) int32, if there is a mask


class SortedSide(NamedTuple):
    """Tokens softly sorted on every slice: ``diag(scales) κ``, or ``diag(scales) κ diag(scales)``
    if balanced. With two sides, heads are those of the queries, then those of the keys.
    """

    points: Tensor  # (heads, L, N): sorted; padding repeats the last true one
    order: Tensor  # (heads, L, N) int32: the token at each rank
    spread: Tensor | None  # (heads, L), if points are in units of it
    scales: Tensor  # (heads, L, N); zero at padding

    def halves(self) -> tuple[SortedSide, SortedSide]:
        """The queries and the keys of two sides, without the spread."""
        points, order, scales = self.points.chunk(2), self.order.chunk(2), self.scales.chunk(2)
        return (
            SortedSide(points[0], order[0], None, scales[0]),
            SortedSide(points[1], order[1], None, scales[1]),
        )


class SortSettings(NamedTuple):
    """How tokens are sorted."""

    scale: float  # what tokens are multiplied by
    in_spreads: bool  # whether points are divided by their spread
    balanced: bool
    metric: str
    fp32_rows: bool


def sort_side(
    tokens: Tokens, slices: Tensor | None, inv_bandwidth: Tensor, settings: SortSettings
) -> SortedSide:
    """Sorts and normalises."""
    scale, in_spreads, balanced, metric, fp32_rows = settings
    points, order, spread = sort_points(
        tokens.x, tokens.y, slices, tokens.mask, tokens.lengths, scale, in_spreads
    )
    normalise = balanced_scales if balanced else row_scales
    scales = normalise(points, tokens.lengths, inv_bandwidth, metric, fp32_rows)
    return SortedSide(points, order, spread, scales)


def sort_side_backward(
    d_points: Tensor, d_scales: Tensor | None, d_mid_scale: Tensor | None, side: SortedSide,
    tokens: Tokens, slices: Tensor | None, inv_bandwidth: Tensor, settings: SortSettings,
    with_slices: bool, with_inv_bandwidth: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x, of y, of the slices and of `inv_bandwidth`; None if there is no such.

    Two sides may have the gradient of the product of their scales, `d_mid_scale`.
    """
    arguments = side.scales, side.points, inv_bandwidth, settings.metric, settings.fp32_rows
    if not settings.balanced:
        slope = row_scales_backward(d_scales, *arguments, d_mid_scale)
    else:
        if d_mid_scale is not None:
            other_scales = side.scales.view(2, *d_mid_scale.shape).flip(0)
            of_mid = (other_scales * d_mid_scale).view(side.scales.shape)
            d_scales = of_mid if d_scales is None else of_mid.add_(d_scales)
        assert d_scales is not None
        slope = balanced_scales_backward(d_scales, *arguments)
    d_inv_bandwidth = None
    if with_inv_bandwidth:
        d_inv_bandwidth = bandwidth_gradient(slope, side.points, inv_bandwidth)
    dx, dy, d_slices = point_gradients(
        slope, d_points, side.points, side.order, side.spread, tokens.x, tokens.y, slices,
        tokens.lengths, settings.scale, with_slices,
    )  # fmt: skip
    return dx, dy, d_slices, d_inv_bandwidth
