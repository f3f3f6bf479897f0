"""What slice costs are made of beside plans: centred rows, and sums of their squared norms,
``Σ_n mass_n · square[order_n]``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from espformer.ops.autograd import refuse_double_backward
from espformer.ops.triton.gather import tile
from espformer.ops.triton.registration import operator


@triton.jit
def norm_kernel(SQUARE, ORDER, MASS, OUT, N, L, BLOCK: tl.constexpr):
    """One slice: the sum over its ranks."""
    pair = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        inside = n < N
        token = tl.load(ORDER + pair * N + n, mask=inside, other=0)
        square = tl.load(SQUARE + pair // L * N + token, mask=inside, other=0.0)
        total += square * tl.load(MASS + pair * N + n, mask=inside, other=0.0)
    tl.store(OUT + pair, tl.sum(total, 0))


@triton.jit
def norm_grad_kernel(
    UPSTREAM, SQUARE, ORDER, MASS, D_SQUARE, D_MASS, N, L, ATOMIC: tl.constexpr, BLOCK: tl.constexpr
):
    """``d_mass_n = upstream · square[order_n]``; mass_n · upstream by slice or added by token."""
    pair = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    upstream = tl.load(UPSTREAM + pair)
    token = tl.load(ORDER + pair * N + n, mask=inside, other=0)
    square = tl.load(SQUARE + pair // L * N + token, mask=inside, other=0.0)
    tl.store(D_MASS + pair * N + n, upstream * square, mask=inside)
    share = upstream * tl.load(MASS + pair * N + n, mask=inside, other=0.0)
    if ATOMIC:
        tl.atomic_add(D_SQUARE + pair // L * N + token, share, mask=inside, sem="relaxed")
    else:
        tl.store(D_SQUARE + pair * N + token, share, mask=inside)


@operator("norm_costs")
def norm_costs(square: Tensor, order: Tensor, mass: Tensor) -> Tensor:
    """``Σ_n mass[l, n] · square[order[l, n]]``: (batch, L)."""
    batch, slices, tokens = order.shape
    out = square.new_empty(batch, slices)
    block = min(1024, triton.next_power_of_2(tokens))
    norm_kernel[(batch * slices,)](square, order, mass, out, tokens, slices, BLOCK=block)
    return out


@norm_costs.register_fake
def _(square: Tensor, order: Tensor, mass: Tensor) -> Tensor:
    return square.new_empty(order.shape[:2])


@operator("norm_costs_backward")
def norm_costs_backward(
    upstream: Tensor, square: Tensor, order: Tensor, mass: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the squares and of the masses."""
    batch, slices, tokens = order.shape
    atomic = not torch.are_deterministic_algorithms_enabled()
    d_square = square.new_zeros(batch, tokens) if atomic else torch.empty_like(mass)
    d_mass = torch.empty_like(mass)
    block = min(1024, triton.next_power_of_2(tokens))
    norm_grad_kernel[(batch * slices, triton.cdiv(tokens, block))](
        upstream, square, order, mass, d_square, d_mass,
        tokens, slices, ATOMIC=atomic, BLOCK=block,
    )  # fmt: skip
    return d_square if atomic else d_square.sum(1), d_mass


@norm_costs_backward.register_fake
def _(upstream: Tensor, square: Tensor, order: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    return square.new_empty(square.shape), mass.new_empty(mass.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


@refuse_double_backward("espformer::norm_costs")
def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    d_square, d_mass = norm_costs_backward(grads[0], *ctx.saved_tensors)
    return d_square, None, d_mass


norm_costs.register_autograd(_backward, setup_context=_setup)


@triton.jit
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


@triton.jit
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
    block_d = triton.next_power_of_2(x.shape[-1])
    block_n = max(1, 4096 // block_d)
    blocks = triton.cdiv(x.shape[1], block_n)
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
