"""Slice costs, apart from plans: centred rows, and sums of their squared norms.

The torch twin is :func:`espformer.ops.esp.linear.slice_costs`.

With soft sorts ``S = diag(out_scale) κ diag(in_scale)``, a slice's sum of squared norms is

    ⟨out_scale, κ (in_scale · square[order])⟩,

a product with one column. It is scanned as in `normalise.py`; its backward needs both columns,
κ out_scale and κ (in_scale · square), and nothing of the forward.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from espformer.ops.common.triton import Launch, Shape, ceil_div, once, power_of_2, width_arguments
from espformer.ops.esp.triton import short_columns
from espformer.ops.esp.triton.normalise import (
    block_ranks,
    column_config,
    previous_ranks,
    scan_block,
    zero_carry,
)
from espformer.ops.esp.triton.primitives import (
    load_one_of_two,
    load_squares,
    program_rows,
    store_one_of_two,
)


@triton.jit(do_not_specialize=("L", "HEADS"))
def norm_costs_kernel(
    square_ptr,  # (B, N) float32, by token
    order_ptr,  # (B, L, N) int32
    out_scale_ptr,  # (B, L, N) float32
    in_scale_ptr,  # (B, L, N) float32, or None: ones
    points_ptr,  # (B, L, N) float32
    inv_bandwidth_ptr,  # (HEADS,) float32
    out_ptr,  # (B, L) float32
    N, L, HEADS, TABLE: tl.constexpr, POLES: tl.constexpr, COMPLEX: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``⟨out_scale, κ (in_scale · square)⟩`` of one slice.

    B is HEADS, or twice that: the keys of all heads follow the queries.
    """
    pair = tl.program_id(0).to(tl.int64)
    inv_bandwidth = tl.load(inv_bandwidth_ptr + pair // L % HEADS)
    at = pair * N
    total = tl.zeros((BLOCK,), tl.float32)
    for reverse in tl.static_range(2):
        for pole in range(POLES):
            carry = zero_carry(False, COMPLEX)
            for step in range(tl.cdiv(N, BLOCK)):
                n = block_ranks(step, N, reverse == 1, BLOCK)
                inside = n < N
                m, linked = previous_ranks(n, N, reverse == 1)
                x = load_squares(
                    square_ptr + pair // L * N, order_ptr + at, in_scale_ptr, at, m, linked
                )
                kx, _, _, _, carry = scan_block(
                    x, x, points_ptr + at, step, N, inv_bandwidth, carry, pole, reverse == 1, False,
                    TABLE, POLES, COMPLEX, BLOCK,
                )  # fmt: skip
                if reverse == 0:  # and the rank itself, once
                    own = load_squares(
                        square_ptr + pair // L * N, order_ptr + at, in_scale_ptr, at, n, inside
                    )
                    kx += tl.where(pole == 0, own, 0.0)
                total += kx * tl.load(out_scale_ptr + at + n, mask=inside, other=0.0)
    tl.store(out_ptr + pair, tl.sum(total, 0))


@triton.jit(do_not_specialize=("L", "HEADS"))
def norm_costs_grad_kernel(
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
    kappa_out_ptr,  # (B, L, N) float32: scratch for upstream · κ out_scale
    N, L, HEADS, ATOMIC: tl.constexpr, TABLE: tl.constexpr, POLES: tl.constexpr,
    COMPLEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All gradients of :func:`norm_costs_kernel`, of one slice."""
    pair = tl.program_id(0).to(tl.int64)
    inv_bandwidth = tl.load(inv_bandwidth_ptr + pair // L % HEADS)
    upstream = tl.load(upstream_ptr + pair % (HEADS * L))
    at = pair * N
    for reverse in tl.static_range(2):
        for pole in range(POLES):
            added = (pole > 0) | (reverse == 1)
            carry = zero_carry(True, COMPLEX)
            for step in range(tl.cdiv(N, BLOCK)):
                n = block_ranks(step, N, reverse == 1, BLOCK)
                inside = n < N
                rank = at + n
                token = tl.load(order_ptr + rank, mask=inside, other=0)
                square = tl.load(square_ptr + pair // L * N + token, mask=inside, other=0.0)
                x = square
                if in_scale_ptr is not None:
                    in_scale = tl.load(in_scale_ptr + rank, mask=inside, other=0.0)
                    x *= in_scale
                u = tl.load(out_scale_ptr + rank, mask=inside, other=0.0) * upstream
                m, linked = previous_ranks(n, N, reverse == 1)
                x_before = load_squares(
                    square_ptr + pair // L * N, order_ptr + at, in_scale_ptr, at, m, linked
                )
                u_before = tl.load(out_scale_ptr + at + m, mask=linked, other=0.0) * upstream
                kappa_out, kx, u_slope, x_slope, carry = scan_block(
                    u_before, x_before, points_ptr + at, step, N, inv_bandwidth, carry, pole,
                    reverse == 1, True, TABLE, POLES, COMPLEX, BLOCK,
                )  # fmt: skip
                slope = u * x_slope + x * u_slope
                kappa_out += tl.where(
                    added, tl.load(kappa_out_ptr + rank, mask=inside & added, other=0.0), u
                )
                d_out_scale = (kx + tl.where(added, 0.0, x)) * upstream  # the rank itself, once
                d_out_scale += tl.load(d_out_scale_ptr + rank, mask=inside & added, other=0.0)
                slope += tl.load(slope_ptr + rank, mask=inside & added, other=0.0)
                tl.store(kappa_out_ptr + rank, kappa_out, mask=inside)
                tl.store(d_out_scale_ptr + rank, d_out_scale, mask=inside)
                tl.store(slope_ptr + rank, slope, mask=inside)
                if reverse == 1:
                    whole = inside & (pole == POLES - 1)
                    if in_scale_ptr is not None:
                        tl.store(d_in_scale_ptr + rank, kappa_out * square, mask=whole)
                        kappa_out *= in_scale
                    if ATOMIC:
                        to_ptr = d_square_ptr + pair // L * N + token
                        tl.atomic_add(to_ptr, kappa_out, mask=whole, sem="relaxed")
                    else:
                        tl.store(d_square_ptr + at + token, kappa_out, mask=whole)
            tl.debug_barrier()  # the next scan reads what this one has written


@once
def _norm_costs_launch(shape: Shape, heads: int, metric: str, fp32_rows: bool) -> Launch:
    grid = (shape[0] * shape[1],)
    if short_columns.is_dense(shape, metric):
        config = short_columns.dense_config(shape, heads)
        return Launch(short_columns.dense_norm_costs_kernel, grid, **config)
    return Launch(norm_costs_kernel, grid, **column_config(shape, heads, metric, fp32_rows))


@once
def _norm_costs_grad_launch(
    shape: Shape, heads: int, metric: str, fp32_rows: bool, atomic: bool
) -> Launch:
    kernel: Any = norm_costs_grad_kernel
    if short_columns.is_dense(shape, metric):
        kernel, config = (
            short_columns.dense_norm_costs_grad_kernel,
            short_columns.dense_config(shape, heads),
        )
    else:
        config = column_config(shape, heads, metric, fp32_rows)
    return Launch(kernel, (shape[0] * shape[1],), ATOMIC=atomic, **config)


# Sides below may be queries and keys together: 2 · batch heads.


def norm_costs(
    square: Tensor, order: Tensor, out_scale: Tensor, in_scale: Tensor | None, points: Tensor,
    inv_bandwidth: Tensor, metric: str, fp32_rows: bool,
) -> Tensor:  # fmt: skip
    """``Σ_n out_scale[l, n] · (κ_l (in_scale_l · square[order_l]))_n``: (batch, L)."""
    out = square.new_empty(order.shape[:2])
    launch = _norm_costs_launch(points.shape, inv_bandwidth.shape[0], metric, fp32_rows)
    launch(square, order, out_scale, in_scale, points, inv_bandwidth, out)
    return out


def norm_costs_backward(
    upstream: Tensor, square: Tensor, order: Tensor, out_scale: Tensor, in_scale: Tensor | None,
    points: Tensor, inv_bandwidth: Tensor, metric: str, fp32_rows: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Gradients of the squares, of both scales, and of the points.

    `upstream`, (heads, L), is that of both sides, if sides are queries and keys together.
    """
    atomic = not torch.are_deterministic_algorithms_enabled()
    d_square = torch.zeros_like(square) if atomic else torch.empty_like(points)
    d_out_scale, slope = torch.empty_like(points), torch.empty_like(points)
    d_in_scale = None if in_scale is None else torch.empty_like(points)
    scans = not short_columns.is_dense(points.shape, metric)
    heads = inv_bandwidth.shape[0]
    _norm_costs_grad_launch(points.shape, heads, metric, fp32_rows, atomic)(
        upstream, square, order, out_scale, in_scale, points, inv_bandwidth, d_square, d_out_scale,
        d_in_scale, slope, *((torch.empty_like(points),) if scans else ()),
    )  # fmt: skip
    return d_square if atomic else d_square.sum(1), d_out_scale, d_in_scale, slope


@triton.jit
def program_tokens(N, HEADS, BLOCKS, WIDTH, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """The head of this program among those of both sides and among its own side's; its tokens and
    columns; their offsets within the head, (tokens, columns), and which of them exist.
    """
    row_head, n, d, columns = program_rows(N, BLOCKS, WIDTH, BLOCK_N, BLOCK_D)
    head = row_head % HEADS
    inside = (n[:, None] < N) & columns
    at = n[:, None] * WIDTH + d[None, :]
    return row_head, head, n, d, at, inside


@triton.jit(do_not_specialize=("BLOCKS", "D8", "HEADS"))
def centre_kernel(
    x_ptr,  # (HEADS, N, WIDTH)
    y_ptr,  # likewise, of the second side; or None
    centre_ptr,  # (HEADS, WIDTH) float32
    mask_ptr,  # (HEADS, N) bytes, if MASKED
    rows_ptr,  # (B, N, WIDTH): those of x, then those of y
    squares_ptr,  # (B, N) float32
    N, HEADS, BLOCKS, scale, D8, D: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``rows = scale (x - centre)``, zero at padding, and their squared norms."""
    WIDTH = D if D > 0 else D8 * 8
    row_head, head, n, d, at, inside = program_tokens(N, HEADS, BLOCKS, WIDTH, BLOCK_N, BLOCK_D)
    centre = tl.load(centre_ptr + head * WIDTH + d, mask=d < WIDTH, other=0.0)[None, :]
    x = load_one_of_two(x_ptr, y_ptr, row_head >= HEADS, head * N * WIDTH + at, inside)
    x = (x.to(tl.float32) - centre) * scale
    if MASKED:
        present = tl.load(mask_ptr + head * N + n, mask=n < N, other=0) != 0
        x = tl.where(present[:, None], x, 0.0)
    x = tl.where(inside, x, 0.0).to(rows_ptr.dtype.element_ty)
    tl.store(rows_ptr + row_head * N * WIDTH + at, x, mask=inside)
    x = x.to(tl.float32)
    tl.store(squares_ptr + row_head * N + n, tl.sum(x * x, 1), mask=n < N)


@triton.jit(do_not_specialize=("BLOCKS", "D8", "HEADS"))
def centre_grad_kernel(
    d_rows_ptr,  # (B, N, WIDTH) float32
    d_squares_ptr,  # (B, N) float32
    rows_ptr,  # (B, N, WIDTH)
    mask_ptr,  # (HEADS, N) bytes, if MASKED
    dx_ptr,  # (HEADS, N, WIDTH): added to
    dy_ptr,  # likewise, of the second side; or None
    N, HEADS, BLOCKS, scale, D8, D: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``dx += scale (d_rows + 2 d_square · rows)``, except at padding."""
    WIDTH = D if D > 0 else D8 * 8
    row_head, head, n, d, at, inside = program_tokens(N, HEADS, BLOCKS, WIDTH, BLOCK_N, BLOCK_D)
    rows_at = row_head * N * WIDTH + at
    d_square = tl.load(d_squares_ptr + row_head * N + n, mask=n < N, other=0.0)[:, None]
    dx = 2 * d_square * tl.load(rows_ptr + rows_at, mask=inside, other=0.0).to(tl.float32)
    dx = (dx + tl.load(d_rows_ptr + rows_at, mask=inside, other=0.0)) * scale
    if MASKED:
        present = tl.load(mask_ptr + head * N + n, mask=n < N, other=0) != 0
        dx = tl.where(present[:, None], dx, 0.0)
    at += head * N * WIDTH
    dx += load_one_of_two(dx_ptr, dy_ptr, row_head >= HEADS, at, inside).to(tl.float32)
    store_one_of_two(dx_ptr, dy_ptr, row_head >= HEADS, at, dx, inside)


@once
def _centre_launch(shape: Shape, sides: int, masked: bool, scale: float, back: bool) -> Launch:
    heads, tokens, width = shape
    block_d = power_of_2(width)
    block_n = max(1, 4096 // block_d)
    blocks = ceil_div(tokens, block_n)
    return Launch(
        centre_grad_kernel if back else centre_kernel, (sides * heads * blocks,), N=tokens,
        HEADS=heads, BLOCKS=blocks, scale=scale, MASKED=masked, BLOCK_N=block_n, BLOCK_D=block_d,
        **width_arguments(width),
    )  # fmt: skip


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.view(torch.uint8)


def centre_rows(
    x: Tensor, y: Tensor | None, centre: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """``scale (x - centre)``, (batch, N, m) in the dtype of x, and its squared norms, (batch, N).

    With y, a second side of the same shape, its rows follow those of x: (2 · batch, N, m). Masked
    rows are zero.
    """
    heads, tokens, width = x.shape
    sides = 1 if y is None else 2
    rows = torch.empty((sides * heads, tokens, width), device=x.device, dtype=x.dtype)
    squares = torch.empty((sides * heads, tokens), device=x.device, dtype=torch.float32)
    launch = _centre_launch(x.shape, sides, mask is not None, scale, back=False)
    launch(x, y, centre, _bytes(mask), rows, squares)
    return rows, squares


def centre_rows_backward(
    d_rows: Tensor, d_squares: Tensor, rows: Tensor, mask: Tensor | None, scale: float,
    dx: Tensor, dy: Tensor | None,
) -> None:  # fmt: skip
    """Adds the gradients of x and y to dx and dy; `d_rows` is in float32."""
    launch = _centre_launch(dx.shape, 1 if dy is None else 2, mask is not None, scale, back=True)
    launch(d_rows, d_squares, rows, _bytes(mask), dx, dy)
