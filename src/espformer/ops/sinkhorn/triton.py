"""Streaming Sinkhorn attention for GPUs, without an N×M matrix in memory.

The torch twin is :func:`espformer.ops.sinkhorn.torch.sinkhorn_output`. Every pass recomputes the
scores in tiles on the tensor cores. Between passes, one number per token and update is stored.

**Forward.** ``C = scale/ε · Q Kᵀ``. From ``p_0 = 0`` (a number per key), update u = 1 … S makes

    p_u = -LSE(C + p_{u-1})      over the keys for odd u (one per query), else over the queries

with a running maximum, so at any ε. The attention matrix is ``A_ij = r · exp(C_ij + f_i + g_j)``
with f, g the last potential of either side and r = 1 after an odd number of updates, N/M after an
even one. After an odd number the last update and the product with V are the same pass (f is what
normalises its rows): S passes over the scores in all, otherwise S + 1. All is done in base 2.

A masked token of either side, and a token without partners, has the potential `NO_POTENTIAL`. Its
exponentials are zero, so no other masking is needed. Masks are arbitrary over tokens, not only
lengths. Columns beyond the last are loaded as such.

**Backward.** Through the S updates, one by one, as autograd differentiates the torch twin. Let bars
be gradients and ``S^u_ij = exp(C_ij + p_u + p_{u-1})``, whose rows sum to one for odd u, else its
columns.

1. ``V̄ = Aᵀ Ō``. In ``E = A ∘ (Ō Vᵀ)``, the gradient of A's exponent, row sums are ``Ō_i · O_i``
   and column sums ``V̄_j · v_j``: the direct gradients of f and g cost nothing (`delta`,
   `value_grad`).
2. ``∂p_u/∂C = ∂p_u/∂p_{u-1} = -S^u``. So from the last update to the second

       p̄_{u-1} = direct - Σ p̄_u S^u          (sum over the side of p_u)

   `direct` only for the two last potentials. One pass over the scores each (`pull`); the first of
   them is part of `value_grad` when the rows came last.
3. ``C̄ = E - Σ_u p̄_u S^u``, and ``Q̄ = scale/ε · C̄ K``, ``K̄ = scale/ε · C̄ᵀ Q`` (`score_grad`, one
   pass each). S exponentials for every score would cost more than the products. But all the S^u
   differ from A by factors of rows and columns:

       S^u_ij = A_ij/r · exp(Δf^u_i) · exp(Δg^u_j),    Δ = potential of update u minus the last one

   hence ``C̄ = A ∘ (Ō Vᵀ - X Yᵀ)`` with X (N×S) and Y (M×S): one exponential, and the sum over
   updates is a matrix product of rank S that goes into the accumulator of ``Ō Vᵀ``. For 16-bit
   inputs X and Y are split into high and low halves (high·high + high·low + low·high, rank 3S): 16
   bits alone would leave an error that is common to a whole row.

   If potentials change by more than 2^24 between updates (small ε), the factors would overflow. The
   first launch skips such heads, and a second launch of the same kernel sums their updates with one
   exponential each. Both read a flag in device memory, so the host is not involved.

Passes over the scores, S odd and above 1: S forward; 1 + (S - 2) + 2 backward. Kept: S numbers per
token; during the backward as many for their gradients, and the factors (3S halves). There are no
atomics, so results are deterministic, and no host synchronisation, so calls can be captured in a
CUDA graph.

**Precision.** Scores, potentials and sums are float32. 16-bit inputs are multiplied by the tensor
cores as they are; weights are rounded to the dtype of the values before they multiply them. float32
inputs up to 64 wide are multiplied as three products of TF32, which is as good as float32; wider
heads without tensor cores.

Shapes in comments: H heads of all sequences, N rows and M columns of the scores.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from espformer.ops.common.masks import zero_padding
from espformer.ops.common.operators import operator, refuse_double_backward, without_autocast
from espformer.ops.common.triton import Launch, Shape, ceil_div, once, power_of_2

__all__ = ["output", "sinkhorn_backward", "sinkhorn_forward", "supported"]

NO_POTENTIAL = tl.constexpr(-1e30)
# Largest change of a potential since an earlier update, in base 2, that its exponential may carry.
MOST_CHANGE = tl.constexpr(24.0)
WIDEST = 256
LOG2_E = 1.4426950408889634
SPLIT_DTYPE = torch.bfloat16  # its range, for inputs in float16 too
HIGHEST_RANK = 128  # more updates than fit are added up one by one
SMALLEST = 16  # of a side of a tile that tensor cores multiply


@dataclass(frozen=True)
class Tile:
    """Rows and columns of the scores that a program holds at once, and how it runs."""

    rows: int
    columns: int
    warps: int
    stages: int


# By kernel, for heads up to 64, 128 and 256 wide. The sizes were chosen from the register counts of
# ptxas, so that nothing spills and as many programs as possible share a multiprocessor.
# docs/kernel-experiments.md has the figures.
HALVES: dict[str, tuple[Tile, Tile, Tile]] = {
    "potential": (Tile(128, 64, 4, 3), Tile(128, 64, 4, 2), Tile(128, 32, 4, 2)),
    "output": (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 32, 8, 2)),
    "grad": (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(64, 32, 8, 2)),
}
# float32: up to 64 wide with tensor cores, beyond without.
SINGLES: dict[str, tuple[Tile, Tile, Tile]] = {
    "potential": (Tile(64, 64, 4, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    "output": (Tile(64, 32, 4, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    "grad": (Tile(64, 32, 4, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
}
# Of multiprocessors with about 100 KB of shared memory: 16-bit heads up to 128 wide have room for
# the tiles above, wider ones and float32 do not.
COMPACT = {True: Tile(32, 32, 4, 1), False: Tile(16, 16, 4, 1)}
LARGE_SHARED_MEMORY = 160 << 10


@functools.cache
def _has_large_shared_memory(device: torch.device) -> bool:
    """Whether a program on this device can have as much shared memory as on data-centre GPUs."""
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    return bool(
        getattr(properties, "shared_memory_per_block_optin", LARGE_SHARED_MEMORY)
        >= LARGE_SHARED_MEMORY
    )


def constants(
    kernel: str, halves: bool, dim: int, width: int | None = None, *, large: bool = True
) -> dict[str, Any]:
    """Compile-time numbers of a kernel for heads of this width, and values of that."""
    widest = max(dim, width or 0)
    chosen = (HALVES if halves else SINGLES)[kernel][(widest > 64) + (widest > 128)]
    if not large and (not halves or widest > 128):
        chosen = COMPACT[halves]
    found: dict[str, Any] = {
        "D": dim,
        "BLOCK_D": max(SMALLEST, power_of_2(dim)),
        "ROWS": chosen.rows,
        "COLUMNS": chosen.columns,
        # Three TF32 products are as accurate as one in float32, and faster. Their operands are
        # split in registers, of which wide heads do not have enough.
        "PRECISION": "tf32x3" if not halves and widest <= 64 else "ieee",
        "num_warps": chosen.warps,
        "num_stages": chosen.stages,
    }
    if width is not None:
        found |= {"WIDTH": width, "BLOCK_W": max(SMALLEST, power_of_2(width))}
    return found


def rank_of(updates: int, halves: bool) -> int:
    """Columns of the factors: one for each update, three if they are split into halves."""
    return max(SMALLEST, power_of_2(3 * updates if halves else updates))


@triton.jit
def load_tile(x_ptr, head, rows, N, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of (heads, N, D) as a tile with BLOCK_D columns; what is not there is zero."""
    columns = tl.arange(0, BLOCK_D)
    tile_ptr = x_ptr + head * N * D + (rows[:, None] * D + columns[None, :])
    if D == BLOCK_D:
        return tl.load(tile_ptr, mask=(rows < N)[:, None], other=0.0)
    return tl.load(tile_ptr, mask=(rows < N)[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def store_tile(out_ptr, x, head, rows, N, D: tl.constexpr, BLOCK_D: tl.constexpr, factor=None):
    """A tile with BLOCK_D columns, times the factor, to rows of (heads, N, D), in their dtype."""
    columns = tl.arange(0, BLOCK_D)
    tile_ptr = out_ptr + head * N * D + (rows[:, None] * D + columns[None, :])
    inside = (rows < N)[:, None] & (columns < D)[None, :]
    if factor is not None:
        x = x * factor
    tl.store(tile_ptr, x.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def program_tile(N, BLOCK: tl.constexpr):
    """The head of this program, in 64 bits because its offset outgrows 32, and its rows."""
    blocks = tl.cdiv(N, BLOCK)
    program = tl.program_id(0)
    head = (program // blocks).to(tl.int64)
    return head, (program % blocks) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def finish_potential(largest, total, mask_ptr, head, rows, N, MASKED: tl.constexpr):
    """The potential ``-log2(total · 2^largest)``; absent for masked rows and without partners."""
    potential = -(largest + tl.log2(total))
    potential = tl.where((largest <= NO_POTENTIAL / 2) & (total == total), NO_POTENTIAL, potential)
    if MASKED:
        present = tl.load(mask_ptr + head * N + rows, mask=rows < N, other=0)
        potential = tl.where(present != 0, potential, NO_POTENTIAL)
    return potential


@triton.jit
def potential_kernel(
    x_ptr,  # (H, N, D)
    y_ptr,  # (H, M, D)
    other_ptr,  # (H, M) float32: potentials
    mask_ptr,  # (H, N) bool, if MASKED
    out_ptr,  # (H, N) float32
    N, M, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``out_i = -log2 Σ_j 2^(scale x_i·y_j + other_j)`` with a running maximum."""
    head, rows = program_tile(N, ROWS)
    x = load_tile(x_ptr, head, rows, N, D, BLOCK_D)
    largest = tl.full([ROWS], 2 * NO_POTENTIAL, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, M, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        y = load_tile(y_ptr, head, columns, M, D, BLOCK_D)
        other = tl.load(other_ptr + head * M + columns, mask=columns < M, other=NO_POTENTIAL)
        scores = tl.dot(x, tl.trans(y), input_precision=PRECISION) * scale + other[None, :]
        larger = tl.maximum(largest, tl.max(scores, 1))
        total = total * tl.exp2(largest - larger) + tl.sum(tl.exp2(scores - larger[:, None]), 1)
        largest = larger
    potential = finish_potential(largest, total, mask_ptr, head, rows, N, MASKED)
    tl.store(out_ptr + head * N + rows, potential, mask=rows < N)


@triton.jit
def output_kernel(
    q_ptr,  # (H, N, D)
    k_ptr,  # (H, M, D)
    v_ptr,  # (H, M, WIDTH)
    g_ptr,  # (H, M) float32: the last potentials
    f_ptr,  # (H, N) float32
    log_ratio_ptr,  # (H,) float32
    mask_ptr,  # (H, N) bool, if MASKED
    out_ptr,  # (H, N, WIDTH)
    N, M, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LAST_IS_ROWS: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``out_i = ratio · Σ_j 2^(scale q_i·k_j + f_i + g_j) v_j``.

    If the last update is over rows, f normalises them; it is computed in the same pass and stored.
    """
    head, rows = program_tile(N, ROWS)
    q = load_tile(q_ptr, head, rows, N, D, BLOCK_D)
    largest = tl.full([ROWS], 2 * NO_POTENTIAL, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, BLOCK_W], tl.float32)
    for start in range(0, M, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        k = load_tile(k_ptr, head, columns, M, D, BLOCK_D)
        v = load_tile(v_ptr, head, columns, M, WIDTH, BLOCK_W)
        g = tl.load(g_ptr + head * M + columns, mask=columns < M, other=NO_POTENTIAL)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale + g[None, :]
        larger = tl.maximum(largest, tl.max(scores, 1))
        rescale = tl.exp2(largest - larger)
        weights = tl.exp2(scores - larger[:, None])
        total = total * rescale + tl.sum(weights, 1)
        sums = tl.dot(weights.to(v.dtype), v, sums * rescale[:, None], input_precision=PRECISION)
        largest = larger
    if LAST_IS_ROWS:
        f = finish_potential(largest, total, mask_ptr, head, rows, N, MASKED)
        tl.store(f_ptr + head * N + rows, f, mask=rows < N)
        factor = 1 / total
    else:
        f = tl.load(f_ptr + head * N + rows, mask=rows < N, other=NO_POTENTIAL)
        factor = tl.exp2(largest + f + tl.load(log_ratio_ptr + head))
    out = tl.where((f <= NO_POTENTIAL / 2)[:, None], 0.0, sums * factor[:, None])
    store_tile(out_ptr, out, head, rows, N, WIDTH, BLOCK_W)


@triton.jit
def delta_kernel(
    up_ptr,  # (H, rows, WIDTH)
    out_ptr,  # (H, rows, WIDTH)
    delta_ptr,  # (H, rows) float32
    rows, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``delta_i = up_i · out_i``: the row sums of the gradient of the exponent."""
    head, here = program_tile(rows, ROWS)
    up = load_tile(up_ptr, head, here, rows, WIDTH, BLOCK_W).to(tl.float32)
    out = load_tile(out_ptr, head, here, rows, WIDTH, BLOCK_W).to(tl.float32)
    tl.store(delta_ptr + head * rows + here, tl.sum(up * out, 1), mask=here < rows)


@triton.jit
def pull_kernel(
    x_ptr,  # (H, N, D)
    y_ptr,  # (H, M, D)
    mine_ptr,  # (H, N) float32: potentials
    theirs_ptr,  # (H, M) float32
    grad_ptr,  # (H, M) float32: gradients of theirs
    direct_ptr,  # (H, N) float32, or None
    out_ptr,  # (H, N) float32
    N, M, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    HAS_DIRECT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``out_i = direct_i - Σ_j grad_j 2^(scale x_i·y_j + mine_i + theirs_j)``."""
    head, rows = program_tile(N, ROWS)
    x = load_tile(x_ptr, head, rows, N, D, BLOCK_D)
    mine = tl.load(mine_ptr + head * N + rows, mask=rows < N, other=NO_POTENTIAL)
    sums = tl.zeros([ROWS], tl.float32)
    for start in range(0, M, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        y = load_tile(y_ptr, head, columns, M, D, BLOCK_D)
        theirs = tl.load(theirs_ptr + head * M + columns, mask=columns < M, other=NO_POTENTIAL)
        grad = tl.load(grad_ptr + head * M + columns, mask=columns < M, other=0.0)
        scores = tl.dot(x, tl.trans(y), input_precision=PRECISION) * scale
        weights = tl.exp2(scores + (mine[:, None] + theirs[None, :]))
        sums += tl.sum(weights * grad[None, :], 1)
    out = -sums
    if HAS_DIRECT:
        out += tl.load(direct_ptr + head * N + rows, mask=rows < N, other=0.0)
    tl.store(out_ptr + head * N + rows, out, mask=rows < N)


@triton.jit
def value_grad_kernel(
    q_ptr,  # (H, M, D)
    k_ptr,  # (H, N, D)
    v_ptr,  # (H, N, WIDTH)
    up_ptr,  # (H, M, WIDTH)
    f_ptr,  # (H, M) float32: the last potentials
    g_ptr,  # (H, N) float32
    log_ratio_ptr,  # (H,) float32
    delta_ptr,  # (H, M) float32
    dv_ptr,  # (H, N, WIDTH)
    grad_ptr,  # (H, N) float32: the gradient of g
    N, M, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PULL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``dV = Aᵀ up`` and the gradient of g, ``v_j·dV_j``; with PULL less what the rows pull back.

    Rows of the tiles are keys here, and there are N of them; columns are the M queries.
    """
    head, rows = program_tile(N, ROWS)
    k = load_tile(k_ptr, head, rows, N, D, BLOCK_D)
    g = tl.load(g_ptr + head * N + rows, mask=rows < N, other=NO_POTENTIAL) + tl.load(
        log_ratio_ptr + head
    )
    sums = tl.zeros([ROWS, BLOCK_W], tl.float32)
    pulled = tl.zeros([ROWS], tl.float32)
    for start in range(0, M, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        q = load_tile(q_ptr, head, columns, M, D, BLOCK_D)
        up = load_tile(up_ptr, head, columns, M, WIDTH, BLOCK_W)
        f = tl.load(f_ptr + head * M + columns, mask=columns < M, other=NO_POTENTIAL)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale
        weights = tl.exp2(scores + (g[:, None] + f[None, :]))
        sums = tl.dot(weights.to(up.dtype), up, sums, input_precision=PRECISION)
        if PULL:
            delta = tl.load(delta_ptr + head * M + columns, mask=columns < M, other=0.0)
            pulled += tl.sum(weights * delta[None, :], 1)
    v = load_tile(v_ptr, head, rows, N, WIDTH, BLOCK_W)
    store_tile(dv_ptr, sums, head, rows, N, WIDTH, BLOCK_W)
    tl.store(grad_ptr + head * N + rows, tl.sum(sums * v, 1) - pulled, mask=rows < N)


@triton.jit(do_not_specialize=["heads", "last", "updates"])
def factors_kernel(
    potentials_ptr,  # (last + 1, H, N) float32
    grads_ptr,  # (last + 1, H, N) float32
    log_ratio_ptr,  # (H,) float32
    factors_ptr,  # (H, N, RANK)
    change_ptr,  # (H,) float32
    heads, N, last, updates,
    OF_QUERIES: tl.constexpr, SPLIT: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One side's factor of every update, relative to its last potential; and the largest change.

    Update u has the potentials ``(u - 1) // 2`` of the queries and ``u // 2`` of the keys, and its
    gradient belongs to the queries when u is odd. With SPLIT a factor is the sum of two 16-bit
    numbers, and three columns of either side are its product: high·high + high·low + low·high.
    """
    head = tl.program_id(0).to(tl.int64)
    stride = tl.cast(heads, tl.int64) * N
    change = tl.zeros([BLOCK], tl.float32)
    sign = -tl.exp2(-tl.load(log_ratio_ptr + head)) if OF_QUERIES else 1.0
    for start in range(0, N, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        inside = tokens < N
        here = head * N + tokens
        end = tl.load(potentials_ptr + last * stride + here, mask=inside, other=0.0)
        for update in range(1, updates + 1):
            index = (update - 1) // 2 if OF_QUERIES else update // 2
            place = index * stride + here
            moved = tl.load(potentials_ptr + place, mask=inside, other=0.0) - end
            change = tl.maximum(change, tl.abs(tl.where(inside, moved, 0.0)))
            factor = sign * tl.exp2(moved)
            if (update % 2 == 1) == OF_QUERIES:
                factor *= tl.load(grads_ptr + place, mask=inside, other=0.0)
            factor_ptr = factors_ptr + here * RANK + (update - 1)
            if SPLIT:
                high = factor.to(factors_ptr.dtype.element_ty)
                low = (factor - high.to(tl.float32)).to(factors_ptr.dtype.element_ty)
                tl.store(factor_ptr, high, mask=inside)
                tl.store(factor_ptr + updates, high if OF_QUERIES else low, mask=inside)
                tl.store(factor_ptr + 2 * updates, low if OF_QUERIES else high, mask=inside)
            else:
                tl.store(factor_ptr, factor, mask=inside)
        for column in range(3 * updates if SPLIT else updates, RANK):
            tl.store(factors_ptr + here * RANK + column, 0.0, mask=inside)
    tl.store(change_ptr + head, tl.max(change, 0))


@triton.jit(do_not_specialize=["heads", "my_last", "their_last", "updates"])
def score_grad_kernel(
    x_ptr,  # (H, N, D): queries or keys
    y_ptr,  # (H, M, D): the other side
    x2_ptr,  # (H, N, WIDTH): upstream rows or values
    y2_ptr,  # (H, M, WIDTH)
    mine_ptr,  # (my_last + 1, H, N) float32: potentials
    theirs_ptr,  # (their_last + 1, H, M) float32
    my_grads_ptr,  # (my_last + 1, H, N) float32: of the potentials
    their_grads_ptr,  # (their_last + 1, H, M) float32
    my_factors_ptr,  # (H, N, RANK), if FACTORED
    their_factors_ptr,  # (H, M, RANK), if FACTORED
    log_ratio_ptr,  # (H,) float32
    change_ptr,  # (2, H) float32
    dx_ptr,  # (H, N, D)
    heads, N, M, my_last, their_last, updates, scale, to_tokens,
    D: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr,
    RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OF_QUERIES: tl.constexpr,
    FACTORED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``dx_i = to_tokens · Σ_j dC_ij y_j``, from queries to keys or from keys to queries.

    ``dC = A ∘ (x2 y2ᵀ + factors)``, ``A = ratio · 2^(scale x·y + last potentials)``. Heads whose
    potentials changed too much for factors add the updates up exponential by exponential.
    """
    head, rows = program_tile(N, ROWS)
    change = tl.maximum(tl.load(change_ptr + head), tl.load(change_ptr + heads + head))
    if FACTORED:
        skip = change > MOST_CHANGE
    else:
        skip = change <= MOST_CHANGE
    if skip:
        return
    my_stride, their_stride = tl.cast(heads, tl.int64) * N, tl.cast(heads, tl.int64) * M
    x = load_tile(x_ptr, head, rows, N, D, BLOCK_D)
    x2 = load_tile(x2_ptr, head, rows, N, WIDTH, BLOCK_W)
    mine = tl.load(
        mine_ptr + my_last * my_stride + head * N + rows, mask=rows < N, other=NO_POTENTIAL
    )
    mine += tl.load(log_ratio_ptr + head)
    if FACTORED:
        factors = load_tile(my_factors_ptr, head, rows, N, RANK, RANK)
    sums = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(0, M, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = columns < M
        y = load_tile(y_ptr, head, columns, M, D, BLOCK_D)
        y2 = load_tile(y2_ptr, head, columns, M, WIDTH, BLOCK_W)
        last_ptr = theirs_ptr + their_last * their_stride + head * M
        theirs = tl.load(last_ptr + columns, mask=inside, other=NO_POTENTIAL)
        scores = tl.dot(x, tl.trans(y), input_precision=PRECISION) * scale
        grad = tl.dot(x2, tl.trans(y2), input_precision=PRECISION)
        if FACTORED:
            opposite = load_tile(their_factors_ptr, head, columns, M, RANK, RANK)
            grad = tl.dot(factors, tl.trans(opposite), grad, input_precision=PRECISION)
        grad *= tl.exp2(scores + (mine[:, None] + theirs[None, :]))
        if not FACTORED:
            for update in range(1, updates + 1):
                queries, keys = (update - 1) // 2, update // 2
                left = (queries if OF_QUERIES else keys) * my_stride + head * N
                right = (keys if OF_QUERIES else queries) * their_stride + head * M
                a = tl.load(mine_ptr + left + rows, mask=rows < N, other=NO_POTENTIAL)
                b = tl.load(theirs_ptr + right + columns, mask=inside, other=NO_POTENTIAL)
                weights = tl.exp2(scores + (a[:, None] + b[None, :]))
                if (update % 2 == 1) == OF_QUERIES:
                    my_grad = tl.load(my_grads_ptr + left + rows, mask=rows < N, other=0.0)
                    grad -= weights * my_grad[:, None]
                else:
                    their_grad = tl.load(their_grads_ptr + right + columns, mask=inside, other=0.0)
                    grad -= weights * their_grad[None, :]
        sums = tl.dot(grad.to(y.dtype), y, sums, input_precision=PRECISION)
    store_tile(dx_ptr, sums, head, rows, N, D, BLOCK_D, to_tokens)


# Kernels that make the scores in tiles, and the tiles that they take.
TILED = {
    "potential": (potential_kernel, "potential"),
    "output": (output_kernel, "output"),
    "pull": (pull_kernel, "potential"),
    "value_grad": (value_grad_kernel, "output"),
    "score_grad": (score_grad_kernel, "grad"),
}


@dataclass(frozen=True)
class TiledLaunches:
    """Launches of the kernels that make scores in tiles, for one shape of queries and keys."""

    halves: bool  # whether tokens have 16 bits
    heads: int
    queries: int
    keys: int
    dim: int
    width: int  # of the values
    scale: float
    large: bool  # whether there is much shared memory
    made: dict[tuple[Any, ...], Launch] = field(default_factory=dict, compare=False)

    def __call__(self, name: str, to_queries: bool, **options: Any) -> Launch:
        """A program for every tile of queries, which meet keys; or the other way round."""
        place = (name, to_queries, *options.values())
        found = self.made.get(place)
        if found is None:
            kernel, tile = TILED[name]
            rows, columns = (self.queries, self.keys)[:: 1 if to_queries else -1]
            width = None if tile == "potential" else self.width
            meta = constants(tile, self.halves, self.dim, width, large=self.large)
            grid = (ceil_div(rows, meta["ROWS"]) * self.heads,)
            found = self.made[place] = Launch(
                kernel, grid, N=rows, M=columns, scale=self.scale * LOG2_E, **meta, **options
            )
        return found


_tiled = once(TiledLaunches)


@once
def _delta_launch(shape: Shape) -> Launch:
    heads, tokens, width = shape
    block = max(SMALLEST, power_of_2(width))
    rows = max(1, 4096 // block)
    grid = (ceil_div(tokens, rows) * heads,)
    return Launch(delta_kernel, grid, rows=tokens, WIDTH=width, BLOCK_W=block, ROWS=rows)


@once
def _factors_launch(shape: Shape, updates: int, of_queries: bool, halves: bool) -> Launch:
    count, heads, tokens = shape
    return Launch(
        factors_kernel, (heads,), heads=heads, N=tokens, last=count - 1, updates=updates,
        OF_QUERIES=of_queries, SPLIT=halves, RANK=rank_of(updates, halves),
        BLOCK=min(1024, max(SMALLEST, power_of_2(tokens))),
    )  # fmt: skip


class Sides:
    """Queries and keys of every head, ``(heads, N, D)`` and ``(heads, M, D)``, and their scores.

    Potentials are float32, in base 2, of shape ``(updates of that side, heads, tokens)``.
    """

    def __init__(self, query: Tensor, key: Tensor, width: int, scale: float) -> None:
        self.query, self.key, self.scale = query, key, scale
        self.heads, queries, dim = query.shape
        self.halves = query.element_size() == 2  # whether tokens have 16 bits
        large = _has_large_shared_memory(query.device)
        self.launch = _tiled(
            self.halves, self.heads, queries, key.shape[1], dim, width, scale, large
        )

    def across(self, to_queries: bool) -> tuple[Tensor, Tensor]:
        return (self.query, self.key) if to_queries else (self.key, self.query)

    def update(self, to_queries: bool, other: Tensor, mask: Tensor | None, out: Tensor) -> None:
        """One update of a potential of the queries or of the keys, from the other side's."""
        launch = self.launch("potential", to_queries, MASKED=mask is not None)
        launch(*self.across(to_queries), other, mask, out)

    def output(
        self, value: Tensor, f: Tensor, g: Tensor, log_ratio: Tensor, mask: Tensor | None,
        last_is_rows: bool,
    ) -> Tensor:  # fmt: skip
        """The attention's output; with `last_is_rows` the last potential of the queries too."""
        out = value.new_empty(self.heads, self.query.shape[1], value.shape[-1])
        launch = self.launch("output", True, LAST_IS_ROWS=last_is_rows, MASKED=mask is not None)
        launch(self.query, self.key, value, g, f, log_ratio, mask, out)
        return out

    def delta(self, upstream: Tensor, output: Tensor, out: Tensor) -> None:
        """``upstream · output`` of every query."""
        _delta_launch(output.shape)(upstream, output, out)

    def pull(
        self, to_queries: bool, mine: Tensor, theirs: Tensor, grad: Tensor, direct: Tensor | None,
        out: Tensor,
    ) -> None:  # fmt: skip
        """The gradient of an update, back to the potential that it was made from."""
        launch = self.launch("pull", to_queries, HAS_DIRECT=direct is not None)
        launch(*self.across(to_queries), mine, theirs, grad, direct, out)

    def value_grad(
        self, value: Tensor, upstream: Tensor, f: Tensor, g: Tensor, log_ratio: Tensor,
        delta: Tensor, grad: Tensor, pull: bool,
    ) -> Tensor:  # fmt: skip
        """The gradient of the values; that of g goes to `grad`."""
        out = torch.empty_like(value)
        launch = self.launch("value_grad", False, PULL=pull)
        launch(self.query, self.key, value, upstream, f, g, log_ratio, delta, out, grad)
        return out

    def factors(
        self, of_queries: bool, potentials: Tensor, grads: Tensor, log_ratio: Tensor, updates: int,
        change: Tensor,
    ) -> Tensor:  # fmt: skip
        """The part of the updates' gradients on one side: (heads, tokens, rank)."""
        rank = rank_of(updates, self.halves)
        dtype = SPLIT_DTYPE if self.halves else torch.float32
        found = potentials.new_empty(*potentials.shape[1:], rank, dtype=dtype)
        launch = _factors_launch(potentials.shape, updates, of_queries, self.halves)
        launch(potentials, grads, log_ratio, found, change)
        return found

    def token_grads(
        self, value: Tensor, upstream: Tensor, f: Tensor, g: Tensor, f_grads: Tensor,
        g_grads: Tensor, log_ratio: Tensor, updates: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The gradients of the queries and of the keys, from those of all potentials."""
        rank = rank_of(updates, self.halves)
        factorable = rank <= HIGHEST_RANK
        f_factors = g_factors = None
        if not factorable:
            change = f.new_full((2, self.heads), math.inf)
        else:
            change = f.new_empty(2, self.heads)
            f_factors = self.factors(True, f, f_grads, log_ratio, updates, change[0])
            g_factors = self.factors(False, g, g_grads, log_ratio, updates, change[1])
        queries = (upstream, f, f_grads, f_factors)
        keys = (value, g, g_grads, g_factors)
        found = []
        for of_queries in (True, False):
            x, y = self.across(of_queries)
            mine, theirs = (queries, keys) if of_queries else (keys, queries)
            out = torch.empty_like(x)
            # Each head is taken by one of the two.
            for factored in (True, False) if factorable else (False,):
                launch = self.launch(
                    "score_grad", of_queries, heads=self.heads, my_last=mine[1].shape[0] - 1,
                    their_last=theirs[1].shape[0] - 1, updates=updates, to_tokens=self.scale,
                    OF_QUERIES=of_queries, FACTORED=factored, RANK=min(rank, HIGHEST_RANK),
                )  # fmt: skip
                launch(
                    x, y, mine[0], theirs[0], mine[1], theirs[1], mine[2], theirs[2], mine[3],
                    theirs[3], log_ratio, change, out,
                )  # fmt: skip
            found.append(out)
        return found[0], found[1]


@operator("sinkhorn_forward", keeps=True)
def sinkhorn_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
    updates: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output ``(heads, N, width)``, the potentials f and g of all updates, and the ratio.

    f is ``(⌈S/2⌉, heads, N)`` and g, with its start, ``(⌊S/2⌋ + 1, heads, M)``. Queries, keys and
    values are ``(heads, tokens, width)``, padded tokens zero; masks ``(heads, tokens)``; the scores
    are ``scale · query keyᵀ``; `updates` is S. :func:`_log_ratio` says what the ratio is.
    """
    sides = Sides(query, key, value.shape[-1], scale)
    potentials = _potentials(query, (updates + 1) // 2), _potentials(key, updates // 2 + 1)
    f, g = (x.unbind(0) for x in potentials)
    g[0].zero_()
    if key_mask is not None:
        g[0].masked_fill_(~key_mask, NO_POTENTIAL.value)
    last_is_rows = updates % 2 == 1
    # The output finds the last potential of the queries itself when the rows come last.
    for update in range(1, updates if last_is_rows else updates + 1):
        if update % 2 == 1:
            sides.update(True, g[update // 2], query_mask, f[update // 2])
        else:
            sides.update(False, f[update // 2 - 1], key_mask, g[update // 2])
    log_ratio = _log_ratio(query, key, query_mask, key_mask, updates)
    out = sides.output(value, f[-1], g[-1], log_ratio, query_mask, last_is_rows)
    return out, *potentials, log_ratio


@sinkhorn_forward.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, query_mask: Tensor | None, key_mask: Tensor | None,
    scale: float, updates: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    heads, queries, _ = query.shape
    f, g = _potentials(query, (updates + 1) // 2), _potentials(key, updates // 2 + 1)
    return value.new_empty(heads, queries, value.shape[-1]), f, g, f.new_empty(heads)


@operator("sinkhorn_backward")
def sinkhorn_backward(
    upstream: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    f: Tensor,
    g: Tensor,
    log_ratio: Tensor,
    scale: float,
    updates: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values; the docstring of the file derives the steps."""
    upstream = upstream.to(value.dtype).contiguous()
    sides = Sides(query, key, value.shape[-1], scale)
    f_grads, g_grads = torch.empty_like(f), torch.empty_like(g)
    fs, gs, f_grad_of, g_grad_of = (x.unbind(0) for x in (f, g, f_grads, g_grads))
    last_is_rows = updates % 2 == 1
    delta = f_grad_of[-1] if last_is_rows else torch.empty_like(f_grad_of[-1])
    sides.delta(upstream, out, delta)
    d_value = sides.value_grad(
        value, upstream, fs[-1], gs[-1], log_ratio, delta, g_grad_of[-1], last_is_rows
    )
    for update in range(updates - 1 if last_is_rows else updates, 1, -1):
        # Update u made potential u of one side from potential u - 1 of the other.
        mine, theirs = fs[(update - 1) // 2], gs[update // 2]
        f_grad, g_grad = f_grad_of[(update - 1) // 2], g_grad_of[update // 2]
        direct = delta if update == updates else None
        if update % 2 == 0:
            sides.pull(True, mine, theirs, g_grad, direct, f_grad)
        else:
            sides.pull(False, theirs, mine, f_grad, None, g_grad)
    d_query, d_key = sides.token_grads(value, upstream, f, g, f_grads, g_grads, log_ratio, updates)
    return d_query, d_key, d_value


@sinkhorn_backward.register_fake
def _(upstream: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return (
        torch.empty_like(query, memory_format=torch.contiguous_format),
        torch.empty_like(key, memory_format=torch.contiguous_format),
        torch.empty_like(value, memory_format=torch.contiguous_format),
    )


def _potentials(tokens: Tensor, count: int) -> Tensor:
    return tokens.new_empty(count, *tokens.shape[:2], dtype=torch.float32)


def _log_ratio(
    query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None, updates: int
) -> Tensor:
    """``log2`` of what the matrix is multiplied by: N/M where the columns come last, else 1."""
    heads, queries, keys = query.shape[0], query.shape[1], key.shape[1]
    if updates % 2 == 1 or (query_mask is None and key_mask is None):
        ratio = 0.0 if updates % 2 == 1 else math.log2(queries / keys)
        return query.new_full((heads,), ratio, dtype=torch.float32)
    rows, columns = (
        torch.full((heads,), tokens, dtype=torch.float32, device=query.device)
        if mask is None
        else mask.sum(-1).clamp(min=1).float()
        for mask, tokens in ((query_mask, queries), (key_mask, keys))
    )
    return (rows / columns).log2()


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, _, _, ctx.scale, ctx.updates = inputs
    ctx.save_for_backward(query, key, value, *output)


@refuse_double_backward("espformer::sinkhorn_forward", instead="torch")
def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    if grads[0] is None:
        return (None,) * 7
    found = sinkhorn_backward(grads[0], *ctx.saved_tensors, ctx.scale, ctx.updates)
    return (*found, None, None, None, None)


sinkhorn_forward.register_autograd(_backward, setup_context=_setup)


def supported(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernels support the problem: no float64, and heads up to 256 wide."""
    widest = max(query.shape[-1], value.shape[-1])
    return torch.float64 not in (query.dtype, key.dtype, value.dtype) and widest <= WIDEST


def output(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    iterations: int,
    epsilon: float,
    scale: float,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """The contract of :func:`espformer.ops.sinkhorn.torch.sinkhorn_output`, without any N×N."""
    lead = query.shape[:-2]
    if not key.shape[:-2] == value.shape[:-2] == lead:
        lead = torch.broadcast_shapes(lead, key.shape[:-2], value.shape[:-2])
    n, m, width = query.shape[-2], key.shape[-2], value.shape[-1]
    dtype = torch.promote_types(query.dtype, key.dtype)

    def flat(x: Tensor, mask: Tensor | None) -> Tensor:
        x = zero_padding(x, mask)
        if x.shape[:-2] != lead:
            x = x.expand(*lead, *x.shape[-2:])
        return x.reshape(-1, *x.shape[-2:]).contiguous()

    def flat_mask(mask: Tensor | None, tokens: int) -> Tensor | None:
        return None if mask is None else mask.expand(*lead, tokens).reshape(-1, tokens).contiguous()

    with without_autocast(query.device):
        out: Tensor = sinkhorn_forward(
            flat(query, query_mask).to(dtype),
            flat(key, key_mask).to(dtype),
            flat(value, key_mask),
            flat_mask(query_mask, n),
            flat_mask(key_mask, m),
            scale / epsilon,
            max(iterations, 1),
        )
    return out.view(*lead, n, width)
