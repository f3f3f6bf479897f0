"""Rows of words, sorted: points, each packed with the index of its token.

The torch twin is a stable ``torch.sort``.

If the lower bits of negative floats are flipped, floats keep their order as signed integers. Such
an integer in the upper bits and the index of the token in the lower bits form one *word*. Sorting
words is stable by construction, and both parts are recovered by shifting. A point of 16 bits with
an index of 16 makes an int32, all others an int64 (a *wide* word): points of float32, points that
are projected on a slice, sequences of more than 65,536 tokens.

A short row of such words is sorted by one program, in the registers of a warp (:func:`sort_words`,
which kernels of `points.py` and `hard_plan.py` call). Long rows are sorted in runs of RUN words,
and neighbouring runs are merged until one is left (:func:`sort_rows`). A program of a merge
computes RUN words of the result: it finds where they begin in each run, takes RUN words from both,
and keeps the smaller ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from espformer.ops.common.triton import Launch, ceil_div, once, power_of_2

MOST_TOKENS = 1 << 16  # whose index has 16 bits
# Words that one warp sorts or merges. More warps would have to exchange words through shared
# memory.
RUN = 1024


@dataclass(frozen=True)
class Words:
    """The format of the words that represent points, as kernel arguments."""

    bits: int  # of a point
    half: torch.dtype  # of a point alone
    whole: torch.dtype
    point: Any  # of Triton: what 16-bit points are
    infinity: int
    packed_scale: float  # what points are multiplied by before they are sorted
    unpacked_scale: float  # and after

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
def store_words(to, bits, n, mask, BITS: tl.constexpr):
    """Stores whole words if they must carry the index of the token, otherwise only the points."""
    whole: tl.constexpr = to.dtype.element_ty.primitive_bitwidth == 2 * BITS
    if whole:
        tl.store(to, make_words(bits, n, BITS), mask=mask)
    else:
        tl.store(to, bits.to(to.dtype.element_ty), mask=mask)


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
    """Launch configuration for sorting a row of at most 1024 words in one warp: 32 words per
    thread, loaded in vectors of 8.
    """
    block = max(2, power_of_2(tokens))
    held = max(1, block // 32)
    vector = min(8, held)
    return {
        "BLOCK": block, "VECTOR": vector, "VECTORS": held // vector,
        "DIMS": block.bit_length() - 1, "HELD": held.bit_length() - 1, "num_warps": 1,
    }  # fmt: skip


def merge_config() -> dict[str, Any]:
    """Launch configuration for merging: as many words as a program sorts."""
    config = sort_config(RUN)
    return {name: config[name] for name in ("BLOCK", "DIMS", "num_warps")}


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
