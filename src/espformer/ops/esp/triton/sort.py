"""Sorts the tokens of every slice, or matches those of queries and keys, for 16-bit tokens.

The torch twin is :func:`espformer.ops.esp.linear.sort_tokens`.

A 16-bit float, read as a signed integer with the lower bits of negative ones flipped, keeps its
order. Put above the index of its token it can be sorted as one int32, is stable for free, and both
parts come back by shifting.

A short row of such words is sorted by one program, in the registers of a warp. Long rows are sorted
in runs of RUN words, and neighbouring runs are merged until one is left. A program of a merge makes
RUN words of its result: it finds where they begin in either run, and sorts out as many of both.

- ``espformer::rank_halves``: sorted points and the token at each rank; its backward,
  ``espformer::unrank``;
- ``espformer::match_halves``: the key that each query meets in a hard plan.
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

MOST_TOKENS = 1 << 16  # whose index has 16 bits
# Words that one warp sorts, or merges; more warps would have to hand words to each other.
RUN = 1024
LAST = tl.constexpr(0x7FFFFFFF)  # no word is larger


@triton.jit
def indicator(DIMS: tl.constexpr, BIT: tl.constexpr):
    """0 and 1 along the axis of a bit of a hypercube."""
    return tl.reshape(tl.arange(0, 2), [1] * (DIMS - 1 - BIT) + [2] + [1] * BIT)


@triton.jit
def exchange(cube, descending, DIMS: tl.constexpr, BIT: tl.constexpr):
    """Orders neighbours along the axis of a bit."""
    neighbour = cube ^ tl.xor_sum(cube, DIMS - 1 - BIT, True)  # compiles to the neighbour alone
    larger = (indicator(DIMS, BIT) ^ descending) != 0
    return tl.where(larger, tl.maximum(cube, neighbour), tl.minimum(cube, neighbour))


@triton.jit
def sort_words(
    words, BLOCK: tl.constexpr, VECTOR: tl.constexpr, VECTORS: tl.constexpr, DIMS: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """A bitonic sort of ``BLOCK = 2 ** DIMS`` words.

    Most comparisons are along the low bits of a rank, and where a thread holds both words they
    cost one instruction each, a minimum or a maximum. So the words of a thread, VECTORS vectors of
    VECTOR words, become neighbours first: only their names change. Above their HELD bits, runs that
    have to descend are complemented meanwhile.
    """
    words = tl.permute(tl.reshape(words, [VECTORS, BLOCK // (VECTORS * VECTOR), VECTOR]), [1, 0, 2])
    cube = tl.reshape(words, [2] * DIMS)
    nowhere = tl.zeros_like(indicator(DIMS, 0))
    complemented = nowhere
    for stage in tl.static_range(1, DIMS + 1):
        if stage < DIMS:
            descending = indicator(DIMS, stage)
        else:
            descending = nowhere
        if stage >= HELD:
            cube ^= -(complemented ^ descending)
            complemented = descending
            descending = nowhere
        for step in tl.static_range(stage):
            cube = exchange(cube, descending, DIMS, stage - 1 - step)
    return tl.reshape(cube, [BLOCK])


@triton.jit
def sort_runs_kernel(
    words_ptr,  # (rows, N) int32
    N, BLOCK: tl.constexpr, VECTOR: tl.constexpr, VECTORS: tl.constexpr, DIMS: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """Sorts runs of BLOCK words, in place."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(words_ptr + row * N + n, mask=n < N, other=LAST)
    words = sort_words(words, BLOCK, VECTOR, VECTORS, DIMS, HELD)
    tl.store(words_ptr + row * N + n, words, mask=n < N)


@triton.jit
def merged(words_ptr, start, N, LENGTH, BLOCK: tl.constexpr, DIMS: tl.constexpr):
    """A block of a row of N words, as it is once its sorted runs of LENGTH are merged in pairs.

    Of BLOCK words of one run and BLOCK of the other, the smaller half are the smaller ones of each
    word and its partner in the other run taken backwards: a bitonic sequence.
    """
    pair = start // (2 * LENGTH) * (2 * LENGTH)
    length = tl.minimum(LENGTH, N - pair)
    other_length = tl.maximum(tl.minimum(LENGTH, N - pair - LENGTH), 0)
    run_ptr = words_ptr + pair
    other_ptr = run_ptr + LENGTH
    done = start - pair
    # How many of the words before the block are from the first run: between low and high.
    low = tl.maximum(done - other_length, 0)
    high = tl.minimum(done, length)
    while low < high:
        middle = (low + high) // 2
        if tl.load(run_ptr + middle) < tl.load(other_ptr + done - 1 - middle):
            low = middle + 1
        else:
            high = middle
    i = low + tl.arange(0, BLOCK)
    j = done - low + (BLOCK - 1 - tl.arange(0, BLOCK))
    words = tl.load(run_ptr + i, mask=i < length, other=LAST)
    others = tl.load(other_ptr + j, mask=j < other_length, other=LAST)
    cube = tl.reshape(tl.minimum(words, others), [2] * DIMS)
    ascending = tl.zeros_like(indicator(DIMS, 0))
    for step in tl.static_range(DIMS):
        cube = exchange(cube, ascending, DIMS, DIMS - 1 - step)
    return tl.reshape(cube, [BLOCK])


@triton.jit
def merge_runs_kernel(
    words_ptr,  # (rows, N) int32, sorted in runs of LENGTH
    out_ptr,  # (rows, N) int32, sorted in runs of twice that
    N, LENGTH, BLOCK: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Merges the sorted runs of every row in pairs."""
    row = tl.program_id(0).to(tl.int64) * N
    start = tl.program_id(1) * BLOCK
    n = start + tl.arange(0, BLOCK)
    tl.store(out_ptr + row + n, merged(words_ptr + row, start, N, LENGTH, BLOCK, DIMS), mask=n < N)


@functools.lru_cache(1024)
def sort_config(tokens: int) -> dict[str, Any]:
    """How a warp sorts a row of at most 1024 words: 32 in every thread, loaded in vectors of 8."""
    block = max(2, power_of_2(tokens))
    held = max(1, block // 32)
    vector = min(8, held)
    return {
        "BLOCK": block, "VECTOR": vector, "VECTORS": held // vector,
        "DIMS": block.bit_length() - 1, "HELD": held.bit_length() - 1, "num_warps": 1,
    }  # fmt: skip


def sort_rows(words: Tensor, runs: int = 1) -> tuple[Tensor, int]:
    """Rows of int32 words, sorted in at most so many runs, and their length; `words` are lost."""
    tokens = words.shape[-1]
    rows = words.numel() // max(1, tokens)
    config = sort_config(RUN)
    blocks = ceil_div(tokens, RUN)
    sort_runs_kernel[(rows, blocks)](words, tokens, **config)
    length, other = RUN, words if RUN * runs >= tokens else torch.empty_like(words)
    while length * runs < tokens:
        merge_runs_kernel[(rows, blocks)](words, other, tokens, length, **merge_config())
        words, other = other, words
        length *= 2
    return words, length


def merge_config() -> dict[str, Any]:
    """How a program merges: as many words as are sorted at once."""
    config = sort_config(RUN)
    return {name: config[name] for name in ("BLOCK", "DIMS", "num_warps")}


# What padding sorts as: above every number, NaN included.
PADDING = tl.constexpr(0x7FFF)


@triton.jit
def sortable(x):
    """16-bit floats as integers in the same order, all below PADDING."""
    bits = (x + 0.0).to(tl.int16, bitcast=True).to(tl.int32)  # minus zero is zero
    return tl.minimum(tl.where(bits < 0, bits ^ 0x7FFF, bits), PADDING - 1)


@triton.jit
def pack_kernel(
    x_ptr,  # (B, N, D) 16-bit floats
    y_ptr,  # likewise, or None
    mask_ptr,  # (B, N) bytes, if MASKED
    out_ptr,  # (1 or 2, B, D, STRIDE) int16 or int32
    N, D, STRIDE, MASKED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Columns of floats to rows of integers in the same order, x's and then y's.

    32-bit integers carry the index of their token, 16-bit integers leave it to their place.
    """
    batch = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    inside = (n[:, None] < N) & (d[None, :] < D)
    at = (batch * N + n[:, None]) * D + d[None, :]
    to = batch
    if y_ptr is None:
        x = tl.load(x_ptr + at, mask=inside, other=0.0)
    else:
        if tl.program_id(2) == 0:
            x = tl.load(x_ptr + at, mask=inside, other=0.0)
        else:
            x = tl.load(y_ptr + at, mask=inside, other=0.0)
            to += tl.num_programs(0)
    present = n < N
    if MASKED:
        present &= tl.load(mask_ptr + batch * N + n, mask=n < N, other=0) != 0
    bits = tl.where(present[:, None], sortable(x), PADDING)
    if out_ptr.dtype.element_ty == tl.int32:
        bits = (bits << 16) | n[:, None]
    to = out_ptr + (to * D + d[None, :]) * STRIDE + n[:, None]
    tl.store(to, bits.to(out_ptr.dtype.element_ty), mask=(n[:, None] < STRIDE) & (d[None, :] < D))


@triton.jit
def is_infinite(lowest, highest, INFINITY: tl.constexpr):
    """Whether two words that enclose all others hold an infinity or NaN."""
    return ((highest >> 16) >= INFINITY) | ((lowest >> 16) <= ~INFINITY)


@triton.jit
def any_infinite(words, INFINITY: tl.constexpr):
    """Whether any word that is not padding holds an infinity or NaN."""
    lowest = tl.min(words, 0)
    highest = tl.max(tl.where(words < (PADDING << 16), words, lowest), 0)
    return (lowest < (PADDING << 16)) & is_infinite(lowest, highest, INFINITY)


@triton.jit(do_not_specialize=("L",))
def rank_kernel(
    bits_ptr,  # (B, L, BLOCK) int16
    lengths_ptr,  # (B,) int32, if MASKED
    points_ptr,  # (B, L, N) float32
    order_ptr,  # (B, L, N) int32
    N, L, scale, HALF: tl.constexpr, INFINITY: tl.constexpr,
    MASKED: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, VECTORS: tl.constexpr,
    DIMS: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Sorts rows of 16-bit integers; padding repeats the last true point."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    word = (tl.load(bits_ptr + row * BLOCK + n).to(tl.int32) << 16) | n
    bad = any_infinite(word, INFINITY)
    word = sort_words(word, BLOCK, VECTOR, VECTORS, DIMS, HELD)
    tl.store(order_ptr + row * N + n, word & 0xFFFF, mask=n < N)
    length = N
    if MASKED:
        length = tl.load(lengths_ptr + row // L)
        last = tl.maximum(length - 1, 0)
        end = tl.max(tl.where(n == last, word, -0x80000000), 0)
        word = tl.where(n < last, word, end)
    x = decode_points(word, bad, length, scale, HALF)
    tl.store(points_ptr + row * N + n, x, mask=n < N)


@triton.jit
def decode_points(word, bad, length, scale, HALF: tl.constexpr):
    """The points of words; all NaN in a row that holds one, and zero in one without a length."""
    bits = word >> 16
    bits = tl.where(bits < 0, bits ^ 0x7FFF, bits).to(tl.int16)
    x = bits.to(HALF, bitcast=True).to(tl.float32) * scale
    x = tl.where(bad, float("nan"), x)
    return tl.where(length > 0, x, 0.0)


@triton.jit(do_not_specialize=("L",))
def unpack_kernel(
    words_ptr,  # (B, L, N) int32, sorted
    lengths_ptr,  # (B,) int32, if MASKED
    points_ptr,  # (B, L, N) float32
    order_ptr,  # (B, L, N) int32
    N, L, scale, HALF: tl.constexpr, INFINITY: tl.constexpr,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sorted words to points and tokens, as `rank_kernel` leaves them."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words_ptr + row * N + n, mask=n < N, other=0)
    tl.store(order_ptr + row * N + n, word & 0xFFFF, mask=n < N)
    length = N
    if MASKED:
        length = tl.load(lengths_ptr + row // L)
    last = tl.maximum(length - 1, 0)
    end = tl.load(words_ptr + row * N + last)
    bad = is_infinite(tl.load(words_ptr + row * N), end, INFINITY)
    x = decode_points(tl.where(n < last, word, end), bad, length, scale, HALF)
    tl.store(points_ptr + row * N + n, x, mask=n < N)


@triton.jit(do_not_specialize=("ROWS",))
def match_kernel(
    bits_ptr,  # (2, B, L, BLOCK) int16: queries, then keys
    out_ptr,  # (B, L, N) int32
    weight_ptr,  # (B, L) float32
    N, ROWS, weight, INFINITY: tl.constexpr, BLOCK: tl.constexpr,
    VECTOR: tl.constexpr, VECTORS: tl.constexpr, DIMS: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Sorts a row of queries and one of keys: ``out[token of a query] = key of the same rank``."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    bad = False
    keys = tl.zeros([BLOCK], tl.int32)
    queries = tl.zeros([BLOCK], tl.int32)  # not `keys`: the compiler would not see it change below
    for side in range(2):  # one sort's code for both
        word = (tl.load(bits_ptr + (side * ROWS + row) * BLOCK + n).to(tl.int32) << 16) | n
        bad |= any_infinite(word, INFINITY)
        queries = keys
        keys = sort_words(word, BLOCK, VECTOR, VECTORS, DIMS, HELD)
    query = queries & 0xFFFF
    tl.store(out_ptr + row * N + query, keys & 0xFFFF, mask=query < N)
    tl.store(weight_ptr + row, tl.where(bad, float("nan"), weight))


@triton.jit(do_not_specialize=("ROWS", "BLOCKS"))
def match_runs_kernel(
    words_ptr,  # (2, B, L, N) int32, in sorted runs of LENGTH
    out_ptr,  # (B, L, N) int32
    weight_ptr,  # (B, L) float32
    N, LENGTH, ROWS, BLOCKS, INFINITY: tl.constexpr, BLOCK: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """`match_kernel` for rows of one or two sorted runs: those of all queries, then of all keys.

    The weight turns to NaN where it has to. Programs are in the order of `compose_kernel`.
    """
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    start = tl.program_id(0) % BLOCKS * BLOCK
    n = start + tl.arange(0, BLOCK)
    queries = merged(words_ptr + row * N, start, N, LENGTH, BLOCK, DIMS)
    keys = merged(words_ptr + (ROWS + row) * N, start, N, LENGTH, BLOCK, DIMS)
    tl.store(out_ptr + row * N + (queries & 0xFFFF), keys & 0xFFFF, mask=n < N)
    if any_infinite(queries, INFINITY) | any_infinite(keys, INFINITY):
        tl.store(weight_ptr + row, float("nan"))


@triton.jit
def unrank_kernel(
    upstream_ptr,  # (B, L, N) float32
    order_ptr,  # (B, L, N) int32
    dx_ptr,  # (B, N, L)
    N, L, scale, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Gradients by rank to gradients by token."""
    batch = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    for start in range(0, L, BLOCK_L):
        l = start + tl.arange(0, BLOCK_L)
        inside = (l[:, None] < L) & (n[None, :] < N)
        at = (batch * L + l[:, None]) * N + n[None, :]
        token = tl.load(order_ptr + at, mask=inside, other=0)
        x = tl.load(upstream_ptr + at, mask=inside, other=0.0) * scale
        to = dx_ptr + (batch * N + token) * L + l[:, None]
        tl.store(to, x.to(dx_ptr.dtype.element_ty), mask=inside)


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

    Returns the sorted points times `scale` in float32 and the token at each rank in int32, both
    (batch, L, N); padded tokens rank last. A column that holds NaN or an infinity is all NaN.
    """
    batch, tokens, slices = x.shape
    shape = (batch, slices, tokens)
    points = torch.empty(shape, device=x.device, dtype=torch.float32)
    order = torch.empty(shape, device=x.device, dtype=torch.int32)
    lengths = None if mask is None else mask.sum(-1, dtype=torch.int32)
    half = tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16
    kind = {"HALF": half, "INFINITY": _infinity(x.dtype), "MASKED": mask is not None}
    if tokens <= RUN:
        config = sort_config(tokens)
        bits = _pack(x, None, mask, config["BLOCK"], torch.int16)
        rank_kernel[(batch * slices,)](
            bits, lengths, points, order, tokens, slices, scale, **kind, **config
        )
        return points, order
    words, _ = sort_rows(_pack(x, None, mask, tokens, torch.int32))
    unpack_kernel[(batch * slices, ceil_div(tokens, 1024))](
        words, lengths, points, order, tokens, slices, scale, **kind, BLOCK=1024
    )
    return points, order


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

    Returns the matches, (batch, L, N) in int32, and the weights of a plain mean, (batch, L): one
    over the number of slices, but NaN where the column of the queries or the keys holds NaN or an
    infinity. Padded tokens, the same for both, meet each other.
    """
    batch, tokens, slices = query.shape
    rows = batch * slices
    matches = torch.empty(batch, slices, tokens, device=query.device, dtype=torch.int32)
    weights = torch.empty(batch, slices, device=query.device, dtype=torch.float32)
    infinity = _infinity(query.dtype)
    if tokens <= RUN:
        config = sort_config(tokens)
        bits = _pack(query, key, mask, config["BLOCK"], torch.int16)
        match_kernel[(rows,)](
            bits, matches, weights, tokens, rows, 1 / slices, INFINITY=infinity, **config
        )
        return matches, weights
    words, length = sort_rows(_pack(query, key, mask, tokens, torch.int32), runs=2)
    weights.fill_(1 / slices)
    config = merge_config()
    blocks = ceil_div(tokens, config["BLOCK"])
    match_runs_kernel[(rows * blocks,)](
        words, matches, weights, tokens, length, rows, blocks, INFINITY=infinity, **config
    )
    return matches, weights


@match_halves.register_fake
def _(query: Tensor, key: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, tokens, slices = query.shape
    matches = query.new_empty((batch, slices, tokens), dtype=torch.int32)
    return matches, query.new_empty((batch, slices), dtype=torch.float32)
