"""Kernel attention by sorting, a peer that is computed with this library's own recurrences.

Rux, Hertrich and Neumayer (2026) weigh keys by a sum of Laplace kernels, one for every coordinate,
and normalise rows only:

    out_i = Σ_j W_ij v_j / Σ_j W_ij,        W_ij = Σ_d exp(-|q_id - k_jd|).

Sorted along a coordinate, queries and keys together, W is a kernel matrix of sorted numbers: the
operand is zero at queries, and the product is read there. It costs one sort of N + M numbers and
one product per coordinate, where ESP sorts both sides and multiplies twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from espformer.ops.esp.exponentials import ABSOLUTE
from espformer.ops.esp.sorted_kernel import SortedKernel

__all__ = ["dense_kernel_attention", "kernel_attention"]


def kernel_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Kernel attention in O(N log N), of scaled ``(batch, heads, tokens, width)``."""
    dtype = torch.promote_types(value.dtype, torch.float32)
    q, k, v = (x.flatten(0, 1).to(dtype) for x in (query, key, value))
    q, k = (x.mT * x.shape[-1] ** -0.5 for x in (q, k))
    points, order = torch.cat([q, k], -1).sort(-1)  # (heads, coordinates, N + M)
    ones = v.new_ones(*v.shape[:-1], 1)
    operand = torch.nn.functional.pad(torch.cat([v, ones], -1), (0, 0, query.shape[-2], 0))
    rows = order.unsqueeze(-1).expand(*order.shape, operand.shape[-1])
    operand = operand.unsqueeze(1).expand(-1, order.shape[1], -1, -1).gather(2, rows)
    product = SortedKernel(points, points.new_ones(1, 1, 1), ABSOLUTE)(operand)
    sums = torch.zeros_like(product).scatter(2, rows, product)[..., : query.shape[-2], :].sum(1)
    out = sums[..., :-1] / sums[..., -1:]
    return out.to(value.dtype).view(*query.shape[:-1], value.shape[-1])


def dense_kernel_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The formula itself, with N × M matrices."""
    q, k = (x * x.shape[-1] ** -0.5 for x in (query, key))
    pairs = zip(q.unbind(-1), k.unbind(-1), strict=True)
    weights = torch.stack([(-(a.unsqueeze(-1) - b.unsqueeze(-2)).abs()).exp() for a, b in pairs])
    matrix = weights.sum(0)
    return matrix / matrix.sum(-1, keepdim=True) @ value
