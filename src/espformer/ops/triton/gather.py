"""Sums of gathered rows: the hard operator, and the deterministic end of the soft one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def gather_kernel(
    X, INDEX, WEIGHT, OUT, N, D, L, BLOCKS,
    PER_SLICE: tl.constexpr, WEIGHTED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``out_i = Σ_l weight_l x[index[l, i]]``, x shared by the slices or one per slice."""
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    i = tl.program_id(0) % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    inside = (i[:, None] < N) & (d[None, :] < D)
    total = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for slice in range(L):
        pair = head * L + slice
        j = tl.load(INDEX + pair * N + i, mask=i < N, other=0)
        if PER_SLICE:
            rows = X + (pair * N + j) * D
        else:
            rows = X + (head * N + j) * D
        x = tl.load(rows[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            x = x * tl.load(WEIGHT + pair)
        total += x
    rows = OUT + (head * N + i) * D
    tl.store(rows[:, None] + d[None, :], total.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def dot_kernel(X, Y, INDEX, OUT, N, D, L, BLOCKS, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """``out_l = Σ_i x_i · y[index[l, i]]``, one partial sum per block of tokens."""
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    i = block * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    inside = (i[:, None] < N) & (d[None, :] < D)
    rows = X + (head * N + i) * D
    x = tl.load(rows[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    for slice in range(L):
        pair = head * L + slice
        j = tl.load(INDEX + pair * N + i, mask=i < N, other=0)
        rows = Y + (head * N + j) * D
        y = tl.load(rows[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(OUT + pair * BLOCKS + block, tl.sum(tl.sum(x * y, 1), 0))


def gather_sum(x: Tensor, index: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Rows x (batch, N, d) or (batch, L, N, d) by index (batch, L, N), summed over the slices."""
    batch, slices, tokens = index.shape
    width = x.shape[-1]
    out = x.new_empty(batch, tokens, width, dtype=dtype)
    block_d = triton.next_power_of_2(width)
    block_n = max(1, min(32, 4096 // block_d))
    gather_kernel[(batch * triton.cdiv(tokens, block_n),)](
        x, index, weight, out, tokens, width, slices, triton.cdiv(tokens, block_n),
        PER_SLICE=x.dim() == 4, WEIGHTED=weight is not None, BLOCK_N=block_n, BLOCK_D=block_d,
        num_warps=4,
    )  # fmt: skip
    return out


def gather_dot(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    """``Σ_i x_i · y[index[l, i]]`` for every slice: (batch, L)."""
    batch, slices, tokens = index.shape
    width = x.shape[-1]
    block_d = triton.next_power_of_2(width)
    block_n = max(1, min(32, 4096 // block_d))
    blocks = triton.cdiv(tokens, block_n)
    partial = x.new_empty(batch, slices, blocks, dtype=torch.float32)
    dot_kernel[(batch * blocks,)](
        x, y, index, partial, tokens, width, slices, blocks,
        BLOCK_N=block_n, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
    return partial.sum(-1)
