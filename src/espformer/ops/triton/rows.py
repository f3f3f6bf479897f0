"""Rows of a chunk: read through a permutation or by rank, stored by rank or added by token."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(
    X, ORDER, SCALE, n, N, d, D: tl.constexpr,
    GATHER: tl.constexpr, SCALED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Rows of ranks n, (ranks, columns), times their scales; zero past the end.

    EVEN says that chunks and columns fill their blocks, which saves the masks.
    """
    rows = n
    if GATHER:
        rows = tl.load(ORDER + n) if EVEN else tl.load(ORDER + n, mask=n < N, other=0)
    at = rows[:, None] * D + d[None, :]
    if EVEN:
        x = tl.load(X + at)
    else:
        x = tl.load(X + at, mask=(d[None, :] < D) & (n[:, None] < N), other=0.0)
    if SCALED:
        scale = tl.load(SCALE + n, mask=n < N, other=0.0)
        x = (x.to(tl.float32) * scale[:, None]).to(x.dtype)
    return x


@triton.jit
def store_rows(OUT, y, n, N, d, D: tl.constexpr, EVEN: tl.constexpr):
    """Rows of ranks n, as they are stored: in the type of OUT."""
    y = y.to(OUT.dtype.element_ty)
    at = OUT + n[:, None] * D + d[None, :]
    if EVEN:
        tl.store(at, y)
    else:
        here = (n[:, None] < N) & (d[None, :] < D)
        tl.store(at, y, mask=here)
        y = tl.where(here, y, 0.0)
    return y


@triton.jit
def add_rows(OUT, tokens, y, n, N, d, D: tl.constexpr, EVEN: tl.constexpr):
    """Adds rows of ranks n to the rows of their tokens."""
    at = OUT + tokens[:, None] * D + d[None, :]
    if EVEN:
        tl.atomic_add(at, y, sem="relaxed")
    else:
        tl.atomic_add(at, y, mask=(n[:, None] < N) & (d[None, :] < D), sem="relaxed")
