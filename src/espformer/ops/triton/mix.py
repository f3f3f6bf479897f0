"""Products with the sorted kernel: ``y = κ x`` chunk by chunk, and what is done with the rows."""

from __future__ import annotations

import triton
import triton.language as tl

from espformer.ops.triton.chunks import load_row, load_state, locate, position, step, wave


@triton.jit
def far(
    STATES, SIDE, slices, chunk, to_first, to_last, CHUNKS, d, D: tl.constexpr,
    TABLE: tl.constexpr, POLES: tl.constexpr, SLOPE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """What ranks outside the chunk add to ``κx`` (or to ``κ'x``) at a rank, given its distances."""
    total = tl.zeros((1, 1), tl.float32)
    for r in tl.static_range(POLES):
        re, im = wave(to_first, TABLE[4 * r + 2], TABLE[4 * r + 3])
        back_re, back_im = wave(to_last, TABLE[4 * r + 2], TABLE[4 * r + 3])
        # Weights w, or for the slope -w p on the left and, mirrored, +w p on the right.
        if SLOPE:
            v_re = TABLE[4 * r] * TABLE[4 * r + 2] - TABLE[4 * r + 1] * TABLE[4 * r + 3]
            v_im = TABLE[4 * r] * TABLE[4 * r + 3] + TABLE[4 * r + 1] * TABLE[4 * r + 2]
            u_re, u_im = -v_re, -v_im
        else:
            v_re, v_im = TABLE[4 * r], TABLE[4 * r + 1]
            u_re, u_im = v_re, v_im
        s_re = load_state(STATES, slices, chunk, 2 * r, 2 * POLES, CHUNKS, d, D, EVEN)
        s_im = load_state(STATES, slices, chunk, 2 * r + 1, 2 * POLES, CHUNKS, d, D, EVEN)
        total = total + (u_re * re - u_im * im) * s_re - (u_re * im + u_im * re) * s_im
        RIGHT = STATES + SIDE
        s_re = load_state(RIGHT, slices, chunk, 2 * r, 2 * POLES, CHUNKS, d, D, EVEN)
        s_im = load_state(RIGHT, slices, chunk, 2 * r + 1, 2 * POLES, CHUNKS, d, D, EVEN)
        total = total + (v_re * back_re - v_im * back_im) * s_re
        total = total - (v_re * back_im + v_im * back_re) * s_im
    return total


@triton.jit
def mix_kernel(
    X, ORDER, X_SCALE, S, DECAY, INVERSE_WIDTH, STATES, SCALE, OUT, OUT_ORDER, DOT,
    N, L, CHUNKS, SIDE, D: tl.constexpr,
    TABLE: tl.constexpr, POLES: tl.constexpr, COMPLEX: tl.constexpr, GATHER: tl.constexpr,
    SCALED: tl.constexpr, HAS_SCALE: tl.constexpr, TO: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """``y = scale · κx`` and then, by TO: "ranks": store the rows in rank order; "tokens": add
    them to the rows of their tokens; "dot": sum the dot products with the rows of their tokens in
    OUT, one sum per chunk.
    """
    head, slices, real = locate(L, BLOCK_L)
    rows: tl.constexpr = 2 * POLES if COMPLEX else 1
    X += head * N * D * (1 if GATHER else L)
    if GATHER:
        ORDER += head * L * N
    if SCALED:
        X_SCALE += head * L * N
    if HAS_SCALE:
        SCALE += head * L * N
    S += head * L * N
    DECAY += head * L * N
    STATES += head * L * CHUNKS * rows * D
    OUT += head * N * D * (L if TO == "ranks" else 1)
    if TO != "ranks":
        OUT_ORDER += head * L * N
    chunk = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (d[None, :] < D)
    xs = ()
    for u in tl.static_range(C):
        n = chunk * C + u
        xs = xs + (load_row(X, ORDER, X_SCALE, slices, n, N, d, D, GATHER, SCALED, EVEN),)
    bs = ()
    f = tl.zeros((1, 1), tl.float32)
    inverse_width = tl.load(INVERSE_WIDTH + head)
    first = position(S, slices, chunk * C, N)
    last = position(S, slices, chunk * C + C - 1, N)
    total = tl.zeros((BLOCK_L,), tl.float32)
    if not COMPLEX:
        f = load_state(STATES, slices, chunk, 0, 1, CHUNKS, d, D, EVEN)
        b = load_state(STATES + SIDE, slices, chunk, 0, 1, CHUNKS, d, D, EVEN)
        for u in tl.static_range(C):
            b = b * step(DECAY, slices, chunk * C + C - u, N, EVEN and u > 0) + xs[C - 1 - u]
            bs = bs + (b,)
    for u in tl.static_range(C):
        n = chunk * C + u
        if COMPLEX:
            s = position(S, slices, n, N)
            to_first, to_last = (s - first) * inverse_width, (last - s) * inverse_width
            y = far(
                STATES, SIDE, slices, chunk, to_first, to_last, CHUNKS, d, D,
                TABLE, POLES, False, EVEN,
            )  # fmt: skip
            for j in tl.static_range(C):
                x = (position(S, slices, chunk * C + j, N) - s) * inverse_width
                y = y + tl.exp(-x * x) * xs[j]
        else:
            f = f * step(DECAY, slices, n, N, EVEN)
            y = f + bs[C - 1 - u]
            f = f + xs[u]
        at = slices * N + (n if EVEN else tl.minimum(n, N - 1))
        here = inside if EVEN else inside & (n < N)
        if HAS_SCALE:
            y = y * tl.load(SCALE + at)[:, None]
        if TO == "ranks":
            tl.store(OUT + (at * D)[:, None] + d[None, :], y.to(OUT.dtype.element_ty), mask=here)
        else:
            tokens = OUT + (tl.load(OUT_ORDER + at) * D)[:, None] + d[None, :]
            if TO == "tokens":
                tl.atomic_add(tokens, y, mask=here, sem="relaxed")
            else:
                total += tl.sum(y * tl.load(tokens, mask=here, other=0.0).to(tl.float32), 1)
    if TO == "dot":
        tl.store(DOT + (head * L + slices) * CHUNKS + chunk, total, mask=real)
