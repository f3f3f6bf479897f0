"""Chunks of ranks: the sorted kernel within one, and what states of other chunks contribute.

A program works on one chunk of C neighbouring ranks of one (head, slice). Within the chunk the
kernel is a dense C×C matrix on the tensor cores. What other chunks contribute comes in through
states, a few rows per side and chunk: with poles p of the table of exponentials,

    L_c = Σ_{j before c} exp(-p (first_c - s_j)) x_j,
    R_c = Σ_{j after c} exp(-p (s_j - last_c)) x_j

where first_c and last_c are the smallest and the largest number of the chunk (`states.py` makes
them). They are (batch, slices, chunks, rows, width), in float32, or in bfloat16 for 16-bit rows and
a real pole. The rows are a short axis of at most STATE_ROWS, so that making and using them are
matrix products too:

    absolute: L, R and, for the backward, their ties;     squared: (Re, Im) of every pole, L then R

``exp(-|x|)`` has a kink at zero, and its slope there is zero: equal numbers do not push each other
apart by the order they happen to stand in. Within a chunk equal numbers are told by comparing them;
across chunks, two more rows (four in all) hold the part of L and R that has the very number
first_c or last_c. 16-bit inputs tie all the time.

Offsets within a head are 32-bit; pointers are moved to the head with 64 bits first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from espformer.ops.esp.triton.instructions import (
    LOG2E,
    ROOT_LOG2E,
    cosine,
    exp2,
    exp2_minus_abs,
    exp2_minus_square,
    like_product,
    roomy,
    times,
    with_sign,
)

# Sizes that no load is aligned by: kernels are not compiled anew for multiples of 16, or for one.
COUNTS = ("HEADS", "L", "KEYS", "QUERIES", "TOKENS", "CHUNKS", "START", "COUNT")
STATE_ROWS = tl.constexpr(16)  # the least that a matrix product on the tensor cores takes


@triton.jit
def place(HEADS, L, START, COUNT):
    """The (head, slice) pair of this program, its head, and its chunk, one of COUNT from START on.

    Chunk c begins at rank ``c · SPAN``; programs hold C ranks of it, all that there are.

    Neighbouring programs belong to different heads: what runs at the same time seldom adds to the
    rows of the same tokens.
    """
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    rest = tl.program_id(0) // HEADS
    return head * L + rest // COUNT, head, START + rest % COUNT


@triton.jit
def number(S, n, N):
    """The sorted number at rank n, clamped to the sequence."""
    return tl.load(S + tl.maximum(tl.minimum(n, N - 1), 0))


@triton.jit
def positions(S, start, N, C: tl.constexpr, EVEN: tl.constexpr):
    """Sorted numbers of a chunk, its first and its last; past the end the last one repeats."""
    n = start + tl.arange(0, C)
    if not EVEN:
        n = tl.minimum(n, N - 1)
    return tl.load(S + n), number(S, start, N), number(S, start + C - 1, N)


@triton.jit
def load_ranks(X, n, N, EVEN: tl.constexpr):
    """One number or token per rank; zero past the end."""
    return tl.load(X + n) if EVEN else tl.load(X + n, mask=n < N, other=0)


@triton.jit
def side(S, ORDER, start, N, C: tl.constexpr, EVEN: tl.constexpr):
    """A chunk of one side: its tokens and numbers, and its first and last number."""
    tokens = load_ranks(ORDER, start + tl.arange(0, C), N, EVEN)
    s, first, last = positions(S, start, N, C, EVEN)
    return tokens, s, first, last


@triton.jit
def gap_unit(inverse_width, COMPLEX: tl.constexpr):
    """What differences of numbers are multiplied by, so that κ is a power of two."""
    return inverse_width * (ROOT_LOG2E if COMPLEX else LOG2E)


@triton.jit
def near(s, first, last, rows, inverse_width, COMPLEX: tl.constexpr, EXACT: tl.constexpr):
    """κ within a chunk, and the scaled differences ``s_j - s_n`` that it is a function of.

    To scale numbers before they are subtracted saves an instruction per entry and costs the last
    bits. They are measured from the number nearest to zero, where floats are densest: so it costs
    no more than that, whatever else is in the chunk. `rows` are any rows of it, for the layout.
    """
    rate = gap_unit(inverse_width, COMPLEX)
    if EXACT:
        gap = (s[None, :] - s[:, None]) * rate
    else:
        s = times(s - tl.minimum(tl.maximum(first, 0.0), last), rate)
        gap = s[None, :] - s[:, None]
    if rows is not None:
        gap = like_product(gap, rows, rows)
    k = exp2_minus_square(gap) if COMPLEX else exp2_minus_abs(gap)
    return k, gap


@triton.jit
def gap_slope(k, gap, COMPLEX: tl.constexpr):
    """κ' within a chunk: the derivative of κ in s_n. Zero between equal numbers."""
    if COMPLEX:
        return gap * k * (2 / ROOT_LOG2E)
    return with_sign(k, gap)


@triton.jit
def reach(s, first, last, inverse_width):
    """What is left of the left and of the right state at every rank, for the absolute metric."""
    rate = inverse_width * -LOG2E
    return exp2((s - first) * rate), exp2((last - s) * rate)


@triton.jit
def ways(s, before, last, COMPLEX: tl.constexpr, ROWS: tl.constexpr):
    """From the end of the chunk before, for states from the left; to its own end, for the others.

    (ranks, state rows); the latter with a minus, as forces on the two ends of a way are opposite.
    """
    r = tl.arange(0, STATE_ROWS)[None, :]
    from_left = r < ROWS // 2 if COMPLEX else r % 2 == 0
    return tl.where(from_left, (s - before)[:, None], (s - last)[:, None])


@triton.jit
def entry(TABLE: tl.constexpr, WHICH: tl.constexpr, r, ROWS: tl.constexpr):
    """One of the eight numbers that the table has for each state row r."""
    found = tl.zeros_like(r).to(tl.float32)
    for i in tl.static_range(ROWS):
        found = tl.where(r == i, TABLE[8 * i + WHICH], found)
    return found


@triton.jit
def waves(
    TABLE: tl.constexpr, s, first, last, inverse_width,
    KIND: tl.constexpr, COMPLEX: tl.constexpr, ROWS: tl.constexpr, EXACT: tl.constexpr,
    AFTER: tl.constexpr = 0,
):  # fmt: skip
    """What ties ranks to states, (ranks, state rows), placed AFTER so many other rows. By KIND:

    "in": the share of a rank in the sums that its chunk hands on, measured at the chunk's far end;
    "out": the share of a state in κx at a rank; "slope": its share in κ'x.

    With complex poles it is ``size · exp(-Re p · x) · cos(phase - Im p · x)``; TABLE has for every
    state row Re p, Im p, and size and phase of each kind.
    """
    r = tl.arange(0, STATE_ROWS)[None, :] - AFTER
    if COMPLEX:
        which: tl.constexpr = 2 if KIND == "in" else (4 if KIND == "out" else 6)
        half: tl.constexpr = ROWS // 2
        to_first = ((s - first) * inverse_width)[:, None]
        to_last = ((last - s) * inverse_width)[:, None]
        x = tl.where((r < half) == (KIND == "in"), to_last, to_first)
        x = tl.minimum(x, 40.0)  # exp(-40 Re p) is zero, and the angle stays small
        angle = entry(TABLE, which + 1, r, ROWS) - entry(TABLE, 1, r, ROWS) * x
        size = entry(TABLE, which, r, ROWS) * exp2(entry(TABLE, 0, r, ROWS) * (x * -LOG2E))
        return size * cosine(angle, EXACT)
    near_left, near_right = reach(s, first, last, inverse_width)
    if KIND == "in":  # measured at the other end, to be handed on
        left, right = near_right, near_left
        left_tie, right_tie = tl.where(s == last, 1.0, 0.0), tl.where(s == first, 1.0, 0.0)
    else:
        left, right = near_left, near_right
        left_tie, right_tie = tl.where(s == first, 1.0, 0.0), tl.where(s == last, -1.0, 0.0)
    if KIND == "slope":
        left = -left
    wave = tl.where(r == 0, left[:, None], tl.where(r == 1, right[:, None], 0.0))
    if ROWS > 2 and KIND != "out":
        wave = tl.where(r == 2, left_tie[:, None], tl.where(r == 3, right_tie[:, None], wave))
    return wave


@triton.jit
def product(a, x, FINE: tl.constexpr = False):
    """``a x`` for float32 a and rows x, in float32.

    16-bit rows multiply a rounded to 16 bits, and with FINE also what the rounding left.
    """
    if x.dtype == tl.float32:
        return tl.dot(a, x, input_precision="tf32x3")
    rounded = a.to(x.dtype)
    total = tl.dot(rounded, x)
    if FINE:
        total = tl.dot((a - rounded.to(tl.float32)).to(x.dtype), x, total)
    return total


@triton.jit
def transposed_product(x, y, total=None):
    """``x yᵀ`` in float32, added to a total if there is one."""
    if x.dtype == tl.float32:
        total = tl.dot(x, tl.trans(y), total, input_precision="tf32x3")
    else:
        total = tl.dot(x, tl.trans(y), total)
    return total


@triton.jit
def on_states(x, states, COMPLEX: tl.constexpr):
    """``x statesᵀ``, (ranks, state rows)."""
    rounded = states.to(x.dtype)
    far = transposed_product(x, rounded)
    if COMPLEX and x.dtype != tl.float32:  # large weights of several poles cancel
        far = transposed_product(x, (states - rounded.to(tl.float32)).to(x.dtype), far)
    return far


@triton.jit
def leaving(
    TABLE: tl.constexpr, s, first, last, inverse_width, rows, states,
    COMPLEX: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The waves out of states, (ranks, state rows), where a product with states takes them.

    `rows` and `states` are any of the chunk, for the layout.
    """
    exact: tl.constexpr = rows.dtype == tl.float32
    wave = waves(TABLE, s, first, last, inverse_width, "out", COMPLEX, ROWS, exact)
    if ROWS > 0 and not (COMPLEX or exact):
        rows = roomy(rows)
        wave = like_product(wave, rows, states.to(rows.dtype))
    return wave


@triton.jit
def spread(k, x, leave, states, COMPLEX: tl.constexpr, ROWS: tl.constexpr):
    """κx at the ranks of a chunk in float32; k is κ within it, `leave` what lets states enter."""
    y = product(k, x)
    if ROWS > 0:
        if x.dtype == tl.float32:
            y = tl.dot(leave, states, y, input_precision="tf32x3")
        elif COMPLEX:  # large weights of several poles cancel
            y = tl.dot(leave, states, y, input_precision="tf32")
        else:
            states = states.to(roomy(x).dtype)  # they are sums over many tokens
            y = tl.dot(leave.to(states.dtype), states, y)
    return y


@triton.jit
def load_states(STATES, chunk, d, D: tl.constexpr, ROWS: tl.constexpr):
    """The states that enter a chunk, (state rows, columns); zero beyond their number.

    ROWS is zero where there is only one chunk, and nothing enters it.
    """
    r = tl.arange(0, STATE_ROWS)[:, None]
    states = tl.zeros((STATE_ROWS, d.shape[0]), tl.float32)
    if ROWS > 0:
        at = STATES + (chunk * ROWS + r) * D + d[None, :]
        states = tl.load(at, mask=(r < ROWS) & (d[None, :] < D), other=0.0)
    return states
