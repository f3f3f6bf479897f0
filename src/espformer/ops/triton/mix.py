"""Products with the sorted kernel: ``y = κ x`` chunk by chunk, and what is done with the rows."""

from __future__ import annotations

import triton
import triton.language as tl

from espformer.ops.triton.chunks import (
    from_states,
    hand_on,
    load_sides,
    near,
    overlap,
    place,
    positions,
    product,
)
from espformer.ops.triton.rows import add_rows, load_rows, store_rows


@triton.jit
def mix_kernel(
    X, ORDER, X_SCALE, S, TABLE: tl.constexpr, INVERSE_WIDTH, STATES, SCALE, WEIGHT,
    OUT, OUT_ORDER, DOT, NEXT_S, NEXT_STATES, N, HEADS, L, CHUNKS, D: tl.constexpr,
    COMPLEX: tl.constexpr, ROWS: tl.constexpr, GATHER: tl.constexpr,
    SCALED: tl.constexpr, HAS_SCALE: tl.constexpr, WEIGHTED: tl.constexpr, TO: tl.constexpr,
    NEXT_ROWS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_D: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """``y = scale · κx`` and then, by TO: "ranks": store the rows in rank order; "tokens": add
    ``weight · y`` to the rows of their tokens; "dot": sum the dot products with the rows of their
    tokens in OUT, one sum per chunk. Scales belong to ranks, the weight to the whole slice.

    NEXT_ROWS > 0: rows stored in rank order are operands of another kernel whose numbers are
    NEXT_S; its chunks' own sums are stored too.
    """
    pair, head, chunk = place(HEADS, L, CHUNKS)
    d = tl.arange(0, BLOCK_D)
    n = chunk * C + tl.arange(0, C)
    ranks = pair * N
    X += (head if GATHER else pair) * N * D
    if GATHER:
        ORDER += ranks
    if SCALED:
        X_SCALE += ranks
    # All loads come first: what follows waits for the tensor cores, and nothing moves across that.
    inverse_width = tl.load(INVERSE_WIDTH + head)
    x = load_rows(X, ORDER, X_SCALE, n, N, d, D, GATHER, SCALED, EVEN)
    s, first, last = positions(S + ranks, chunk, N, C)
    states = load_sides(STATES + pair * CHUNKS * ROWS * D, chunk, d, D, COMPLEX, ROWS)
    inside = n < N
    if HAS_SCALE:
        scale = tl.load(SCALE + ranks + n, mask=inside, other=0.0)
    if WEIGHTED:
        weight = tl.load(WEIGHT + pair)
    if NEXT_ROWS > 0:
        next_s, next_first, next_last = positions(NEXT_S + ranks, chunk, N, C)
    if TO != "ranks":
        OUT += head * N * D
        tokens = tl.load(OUT_ORDER + ranks + n, mask=inside, other=0)
    if TO == "dot":
        here = inside[:, None] & (d[None, :] < D)
        other = tl.load(OUT + tokens[:, None] * D + d[None, :], mask=here, other=0.0)

    exact: tl.constexpr = x.dtype == tl.float32
    k, _ = near(s, first, overlap(x, x), inverse_width, COMPLEX, exact)
    y = from_states(
        TABLE, states, product(k, x), s, first, last, inverse_width, COMPLEX, ROWS, exact
    )
    if HAS_SCALE:
        y = y * scale[:, None]
    if TO == "ranks":
        y = store_rows(OUT + pair * N * D, y, n, N, d, D, EVEN)
        if NEXT_ROWS > 0:
            hand_on(
                NEXT_STATES + pair * CHUNKS * NEXT_ROWS * D, TABLE, next_s, next_first, next_last,
                chunk, y, inverse_width, d, D, COMPLEX, NEXT_ROWS,
            )  # fmt: skip
    elif TO == "tokens":
        add_rows(OUT, tokens, y * weight if WEIGHTED else y, n, N, d, D, EVEN)
    else:
        tl.store(DOT + pair * CHUNKS + chunk, tl.sum(tl.sum(y * other.to(tl.float32), 1), 0))
