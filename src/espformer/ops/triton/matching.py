"""Hard plans as registered torch operators, with their fake and autograd rules.

- ``espformer::match``: the token that each query meets, from two rankings;
- ``espformer::apply_matching``: ``Σ_l weight_l V[match_l]``;
- ``espformer::cross_matching``: ``Σ_i q_i · k[match_l(i)]`` for every slice.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from espformer.ops.autograd import refuse_double_backward
from espformer.ops.triton.gather import gather_dot, gather_sum
from espformer.ops.triton.registration import operator


@triton.jit
def match_kernel(FROM, TO, OUT, N, BLOCK: tl.constexpr):
    """``out[from_n] = to_n``; TO None is the identity."""
    row = tl.program_id(0).to(tl.int64) * N
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    to = n if TO is None else tl.load(TO + row + n, mask=n < N, other=0)
    tl.store(OUT + row + tl.load(FROM + row + n, mask=n < N, other=0), to, mask=n < N)


@operator("match")
def match(order: Tensor, to: Tensor | None) -> Tensor:
    """The permutations ``to ∘ order⁻¹`` along the last dimension, in int32; None: the identity.

    Of two rankings it is the key that each query meets, of one the rank of each token.
    """
    out = torch.empty_like(order)
    tokens = order.shape[-1]
    block = min(1024, triton.next_power_of_2(tokens))
    grid = (order.numel() // tokens, triton.cdiv(tokens, block))
    match_kernel[grid](order, to, out, tokens, BLOCK=block)
    return out


@match.register_fake
def _(order: Tensor, to: Tensor | None) -> Tensor:
    return order.new_empty(order.shape)


@operator("apply_matching")
def apply_matching(value: Tensor, weight: Tensor, matches: Tensor) -> Tensor:
    """``Σ_l weight_l V[matches[l, i]]``."""
    return gather_sum(value, matches, weight, value.dtype)


@apply_matching.register_fake
def _(value: Tensor, weight: Tensor, matches: Tensor) -> Tensor:
    return value.new_empty(value.shape)


@operator("cross_matching")
def cross_matching(query: Tensor, key: Tensor, matches: Tensor) -> Tensor:
    """``Σ_i q_i · k[matches[l, i]]``: (batch, L)."""
    return gather_dot(query, key, matches)


@cross_matching.register_fake
def _(query: Tensor, key: Tensor, matches: Tensor) -> Tensor:
    return query.new_empty(matches.shape[:2], dtype=torch.float32)


def _matching_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


@refuse_double_backward("espformer::apply_matching")
def _matching_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    value, weight, matches = ctx.saved_tensors
    upstream = grads[0].to(value.dtype)
    d_value = apply_matching(upstream, weight, match(matches, None))
    return d_value, cross_matching(upstream, value, matches), None


apply_matching.register_autograd(_matching_backward, setup_context=_matching_setup)


@refuse_double_backward("espformer::cross_matching")
def _cross_matching_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    query, key, matches = ctx.saved_tensors
    d_query = apply_matching(key, grads[0], matches)
    return d_query, apply_matching(query, grads[0], match(matches, None)), None


cross_matching.register_autograd(_cross_matching_backward, setup_context=_matching_setup)
