"""The backward of ``κ``: for operand X and upstream P, ``κP`` and the slope in the numbers.

    ds_n = P_n · (κ'X)_n + X_n · (κ'P)_n

per unit of scaled distance. It is written to SLOPE, (batch · slices, ranks).
"""

from __future__ import annotations

import triton
import triton.language as tl

from espformer.ops.triton.chunks import load_row, load_state, locate, position, step
from espformer.ops.triton.mix import far


@triton.jit
def grad_kernel(
    X, X_ORDER, X_SCALE, P, P_ORDER, P_SCALE, S, DECAY, INVERSE_WIDTH, X_STATES, P_STATES, SCALE,
    SLOPE, AGREE, ALIGN, OUT, OUT_ORDER, N, L, CHUNKS, SIDE, D: tl.constexpr,
    TABLE: tl.constexpr, POLES: tl.constexpr, COMPLEX: tl.constexpr,
    X_GATHER: tl.constexpr, X_SCALED: tl.constexpr, P_GATHER: tl.constexpr, P_SCALED: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_AGREE: tl.constexpr, HAS_ALIGN: tl.constexpr, TO: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Writes the slope and ``y = κP``; AGREE gets ``X_n · y_n``, ALIGN gets ``P_n · (κX)_n``.

    OUT gets ``scale · y``, in rank order or added to the rows of the tokens. It may be X itself
    when both are in rank order: a program reads its rows before it writes them.
    """
    head, slices, real = locate(L, BLOCK_L)
    rows: tl.constexpr = 2 * POLES if COMPLEX else 2
    pairs = head * L * N
    X += head * N * D * (1 if X_GATHER else L)
    if X_GATHER:
        X_ORDER += pairs
    if X_SCALED:
        X_SCALE += pairs
    P += head * N * D * (1 if P_GATHER else L)
    if P_GATHER:
        P_ORDER += pairs
    if P_SCALED:
        P_SCALE += pairs
    if HAS_SCALE:
        SCALE += pairs
    if HAS_AGREE:
        AGREE += pairs
    if HAS_ALIGN:
        ALIGN += pairs
    S += pairs
    DECAY += pairs
    SLOPE += pairs
    X_STATES += head * L * CHUNKS * rows * D
    P_STATES += head * L * CHUNKS * rows * D
    if TO != "nowhere":
        OUT += head * N * D * (L if TO == "ranks" else 1)
    if TO == "tokens":
        OUT_ORDER += pairs
    chunk = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (d[None, :] < D)
    xs = ()
    ps = ()
    for u in tl.static_range(C):
        n = chunk * C + u
        xs = xs + (load_row(X, X_ORDER, X_SCALE, slices, n, N, d, D, X_GATHER, X_SCALED, EVEN),)
        ps = ps + (load_row(P, P_ORDER, P_SCALE, slices, n, N, d, D, P_GATHER, P_SCALED, EVEN),)
    inverse_width = tl.load(INVERSE_WIDTH + head)
    first = position(S, slices, chunk * C, N)
    last = position(S, slices, chunk * C + C - 1, N)
    x_strict = ()
    p_backs = ()
    p_strict = ()
    x_backs = ()
    zero = tl.zeros((BLOCK_L, BLOCK_D), tl.float32)
    fx = zero
    fp = zero
    hx = zero
    hp = zero
    if not COMPLEX:
        # b, f: all ranks to the right, to the left; h: those among them with another number.
        bx = load_state(X_STATES + SIDE, slices, chunk, 0, 2, CHUNKS, d, D, EVEN)
        bp = load_state(P_STATES + SIDE, slices, chunk, 0, 2, CHUNKS, d, D, EVEN)
        hx = bx - load_state(X_STATES + SIDE, slices, chunk, 1, 2, CHUNKS, d, D, EVEN)
        hp = bp - load_state(P_STATES + SIDE, slices, chunk, 1, 2, CHUNKS, d, D, EVEN)
        for u in tl.static_range(C):
            a = step(DECAY, slices, chunk * C + C - u, N, EVEN and u > 0)
            bx = bx * a
            bp = bp * a
            hx = tl.where(a == 1.0, hx, bx)
            hp = tl.where(a == 1.0, hp, bp)
            if HAS_ALIGN:
                x_backs = x_backs + (bx,)
            p_backs = p_backs + (bp,)
            x_strict = x_strict + (hx,)
            p_strict = p_strict + (hp,)
            bx = bx + xs[C - 1 - u]
            bp = bp + ps[C - 1 - u]
        fx = load_state(X_STATES, slices, chunk, 0, 2, CHUNKS, d, D, EVEN)
        fp = load_state(P_STATES, slices, chunk, 0, 2, CHUNKS, d, D, EVEN)
        hx = fx - load_state(X_STATES, slices, chunk, 1, 2, CHUNKS, d, D, EVEN)
        hp = fp - load_state(P_STATES, slices, chunk, 1, 2, CHUNKS, d, D, EVEN)
    for u in tl.static_range(C):
        n = chunk * C + u
        x = xs[u]
        p = ps[u]
        z = zero
        if COMPLEX:
            s = position(S, slices, n, N)
            to_first, to_last = (s - first) * inverse_width, (last - s) * inverse_width
            y = far(
                P_STATES, SIDE, slices, chunk, to_first, to_last, CHUNKS, d, D,
                TABLE, POLES, False, EVEN,
            )  # fmt: skip
            if HAS_ALIGN:
                z = z + far(
                    X_STATES, SIDE, slices, chunk, to_first, to_last, CHUNKS, d, D,
                    TABLE, POLES, False, EVEN,
                )  # fmt: skip
            x_slope = far(
                X_STATES, SIDE, slices, chunk, to_first, to_last, CHUNKS, d, D,
                TABLE, POLES, True, EVEN,
            )  # fmt: skip
            p_slope = far(
                P_STATES, SIDE, slices, chunk, to_first, to_last, CHUNKS, d, D,
                TABLE, POLES, True, EVEN,
            )  # fmt: skip
            for j in tl.static_range(C):
                gap = (position(S, slices, chunk * C + j, N) - s) * inverse_width
                k = tl.exp(-gap * gap)
                y = y + k * ps[j]
                if HAS_ALIGN:
                    z = z + k * xs[j]
                x_slope = x_slope + 2 * gap * k * xs[j]
                p_slope = p_slope + 2 * gap * k * ps[j]
        else:
            a = step(DECAY, slices, n, N, EVEN)
            fx = fx * a
            fp = fp * a
            hx = tl.where(a == 1.0, hx, fx)
            hp = tl.where(a == 1.0, hp, fp)
            y = fp + p_backs[C - 1 - u] + p
            if HAS_ALIGN:
                z = fx + x_backs[C - 1 - u] + x
            x_slope = x_strict[C - 1 - u] - hx
            p_slope = p_strict[C - 1 - u] - hp
            fx = fx + x
            fp = fp + p
        at = slices * N + (n if EVEN else tl.minimum(n, N - 1))
        listed = real if EVEN else real & (n < N)
        tl.store(SLOPE + at, tl.sum(p * x_slope + x * p_slope, 1), mask=listed)
        if HAS_AGREE:
            tl.store(AGREE + at, tl.sum(x * y, 1), mask=listed)
        if HAS_ALIGN:
            tl.store(ALIGN + at, tl.sum(p * z, 1), mask=listed)
        here = inside if EVEN else inside & (n < N)
        if HAS_SCALE:
            y = y * tl.load(SCALE + at)[:, None]
        if TO == "ranks":
            tl.store(OUT + (at * D)[:, None] + d[None, :], y.to(OUT.dtype.element_ty), mask=here)
        elif TO == "tokens":
            tokens = OUT + (tl.load(OUT_ORDER + at) * D)[:, None] + d[None, :]
            tl.atomic_add(tokens, y, mask=here, sem="relaxed")
