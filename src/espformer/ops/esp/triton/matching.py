"""Hard plans as registered torch operators, with their fake and autograd rules.

- ``espformer::match``: the token that each query meets, from two rankings;
- ``espformer::apply_matching``: ``Σ_l weight_l V[match_l]``;
- ``espformer::cross_matching``: ``Σ_i q_i · k[match_l(i)]`` for every slice;
- ``espformer::matching_costs``: ``Σ_i ‖q_i - k[match_l(i)]‖²`` for every slice.
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
from espformer.ops.esp.triton.gather import gather_distance, gather_dot, gather_sum


@triton.jit(do_not_specialize=("BLOCKS",))
def compose_kernel(FROM, TO, OUT, N, BLOCKS, BLOCK: tl.constexpr):
    """``out[from_n] = to_n``; TO None is the identity.

    Neighbouring programs write to the same row, so that the second-level cache gathers what they
    scatter before it goes to memory.
    """
    row = (tl.program_id(0) // BLOCKS).to(tl.int64) * N
    n = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    to = n if TO is None else tl.load(TO + row + n, mask=n < N, other=0)
    tl.store(OUT + row + tl.load(FROM + row + n, mask=n < N, other=0), to, mask=n < N)


@operator("match")
def match(order: Tensor, to: Tensor | None) -> Tensor:
    """The permutations ``to ∘ order⁻¹`` along the last dimension, in int32; None: the identity.

    Of two rankings it is the key that each query meets, of one the rank of each token.
    """
    out = torch.empty_like(order)
    tokens = order.shape[-1]
    block = min(1024, power_of_2(tokens))
    blocks = ceil_div(tokens, block)
    rows = order.numel() // tokens
    compose_kernel[(rows * blocks,)](order, to, out, tokens, blocks, BLOCK=block)
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
    needs_value, needs_weight, _ = ctx.needs_input_grad
    upstream = grads[0].to(value.dtype)
    d_value = apply_matching(upstream, weight, match(matches, None)) if needs_value else None
    d_weight = cross_matching(upstream, value, matches) if needs_weight else None
    return d_value, d_weight, None


apply_matching.register_autograd(_matching_backward, setup_context=_matching_setup)


@operator("matching_costs")
def matching_costs(query: Tensor, key: Tensor, matches: Tensor) -> Tensor:
    """``Σ_i ‖q_i - k[matches[l, i]]‖²``: (batch, L)."""
    return gather_distance(query, key, matches)


@matching_costs.register_fake
def _(query: Tensor, key: Tensor, matches: Tensor) -> Tensor:
    return query.new_empty(matches.shape[:2], dtype=torch.float32)


@operator("matching_costs_backward")
def matching_costs_backward(
    upstream: Tensor, mine: Tensor, theirs: Tensor, matches: Tensor
) -> Tensor:
    """``2 Σ_l upstream_l (mine_i - theirs[matches[l, i]])`` in the dtype of `mine`."""
    met = gather_sum(theirs, matches, upstream, torch.float32)
    return (upstream.sum(-1).view(-1, 1, 1) * mine - met).mul_(2).to(mine.dtype)


@matching_costs_backward.register_fake
def _(upstream: Tensor, mine: Tensor, theirs: Tensor, matches: Tensor) -> Tensor:
    return mine.new_empty(mine.shape)


@refuse_double_backward("espformer::matching_costs")
def _matching_costs_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    query, key, matches = ctx.saved_tensors
    needs_query, needs_key, _ = ctx.needs_input_grad
    d_query = matching_costs_backward(grads[0], query, key, matches) if needs_query else None
    d_key = None
    if needs_key:
        d_key = matching_costs_backward(grads[0], key, query, match(matches, None))
    return d_query, d_key, None


matching_costs.register_autograd(_matching_costs_backward, setup_context=_matching_setup)
