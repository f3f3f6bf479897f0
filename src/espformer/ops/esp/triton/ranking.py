"""Sorting of 16-bit tokens: a number and its token's index share one 32-bit word.

A 16-bit float, read as a signed integer with the lower bits of negative ones flipped, keeps its
order. Put above the index of its token it can be sorted as one int32, is stable for free, and both
parts come back by shifting. Up to RUN tokens one program sorts a row by itself; longer rows are
sorted in runs that are merged (`sorting.py`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from espformer.ops.common.autograd import refuse_double_backward
from espformer.ops.common.custom_op import operator
from espformer.ops.common.sizes import ceil_div, power_of_2
from espformer.ops.esp.triton import sorting
from espformer.ops.esp.triton.sorting import (
    merge_config,
    merged,
    sort_config,
    sort_rows,
    sort_words,
)

MOST_TOKENS = 1 << 16
# What padding sorts as: above every number, NaN included.
PADDING = tl.constexpr(0x7FFF)


@triton.jit
def sortable(x):
    """16-bit floats as integers in the same order, all below PADDING."""
    bits = (x + 0.0).to(tl.int16, bitcast=True).to(tl.int32)  # minus zero is zero
    return tl.minimum(tl.where(bits < 0, bits ^ 0x7FFF, bits), PADDING - 1)


@triton.jit
def pack_kernel(
    X, Y, MASK, OUT, N, D, STRIDE, MASKED: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """(batch, N, D) floats to (batch, D, STRIDE) integers in the same order, X's and then Y's.

    32-bit integers carry the index of their token, 16-bit integers leave it to their place.
    """
    batch = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    inside = (n[:, None] < N) & (d[None, :] < D)
    at = (batch * N + n[:, None]) * D + d[None, :]
    to = batch
    if Y is None:
        x = tl.load(X + at, mask=inside, other=0.0)
    else:
        if tl.program_id(2) == 0:
            x = tl.load(X + at, mask=inside, other=0.0)
        else:
            x = tl.load(Y + at, mask=inside, other=0.0)
            to += tl.num_programs(0)
    present = n < N
    if MASKED:
        present &= tl.load(MASK + batch * N + n, mask=n < N, other=0) != 0
    bits = tl.where(present[:, None], sortable(x), PADDING)
    if OUT.dtype.element_ty == tl.int32:
        bits = (bits << 16) | n[:, None]
    to = OUT + (to * D + d[None, :]) * STRIDE + n[:, None]
    tl.store(to, bits.to(OUT.dtype.element_ty), mask=(n[:, None] < STRIDE) & (d[None, :] < D))


@triton.jit
def infinite(lowest, highest, INFINITY: tl.constexpr):
    """Whether two words that enclose all others hold an infinity or NaN."""
    return ((highest >> 16) >= INFINITY) | ((lowest >> 16) <= ~INFINITY)


@triton.jit
def any_infinite(words, INFINITY: tl.constexpr):
    """Whether any word that is not padding holds an infinity or NaN."""
    lowest = tl.min(words, 0)
    highest = tl.max(tl.where(words < (PADDING << 16), words, lowest), 0)
    return (lowest < (PADDING << 16)) & infinite(lowest, highest, INFINITY)


@triton.jit(do_not_specialize=("L",))
def rank_kernel(
    BITS, LENGTHS, VALUES, ORDER, N, L, scale, HALF: tl.constexpr, INFINITY: tl.constexpr,
    MASKED: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, VECTORS: tl.constexpr,
    DIMS: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Sorts rows of 16-bit integers; padding repeats the last true number."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    word = (tl.load(BITS + row * BLOCK + n).to(tl.int32) << 16) | n
    bad = any_infinite(word, INFINITY)
    word = sort_words(word, BLOCK, VECTOR, VECTORS, DIMS, HELD)
    tl.store(ORDER + row * N + n, word & 0xFFFF, mask=n < N)
    length = N
    if MASKED:
        length = tl.load(LENGTHS + row // L)
        last = tl.maximum(length - 1, 0)
        end = tl.max(tl.where(n == last, word, -0x80000000), 0)
        word = tl.where(n < last, word, end)
    x = numbers(word, bad, length, scale, HALF)
    tl.store(VALUES + row * N + n, x, mask=n < N)


@triton.jit
def numbers(word, bad, length, scale, HALF: tl.constexpr):
    """The numbers of words; all NaN in a row that holds one, and zero in one without a length."""
    bits = word >> 16
    bits = tl.where(bits < 0, bits ^ 0x7FFF, bits).to(tl.int16)
    x = bits.to(HALF, bitcast=True).to(tl.float32) * scale
    x = tl.where(bad, float("nan"), x)
    return tl.where(length > 0, x, 0.0)


@triton.jit(do_not_specialize=("L",))
def unpack_kernel(
    WORDS, LENGTHS, VALUES, ORDER, N, L, scale, HALF: tl.constexpr, INFINITY: tl.constexpr,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sorted words to numbers and tokens, as `rank_kernel` leaves them."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(WORDS + row * N + n, mask=n < N, other=0)
    tl.store(ORDER + row * N + n, word & 0xFFFF, mask=n < N)
    length = N
    if MASKED:
        length = tl.load(LENGTHS + row // L)
    last = tl.maximum(length - 1, 0)
    end = tl.load(WORDS + row * N + last)
    bad = infinite(tl.load(WORDS + row * N), end, INFINITY)
    x = numbers(tl.where(n < last, word, end), bad, length, scale, HALF)
    tl.store(VALUES + row * N + n, x, mask=n < N)


@triton.jit(do_not_specialize=("ROWS",))
def match_kernel(
    BITS, OUT, SHARE, N, ROWS, share, INFINITY: tl.constexpr, BLOCK: tl.constexpr,
    VECTOR: tl.constexpr, VECTORS: tl.constexpr, DIMS: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Sorts a row of queries and one of keys: ``out[token of a query] = key of the same rank``."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    bad = False
    keys = tl.zeros([BLOCK], tl.int32)
    queries = tl.zeros([BLOCK], tl.int32)  # not `keys`: the compiler would not see it change below
    for side in range(2):  # one sort's code for both
        word = (tl.load(BITS + (side * ROWS + row) * BLOCK + n).to(tl.int32) << 16) | n
        bad |= any_infinite(word, INFINITY)
        queries = keys
        keys = sort_words(word, BLOCK, VECTOR, VECTORS, DIMS, HELD)
    query = queries & 0xFFFF
    tl.store(OUT + row * N + query, keys & 0xFFFF, mask=query < N)
    tl.store(SHARE + row, tl.where(bad, float("nan"), share))


@triton.jit(do_not_specialize=("ROWS", "BLOCKS"))
def meet_kernel(
    WORDS, OUT, SHARE, N, LENGTH, ROWS, BLOCKS, INFINITY: tl.constexpr, BLOCK: tl.constexpr,
    DIMS: tl.constexpr,
):  # fmt: skip
    """`match_kernel` for rows of one or two sorted runs: those of all queries, then of all keys.

    SHARE turns to NaN where it has to. Programs are in the order of `compose_kernel`.
    """
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    start = tl.program_id(0) % BLOCKS * BLOCK
    n = start + tl.arange(0, BLOCK)
    queries = merged(WORDS + row * N, start, N, LENGTH, BLOCK, DIMS)
    keys = merged(WORDS + (ROWS + row) * N, start, N, LENGTH, BLOCK, DIMS)
    tl.store(OUT + row * N + (queries & 0xFFFF), keys & 0xFFFF, mask=n < N)
    if any_infinite(queries, INFINITY) | any_infinite(keys, INFINITY):
        tl.store(SHARE + row, float("nan"))


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
    unrank_kernel[(batch, ceil_div(tokens, 128))](
        upstream, order, dx, tokens, slices, scale, BLOCK_N=128, BLOCK_L=16
    )
    return dx


@unrank.register_fake
def _(upstream: Tensor, order: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return upstream.mT.to(dtype).contiguous()


def _infinity(dtype: torch.dtype) -> int:
    return 0x7F80 if dtype == torch.bfloat16 else 0x7C00


@functools.lru_cache(1024)
def _pack_config(slices: int, stride: int) -> tuple[int, dict[str, Any]]:
    block_d = power_of_2(slices)
    block_n = max(1, min(64, 8192 // block_d))
    return ceil_div(stride, block_n), {"BLOCK_N": block_n, "BLOCK_D": block_d}


def _pack(x: Tensor, y: Tensor | None, mask: Tensor | None, stride: int, dtype: Any) -> Tensor:
    """Every column of one or two (batch, N, L) tensors as sortable integers."""
    batch, tokens, slices = x.shape
    sides = 1 if y is None else 2
    packed = torch.empty(sides, batch, slices, stride, device=x.device, dtype=dtype)
    blocks, config = _pack_config(slices, stride)
    pack_kernel[(batch, blocks, sides)](
        x, y, None if mask is None else mask.view(torch.uint8), packed, tokens, slices, stride,
        MASKED=mask is not None, **config,
    )  # fmt: skip
    return packed


@operator("rank_halves")
def rank_halves(x: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Sorts every column of (batch, N, L) 16-bit floats.

    Returns the sorted numbers times `scale` in float32 and the token at each rank in int32, both
    (batch, L, N); padded tokens rank last. A column that holds NaN or an infinity is all NaN.
    """
    batch, tokens, slices = x.shape
    shape = (batch, slices, tokens)
    values = torch.empty(shape, device=x.device, dtype=torch.float32)
    order = torch.empty(shape, device=x.device, dtype=torch.int32)
    lengths = None if mask is None else mask.sum(-1, dtype=torch.int32)
    half = tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16
    kind = {"HALF": half, "INFINITY": _infinity(x.dtype), "MASKED": mask is not None}
    if tokens <= sorting.RUN:
        config = sort_config(tokens)
        bits = _pack(x, None, mask, config["BLOCK"], torch.int16)
        rank_kernel[(batch * slices,)](
            bits, lengths, values, order, tokens, slices, scale, **kind, **config
        )
        return values, order
    words, _ = sort_rows(_pack(x, None, mask, tokens, torch.int32))
    unpack_kernel[(batch * slices, ceil_div(tokens, 1024))](
        words, lengths, values, order, tokens, slices, scale, **kind, BLOCK=1024
    )
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
    ctx.set_materialize_grads(False)


@refuse_double_backward("espformer::rank_halves")
def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    if grads[0] is None:
        return None, None, None
    order, mask = ctx.saved_tensors
    dx = unrank(grads[0], order, ctx.scale, ctx.dtype)
    return dx if mask is None else dx.masked_fill(~mask.unsqueeze(-1), 0), None, None


rank_halves.register_autograd(_backward, setup_context=_setup)


@operator("match_halves")
def match_halves(query: Tensor, key: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The key of the same rank for every query and column of (batch, N, L) 16-bit floats.

    Returns the matches, (batch, L, N) in int32, and a slice's share of a plain mean, (batch, L):
    one over their number, but NaN where the column of the queries or the keys holds NaN or an
    infinity. Padded tokens, the same for both, meet each other.
    """
    batch, tokens, slices = query.shape
    rows = batch * slices
    matches = torch.empty(batch, slices, tokens, device=query.device, dtype=torch.int32)
    shares = torch.empty(batch, slices, device=query.device, dtype=torch.float32)
    infinity = _infinity(query.dtype)
    if tokens <= sorting.RUN:
        config = sort_config(tokens)
        bits = _pack(query, key, mask, config["BLOCK"], torch.int16)
        match_kernel[(rows,)](
            bits, matches, shares, tokens, rows, 1 / slices, INFINITY=infinity, **config
        )
        return matches, shares
    words, length = sort_rows(_pack(query, key, mask, tokens, torch.int32), runs=2)
    shares.fill_(1 / slices)
    config = merge_config()
    blocks = ceil_div(tokens, config["BLOCK"])
    meet_kernel[(rows * blocks,)](
        words, matches, shares, tokens, length, rows, blocks, INFINITY=infinity, **config
    )
    return matches, shares


@match_halves.register_fake
def _(query: Tensor, key: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, tokens, slices = query.shape
    matches = query.new_empty((batch, slices, tokens), dtype=torch.int32)
    return matches, query.new_empty((batch, slices), dtype=torch.float32)
