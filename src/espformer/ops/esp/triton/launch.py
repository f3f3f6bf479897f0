"""Launches of the chunk kernels: the plans of some slices, on the GPU."""

from __future__ import annotations

import cmath
import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from espformer.ops.common.sizes import ceil_div, power_of_2
from espformer.ops.esp.exponentials import ABSOLUTE, GAUSSIAN, ExponentialSum
from espformer.ops.esp.triton.apply import apply_kernel, cross_kernel
from espformer.ops.esp.triton.instructions import INTERPRETED
from espformer.ops.esp.triton.states import link_kernel, scan_kernel, sums_kernel

# Ranks of a chunk for 16-bit and for 32-bit rows (those are split in three: registers are short).
CHUNK = {2: 64, 4: 16}
LEAST = 16  # the fewest that tensor cores take
# Chunks whose states are loaded together when they are scanned: real ones, complex ones.
AHEAD = 8, 4
# Programs that scan at the same time, if sequences are long enough: each is to load so many times.
SCANNING = 2048
LEAST_LOADS = 8
# For 16-bit rows: warps that sum a chunk (other programs have one for 16 ranks), and registers of a
# thread. "rows" is a plan applied, "grad" has the slope and either rows or scales, "all" has all
# three. More registers, and fewer programs fit on a multiprocessor.
SUMMING_WARPS = {"absolute": 1, "squared": 2}
REGISTERS = {
    "absolute": {"sums": 128, "rows": 96, "cross": 128, "grad": 128, "all": 168},
    "squared": {"sums": 160, "rows": 128, "cross": 128, "grad": 128, "all": 168},
}


def chunk_size(ranks: int, dtype: torch.dtype) -> int:
    """Ranks of a chunk: fewer where there are not so many."""
    return min(CHUNK[dtype.itemsize], max(LEAST, power_of_2(ranks)))


def column_block(width: int, exact: bool) -> int:
    """Columns that a program holds at once, a power of two that wastes little."""
    if exact:
        return min(32, max(16, power_of_2(width)))
    return 64 if width % 64 == 0 else 32


def segment_length(chunks: int, ahead: int, walks: int) -> int:
    """Chunks that a program scans: all, unless walks are few and long.

    A program looks at the ends of all segments before its own, one at a time, and walks its own
    twice, `ahead` chunks at a time: the square root balances the two, and has to be worth it.
    """
    steps = ceil_div(chunks, ahead)
    segments = min(SCANNING // max(1, walks), math.isqrt(2 * steps))
    own = max(LEAST_LOADS, ceil_div(steps, max(1, segments)))
    worth = 2 * own + ceil_div(steps, own) < steps
    return (own if worth else steps) * ahead


class Ranks(NamedTuple):
    """Queries or keys of some slices, (batch, L, N), by rank."""

    values: Tensor
    order: Tensor  # the token of each rank, int32
    factor: Tensor | None  # towards the tokens: `first` of the keys, `final` of the queries


class Gradients(NamedTuple):
    """Room for what the backward of plans finds; None where there is nothing to differentiate."""

    weight: Tensor | None  # (batch, L)
    width: Tensor | None  # (batch, L): of the inverse width; all others (batch, L, N)
    query_values: Tensor
    key_values: Tensor
    scale: Tensor
    first: Tensor | None
    final: Tensor | None


def exponentials(metric: str, exact: bool) -> ExponentialSum:
    """The table of a metric, as exact as float32 or as 16-bit rows deserve."""
    return ABSOLUTE if metric == "absolute" else GAUSSIAN[4 if exact else 3]


@functools.cache
def state_table(metric: str, exact: bool) -> tuple[float, ...]:
    """What :func:`espformer.ops.esp.triton.chunks.waves` reads: eight numbers for every state row.

    The pole (Re, Im), then size and phase of the waves into a state, out of it, and of its slope.
    """
    table = exponentials(metric, exact)
    numbers: list[float] = []
    for side in (-1, 1):  # a state on the left pulls to the left
        for weight, pole in zip(table.weights, table.poles, strict=True):
            w, p = complex(weight), complex(pole)
            slope = side * w * p
            for quarter in (0.0, math.pi / 2):  # the real part, and minus the imaginary part
                numbers += [
                    p.real, p.imag, 1.0, -quarter, abs(w), cmath.phase(w) + quarter,
                    abs(slope), cmath.phase(slope) + quarter,
                ]  # fmt: skip
    return tuple(numbers)


def _state_rows(metric: str, exact: bool, ties: bool) -> int:
    """State rows of a chunk, both sides together; only the absolute metric minds ties."""
    if metric == "absolute":
        return 4 if ties else 2
    return 4 * len(exponentials(metric, exact).poles)


def _state_dtype(x: Tensor, metric: str) -> torch.dtype:
    """Of states: they meet 16-bit waves as 16-bit numbers, unless large weights cancel in them.

    The interpreter has no bfloat16, and takes float32 for what needs its range (`roomy`).
    """
    short = x.element_size() == 2 and metric == "absolute" and not INTERPRETED
    return torch.bfloat16 if short else torch.float32


class PlanKernels:
    """The plans of some slices, ``final · κ_q · scale · κ_k · first``, and what is done with them.

    All numbers are (batch, L, N) by rank: rank n of the queries meets rank n of the keys. The torch
    twin of κ is :class:`espformer.ops.esp.sorted_kernel.SortedKernel`.
    """

    def __init__(
        self, dtype: torch.dtype, metric: str, query_values: Tensor, key_values: Tensor,
        query_order: Tensor, key_order: Tensor, inverse_width: Tensor, scale: Tensor,
        first: Tensor | None, final: Tensor | None,
    ) -> None:  # fmt: skip
        self.keys = Ranks(key_values, key_order, first)
        self.queries = Ranks(query_values, query_order, final)
        self.scale = scale
        self.inverse_width = inverse_width
        self.batch, self.slices, self.ranks = key_values.shape
        self.metric, self.complex = metric, metric != "absolute"
        self.exact = dtype.itemsize == 4
        self.chunk = chunk_size(self.ranks, dtype)
        self.table = state_table(metric, self.exact)
        self.chunks = ceil_div(self.ranks, self.chunk)

    @staticmethod
    def scratch_bytes(x: Tensor, values: Tensor, metric: str, backward: bool) -> int:
        """What one slice takes: its states, and rows of its own if it must not add them."""
        ranks = values.shape[-1]
        chunks = ceil_div(ranks, chunk_size(ranks, x.dtype))
        rows = 0 if chunks == 1 else _state_rows(metric, x.element_size() == 4, backward)
        each = x.shape[-1] * _state_dtype(x, metric).itemsize + rows * 4
        bytes_ = (4 if backward else 2) * chunks * rows * each
        if torch.are_deterministic_algorithms_enabled():
            bytes_ += (2 if backward else 1) * ranks * x.shape[-1] * 4
        return bytes_

    def apply(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """Adds ``Σ_l weight_l plan_l x`` to `out`, or to a row per slice if it has slices."""
        states = self._states(self.keys, x, self.queries, ties=False)
        self._apply(self.keys, self.queries, x, weight, states, out)

    def cross(self, g: Tensor, x: Tensor, out: Tensor) -> None:
        """``⟨g, plan_l x⟩`` of every slice to `out`, (batch, L)."""
        x_states, _ = self._states(self.keys, x, None, ties=False)
        g_states, _ = self._states(self.queries, g, None, ties=False)
        keys, queries = self.keys, self.queries
        totals = self._by_chunk(out)
        self._launch(
            cross_kernel, "cross", x,
            x, keys.order, keys.factor, keys.values, g, queries.order, queries.factor,
            queries.values, self.scale, self.table, self.inverse_width, x_states, g_states,
            totals, KEYS=x.shape[-2], QUERIES=g.shape[-2], ROWS=self._rows(ties=False),
        )  # fmt: skip
        if self.chunks > 1:
            torch.sum(totals, -1, out=out)

    def grad(
        self, g: Tensor, x: Tensor, weight: Tensor, dx: Tensor, dg: Tensor | None, found: Gradients
    ) -> None:
        """Gradients of ``Σ_l weight_l ⟨g, plan_l x⟩``: adds to dx and dg, writes to `found`."""
        x_states = self._states(self.keys, x, self.queries, ties=True)
        g_states = self._states(self.queries, g, self.keys, ties=True)
        totals = None if found.weight is None else self._by_chunk(found.weight)
        stretch = of_queries = of_keys = None
        if found.width is not None:
            stretch = self.scale.new_empty(2, self.batch, self.slices, self.chunks)
            of_queries, of_keys = stretch.unbind(0)
        self._apply(
            self.keys, self.queries, x, weight, x_states, dg, g, g_states[0], found.query_values,
            found.final, found.scale, totals, of_queries,
        )  # fmt: skip
        self._apply(
            self.queries, self.keys, g, weight, g_states, dx, x, x_states[0], found.key_values,
            found.first, stretch=of_keys,
        )  # fmt: skip
        if totals is not None and self.chunks > 1:
            torch.sum(totals, -1, out=found.weight)
        if found.width is not None and stretch is not None:
            torch.sum(stretch, (0, -1), out=found.width)
            if self.chunks > 1:
                over = self._over_chunks(self.queries.values, x_states[1], g_states[0])
                over += self._over_chunks(self.keys.values, g_states[1], x_states[0])
                found.width.addcmul_(weight, over)

    def _apply(
        self, keys: Ranks, queries: Ranks, x: Tensor, weight: Tensor,
        states: tuple[Tensor | None, Tensor | None], out: Tensor | None, g: Tensor | None = None,
        g_states: Tensor | None = None, d_values: Tensor | None = None,
        d_final: Tensor | None = None, d_scale: Tensor | None = None,
        totals: Tensor | None = None, stretch: Tensor | None = None,
    ) -> None:  # fmt: skip
        """The plan from one side to the other, and with g its gradients on the other side."""
        name = "rows" if g is None else "grad" if out is None or d_scale is None else "all"
        rows = out if g is None else g
        assert rows is not None
        self._launch(
            apply_kernel, name, x,
            x, keys.order, keys.factor, keys.values, queries.order, queries.factor,
            queries.values, self.scale, self.table, self.inverse_width, weight, *states, out,
            g, g_states, d_values, d_final, d_scale, totals, stretch,
            KEYS=x.shape[-2], QUERIES=rows.shape[-2],
            ROWS=self._rows(ties=g is not None), ATOMIC=out is None or out.dim() == 3,
        )  # fmt: skip

    def _over_chunks(self, values: Tensor, x: Tensor | None, y: Tensor | None) -> Tensor:
        """What the way over whole chunks gives to the gradient of the inverse width: (batch, L).

        It is the force between what stands left and right of a chunk, known by the states of the
        two operands, times the way from the end of the chunk before to its own.
        """
        assert x is not None
        assert y is not None
        first, last = values[..., :: self.chunk], values[..., self.chunk - 1 :: self.chunk]
        if self.ranks % self.chunk:
            last = torch.cat([last, values[..., -1:]], -1)
        before = torch.cat([first[..., :1], last[..., :-1]], -1)
        span = ((last - first) * self.inverse_width.view(-1, 1, 1)).clamp(max=40)
        table = exponentials(self.metric, self.exact)
        (x_left, x_right), (y_left, y_right) = self._sides(x), self._sides(y)
        meeting = (x_left * y_right + y_left * x_right).sum(-1)
        force = torch.zeros_like(span)
        for r, (weight, pole) in enumerate(zip(table.weights, table.poles, strict=True)):
            # Numbers of Python: a tensor made of them would be copied to the device.
            passing = torch.exp(span * -pole) * meeting[..., r] * (-weight * pole)
            force += passing.real if self.complex else passing
        return (force * (last - before)).sum(-1)

    def _sides(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """States from the left and from the right, (batch, L, chunks, poles, width)."""
        if not self.complex:
            return states[..., :1, :].float(), states[..., 1:2, :].float()
        parts = states.unflatten(-2, (2, -1, 2))
        left, right = torch.complex(parts[..., 0, :], parts[..., 1, :]).unbind(-3)
        return left, right

    def _rows(self, ties: bool) -> int:
        """State rows of a chunk; none where one chunk has all ranks."""
        return 0 if self.chunks == 1 else _state_rows(self.metric, self.exact, ties)

    def _by_chunk(self, total: Tensor) -> Tensor:
        """Room for a sum per chunk: that of the total itself, if there is only one."""
        if self.chunks == 1:
            return total
        return total.new_empty(self.batch, self.slices, self.chunks)

    def _launch(self, kernel: Any, name: str, x: Tensor, *args: Any, **options: Any) -> None:
        """Launches a kernel on all chunks, or on the full ones and on the last one apart.

        Masks cost a sixth of all instructions (of `sums`, less than another launch), and a few
        ranks that are left need no program for 64.
        """
        width = x.shape[-1]
        block_d = column_block(width, self.exact)
        full = self.ranks // self.chunk if width % block_d == 0 else 0
        parts = [(0, self.chunks, self.chunk)]
        if 0 < full < self.chunks:
            rest = chunk_size(self.ranks % self.chunk, x.dtype)
            if rest < self.chunk or (full > 1 and name != "sums"):
                parts = [(0, full, self.chunk), (full, 1, rest)]
        for start, count, ranks in parts:
            kernel[(self.batch * self.slices * count,)](
                *args, N=self.ranks, HEADS=self.batch, L=self.slices, CHUNKS=self.chunks,
                START=start, COUNT=count, D=width, COMPLEX=self.complex, BLOCK_D=block_d,
                SPAN=self.chunk, C=ranks, EVEN=start + count <= full, **options,
                **self._tuned(name, ranks),
            )  # fmt: skip

    def _tuned(self, name: str, ranks: int) -> dict[str, int]:
        """Warps of a program that has so many ranks, and registers of a thread."""
        if self.exact:
            return {"num_warps": 1 if name == "sums" else 2}
        warps = ranks // 16
        if name == "sums":
            warps = min(warps, SUMMING_WARPS[self.metric])
        return {"num_warps": warps, "maxnreg": REGISTERS[self.metric][name]}

    def _states(
        self, side: Ranks, x: Tensor, onward: Ranks | None, ties: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """States of rows x for κ of a side, and of ``scale · κx`` for κ of the side after it."""
        rows = self._rows(ties)
        if rows == 0:
            return None, None
        shape = (self.batch, self.slices, self.chunks, rows)
        states = torch.empty(
            *shape, x.shape[-1], device=x.device, dtype=_state_dtype(x, self.metric)
        )
        after = links = None
        if onward is not None:
            after = torch.empty_like(states)
            links = torch.empty(*shape, rows, device=x.device, dtype=torch.float32)
        other = side if onward is None else onward
        self._launch(
            sums_kernel, "sums", x,
            x, side.order, side.factor, side.values, other.values, self.scale,
            self.table, self.inverse_width, states, after, links, TOKENS=x.shape[-2], ROWS=rows,
            THROUGH=onward is not None,
        )  # fmt: skip
        self._scan(side, states, None, None)
        if after is not None and self.complex:
            block_d = column_block(x.shape[-1], self.exact)
            link_kernel[(self.batch * self.slices * self.chunks,)](
                states, after, links, D=x.shape[-1], ROWS=rows, BLOCK_D=block_d, num_warps=1
            )
            self._scan(other, after, None, None)
        elif after is not None:
            self._scan(other, after, states, links)
        return states, after

    def _scan(
        self, side: Ranks, states: Tensor, before: Tensor | None, links: Tensor | None
    ) -> None:
        """Every chunk's own sums to the states that enter it, in place."""
        rows, width = states.shape[-2:]
        block_d = min(64, max(16, power_of_2(width)))
        ahead = min(AHEAD[self.complex], power_of_2(self.chunks))
        pairs, columns = self.batch * self.slices, ceil_div(width, block_d)
        length = segment_length(self.chunks, ahead, 2 * pairs * columns)
        segments = ceil_div(self.chunks, length)
        ends = None
        if segments > 1:
            ends = states.new_empty(pairs, 2, segments, rows // 2, width, dtype=torch.float32)
        for survey in (False,) if ends is None else (True, False):
            scan_kernel[(pairs * segments, 2, columns)](
                side.values, self.table, self.inverse_width, states, before, links, ends,
                N=self.ranks, L=self.slices, CHUNKS=self.chunks, SEGMENTS=segments, LENGTH=length,
                D=width, COMPLEX=self.complex, ROWS=rows, THROUGH=before is not None,
                SURVEY=survey, BLOCK_R=power_of_2(rows // (4 if self.complex else 2)),
                BLOCK_D=block_d, C=self.chunk, AHEAD=ahead, EXACT=self.exact, num_warps=1,
            )  # fmt: skip
