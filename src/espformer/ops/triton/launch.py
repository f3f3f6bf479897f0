"""Launches of the chunk kernels: the sorted kernel of some slices, on the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from espformer.ops.exponentials import ABSOLUTE, GAUSSIAN
from espformer.ops.triton.chunks import decay_kernel, inflow_kernel, scan_kernel
from espformer.ops.triton.grad import grad_kernel
from espformer.ops.triton.mix import mix_kernel

CHUNK = 16
# Chunks whose states are loaded together when they are scanned, for real and for complex poles.
AHEAD = (8, 2)
# Elements of a (slices, columns) tile that one warp holds per rank: what fits in registers.
TILES = {"inflow": 256, "scan": 64, "mix": 128, "grad": 64}


@dataclass(frozen=True)
class Rows:
    """Rows of an operand: of tokens, read through a permutation, or in rank order; maybe scaled."""

    data: Tensor  # (batch, N, width) with an order, else (batch, L, N, width)
    order: Tensor | None = None  # (batch, L, N) int32
    scale: Tensor | None = None  # (batch, L, N)


class SortedSlices:
    """``κ`` of (batch, L, N) sorted numbers, for operands of any width.

    The same contract as :class:`espformer.ops.sorted_kernel.SortedKernel`, its torch twin, but for
    the permutations, which the kernels apply while they load and store rows.
    """

    def __init__(self, values: Tensor, inverse_width: Tensor, metric: str, pairs: int = 4) -> None:
        self.values, self.metric = values, metric
        self.batch, self.slices, self.ranks = values.shape
        self.inverse_width = inverse_width.expand(self.batch).contiguous()
        table = ABSOLUTE if metric == "absolute" else GAUSSIAN[pairs]
        self.complex, self.poles = metric != "absolute", len(table.poles)
        self.table = tuple(
            number
            for w, p in zip(table.weights, table.poles, strict=True)
            for number in (complex(w).real, complex(w).imag, complex(p).real, complex(p).imag)
        )
        self.decay = values
        if not self.complex:
            self.decay = torch.empty_like(values)
            block = min(1024, triton.next_power_of_2(self.ranks))
            decay_kernel[(triton.cdiv(self.ranks, block), self.batch * self.slices)](
                values, self.inverse_width, self.decay, self.ranks, self.slices, BLOCK=block
            )

    def _rows(self, ties: bool) -> int:
        return 2 * self.poles if self.complex else 1 + ties

    def _config(
        self, width: int, kernel: str, ties: bool = False
    ) -> tuple[dict[str, Any], int, dict[str, Any]]:
        """Launch parameters: compile-time ones, tiles of (batch, slices), run-time sizes."""
        block_d = triton.next_power_of_2(width)
        elements = TILES[kernel]
        warps = max(1, block_d // elements)
        block_l = max(1, min(triton.next_power_of_2(self.slices), warps * elements // block_d))
        chunks = triton.cdiv(self.ranks, CHUNK)
        meta = {"BLOCK_L": block_l, "BLOCK_D": block_d, "C": CHUNK, "num_warps": warps, "D": width}
        meta |= {"TABLE": self.table, "POLES": self.poles, "COMPLEX": self.complex}
        if kernel != "scan":
            meta["EVEN"] = block_d == width and self.ranks % CHUNK == 0
        side = self.batch * self.slices * chunks * self._rows(ties) * width
        sizes = {"N": self.ranks, "L": self.slices, "CHUNKS": chunks, "SIDE": side}
        return meta, self.batch * triton.cdiv(self.slices, block_l), sizes

    def states(self, x: Rows, ties: bool = False) -> Tensor:
        """The states that enter every chunk: (2, batch, L, chunks, rows, width)."""
        width = x.data.shape[-1]
        meta, tiles, sizes = self._config(width, "inflow", ties)
        rows = self._rows(ties)
        states = x.data.new_empty(
            2, self.batch, self.slices, sizes["CHUNKS"], rows, width, dtype=torch.float32
        )
        inflow_kernel[(tiles, sizes["CHUNKS"])](
            x.data, x.order, x.scale, self.values, self.decay, self.inverse_width, states, **sizes,
            GATHER=x.order is not None, SCALED=x.scale is not None, TIES=ties, **meta,
        )  # fmt: skip
        meta, tiles, sizes = self._config(width, "scan", ties)
        scan_kernel[(tiles, 2)](
            self.values,
            self.inverse_width,
            states,
            **sizes,
            TIES=ties,
            AHEAD=AHEAD[self.complex],
            **meta,
        )
        return states

    def mix(
        self, x: Rows, states: Tensor, scale: Tensor | None, to: str, out: Tensor | None,
        order: Tensor | None = None, dot: Tensor | None = None,
    ) -> None:  # fmt: skip
        """``scale · κx`` into `out`: stored by rank, added by token, or multiplied into `dot`."""
        meta, tiles, sizes = self._config(x.data.shape[-1], "mix")
        mix_kernel[(tiles, sizes["CHUNKS"])](
            x.data, x.order, x.scale, self.values, self.decay, self.inverse_width, states, scale,
            out, order, dot, **sizes, GATHER=x.order is not None, SCALED=x.scale is not None,
            HAS_SCALE=scale is not None, TO=to, **meta,
        )  # fmt: skip

    def dot(self, x: Rows, scale: Tensor | None, y: Tensor, order: Tensor) -> Tensor:
        """``Σ_n scale_n (κx)_n · y[order_n]`` for every slice: (batch, L)."""
        chunks = self._config(x.data.shape[-1], "mix")[2]["CHUNKS"]
        partial = self.values.new_empty(self.batch, self.slices, chunks)
        self.mix(x, self.states(x), scale, "dot", y, order, partial)
        return partial.sum(-1)

    def grad(
        self, x: Rows, p: Rows, x_states: Tensor, p_states: Tensor, slope: Tensor, *,
        scale: Tensor | None = None, agree: Tensor | None = None, align: Tensor | None = None,
        to: str = "nowhere", out: Tensor | None = None, order: Tensor | None = None,
    ) -> None:  # fmt: skip
        """The slope in the numbers and ``scale · κp``; both states with their ties."""
        meta, tiles, sizes = self._config(x.data.shape[-1], "grad", ties=True)
        grad_kernel[(tiles, sizes["CHUNKS"])](
            x.data, x.order, x.scale, p.data, p.order, p.scale, self.values, self.decay,
            self.inverse_width, x_states, p_states, scale, slope, agree, align, out, order, **sizes,
            X_GATHER=x.order is not None, X_SCALED=x.scale is not None,
            P_GATHER=p.order is not None, P_SCALED=p.scale is not None, HAS_SCALE=scale is not None,
            HAS_AGREE=agree is not None, HAS_ALIGN=align is not None, TO=to, **meta,
        )  # fmt: skip
