"""Plans applied to rows: ``weight · final · κ_q (scale · κ_k (first · x))``, chunk by chunk.

Rank n of the keys meets rank n of the queries, so the program that makes a chunk of
``W = scale · κ_k x`` multiplies it by κ_q at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from espformer.ops.triton.chunks import load_states, near, place, side, spread
from espformer.ops.triton.instructions import roomy
from espformer.ops.triton.rows import add_rows, load_rows


@triton.jit
def apply_kernel(
    X, K_ORDER, FIRST, K_S, K_SCALE, Q_S, Q_SCALE, Q_ORDER, FINAL, TABLE: tl.constexpr,
    INVERSE_WIDTH, X_STATES, W_STATES, WEIGHT, OUT, N, KEYS, QUERIES, HEADS, L, CHUNKS,
    D: tl.constexpr, COMPLEX: tl.constexpr, ROWS: tl.constexpr,
    HAS_FIRST: tl.constexpr, HAS_FINAL: tl.constexpr, ATOMIC: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_D: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Adds the plan of one slice, applied to the rows of the keys, to the rows of the queries."""
    pair, head, chunk = place(HEADS, L, CHUNKS)
    n = chunk * C + tl.arange(0, C)
    ranks = pair * N
    X += head * KEYS * D
    if HAS_FIRST:
        FIRST += ranks
    if HAS_FINAL:
        FINAL += ranks
    if ROWS > 0:
        X_STATES += pair * CHUNKS * ROWS * D
        W_STATES += pair * CHUNKS * ROWS * D
    # All loads come first: what follows waits for the tensor cores, and nothing moves across that.
    keys, k_scale, s, first, last = side(K_S, K_ORDER, K_SCALE, ranks, n, chunk, N, C, EVEN)
    queries, q_scale, t, t_first, t_last = side(Q_S, Q_ORDER, Q_SCALE, ranks, n, chunk, N, C, EVEN)
    inverse_width = tl.load(INVERSE_WIDTH + head)
    weight = tl.load(WEIGHT + pair)
    scale = k_scale * q_scale * weight
    exact: tl.constexpr = X.dtype.element_ty == tl.float32
    for start in tl.static_range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        x = load_rows(X, FIRST, keys, n, N, d, D, HAS_FIRST, EVEN)
        x_states = load_states(X_STATES, chunk, d, D, ROWS)
        w_states = load_states(W_STATES, chunk, d, D, ROWS)
        k, _ = near(s, first, x, inverse_width, COMPLEX, exact)
        w = spread(TABLE, k, x, x_states, s, first, last, inverse_width, COMPLEX, ROWS)
        w = (w * scale[:, None]).to(roomy(x).dtype)
        k, _ = near(t, t_first, x, inverse_width, COMPLEX, exact)
        y = spread(TABLE, k, w, w_states, t, t_first, t_last, inverse_width, COMPLEX, ROWS, weight)
        add_rows(
            OUT, FINAL, 1.0, y, queries, pair, head, n, N, QUERIES, d, D, HAS_FINAL, ATOMIC, EVEN
        )


@triton.jit
def cross_kernel(
    X, K_ORDER, FIRST, K_S, K_SCALE, G, Q_ORDER, FINAL, Q_S, Q_SCALE, TABLE: tl.constexpr,
    INVERSE_WIDTH, X_STATES, G_STATES, TOTALS, N, KEYS, QUERIES, HEADS, L, CHUNKS,
    D: tl.constexpr, COMPLEX: tl.constexpr, ROWS: tl.constexpr,
    HAS_FIRST: tl.constexpr, HAS_FINAL: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_D: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """``Σ_n scale_n (κ_k x)_n · (κ_q g)_n``, one sum per chunk: ⟨g, plan x⟩ from both ends."""
    pair, head, chunk = place(HEADS, L, CHUNKS)
    n = chunk * C + tl.arange(0, C)
    ranks = pair * N
    X += head * KEYS * D
    G += head * QUERIES * D
    if HAS_FIRST:
        FIRST += ranks
    if HAS_FINAL:
        FINAL += ranks
    if ROWS > 0:
        X_STATES += pair * CHUNKS * ROWS * D
        G_STATES += pair * CHUNKS * ROWS * D
    keys, k_scale, s, first, last = side(K_S, K_ORDER, K_SCALE, ranks, n, chunk, N, C, EVEN)
    queries, q_scale, t, t_first, t_last = side(Q_S, Q_ORDER, Q_SCALE, ranks, n, chunk, N, C, EVEN)
    inverse_width = tl.load(INVERSE_WIDTH + head)
    scale = k_scale * q_scale
    exact: tl.constexpr = X.dtype.element_ty == tl.float32
    dots = tl.zeros((C,), tl.float32)
    for start in tl.static_range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        x = load_rows(X, FIRST, keys, n, N, d, D, HAS_FIRST, EVEN)
        g = load_rows(G, FINAL, queries, n, N, d, D, HAS_FINAL, EVEN)
        x_states = load_states(X_STATES, chunk, d, D, ROWS)
        g_states = load_states(G_STATES, chunk, d, D, ROWS)
        k, _ = near(s, first, x, inverse_width, COMPLEX, exact)
        y = spread(TABLE, k, x, x_states, s, first, last, inverse_width, COMPLEX, ROWS)
        k, _ = near(t, t_first, x, inverse_width, COMPLEX, exact)
        z = spread(TABLE, k, g, g_states, t, t_first, t_last, inverse_width, COMPLEX, ROWS)
        dots += tl.sum(y * z, 1)
    tl.store(TOTALS + pair * CHUNKS + chunk, tl.sum(dots * scale, 0))
