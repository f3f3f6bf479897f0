"""Soft plans of the absolute metric on float32 rows, as recurrences along the ranks: launches.

The kernels are in `recurrences.cu`; their torch twins are those of `triton/soft_plan.py`, which
chooses between its kernels and these (:func:`fits`). In the absolute metric,
``κ_nj = exp(-|s_n - s_j|)`` is a product of the decays ``a_n = exp(-(s_n - s_{n-1}))`` between
neighbours, so that sums over the ranks before n and behind n follow from those of the next rank:

    before_n = a_n (before_{n-1} + x_{n-1}),    behind_n = a_{n+1} (behind_{n+1} + x_{n+1}),
    (κx)_n = before_n + x_n + behind_n,         (κ'x)_n = behind_n - before_n.

That is a multiplication and an addition per number and direction, in registers: a thread has two
columns of a *segment* of 16 neighbouring ranks. What comes from other segments is carried in
through shuffles within a warp and shared memory between warps:

    the rows of a segment are added up, evaluated at its last and at its first rank;
    these sums are exchanged, and each segment adds those of all others, times their decays;
    the recurrences run through the segment, from what was carried in.

A block has one head, and all of its ranks at once. It applies one slice after another, and adds
rows of the result by token to a *tile* in shared memory, which is written once.

**Why float32 alone.** Tensor cores multiply 16-bit rows by κ faster than these kernels add them
up, but for float32 rows they take three products in TF32. There recurrences are faster and more
accurate.

**Widths and lengths.** A block works on 4 to 64 columns at a time. With fewer columns a warp has
more segments, so 64 columns allow for 256 ranks, and 8 for 2,048.

**Backward.** All gradients come from one kernel. With ``W = mid_scale · κ_k x`` and
``U = mid_scale · κ_q g``,

    slope of the queries' points:   W_n · (κ_q' g)_n + g_n · (κ_q' W)_n,
    slope of the keys' points:      x_n · (κ_k' U)_n + U_n · (κ_k' x)_n,
    gradient of `mid_scale`:        (κ_k x)_n · (κ_q g)_n,
    gradient of x:                  κ_k U, by token.

Every dot product is the sum of one from each direction, so that sums need not be kept.

**Ties.** Equal points exert no force on each other, so they are excluded from κ'. While the point
stays the same, the sum that enters a force does not change. Where a segment begins with the last
point of the previous one, the tied part of what is carried in is subtracted.

**Rounding.** Exponentials are those of differences of neighbours or of the ends of segments, so
that errors of single steps do not add up beyond a segment.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from espformer.ops.common.cuda import CudaLaunch, compiler
from espformer.ops.common.triton import Shape, ceil_div, once, power_of_2

if TYPE_CHECKING:
    from espformer.ops.esp.triton.soft_plan import Plan, PlanGradients

SOURCE = Path(__file__).with_name("recurrences.cu")
RANKS = 16  # of a segment
MOST_WARPS = 16  # of a block
MOST_COLUMNS, LEAST_COLUMNS = 64, 4  # that a block works on at a time
THREAD_COLUMNS = 2
FLOAT = 4  # bytes


class Tiling(NamedTuple):
    """How a block divides a slice, and its shared memory in bytes."""

    columns: int  # at a time
    warps: int
    scratch: int  # without gradients and with them; the kernels check both
    gradient_scratch: int
    shared: int

    @staticmethod
    def of(
        ranks: int, width: int, scales: bool, gradients: bool, tile_rows: tuple[int, ...], most: int
    ) -> Tiling | None:
        """As many columns at a time as leave room for all ranks and tiles in `most` bytes."""
        columns = min(MOST_COLUMNS, max(LEAST_COLUMNS, power_of_2(width)))
        while columns >= LEAST_COLUMNS:
            segments = 32 * THREAD_COLUMNS // columns
            span = RANKS * segments
            warps = ceil_div(ranks, span)
            # Decay, row and slot of every rank, and what is there for some: scales, and the points
            # of several segments; decays between warps; mid_scale; and four exchanges.
            side = 3 * span + (span if scales else 4) + (span if segments > 1 else 4)
            side += ceil_div(warps, 4) * 4
            scratch = FLOAT * warps * (2 * side + span + 4 * 2 * columns)
            # Four exchanges of ties, and what is parked.
            parked = RANKS * THREAD_COLUMNS * 32
            more = FLOAT * warps * (4 * 2 * segments * columns + parked)
            rows = sum(tile_rows) + len(tile_rows)  # a tile has a row that nobody reads
            shared = scratch + (more if gradients else 0) + FLOAT * (rows * columns + 2 * warps)
            if warps <= MOST_WARPS and shared <= most:
                return Tiling(columns, warps, scratch, scratch + more, shared)
            columns //= 2
        return None


@functools.cache
def _limits(device: int) -> tuple[int, int]:
    """Multiprocessors of a GPU, and the shared memory that a block may have."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, getattr(
        properties, "shared_memory_per_block_optin", 48 << 10
    )


def limits() -> tuple[int, int]:
    return _limits(torch.cuda.current_device())


@functools.cache
def _can_compile() -> bool:
    if torch.version.cuda is None:  # Triton's interpreter
        return False
    if compiler() is not None:
        return True
    warnings.warn(
        "espformer: NVRTC, the compiler that comes with torch for CUDA, was not found; float32 "
        "attention runs in slower kernels, with results that differ by rounding",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def fits(shape: Shape, width: int, dtype: torch.dtype, metric: str, learnt: bool) -> bool:
    """Whether plans of (batch, slices, ranks) on such rows are computed here.

    Not the gradient of the temperature (`learnt`), whose terms would cancel, nor sequences that are
    too long for a block: of the backward of costs, two tiles must fit in its shared memory.
    """
    ranks = shape[-1]
    if dtype != torch.float32 or metric != "absolute" or width % 2 or learnt or not ranks:
        return False
    if not _can_compile():
        return False
    return Tiling.of(ranks, width, True, True, (ranks, ranks), limits()[1]) is not None


@once
def _blocks(heads: int, slices: int, tiling: Tiling, deterministic: bool, processors: int) -> int:
    """Blocks of a head: the fewest that keep all multiprocessors busy.

    Blocks of one head add their tiles in any order, so algorithms that must be deterministic have
    one.
    """
    if deterministic:
        return 1
    at_once = processors * max(1, min(MOST_WARPS // tiling.warps, limits()[1] // tiling.shared))
    found, fewest = 1, float("inf")
    for blocks in range(1, slices + 1):
        rounds = ceil_div(heads * blocks, at_once) * ceil_div(slices, blocks)
        if rounds < 0.95 * fewest:
            found, fewest = blocks, rounds
    return found


@once
def _launch(
    name: str, shape: Shape, queries: int, keys: int, width: int, scales: bool, query_rows: bool,
    deterministic: bool, device_limits: tuple[int, int],
) -> CudaLaunch:  # fmt: skip
    heads, slices, ranks = shape
    gradients = name == "plan_gradients"
    tile_rows = {
        "apply_plans": (queries,),
        "cross_plans": (),
        "plan_gradients": (keys, queries) if query_rows else (keys,),
    }[name]
    tiling = Tiling.of(ranks, width, scales, gradients, tile_rows, device_limits[1])
    assert tiling is not None
    definitions = {
        "COLUMNS": tiling.columns,
        "WARPS": tiling.warps,
        "WITH_SCALES": int(scales),
        "WITH_QUERY_ROWS": int(query_rows),
        "SCRATCH_BYTES": tiling.scratch,
        "GRADIENT_SCRATCH_BYTES": tiling.gradient_scratch,
    }
    blocks = _blocks(heads, slices, tiling, deterministic, device_limits[0])
    slices_of_block = ceil_div(slices, blocks)
    blocks = ceil_div(slices, slices_of_block)
    numbers = ranks, queries, keys, width, slices, slices_of_block, blocks
    return CudaLaunch(
        SOURCE, name, definitions, heads * blocks, tiling.warps * 32, tiling.shared, numbers
    )


def _aligned(x: Tensor) -> Tensor:
    """Rows whose pairs of columns can be loaded at once."""
    return x if x.data_ptr() % (THREAD_COLUMNS * FLOAT) == 0 else x.clone()


class RecurrencePlanKernels:
    """The plans of some slices on float32 rows: launches of the kernels."""

    in_order = True  # slices are added one after another where algorithms must be deterministic

    def __init__(self, plan: Plan, dtype: torch.dtype) -> None:
        assert dtype == torch.float32
        self.plan = plan

    def apply(
        self, x: Tensor, weight: Tensor, out: Tensor, ties: bool = False
    ) -> tuple[None, None]:
        """Adds ``Σ_l weight_l plan_l x`` to `out`. There are no states, and ties need none."""
        self._run("apply_plans", x, None, weight, None, out)
        return None, None

    def cross(self, g: Tensor, x: Tensor, out: Tensor) -> None:
        """``⟨g, plan_l x⟩`` of every slice to `out`, (batch, L)."""
        self._run("cross_plans", x, g, None, None, None, totals=out)

    def grad(
        self, g: Tensor, x: Tensor, weight: Tensor, dx: Tensor | None, dg: Tensor | None,
        found: PlanGradients, x_states: object = None,
    ) -> None:  # fmt: skip
        """Gradients of ``Σ_l weight_l ⟨g, plan_l x⟩``: adds to dx and dg, writes to `found`."""
        of_ranks = (
            found.query_points, found.key_points, found.mid_scale, found.query_scale,
            found.key_scale,
        )  # fmt: skip
        self._run("plan_gradients", x, g, weight, dx, dg, *of_ranks, totals=found.weight)

    def _run(
        self, name: str, x: Tensor, g: Tensor | None, weight: Tensor | None, dx: Tensor | None,
        dg: Tensor | None, *of_ranks: Tensor | None, totals: Tensor | None = None,
    ) -> None:  # fmt: skip
        plan = self.plan
        query_rows = dg if g is None else g
        assert query_rows is not None
        launch = _launch(
            name, plan.key_points.shape, query_rows.shape[-2], x.shape[-2], x.shape[-1],
            plan.query_scale is not None, name == "plan_gradients" and dg is not None,
            torch.are_deterministic_algorithms_enabled(), limits(),
        )  # fmt: skip
        launch(
            x.get_device(), plan.query_order, plan.key_order, plan.query_points, plan.key_points,
            plan.mid_scale, plan.query_scale, plan.key_scale, plan.inv_bandwidth, weight,
            _aligned(x), None if g is None else _aligned(g), dx, dg,
            *(of_ranks or (None,) * 5), totals,
        )  # fmt: skip
