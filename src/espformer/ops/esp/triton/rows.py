"""Rows of tokens: read in the order of a chunk's ranks, and added back."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(X, SCALE, tokens, n, N, d, D: tl.constexpr, EVEN: tl.constexpr):
    """Rows of the tokens at ranks n, (ranks, columns), times their scales; zero past the end.

    EVEN says that chunks and columns fill their blocks, which saves the masks.
    """
    at = tokens[:, None] * D + d[None, :]
    if EVEN:
        x = tl.load(X + at)
    else:
        x = tl.load(X + at, mask=(d[None, :] < D) & (n[:, None] < N), other=0.0)
    if SCALE is not None:
        scale = tl.load(SCALE + n, mask=n < N, other=0.0)
        x = (x.to(tl.float32) * scale[:, None]).to(x.dtype)
    return x


@triton.jit
def add_rows(
    OUT, SCALE, y, tokens, pair, head, n, N, TOKENS, d, D: tl.constexpr,
    ATOMIC: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Adds ``scale · y`` to the rows of the tokens at ranks n.

    Not ATOMIC: every slice stores rows of its own; ranks whose scale is zero are left out.
    """
    here = (n[:, None] < N) & (d[None, :] < D)
    if SCALE is not None:
        scale = tl.load(SCALE + n, mask=n < N, other=0.0)[:, None]
        y = y * scale
    if ATOMIC:
        at = OUT + head * TOKENS * D + tokens[:, None] * D + d[None, :]
        if EVEN:
            tl.atomic_add(at, y, sem="relaxed")
        else:
            tl.atomic_add(at, y, mask=here, sem="relaxed")
    else:
        at = OUT + pair * TOKENS * D + tokens[:, None] * D + d[None, :]
        if SCALE is not None:
            here = here & (scale != 0)
        tl.store(at, y, mask=here)
