"""Launches of the chunk kernels: the sorted kernel of some slices, on the GPU."""

from __future__ import annotations

import cmath
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from espformer.ops.exponentials import ABSOLUTE, GAUSSIAN, ExponentialSum
from espformer.ops.triton.chunks import inflow_kernel, scan_kernel
from espformer.ops.triton.grad import grad_kernel
from espformer.ops.triton.mix import mix_kernel

# Ranks of a chunk for 16-bit and for 32-bit rows (those are split in three: registers are short).
CHUNK = {2: 64, 4: 16}
# Chunks whose states are loaded together when they are scanned.
AHEAD = 8


@dataclass(frozen=True)
class Rows:
    """Rows of an operand: of tokens, read through a permutation, or in rank order; maybe scaled."""

    data: Tensor  # (batch, N, width) with an order, else (batch, L, N, width)
    order: Tensor | None = None  # (batch, L, N) int32
    scale: Tensor | None = None  # (batch, L, N)


def exponentials(metric: str, exact: bool) -> ExponentialSum:
    """The table of a metric, as exact as float32 or as 16-bit rows deserve."""
    return ABSOLUTE if metric == "absolute" else GAUSSIAN[4 if exact else 3]


@functools.cache
def state_table(metric: str, exact: bool) -> tuple[float, ...]:
    """What :func:`espformer.ops.triton.chunks.waves` reads: eight numbers for every state row.

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


class SortedSlices:
    """``κ`` of (batch, L, N) sorted numbers, for operands of any width.

    The same contract as :class:`espformer.ops.sorted_kernel.SortedKernel`, its torch twin, but for
    the permutations, which the kernels apply while they load and store rows.
    """

    def __init__(
        self, values: Tensor, inverse_width: Tensor, metric: str, dtype: torch.dtype
    ) -> None:
        self.values, self.inverse_width = values, inverse_width
        self.batch, self.slices, self.ranks = values.shape
        self.complex = metric != "absolute"
        self.chunk, self.exact = CHUNK[dtype.itemsize], dtype.itemsize == 4
        self.poles = len(exponentials(metric, self.exact).poles)
        self.table = state_table(metric, self.exact)
        self.chunks = triton.cdiv(self.ranks, self.chunk)

    def rows(self, ties: bool) -> int:
        """State rows per chunk, both sides together."""
        return 4 * self.poles if self.complex else 2 + 2 * ties

    def new_states(self, like: Tensor, ties: bool = False) -> Tensor:
        """Room for states, (batch, L, chunks, rows, width)."""
        shape = (self.batch, self.slices, self.chunks, self.rows(ties), like.shape[-1])
        return torch.empty(shape, device=like.device, dtype=torch.float32)

    def _config(self, width: int) -> dict[str, Any]:
        block_d = max(16, triton.next_power_of_2(width))
        return {
            "N": self.ranks, "HEADS": self.batch, "L": self.slices, "CHUNKS": self.chunks,
            "D": width, "COMPLEX": self.complex, "BLOCK_D": block_d, "C": self.chunk,
            "EVEN": block_d == width and self.ranks % self.chunk == 0,
            "num_warps": max(2, block_d // 32) if self.exact else 8 if block_d > 128 else 4,
        }  # fmt: skip

    @property
    def _grid(self) -> tuple[int]:
        return (self.batch * self.slices * self.chunks,)

    def states(self, x: Rows, ties: bool = False) -> Tensor:
        """The states that enter every chunk: (batch, L, chunks, rows, width)."""
        states = self.new_states(x.data, ties)
        inflow_kernel[self._grid](
            x.data, x.order, x.scale, self.values, self.table, self.inverse_width, states,
            ROWS=self.rows(ties), GATHER=x.order is not None,
            SCALED=x.scale is not None, **self._config(x.data.shape[-1]),
        )  # fmt: skip
        return self.scan(states, ties)

    def scan(self, states: Tensor, ties: bool = False) -> Tensor:
        """Every chunk's own sums to the states that enter it, in place."""
        config = self._config(states.shape[-1])
        del config["EVEN"], config["num_warps"], config["HEADS"]
        config["BLOCK_D"] = block_d = min(64, config["BLOCK_D"])
        block_r = triton.next_power_of_2(self.poles if self.complex else 1 + ties)
        grid = (self.batch * self.slices, 2, triton.cdiv(states.shape[-1], block_d))
        scan_kernel[grid](
            self.values, self.table, self.inverse_width, states, ROWS=self.rows(ties),
            BLOCK_R=block_r, AHEAD=AHEAD, EXACT=self.exact, num_warps=1, **config,
        )  # fmt: skip
        return states

    def mix(
        self, x: Rows, states: Tensor, scale: Tensor | None, to: str, out: Tensor, *,
        weight: Tensor | None = None, order: Tensor | None = None, dot: Tensor | None = None,
        into: SortedSlices | None = None, into_states: Tensor | None = None,
    ) -> None:  # fmt: skip
        """``scale · weight · κx`` to `out`: stored by rank, added by token, or dotted into `dot`.

        Rows stored by rank that are the operand of another kernel leave its chunks' own sums in
        `into_states`, to be scanned.
        """
        rows = 0 if into_states is None else into_states.shape[-2]
        mix_kernel[self._grid](
            x.data, x.order, x.scale, self.values, self.table, self.inverse_width, states, scale,
            weight, out, order, dot, None if into is None else into.values, into_states,
            ROWS=states.shape[-2], GATHER=x.order is not None,
            SCALED=x.scale is not None, HAS_SCALE=scale is not None, WEIGHTED=weight is not None,
            TO=to, NEXT_ROWS=rows,
            **self._config(x.data.shape[-1]),
        )  # fmt: skip

    def dot(
        self, x: Rows, states: Tensor, scale: Tensor | None, y: Tensor, order: Tensor
    ) -> Tensor:
        """``Σ_n scale_n (κx)_n · y[order_n]`` for every slice: (batch, L)."""
        partial = self.values.new_empty(self.batch, self.slices, self.chunks)
        self.mix(x, states, scale, "dot", y, order=order, dot=partial)
        return partial.sum(-1)

    def grad(
        self, x: Rows, p: Rows, x_states: Tensor, p_states: Tensor, slope: Tensor, *,
        scale: Tensor | None = None, weight: Tensor | None = None, agree: Tensor | None = None,
        align: Tensor | None = None, to: str = "nowhere", out: Tensor | None = None,
        order: Tensor | None = None, into: SortedSlices | None = None,
        into_states: Tensor | None = None,
    ) -> None:  # fmt: skip
        """The slope in the numbers and ``scale · weight · κp``; both states with their ties."""
        config = self._config(x.data.shape[-1])
        if x.data.element_size() == 2 and config["BLOCK_D"] <= 64:
            config["maxnreg"] = 160 if self.complex else 128  # one more program per multiprocessor
        grad_kernel[self._grid](
            x.data, x.order, x.scale, p.data, p.order, p.scale, self.values, self.table,
            self.inverse_width, x_states, p_states, scale, weight, slope, agree, align, out, order,
            None if into is None else into.values, into_states,
            ROWS=x_states.shape[-2],
            X_GATHER=x.order is not None, X_SCALED=x.scale is not None,
            P_GATHER=p.order is not None, P_SCALED=p.scale is not None, HAS_SCALE=scale is not None,
            WEIGHTED=weight is not None, HAS_AGREE=agree is not None, HAS_ALIGN=align is not None,
            TO=to, NEXT_ROWS=0 if into_states is None else into_states.shape[-2], **config,
        )  # fmt: skip
