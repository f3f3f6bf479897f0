"""Sinkhorn attention that streams, on GPUs; :mod:`espformer.ops.sinkhorn.torch` is its twin."""

from __future__ import annotations

import torch
from torch import Tensor

from espformer.ops.common.masks import zero_padding
from espformer.ops.sinkhorn.triton.launch import WIDEST
from espformer.ops.sinkhorn.triton.operators import sinkhorn_forward

__all__ = ["output", "supported"]


def supported(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernels can do it: no float64, and heads that are not too wide."""
    widest = max(query.shape[-1], value.shape[-1])
    return torch.float64 not in (query.dtype, key.dtype, value.dtype) and widest <= WIDEST


def output(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    iterations: int,
    epsilon: float,
    scale: float,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """The contract of :func:`espformer.ops.sinkhorn.torch.sinkhorn_output`, without any N×N."""
    lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    n, m, width = query.shape[-2], key.shape[-2], value.shape[-1]
    dtype = torch.promote_types(query.dtype, key.dtype)

    def flat(x: Tensor, mask: Tensor | None) -> Tensor:
        x = zero_padding(x, mask)
        return x.expand(*lead, *x.shape[-2:]).reshape(-1, *x.shape[-2:]).contiguous()

    def flat_mask(mask: Tensor | None, tokens: int) -> Tensor | None:
        return None if mask is None else mask.expand(*lead, tokens).reshape(-1, tokens).contiguous()

    with torch.autocast(query.device.type, enabled=False):
        out, _, _ = sinkhorn_forward(
            flat(query, query_mask).to(dtype),
            flat(key, key_mask).to(dtype),
            flat(value, key_mask),
            flat_mask(query_mask, n),
            flat_mask(key_mask, m),
            scale / epsilon,
            max(iterations, 1),
        )
    return out.view(*lead, n, width)
