"""States: what far-away ranks contribute to a chunk, for one kernel or for two in a row.

`sums` sums every chunk by itself, measured at its far end; `scan` hands the sums on from chunk to
chunk, in place.

**Through one kernel into the next.** The operand of the second kernel of a plan is
``W = scale · κx``, and its sums are wanted before anybody has made W. Within a chunk they are

    Σ_n in_n W_n = Σ_j [Σ_n κ_nj scale_n in_n] x_j + [Σ_n in_n scale_n out_n] · (states of x),

with `in` the wave into a state of the second kernel and `out` the wave out of a state of the first:
a few more rows for the matrix that sums x anyway, and a small matrix LINKS per chunk. So a program
reads its rows once, for both kernels, and W never exists outside of a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from espformer.ops.esp.triton.chunks import (
    COUNTS,
    STATE_ROWS,
    entry,
    load_ranks,
    load_states,
    near,
    number,
    place,
    positions,
    product,
    side,
    waves,
)
from espformer.ops.esp.triton.instructions import LOG2E, exp2, roomy, rotation
from espformer.ops.esp.triton.rows import load_rows


@triton.jit
def store_states(
    STATES, chunk, states, d, D: tl.constexpr, ROWS: tl.constexpr, AFTER: tl.constexpr = 0
):
    """Some rows of a matrix of sums as the states of a chunk."""
    r = tl.arange(0, STATE_ROWS)[:, None] - AFTER
    at = (chunk * ROWS + r) * D + d[None, :]
    tl.store(STATES + at, states, mask=(r >= 0) & (r < ROWS) & (d[None, :] < D))


@triton.jit(do_not_specialize=COUNTS)
def sums_kernel(
    X, ORDER, X_SCALE, S, NEXT_S, SCALE, TABLE: tl.constexpr, INVERSE_WIDTH,
    STATES, NEXT_STATES, LINKS, N, TOKENS, HEADS, L, CHUNKS, START, COUNT, D: tl.constexpr,
    COMPLEX: tl.constexpr, ROWS: tl.constexpr, THROUGH: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_D: tl.constexpr, SPAN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Every chunk's own sums of rows x, measured at its last number (left) and its first (right).

    THROUGH: also the sums of ``scale · κx`` for the kernel of the numbers NEXT_S, but
    for what the states of x add to them, which is done with LINKS once these are known.
    """
    pair, head, chunk = place(HEADS, L, START, COUNT)
    begin = chunk * SPAN
    n = begin + tl.arange(0, C)
    ranks = pair * N
    X += head * TOKENS * D
    if X_SCALE is not None:
        X_SCALE += ranks
    inverse_width = tl.load(INVERSE_WIDTH + head)
    exact: tl.constexpr = X.dtype.element_ty == tl.float32
    tokens, s, first, last = side(S + ranks, ORDER + ranks, begin, N, C, EVEN)
    wave = tl.trans(waves(TABLE, s, first, last, inverse_width, "in", COMPLEX, ROWS, exact))
    together: tl.constexpr = THROUGH and 2 * ROWS <= STATE_ROWS
    if THROUGH:
        after: tl.constexpr = ROWS if together else 0
        scale = load_ranks(SCALE + ranks, n, N, EVEN)
        t, t_first, t_last = positions(NEXT_S + ranks, begin, N, C, EVEN)
        onward = scale[:, None] * waves(
            TABLE, t, t_first, t_last, inverse_width, "in", COMPLEX, ROWS, exact, after
        )
        x = load_rows(X, X_SCALE, tokens, n, N, tl.arange(0, BLOCK_D), D, EVEN)
        k, _ = near(s, first, last, None, inverse_width, COMPLEX, exact)
        r = tl.arange(0, STATE_ROWS) - after
        kept = (r >= 0) & (r < ROWS)
        LINKS += (pair * CHUNKS + chunk) * ROWS * ROWS
        if COMPLEX:
            leave = waves(TABLE, s, first, last, inverse_width, "out", COMPLEX, ROWS, exact)
            link = tl.dot(tl.trans(onward), leave, input_precision="tf32x3")
            column = tl.arange(0, STATE_ROWS)[None, :]
            to = LINKS + r[:, None] * ROWS + column
            tl.store(to, link, mask=kept[:, None] & (column < ROWS))
        # 16 bits are enough for κ, as they are for W: all rows of the waves see the same error.
        onward = product(tl.trans(onward), k.to(roomy(x).dtype), COMPLEX)
        if not COMPLEX:  # a state of a real pole is like a row at the first or the last rank
            i = tl.arange(0, C)[None, :]
            to = LINKS + r[:, None] * ROWS + tl.where(i == 0, 0, 1)
            tl.store(to, onward, mask=kept[:, None] & ((i == 0) | (i == C - 1)))
        if together:
            wave += onward
    for start in tl.static_range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        if start > 0 or not THROUGH:
            x = load_rows(X, X_SCALE, tokens, n, N, d, D, EVEN)
        if THROUGH:
            x = roomy(x)
        sums = product(wave, x, COMPLEX)
        store_states(STATES + pair * CHUNKS * ROWS * D, chunk, sums, d, D, ROWS)
        if THROUGH:
            if not together:
                sums = product(onward, x, COMPLEX)
            store_states(NEXT_STATES + pair * CHUNKS * ROWS * D, chunk, sums, d, D, ROWS, after)


@triton.jit
def turn(TABLE: tl.constexpr, x, r, ROWS: tl.constexpr, EXACT: tl.constexpr):
    """``exp(-p x)`` of the pole of state row r, real and imaginary part."""
    x = tl.minimum(x, 40.0)
    size = exp2(entry(TABLE, 0, r, ROWS) * (x * -LOG2E))
    re, im = rotation(entry(TABLE, 1, r, ROWS) * x, EXACT)
    return size * re, size * im


@triton.jit
def link_kernel(
    STATES, NEXT_STATES, LINKS, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Adds to every chunk's sums what states of the kernel before contribute through LINKS."""
    chunk = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, STATE_ROWS)
    inside = (r[:, None] < ROWS) & (r[None, :] < ROWS)
    links = LINKS + (chunk * ROWS + r[:, None]) * ROWS + r[None, :]
    link = tl.load(links, mask=inside, other=0.0)
    for start in tl.static_range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        states = load_states(STATES, chunk, d, D, ROWS)
        own = load_states(NEXT_STATES, chunk, d, D, ROWS)
        own = tl.dot(link, states, own, input_precision="tf32x3")
        store_states(NEXT_STATES, chunk, own, d, D, ROWS)


@triton.jit
def fade(x, k, ROWS: tl.constexpr):
    """What is left of a real state (k = 0) or of its ties (k = 1) after a distance x."""
    left = exp2(x * -LOG2E)
    if ROWS > 2:  # a tie goes on as long as the number stays the same
        left = tl.where(k == 0, left, tl.where(x == 0, 1.0, 0.0))[:, None]
    return left


@triton.jit
def entrance(S, i, rightwards, N, CHUNKS, C: tl.constexpr):
    """The number at the near end of the i-th chunk of a walk."""
    return number(S, tl.where(rightwards, i * C, (CHUNKS - i) * C - 1), N)


@triton.jit(do_not_specialize=("L", "CHUNKS", "SEGMENTS", "LENGTH"))
def scan_kernel(
    S, TABLE: tl.constexpr, INVERSE_WIDTH, STATES, FROM, LINKS, ENDS, N, L, CHUNKS, SEGMENTS,
    LENGTH, D: tl.constexpr, COMPLEX: tl.constexpr, ROWS: tl.constexpr, THROUGH: tl.constexpr,
    SURVEY: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr,
    AHEAD: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Replaces the chunks' own sums by the states that enter them, in place.

    A tile is (states of one side, columns): poles, or the state and its ties. AHEAD chunks are
    loaded before the first of them is overwritten, so that loads overlap. THROUGH: what
    `link_kernel` does for complex poles is done here for a real one, which has two states.

    Where sequences are long and few, ENDS has room for what leaves each segment of LENGTH chunks.
    A launch with SURVEY walks every segment from nothing and writes that; how much of it is left
    where another segment begins follows from the numbers, so all segments are walked at once.
    """
    pair = (tl.program_id(0) // SEGMENTS).to(tl.int64)
    segment = tl.program_id(0) % SEGMENTS
    rightwards = tl.program_id(1) == 0
    S += pair * N
    STATES += pair * CHUNKS * ROWS * D
    if THROUGH:
        FROM += pair * CHUNKS * ROWS * D
        LINKS += pair * CHUNKS * ROWS * ROWS
    inverse_width = tl.load(INVERSE_WIDTH + pair // L)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    k = tl.arange(0, BLOCK_R)
    if COMPLEX:
        row = 2 * k + tl.where(rightwards, 0, ROWS // 2)
        inside = (k[:, None] < ROWS // 4) & (d[None, :] < D)
        end_at = (2 * k)[:, None] * D + d[None, :]
    else:
        row = 2 * k + tl.where(rightwards, 0, 1)
        inside = (k[:, None] < ROWS // 2) & (d[None, :] < D)
        end_at = k[:, None] * D + d[None, :]
    state = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    state_im = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    begin = segment * LENGTH
    end = tl.minimum(begin + LENGTH, CHUNKS)
    if ENDS is not None:
        ENDS += (pair * 2 + tl.program_id(1)) * SEGMENTS * (ROWS // 2) * D
        if not SURVEY:
            start = entrance(S, begin, rightwards, N, CHUNKS, C)
            for before in range(0, segment):
                left_at = entrance(S, (before + 1) * LENGTH, rightwards, N, CHUNKS, C)
                x = tl.abs(start - left_at) * inverse_width
                leaving = ENDS + before * (ROWS // 2) * D + end_at
                end_re = tl.load(leaving, mask=inside, other=0.0)
                if COMPLEX:
                    end_im = tl.load(leaving + D, mask=inside, other=0.0)
                    turn_re, turn_im = turn(TABLE, x, row[:, None], ROWS, EXACT)
                    state += turn_re * end_re - turn_im * end_im
                    state_im += turn_re * end_im + turn_im * end_re
                else:
                    state += fade(x, k, ROWS) * end_re
    for i in range(begin, end, AHEAD):
        # All loads come before the first store: none could move across it.
        owns = ()
        gaps = ()
        for u in tl.static_range(AHEAD):
            here = i + u < CHUNKS
            chunk = tl.where(rightwards, i + u, CHUNKS - 1 - i - u)
            at = (chunk * ROWS + row)[:, None] * D + d[None, :]
            own = tl.load(STATES + at, mask=inside & here, other=0.0).to(tl.float32)
            if COMPLEX:
                owns = owns + (own, tl.load(STATES + at + D, mask=inside & here, other=0.0))
            else:
                if THROUGH:
                    states = FROM + chunk * ROWS * D + d
                    left = tl.load(states, mask=(d < D) & here, other=0.0).to(tl.float32)
                    right = tl.load(states + D, mask=(d < D) & here, other=0.0).to(tl.float32)
                    links = LINKS + (chunk * ROWS + row) * ROWS
                    own += tl.load(links, mask=here, other=0.0)[:, None] * left[None, :]
                    own += tl.load(links + 1, mask=here, other=0.0)[:, None] * right[None, :]
                owns = owns + (own,)
            # From where the state and the chunk's sums are measured to the next chunk's near end.
            near_end = number(S, chunk * C + tl.where(rightwards, 0, C - 1), N)
            far_end = number(S, chunk * C + tl.where(rightwards, C - 1, 0), N)
            beyond = number(S, chunk * C + tl.where(rightwards, C, -1), N)
            across, step = tl.abs(beyond - near_end), tl.abs(beyond - far_end)
            gaps = gaps + (across * inverse_width, step * inverse_width)
        for u in tl.static_range(AHEAD):
            chunk = tl.where(rightwards, i + u, CHUNKS - 1 - i - u)
            at = (chunk * ROWS + row)[:, None] * D + d[None, :]
            mask = inside & (i + u < CHUNKS)
            across, step = gaps[2 * u], gaps[2 * u + 1]
            if not SURVEY:
                tl.store(STATES + at, state, mask=mask)
            if COMPLEX:
                if not SURVEY:
                    tl.store(STATES + at + D, state_im, mask=mask)
                own, own_im = owns[2 * u], owns[2 * u + 1]
                re, im = turn(TABLE, across, row[:, None], ROWS, EXACT)
                s_re, s_im = turn(TABLE, step, row[:, None], ROWS, EXACT)
                moved = re * state - im * state_im + s_re * own - s_im * own_im
                state_im = re * state_im + im * state + s_re * own_im + s_im * own
                state = moved
            else:
                state = fade(across, k, ROWS) * state + fade(step, k, ROWS) * owns[u]
    if SURVEY:
        ENDS += segment * (ROWS // 2) * D
        tl.store(ENDS + end_at, state, mask=inside)
        if COMPLEX:
            tl.store(ENDS + end_at + D, state_im, mask=inside)
