"""The part of the slice costs that squared norms make: ``Σ_n mass_n · square[order_n]``."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from espformer.ops.autograd import refuse_double_backward
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
