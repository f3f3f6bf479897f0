"""Points of every slice in rank order: projected, sorted, and in units of their spread.

The torch twins are :func:`espformer.ops.esp.linear.sort_tokens` and
:func:`espformer.ops.esp.problem.with_spread`. Order of this file: words; sorting rows of words;
kernels for points and their gradients; launchers. The operator ``espformer::rank_points`` sorts one
side, without gradient.

**Words.** If the lower bits of negative floats are flipped, floats keep their order as signed
integers. Such an integer in the upper bits and the index of the token in the lower bits form one
*word*. Sorting words is stable by construction, and both parts are recovered by shifting. A point
of 16 bits with an index of 16 makes an int32, all others an int64 (a *wide* word): points of
float32, points that are projected on a slice, sequences of more than 65,536 tokens.

A short row of words is sorted by one program, in the registers of a warp (:func:`sort_words`). Long
rows are sorted in runs of RUN words, and neighbouring runs are merged until one is left
(:func:`sort_rows`). A program of a merge computes RUN words of the result: it finds where they
begin in each run, takes RUN words from both, and keeps the smaller ones.

**Forward**, for rows of at most 1024 tokens two launches: one makes the points ``p = scale · Θ x``,
as words, one sorts them and divides them by their spread. Longer rows are sorted in runs and
divided by a separate launch. Its points are in order, so the largest is at an end. Relative to the
median, which is within one spread of the mean, one pass gives mean and variance.

**Backward.** With ``y = p / s``, s the standard deviation of the n points that take part,

    dp_i = (g_i - (Σ_j g_j y_j) (y_i - ȳ) / n) / s,

and zero where the points have no spread. By token it is the gradient of the tokens
themselves if slices are axes; else

    dx_n = scale · Σ_l dp_ln θ_l,     dθ_l = scale · Σ_n dp_ln x_n.

Queries and keys of one shape are sorted by the same launches, as twice as many heads.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from espformer.ops.common.operators import operator
from espformer.ops.common.triton import Launch, Shape, ceil_div, once, power_of_2, width_arguments
from espformer.ops.esp.triton.primitives import load_one_of_two, rounded_product, store_one_of_two

MOST_TOKENS = 1 << 16  # whose index has 16 bits
# Words that one warp sorts or merges. More warps would have to exchange words through shared
# memory.
RUN = 1024
# As in `espformer.ops.esp.problem.with_spread`: the least size of points, and the least spread as a
# share of it.
LEAST_SIZE = torch.finfo(torch.float32).tiny ** 0.75
LEAST_SHARE = 8 * torch.finfo(torch.float32).eps
LEAST_BLOCK, MOST_BLOCK = 32, 4096


@dataclass(frozen=True)
class Words:
    """The format of the words that represent points, as kernel arguments."""

    bits: int  # of a point
    half: torch.dtype  # of a point alone
    whole: torch.dtype
    point: Any  # of Triton: what 16-bit points are
    infinity: int
    pack_factor: float  # what points are multiplied by before they are sorted
    unpack_factor: float  # and after

    @staticmethod
    def of(dtype: torch.dtype, tokens: int, projected: bool, scale: float) -> Words:
        """Int32 words for 16-bit points of short sequences; wide words for float32 or projected
        points and long sequences.
        """
        half = dtype in (torch.bfloat16, torch.float16)
        if half and not projected and tokens <= MOST_TOKENS and scale > 0:
            brain = dtype == torch.bfloat16
            point, infinity = (tl.bfloat16, 0x7F80) if brain else (tl.float16, 0x7C00)
            return Words(16, torch.int16, torch.int32, point, infinity, 1.0, scale)
        infinity = 0x7F800000
        return Words(32, torch.int32, torch.int64, tl.float32, infinity, scale, 1.0)

    @property
    def arguments(self) -> dict[str, Any]:
        return {"BITS": self.bits, "INFINITY": self.infinity}


# The point takes the upper BITS of a word, the token the lower ones.
@triton.jit
def flip_negative(bits, BITS: tl.constexpr):
    """The lower bits of negative integers flipped: floats to integers in their order, and back."""
    return tl.where(bits < 0, bits ^ ((1 << (BITS - 1)) - 1), bits)


@triton.jit
def sortable(x, present, BITS: tl.constexpr):
    """Floats as int32 in the same order; padding is larger than all floats, including NaN."""
    x = x + 0.0  # minus zero is zero
    if BITS == 32:
        bits = x.to(tl.int32, bitcast=True)
    else:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
    last: tl.constexpr = (1 << (BITS - 1)) - 1
    return tl.where(present, tl.minimum(flip_negative(bits, BITS), last - 1), last)


@triton.jit
def make_words(bits, n, BITS: tl.constexpr):
    """Points above the indices of their tokens."""
    if BITS == 32:
        return (bits.to(tl.int64) << 32) | n.to(tl.int64)
    else:
        return (bits.to(tl.int32) << 16) | n


@triton.jit
def word_index(words, BITS: tl.constexpr):
    """The tokens of words."""
    return (words & ((1 << BITS) - 1)).to(tl.int32)


@triton.jit
def word_point(words, BITS: tl.constexpr, POINT: tl.constexpr):
    """The points of words, in float32."""
    bits = flip_negative((words >> BITS).to(tl.int32), BITS)
    if BITS == 32:
        return bits.to(tl.float32, bitcast=True)
    else:
        return bits.to(tl.int16).to(POINT, bitcast=True).to(tl.float32)


@triton.jit
def store_words(out_ptr, bits, n, mask, BITS: tl.constexpr):
    """Stores whole words if they must carry the index of the token, otherwise only the points."""
    whole: tl.constexpr = out_ptr.dtype.element_ty.primitive_bitwidth == 2 * BITS
    if whole:
        tl.store(out_ptr, make_words(bits, n, BITS), mask=mask)
    else:
        tl.store(out_ptr, bits.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def is_infinite(lowest, highest, BITS: tl.constexpr, INFINITY: tl.constexpr):
    """Whether the smallest or the largest word holds an infinity or NaN."""
    return ((highest >> BITS) >= INFINITY) | ((lowest >> BITS) <= ~INFINITY)


@triton.jit
def any_infinite(words, BITS: tl.constexpr, INFINITY: tl.constexpr):
    """Whether any word that is not padding holds an infinity or NaN."""
    least_padding: tl.constexpr = ((1 << (BITS - 1)) - 1) << BITS
    lowest = tl.min(words, 0)
    highest = tl.max(tl.where(words < least_padding, words, lowest), 0)
    return (lowest < least_padding) & is_infinite(lowest, highest, BITS, INFINITY)


@triton.jit
def last_word(dtype: tl.constexpr):
    """The largest word."""
    bits: tl.constexpr = dtype.primitive_bitwidth
    return tl.full([], (1 << (bits - 1)) - 1, dtype)


@triton.jit
def indicator(DIMS: tl.constexpr, BIT: tl.constexpr):
    """0 and 1 along the axis of one bit of the hypercube."""
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

    Most comparisons are along the low bits of a rank. If one thread holds both words, a comparison
    costs one minimum and one maximum. So the words of a thread, VECTORS vectors of VECTOR words,
    are renamed to be neighbours; no data move. Above the HELD bits, runs that have to descend are
    complemented during the sort.
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
    words_ptr,  # (rows, N) words
    N, BLOCK: tl.constexpr, VECTOR: tl.constexpr, VECTORS: tl.constexpr, DIMS: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """Sorts runs of BLOCK words, in place."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(
        words_ptr + row * N + n, mask=n < N, other=last_word(words_ptr.dtype.element_ty)
    )
    words = sort_words(words, BLOCK, VECTOR, VECTORS, DIMS, HELD)
    tl.store(words_ptr + row * N + n, words, mask=n < N)


@triton.jit
def merged(words_ptr, start, N, LENGTH, BLOCK: tl.constexpr, DIMS: tl.constexpr):
    """One block of a row of N words after merging its sorted runs of LENGTH in pairs.

    Of BLOCK words from each run, the smaller half consists of the minimum of each word and its
    partner in the other run, read backwards. This half is a bitonic sequence.
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
    last = last_word(words_ptr.dtype.element_ty)
    words = tl.load(run_ptr + i, mask=i < length, other=last)
    others = tl.load(other_ptr + j, mask=j < other_length, other=last)
    cube = tl.reshape(tl.minimum(words, others), [2] * DIMS)
    ascending = tl.zeros_like(indicator(DIMS, 0))
    for step in tl.static_range(DIMS):
        cube = exchange(cube, ascending, DIMS, DIMS - 1 - step)
    return tl.reshape(cube, [BLOCK])


@triton.jit
def merge_runs_kernel(
    words_ptr,  # (rows, N) words, sorted in runs of LENGTH
    out_ptr,  # (rows, N) words, sorted in runs of twice that
    N, LENGTH, BLOCK: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Merges the sorted runs of every row in pairs."""
    row = tl.program_id(0).to(tl.int64) * N
    start = tl.program_id(1) * BLOCK
    n = start + tl.arange(0, BLOCK)
    tl.store(out_ptr + row + n, merged(words_ptr + row, start, N, LENGTH, BLOCK, DIMS), mask=n < N)


@once
def sort_config(tokens: int) -> dict[str, Any]:
    """Launch configuration for sorting a row of at most 1024 words in one warp: up to 32 words per
    thread.
    """
    return words_config(max(2, power_of_2(tokens)), 1, 8)


def words_config(block: int, warps: int, most: int) -> dict[str, Any]:
    """Launch configuration for :func:`sort_words` of a block in so many warps.

    A thread loads at most so many words at once.
    """
    held = max(1, block // (32 * warps))
    vector = min(most, held)
    return {
        "BLOCK": block, "VECTOR": vector, "VECTORS": held // vector,
        "DIMS": block.bit_length() - 1, "HELD": held.bit_length() - 1, "num_warps": warps,
    }  # fmt: skip


def merge_config() -> dict[str, Any]:
    """Launch configuration for merging, in one warp: as many words as a program sorts."""
    return {"BLOCK": RUN, "DIMS": RUN.bit_length() - 1, "num_warps": 1}


def in_one_run(tokens: int) -> bool:
    """Whether one program sorts a row of so many words."""
    return tokens <= RUN


def sort_rows(words: Tensor, runs: int = 1) -> tuple[Tensor, int]:
    """Rows of words, sorted in at most `runs` runs, and the length of a run; `words` is
    overwritten.
    """
    tokens = words.shape[-1]
    rows = words.numel() // max(1, tokens)
    _sort_runs(rows, tokens)(words)
    length, other = RUN, words if RUN * runs >= tokens else torch.empty_like(words)
    while length * runs < tokens:
        _merge_runs(rows, tokens, length)(words, other)
        words, other = other, words
        length *= 2
    return words, length


@once
def _sort_runs(rows: int, tokens: int) -> Launch:
    return Launch(sort_runs_kernel, (rows, ceil_div(tokens, RUN)), N=tokens, **sort_config(RUN))


@once
def _merge_runs(rows: int, tokens: int, length: int) -> Launch:
    grid = rows, ceil_div(tokens, RUN)
    return Launch(merge_runs_kernel, grid, N=tokens, LENGTH=length, **merge_config())


@triton.jit
def pack_kernel(
    x_ptr,  # (B, N, D) floats
    y_ptr,  # likewise, or None
    mask_ptr,  # (B, N) bytes, if MASKED
    out_ptr,  # (1 or 2, B, D, STRIDE) words, or halves of them
    N, D, STRIDE, scale, BITS: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Columns of floats to rows of integers in the same order, x's and then y's.

    Whole words carry the index of the token; for half words the position is the index. Wide words
    are made from `scale` times the floats.
    """
    batch = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    inside = (n[:, None] < N) & (d[None, :] < D)
    at = (batch * N + n[:, None]) * D + d[None, :]
    x = load_one_of_two(x_ptr, y_ptr, tl.program_id(2) == 1, at, inside)
    if BITS == 32:
        x = x.to(tl.float32) * scale
    present = n < N
    if MASKED:
        present &= tl.load(mask_ptr + batch * N + n, mask=n < N, other=0) != 0
    row = (tl.program_id(2) * tl.num_programs(0) + batch) * D + d[None, :]
    mask = (n[:, None] < STRIDE) & (d[None, :] < D)
    bits = sortable(x, present[:, None], BITS)
    store_words(out_ptr + row * STRIDE + n[:, None], bits, n[:, None], mask, BITS)


@triton.jit(do_not_specialize=("D8", "L"))
def project_kernel(
    x_ptr,  # (B, N, WIDTH) floats
    y_ptr,  # likewise, or None
    slices_ptr,  # (B or 1, L, WIDTH) float32
    mask_ptr,  # (B, N) bytes, if MASKED
    out_ptr,  # (1 or 2, B, L, STRIDE) int64 words, or their upper halves
    N, L, STRIDE, scale, D8, D: tl.constexpr, SHARED: tl.constexpr, MASKED: tl.constexpr,
    SLICES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """:func:`pack_kernel` for ``scale · ⟨x, θ⟩`` on every slice θ: columns that are made first.

    Products are added in float32, in the registers of a few neighbouring threads.
    """
    WIDTH = D if D > 0 else D8 * 8
    batch = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    inside = (n[:, None] < N) & (d[None, :] < WIDTH)
    at = (batch * N + n[:, None]) * WIDTH + d[None, :]
    x = load_one_of_two(x_ptr, y_ptr, tl.program_id(2) == 1, at, inside)
    x = x.to(tl.float32) * scale
    present = n < N
    if MASKED:
        present &= tl.load(mask_ptr + batch * N + n, mask=n < N, other=0) != 0
    if not SHARED:
        slices_ptr += batch * L * WIDTH
    out_ptr += (tl.program_id(2) * tl.num_programs(0) + batch) * L * STRIDE
    for start in range(0, L, SLICES):  # the loads of these slices are independent
        for i in tl.static_range(SLICES):
            l = start + i
            theta = tl.load(slices_ptr + l * WIDTH + d, mask=(d < WIDTH) & (l < L), other=0.0)
            bits = sortable(tl.sum(x * theta[None, :], 1), present, 32)
            store_words(out_ptr + l * STRIDE + n, bits, n, (n < STRIDE) & (l < L), 32)


@triton.jit
def decode_points(word, bad, length, scale, BITS: tl.constexpr, POINT: tl.constexpr):
    """The points of words; all NaN if the row contains NaN, and zero if the row is empty."""
    x = word_point(word, BITS, POINT) * scale
    x = tl.where(bad, float("nan"), x)
    return tl.where(length > 0, x, 0.0)


@triton.jit
def spread_of(variance, size, LEAST_SHARE: tl.constexpr):
    """The spread, from a variance relative to the largest point; the largest point if there is no
    spread.
    """
    return size * tl.where(variance > LEAST_SHARE * LEAST_SHARE, tl.sqrt(variance), 1.0)


@triton.jit
def repeat_last(word, n, length):
    """Sorted words whose padding, all but the first `length`, repeats the last real one."""
    last = tl.maximum(length - 1, 0)
    end = tl.max(tl.where(n == last, word, -last_word(word.dtype)), 0)
    return tl.where(n < last, word, end)


@triton.jit
def row_spread(x, n, length, LEAST_SIZE: tl.constexpr, LEAST_SHARE: tl.constexpr):
    """The spread of the first `length` points of a row: the same bits in every lane.

    Squares are rounded before they are added up. If the compiler fused the two, each of two lanes
    that exchange their squares would round only that of the other one, and tied points, divided by
    spreads that differ in the last bit, would not be tied any more.
    """
    here = n < length
    count = tl.maximum(length, 1)
    size = tl.maximum(tl.max(tl.where(here, tl.abs(x), 0.0), 0), LEAST_SIZE)
    relative = tl.where(here, x / size, 0.0)
    centred = tl.where(here, relative - tl.sum(relative, 0) / count, 0.0)
    variance = tl.sum(rounded_product(centred, centred), 0) / count
    return spread_of(variance, size, LEAST_SHARE)


@triton.jit(do_not_specialize=("L", "HEADS"))
def rank_kernel(
    bits_ptr,  # (B, L, BLOCK): halves of words
    lengths_ptr,  # (HEADS,) int32, if MASKED
    points_ptr,  # (B, L, N) float32
    order_ptr,  # (B, L, N) int32
    spread_ptr,  # (B, L) float32, or None
    N, L, HEADS, scale, LEAST_SIZE: tl.constexpr, LEAST_SHARE: tl.constexpr, BITS: tl.constexpr,
    POINT: tl.constexpr, INFINITY: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
    VECTOR: tl.constexpr, VECTORS: tl.constexpr, DIMS: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Sorts rows of points, and divides them by their spread if there is one; padding repeats the
    last real point.

    B is HEADS, or twice that: the keys of all heads follow the queries, and have their lengths.
    """
    pair = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    word = make_words(tl.load(bits_ptr + pair * BLOCK + n), n, BITS)
    bad = any_infinite(word, BITS, INFINITY)
    word = sort_words(word, BLOCK, VECTOR, VECTORS, DIMS, HELD)
    tl.store(order_ptr + pair * N + n, word_index(word, BITS), mask=n < N)
    length = N
    if MASKED:
        length = tl.load(lengths_ptr + pair // L % HEADS)
        word = repeat_last(word, n, length)
    x = decode_points(word, bad, length, scale, BITS, POINT)
    if spread_ptr is not None:
        spread = row_spread(x, n, length, LEAST_SIZE, LEAST_SHARE)
        tl.store(spread_ptr + pair, spread)
        x /= spread
    tl.store(points_ptr + pair * N + n, x, mask=n < N)


@triton.jit(do_not_specialize=("L", "HEADS"))
def unpack_kernel(
    words_ptr,  # (B, L, N) words, sorted
    lengths_ptr,  # (HEADS,) int32, if MASKED
    points_ptr,  # (B, L, N) float32
    order_ptr,  # (B, L, N) int32
    N, L, HEADS, scale, BITS: tl.constexpr, POINT: tl.constexpr, INFINITY: tl.constexpr,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sorted words to points and tokens, as `rank_kernel` leaves them without a spread."""
    pair = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words_ptr + pair * N + n, mask=n < N, other=0)
    tl.store(order_ptr + pair * N + n, word_index(word, BITS), mask=n < N)
    length = N
    if MASKED:
        length = tl.load(lengths_ptr + pair // L % HEADS)
    last = tl.maximum(length - 1, 0)
    end = tl.load(words_ptr + pair * N + last)
    bad = is_infinite(tl.load(words_ptr + pair * N), end, BITS, INFINITY)
    x = decode_points(tl.where(n < last, word, end), bad, length, scale, BITS, POINT)
    tl.store(points_ptr + pair * N + n, x, mask=n < N)


@triton.jit
def mean_and_variance(points_ptr, length, size, N, BLOCK: tl.constexpr):
    """The median of the first `length` points; and their mean and variance relative to it, in units
    of `size`.
    """
    middle = tl.load(points_ptr + length // 2)
    sums = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, length, BLOCK):
        n = start + tl.arange(0, BLOCK)
        x = tl.load(points_ptr + n, mask=n < length, other=0.0) / size - middle / size
        x = tl.where(n < length, x, 0.0)
        sums += x
        squares += x * x
    count = tl.maximum(length, 1)
    mean = tl.sum(sums, 0) / count
    return middle, mean, tl.sum(squares, 0) / count - mean * mean


@triton.jit(do_not_specialize=("L", "HEADS"))
def spread_kernel(
    points_ptr,  # (B, L, N) float32, sorted
    lengths_ptr,  # (HEADS,) int32, or None
    spread_ptr,  # (B, L) float32
    N, L, HEADS, LEAST_SIZE: tl.constexpr, LEAST_SHARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Points of one slice in units of their spread, in place."""
    pair = tl.program_id(0).to(tl.int64)
    points_ptr += pair * N
    length = N
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + pair // L % HEADS)
    first, last = tl.load(points_ptr), tl.load(points_ptr + tl.maximum(length - 1, 0))
    size = tl.maximum(tl.maximum(tl.abs(first), tl.abs(last)), LEAST_SIZE)
    _, _, variance = mean_and_variance(points_ptr, length, size, N, BLOCK)
    spread = spread_of(variance, size, LEAST_SHARE)
    tl.store(spread_ptr + pair, spread)
    tl.debug_barrier()  # what was measured is overwritten
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        x = tl.load(points_ptr + n, mask=n < N, other=0.0)
        tl.store(points_ptr + n, x / spread, mask=n < N)


@triton.jit
def load_sum(x_ptr, y_ptr, n, mask):
    """x + y at ranks n; y may be None."""
    x = tl.load(x_ptr + n, mask=mask, other=0.0)
    if y_ptr is not None:
        x += tl.load(y_ptr + n, mask=mask, other=0.0)
    return x


@triton.jit(do_not_specialize=("L", "HEADS"))
def point_grad_kernel(
    upstream_ptr,  # (B, L, N) float32, by rank
    more_ptr,  # likewise, to be added; or None
    points_ptr,  # (B, L, N) float32: in units of the spread, if there is one
    order_ptr,  # (B, L, N) int32
    spread_ptr,  # (B, L) float32, or None
    lengths_ptr,  # (HEADS,) int32, or None
    dx_ptr,  # by token: (B, L, N) float32, or the tokens' own (HEADS, N, L) if TOKENS_FIRST
    dy_ptr,  # (HEADS, N, L): of the second side, if there is one and TOKENS_FIRST; or None
    N, L, HEADS, scale, TOKENS_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`scale` times the gradient of the points of one slice; zero at padding."""
    pair = tl.program_id(0).to(tl.int64)
    upstream_ptr += pair * N
    points_ptr += pair * N
    if more_ptr is not None:
        more_ptr += pair * N
    head = pair // L
    length = N
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + head % HEADS)
    middle, mean, slope, spread = 0.0, 0.0, 0.0, 1.0
    if spread_ptr is not None:
        middle, mean, variance = mean_and_variance(points_ptr, length, 1.0, N, BLOCK)
        products = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, length, BLOCK):
            n = start + tl.arange(0, BLOCK)
            g = load_sum(upstream_ptr, more_ptr, n, n < length)
            products += g * tl.load(points_ptr + n, mask=n < length, other=0.0)
        # Divided by the spread, points have a spread of one; points without a spread, which have
        # no gradient, are much closer together.
        flat = variance <= 0.5
        slope = tl.sum(products, 0) / tl.maximum(length, 1)
        spread = tl.load(spread_ptr + pair)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        g = load_sum(upstream_ptr, more_ptr, n, n < length)
        if spread_ptr is not None:
            y = tl.load(points_ptr + n, mask=n < length, other=0.0)
            # Not ``y - centre``: far from zero it would be rounded in the same way for all ranks.
            g = (g - slope * ((y - middle) - mean)) / spread
            g = tl.where((n < length) & (not flat), g, 0.0)
        token = tl.load(order_ptr + pair * N + n, mask=n < N, other=0)
        if TOKENS_FIRST:
            at = (head % HEADS * N + token) * L + pair % L
            store_one_of_two(dx_ptr, dy_ptr, head >= HEADS, at, g * scale, n < N)
        else:
            tl.store(dx_ptr + pair * N + token, g * scale, mask=n < N)


@triton.jit(do_not_specialize=("D8", "L", "HEADS"))
def back_project_kernel(
    dp_ptr,  # (B, L, N) float32, by token
    slices_ptr,  # (HEADS or 1, L, WIDTH) float32
    dx_ptr,  # (HEADS, N, WIDTH)
    dy_ptr,  # likewise, of the second side; or None
    N, L, HEADS, D8, D: tl.constexpr, SHARED: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``dx_n = Σ_l dp_ln θ_l``."""
    WIDTH = D if D > 0 else D8 * 8
    head = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    dp_ptr += head * L * N
    if not SHARED:
        slices_ptr += head % HEADS * L * WIDTH
    dx = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for l in range(L):  # not unrolled: that would spill
        theta = tl.load(slices_ptr + l * WIDTH + d, mask=d < WIDTH, other=0.0)
        dx += tl.load(dp_ptr + l * N + n, mask=n < N, other=0.0)[:, None] * theta[None, :]
    inside = (n[:, None] < N) & (d[None, :] < WIDTH)
    at = (head % HEADS * N + n[:, None]) * WIDTH + d[None, :]
    store_one_of_two(dx_ptr, dy_ptr, head >= HEADS, at, dx, inside)


def blocks_of_tokens(tokens: int, width: int) -> int:
    """At most so many blocks of tokens are packed, or projected, for one head."""
    return _pack_config(width, power_of_2(max(1, tokens)), projected=True)[0]


def _pack_config(width: int, stride: int, projected: bool) -> tuple[int, dict[str, Any]]:
    block_d = power_of_2(width)
    block_n = max(1, min(64, (4096 if projected else 8192) // block_d))
    return ceil_div(stride, block_n), {"BLOCK_N": block_n, "BLOCK_D": block_d}


def slices_at_once(count: int) -> int:
    """The number of slices that a kernel projects on at once."""
    return min(8, power_of_2(count))


@dataclass(frozen=True, eq=False)  # one object for every shape: the key of what is made of it
class TokenSort:
    """How tokens of a shape become words, and the launches that pack and rank them."""

    sides: int  # one tensor of tokens, or two
    shape: Shape  # (batch, N, m) of each
    dtype: torch.dtype
    slices: Shape | None  # (batch or 1, L, m); None means the axes
    masked: bool
    scale: float

    @functools.cached_property
    def count(self) -> int:
        """How many slices there are."""
        return self.shape[-1] if self.slices is None else self.slices[-2]

    @functools.cached_property
    def pairs(self) -> int:
        """The number of (head, slice) pairs of one side: rows of words."""
        return self.shape[0] * self.count

    @functools.cached_property
    def ranked(self) -> Shape:
        """The shape of points and tokens by rank, one side's heads after the other's."""
        return self.sides * self.shape[0], self.count, self.shape[1]

    @functools.cached_property
    def words(self) -> Words:
        """The format of the words."""
        return Words.of(self.dtype, self.shape[1], self.slices is not None, self.scale)

    @functools.cached_property
    def at_once(self) -> bool:
        """Whether one program sorts a row, so that packed points need not carry their token."""
        return in_one_run(self.shape[1])

    @functools.cached_property
    def packed(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of what is sorted: halves of words, padded, if that is done at once."""
        stride = max(2, power_of_2(self.shape[1])) if self.at_once else self.shape[1]
        dtype = self.words.half if self.at_once else self.words.whole
        return (self.sides, self.shape[0], self.count, stride), dtype

    @functools.cached_property
    def pack(self) -> Launch:
        """Makes sortable integers of the points of every slice."""
        (batch, tokens, width), words = self.shape, self.words
        stride = self.packed[0][-1]
        blocks, config = _pack_config(width, stride, self.slices is not None)
        config |= {
            "N": tokens, "STRIDE": stride, "scale": words.pack_factor, "MASKED": self.masked
        }  # fmt: skip
        grid = batch, blocks, self.sides
        if self.slices is None:
            return Launch(pack_kernel, grid, D=width, BITS=words.bits, **config)
        return Launch(
            project_kernel, grid, L=self.count, SHARED=self.slices[0] == 1,
            SLICES=slices_at_once(self.count), **width_arguments(width), **config,
        )  # fmt: skip

    @functools.cached_property
    def rank(self) -> Launch:
        """Makes points and tokens by rank, from rows that it sorts or that are sorted already."""
        tokens, words = self.shape[1], self.words
        arguments = {
            "N": tokens, "L": self.count, "HEADS": self.shape[0], "POINT": words.point,
            "scale": words.unpack_factor, "MASKED": self.masked, **words.arguments,
        }  # fmt: skip
        pairs = self.sides * self.pairs
        if self.at_once:
            return Launch(
                rank_kernel, (pairs,), LEAST_SIZE=LEAST_SIZE, LEAST_SHARE=LEAST_SHARE,
                **arguments, **sort_config(tokens),
            )  # fmt: skip
        grid = pairs, ceil_div(tokens, 1024)
        return Launch(unpack_kernel, grid, **arguments, BLOCK=1024)


_token_sort = once(TokenSort)


def pack_tokens(
    x: Tensor, y: Tensor | None, slices: Tensor | None, mask: Tensor | None, scale: float
) -> tuple[TokenSort, Tensor]:
    """The points of one or two (batch, N, m) tensors on every slice as sortable integers."""
    along = None if slices is None else slices.shape
    token_sort = _token_sort(
        1 if y is None else 2, x.shape, x.dtype, along, mask is not None, scale
    )
    packed = torch.empty(token_sort.packed[0], device=x.device, dtype=token_sort.packed[1])
    flags = None if mask is None else mask.view(torch.uint8)
    if slices is None:
        token_sort.pack(x, y, flags, packed)
    else:
        token_sort.pack(x, y, slices, flags, packed)
    return token_sort, packed


def _row_launch(kernel: Any, shape: Shape, heads: int, **constants: Any) -> Launch:
    """A kernel with one program for every row of points, (heads or twice that, slices, ranks)."""
    batch, slices, ranks = shape
    block = min(MOST_BLOCK, max(LEAST_BLOCK, power_of_2(ranks)))
    return Launch(
        kernel, (batch * slices,), N=ranks, L=slices, HEADS=heads, BLOCK=block,
        num_warps=max(1, block // 512), **constants,
    )  # fmt: skip


@once
def _spreads(shape: Shape, heads: int) -> Launch:
    return _row_launch(spread_kernel, shape, heads, LEAST_SIZE=LEAST_SIZE, LEAST_SHARE=LEAST_SHARE)


@once
def _point_grads(shape: Shape, heads: int, scale: float, tokens_first: bool) -> Launch:
    return _row_launch(point_grad_kernel, shape, heads, scale=scale, TOKENS_FIRST=tokens_first)


@once
def _back_projection(shape: Shape, heads: int, width: int, shared: bool) -> Launch:
    batch, count, tokens = shape
    blocks, config = _pack_config(width, tokens, projected=True)
    return Launch(
        back_project_kernel, (batch, blocks), N=tokens, L=count, HEADS=heads, SHARED=shared,
        **config, **width_arguments(width),
    )  # fmt: skip


def masked_lengths(mask: Tensor | None) -> Tensor | None:
    """The number of unmasked tokens of every sequence, (batch,)."""
    return None if mask is None else mask.sum(-1, dtype=torch.int32)


def sort_points(
    x: Tensor, y: Tensor | None, slices: Tensor | None, mask: Tensor | None,
    lengths: Tensor | None, scale: float, in_spreads: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Sorts the tokens of every slice: those of x and, if there is a y, of y.

    Args:
        x: (batch, N, m).
        y: a second side of the same shape and dtype. Its heads follow those of x in the results,
            where the batch is twice as large.
        slices: Θ, (batch or 1, L, m) in float32; None means the axes.
        mask: (batch, N), True where a token takes part, on either side.
        lengths: how many do, (batch,) in int32, if there is a mask.
        scale: what x is multiplied by.
        in_spreads: whether points are divided by their spread.

    Returns:
        Sorted points in float32 and the token at each rank in int32, both (batch, L, N), padding
        last, where the points repeat the last real one; and the spread, (batch, L), or None. A
        slice that holds NaN or an infinity is all NaN.
    """
    token_sort, packed = pack_tokens(x, y, slices, mask, scale)
    points = torch.empty(token_sort.ranked, device=x.device, dtype=torch.float32)
    order = torch.empty(token_sort.ranked, device=x.device, dtype=torch.int32)
    spread = points.new_empty(token_sort.ranked[:2]) if in_spreads else None
    if token_sort.at_once:
        token_sort.rank(packed, lengths, points, order, spread)
    else:
        packed, _ = sort_rows(packed)
        token_sort.rank(packed, lengths, points, order)
        if spread is not None:
            _spreads(points.shape, x.shape[0])(points, lengths, spread)
    return points, order, spread


def point_gradients(
    upstream: Tensor, more: Tensor | None, points: Tensor, order: Tensor, spread: Tensor | None,
    x: Tensor, y: Tensor | None, slices: Tensor | None, lengths: Tensor | None, scale: float,
    with_slices: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x, of y and of the slices, if there is a y and if that of slices is wanted.

    `upstream` is the gradient of the points, to which `more` is added.
    """
    heads = x.shape[0]
    dx, dy = torch.empty_like(x), None if y is None else torch.empty_like(y)
    if slices is None:
        point_grads = _point_grads(points.shape, heads, scale, tokens_first=True)
        point_grads(upstream, more, points, order, spread, lengths, dx, dy)
        return dx, dy, None
    dp = torch.empty_like(points)
    point_grads = _point_grads(points.shape, heads, scale, tokens_first=False)
    point_grads(upstream, more, points, order, spread, lengths, dp, None)
    back_project = _back_projection(points.shape, heads, x.shape[-1], slices.shape[0] == 1)
    back_project(dp, slices, dx, dy)
    if not with_slices:
        return dx, dy, None
    found = [
        torch.bmm(part, tokens.float())
        for part, tokens in zip(dp.split(heads), (x,) if y is None else (x, y), strict=True)
    ]
    if slices.shape[0] == 1:
        found = [d_slices.sum(0, keepdim=True) for d_slices in found]
    return dx, dy, found[0] if len(found) == 1 else found[1] + found[0]


@operator("rank_points")
def rank_points(
    x: Tensor, slices: Tensor | None, mask: Tensor | None, lengths: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Sorted points and the token at each rank, as :func:`sort_points` returns them."""
    return sort_points(x, None, slices, mask, lengths, scale, in_spreads=False)[:2]


@rank_points.register_fake
def _(x: Tensor, slices: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], x.shape[2] if slices is None else slices.shape[-2], x.shape[1])
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int32)
