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
up, but for float32 rows they take three products in TF32. There recurrences are faster, and as
accurate.

**Widths and lengths.** A block works on 4 to 64 columns at a time. With fewer columns a warp has
more segments, and a tile takes less of the shared memory: on an H200, 64 columns allow for some 200
ranks, and 4 for 2,300.

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

import contextlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from espformer.ops.common import cuda
from espformer.ops.common.cuda import CudaError, CudaLaunch, Limits
from espformer.ops.common.operators import has_dispatch_modes
from espformer.ops.common.triton import INTERPRETED, Shape, ceil_div, once, power_of_2

if TYPE_CHECKING:
    from espformer.ops.esp.triton.soft_plan import Plan, PlanGradients

SOURCE = Path(__file__).with_name("recurrences.cu")
RANKS = 16  # of a segment
MOST_WARPS = 16  # of a block
MOST_COLUMNS, LEAST_COLUMNS = 64, 4  # that a block works on at a time
LEAST_PAIRS = 128  # (head, slice) pairs; fewer would leave multiprocessors without a block
# Kernels have numbers in `recurrences.cu`.
KERNELS = {"apply_plans": 1, "cross_plans": 2, "plan_gradients": 3}
WARPS_AT_ONCE = 8  # of a multiprocessor, which many registers allow
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


_tried: dict[torch.device, bool] = {}


def _are_right(device: torch.device) -> bool:
    """Whether the kernels can be compiled for a device, and are right; if not, a warning says why.

    The first call tries them, which takes seconds unless Triton's cache has the kernels. While a
    CUDA graph is captured nothing can be tried.
    """
    if device not in _tried:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        _tried[device] = _try(device)
    return _tried[device]


def _try(device: torch.device) -> bool:
    from espformer.ops.esp.cuda.trial import try_kernels

    current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    try:
        with current, torch.no_grad():
            try_kernels(device)
    except (CudaError, ArithmeticError) as error:
        warnings.warn(
            f"espformer: {error}; float32 attention runs in slower kernels, whose results differ "
            "by rounding",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def limits(x: Tensor) -> Limits | None:
    """Those of the GPU where rows are, or None if they are not computed here."""
    if x.dtype != torch.float32 or not x.is_cuda or INTERPRETED or has_dispatch_modes():
        return None
    return cuda.limits(x.get_device()) if _are_right(x.device) else None


def fits(
    shape: Shape, width: int, metric: str, learnt: bool, deterministic: bool,
    device_limits: Limits | None,
) -> bool:  # fmt: skip
    """Whether plans of (batch, slices, ranks) on float32 rows are computed here.

    Not the gradient of the temperature (`learnt`), whose terms would cancel; nor in a fixed order,
    for which a head has one block; nor sequences that are too long for a block: of the backward of
    costs, two tiles must fit in its shared memory.
    """
    batch, slices, ranks = shape
    if device_limits is None or metric != "absolute" or width % 2 or learnt or deterministic:
        return False
    if not ranks or batch * slices < LEAST_PAIRS:
        return False
    most = device_limits.shared_bytes
    return Tiling.of(ranks, width, True, True, (ranks, ranks), most) is not None


@once
def _blocks(heads: int, slices: int, tiling: Tiling, device_limits: Limits) -> int:
    """Blocks of a head: the fewest that keep all multiprocessors busy. They add their tiles."""
    fitting = min(WARPS_AT_ONCE // tiling.warps, device_limits.shared_bytes // tiling.shared)
    at_once = device_limits.processors * max(1, fitting)
    found, fewest = 1, float("inf")
    for blocks in range(1, slices + 1):
        rounds = ceil_div(heads * blocks, at_once) * ceil_div(slices, blocks)
        if rounds < 0.95 * fewest:
            found, fewest = blocks, rounds
    return found


@once
def _launch(
    name: str, shape: Shape, queries: int, keys: int, width: int, scales: bool, query_rows: bool,
    device_limits: Limits,
) -> CudaLaunch:  # fmt: skip
    heads, slices, ranks = shape
    gradients = name == "plan_gradients"
    tile_rows = {
        "apply_plans": (queries,),
        "cross_plans": (),
        "plan_gradients": (keys, queries) if query_rows else (keys,),
    }[name]
    tiling = Tiling.of(ranks, width, scales, gradients, tile_rows, device_limits.shared_bytes)
    assert tiling is not None
    definitions = {
        "KERNEL": KERNELS[name],
        "COLUMNS": tiling.columns,
        "WARPS": tiling.warps,
        "WITH_SCALES": int(scales),
        "WITH_QUERY_ROWS": int(query_rows),
        "SCRATCH_BYTES": tiling.scratch,
        "GRADIENT_SCRATCH_BYTES": tiling.gradient_scratch,
    }
    blocks = _blocks(heads, slices, tiling, device_limits)
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

    def __init__(self, plan: Plan, dtype: torch.dtype) -> None:
        assert dtype == torch.float32
        self.plan = plan

    def apply(
        self, x: Tensor, weight: Tensor, out: Tensor, ties: bool = False
    ) -> tuple[None, None]:
        """Adds ``Σ_l weight_l plan_l x`` to `out`. There are no states, and ties need none."""
        launch = self._launch("apply_plans", x, out.shape[-2], False)
        launch(x.get_device(), *self._tensors(weight), _aligned(x), None, out, *[None] * 8)
        return None, None

    def cross(self, g: Tensor, x: Tensor, out: Tensor) -> None:
        """``⟨g, plan_l x⟩`` of every slice to `out`, (batch, L)."""
        launch = self._launch("cross_plans", x, g.shape[-2], False)
        rows = _aligned(x), _aligned(g)
        launch(x.get_device(), *self._tensors(None), *rows, *[None] * 8, out)

    def grad(
        self, g: Tensor, x: Tensor, weight: Tensor, dx: Tensor | None, dg: Tensor | None,
        found: PlanGradients, x_states: object = None,
    ) -> None:  # fmt: skip
        """Gradients of ``Σ_l weight_l ⟨g, plan_l x⟩``: adds to dx and dg, writes to `found`."""
        assert found.inv_bandwidth is None
        launch = self._launch("plan_gradients", x, g.shape[-2], dg is not None)
        launch(
            x.get_device(), *self._tensors(weight), _aligned(x), _aligned(g), None, dx, dg,
            found.query_points, found.key_points, found.mid_scale, found.query_scale,
            found.key_scale, found.weight,
        )  # fmt: skip

    def _launch(self, name: str, x: Tensor, queries: int, query_rows: bool) -> CudaLaunch:
        shape, scales = self.plan.key_points.shape, self.plan.query_scale is not None
        _, keys, width = x.shape
        device_limits = cuda.limits(x.get_device())
        return _launch(name, shape, queries, keys, width, scales, query_rows, device_limits)

    def _tensors(self, weight: Tensor | None) -> tuple[Tensor | None, ...]:
        """The first of all arguments."""
        plan = self.plan
        return (
            plan.query_order, plan.key_order, plan.query_points, plan.key_points, plan.mid_scale,
            plan.query_scale, plan.key_scale, plan.inv_bandwidth, weight,
        )  # fmt: skip
