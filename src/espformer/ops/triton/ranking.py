"""Sorting of 16-bit tokens: a number and its token's index share one 32-bit word.

A 16-bit float, read as a signed integer with the lower bits of negative ones flipped, keeps its
order. Put above the index of its token it can be sorted as one int32 (half the time of sorting
float32 with indices apart), is stable for free, and both parts come back by shifting.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from espformer.ops.autograd import refuse_double_backward

MOST_TOKENS = 1 << 16


@triton.jit
def pack_kernel(
    X, MASK, OUT, N, D, MASKED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    """(batch, N, D) floats to (batch, D, N) words."""
    batch = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    inside = (n[:, None] < N) & (d[None, :] < D)
    at = (batch * N + n[:, None]) * D + d[None, :]
    x = tl.load(X + at, mask=inside, other=0.0) + 0.0  # minus zero is zero
    bits = x.to(tl.int16, bitcast=True).to(tl.int32)
    bits = tl.where(bits < 0, bits ^ 0x7FFF, bits)
    if MASKED:
        present = tl.load(MASK + batch * N + n, mask=n < N, other=0)
        bits = tl.where(present[:, None] != 0, bits, 0x7FFF)
    word = (bits << 16) | n[:, None]
    tl.store(OUT + (batch * D + d[None, :]) * N + n[:, None], word, mask=inside)


@triton.jit
def unpack_kernel(
    WORDS, LENGTHS, VALUES, ORDER, N, L, scale, HALF: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sorted words to numbers and tokens; ranks of padding repeat the last true number."""
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    word = tl.load(WORDS + row * N + n, mask=n < N, other=0)
    tl.store(ORDER + row * N + n, word & 0xFFFF, mask=n < N)
    if MASKED:
        last = tl.maximum(tl.load(LENGTHS + row // L) - 1, 0)
        word = tl.load(WORDS + row * N + tl.minimum(n, last), mask=n < N, other=0)
    bits = word >> 16
    bits = tl.where(bits < 0, bits ^ 0x7FFF, bits).to(tl.int16)
    x = bits.to(HALF, bitcast=True).to(tl.float32)
    if MASKED:
        x = tl.where(tl.load(LENGTHS + row // L) > 0, x, 0.0)
    tl.store(VALUES + row * N + n, x * scale, mask=n < N)


@torch.library.custom_op("espformer::rank_halves", mutates_args=())
def rank_halves(x: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Sorts every column of (batch, N, L) 16-bit floats.

    Returns the sorted numbers times `scale` in float32 and the token at each rank in int32, both
    (batch, L, N); padded tokens rank last.
    """
    x = x.contiguous()
    batch, tokens, slices = x.shape
    words = torch.empty(batch, slices, tokens, device=x.device, dtype=torch.int32)
    block_d = triton.next_power_of_2(slices)
    block_n = max(1, min(64, 8192 // block_d))
    bytes_ = None if mask is None else mask.view(torch.uint8)
    lengths = None if mask is None else mask.sum(-1, dtype=torch.int32)
    pack_kernel[(triton.cdiv(tokens, block_n), batch)](
        x, bytes_, words, tokens, slices, MASKED=mask is not None, BLOCK_N=block_n, BLOCK_D=block_d
    )
    words = words.sort(-1).values
    values = torch.empty(words.shape, device=x.device, dtype=torch.float32)
    order = torch.empty_like(words)
    half = tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16
    block = min(1024, triton.next_power_of_2(tokens))
    unpack_kernel[(triton.cdiv(tokens, block), batch * slices)](
        words, lengths, values, order, tokens, slices, scale, HALF=half, MASKED=mask is not None,
        BLOCK_N=block,
    )  # fmt: skip
    return values, order


@rank_halves.register_fake
def _(x: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], x.shape[2], x.shape[1])
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int32)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, mask, ctx.scale = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(output[1], mask)
    ctx.mark_non_differentiable(output[1])


@refuse_double_backward("espformer::rank_halves")
def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    order, mask = ctx.saved_tensors
    dx = torch.empty_like(grads[0]).scatter_(-1, order.long(), grads[0] * ctx.scale).mT
    if mask is not None:
        dx = dx.masked_fill(~mask.unsqueeze(-1), 0)
    return dx.to(ctx.dtype), None, None


rank_halves.register_autograd(_backward, setup_context=_setup)
