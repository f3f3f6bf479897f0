"""Sorting of 16-bit tokens: a number and its token's index share one 32-bit word.

A 16-bit float, read as a signed integer with the lower bits of negative ones flipped, keeps its
order. Put above the index of its token it can be sorted as one int32, is stable for free, and both
parts come back by shifting. Up to IN_REGISTERS tokens one program sorts a row by itself, in the
registers of a few warps; longer rows go through ``torch.sort``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from espformer.ops.autograd import refuse_double_backward
from espformer.ops.triton.registration import operator

MOST_TOKENS = 1 << 16
IN_REGISTERS = 4096


@triton.jit
def pack_kernel(
    X, MASK, OUT, N, D, MASKED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    """(batch, N, D) floats to (batch, D, N) words."""
    batch = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
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
    SORT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Words to numbers and tokens, sorted before if SORT; padding repeats the last true number."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    word = tl.load(WORDS + row * N + n, mask=n < N, other=0x7FFFFFFF)
    if SORT:
        word = tl.sort(word)
    tl.store(ORDER + row * N + n, word & 0xFFFF, mask=n < N)
    if MASKED:
        length = tl.load(LENGTHS + row // L)
        last = tl.maximum(length - 1, 0)
        if SORT:
            end = tl.max(tl.where(n == last, word, -0x80000000))
        else:
            end = tl.load(WORDS + row * N + last)
        word = tl.where(n < last, word, end)
    bits = word >> 16
    bits = tl.where(bits < 0, bits ^ 0x7FFF, bits).to(tl.int16)
    x = bits.to(HALF, bitcast=True).to(tl.float32)
    if MASKED:
        x = tl.where(length > 0, x, 0.0)
    tl.store(VALUES + row * N + n, x * scale, mask=n < N)


@triton.jit
def unrank_kernel(UPSTREAM, ORDER, DX, N, L, scale, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr):
    """(batch, L, N) gradients by rank to (batch, N, L) gradients by token."""
    batch = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    for start in range(0, L, BLOCK_L):
        l = start + tl.arange(0, BLOCK_L)
        inside = (l[:, None] < L) & (n[None, :] < N)
        at = (batch * L + l[:, None]) * N + n[None, :]
        token = tl.load(ORDER + at, mask=inside, other=0)
        x = tl.load(UPSTREAM + at, mask=inside, other=0.0) * scale
        to = DX + (batch * N + token) * L + l[:, None]
        tl.store(to, x.to(DX.dtype.element_ty), mask=inside)


@operator("unrank")
def unrank(upstream: Tensor, order: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """``dx[order[l, n], l] = scale · upstream[l, n]``: (batch, N, L)."""
    batch, slices, tokens = order.shape
    dx = torch.empty(batch, tokens, slices, device=order.device, dtype=dtype)
    unrank_kernel[(batch, triton.cdiv(tokens, 128))](
        upstream, order, dx, tokens, slices, scale, BLOCK_N=128, BLOCK_L=16
    )
    return dx


@unrank.register_fake
def _(upstream: Tensor, order: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return upstream.mT.to(dtype).contiguous()


@operator("rank_halves")
def rank_halves(x: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Sorts every column of (batch, N, L) 16-bit floats.

    Returns the sorted numbers times `scale` in float32 and the token at each rank in int32, both
    (batch, L, N); padded tokens rank last.
    """
    batch, tokens, slices = x.shape
    words = torch.empty(batch, slices, tokens, device=x.device, dtype=torch.int32)
    block_d = triton.next_power_of_2(slices)
    block_n = max(1, min(64, 8192 // block_d))
    bytes_ = None if mask is None else mask.view(torch.uint8)
    lengths = None if mask is None else mask.sum(-1, dtype=torch.int32)
    pack_kernel[(batch, triton.cdiv(tokens, block_n))](
        x, bytes_, words, tokens, slices, MASKED=mask is not None, BLOCK_N=block_n, BLOCK_D=block_d
    )
    alone = tokens <= IN_REGISTERS
    if not alone:
        words = words.sort(-1).values
    values = torch.empty(words.shape, device=x.device, dtype=torch.float32)
    order = torch.empty_like(words)
    half = tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16
    block = triton.next_power_of_2(tokens) if alone else 1024
    unpack_kernel[(batch * slices, triton.cdiv(tokens, block))](
        words, lengths, values, order, tokens, slices, scale, HALF=half, MASKED=mask is not None,
        SORT=alone, BLOCK_N=block, num_warps=max(1, block // 1024) if alone else 4,
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
    dx = unrank(grads[0], order, ctx.scale, ctx.dtype)
    return dx if mask is None else dx.masked_fill(~mask.unsqueeze(-1), 0), None, None


rank_halves.register_autograd(_backward, setup_context=_setup)
