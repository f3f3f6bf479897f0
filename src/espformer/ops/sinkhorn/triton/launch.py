"""Tile sizes and launches of the Sinkhorn kernels."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from espformer.ops.common.sizes import ceil_div, power_of_2
from espformer.ops.sinkhorn.triton.backward import (
    delta_kernel,
    factors_kernel,
    pull_kernel,
    score_grad_kernel,
    value_grad_kernel,
)
from espformer.ops.sinkhorn.triton.forward import output_kernel, potential_kernel

__all__ = ["ABSENT", "WIDEST", "Sides", "constants", "rank_of"]

WIDEST = 256
ABSENT = -1e30
LOG2_E = 1.4426950408889634
SPLIT_DTYPE = torch.bfloat16  # its range, for inputs in float16 too
HIGHEST_RANK = 128  # more updates than fit are added up one by one
SMALLEST = 16  # of a side of a tile that tensor cores multiply


@dataclass(frozen=True)
class Tile:
    """Rows and columns of the scores that a program holds at once, and how it runs."""

    rows: int
    columns: int
    warps: int
    stages: int


# By kernel: for heads up to 64, 128 and 256 wide, chosen by what ptxas says of registers, so that
# nothing spills and as many programs share a multiprocessor as can. README.md has the figures.
HALVES: dict[str, tuple[Tile, Tile, Tile]] = {
    "potential": (Tile(128, 64, 4, 3), Tile(128, 64, 4, 2), Tile(128, 32, 4, 2)),
    "output": (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 32, 8, 2)),
    "grad": (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(64, 32, 8, 2)),
}
# float32: up to 64 wide with tensor cores, beyond without.
SINGLES: dict[str, tuple[Tile, Tile, Tile]] = {
    "potential": (Tile(64, 64, 4, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    "output": (Tile(64, 32, 4, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    "grad": (Tile(64, 32, 4, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
}
# Of multiprocessors with about 100 KB of shared memory: 16-bit heads up to 128 wide have room for
# the tiles above, wider ones and float32 do not.
COMPACT = {True: Tile(32, 32, 4, 1), False: Tile(16, 16, 4, 1)}
ROOMY = 160 << 10


@functools.cache
def _is_roomy(device: torch.device) -> bool:
    """Whether a program on this device can have as much shared memory as on data-centre GPUs."""
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    return bool(getattr(properties, "shared_memory_per_block_optin", ROOMY) >= ROOMY)


def constants(
    kernel: str, halves: bool, dim: int, width: int | None = None, *, roomy: bool = True
) -> dict[str, Any]:
    """Compile-time numbers of a kernel for heads of this width, and values of that."""
    widest = max(dim, width or 0)
    chosen = (HALVES if halves else SINGLES)[kernel][(widest > 64) + (widest > 128)]
    if not roomy and (not halves or widest > 128):
        chosen = COMPACT[halves]
    found: dict[str, Any] = {
        "D": dim,
        "BLOCK_D": max(SMALLEST, power_of_2(dim)),
        "ROWS": chosen.rows,
        "COLUMNS": chosen.columns,
        # Three products of tensor cores are as good as one of float32, and faster; their operands
        # are split in registers, which wide heads do not have.
        "PRECISION": "tf32x3" if not halves and widest <= 64 else "ieee",
        "num_warps": chosen.warps,
        "num_stages": chosen.stages,
    }
    if width is not None:
        found |= {"WIDTH": width, "BLOCK_W": max(SMALLEST, power_of_2(width))}
    return found


def rank_of(updates: int, halves: bool) -> int:
    """Columns of the factors: one for each update, three if they are split into halves."""
    return max(SMALLEST, power_of_2(3 * updates if halves else updates))


@dataclass(frozen=True)
class Sides:
    """Queries and keys of every head, ``(heads, N, D)`` and ``(heads, M, D)``, and their scores.

    Potentials are float32, in base 2, of shape ``(updates of that side, heads, tokens)``.
    """

    query: Tensor
    key: Tensor
    scale: float

    @property
    def heads(self) -> int:
        return self.query.shape[0]

    @property
    def halves(self) -> bool:
        """Whether tokens have 16 bits."""
        return self.query.element_size() == 2

    def _meta(self, kernel: str, width: int | None = None) -> dict[str, Any]:
        roomy = _is_roomy(self.query.device)
        return constants(kernel, self.halves, self.query.shape[-1], width, roomy=roomy)

    def _grid(self, rows: Tensor, meta: dict[str, Any]) -> tuple[int]:
        return (ceil_div(rows.shape[1], meta["ROWS"]) * self.heads,)

    def _across(self, to_queries: bool) -> tuple[Tensor, Tensor]:
        return (self.query, self.key) if to_queries else (self.key, self.query)

    def update(self, to_queries: bool, other: Tensor, mask: Tensor | None, out: Tensor) -> None:
        """One update of a potential of the queries or of the keys, from the other side's."""
        x, y = self._across(to_queries)
        meta = self._meta("potential")
        potential_kernel[self._grid(x, meta)](
            x, y, other, mask, out, x.shape[1], y.shape[1], self.scale * LOG2_E,
            MASKED=mask is not None, **meta,
        )  # fmt: skip

    def output(
        self, value: Tensor, f: Tensor, g: Tensor, log_ratio: Tensor, mask: Tensor | None,
        last_is_rows: bool,
    ) -> Tensor:  # fmt: skip
        """The attention's output; with `last_is_rows` the last potential of the queries too."""
        x, y = self.query, self.key
        out = value.new_empty(self.heads, x.shape[1], value.shape[-1])
        meta = self._meta("output", value.shape[-1])
        output_kernel[self._grid(x, meta)](
            x, y, value, g, f, log_ratio, mask, out, x.shape[1], y.shape[1], self.scale * LOG2_E,
            LAST_IS_ROWS=last_is_rows, MASKED=mask is not None, **meta,
        )  # fmt: skip
        return out

    def delta(self, upstream: Tensor, output: Tensor, out: Tensor) -> None:
        """``upstream · output`` of every query."""
        width = output.shape[-1]
        block = max(SMALLEST, power_of_2(width))
        rows = max(1, 4096 // block)
        delta_kernel[(ceil_div(output.shape[1], rows) * self.heads,)](
            upstream, output, out, output.shape[1], WIDTH=width, BLOCK_W=block, ROWS=rows
        )

    def pull(
        self, to_queries: bool, mine: Tensor, theirs: Tensor, grad: Tensor, direct: Tensor | None,
        out: Tensor,
    ) -> None:  # fmt: skip
        """The gradient of an update, back to the potential that it was made from."""
        x, y = self._across(to_queries)
        meta = self._meta("potential")
        pull_kernel[self._grid(x, meta)](
            x, y, mine, theirs, grad, direct, out, x.shape[1], y.shape[1], self.scale * LOG2_E,
            HAS_DIRECT=direct is not None, **meta,
        )  # fmt: skip

    def value_grad(
        self, value: Tensor, upstream: Tensor, f: Tensor, g: Tensor, log_ratio: Tensor,
        delta: Tensor, grad: Tensor, pull: bool,
    ) -> Tensor:  # fmt: skip
        """The gradient of the values; that of g goes to `grad`."""
        out = torch.empty_like(value)
        meta = self._meta("output", value.shape[-1])
        value_grad_kernel[self._grid(self.key, meta)](
            self.query, self.key, value, upstream, f, g, log_ratio, delta, out, grad,
            self.key.shape[1], self.query.shape[1], self.scale * LOG2_E, PULL=pull, **meta,
        )  # fmt: skip
        return out

    def factors(
        self, of_queries: bool, potentials: Tensor, grads: Tensor, log_ratio: Tensor, updates: int,
        change: Tensor,
    ) -> Tensor:  # fmt: skip
        """What the updates' gradients contribute on one side: (heads, tokens, rank)."""
        last, heads, tokens = potentials.shape[0] - 1, *potentials.shape[1:]
        split, rank = self.halves, rank_of(updates, self.halves)
        dtype = SPLIT_DTYPE if split else torch.float32
        found = potentials.new_empty(heads, tokens, rank, dtype=dtype)
        factors_kernel[(heads,)](
            potentials, grads, log_ratio, found, change, heads, tokens, last, updates,
            OF_QUERIES=of_queries, SPLIT=split, RANK=rank,
            BLOCK=min(1024, max(SMALLEST, power_of_2(tokens))),
        )  # fmt: skip
        return found

    def token_grads(
        self, value: Tensor, upstream: Tensor, f: Tensor, g: Tensor, f_grads: Tensor,
        g_grads: Tensor, log_ratio: Tensor, updates: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The gradients of the queries and of the keys, from those of all potentials."""
        rank = rank_of(updates, self.halves)
        factorable = rank <= HIGHEST_RANK
        f_factors = g_factors = None
        if not factorable:
            change = f.new_full((2, self.heads), math.inf)
        else:
            change = f.new_empty(2, self.heads)
            f_factors = self.factors(True, f, f_grads, log_ratio, updates, change[0])
            g_factors = self.factors(False, g, g_grads, log_ratio, updates, change[1])
        queries = (upstream, f, f_grads, f_factors)
        keys = (value, g, g_grads, g_factors)
        found = []
        for of_queries in (True, False):
            x, y = self._across(of_queries)
            mine, theirs = (queries, keys) if of_queries else (keys, queries)
            out = torch.empty_like(x)
            meta = self._meta("grad", value.shape[-1]) | {"RANK": min(rank, HIGHEST_RANK)}
            # Each head is taken by one of the two.
            for factored in (True, False) if factorable else (False,):
                score_grad_kernel[self._grid(x, meta)](
                    x, y, mine[0], theirs[0], mine[1], theirs[1], mine[2], theirs[2], mine[3],
                    theirs[3], log_ratio, change, out, self.heads, x.shape[1], y.shape[1],
                    mine[1].shape[0] - 1, theirs[1].shape[0] - 1, updates, self.scale * LOG2_E,
                    self.scale, OF_QUERIES=of_queries, FACTORED=factored, **meta,
                )  # fmt: skip
            found.append(out)
        return found[0], found[1]
