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

from espformer.ops.common.autograd import refuse_double_backward
from espformer.ops.common.custom_op import operator
from espformer.ops.common.triton import Launch, Shape, ceil_div, once, power_of_2, width_arguments
from espformer.ops.esp.triton import dense_columns
from espformer.ops.esp.triton.normalise import (
    bandwidth_gradient,
    block_ranks,
    column_config,
    previous_ranks,
    scan_block,
    zero_carry,
)
from espformer.ops.esp.triton.primitives import load_squares, program_rows


@triton.jit(do_not_specialize=("L",))
def norm_costs_kernel(
    square_ptr,  # (B, N) float32, by token
    order_ptr,  # (B, L, N) int32
    out_scale_ptr,  # (B, L, N) float32
    in_scale_ptr,  # (B, L, N) float32, or None: ones
    points_ptr,  # (B, L, N) float32
    inv_bandwidth_ptr,  # (B,) float32
    out_ptr,  # (B, L) float32
    N, L, TABLE: tl.constexpr, POLES: tl.constexpr, COMPLEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of one slice."""
    pair = tl.program_id(0).to(tl.int64)
    inv_bandwidth = tl.load(inv_bandwidth_ptr + pair // L)
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


@triton.jit(do_not_specialize=("L",))
def norm_costs_grad_kernel(
    upstream_ptr,  # (B, L) float32
    square_ptr,  # (B, N) float32, by token
    order_ptr,  # (B, L, N) int32
    out_scale_ptr,  # (B, L, N) float32
    in_scale_ptr,  # (B, L, N) float32, or None: ones
    points_ptr,  # (B, L, N) float32
    inv_bandwidth_ptr,  # (B,) float32
    d_square_ptr,  # (B, N) if ATOMIC, else (B, L, N): every slice its own; by token
    d_out_scale_ptr,  # (B, L, N) float32
    d_in_scale_ptr,  # (B, L, N) float32, or None
    slope_ptr,  # (B, L, N) float32: the gradient of the points
    mass_ptr,  # (B, L, N) float32: room for upstream · κ out_scale
    N, L, ATOMIC: tl.constexpr, TABLE: tl.constexpr, POLES: tl.constexpr,
    COMPLEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All gradients of one slice."""
    pair = tl.program_id(0).to(tl.int64)
    inv_bandwidth = tl.load(inv_bandwidth_ptr + pair // L)
    upstream = tl.load(upstream_ptr + pair)
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
                mass, kx, u_slope, x_slope, carry = scan_block(
                    u_before, x_before, points_ptr + at, step, N, inv_bandwidth, carry, pole,
                    reverse == 1, True, TABLE, POLES, COMPLEX, BLOCK,
                )  # fmt: skip
                slope = u * x_slope + x * u_slope
                mass += tl.where(added, tl.load(mass_ptr + rank, mask=inside & added, other=0.0), u)
                d_out_scale = (kx + tl.where(added, 0.0, x)) * upstream  # the rank itself, once
                d_out_scale += tl.load(d_out_scale_ptr + rank, mask=inside & added, other=0.0)
                slope += tl.load(slope_ptr + rank, mask=inside & added, other=0.0)
                tl.store(mass_ptr + rank, mass, mask=inside)
                tl.store(d_out_scale_ptr + rank, d_out_scale, mask=inside)
                tl.store(slope_ptr + rank, slope, mask=inside)
                if reverse == 1:
                    whole = inside & (pole == POLES - 1)
                    if in_scale_ptr is not None:
                        tl.store(d_in_scale_ptr + rank, mass * square, mask=whole)
                        mass *= in_scale
                    if ATOMIC:
                        to = d_square_ptr + pair // L * N + token
                        tl.atomic_add(to, mass, mask=whole, sem="relaxed")
                    else:
                        tl.store(d_square_ptr + at + token, mass, mask=whole)
            tl.debug_barrier()  # the next scan reads what this one has written


@once
def _norm_costs_launch(shape: Shape, metric: str, fp32_rows: bool) -> Launch:
    grid = (shape[0] * shape[1],)
    if dense_columns.fits(shape, metric):
        return Launch(dense_columns.dense_norm_costs_kernel, grid, **dense_columns.config(shape))
    return Launch(norm_costs_kernel, grid, **column_config(shape, metric, fp32_rows))


@once
def _norm_costs_grad_launch(shape: Shape, metric: str, fp32_rows: bool, atomic: bool) -> Launch:
    grid = (shape[0] * shape[1],)
    if dense_columns.fits(shape, metric):
        kernel, config = dense_columns.dense_norm_costs_grad_kernel, dense_columns.config(shape)
    else:
        kernel, config = norm_costs_grad_kernel, column_config(shape, metric, fp32_rows)
    return Launch(kernel, grid, ATOMIC=atomic, **config)


@operator("norm_costs")
def norm_costs(
    square: Tensor, order: Tensor, out_scale: Tensor, in_scale: Tensor | None, points: Tensor,
    inv_bandwidth: Tensor, metric: str, fp32_rows: bool,
) -> Tensor:  # fmt: skip
    """``Σ_n out_scale[l, n] · (κ_l (in_scale_l · square[order_l]))_n``: (batch, L)."""
    out = square.new_empty(order.shape[:2])
    launch = _norm_costs_launch(points.shape, metric, fp32_rows)
    launch(square, order, out_scale, in_scale, points, inv_bandwidth, out)
    return out


@norm_costs.register_fake
def _(square: Tensor, order: Tensor, *_: Any) -> Tensor:
    return square.new_empty(order.shape[:2])


@operator("norm_costs_backward")
def norm_costs_backward(
    upstream: Tensor, square: Tensor, order: Tensor, out_scale: Tensor, in_scale: Tensor | None,
    points: Tensor, inv_bandwidth: Tensor, metric: str, fp32_rows: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the squares, of both scales (`in_scale` may be empty), and of the points."""
    atomic = not torch.are_deterministic_algorithms_enabled()
    d_square = torch.zeros_like(square) if atomic else torch.empty_like(points)
    d_out_scale, slope = torch.empty_like(points), torch.empty_like(points)
    d_in_scale = points.new_empty(0 if in_scale is None else points.shape)
    scans = not dense_columns.fits(points.shape, metric)
    _norm_costs_grad_launch(points.shape, metric, fp32_rows, atomic)(
        upstream, square, order, out_scale, in_scale, points, inv_bandwidth, d_square, d_out_scale,
        None if in_scale is None else d_in_scale, slope,
        *((torch.empty_like(points),) if scans else ()),
    )  # fmt: skip
    return d_square if atomic else d_square.sum(1), d_out_scale, d_in_scale, slope


@norm_costs_backward.register_fake
def _(
    upstream: Tensor,
    square: Tensor,
    order: Tensor,
    out_scale: Tensor,
    in_scale: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    like = out_scale.new_empty(out_scale.shape)
    d_in_scale = out_scale.new_empty(0 if in_scale is None else out_scale.shape)
    return square.new_empty(square.shape), like, d_in_scale, torch.empty_like(like)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.metric, ctx.fp32_rows = inputs
    ctx.save_for_backward(*tensors)


@refuse_double_backward("espformer::norm_costs")
def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    *_, in_scale, points, inv_bandwidth = saved
    d_square, d_out_scale, d_in_scale, slope = norm_costs_backward(
        grads[0], *saved, ctx.metric, ctx.fp32_rows
    )
    _, _, _, _, _, needs_inv_bandwidth, _, _ = ctx.needs_input_grad
    d_inv_bandwidth = None
    if needs_inv_bandwidth:
        d_inv_bandwidth = bandwidth_gradient(slope, points, inv_bandwidth)
    d_in_scale = None if in_scale is None else d_in_scale
    return d_square, None, d_out_scale, d_in_scale, slope, d_inv_bandwidth, None, None


norm_costs.register_autograd(_backward, setup_context=_setup)


@triton.jit(do_not_specialize=("BLOCKS", "D8"))
def centre_kernel(
    x_ptr,  # (B, N, WIDTH)
    centre_ptr,  # (B, WIDTH) float32
    mask_ptr,  # (B, N) bytes, if MASKED
    rows_ptr,  # (B, N, WIDTH)
    squares_ptr,  # (B, N) float32
    N, BLOCKS, scale, D8, D: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``rows = scale (x - centre)``, zero at padding, and their squared norms."""
    WIDTH = D if D > 0 else D8 * 8
    batch, n, d, columns = program_rows(N, BLOCKS, WIDTH, BLOCK_N, BLOCK_D)
    inside = (n[:, None] < N) & columns
    at = (batch * N + n[:, None]) * WIDTH + d[None, :]
    centre = tl.load(centre_ptr + batch * WIDTH + d, mask=d < WIDTH, other=0.0)[None, :]
    x = (tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) - centre) * scale
    if MASKED:
        present = tl.load(mask_ptr + batch * N + n, mask=n < N, other=0) != 0
        x = tl.where(present[:, None], x, 0.0)
    x = tl.where(inside, x, 0.0).to(rows_ptr.dtype.element_ty)
    tl.store(rows_ptr + at, x, mask=inside)
    x = x.to(tl.float32)
    tl.store(squares_ptr + batch * N + n, tl.sum(x * x, 1), mask=n < N)


@triton.jit(do_not_specialize=("BLOCKS", "D8"))
def centre_grad_kernel(
    d_rows_ptr,  # (B, N, WIDTH)
    d_squares_ptr,  # (B, N) float32
    rows_ptr,  # (B, N, WIDTH)
    mask_ptr,  # (B, N) bytes, if MASKED
    dx_ptr,  # (B, N, WIDTH)
    N, BLOCKS, scale, D8, D: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``dx = scale (d_rows + 2 d_square · rows)``, zero at padding."""
    WIDTH = D if D > 0 else D8 * 8
    batch, n, d, columns = program_rows(N, BLOCKS, WIDTH, BLOCK_N, BLOCK_D)
    inside = (n[:, None] < N) & columns
    at = (batch * N + n[:, None]) * WIDTH + d[None, :]
    d_square = tl.load(d_squares_ptr + batch * N + n, mask=n < N, other=0.0)[:, None]
    dx = 2 * d_square * tl.load(rows_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dx = (dx + tl.load(d_rows_ptr + at, mask=inside, other=0.0).to(tl.float32)) * scale
    if MASKED:
        present = tl.load(mask_ptr + batch * N + n, mask=n < N, other=0) != 0
        dx = tl.where(present[:, None], dx, 0.0)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@once
def _centre_launch(shape: Shape, masked: bool, scale: float, back: bool) -> Launch:
    batch, tokens, width = shape
    block_d = power_of_2(width)
    block_n = max(1, 4096 // block_d)
    blocks = ceil_div(tokens, block_n)
    return Launch(
        centre_grad_kernel if back else centre_kernel, (batch * blocks,), N=tokens, BLOCKS=blocks,
        scale=scale, MASKED=masked, BLOCK_N=block_n, BLOCK_D=block_d, **width_arguments(width),
    )  # fmt: skip


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.view(torch.uint8)


@operator("centre_rows")
def centre_rows(
    x: Tensor, centre: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """``scale (x - centre)``, (batch, N, m) in the dtype of x, and its squared norms, (batch, N).

    No gradient flows to `centre`; masked rows are zero.
    """
    rows = torch.empty_like(x)
    squares = torch.empty(x.shape[:2], device=x.device, dtype=torch.float32)
    launch = _centre_launch(x.shape, mask is not None, scale, back=False)
    launch(x, centre, _bytes(mask), rows, squares)
    return rows, squares


@centre_rows.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:2], dtype=torch.float32)


@operator("centre_rows_backward")
def centre_rows_backward(
    d_rows: Tensor, d_squares: Tensor, rows: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """The gradient of x."""
    dx = torch.empty_like(rows)
    launch = _centre_launch(rows.shape, mask is not None, scale, back=True)
    launch(d_rows, d_squares, rows, _bytes(mask), dx)
    return dx


@centre_rows_backward.register_fake
def _(d_rows: Tensor, d_squares: Tensor, rows: Tensor, *_: Any) -> Tensor:
    return rows.new_empty(rows.shape)


def _centre_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, mask, ctx.scale = inputs
    ctx.save_for_backward(output[0], mask)


@refuse_double_backward("espformer::centre_rows")
def _centre_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    rows, mask = ctx.saved_tensors
    return centre_rows_backward(*grads, rows, mask, ctx.scale), None, None, None


centre_rows.register_autograd(_centre_backward, setup_context=_centre_setup)


@operator("centred_costs")
def centred_costs(
    query: Tensor, key: Tensor, centre: Tensor, query_mask: Tensor | None,
    key_mask: Tensor | None, query_order: Tensor, query_out_scale: Tensor,
    query_in_scale: Tensor | None, query_points: Tensor, key_order: Tensor, key_out_scale: Tensor,
    key_in_scale: Tensor | None, key_points: Tensor, key_inv_bandwidth: Tensor,
    query_inv_bandwidth: Tensor, scale: float, metric: str, fp32_rows: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``espformer::centre_rows`` of queries and keys, and the sum of their ``norm_costs``.

    Rows of the queries and of the keys, the squares of either, and the sums, (batch, L). Either
    side has the inverse bandwidth for itself, as in ``espformer::sort_sides``.
    """
    q_rows, q_squares = centre_rows.inside(query, centre, query_mask, scale)
    k_rows, k_squares = centre_rows.inside(key, centre, key_mask, scale)
    norms = norm_costs.inside(
        q_squares, query_order, query_out_scale, query_in_scale, query_points, query_inv_bandwidth,
        metric, fp32_rows,
    )  # fmt: skip
    norms = norms + norm_costs.inside(
        k_squares, key_order, key_out_scale, key_in_scale, key_points, key_inv_bandwidth, metric,
        fp32_rows,
    )  # fmt: skip
    return q_rows, k_rows, q_squares, k_squares, norms


@centred_costs.register_fake
def _(
    query: Tensor, key: Tensor, centre: Tensor, query_mask: Tensor | None,
    key_mask: Tensor | None, query_order: Tensor, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    squares = [x.new_empty(x.shape[:2], dtype=torch.float32) for x in (query, key)]
    norms = centre.new_empty(query_order.shape[:2])
    return query.new_empty(query.shape), key.new_empty(key.shape), *squares, norms


@operator("centred_costs_backward")
def centred_costs_backward(
    d_rows: Tensor | None, d_norms: Tensor | None, rows: Tensor, mask: Tensor | None,
    squares: Tensor, order: Tensor, out_scale: Tensor, in_scale: Tensor | None, points: Tensor,
    inv_bandwidth: Tensor, scale: float, metric: str, fp32_rows: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of one side: of its tokens, of both scales (`in_scale` may be empty), of points."""
    if d_norms is None:
        d_norms = out_scale.new_zeros(order.shape[:2])
    d_squares, *found = norm_costs_backward.inside(
        d_norms, squares, order, out_scale, in_scale, points, inv_bandwidth, metric, fp32_rows
    )
    d_rows = torch.zeros_like(rows) if d_rows is None else d_rows
    d_out_scale, d_in_scale, slope = found
    dx = centre_rows_backward.inside(d_rows, d_squares, rows, mask, scale)
    return dx, d_out_scale, d_in_scale, slope


@centred_costs_backward.register_fake
def _(
    d_rows: Tensor | None, d_norms: Tensor | None, rows: Tensor, mask: Tensor | None,
    squares: Tensor, order: Tensor, out_scale: Tensor, in_scale: Tensor | None, *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    like = out_scale.new_empty(out_scale.shape)
    d_in_scale = out_scale.new_empty(0 if in_scale is None else out_scale.shape)
    return rows.new_empty(rows.shape), like, d_in_scale, torch.empty_like(like)


def _costs_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, _, *masks_and_sides, ctx.scale, ctx.metric, ctx.fp32_rows = inputs
    q_rows, k_rows, q_squares, k_squares, _ = output
    ctx.save_for_backward(q_rows, k_rows, q_squares, k_squares, *masks_and_sides[:-1])
    ctx.mark_non_differentiable(q_squares, k_squares)
    ctx.set_materialize_grads(False)


@refuse_double_backward("espformer::centred_costs")
def _costs_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    dq_rows, dk_rows, _, _, d_norms = grads
    if dq_rows is None and dk_rows is None and d_norms is None:
        return (None,) * len(ctx.needs_input_grad)
    q_rows, k_rows, q_squares, k_squares, q_mask, k_mask, *sides = ctx.saved_tensors
    *sides, inv_bandwidth = sides
    queries, keys = sides[:4], sides[4:]
    options = inv_bandwidth, ctx.scale, ctx.metric, ctx.fp32_rows
    found: list[tuple[Tensor | None, ...]] = []
    d_inv_bandwidth: list[Tensor | None] = []
    for d_rows, rows, mask, squares, side in (
        (dq_rows, q_rows, q_mask, q_squares, queries), (dk_rows, k_rows, k_mask, k_squares, keys)
    ):  # fmt: skip
        _, _, in_scale, points = side
        dx, d_out_scale, d_in_scale, slope = centred_costs_backward(
            d_rows, d_norms, rows, mask, squares, *side, *options
        )
        found.append((dx, d_out_scale, None if in_scale is None else d_in_scale, slope))
        needs = ctx.needs_input_grad[13]
        d_inv_bandwidth.append(bandwidth_gradient(slope, points, inv_bandwidth) if needs else None)
    (d_query, *of_queries), (d_key, *of_keys) = found
    return (
        d_query, d_key, None, None, None, None, *of_queries, None, *of_keys,
        d_inv_bandwidth[1], d_inv_bandwidth[0], None, None, None,
    )  # fmt: skip


centred_costs.register_autograd(_costs_backward, setup_context=_costs_setup)
