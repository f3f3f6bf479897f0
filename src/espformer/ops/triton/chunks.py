"""States between chunks of ranks: how far-away ranks reach a program that holds only a few.

Kernels work on a tile of (slices of one head, columns) and one chunk of C ranks: the C rows of
every slice are in registers. What other chunks contribute comes in through two states per pole p,
one for all ranks to the left of chunk c and one for all ranks to its right:

    L_c = Σ_{j < cC} exp(-p (m - s_j)) x_j,      R_c = Σ_{j ≥ (c+1)C} exp(-p (s_j - m')) x_j

`inflow` sums every chunk by itself; `scan` hands the sums on from chunk to chunk, in place. States
are float32, (2, batch · slices, chunks, rows, width): left and right; one row for a real pole, two
(real and imaginary part) for a complex one. With the complex poles of the squared metric they are
measured at the chunk's own ends, m = s_{cC} and m' = s_{cC+C-1}, so that one pair of waves per rank
serves inflow and outflow. The absolute metric walks from rank to rank with one decay per step, and
its states are measured at the ranks before and after the chunk.

``exp(-|x|)`` has a kink at zero, and its slope there is zero: equal numbers do not push each other
apart by the order they happen to stand in. So the backward of the absolute metric must tell equal
numbers from close ones, and its states have a second row (TIES): the sum over those earlier ranks
that hold the very number at which the state is measured. 16-bit inputs tie all the time.

Offsets within a head are 32-bit; pointers are moved to the head with 64 bits first. EVEN says that
chunks and slices fill their blocks, which saves every mask.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

if os.environ.get("TRITON_INTERPRET") == "1":  # the interpreter has no libdevice

    @triton.jit
    def turn(angle):
        return tl.cos(angle), tl.sin(angle)
else:
    from triton.language.extra import libdevice

    @triton.jit
    def turn(angle):
        """Cosine and sine, good to 2^-21: the exact ones cost hundreds of instructions."""
        return libdevice.fast_cosf(angle), libdevice.fast_sinf(angle)


@triton.jit
def locate(L, BLOCK_L: tl.constexpr):
    """The head of this program, its slices, clamped, and which of them are real."""
    groups = tl.cdiv(L, BLOCK_L)
    head = (tl.program_id(0) // groups).to(tl.int64)
    slices = (tl.program_id(0) % groups) * BLOCK_L + tl.arange(0, BLOCK_L)
    return head, tl.minimum(slices, L - 1), slices < L


@triton.jit
def load_row(
    X, ORDER, SCALE, slices, n, N, d, D: tl.constexpr,
    GATHER: tl.constexpr, SCALED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Row n of every slice, (slices, columns) in float32, times its scale; zero past the end."""
    at = slices * N + (n if EVEN else tl.minimum(n, N - 1))
    if GATHER:
        rows = tl.load(ORDER + at) * D
    else:
        rows = at * D
    if EVEN:
        x = tl.load(X + rows[:, None] + d[None, :]).to(tl.float32)
    else:
        inside = (d[None, :] < D) & (n < N)
        x = tl.load(X + rows[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        x = x * tl.load(SCALE + at)[:, None]
    return x


@triton.jit
def position(S, slices, n, N):
    """The sorted number at rank n, clamped to the sequence, (slices, 1)."""
    return tl.load(S + slices * N + tl.maximum(tl.minimum(n, N - 1), 0))[:, None]


@triton.jit
def step(DECAY, slices, n, N, CLEAR: tl.constexpr):
    """``exp(-(s_n - s_{n-1}) / width)`` of the absolute metric, (slices, 1); zero outside.

    One exactly where the two numbers are equal, and nowhere else. CLEAR: n is known to be inside.
    """
    if CLEAR:
        return tl.load(DECAY + slices * N + n)[:, None]
    return tl.load(DECAY + slices * N + n, mask=n < N, other=0.0)[:, None]


@triton.jit
def wave(x, p_re: tl.constexpr, p_im: tl.constexpr):
    """``exp(-p x)`` for x ≥ 0, real and imaginary part."""
    x = tl.minimum(x, 40.0)  # exp(-40 Re p) is zero, and the angle stays small
    size = tl.exp(-p_re * x)
    cosine, sine = turn(p_im * x)
    return size * cosine, -size * sine


@triton.jit
def load_state(
    STATES, slices, chunk, row, rows: tl.constexpr, CHUNKS, d, D: tl.constexpr, EVEN: tl.constexpr
):
    at = (((slices * CHUNKS + chunk) * rows + row) * D)[:, None] + d[None, :]
    if EVEN:
        return tl.load(STATES + at)
    return tl.load(STATES + at, mask=d[None, :] < D, other=0.0)


@triton.jit
def inflow_kernel(
    X, ORDER, X_SCALE, S, DECAY, INVERSE_WIDTH, STATES, N, L, CHUNKS, SIDE, D: tl.constexpr,
    TABLE: tl.constexpr, POLES: tl.constexpr, COMPLEX: tl.constexpr, TIES: tl.constexpr,
    GATHER: tl.constexpr, SCALED: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Every chunk's own sums, measured at its last rank (left) and at its first (right)."""
    head, slices, real = locate(L, BLOCK_L)
    rows: tl.constexpr = 2 * POLES if COMPLEX else (2 if TIES else 1)
    X += head * N * D * (1 if GATHER else L)
    if GATHER:
        ORDER += head * L * N
    if SCALED:
        X_SCALE += head * L * N
    S += head * L * N
    DECAY += head * L * N
    STATES += head * L * CHUNKS * rows * D
    chunk = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (d[None, :] < D)
    at = ((slices * CHUNKS + chunk) * rows * D)[:, None] + d[None, :]
    zero = tl.zeros((BLOCK_L, BLOCK_D), tl.float32)
    if COMPLEX:
        inverse_width = tl.load(INVERSE_WIDTH + head)
        first = position(S, slices, chunk * C, N)
        last = position(S, slices, chunk * C + C - 1, N)
        left = ()
        right = ()
        for _ in tl.static_range(2 * POLES):
            left = left + (zero,)
            right = right + (zero,)
        for u in tl.static_range(C):
            n = chunk * C + u
            x = load_row(X, ORDER, X_SCALE, slices, n, N, d, D, GATHER, SCALED, EVEN)
            s = position(S, slices, n, N)
            new_left = ()
            new_right = ()
            for r in tl.static_range(POLES):
                re, im = wave((last - s) * inverse_width, TABLE[4 * r + 2], TABLE[4 * r + 3])
                new_left = new_left + (left[2 * r] + re * x, left[2 * r + 1] + im * x)
                re, im = wave((s - first) * inverse_width, TABLE[4 * r + 2], TABLE[4 * r + 3])
                new_right = new_right + (right[2 * r] + re * x, right[2 * r + 1] + im * x)
            left = new_left
            right = new_right
        for row in tl.static_range(2 * POLES):
            tl.store(STATES + at + row * D, left[row], mask=inside)
            tl.store(STATES + SIDE + at + row * D, right[row], mask=inside)
    else:
        left = zero
        right = zero
        left_tied = zero
        right_tied = zero
        reach = tl.full((BLOCK_L, 1), 1.0, tl.float32)
        for u in tl.static_range(C):
            n = chunk * C + u
            x = load_row(X, ORDER, X_SCALE, slices, n, N, d, D, GATHER, SCALED, EVEN)
            a = step(DECAY, slices, n, N, EVEN)
            if u > 0:
                reach = reach * a
            right += reach * x
            # Past the end the state is kept: there it is measured at the last rank.
            left = left * a + x if EVEN else tl.where(n < N, left * a + x, left)
            if TIES:
                right_tied += tl.where(reach == 1.0, x, 0.0)
                left_tied = tl.where((a == 1.0) | (n >= N), left_tied, 0.0) + x
        tl.store(STATES + at, left, mask=inside)
        tl.store(STATES + SIDE + at, right, mask=inside)
        if TIES:
            tl.store(STATES + at + D, left_tied, mask=inside)
            tl.store(STATES + SIDE + at + D, right_tied, mask=inside)


@triton.jit
def scan_kernel(
    S, INVERSE_WIDTH, STATES, N, L, CHUNKS, SIDE, D: tl.constexpr,
    TABLE: tl.constexpr, POLES: tl.constexpr, COMPLEX: tl.constexpr, TIES: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Replaces the chunks' own sums by the states that enter them, in place.

    AHEAD chunks are loaded before the first of them is overwritten, so that loads overlap.
    """
    head, slices, real = locate(L, BLOCK_L)
    rows: tl.constexpr = 2 * POLES if COMPLEX else (2 if TIES else 1)
    rightwards = tl.program_id(1) == 0
    S += head * L * N
    STATES += head * L * CHUNKS * rows * D + tl.where(rightwards, 0, SIDE)
    inverse_width = tl.load(INVERSE_WIDTH + head)
    d = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (d[None, :] < D)
    states = ()
    for _ in tl.static_range(rows):
        states = states + (tl.zeros((BLOCK_L, BLOCK_D), tl.float32),)
    for i in range(0, CHUNKS, AHEAD):
        owns = ()
        decays = ()
        for k in tl.static_range(AHEAD):
            chunk = tl.where(rightwards, i + k, CHUNKS - 1 - i - k)
            at = ((slices * CHUNKS + chunk) * rows * D)[:, None] + d[None, :]
            for row in tl.static_range(rows):
                mask = inside & (i + k < CHUNKS)
                owns = owns + (tl.load(STATES + at + row * D, mask=mask, other=0.0),)
            first = position(S, slices, chunk * C, N)
            last = position(S, slices, chunk * C + C - 1, N)
            before = position(S, slices, chunk * C - 1, N)
            after = position(S, slices, chunk * C + C, N)
            if COMPLEX:
                # From the chunk's near end, where the state is, to the near end of the next chunk.
                across = tl.where(rightwards, after - first, last - before) * inverse_width
                beyond = tl.where(rightwards, after - last, first - before) * inverse_width
                for r in tl.static_range(POLES):
                    decays = decays + wave(across, TABLE[4 * r + 2], TABLE[4 * r + 3])
                    decays = decays + wave(beyond, TABLE[4 * r + 2], TABLE[4 * r + 3])
            else:
                # From the rank before the chunk to its last, or from the rank after to its first.
                gap = tl.where(rightwards, last - before, after - first)
                decays = decays + (tl.exp(-gap * inverse_width), gap)
        for k in tl.static_range(AHEAD):
            chunk = tl.where(rightwards, i + k, CHUNKS - 1 - i - k)
            at = ((slices * CHUNKS + chunk) * rows * D)[:, None] + d[None, :]
            new_states = ()
            for row in tl.static_range(rows):
                tl.store(STATES + at + row * D, states[row], mask=inside & (i + k < CHUNKS))
            if COMPLEX:
                for r in tl.static_range(POLES):
                    re = decays[4 * (k * POLES + r)]
                    im = decays[4 * (k * POLES + r) + 1]
                    own_re = decays[4 * (k * POLES + r) + 2]
                    own_im = decays[4 * (k * POLES + r) + 3]
                    x_re = owns[k * rows + 2 * r]
                    x_im = owns[k * rows + 2 * r + 1]
                    s_re = states[2 * r]
                    s_im = states[2 * r + 1]
                    new_states = new_states + (
                        re * s_re - im * s_im + own_re * x_re - own_im * x_im,
                        re * s_im + im * s_re + own_re * x_im + own_im * x_re,
                    )
            else:
                new_states = new_states + (decays[2 * k] * states[0] + owns[k * rows],)
                if TIES:
                    tied = tl.where(decays[2 * k + 1] == 0, states[1], 0.0)
                    new_states = new_states + (tied + owns[k * rows + 1],)
            states = new_states


@triton.jit
def decay_kernel(S, INVERSE_WIDTH, DECAY, N, L, BLOCK: tl.constexpr):
    """``exp(-(s_n - s_{n-1}) / width)``: one exactly where numbers are equal, zero at rank 0."""
    pair = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = tl.load(S + pair * N + n, mask=n < N, other=0.0)
    before = tl.load(S + pair * N + n - 1, mask=(n < N) & (n > 0), other=0.0)
    decay = tl.exp((before - here) * tl.load(INVERSE_WIDTH + pair // L))
    decay = tl.where(before < here, tl.minimum(decay, 1 - 2**-24), 1.0)
    tl.store(DECAY + pair * N + n, tl.where(n > 0, decay, 0.0), mask=n < N)
