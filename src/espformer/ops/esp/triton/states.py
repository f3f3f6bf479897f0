"""States, which carry the contribution of other chunks, for one κ or for two in a row.

The torch twin is :class:`espformer.ops.esp.sorted_kernel.ChunkStates`. `sums` sums every chunk by
itself, evaluated at its far end; `scan` carries the sums from chunk to chunk, in place.

**Through one κ into the next.** The operand of the second κ of a plan is
``W = mid_scale · κx``, and its sums are needed before W has been computed. Within a chunk they are

    Σ_n in_n W_n = Σ_j [Σ_n κ_nj mid_scale_n in_n] x_j
                   + [Σ_n in_n mid_scale_n out_n] · (states of x),

with `in` the coefficient into a state of the second κ and `out` the one out of a state of the
first. This adds a few rows to the matrix that sums x anyway, and a small matrix of links per chunk.
So a program reads its rows once for both, and W is never stored.
"""

from __future__ import annotations

import cmath
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from espformer.ops.common.triton import Launch, Shape, ceil_div, once, power_of_2, width_arguments
from espformer.ops.esp.triton.primitives import (
    COUNTS,
    INTERPRETED,
    LOG2E,
    STATE_BLOCK,
    chunk_kappa,
    exp2,
    exponential_table,
    load_points,
    load_ranks,
    load_rows,
    load_side,
    load_states,
    point_at,
    product,
    program_chunk,
    rotation,
    state_coefficients,
    table_entry,
    to_wide_range,
)

if TYPE_CHECKING:
    from espformer.ops.esp.triton.soft_plan import Plan

# Ranks per chunk for 16-bit and for 32-bit rows (32-bit rows are split in three parts, which takes
# registers).
CHUNK = {2: 64, 4: 16}
LEAST = 16  # the fewest that tensor cores take
# Chunks whose states a scan loads together: for real poles, for complex ones.
AHEAD = 8, 4
# The number of programs that a scan should have, and the minimum number of loads of each.
SCANNING = 2048
LEAST_LOADS = 8
# For 16-bit rows: warps that sum a chunk (other programs have one for 16 ranks), and registers of a
# thread. "rows" is a plan applied, "grad" has the slope and either rows or scales, "all" has all
# three, or `query_scale`. More registers, and fewer programs fit on a multiprocessor.
SUMMING_WARPS = {"absolute": 1, "squared": 2}
REGISTERS = {
    "absolute": {"sums": 128, "rows": 96, "cross": 128, "grad": 128, "all": 168},
    "squared": {"sums": 160, "rows": 128, "cross": 128, "grad": 128, "all": 168},
}


@triton.jit
def store_states(
    states_ptr, chunk, states, d, D, STATE_ROWS: tl.constexpr, AFTER: tl.constexpr = 0
):
    """Some rows of a matrix of sums as the states of a chunk."""
    r = tl.arange(0, STATE_BLOCK)[:, None] - AFTER
    at = (chunk * STATE_ROWS + r) * D + d[None, :]
    tl.store(states_ptr + at, states, mask=(r >= 0) & (r < STATE_ROWS) & (d[None, :] < D))


@triton.jit
def store_sums(
    states_ptr, next_states_ptr, chunk, x, into, through, d, WIDTH, COMPLEX: tl.constexpr,
    STATE_ROWS: tl.constexpr, THROUGH: tl.constexpr, TOGETHER: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """The sums of a block of columns of x, for one κ or for two (:func:`sums_kernel`)."""
    if THROUGH:
        x = to_wide_range(x)
    sums = product(into, x, COMPLEX)
    store_states(states_ptr, chunk, sums, d, WIDTH, STATE_ROWS)
    if THROUGH:
        if not TOGETHER:
            sums = product(through, x, COMPLEX)
        store_states(next_states_ptr, chunk, sums, d, WIDTH, STATE_ROWS, AFTER)


@triton.jit(do_not_specialize=COUNTS)
def sums_kernel(
    x_ptr,  # (B, TOKENS, WIDTH)
    order_ptr,  # (B, L, N) int32: the token of each rank
    scale_ptr,  # (B, L, N) float32, or None: ones
    points_ptr,  # (B, L, N) float32, of the κ that multiplies x
    next_points_ptr,  # (B, L, N) float32, of the κ after it, if THROUGH
    mid_scale_ptr,  # (B, L, N) float32
    TABLE: tl.constexpr,
    inv_bandwidth_ptr,  # (B,) float32
    states_ptr,  # (B, L, CHUNKS, STATE_ROWS, WIDTH)
    next_states_ptr,  # (B, L, CHUNKS, STATE_ROWS, WIDTH), if THROUGH
    links_ptr,  # (B, L, CHUNKS, STATE_ROWS, STATE_ROWS) float32, if THROUGH
    N, TOKENS, HEADS, L, CHUNKS, START, COUNT, D8, D: tl.constexpr, COMPLEX: tl.constexpr,
    STATE_ROWS: tl.constexpr, THROUGH: tl.constexpr, EVEN: tl.constexpr, BLOCK_D: tl.constexpr,
    SPAN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Sums of the rows x of each chunk, evaluated at its last point (left) and its first point
    (right).

    THROUGH: also the sums of ``mid_scale · κx`` for the κ of the next points, without the
    contribution of the states of x. That is added later, through the links.
    """
    WIDTH = D if D > 0 else D8 * 8
    pair, head, chunk = program_chunk(HEADS, L, START, COUNT)
    begin = chunk * SPAN
    n = begin + tl.arange(0, C)
    ranks = pair * N
    x_ptr += head * TOKENS * WIDTH
    if scale_ptr is not None:
        scale_ptr += ranks
    inv_bandwidth = tl.load(inv_bandwidth_ptr + head)
    fp32_rows: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    tokens, points, first, last = load_side(
        points_ptr + ranks, order_ptr + ranks, begin, N, C, EVEN
    )
    into = state_coefficients(
        TABLE, points, first, last, inv_bandwidth, "in", COMPLEX, STATE_ROWS, fp32_rows
    )
    into = tl.trans(into)
    together: tl.constexpr = THROUGH and 2 * STATE_ROWS <= STATE_BLOCK
    after: tl.constexpr = STATE_ROWS if together else 0
    if THROUGH:
        mid_scale = load_ranks(mid_scale_ptr + ranks, n, N, EVEN)
        next_points, next_first, next_last = load_points(next_points_ptr + ranks, begin, N, C, EVEN)
        through = mid_scale[:, None] * state_coefficients(
            TABLE, next_points, next_first, next_last, inv_bandwidth, "in", COMPLEX, STATE_ROWS,
            fp32_rows, after,
        )  # fmt: skip
        x = load_rows(x_ptr, scale_ptr, tokens, n, N, tl.arange(0, BLOCK_D), WIDTH, EVEN)
        kappa, _ = chunk_kappa(points, first, last, None, inv_bandwidth, COMPLEX, fp32_rows)
        r = tl.arange(0, STATE_BLOCK) - after
        kept = (r >= 0) & (r < STATE_ROWS)
        links_ptr += (pair * CHUNKS + chunk) * STATE_ROWS * STATE_ROWS
        if COMPLEX:
            read = state_coefficients(
                TABLE, points, first, last, inv_bandwidth, "out", COMPLEX, STATE_ROWS, fp32_rows
            )
            link = tl.dot(tl.trans(through), read, input_precision="tf32x3")
            column = tl.arange(0, STATE_BLOCK)[None, :]
            to = links_ptr + r[:, None] * STATE_ROWS + column
            tl.store(to, link, mask=kept[:, None] & (column < STATE_ROWS))
        # κ in 16 bits is accurate enough, as for W: all coefficients have the same error.
        through = product(tl.trans(through), kappa.to(to_wide_range(x).dtype), COMPLEX)
        if not COMPLEX:  # a state of a real pole is like a row at the first or the last rank
            i = tl.arange(0, C)[None, :]
            to = links_ptr + r[:, None] * STATE_ROWS + tl.where(i == 0, 0, 1)
            tl.store(to, through, mask=kept[:, None] & ((i == 0) | (i == C - 1)))
        if together:
            into += through
    states_ptr += pair * CHUNKS * STATE_ROWS * WIDTH
    if next_states_ptr is not None:
        next_states_ptr += pair * CHUNKS * STATE_ROWS * WIDTH
    if not THROUGH:
        through = into
        x = load_rows(x_ptr, scale_ptr, tokens, n, N, tl.arange(0, BLOCK_D), WIDTH, EVEN)
    store_sums(
        states_ptr, next_states_ptr, chunk, x, into, through, tl.arange(0, BLOCK_D), WIDTH, COMPLEX,
        STATE_ROWS, THROUGH, together, after,
    )  # fmt: skip
    if D > 0:
        for start in tl.static_range(BLOCK_D, D, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            x = load_rows(x_ptr, scale_ptr, tokens, n, N, d, WIDTH, EVEN)
            store_sums(
                states_ptr, next_states_ptr, chunk, x, into, through, d, WIDTH, COMPLEX, STATE_ROWS,
                THROUGH, together, after,
            )  # fmt: skip
    else:
        for start in tl.range(BLOCK_D, WIDTH, BLOCK_D, num_stages=1):
            d = start + tl.arange(0, BLOCK_D)
            x = load_rows(x_ptr, scale_ptr, tokens, n, N, d, WIDTH, EVEN)
            store_sums(
                states_ptr, next_states_ptr, chunk, x, into, through, d, WIDTH, COMPLEX, STATE_ROWS,
                THROUGH, together, after,
            )  # fmt: skip


@triton.jit
def complex_decay(TABLE: tl.constexpr, x, r, STATE_ROWS: tl.constexpr, FP32_ROWS: tl.constexpr):
    """``exp(-p x)`` of the pole of state row r, real and imaginary part."""
    x = tl.minimum(x, 40.0)
    size = exp2(table_entry(TABLE, 0, r, STATE_ROWS) * (x * -LOG2E))
    re, im = rotation(table_entry(TABLE, 1, r, STATE_ROWS) * x, FP32_ROWS)
    return size * re, size * im


@triton.jit(do_not_specialize=COUNTS)
def link_kernel(
    states_ptr,  # (B, L, CHUNKS, STATE_ROWS, WIDTH)
    next_states_ptr,  # (B, L, CHUNKS, STATE_ROWS, WIDTH)
    links_ptr,  # (B, L, CHUNKS, STATE_ROWS, STATE_ROWS) float32
    D8, D: tl.constexpr, STATE_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds to the sums of every chunk the contribution of the first κ's states, through the
    links.
    """
    WIDTH = D if D > 0 else D8 * 8
    chunk = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, STATE_BLOCK)
    inside = (r[:, None] < STATE_ROWS) & (r[None, :] < STATE_ROWS)
    links = links_ptr + (chunk * STATE_ROWS + r[:, None]) * STATE_ROWS + r[None, :]
    link = tl.load(links, mask=inside, other=0.0)
    for start in tl.range(0, WIDTH, BLOCK_D, num_stages=1):
        d = start + tl.arange(0, BLOCK_D)
        states = load_states(states_ptr, chunk, d, WIDTH, STATE_ROWS)
        own = load_states(next_states_ptr, chunk, d, WIDTH, STATE_ROWS)
        own = tl.dot(link, states, own, input_precision="tf32x3")
        store_states(next_states_ptr, chunk, own, d, WIDTH, STATE_ROWS)


@triton.jit
def real_decay(x, k, STATE_ROWS: tl.constexpr):
    """Decay over a distance x of a real state (k = 0), or of its ties (k = 1)."""
    left = exp2(x * -LOG2E)
    if STATE_ROWS > 2:  # a tie carries on while the point stays the same
        left = tl.where(k == 0, left, tl.where(x == 0, 1.0, 0.0))[:, None]
    return left


@triton.jit
def carry_in_point(points_ptr, i, rightwards, N, CHUNKS, C: tl.constexpr):
    """The point at the near end of the i-th chunk of a scan, where the carry-in is evaluated."""
    return point_at(points_ptr, tl.where(rightwards, i * C, (CHUNKS - i) * C - 1), N)


@triton.jit(do_not_specialize=("L", "CHUNKS", "SEGMENTS", "LENGTH", "D8"))
def scan_kernel(
    points_ptr,  # (B, L, N) float32
    TABLE: tl.constexpr,
    inv_bandwidth_ptr,  # (B,) float32
    states_ptr,  # (B, L, CHUNKS, STATE_ROWS, WIDTH)
    first_states_ptr,  # (B, L, CHUNKS, STATE_ROWS, WIDTH), of the κ before, if THROUGH
    links_ptr,  # (B, L, CHUNKS, STATE_ROWS, STATE_ROWS) float32, if THROUGH
    ends_ptr,  # (B, L, 2, SEGMENTS, STATE_ROWS // 2, WIDTH) float32, or None
    N, L, CHUNKS, SEGMENTS, LENGTH, D8, D: tl.constexpr, COMPLEX: tl.constexpr,
    STATE_ROWS: tl.constexpr, THROUGH: tl.constexpr, ENDS_ONLY: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr, AHEAD: tl.constexpr,
    FP32_ROWS: tl.constexpr,
):  # fmt: skip
    """Replaces the chunks' own sums by the states that enter them, in place.

    A tile is (states of one direction, columns): the poles, or the state and its ties. AHEAD chunks
    are loaded before the first of them is overwritten, so that loads overlap. THROUGH: for a real
    pole, which has two states, this kernel also does the work of `link_kernel`.

    If sequences are long and few, `ends` holds the carry-out of each segment of LENGTH chunks. A
    launch with ENDS_ONLY scans every segment with zero carry-in and writes its carry-out. The decay
    to the start of a later segment follows from the points, so the second launch scans all segments
    in parallel.
    """
    WIDTH = D if D > 0 else D8 * 8
    pair = (tl.program_id(0) // SEGMENTS).to(tl.int64)
    segment = tl.program_id(0) % SEGMENTS
    rightwards = tl.program_id(1) == 0
    points_ptr += pair * N
    states_ptr += pair * CHUNKS * STATE_ROWS * WIDTH
    if THROUGH:
        first_states_ptr += pair * CHUNKS * STATE_ROWS * WIDTH
        links_ptr += pair * CHUNKS * STATE_ROWS * STATE_ROWS
    inv_bandwidth = tl.load(inv_bandwidth_ptr + pair // L)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    k = tl.arange(0, BLOCK_R)
    if COMPLEX:
        row = 2 * k + tl.where(rightwards, 0, STATE_ROWS // 2)
        inside = (k[:, None] < STATE_ROWS // 4) & (d[None, :] < WIDTH)
        end_at = (2 * k)[:, None] * WIDTH + d[None, :]
    else:
        row = 2 * k + tl.where(rightwards, 0, 1)
        inside = (k[:, None] < STATE_ROWS // 2) & (d[None, :] < WIDTH)
        end_at = k[:, None] * WIDTH + d[None, :]
    state = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    state_im = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    begin = segment * LENGTH
    end = tl.minimum(begin + LENGTH, CHUNKS)
    if ends_ptr is not None:
        ends_ptr += (pair * 2 + tl.program_id(1)) * SEGMENTS * (STATE_ROWS // 2) * WIDTH
        if not ENDS_ONLY:
            start = carry_in_point(points_ptr, begin, rightwards, N, CHUNKS, C)
            for earlier in range(0, segment):
                left_at = carry_in_point(
                    points_ptr, (earlier + 1) * LENGTH, rightwards, N, CHUNKS, C
                )
                x = tl.abs(start - left_at) * inv_bandwidth
                leaving = ends_ptr + earlier * (STATE_ROWS // 2) * WIDTH + end_at
                end_re = tl.load(leaving, mask=inside, other=0.0)
                if COMPLEX:
                    end_im = tl.load(leaving + WIDTH, mask=inside, other=0.0)
                    decay_re, decay_im = complex_decay(
                        TABLE, x, row[:, None], STATE_ROWS, FP32_ROWS
                    )
                    state += decay_re * end_re - decay_im * end_im
                    state_im += decay_re * end_im + decay_im * end_re
                else:
                    state += real_decay(x, k, STATE_ROWS) * end_re
    for i in range(begin, end, AHEAD):
        # All loads come before the first store, because the compiler moves no load across a store.
        owns = ()
        gaps = ()
        for u in tl.static_range(AHEAD):
            here = i + u < CHUNKS
            chunk = tl.where(rightwards, i + u, CHUNKS - 1 - i - u)
            at = (chunk * STATE_ROWS + row)[:, None] * WIDTH + d[None, :]
            own = tl.load(states_ptr + at, mask=inside & here, other=0.0).to(tl.float32)
            if COMPLEX:
                owns = owns + (own, tl.load(states_ptr + at + WIDTH, mask=inside & here, other=0.0))
            else:
                if THROUGH:
                    states = first_states_ptr + chunk * STATE_ROWS * WIDTH + d
                    left = tl.load(states, mask=(d < WIDTH) & here, other=0.0).to(tl.float32)
                    right = tl.load(states + WIDTH, mask=(d < WIDTH) & here, other=0.0).to(
                        tl.float32
                    )
                    links = links_ptr + (chunk * STATE_ROWS + row) * STATE_ROWS
                    own += tl.load(links, mask=here, other=0.0)[:, None] * left[None, :]
                    own += tl.load(links + 1, mask=here, other=0.0)[:, None] * right[None, :]
                owns = owns + (own,)
            # Distances from where the state and the chunk's sums are evaluated to the near end of
            # the next chunk.
            near_end = point_at(points_ptr, chunk * C + tl.where(rightwards, 0, C - 1), N)
            far_end = point_at(points_ptr, chunk * C + tl.where(rightwards, C - 1, 0), N)
            beyond = point_at(points_ptr, chunk * C + tl.where(rightwards, C, -1), N)
            across, step = tl.abs(beyond - near_end), tl.abs(beyond - far_end)
            gaps = gaps + (across * inv_bandwidth, step * inv_bandwidth)
        for u in tl.static_range(AHEAD):
            chunk = tl.where(rightwards, i + u, CHUNKS - 1 - i - u)
            at = (chunk * STATE_ROWS + row)[:, None] * WIDTH + d[None, :]
            mask = inside & (i + u < CHUNKS)
            across, step = gaps[2 * u], gaps[2 * u + 1]
            if not ENDS_ONLY:
                tl.store(states_ptr + at, state, mask=mask)
            if COMPLEX:
                if not ENDS_ONLY:
                    tl.store(states_ptr + at + WIDTH, state_im, mask=mask)
                own, own_im = owns[2 * u], owns[2 * u + 1]
                re, im = complex_decay(TABLE, across, row[:, None], STATE_ROWS, FP32_ROWS)
                s_re, s_im = complex_decay(TABLE, step, row[:, None], STATE_ROWS, FP32_ROWS)
                next_state = re * state - im * state_im + s_re * own - s_im * own_im
                state_im = re * state_im + im * state + s_re * own_im + s_im * own
                state = next_state
            else:
                state = (
                    real_decay(across, k, STATE_ROWS) * state
                    + real_decay(step, k, STATE_ROWS) * owns[u]
                )
    if ENDS_ONLY:
        ends_ptr += segment * (STATE_ROWS // 2) * WIDTH
        tl.store(ends_ptr + end_at, state, mask=inside)
        if COMPLEX:
            tl.store(ends_ptr + end_at + WIDTH, state_im, mask=inside)


def chunk_size(ranks: int, dtype: torch.dtype) -> int:
    """Ranks per chunk: fewer for short sequences."""
    return min(CHUNK[dtype.itemsize], max(LEAST, power_of_2(ranks)))


def column_block(width: int, fp32_rows: bool) -> int:
    """Columns per block: a power of two that wastes few columns."""
    if fp32_rows:
        return min(32, max(16, power_of_2(width)))
    return 64 if width % 64 == 0 else 32


def segment_length(chunks: int, ahead: int, scans: int) -> int:
    """Chunks per scan segment: all, unless scans are few and long.

    A program reads the carry-outs of all earlier segments one at a time, and scans its own segment
    twice, `ahead` chunks at a time. The square root balances these two costs; segments are used
    only if they save time.
    """
    steps = ceil_div(chunks, ahead)
    segments = min(SCANNING // max(1, scans), math.isqrt(2 * steps))
    own = max(LEAST_LOADS, ceil_div(steps, max(1, segments)))
    worth = 2 * own + ceil_div(steps, own) < steps
    return (own if worth else steps) * ahead


@functools.cache
def state_table(metric: str, fp32_rows: bool) -> tuple[float, ...]:
    """The TABLE of :func:`espformer.ops.esp.triton.primitives.state_coefficients`.

    Eight numbers for every state row: the pole (Re, Im), then size and phase of the coefficients
    into a state, out of it, and of its slope.
    """
    table = exponential_table(metric, fp32_rows)
    numbers: list[float] = []
    for direction in (-1, 1):  # a state on the left pulls to the left
        for weight, pole in zip(table.weights, table.poles, strict=True):
            w, p = complex(weight), complex(pole)
            slope = direction * w * p
            for quarter in (0.0, math.pi / 2):  # the real part, and minus the imaginary part
                numbers += [
                    p.real, p.imag, 1.0, -quarter, abs(w), cmath.phase(w) + quarter,
                    abs(slope), cmath.phase(slope) + quarter,
                ]  # fmt: skip
    return tuple(numbers)


@dataclass(frozen=True, eq=False)  # one object for every shape: the key of what is made of it
class Chunks:
    """How the ranks of some plans are divided into chunks, and how kernels are launched on them."""

    batch: int
    slices: int
    ranks: int
    metric: str
    dtype: torch.dtype  # of the rows

    @staticmethod
    @once
    def of(shape: Shape, metric: str, dtype: torch.dtype) -> Chunks:
        """Of plans whose points are (batch, slices, ranks), on rows of this dtype."""
        batch, slices, ranks = shape
        return Chunks(batch, slices, ranks, metric, dtype)

    @functools.cached_property
    def span(self) -> int:
        """Ranks of a chunk."""
        return chunk_size(self.ranks, self.dtype)

    @functools.cached_property
    def count(self) -> int:
        """Chunks of a sequence."""
        return ceil_div(self.ranks, self.span)

    @functools.cached_property
    def fp32_rows(self) -> bool:
        return self.dtype.itemsize == 4

    @functools.cached_property
    def complex(self) -> bool:
        """Whether poles are complex numbers."""
        return self.metric != "absolute"

    @property
    def table(self) -> tuple[float, ...]:
        return state_table(self.metric, self.fp32_rows)

    def state_rows(self, ties: bool) -> int:
        """State rows per chunk, both directions together; zero if there is only one chunk.

        Only the absolute metric treats ties separately.
        """
        if self.count == 1:
            return 0
        if self.metric == "absolute":
            return 4 if ties else 2
        return 4 * len(exponential_table(self.metric, self.fp32_rows).poles)

    def state_dtype(self) -> torch.dtype:
        """The dtype of states: 16 bits for 16-bit rows and a real pole; float32 if large weights
        cancel.

        The interpreter has no bfloat16, and takes float32 for what needs its range
        (`to_wide_range`).
        """
        short = not self.fp32_rows and not self.complex and not INTERPRETED
        return torch.bfloat16 if short else torch.float32

    def scratch_bytes(self, width: int, backward: bool) -> int:
        """Scratch memory of one slice: its states, and rows of its own if it must not add them."""
        rows = self.state_rows(ties=backward)
        each = width * self.state_dtype().itemsize + rows * 4
        scratch = (4 if backward else 2) * self.count * rows * each
        if torch.are_deterministic_algorithms_enabled():
            scratch += (2 if backward else 1) * self.ranks * width * 4
        return scratch

    def by_chunk(self, total: Tensor) -> Tensor:
        """A buffer for one sum per chunk; if there is only one chunk, the buffer of the total
        itself.
        """
        if self.count == 1:
            return total
        return total.new_empty(self.batch, self.slices, self.count)

    def launches(self, kernel: Any, name: str, width: int, **options: Any) -> list[Launch]:
        """Launches of a kernel on all chunks, or on the full ones and on the last one apart.

        Masks cost a sixth of all instructions (in `sums` less than another launch), and a short
        last chunk does not need a program for 64 ranks.
        """
        block_d = column_block(width, self.fp32_rows)
        full = self.ranks // self.span if width % block_d == 0 else 0
        parts = [(0, self.count, self.span)]
        if 0 < full < self.count:
            rest = chunk_size(self.ranks % self.span, self.dtype)
            if rest < self.span or (full > 1 and name != "sums"):
                parts = [(0, full, self.span), (full, 1, rest)]
        launches = []
        for start, count, ranks in parts:
            launch = Launch(
                kernel, (self.batch * self.slices * count,), N=self.ranks, HEADS=self.batch,
                L=self.slices, CHUNKS=self.count, START=start, COUNT=count, TABLE=self.table,
                COMPLEX=self.complex, BLOCK_D=block_d, SPAN=self.span, C=ranks,
                EVEN=start + count <= full, **width_arguments(width), **options,
                **self._tuned(name, ranks),
            )  # fmt: skip
            launches.append(launch)
        return launches

    def _tuned(self, name: str, ranks: int) -> dict[str, int]:
        """Warps per program, and registers per thread, for this number of ranks."""
        if self.fp32_rows:
            return {"num_warps": 1 if name == "sums" else 2}
        warps = ranks // 16
        if name == "sums":
            warps = min(warps, SUMMING_WARPS[self.metric])
        return {"num_warps": warps, "maxnreg": REGISTERS[self.metric][name]}


def chunk_states(
    chunks: Chunks, plan: Plan, x: Tensor, through: bool, ties: bool
) -> tuple[Tensor | None, Tensor | None]:
    """States of rows x of the keys for κ_k and, `through` it, of ``mid_scale · κ_k x`` for κ_q.

    (batch, L, chunks, state rows, width) each; None where there is one chunk.
    """
    _, tokens, width = x.shape
    rows = chunks.state_rows(ties)
    if rows == 0:
        return None, None
    shape = (chunks.batch, chunks.slices, chunks.count, rows)
    states = torch.empty(*shape, width, device=x.device, dtype=chunks.state_dtype())
    after = links = None
    if through:
        after = torch.empty_like(states)
        links = torch.empty(*shape, rows, device=x.device, dtype=torch.float32)
    for sums in _sums(chunks, rows, tokens, width, through):
        sums(
            x, plan.key_order, plan.key_scale, plan.key_points, plan.query_points, plan.mid_scale,
            plan.inv_bandwidth, states, after, links,
        )  # fmt: skip
    _scan(chunks, plan.key_points, plan.inv_bandwidth, states, None, None)
    if after is not None and chunks.complex:
        _link(chunks, rows, width)(states, after, links)
        _scan(chunks, plan.query_points, plan.inv_bandwidth, after, None, None)
    elif after is not None:
        _scan(chunks, plan.query_points, plan.inv_bandwidth, after, states, links)
    return states, after


@once
def _sums(chunks: Chunks, rows: int, tokens: int, width: int, through: bool) -> list[Launch]:
    return chunks.launches(
        sums_kernel, "sums", width, TOKENS=tokens, STATE_ROWS=rows, THROUGH=through
    )


@once
def _link(chunks: Chunks, rows: int, width: int) -> Launch:
    return Launch(
        link_kernel, (chunks.batch * chunks.slices * chunks.count,), STATE_ROWS=rows,
        BLOCK_D=column_block(width, chunks.fp32_rows), num_warps=1, **width_arguments(width),
    )  # fmt: skip


def _scan(
    chunks: Chunks, points: Tensor, inv_bandwidth: Tensor, states: Tensor, before: Tensor | None,
    links: Tensor | None,
) -> None:  # fmt: skip
    """Replaces the sums of every chunk by the states that enter it, in place."""
    rows, width = states.shape[-2:]
    segments, scans = _scans(chunks, rows, width, before is not None)
    ends = None
    if segments > 1:
        shape = (chunks.batch * chunks.slices, 2, segments, rows // 2, width)
        ends = states.new_empty(shape, dtype=torch.float32)
    for scan in scans:
        scan(points, inv_bandwidth, states, before, links, ends)


@once
def _scans(chunks: Chunks, rows: int, width: int, through: bool) -> tuple[int, list[Launch]]:
    """Segments that are scanned at the same time, and launches: of several, their ends first."""
    block_d = min(64, max(16, power_of_2(width)))
    ahead = min(AHEAD[chunks.complex], power_of_2(chunks.count))
    pairs, columns = chunks.batch * chunks.slices, ceil_div(width, block_d)
    length = segment_length(chunks.count, ahead, 2 * pairs * columns)
    segments = ceil_div(chunks.count, length)
    launches = []
    for ends_only in (False,) if segments == 1 else (True, False):
        launch = Launch(
            scan_kernel, (pairs * segments, 2, columns), TABLE=chunks.table, N=chunks.ranks,
            L=chunks.slices, CHUNKS=chunks.count, SEGMENTS=segments, LENGTH=length,
            COMPLEX=chunks.complex, STATE_ROWS=rows, THROUGH=through, ENDS_ONLY=ends_only,
            BLOCK_R=power_of_2(rows // (4 if chunks.complex else 2)), BLOCK_D=block_d,
            C=chunks.span, AHEAD=ahead, FP32_ROWS=chunks.fp32_rows, num_warps=1,
            **width_arguments(width),
        )  # fmt: skip
        launches.append(launch)
    return segments, launches
