"""Sorts of rows of int32 words.

A short row is sorted by one program, in the registers of a warp. Long rows are sorted in runs of
RUN words, and neighbouring runs are merged until one is left. A program of a merge makes RUN
words of its result: it finds where they begin in either run, and sorts out as many of both.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from espformer.ops.common.sizes import ceil_div, power_of_2

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
def run_kernel(
    WORDS, N, BLOCK: tl.constexpr, VECTOR: tl.constexpr, VECTORS: tl.constexpr, DIMS: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """Sorts runs of BLOCK words, in place."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(WORDS + row * N + n, mask=n < N, other=LAST)
    words = sort_words(words, BLOCK, VECTOR, VECTORS, DIMS, HELD)
    tl.store(WORDS + row * N + n, words, mask=n < N)


@triton.jit
def merged(WORDS, start, N, LENGTH, BLOCK: tl.constexpr, DIMS: tl.constexpr):
    """A block of a row of N words, as it is once its sorted runs of LENGTH are merged in pairs.

    Of BLOCK words of one run and BLOCK of the other, the smaller half are the smaller ones of each
    word and its partner in the other run taken backwards: a bitonic sequence.
    """
    pair = start // (2 * LENGTH) * (2 * LENGTH)
    length = tl.minimum(LENGTH, N - pair)
    other_length = tl.maximum(tl.minimum(LENGTH, N - pair - LENGTH), 0)
    RUN_WORDS = WORDS + pair
    OTHER_WORDS = RUN_WORDS + LENGTH
    done = start - pair
    # How many of the words before the block are from the first run: between low and high.
    low = tl.maximum(done - other_length, 0)
    high = tl.minimum(done, length)
    while low < high:
        middle = (low + high) // 2
        if tl.load(RUN_WORDS + middle) < tl.load(OTHER_WORDS + done - 1 - middle):
            low = middle + 1
        else:
            high = middle
    i = low + tl.arange(0, BLOCK)
    j = done - low + (BLOCK - 1 - tl.arange(0, BLOCK))
    words = tl.load(RUN_WORDS + i, mask=i < length, other=LAST)
    others = tl.load(OTHER_WORDS + j, mask=j < other_length, other=LAST)
    cube = tl.reshape(tl.minimum(words, others), [2] * DIMS)
    ascending = tl.zeros_like(indicator(DIMS, 0))
    for step in tl.static_range(DIMS):
        cube = exchange(cube, ascending, DIMS, DIMS - 1 - step)
    return tl.reshape(cube, [BLOCK])


@triton.jit
def merge_kernel(WORDS, OUT, N, LENGTH, BLOCK: tl.constexpr, DIMS: tl.constexpr):
    """Merges the sorted runs of every row in pairs."""
    row = tl.program_id(0).to(tl.int64) * N
    start = tl.program_id(1) * BLOCK
    n = start + tl.arange(0, BLOCK)
    tl.store(OUT + row + n, merged(WORDS + row, start, N, LENGTH, BLOCK, DIMS), mask=n < N)


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
    run_kernel[(rows, blocks)](words, tokens, **config)
    length, other = RUN, words if RUN * runs >= tokens else torch.empty_like(words)
    while length * runs < tokens:
        merge_kernel[(rows, blocks)](words, other, tokens, length, **merge_config())
        words, other = other, words
        length *= 2
    return words, length


def merge_config() -> dict[str, Any]:
    """How a program merges: as many words as are sorted at once."""
    config = sort_config(RUN)
    return {name: config[name] for name in ("BLOCK", "DIMS", "num_warps")}
