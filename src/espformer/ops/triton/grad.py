"""The backward of a plan: gradients of ``weight · ⟨g, final κ_q scale κ_k first x⟩`` in everything.

With ``y = κ_k x``, ``z = κ_q g``, ``W = scale · y`` and ``P = scale · z`` they are products with
the same two kernels:

    dx = κ_k P,    dg = κ_q W,    d scale_n = y_n · z_n,
    slope of the keys' numbers:     Σ_j κ_k'_nj (P_n · x_j + x_n · P_j),
    slope of the queries' numbers:  Σ_j κ_q'_nj (W_n · g_j + g_n · W_j).

The slopes need only the small matrices ``P xᵀ + x Pᵀ`` of a chunk and ``P statesᵀ``: the columns
are summed by the tensor cores, and κ' is never rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from espformer.ops.triton.chunks import (
    gap_slope,
    load_states,
    near,
    on_states,
    overlaps,
    place,
    positions,
    side,
    spread,
    waves,
)
from espformer.ops.triton.instructions import roomy
from espformer.ops.triton.rows import add_rows, load_rows


@triton.jit
def over(x, y):
    """x / y, and zero where y is."""
    return tl.where(y == 0, 0.0, x / tl.where(y == 0, 1.0, y))


@triton.jit
def grad_kernel(
    X, K_ORDER, FIRST, K_S, K_SCALE, G, Q_ORDER, FINAL, Q_S, Q_SCALE, TABLE: tl.constexpr,
    INVERSE_WIDTH, WEIGHT, X_STATES, W_STATES, G_STATES, P_STATES,
    DX, DG, D_KEYS, D_QUERIES, D_K_SCALE, D_Q_SCALE, D_FIRST, D_FINAL, TOTALS,
    N, KEYS, QUERIES, HEADS, L, CHUNKS, D: tl.constexpr, COMPLEX: tl.constexpr, ROWS: tl.constexpr,
    HAS_FIRST: tl.constexpr, HAS_FINAL: tl.constexpr, WITH_G: tl.constexpr,
    ATOMIC: tl.constexpr, EVEN: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """All gradients of one chunk; TOTALS gets ``⟨g, plan x⟩`` without the weight, by chunk."""
    pair, head, chunk = place(HEADS, L, CHUNKS)
    n = chunk * C + tl.arange(0, C)
    inside = n < N
    ranks = pair * N
    X += head * KEYS * D
    G += head * QUERIES * D
    if HAS_FIRST:
        FIRST += ranks
    if HAS_FINAL:
        FINAL += ranks
    if ROWS > 0:
        X_STATES += pair * CHUNKS * ROWS * D
        W_STATES += pair * CHUNKS * ROWS * D
        G_STATES += pair * CHUNKS * ROWS * D
        P_STATES += pair * CHUNKS * ROWS * D
    keys, k_scale, s, first, last = side(K_S, K_ORDER, K_SCALE, ranks, n, chunk, N, C, EVEN)
    queries, q_scale, t, t_first, t_last = side(Q_S, Q_ORDER, Q_SCALE, ranks, n, chunk, N, C, EVEN)
    inverse_width = tl.load(INVERSE_WIDTH + head)
    weight = tl.load(WEIGHT + pair)
    scale = k_scale * q_scale
    exact: tl.constexpr = X.dtype.element_ty == tl.float32
    by_width = weight * inverse_width
    dots = tl.zeros((C,), tl.float32)
    k_slope = tl.zeros((C,), tl.float32)
    q_slope = tl.zeros((C,), tl.float32)
    first_dots = tl.zeros((C,), tl.float32)
    final_dots = tl.zeros((C,), tl.float32)
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
        x = roomy(x)
        g = roomy(g)
        w = (y * scale[:, None]).to(x.dtype)
        p = (z * scale[:, None]).to(x.dtype)

        # One side after the other, from its numbers on: registers decide how many programs fit, and
        # without the barrier the compiler would keep both κ from their first use to their last.
        tl.debug_barrier()
        t, t_first, t_last = positions(Q_S + ranks, chunk, N, C, EVEN)
        k, gap = near(t, t_first, x, inverse_width, COMPLEX, exact)
        q_slope += tl.sum(gap_slope(k, gap, COMPLEX) * overlaps(w, g), 1)
        w_states = load_states(W_STATES, chunk, d, D, ROWS)
        if ROWS > 0:
            far = on_states(w, g_states, COMPLEX) + on_states(g, w_states, COMPLEX)
            wave = waves(TABLE, t, t_first, t_last, inverse_width, "slope", COMPLEX, ROWS, exact)
            q_slope += tl.sum(wave * far, 1)
        if WITH_G or HAS_FINAL:
            dg = spread(TABLE, k, w, w_states, t, t_first, t_last, inverse_width, COMPLEX, ROWS)
            if HAS_FINAL:
                final_dots += tl.sum(dg * g.to(tl.float32), 1)
            if WITH_G:
                add_rows(
                    DG, FINAL, weight, dg, queries, pair, head, n, N, QUERIES, d, D, HAS_FINAL,
                    ATOMIC, EVEN,
                )  # fmt: skip

        tl.debug_barrier()
        s, first, last = positions(K_S + ranks, chunk, N, C, EVEN)
        k, gap = near(s, first, x, inverse_width, COMPLEX, exact)
        k_slope += tl.sum(gap_slope(k, gap, COMPLEX) * overlaps(p, x), 1)
        p_states = load_states(P_STATES, chunk, d, D, ROWS)
        if ROWS > 0:
            far = on_states(p, x_states, COMPLEX) + on_states(x, p_states, COMPLEX)
            wave = waves(TABLE, s, first, last, inverse_width, "slope", COMPLEX, ROWS, exact)
            k_slope += tl.sum(wave * far, 1)
        dx = spread(TABLE, k, p, p_states, s, first, last, inverse_width, COMPLEX, ROWS)
        if HAS_FIRST:
            first_dots += tl.sum(dx * x.to(tl.float32), 1)
        add_rows(DX, FIRST, weight, dx, keys, pair, head, n, N, KEYS, d, D, HAS_FIRST, ATOMIC, EVEN)

    tl.store(D_KEYS + ranks + n, k_slope * by_width, mask=inside)
    tl.store(D_QUERIES + ranks + n, q_slope * by_width, mask=inside)
    tl.store(TOTALS + pair * CHUNKS + chunk, tl.sum(dots * scale, 0))
    dots *= weight
    tl.store(D_K_SCALE + ranks + n, dots * q_scale, mask=inside)
    tl.store(D_Q_SCALE + ranks + n, dots * k_scale, mask=inside)
    if HAS_FIRST:
        factor = tl.load(FIRST + n, mask=inside, other=0.0)
        tl.store(D_FIRST + ranks + n, over(first_dots * weight, factor), mask=inside)
    if HAS_FINAL:
        factor = tl.load(FINAL + n, mask=inside, other=0.0)
        tl.store(D_FINAL + ranks + n, over(final_dots * weight, factor), mask=inside)
