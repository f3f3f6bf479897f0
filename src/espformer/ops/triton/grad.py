"""The backward of ``κ``: for operand X and upstream P, ``κP`` and the slope in the numbers,

    ds_n = P_n · (κ'X)_n + X_n · (κ'P)_n = Σ_j κ'_nj (P_n · X_j + X_n · P_j),

per unit of scaled distance. The last form needs only the small matrices ``P Xᵀ`` of a chunk and
``P statesᵀ``: the columns are summed by the tensor cores, and κ' is never rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from espformer.ops.triton.chunks import (
    STATE_ROWS,
    from_states,
    gap_slope,
    hand_on,
    load_sides,
    load_states,
    near,
    on_states,
    overlap,
    place,
    positions,
    product,
    waves,
)
from espformer.ops.triton.rows import add_rows, load_rows, store_rows


@triton.jit
def by_columns(
    X, X_ORDER, X_SCALE, P, P_ORDER, P_SCALE, X_STATES, P_STATES, n, N, chunk,
    D: tl.constexpr, X_GATHER: tl.constexpr, X_SCALED: tl.constexpr, P_GATHER: tl.constexpr,
    P_SCALED: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """``X Pᵀ``, ``P Xᵀ``, ``X p_statesᵀ`` and ``P x_statesᵀ``, summed over blocks of columns.

    A float32 operand is split in three before it is multiplied: whole rows of it do not fit in
    registers.
    """
    mine = tl.zeros((C, C), tl.float32)
    theirs = tl.zeros((C, C), tl.float32)
    mine_far = tl.zeros((C, STATE_ROWS), tl.float32)
    theirs_far = tl.zeros((C, STATE_ROWS), tl.float32)
    for start in range(0, D, 16):
        d = start + tl.arange(0, 16)
        x = load_rows(X, X_ORDER, X_SCALE, n, N, d, D, X_GATHER, X_SCALED, EVEN)
        p = load_rows(P, P_ORDER, P_SCALE, n, N, d, D, P_GATHER, P_SCALED, EVEN)
        mine += overlap(x, p)
        theirs += overlap(p, x)
        mine_far += on_states(x, load_states(P_STATES, chunk, d, D, ROWS), False)
        theirs_far += on_states(p, load_states(X_STATES, chunk, d, D, ROWS), False)
    return mine, theirs, mine_far, theirs_far


@triton.jit
def grad_kernel(
    X, X_ORDER, X_SCALE, P, P_ORDER, P_SCALE, S, TABLE: tl.constexpr, INVERSE_WIDTH,
    X_STATES, P_STATES, SCALE,
    WEIGHT, SLOPE, AGREE, ALIGN, OUT, OUT_ORDER, NEXT_S, NEXT_STATES, N, HEADS, L, CHUNKS,
    D: tl.constexpr, COMPLEX: tl.constexpr, ROWS: tl.constexpr,
    X_GATHER: tl.constexpr, X_SCALED: tl.constexpr, P_GATHER: tl.constexpr, P_SCALED: tl.constexpr,
    HAS_SCALE: tl.constexpr, WEIGHTED: tl.constexpr, HAS_AGREE: tl.constexpr,
    HAS_ALIGN: tl.constexpr, TO: tl.constexpr, NEXT_ROWS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_D: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Writes ``weight · ds``; AGREE gets ``X_n · (κP)_n``, ALIGN gets ``P_n · (κX)_n``.

    OUT gets ``scale · κP`` in rank order, or ``weight`` times that added to the rows of the tokens.
    It may be X itself when both are in rank order: a program reads its rows before it writes them.
    NEXT_ROWS as in mix_kernel, with ties where the metric has them.
    """
    pair, head, chunk = place(HEADS, L, CHUNKS)
    d = tl.arange(0, BLOCK_D)
    n = chunk * C + tl.arange(0, C)
    ranks = pair * N
    X += (head if X_GATHER else pair) * N * D
    if X_GATHER:
        X_ORDER += ranks
    if X_SCALED:
        X_SCALE += ranks
    P += (head if P_GATHER else pair) * N * D
    if P_GATHER:
        P_ORDER += ranks
    if P_SCALED:
        P_SCALE += ranks
    inverse_width = tl.load(INVERSE_WIDTH + head)
    p = load_rows(P, P_ORDER, P_SCALE, n, N, d, D, P_GATHER, P_SCALED, EVEN)
    s, first, last = positions(S + ranks, chunk, N, C)
    X_STATES += pair * CHUNKS * ROWS * D
    P_STATES += pair * CHUNKS * ROWS * D
    inside = n < N
    if WEIGHTED:
        weight = tl.load(WEIGHT + pair)
    exact: tl.constexpr = p.dtype == tl.float32

    # One product after another, each summed at once: registers decide how many programs fit.
    if exact:
        mine, theirs, mine_far, theirs_far = by_columns(
            X, X_ORDER, X_SCALE, P, P_ORDER, P_SCALE, X_STATES, P_STATES, n, N, chunk, D,
            X_GATHER, X_SCALED, P_GATHER, P_SCALED, EVEN, ROWS, C,
        )  # fmt: skip
    else:
        x = load_rows(X, X_ORDER, X_SCALE, n, N, d, D, X_GATHER, X_SCALED, EVEN)
        if x.dtype != p.dtype:  # float16 tokens meet bfloat16 scratch
            x = x.to(tl.bfloat16)
            p = p.to(tl.bfloat16)
        x_states = load_states(X_STATES, chunk, d, D, ROWS)
        p_states = load_states(P_STATES, chunk, d, D, ROWS)
        mine = overlap(x, p)  # X_n · P_j
    k, gap = near(s, first, mine, inverse_width, COMPLEX, exact)
    k_slope = gap_slope(k, gap, COMPLEX)
    slope = tl.sum(k_slope * mine, 1)
    if HAS_AGREE:
        agree = tl.sum(k * mine, 1)
    if not exact:
        theirs = overlap(p, x)  # P_n · X_j
    slope += tl.sum(k_slope * theirs, 1)
    if HAS_ALIGN:
        align = tl.sum(k * theirs, 1)
    near_product = product(k, p)

    if not exact:
        mine_far = on_states(x, p_states, COMPLEX)
        theirs_far = on_states(p, x_states, COMPLEX)
    wave = waves(TABLE, s, first, last, inverse_width, "slope", COMPLEX, ROWS, exact)
    slope += tl.sum(wave * (mine_far + theirs_far), 1)
    if WEIGHTED:
        slope *= weight
    tl.store(SLOPE + ranks + n, slope, mask=inside)
    if HAS_AGREE or HAS_ALIGN:
        wave = waves(TABLE, s, first, last, inverse_width, "out", COMPLEX, ROWS, exact)
    if HAS_AGREE:
        tl.store(AGREE + ranks + n, agree + tl.sum(wave * mine_far, 1), mask=inside)
    if HAS_ALIGN:
        tl.store(ALIGN + ranks + n, align + tl.sum(wave * theirs_far, 1), mask=inside)

    sides = load_sides(P_STATES, chunk, d, D, COMPLEX, ROWS)
    y = from_states(TABLE, sides, near_product, s, first, last, inverse_width, COMPLEX, ROWS, exact)
    if HAS_SCALE:
        y = y * tl.load(SCALE + ranks + n, mask=inside, other=0.0)[:, None]
    if TO == "ranks":
        y = store_rows(OUT + pair * N * D, y, n, N, d, D, EVEN)
        if NEXT_ROWS > 0:
            next_s, next_first, next_last = positions(NEXT_S + ranks, chunk, N, C)
            hand_on(
                NEXT_STATES + pair * CHUNKS * NEXT_ROWS * D, TABLE, next_s, next_first, next_last,
                chunk, y, inverse_width, d, D, COMPLEX, NEXT_ROWS,
            )  # fmt: skip
    elif TO == "tokens":
        tokens = tl.load(OUT_ORDER + ranks + n, mask=inside, other=0)
        y = y * weight if WEIGHTED else y
        add_rows(OUT + head * N * D, tokens, y, n, N, d, D, EVEN)
