"""Functions that kernels share: instructions, rows of tokens, the sorted kernel κ on chunks.

The torch twin of κ is :class:`espformer.ops.esp.sorted_kernel.SortedKernel`.

A program works on one chunk of C neighbouring ranks of one (head, slice). Within the chunk κ
is a dense C×C matrix on the tensor cores. What other chunks contribute comes in through
states, a few rows per direction and chunk: with poles p of the table of exponentials,

    left_c = Σ_{j before c} exp(-p (first_c - s_j)) x_j,
    right_c = Σ_{j after c} exp(-p (s_j - last_c)) x_j

where s are the sorted points and first_c and last_c the smallest and the largest one of the chunk
(`soft_plan.py` makes them). They are (batch, slices, chunks, STATE_ROWS, width), in float32, or in
bfloat16 for 16-bit rows and a real pole. STATE_ROWS is zero if there is one chunk. It is at most
STATE_BLOCK, to which products pad it, so that making and using states are matrix products too:

    absolute: left, right and, for the backward, their ties;
    squared: (Re, Im) of every pole, left then right

``exp(-|x|)`` has a kink at zero, and its slope there is taken as zero, so that the arbitrary order
of equal points does not change their gradients. Within a chunk equal points are found by
comparison. Across chunks, two more rows (four in all) hold the part of left_c and right_c from
points equal to first_c or last_c. Ties are frequent in 16-bit inputs.

Offsets within a head are 32-bit; pointers are moved to the head with 64 bits first.

Shapes in comments: B heads of all sequences (``batch``), L slices, N ranks, WIDTH columns of a row:
D where a kernel is compiled for that width, or 8 · D8
(:func:`espformer.ops.common.triton.width_arguments`).

Constants of kernels on chunks: SPAN ranks make a chunk, of which a program holds C, fewer in a
short last chunk; it takes BLOCK_D columns at a time. EVEN says that no rank and no column is
missing, COMPLEX that poles are complex numbers (the squared metric), ATOMIC that all slices add to
the same rows. A sequence has CHUNKS chunks, of which a launch computes COUNT from START on. TABLE
is :func:`espformer.ops.esp.triton.soft_plan.state_table`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from espformer.ops.common.triton import INTERPRETED
from espformer.ops.esp.exponentials import ABSOLUTE, GAUSSIAN, ExponentialSum

LOG2E = tl.constexpr(1.4426950408889634)
ROOT_LOG2E = tl.constexpr(1.2011224087864498)
QUARTER_TURN = tl.constexpr(1.5707963267948966)

# Sizes that do not affect alignment: kernels are not specialised for multiples of 16 or for 1.
COUNTS = ("HEADS", "L", "KEYS", "QUERIES", "TOKENS", "CHUNKS", "START", "COUNT", "D8")
# State rows as an operand of a matrix product: the least that tensor cores take, and as many as the
# four complex poles of float32 rows need.
STATE_BLOCK = tl.constexpr(16)


def exponential_table(metric: str, fp32_rows: bool) -> ExponentialSum:
    """κ as a sum of exponentials, as accurate as float32 or as 16-bit rows deserve."""
    return ABSOLUTE if metric == "absolute" else GAUSSIAN[4 if fp32_rows else 3]


if INTERPRETED:  # the interpreter knows neither libdevice nor PTX

    @triton.jit
    def fast_cosine(angle):
        return tl.cos(angle)

    @triton.jit
    def fast_sine(angle):
        return tl.sin(angle)

    @triton.jit
    def rounded_product(x, y):
        return x * y

    @triton.jit
    def computed_here(x):
        return x

    @triton.jit
    def exp2(x):
        return tl.exp2(x)

    @triton.jit
    def exp2_minus_abs(x):
        return tl.exp2(-tl.abs(x))

    @triton.jit
    def exp2_minus_square(x):
        return tl.exp2(-x * x)

    @triton.jit
    def in_product_layout(x, rows, columns):
        return x

    @triton.jit
    def differences_in_product_layout(points, rows):
        return points[None, :] - points[:, None]

    @triton.jit
    def to_wide_range(x):
        if x.dtype == tl.float16:  # there is no bfloat16
            x = x.to(tl.float32)
        return x

    @triton.jit
    def copy_sign(x, y):
        return tl.where(y > 0, x, tl.where(y < 0, -x, 0.0))
else:
    from triton.language.extra import libdevice

    @triton.jit
    def fast_cosine(angle):
        """Cosine in one instruction, good to 2^-21 up to π; beyond, what it multiplies decays."""
        return libdevice.fast_cosf(angle)

    @triton.jit
    def fast_sine(angle):
        """Sine, likewise: of a small angle most digits are lost."""
        return libdevice.fast_sinf(angle)

    @triton.jit
    def rounded_product(x, y):
        """A product that is rounded by itself, not fused with an addition, so that ties stay
        ties.
        """
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def computed_here(x):
        """x, computed at this place: the compiler may not postpone it to where x is used, while all
        that x is computed from would take registers.
        """
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1
        )

    @triton.jit
    def exp2(x):
        """2^x in one instruction; results below the smallest normal number are zero."""
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def exp2_minus_abs(x):
        """2^-|x|, still in one instruction: it can change the sign of what it reads."""
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; abs.f32 t, $1; neg.f32 t, t; ex2.approx.ftz.f32 $0, t; }", "=f,f",
            [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip

    @triton.jit
    def exp2_minus_square(x):
        """2^(-x²) in two instructions."""
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.f32 t, $1, $1; neg.f32 t, t; ex2.approx.ftz.f32 $0, t; }", "=f,f",
            [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip

    @triton.jit
    def in_product_layout(x, rows, columns):
        """x itself, but held by the same threads as the matrix product ``rows columnsᵀ``.

        For a matrix made from two vectors the compiler chooses a layout that would send every entry
        through shared memory on its way to the tensor cores. The result of a product has the layout
        in which tensor cores take operands. So this computes a product of rows that are in shared
        memory anyway, takes its layout, and does not use its values.
        """
        product = tl.dot(rows, tl.trans(columns))
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f,f", [x, product], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def differences_in_product_layout(points, rows):
        """``points_j - points_n``, (ranks, ranks), likewise held as the product ``rows rowsᵀ``.

        They depend on that product on purpose. Otherwise the compiler would move them out of a loop
        over blocks of columns and keep them in registers that the loop does not have.
        """
        product = tl.dot(rows, tl.trans(rows))
        return tl.inline_asm_elementwise(
            "sub.f32 $0, $1, $2;", "=f,f,f,f", [points[None, :], points[:, None], product],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip

    @triton.jit
    def copy_sign(x, y):
        """x with the sign of y, and zero where y is."""
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t; .reg .pred p;
            and.b32 t, $2, 0x80000000; xor.b32 t, t, $1;
            setp.eq.f32 p, $2, 0f00000000; selp.b32 $0, 0, t, p; }""",
            "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip

    @triton.jit
    def to_wide_range(x):
        """x in a type with the range of float32, since sums over many tokens overflow float16."""
        if x.dtype == tl.float16:
            x = x.to(tl.bfloat16)
        return x


@triton.jit
def accurate_cosine(angle, QUARTERS: tl.constexpr = 0):
    """Cosine of ``x + QUARTERS · π/2`` for angles up to a thousand, to the last bit or two.

    The library function has a branch for huge angles, which would be a third of a kernel's code.
    """
    quarters = tl.floor(angle * (1 / QUARTER_TURN) + 0.5)
    # π/2 in three parts; the first two are so short that their products are not rounded.
    rest = angle - quarters * 1.5703125
    rest = rest - quarters * 0.0004838705062866211
    rest = rest + quarters * 4.371138828673793e-08
    z = rest * rest
    even = 1.0 + z * (z * (4.16666466e-02 + z * (-1.38873560e-03 + z * 2.44370787e-05)) - 0.5)
    odd = rest + rest * z * (-0.1666665 + z * (0.00833197 - z * 0.00019494))
    q = quarters.to(tl.int32) + QUARTERS
    y = tl.where((q & 1) == 0, even, odd)
    return tl.where(((q + 1) & 2) == 0, y, -y)


@triton.jit
def cosine(angle, ACCURATE: tl.constexpr):
    """Accurate for float32 rows: their states have large weights, which would amplify an error of
    2^-21.
    """
    if ACCURATE:
        y = accurate_cosine(angle)
    else:
        y = fast_cosine(angle)
    return y


@triton.jit
def rotation(angle, ACCURATE: tl.constexpr):
    """``exp(-i angle)``, real and imaginary part.

    ACCURATE where many of them multiply and errors add up: a small angle keeps all its digits,
    which ``angle + π/2`` would lose.
    """
    if ACCURATE:
        re, im = accurate_cosine(angle), accurate_cosine(angle, 1)
    else:
        re, im = fast_cosine(angle), -fast_sine(angle)
    return re, im


@triton.jit
def safe_divide(x, y):
    """x / y, and zero where y is zero."""
    return tl.where(y == 0, 0.0, x / tl.where(y == 0, 1.0, y))


@triton.jit
def one_over(x, here):
    """1 / x, and zero where nothing is."""
    return tl.where(here, 1.0 / tl.where(here, x, 1.0), 0.0)


@triton.jit
def program_rows(N, BLOCKS, D, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """The head, tokens and columns of a program that processes a block of rows, and the valid
    columns.
    """
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    i = tl.program_id(0) % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    return head, i, d, d[None, :] < D


@triton.jit
def program_chunk(HEADS, L, START, COUNT):
    """The (head, slice) pair of this program, its head, and its chunk, one of COUNT from START on.

    Chunk c begins at rank ``c · SPAN``; programs hold C ranks of it, all that there are.

    Neighbouring programs belong to different heads, so that concurrent programs seldom add to the
    rows of the same tokens.
    """
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    rest = tl.program_id(0) // HEADS
    return head * L + rest // COUNT, head, START + rest % COUNT


@triton.jit
def load_rows(x_ptr, scale_ptr, tokens, n, N, d, D, EVEN: tl.constexpr):
    """Rows of the tokens at ranks n, (ranks, columns), times their scales; zero past the end.

    EVEN says that chunks and columns fill their blocks, which saves the masks.
    """
    at = tokens[:, None] * D + d[None, :]
    if EVEN:
        x = tl.load(x_ptr + at)
    else:
        x = tl.load(x_ptr + at, mask=(d[None, :] < D) & (n[:, None] < N), other=0.0)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + n, mask=n < N, other=0.0)
        x = (x.to(tl.float32) * scale[:, None]).to(x.dtype)
    return x


@triton.jit
def add_rows(
    out_ptr, scale_ptr, y, tokens, pair, head, n, N, TOKENS, d, D,
    ATOMIC: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Adds ``scale · y`` to the rows of the tokens at ranks n.

    Not ATOMIC: every slice stores rows of its own; ranks whose scale is zero are left out.
    """
    inside = (n[:, None] < N) & (d[None, :] < D)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + n, mask=n < N, other=0.0)[:, None]
        y = y * scale
    if ATOMIC:
        rows_ptr = out_ptr + head * TOKENS * D + tokens[:, None] * D + d[None, :]
        if EVEN:
            tl.atomic_add(rows_ptr, y, sem="relaxed")
        else:
            tl.atomic_add(rows_ptr, y, mask=inside, sem="relaxed")
    else:
        rows_ptr = out_ptr + pair * TOKENS * D + tokens[:, None] * D + d[None, :]
        if scale_ptr is not None:
            inside = inside & (scale != 0)
        tl.store(rows_ptr, y, mask=inside)


@triton.jit
def load_squares(square_ptr, order_ptr, in_scale_ptr, at, n, inside):
    """Squares of the tokens at ranks n, times the scales of these ranks."""
    x = tl.load(square_ptr + tl.load(order_ptr + n, mask=inside, other=0), mask=inside, other=0.0)
    if in_scale_ptr is not None:
        x *= tl.load(in_scale_ptr + at + n, mask=inside, other=0.0)
    return x


@triton.jit
def column_operands(x_ptr, upstream_ptr, d_mid_ptr, other_ptr, y_ptr, n, inside, length):
    """u and x at ranks n, of κx or of the slope of ``uᵀ κ x``.

    Without operands both are ones up to `length`. Given gradients of ``y = 1 / κ1``, x = 1 and
    u = -(gradient of y) y². The gradient of y is the upstream, plus `d_mid`, that of the product of
    both sides' scales, times the other side's scales.
    """
    if x_ptr is not None:
        x = tl.load(x_ptr + n, mask=inside, other=0.0)
        u = x if upstream_ptr is None else tl.load(upstream_ptr + n, mask=inside, other=0.0)
    elif upstream_ptr is None and d_mid_ptr is None:
        x = tl.where(inside & (n < length), 1.0, 0.0)
        u = x
    else:
        scale = tl.load(y_ptr + n, mask=inside, other=0.0)
        x = tl.where(scale == 0.0, 0.0, 1.0)
        if d_mid_ptr is None:
            d_scale = tl.load(upstream_ptr + n, mask=inside, other=0.0)
        else:
            d_scale = tl.load(d_mid_ptr + n, mask=inside, other=0.0)
            d_scale *= tl.load(other_ptr + n, mask=inside, other=0.0)
            if upstream_ptr is not None:
                d_scale += tl.load(upstream_ptr + n, mask=inside, other=0.0)
        u = d_scale * (-scale * scale)
    return u, x


@triton.jit
def of_other_side(ptr, pair, N, PAIRS):
    """The row of the other side's pair, if two sides of PAIRS pairs each follow each other."""
    return ptr + (pair + PAIRS) % (2 * PAIRS) * N


@triton.jit
def load_one_of_two(x_ptr, y_ptr, second, at, inside):
    """Numbers of x or, for the second side, of y."""
    if y_ptr is None:
        x = tl.load(x_ptr + at, mask=inside, other=0.0)
    else:
        if second:
            x = tl.load(y_ptr + at, mask=inside, other=0.0)
        else:
            x = tl.load(x_ptr + at, mask=inside, other=0.0)
    return x


@triton.jit
def store_one_of_two(x_ptr, y_ptr, second, at, numbers, inside):
    """Stores numbers in x or, for the second side, in y."""
    numbers = numbers.to(x_ptr.dtype.element_ty)
    if y_ptr is None:
        tl.store(x_ptr + at, numbers, mask=inside)
    else:
        if second:
            tl.store(y_ptr + at, numbers, mask=inside)
        else:
            tl.store(x_ptr + at, numbers, mask=inside)


@triton.jit
def point_at(points_ptr, n, N):
    """The point at rank n, clamped to the sequence."""
    return tl.load(points_ptr + tl.maximum(tl.minimum(n, N - 1), 0))


@triton.jit
def load_points(points_ptr, start, N, C: tl.constexpr, EVEN: tl.constexpr):
    """The points of a chunk, its first and its last; past the end the last one repeats."""
    n = start + tl.arange(0, C)
    if not EVEN:
        n = tl.minimum(n, N - 1)
    points = tl.load(points_ptr + n)
    return points, point_at(points_ptr, start, N), point_at(points_ptr, start + C - 1, N)


@triton.jit
def load_ranks(x_ptr, n, N, EVEN: tl.constexpr):
    """One number or token per rank; zero past the end."""
    return tl.load(x_ptr + n) if EVEN else tl.load(x_ptr + n, mask=n < N, other=0)


@triton.jit
def load_side(points_ptr, order_ptr, start, N, C: tl.constexpr, EVEN: tl.constexpr):
    """A chunk of one side: its tokens and points, and its first and last point."""
    tokens = load_ranks(order_ptr, start + tl.arange(0, C), N, EVEN)
    points, first, last = load_points(points_ptr, start, N, C, EVEN)
    return tokens, points, first, last


@triton.jit
def gap_unit(inv_bandwidth, COMPLEX: tl.constexpr):
    """The factor on differences of points that makes κ a power of two."""
    return inv_bandwidth * (ROOT_LOG2E if COMPLEX else LOG2E)


@triton.jit
def chunk_kappa(
    points, first, last, rows, inv_bandwidth, COMPLEX: tl.constexpr, FP32_ROWS: tl.constexpr
):
    """κ within a chunk, and the scaled differences ``s_j - s_n`` that it is a function of.

    Scaling points before the subtraction saves an instruction per entry, but rounds. Points are
    taken relative to the point nearest to zero, where floats are densest, so only the last bits are
    lost. `rows` are any rows of the chunk, for the layout.
    """
    rate = gap_unit(inv_bandwidth, COMPLEX)
    if FP32_ROWS:
        gap = (points[None, :] - points[:, None]) * rate
        if rows is not None:
            gap = in_product_layout(gap, rows, rows)
    else:
        points = rounded_product(points - tl.minimum(tl.maximum(first, 0.0), last), rate)
        if rows is None:
            gap = points[None, :] - points[:, None]
        else:
            gap = differences_in_product_layout(points, rows)
    kappa = exp2_minus_square(gap) if COMPLEX else exp2_minus_abs(gap)
    return kappa, gap


@triton.jit
def chunk_kappa_slope(kappa, gap, COMPLEX: tl.constexpr):
    """κ' within a chunk: the derivative of κ in s_n. Zero between equal points."""
    if COMPLEX:
        return gap * kappa * (2 / ROOT_LOG2E)
    return copy_sign(kappa, gap)


@triton.jit
def decay_from_ends(points, first, last, inv_bandwidth):
    """Decay of the left and of the right state at every rank, in the absolute metric."""
    rate = inv_bandwidth * -LOG2E
    return exp2((points - first) * rate), exp2((last - points) * rate)


@triton.jit
def distances_in_chunk(points, prev_last, last, COMPLEX: tl.constexpr, STATE_ROWS: tl.constexpr):
    """Distances from the end of the previous chunk, for left states, and to the own end, for right
    states.

    (ranks, state rows); the latter with a minus, as forces on the two ends of a line are opposite.
    """
    r = tl.arange(0, STATE_BLOCK)[None, :]
    from_left = r < STATE_ROWS // 2 if COMPLEX else r % 2 == 0
    return tl.where(from_left, (points - prev_last)[:, None], (points - last)[:, None])


@triton.jit
def table_entry(TABLE: tl.constexpr, WHICH: tl.constexpr, r, STATE_ROWS: tl.constexpr):
    """One of the eight table entries of state row r."""
    found = tl.zeros_like(r).to(tl.float32)
    for i in tl.static_range(STATE_ROWS):
        found = tl.where(r == i, TABLE[8 * i + WHICH], found)
    return found


@triton.jit
def state_coefficients(
    TABLE: tl.constexpr, points, first, last, inv_bandwidth,
    KIND: tl.constexpr, COMPLEX: tl.constexpr, STATE_ROWS: tl.constexpr, FP32_ROWS: tl.constexpr,
    FIRST_COLUMN: tl.constexpr = 0,
):  # fmt: skip
    """Coefficients between ranks and states, (ranks, STATE_BLOCK); columns before FIRST_COLUMN are
    zero. By KIND:

    "in": from a rank to the sums of its chunk, evaluated at the chunk's far end; "out": from a
    state to κx at a rank; "slope": from a state to κ'x.

    With complex poles it is ``size · exp(-Re p · x) · cos(phase - Im p · x)``; TABLE has for every
    state row Re p, Im p, and size and phase of each kind.
    """
    r = tl.arange(0, STATE_BLOCK)[None, :] - FIRST_COLUMN
    if COMPLEX:
        which: tl.constexpr = 2 if KIND == "in" else (4 if KIND == "out" else 6)
        half: tl.constexpr = STATE_ROWS // 2
        to_first = ((points - first) * inv_bandwidth)[:, None]
        to_last = ((last - points) * inv_bandwidth)[:, None]
        x = tl.where((r < half) == (KIND == "in"), to_last, to_first)
        x = tl.minimum(x, 40.0)  # exp(-40 Re p) is zero, and the angle stays small
        angle = (
            table_entry(TABLE, which + 1, r, STATE_ROWS) - table_entry(TABLE, 1, r, STATE_ROWS) * x
        )
        decay = exp2(table_entry(TABLE, 0, r, STATE_ROWS) * (x * -LOG2E))
        size = table_entry(TABLE, which, r, STATE_ROWS) * decay
        return size * cosine(angle, FP32_ROWS)
    near_left, near_right = decay_from_ends(points, first, last, inv_bandwidth)
    if KIND == "in":  # measured at the other end, to be handed on
        left, right = near_right, near_left
        left_tie = tl.where(points == last, 1.0, 0.0)
        right_tie = tl.where(points == first, 1.0, 0.0)
    else:
        left, right = near_left, near_right
        left_tie = tl.where(points == first, 1.0, 0.0)
        right_tie = tl.where(points == last, -1.0, 0.0)
    if KIND == "slope":
        left = -left
    found = tl.where(r == 0, left[:, None], tl.where(r == 1, right[:, None], 0.0))
    if STATE_ROWS > 2 and KIND != "out":
        found = tl.where(r == 2, left_tie[:, None], tl.where(r == 3, right_tie[:, None], found))
    return found


@triton.jit
def product(a, x, TWO_PARTS: tl.constexpr = False):
    """``a x`` for float32 a and rows x, in float32.

    With 16-bit rows, a is rounded to 16 bits; with TWO_PARTS the rounding error of a is multiplied
    too.
    """
    if x.dtype == tl.float32:
        return tl.dot(a, x, input_precision="tf32x3")
    rounded = a.to(x.dtype)
    total = tl.dot(rounded, x)
    if TWO_PARTS:
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
def times_states(x, states, COMPLEX: tl.constexpr):
    """``x statesᵀ``, (ranks, state rows)."""
    rounded = states.to(x.dtype)
    total = transposed_product(x, rounded)
    if COMPLEX and x.dtype != tl.float32:  # large weights of several poles cancel
        total = transposed_product(x, (states - rounded.to(tl.float32)).to(x.dtype), total)
    return total


@triton.jit
def read_coefficients(
    TABLE: tl.constexpr, points, first, last, inv_bandwidth, rows, states,
    COMPLEX: tl.constexpr, STATE_ROWS: tl.constexpr,
):  # fmt: skip
    """The "out" coefficients, (ranks, state rows), where a product with states takes them.

    `rows` and `states` are any of the chunk, for the layout.
    """
    fp32_rows: tl.constexpr = rows.dtype == tl.float32
    read = state_coefficients(
        TABLE, points, first, last, inv_bandwidth, "out", COMPLEX, STATE_ROWS, fp32_rows
    )
    if STATE_ROWS > 0 and not (COMPLEX or fp32_rows):
        rows = to_wide_range(rows)
        read = in_product_layout(read, rows, states.to(rows.dtype))
    return read


@triton.jit
def kappa_at(
    TABLE: tl.constexpr, points, first, last, inv_bandwidth, rows, states,
    COMPLEX: tl.constexpr, STATE_ROWS: tl.constexpr,
):  # fmt: skip
    """All that :func:`times_kappa` needs of κ at the ranks of a chunk: κ within the chunk, and the
    coefficients that read states; between the two, the differences that κ' is made from.

    `rows` and `states` are any of the chunk, for the layout.
    """
    fp32_rows: tl.constexpr = rows.dtype == tl.float32
    kappa, gap = chunk_kappa(points, first, last, rows, inv_bandwidth, COMPLEX, fp32_rows)
    read = read_coefficients(
        TABLE, points, first, last, inv_bandwidth, rows, states, COMPLEX, STATE_ROWS
    )
    return kappa, gap, read


@triton.jit
def times_kappa(kappa, x, read, states, COMPLEX: tl.constexpr, STATE_ROWS: tl.constexpr):
    """κx at the ranks of a chunk, in float32: rows x of the chunk times `kappa`, and states of
    other chunks times `read`, their "out" coefficients.
    """
    y = product(kappa, x)
    if STATE_ROWS > 0:
        if x.dtype == tl.float32:
            y = tl.dot(read, states, y, input_precision="tf32x3")
        elif COMPLEX:  # large weights of several poles cancel
            y = tl.dot(read, states, y, input_precision="tf32")
        else:
            states = states.to(to_wide_range(x).dtype)  # they are sums over many tokens
            y = tl.dot(read.to(states.dtype), states, y)
    return y


@triton.jit
def load_states(states_ptr, chunk, d, D, STATE_ROWS: tl.constexpr):
    """The states that enter a chunk, (state rows, columns); zero beyond their number.

    STATE_ROWS is zero where there is only one chunk, and nothing enters it.
    """
    r = tl.arange(0, STATE_BLOCK)[:, None]
    states = tl.zeros((STATE_BLOCK, d.shape[0]), tl.float32)
    if STATE_ROWS > 0:
        state_ptr = states_ptr + (chunk * STATE_ROWS + r) * D + d[None, :]
        states = tl.load(state_ptr, mask=(r < STATE_ROWS) & (d[None, :] < D), other=0.0)
    return states
