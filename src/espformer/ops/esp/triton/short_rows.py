"""Rows of values, softly sorted by short rows of numbers: one launch forward, one backward.

The torch twin is attention between numbers and ranks (`espformer/sorting/rows.py`). With κ the
kernel of the sorted numbers, ``z = 1 / κ1`` and P the permutation that sorts them,

    out = z · κ P v     (sorted: rows of tokens to rows of ranks),
    out = Pᵀ κ (z · v)  (back: rows of ranks to rows of tokens).

A program holds a whole row of numbers, as in `short_numbers.py`, and takes one column of values
after another. Both directions are ``out_scale · κ (in_scale · v)`` with one of the scales z and the
other one. So the gradients of a column v with upstream g, both with their scales, are κg for v, the
slope of ``gᵀ κ v`` for the points, and ``g · κv`` or ``v · κg`` over z for z.

As a torch operator, with its fake and autograd rules: ``espformer::mix_rows``, in the absolute
metric and float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from espformer.ops.common.operators import operator, refuse_double_backward
from espformer.ops.common.triton import Launch, Shape, once
from espformer.ops.esp.triton import short_numbers
from espformer.ops.esp.triton.primitives import LOG2E, one_over, rounded_product
from espformer.ops.esp.triton.short_numbers import (
    INFINITY,
    LEAST_SIZE,
    block_config,
    from_middle,
    kappa_and_slope,
    number_gradients,
    sort_block_config,
    sort_row,
    times_kappa,
)
from espformer.ops.esp.triton.sort import LEAST_SHARE

MOST_WIDTH = 16


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
    weights, _ = times_kappa(ones, ones, s)
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
        first, second = times_kappa(first, second, s)
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


def fits(shape: Shape) -> bool:
    """Whether these kernels take values of this shape, (batch, N, d)."""
    return 0 < shape[2] <= MOST_WIDTH and short_numbers.fits(shape[:2])


@once
def _forward(shape: Shape, back: bool) -> Launch:
    batch, count, width = shape
    return Launch(
        short_rows_kernel, (batch,), N=count, D=width, BACK=back, INFINITY=INFINITY,
        LEAST_SIZE=LEAST_SIZE, LEAST_SHARE=LEAST_SHARE, **sort_block_config(count),
    )  # fmt: skip


@once
def _backward(shape: Shape, back: bool) -> Launch:
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
    forward = _forward(values.shape, back)
    forward(numbers, values, inv_bandwidth, flags, out, points, order, spread, z)
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
    _backward(values.shape, back)(
        upstream, values, inv_bandwidth, points, order, spread, z, d_numbers, d_values,
        d_inv_bandwidth,
    )  # fmt: skip
    return d_numbers, d_values, d_inv_bandwidth


@mix_rows.register_fake
def _(
    numbers: Tensor, values: Tensor, inv_bandwidth: Tensor, mask: Tensor | None, in_spreads: bool,
    back: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    points, order = torch.empty_like(numbers), torch.empty_like(numbers, dtype=torch.int32)
    spread = torch.empty_like(inv_bandwidth) if in_spreads else numbers.new_empty(0)
    return torch.empty_like(values), points, order, spread, torch.empty_like(numbers)


@mix_rows_backward.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    values, points, inv_bandwidth, with_inv_bandwidth = args[1], args[2], args[6], args[-1]
    shape = inv_bandwidth.shape if with_inv_bandwidth else 0
    return torch.empty_like(points), torch.empty_like(values), inv_bandwidth.new_empty(shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, values, inv_bandwidth, _, _, ctx.back = inputs
    ctx.save_for_backward(values, *output[1:], inv_bandwidth)


@refuse_double_backward("espformer's linear-time attention")
def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    if grads[0] is None:
        return (None,) * 6
    with_inv_bandwidth = ctx.needs_input_grad[2]
    d_numbers, d_values, d_inv_bandwidth = mix_rows_backward(
        grads[0], *ctx.saved_tensors, ctx.back, with_inv_bandwidth
    )
    return d_numbers, d_values, d_inv_bandwidth if with_inv_bandwidth else None, None, None, None


mix_rows.register_autograd(_gradients, setup_context=_setup)
