"""Soft sorts and ranks of numbers: one column per row, by scans alone.

The torch twins are :meth:`espformer.sorting.rows.SoftSort.sort_numbers` and ``expected_ranks``
through attention. With s the sorted numbers, in units of the kernel's width, κ their kernel and
``z = 1 / κ1`` (`normalise.py`), the soft sort is

    out = z · κx,            x the sorted numbers,

and the expected rank of the number at rank i, with c the ranks, centred and scaled,

    r = κ(z c) / κz.

Everything is a product of κ with one column. So a call takes a handful of launches, where attention
between numbers and ranks takes some forty. For rows of up to 4,096 numbers, forward and backward
are one launch each (`short_numbers.py`).

As torch operators, with their fake and autograd rules: ``espformer::sort_numbers`` and
``espformer::rank_numbers``, in the absolute metric.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from espformer.ops.common.operators import operator, refuse_double_backward
from espformer.ops.esp.triton import short_numbers
from espformer.ops.esp.triton.normalise import (
    bandwidth_gradient,
    columns,
    row_scales,
    row_scales_backward,
    sorted_slope,
)
from espformer.ops.esp.triton.sort import masked_lengths, point_gradients, sort_points

METRIC = "absolute", True  # and rows in float32
ARGUMENTS = "Tensor numbers, Tensor inv_bandwidth, Tensor? mask, bool in_spreads"


def _times_kernel(x: Tensor, points: Tensor, inv_bandwidth: Tensor) -> Tensor:
    """``κx``, (batch, 1, N)."""
    y = torch.empty_like(points)
    column = columns(points.shape, inv_bandwidth.shape[0], *METRIC)
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
    return points, order, spread, row_scales(points, lengths, inv_bandwidth, *METRIC)


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
    if short_numbers.fits(numbers.shape):
        return short_numbers.mix(numbers, inv_bandwidth, mask, in_spreads, ranks=False)
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
    if short_numbers.fits(numbers.shape):
        return short_numbers.gradients(
            upstream, numbers, points, order, spread, z, sums, None, inv_bandwidth,
            with_inv_bandwidth,
        )  # fmt: skip
    tokens = order.long()
    p = upstream.unsqueeze(1) * z
    x = numbers.unsqueeze(1).gather(-1, tokens)
    slope = sorted_slope(p, x, points, inv_bandwidth, *METRIC)
    dz = upstream.unsqueeze(1) * sums
    z_slope = row_scales_backward(dz, z, points, inv_bandwidth, *METRIC)
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
    if short_numbers.fits(numbers.shape):
        return short_numbers.mix(numbers, inv_bandwidth, mask, in_spreads, ranks=True)
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
    if short_numbers.fits(upstream.shape):
        return short_numbers.gradients(
            upstream, None, points, order, spread, z, mass, expected, inv_bandwidth,
            with_inv_bandwidth,
        )  # fmt: skip
    centred, _, scale = _centred_ranks(z, mask)
    a = upstream.unsqueeze(1).gather(-1, order.long()) * scale / mass
    if mask is not None:
        a = a.masked_fill(z == 0, 0)
    b = -a * expected
    slope = sorted_slope(a, z * centred, points, inv_bandwidth, *METRIC)
    slope += sorted_slope(b, z, points, inv_bandwidth, *METRIC)
    dz = _times_kernel(a, points, inv_bandwidth).mul_(centred)
    dz += _times_kernel(b, points, inv_bandwidth)
    z_slope = row_scales_backward(dz, z, points, inv_bandwidth, *METRIC)
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
        return torch.empty_like(numbers), points, order, spread, *kept

    return fake


sort_numbers.register_fake(_fake(2))
rank_numbers.register_fake(_fake(3))


def _fake_gradients(*args: Any) -> tuple[Tensor, Tensor]:
    upstream, inv_bandwidth, with_inv_bandwidth = args[0], args[-3], args[-1]
    shape = inv_bandwidth.shape if with_inv_bandwidth else 0
    return torch.empty_like(upstream), inv_bandwidth.new_empty(shape)


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
