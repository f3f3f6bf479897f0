"""Streaming Sinkhorn attention as registered torch operators, with fake and autograd rules.

``espformer::sinkhorn_forward`` gives the output and every potential on the way: what the backward,
``espformer::sinkhorn_backward``, needs to take the updates back one by one. Both are deterministic.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from espformer.ops.common.autograd import refuse_double_backward
from espformer.ops.common.custom_op import operator
from espformer.ops.sinkhorn.triton.launch import ABSENT, Sides

__all__ = ["sinkhorn_backward", "sinkhorn_forward"]


@operator("sinkhorn_forward")
def sinkhorn_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
    updates: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output ``(heads, N, width)`` and the potentials f and g of all updates.

    f is ``(⌈S/2⌉, heads, N)`` and g, with its start, ``(⌊S/2⌋ + 1, heads, M)``. Queries, keys and
    values are ``(heads, tokens, width)``, padded tokens zero; masks ``(heads, tokens)``; the scores
    are ``scale · query keyᵀ``; `updates` is S.
    """
    sides = Sides(query, key, scale)
    f = _potentials(query, (updates + 1) // 2)
    g = _potentials(key, updates // 2 + 1)
    g[0] = 0
    if key_mask is not None:
        g[0].masked_fill_(~key_mask, ABSENT)
    last_is_rows = updates % 2 == 1
    # The output finds the last potential of the queries itself when the rows come last.
    for update in range(1, updates if last_is_rows else updates + 1):
        if update % 2 == 1:
            sides.update(True, g[update // 2], query_mask, f[update // 2])
        else:
            sides.update(False, f[update // 2 - 1], key_mask, g[update // 2])
    log_ratio = _log_ratio(query, key, query_mask, key_mask, updates)
    out = sides.output(value, f[-1], g[-1], log_ratio, query_mask, last_is_rows)
    return out, f, g


@sinkhorn_forward.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, query_mask: Tensor | None, key_mask: Tensor | None,
    scale: float, updates: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out = value.new_empty(query.shape[0], query.shape[1], value.shape[-1])
    return out, _potentials(query, (updates + 1) // 2), _potentials(key, updates // 2 + 1)


@operator("sinkhorn_backward")
def sinkhorn_backward(
    upstream: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    out: Tensor,
    f: Tensor,
    g: Tensor,
    scale: float,
    updates: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values; README.md derives the steps."""
    upstream = upstream.to(value.dtype).contiguous()
    sides = Sides(query, key, scale)
    log_ratio = _log_ratio(query, key, query_mask, key_mask, updates)
    f_grads, g_grads = torch.empty_like(f), torch.empty_like(g)
    last_is_rows = updates % 2 == 1
    delta = f_grads[-1] if last_is_rows else torch.empty_like(f_grads[-1])
    sides.delta(upstream, out, delta)
    d_value = sides.value_grad(
        value, upstream, f[-1], g[-1], log_ratio, delta, g_grads[-1], last_is_rows
    )
    for update in range(updates - 1 if last_is_rows else updates, 1, -1):
        # Update u made potential u of one side from potential u - 1 of the other.
        mine, theirs = f[(update - 1) // 2], g[update // 2]
        f_grad, g_grad = f_grads[(update - 1) // 2], g_grads[update // 2]
        direct = delta if update == updates else None
        if update % 2 == 0:
            sides.pull(True, mine, theirs, g_grad, direct, f_grad)
        else:
            sides.pull(False, theirs, mine, f_grad, None, g_grad)
    d_query, d_key = sides.token_grads(value, upstream, f, g, f_grads, g_grads, log_ratio, updates)
    return d_query, d_key, d_value


@sinkhorn_backward.register_fake
def _(upstream: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return (
        torch.empty_like(query, memory_format=torch.contiguous_format),
        torch.empty_like(key, memory_format=torch.contiguous_format),
        torch.empty_like(value, memory_format=torch.contiguous_format),
    )


def _potentials(tokens: Tensor, count: int) -> Tensor:
    return tokens.new_empty(count, *tokens.shape[:2], dtype=torch.float32)


def _log_ratio(
    query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None, updates: int
) -> Tensor:
    """``log2`` of what the matrix is multiplied by: N/M where the columns come last, else 1."""
    heads, queries, keys = query.shape[0], query.shape[1], key.shape[1]
    if updates % 2 == 1 or (query_mask is None and key_mask is None):
        ratio = 0.0 if updates % 2 == 1 else math.log2(queries / keys)
        return query.new_full((heads,), ratio, dtype=torch.float32)
    rows, columns = (
        torch.full((heads,), tokens, dtype=torch.float32, device=query.device)
        if mask is None
        else mask.sum(-1).clamp(min=1).float()
        for mask, tokens in ((query_mask, queries), (key_mask, keys))
    )
    return (rows / columns).log2()


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.updates = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[1:])


@refuse_double_backward("espformer::sinkhorn_forward", instead="torch")
def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    found = sinkhorn_backward(grads[0], *ctx.saved_tensors, ctx.scale, ctx.updates)
    return (*found, None, None, None, None)


sinkhorn_forward.register_autograd(_backward, setup_context=_setup)
