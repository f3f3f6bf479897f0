"""Sums over gathered rows: what hard plans are made of."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from espformer.ops.common.sizes import ceil_div, power_of_2

# Rows are read many times over, once for every slice. Where the rows of a head fit in the cache of
# a multiprocessor, which is several times faster than the one that all share, a program takes so
# many tokens that it has a multiprocessor for itself. Where not, many small programs are better.
CACHE_BYTES = 160 << 10
MOST_ROWS = 512
MOST_BYTES = 64 << 10
FEW_ROWS = 32
# With fewer programs than about a GPU's multiprocessors, smaller ones are better.
FEWEST_PROGRAMS = 128


@triton.jit
def tile(N, BLOCKS, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """A program's head, tokens and columns, and which columns exist."""
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    i = tl.program_id(0) % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    return head, i, d, d[None, :] < D


@triton.jit(do_not_specialize=("L", "BLOCKS"))
def gather_kernel(
    X, INDEX, WEIGHT, OUT, N, L, BLOCKS, D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``out_i = Σ_l weight_l x[index[l, i]]``."""
    head, i, d, columns = tile(N, BLOCKS, D, BLOCK_N, BLOCK_D)
    total = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    INDEX += head * L * N
    X += head * N * D
    j = tl.load(INDEX + i, mask=i < N, other=0)
    for slice in range(L):
        x = tl.load(X + (j[:, None] * D + d[None, :]), mask=columns, other=0.0).to(tl.float32)
        INDEX += N
        # One slice ahead: a row's address waits for its index.
        j = tl.load(INDEX + i, mask=(i < N) & (slice + 1 < L), other=0)
        total += x * tl.load(WEIGHT + head * L + slice)
    rows = OUT + (head * N + i) * D
    tl.store(
        rows[:, None] + d[None, :], total.to(OUT.dtype.element_ty), mask=(i[:, None] < N) & columns
    )


@triton.jit(do_not_specialize=("L", "BLOCKS"))
def pair_kernel(
    X, Y, INDEX, OUT, N, L, BLOCKS, D: tl.constexpr, DISTANCE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``out_l = Σ_i x_i · y[index[l, i]]`` or ``Σ_i ‖x_i - y[index[l, i]]‖²``, in parts.

    One partial sum per block of tokens.
    """
    head, i, d, columns = tile(N, BLOCKS, D, BLOCK_N, BLOCK_D)
    inside = (i[:, None] < N) & columns
    rows = X + (head * N + i) * D
    x = tl.load(rows[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    OUT += head * L * BLOCKS + tl.program_id(0) % BLOCKS
    INDEX += head * L * N
    Y += head * N * D
    j = tl.load(INDEX + i, mask=i < N, other=0)
    for slice in range(L):
        y = tl.load(Y + (j[:, None] * D + d[None, :]), mask=inside, other=0.0).to(tl.float32)
        INDEX += N
        j = tl.load(INDEX + i, mask=(i < N) & (slice + 1 < L), other=0)
        if DISTANCE:
            product = (x - y) * (x - y)
        else:
            product = x * y
        tl.store(OUT + slice * BLOCKS, tl.sum(tl.sum(product, 1), 0))


@functools.lru_cache(1024)
def _tiles(batch: int, tokens: int, width: int, bytes_each: int) -> tuple[int, dict[str, Any]]:
    """How many programs share a head, and what each is made of."""
    block_d = power_of_2(width)
    row = block_d * bytes_each
    most = min(MOST_ROWS, MOST_BYTES // row) if tokens * row <= CACHE_BYTES else FEW_ROWS
    block_n = max(1, min(most, power_of_2(tokens)))
    while block_n > FEW_ROWS and batch * ceil_div(tokens, block_n) < FEWEST_PROGRAMS:
        block_n //= 2
    warps = min(32, max(4, block_n * row // 2048))
    config = {"D": width, "BLOCK_N": block_n, "BLOCK_D": block_d, "num_warps": warps}
    return ceil_div(tokens, block_n), config


def gather_sum(x: Tensor, index: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """``Σ_l weight_l x[index[l, i]]``: x (batch, N, d), index (batch, L, N), weight (batch, L)."""
    batch, slices, tokens = index.shape
    out = torch.empty(batch, tokens, x.shape[-1], device=x.device, dtype=dtype)
    blocks, config = _tiles(batch, tokens, x.shape[-1], x.element_size())
    gather_kernel[(batch * blocks,)](x, index, weight, out, tokens, slices, blocks, **config)
    return out


def _gather_pairs(x: Tensor, y: Tensor, index: Tensor, distance: bool) -> Tensor:
    batch, slices, tokens = index.shape
    blocks, config = _tiles(batch, tokens, x.shape[-1], x.element_size())
    partial = torch.empty(batch, slices, blocks, device=x.device, dtype=torch.float32)
    pair_kernel[(batch * blocks,)](
        x, y, index, partial, tokens, slices, blocks, DISTANCE=distance, **config
    )
    return partial.sum(-1)


def gather_dot(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    """``Σ_i x_i · y[index[l, i]]`` for every slice: (batch, L)."""
    return _gather_pairs(x, y, index, False)


def gather_distance(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    """``Σ_i ‖x_i - y[index[l, i]]‖²`` for every slice: (batch, L)."""
    return _gather_pairs(x, y, index, True)
