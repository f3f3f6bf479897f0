"""Plans applied to rows: ``weight · final · κ_q (scale · κ_k (first · x))``, chunk by chunk.

Rank n of the keys meets rank n of the queries, so the program that makes a chunk of
``W = scale · κ_k x`` multiplies it by κ_q at once.

**The backward** of ``⟨g, plan x⟩`` is the same program, once for each side. Turned around, it
applies the plan to g, which is the gradient of x; and where W meets rows g of the other side, the
small matrices ``M = W gᵀ`` of a chunk and ``W statesᵀ`` hold everything else:

    slope of the queries' numbers:  Σ_j κ_q'_nj (M_nj + M_jn),
    gradient of the scales:         Σ_j κ_q_nj M_nj  over the scale of rank n,
    gradient of `final`:            Σ_j κ_q_nj M_jn  over `final` of rank n.

Columns are summed by the tensor cores, and κ' is never rounded.

The gradient of the inverse width is ``Σ_n s_n ds_n``, in which forces cancel. It is added up pair
by pair: what is between two numbers of a chunk, and, of the way to a number in another chunk, what
lies in this one. :class:`espformer.ops.esp.triton.launch.PlanKernels` adds the way
over whole chunks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from espformer.ops.esp.triton.chunks import (
    COUNTS,
    gap_slope,
    gap_unit,
    leaving,
    load_ranks,
    load_states,
    near,
    number,
    on_states,
    place,
    side,
    spread,
    transposed_product,
    waves,
    ways,
)
from espformer.ops.esp.triton.instructions import roomy
from espformer.ops.esp.triton.rows import add_rows, load_rows


@triton.jit
def over(x, y):
    """x / y, and zero where y is."""
    return tl.where(y == 0, 0.0, x / tl.where(y == 0, 1.0, y))


@triton.jit(do_not_specialize=COUNTS)
def apply_kernel(
    X, K_ORDER, FIRST, K_S, Q_ORDER, FINAL, Q_S, SCALE, TABLE: tl.constexpr, INVERSE_WIDTH,
    WEIGHT, X_STATES, W_STATES, OUT, G, G_STATES, D_VALUES, D_FINAL, D_SCALE, TOTALS, STRETCH,
    N, KEYS, QUERIES, HEADS, L, CHUNKS, START, COUNT, D: tl.constexpr, COMPLEX: tl.constexpr,
    ROWS: tl.constexpr, ATOMIC: tl.constexpr, EVEN: tl.constexpr, BLOCK_D: tl.constexpr,
    SPAN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Adds the plan of one slice, applied to the rows of the keys, to the rows of the queries: OUT.

    With rows G: the gradients of ``weight · ⟨g, plan x⟩`` in the queries' numbers and,
    with D_FINAL and D_SCALE, in these; TOTALS gets ``⟨g, plan x⟩`` without the weight, by chunk,
    and STRETCH what the gradient of the inverse width owes to the chunk.
    """
    pair, head, chunk = place(HEADS, L, START, COUNT)
    begin = chunk * SPAN
    n = begin + tl.arange(0, C)
    ranks = pair * N
    X += head * KEYS * D
    if FIRST is not None:
        FIRST += ranks
    if FINAL is not None:
        FINAL += ranks
    if ROWS > 0:
        X_STATES += pair * CHUNKS * ROWS * D
        W_STATES += pair * CHUNKS * ROWS * D
    if G is not None:
        G += head * QUERIES * D
        if ROWS > 0:
            G_STATES += pair * CHUNKS * ROWS * D
    # All loads come first: what follows waits for the tensor cores, and nothing moves across that.
    keys, s, first, last = side(K_S + ranks, K_ORDER + ranks, begin, N, C, EVEN)
    queries, t, t_first, t_last = side(Q_S + ranks, Q_ORDER + ranks, begin, N, C, EVEN)
    scale = load_ranks(SCALE + ranks, n, N, EVEN)
    inverse_width = tl.load(INVERSE_WIDTH + head)
    weight = tl.load(WEIGHT + pair)
    early, late = weight, 1.0  # W has the weight, and its states get it
    if TOTALS is not None:  # which are wanted without it
        early, late = 1.0, weight
    early_scale = scale * early
    exact: tl.constexpr = X.dtype.element_ty == tl.float32
    slope = tl.zeros((C,), tl.float32)
    dots = tl.zeros((C,), tl.float32)
    final_dots = tl.zeros((C,), tl.float32)
    stretch = tl.zeros((C,), tl.float32)
    for start in tl.range(0, D, BLOCK_D, num_stages=1):
        d = start + tl.arange(0, BLOCK_D)
        x = load_rows(X, FIRST, keys, n, N, d, D, EVEN)
        x_states = load_states(X_STATES, chunk, d, D, ROWS)
        w_states = load_states(W_STATES, chunk, d, D, ROWS)
        if G is not None:
            g = roomy(load_rows(G, FINAL, queries, n, N, d, D, EVEN))
            g_states = load_states(G_STATES, chunk, d, D, ROWS)
        k, _ = near(s, first, last, x, inverse_width, COMPLEX, exact)
        leave = leaving(TABLE, s, first, last, inverse_width, x, x_states, COMPLEX, ROWS)
        w = spread(k, x, leave, x_states, COMPLEX, ROWS)
        w = (w * early_scale[:, None]).to(roomy(x).dtype)
        k, gap = near(t, t_first, t_last, x, inverse_width, COMPLEX, exact)
        leave = leaving(TABLE, t, t_first, t_last, inverse_width, x, x_states, COMPLEX, ROWS)
        if G is not None:
            m = transposed_product(w, g)
            if D_SCALE is not None:
                dots += tl.sum(k * m, 1)
            if D_FINAL is not None:
                final_dots -= tl.sum(k * m, 1)
            m = transposed_product(g, w, m)
            force = gap_slope(k, gap, COMPLEX) * m
            slope += tl.sum(force, 1)
            if STRETCH is not None:  # a pair is seen from both sides
                stretch -= tl.sum(force * gap, 1) * (0.5 / gap_unit(inverse_width, COMPLEX))
            if D_FINAL is not None:
                final_dots += tl.sum(k * m, 1)
            if ROWS > 0:
                far = on_states(w, g_states, COMPLEX)
                if D_SCALE is not None:
                    dots += tl.sum(leave * far, 1)
                behind = on_states(g, w_states, COMPLEX) * early
                if D_FINAL is not None:
                    final_dots += tl.sum(leave * behind, 1)
                wave = waves(
                    TABLE, t, t_first, t_last, inverse_width, "slope", COMPLEX, ROWS, exact
                )
                pull = wave * (far + behind)
                slope += tl.sum(pull, 1)
                if STRETCH is not None:
                    before = number(Q_S + ranks, begin - 1, N)
                    stretch += tl.sum(pull * ways(t, before, t_last, COMPLEX, ROWS), 1)
        if OUT is not None:
            y = spread(k, w, leave * early, w_states, COMPLEX, ROWS)
            add_rows(OUT, FINAL, y * late, queries, pair, head, n, N, QUERIES, d, D, ATOMIC, EVEN)
    if G is not None:
        inside = n < N
        tl.store(D_VALUES + ranks + n, slope * (late * inverse_width), mask=inside)
        if D_FINAL is not None:
            factor = tl.load(FINAL + n, mask=inside, other=0.0)
            tl.store(D_FINAL + ranks + n, over(final_dots * late, factor), mask=inside)
        if TOTALS is not None:
            tl.store(TOTALS + pair * CHUNKS + chunk, tl.sum(dots, 0))
        if STRETCH is not None:
            tl.store(STRETCH + pair * CHUNKS + chunk, tl.sum(stretch, 0) * late)
        if D_SCALE is not None:
            tl.store(D_SCALE + ranks + n, over(dots * late, scale), mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def cross_kernel(
    X, K_ORDER, FIRST, K_S, G, Q_ORDER, FINAL, Q_S, SCALE, TABLE: tl.constexpr, INVERSE_WIDTH,
    X_STATES, G_STATES, TOTALS,
    N, KEYS, QUERIES, HEADS, L, CHUNKS, START, COUNT, D: tl.constexpr, COMPLEX: tl.constexpr,
    ROWS: tl.constexpr, EVEN: tl.constexpr, BLOCK_D: tl.constexpr, SPAN: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """``Σ_n scale_n (κ_k x)_n · (κ_q g)_n``, one sum per chunk: ⟨g, plan x⟩ from both ends."""
    pair, head, chunk = place(HEADS, L, START, COUNT)
    begin = chunk * SPAN
    n = begin + tl.arange(0, C)
    ranks = pair * N
    X += head * KEYS * D
    G += head * QUERIES * D
    if FIRST is not None:
        FIRST += ranks
    if FINAL is not None:
        FINAL += ranks
    if ROWS > 0:
        X_STATES += pair * CHUNKS * ROWS * D
        G_STATES += pair * CHUNKS * ROWS * D
    keys, s, first, last = side(K_S + ranks, K_ORDER + ranks, begin, N, C, EVEN)
    queries, t, t_first, t_last = side(Q_S + ranks, Q_ORDER + ranks, begin, N, C, EVEN)
    scale = load_ranks(SCALE + ranks, n, N, EVEN)
    inverse_width = tl.load(INVERSE_WIDTH + head)
    exact: tl.constexpr = X.dtype.element_ty == tl.float32
    dots = tl.zeros((C,), tl.float32)
    for start in tl.range(0, D, BLOCK_D, num_stages=1):
        d = start + tl.arange(0, BLOCK_D)
        x = load_rows(X, FIRST, keys, n, N, d, D, EVEN)
        g = load_rows(G, FINAL, queries, n, N, d, D, EVEN)
        x_states = load_states(X_STATES, chunk, d, D, ROWS)
        g_states = load_states(G_STATES, chunk, d, D, ROWS)
        k, _ = near(s, first, last, x, inverse_width, COMPLEX, exact)
        leave = leaving(TABLE, s, first, last, inverse_width, x, x_states, COMPLEX, ROWS)
        y = spread(k, x, leave, x_states, COMPLEX, ROWS)
        k, _ = near(t, t_first, t_last, x, inverse_width, COMPLEX, exact)
        leave = leaving(TABLE, t, t_first, t_last, inverse_width, x, x_states, COMPLEX, ROWS)
        z = spread(k, g, leave, g_states, COMPLEX, ROWS)
        dots += tl.sum(y * z, 1)
    tl.store(TOTALS + pair * CHUNKS + chunk, tl.sum(dots * scale, 0))
