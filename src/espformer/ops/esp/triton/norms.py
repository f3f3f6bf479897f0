"""What slice costs are made of beside plans: centred rows, and sums of their squared norms.

A rank gives ``given_n`` to the tokens near it, so a slice's sum of squared norms is

    ⟨given, κ (factor · square[order])⟩,

a product with one column. It is made walk by walk as in `column.py`; its backward needs both
columns, κ given and κ (factor · square), and nothing of the forward.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from espformer.ops.common.autograd import refuse_double_backward
from espformer.ops.common.custom_op import operator
from espformer.ops.common.sizes import ceil_div, power_of_2
from espformer.ops.esp.triton.column import (
    before,
    column_config,
    no_states,
    ranks_of,
    shares,
    width_gradient,
)
from espformer.ops.esp.triton.gather import tile


@triton.jit
def ranked(SQUARE, ORDER, FACTOR, at, n, inside):
    """Squares of the tokens at ranks n, times their factors."""
    x = tl.load(SQUARE + tl.load(ORDER + n, mask=inside, other=0), mask=inside, other=0.0)
    if FACTOR is not None:
        x *= tl.load(FACTOR + at + n, mask=inside, other=0.0)
    return x


@triton.jit(do_not_specialize=("L",))
def norm_kernel(
    SQUARE, ORDER, GIVEN, FACTOR, S, INVERSE_WIDTH, OUT, N, L, TABLE: tl.constexpr,
    POLES: tl.constexpr, COMPLEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of one slice."""
    pair = tl.program_id(0).to(tl.int64)
    inverse_width = tl.load(INVERSE_WIDTH + pair // L)
    at = pair * N
    total = tl.zeros((BLOCK,), tl.float32)
    for back in tl.static_range(2):
        for pole in range(POLES):
            states = no_states(False, COMPLEX)
            for step in range(tl.cdiv(N, BLOCK)):
                n = ranks_of(step, N, back == 1, BLOCK)
                inside = n < N
                m, linked = before(n, N, back == 1)
                x = ranked(SQUARE + pair // L * N, ORDER + at, FACTOR, at, m, linked)
                kx, _, _, _, states = shares(
                    x, x, S + at, step, N, inverse_width, states, pole, back == 1, False, TABLE,
                    POLES, COMPLEX, BLOCK,
                )  # fmt: skip
                if back == 0:  # and the rank itself, once
                    own = ranked(SQUARE + pair // L * N, ORDER + at, FACTOR, at, n, inside)
                    kx += tl.where(pole == 0, own, 0.0)
                total += kx * tl.load(GIVEN + at + n, mask=inside, other=0.0)
    tl.store(OUT + pair, tl.sum(total, 0))


@triton.jit(do_not_specialize=("L",))
def norm_grad_kernel(
    UPSTREAM, SQUARE, ORDER, GIVEN, FACTOR, S, INVERSE_WIDTH, D_SQUARE, D_GIVEN, D_FACTOR, MASS,
    SLOPE, N, L, ATOMIC: tl.constexpr, TABLE: tl.constexpr, POLES: tl.constexpr,
    COMPLEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All gradients of one slice; MASS is room for ``upstream · κ given``.

    D_SQUARE is added to by token, or stored by slice and token.
    """
    pair = tl.program_id(0).to(tl.int64)
    inverse_width = tl.load(INVERSE_WIDTH + pair // L)
    upstream = tl.load(UPSTREAM + pair)
    at = pair * N
    for back in tl.static_range(2):
        for pole in range(POLES):
            added = (pole > 0) | (back == 1)
            states = no_states(True, COMPLEX)
            for step in range(tl.cdiv(N, BLOCK)):
                n = ranks_of(step, N, back == 1, BLOCK)
                inside = n < N
                rank = at + n
                token = tl.load(ORDER + rank, mask=inside, other=0)
                square = tl.load(SQUARE + pair // L * N + token, mask=inside, other=0.0)
                x = square
                if FACTOR is not None:
                    factor = tl.load(FACTOR + rank, mask=inside, other=0.0)
                    x *= factor
                u = tl.load(GIVEN + rank, mask=inside, other=0.0) * upstream
                m, linked = before(n, N, back == 1)
                x_before = ranked(SQUARE + pair // L * N, ORDER + at, FACTOR, at, m, linked)
                u_before = tl.load(GIVEN + at + m, mask=linked, other=0.0) * upstream
                mass, kx, u_slope, x_slope, states = shares(
                    u_before, x_before, S + at, step, N, inverse_width, states, pole, back == 1,
                    True, TABLE, POLES, COMPLEX, BLOCK,
                )  # fmt: skip
                slope = u * x_slope + x * u_slope
                mass += tl.where(added, tl.load(MASS + rank, mask=inside & added, other=0.0), u)
                d_given = (kx + tl.where(added, 0.0, x)) * upstream  # the rank itself, once
                d_given += tl.load(D_GIVEN + rank, mask=inside & added, other=0.0)
                slope += tl.load(SLOPE + rank, mask=inside & added, other=0.0)
                tl.store(MASS + rank, mass, mask=inside)
                tl.store(D_GIVEN + rank, d_given, mask=inside)
                tl.store(SLOPE + rank, slope, mask=inside)
                if back == 1:
                    whole = inside & (pole == POLES - 1)
                    if FACTOR is not None:
                        tl.store(D_FACTOR + rank, mass * square, mask=whole)
                        mass *= factor
                    if ATOMIC:
                        to = D_SQUARE + pair // L * N + token
                        tl.atomic_add(to, mass, mask=whole, sem="relaxed")
                    else:
                        tl.store(D_SQUARE + at + token, mass, mask=whole)
            tl.debug_barrier()  # the next walk reads what this one has written


@operator("norm_costs")
def norm_costs(
    square: Tensor, order: Tensor, given: Tensor, factor: Tensor | None, values: Tensor,
    inverse_width: Tensor, metric: str, exact: bool,
) -> Tensor:  # fmt: skip
    """``Σ_n given[l, n] · (κ_l (factor_l · square[order_l]))_n``: (batch, L)."""
    batch, slices, _ = order.shape
    out = square.new_empty(batch, slices)
    norm_kernel[(batch * slices,)](
        square, order, given, factor, values, inverse_width, out,
        **column_config(values, metric, exact),
    )  # fmt: skip
    return out


@norm_costs.register_fake
def _(square: Tensor, order: Tensor, *_: Any) -> Tensor:
    return square.new_empty(order.shape[:2])


@operator("norm_costs_backward")
def norm_costs_backward(
    upstream: Tensor, square: Tensor, order: Tensor, given: Tensor, factor: Tensor | None,
    values: Tensor, inverse_width: Tensor, metric: str, exact: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the squares, of what is given, of the factors (or empty), and of the values."""
    batch, slices, _ = order.shape
    atomic = not torch.are_deterministic_algorithms_enabled()
    d_square = torch.zeros_like(square) if atomic else torch.empty_like(values)
    d_given, slope, mass = (torch.empty_like(values) for _ in range(3))
    d_factor = values.new_empty(0 if factor is None else values.shape)
    norm_grad_kernel[(batch * slices,)](
        upstream, square, order, given, factor, values, inverse_width, d_square, d_given,
        None if factor is None else d_factor, mass, slope, ATOMIC=atomic,
        **column_config(values, metric, exact),
    )  # fmt: skip
    return d_square if atomic else d_square.sum(1), d_given, d_factor, slope


@norm_costs_backward.register_fake
def _(
    upstream: Tensor, square: Tensor, order: Tensor, given: Tensor, factor: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    like = given.new_empty(given.shape)
    d_factor = given.new_empty(0 if factor is None else given.shape)
    return square.new_empty(square.shape), like, d_factor, torch.empty_like(like)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.metric, ctx.exact = inputs
    ctx.save_for_backward(*tensors)


@refuse_double_backward("espformer::norm_costs")
def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    *_, factor, values, width = saved
    d_square, d_given, d_factor, slope = norm_costs_backward(
        grads[0], *saved, ctx.metric, ctx.exact
    )
    d_width = width_gradient(slope, values, width) if ctx.needs_input_grad[5] else None
    d_factor = None if factor is None else d_factor
    return d_square, None, d_given, d_factor, slope, d_width, None, None


norm_costs.register_autograd(_backward, setup_context=_setup)


@triton.jit(do_not_specialize=("BLOCKS",))
def centre_kernel(
    X, CENTRE, MASK, ROWS, SQUARES, N, BLOCKS, scale, D: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``rows = scale (x - centre)``, zero at padding, and their squared norms."""
    batch, n, d, columns = tile(N, BLOCKS, D, BLOCK_N, BLOCK_D)
    inside = (n[:, None] < N) & columns
    at = (batch * N + n[:, None]) * D + d[None, :]
    centre = tl.load(CENTRE + batch * D + d, mask=d < D, other=0.0)[None, :]
    x = (tl.load(X + at, mask=inside, other=0.0).to(tl.float32) - centre) * scale
    if MASKED:
        present = tl.load(MASK + batch * N + n, mask=n < N, other=0) != 0
        x = tl.where(present[:, None], x, 0.0)
    x = tl.where(inside, x, 0.0).to(ROWS.dtype.element_ty)
    tl.store(ROWS + at, x, mask=inside)
    x = x.to(tl.float32)
    tl.store(SQUARES + batch * N + n, tl.sum(x * x, 1), mask=n < N)


@triton.jit(do_not_specialize=("BLOCKS",))
def centre_grad_kernel(
    D_ROWS, D_SQUARES, ROWS, MASK, DX, N, BLOCKS, scale, D: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``dx = scale (d_rows + 2 d_square · rows)``, zero at padding."""
    batch, n, d, columns = tile(N, BLOCKS, D, BLOCK_N, BLOCK_D)
    inside = (n[:, None] < N) & columns
    at = (batch * N + n[:, None]) * D + d[None, :]
    d_square = tl.load(D_SQUARES + batch * N + n, mask=n < N, other=0.0)[:, None]
    dx = 2 * d_square * tl.load(ROWS + at, mask=inside, other=0.0).to(tl.float32)
    dx = (dx + tl.load(D_ROWS + at, mask=inside, other=0.0).to(tl.float32)) * scale
    if MASKED:
        present = tl.load(MASK + batch * N + n, mask=n < N, other=0) != 0
        dx = tl.where(present[:, None], dx, 0.0)
    tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=inside)


def _centre_tiles(x: Tensor) -> tuple[tuple[int], dict[str, int]]:
    block_d = power_of_2(x.shape[-1])
    block_n = max(1, 4096 // block_d)
    blocks = ceil_div(x.shape[1], block_n)
    return (x.shape[0] * blocks,), {
        "BLOCKS": blocks,
        "D": x.shape[-1],
        "BLOCK_N": block_n,
        "BLOCK_D": block_d,
    }


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
    grid, tiles = _centre_tiles(x)
    centre_kernel[grid](
        x, centre, _bytes(mask), rows, squares, x.shape[1], scale=scale,
        MASKED=mask is not None, **tiles,
    )  # fmt: skip
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
    grid, tiles = _centre_tiles(rows)
    centre_grad_kernel[grid](
        d_rows, d_squares, rows, _bytes(mask), dx, rows.shape[1], scale=scale,
        MASKED=mask is not None, **tiles,
    )  # fmt: skip
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
