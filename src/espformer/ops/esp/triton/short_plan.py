"""Soft plans on narrow rows of short sequences: one program holds all ranks in its registers.

The torch twins are those of `soft_plan.py`, whose functions choose between its kernels and these
(:func:`fits`). In the absolute metric, ``κ_nj = exp(-|s_n - s_j|)`` is a product of the decays
``a_n = exp(-(s_n - s_{n-1}))`` between neighbours, so that sums over the ranks before n and behind
n follow from those of the next rank:

    before_n = a_n (before_{n-1} + x_{n-1}),    behind_n = a_{n+1} (behind_{n+1} + x_{n+1}),
    (κx)_n = before_n + x_n + behind_n,         (κ'x)_n = behind_n - before_n.

**Groups.** A program is one warp and computes one (head, slice). Its ranks are divided into groups
of R neighbours, one group for each of the G lanes. The rows of a sequence are a tuple of R tiles,
(G, BLOCK_D), the r-th of which holds rank ``g R + r`` of every group g. A sum in one direction
takes three steps:

    the R rows of a group are added up, from tile to tile, within a lane;
    these sums are carried over to all other groups, with log₂ G exchanges between lanes;
    the recurrence runs through the group again, from what was carried in.

A carry-in is a sum over groups that are 1, 2, 4, ... groups away (:func:`carry_in`). Its decays
follow from the points at the ends of groups, and are the same for all columns. There is no scratch
memory and no barrier, and R rows are loaded at once. More columns than registers hold are computed
one block after another.

**Backward.** A program knows the gradients on the side of the queries. Applied to
``plan.transposed()``, it finds those of the keys. With ``W = mid_scale · κ_k x``,

    slope of the queries' points:   W_n · (κ_q' g)_n + g_n · (κ_q' W)_n,
    gradient of `mid_scale`:        W_n · (κ_q g)_n  over `mid_scale` of rank n,
    gradient of `query_scale`:      g_n · (κ_q W)_n  over `query_scale` of rank n.

Every dot product is the sum of one from each direction, so that sums need not be kept. The compiler
would compute dot products where they are stored, and keep all sums until then
(:func:`espformer.ops.esp.triton.primitives.computed_here`).

**Ties.** Equal points are excluded from κ' (``untied``): this sum does not change while the point
stays the same. If a group begins with the point that ended the previous group, the untied sum at
that point is the one of the group where the point first occurs. :func:`origins` finds it; its dot
products are added last.

Ranks past the end repeat the last point, and their rows are zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from espformer.ops.common.triton import Launch, Shape, ceil_div, once, power_of_2
from espformer.ops.esp.triton.primitives import (
    COUNTS,
    LOG2E,
    computed_here,
    exp2,
    point_at,
    safe_divide,
)

if TYPE_CHECKING:
    from espformer.ops.esp.triton.soft_plan import Plan, PlanGradients

WIDTHS = (4, 8, 16)
MOST_RANKS = 256
LEAST_PAIRS = 1024  # (head, slice) pairs; with fewer the GPU would be idle
LANES = 32
# Ranks of a group, R, that kernels are compiled for: few, since each takes ten to sixty seconds.
# Seven are for the 197 tokens of a ViT.
GROUP_SIZES = (1, 2, 4, 7, 8)
# Of a group: columns at a time, and numbers, each of which takes a register of a lane.
MOST_COLUMNS, MOST_REGISTERS = 8, 64


@triton.jit
def group_points(points_ptr, N, R: tl.constexpr, G: tl.constexpr):
    """The points of every group, R tensors of (G,)."""
    points = ()
    for r in tl.static_range(R):
        points = points + (tl.load(points_ptr + tl.minimum(tl.arange(0, G) * R + r, N - 1)),)
    return points


@triton.jit
def rank_decays(points, rate, R: tl.constexpr):
    """Decays between neighbours in a group, R - 1 tensors of (G,)."""
    decays = ()
    for r in tl.static_range(1, R):
        decays = decays + (exp2((points[r - 1] - points[r]) * rate),)
    return decays


@triton.jit
def backwards(x, COUNT: tl.constexpr):
    """A tuple from its end to its beginning: in the order of a scan to the left."""
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (x[COUNT - 1 - i],)
    return found


@triton.jit
def decay_between(
    points_ptr, here, N, rate, RANKS: tl.constexpr, GROUPS: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """The decay to the first rank of every group, at the points `here`, from a rank that is RANKS
    away and belongs to the group that is GROUPS away, (G,). Zero if there is no such group.
    """
    g = tl.arange(0, here.shape[0])
    n = (g * R if GROUPS < 0 else g * R + (R - 1)) + RANKS
    there = (g + GROUPS >= 0) & (g + GROUPS < here.shape[0])
    return tl.where(there, exp2(tl.abs(point_at(points_ptr, n, N) - here) * -rate), 0.0)


@triton.jit
def group_decays(
    points_ptr, here, N, rate, STEP: tl.constexpr, R: tl.constexpr, LEVELS: tl.constexpr
):
    """Decays between groups in the direction of a scan, LEVELS + 1 tensors of (G,).

    To the first rank of every group in this direction, at the points `here`: from the last rank of
    the previous group, and from the first rank of the group 1, 2, 4, ... groups away. Zero where
    there is no such group. STEP is -1 in a scan to the right, where the previous group is the one
    before, and 1 in a scan to the left.
    """
    decays = (decay_between(points_ptr, here, N, rate, STEP, STEP, R),)
    for level in tl.static_range(LEVELS):
        decays = decays + (
            decay_between(
                points_ptr, here, N, rate, STEP * R * (1 << level), STEP * (1 << level), R
            ),
        )
    return decays


@triton.jit
def of_groups(x, group, G: tl.constexpr, BLOCK_D: tl.constexpr):
    """The rows of other groups, (G, BLOCK_D)."""
    group = tl.minimum(tl.maximum(group, 0), G - 1)
    return tl.gather(x, tl.broadcast_to(group[:, None], (G, BLOCK_D)), 0)


@triton.jit
def carry_in(
    x, decays, steps, STEP: tl.constexpr, R: tl.constexpr, G: tl.constexpr, BLOCK_D: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Sums of x over all previous groups, at the first rank of every group, (G, BLOCK_D).

    First the R rows of every group are added up, at its last rank. `steps` are the decays between
    groups; after every level, sums reach twice as many groups back.
    """
    total = x[0]
    for i in tl.static_range(1, R):
        total = total * decays[i - 1][:, None] + x[i]
    g = tl.arange(0, G)
    total = of_groups(total, g + STEP, G, BLOCK_D) * steps[0][:, None]
    for level in tl.static_range(LEVELS):
        more = of_groups(total, g + STEP * (1 << level), G, BLOCK_D)
        total += more * steps[level + 1][:, None]
    return total


@triton.jit
def scan_rows(
    x, decays, steps, STEP: tl.constexpr, R: tl.constexpr, G: tl.constexpr, BLOCK_D: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Sums of x over all previous ranks, R tiles of (G, BLOCK_D)."""
    total = carry_in(x, decays, steps, STEP, R, G, BLOCK_D, LEVELS)
    sums = (total,)
    for i in tl.static_range(1, R):
        total = (total + x[i - 1]) * decays[i - 1][:, None]
        sums = sums + (total,)
    return sums


@triton.jit
def group_times_kappa(
    x, decays, before, behind, R: tl.constexpr, G: tl.constexpr, BLOCK_D: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """κx, R tiles of (G, BLOCK_D). The decays are those within groups and, from the groups before
    and behind, between them.
    """
    left = scan_rows(x, decays, before, -1, R, G, BLOCK_D, LEVELS)
    right = scan_rows(backwards(x, R), backwards(decays, R - 1), behind, 1, R, G, BLOCK_D, LEVELS)
    y = ()
    for r in tl.static_range(R):
        y = y + (left[r] + x[r] + right[R - 1 - r],)
    return y


@triton.jit
def larger(x, y):
    return tl.maximum(x, y)


@triton.jit
def smaller(x, y):
    return tl.minimum(x, y)


@triton.jit
def origins(points_ptr, N, STEP: tl.constexpr, R: tl.constexpr, G: tl.constexpr):
    """For every group the one where the point that precedes it occurs first, (G,).

    A point at the end of a group occurs there first if the previous group ends with another one.
    """
    g = tl.arange(0, G)
    n = (g * R - 1) if STEP < 0 else (g * R + R)
    new = point_at(points_ptr, n, N) != point_at(points_ptr, n + STEP * R, N)
    if STEP < 0:
        found = tl.associative_scan(tl.where(new, g - 1, 0), 0, larger)
    else:
        found = tl.associative_scan(tl.where(new, g + 1, G - 1), 0, smaller, reverse=True)
    return found


@triton.jit
def dot(x, y):
    """Dot products of rows, (G,)."""
    return computed_here(tl.sum(x * y, 1))


@triton.jit
def dots(w, g, w_untied, g_untied, w_sums, g_sums, MID: tl.constexpr, SCALE: tl.constexpr):
    """Results of :func:`scan_pair` for one rank: of the first kind, of MID, and of SCALE."""
    force = computed_here(tl.sum(w * g_untied, 1) + tl.sum(g * w_untied, 1))
    of_mid, of_scale = force, force
    if MID:
        of_mid = dot(w, g_sums)
    if SCALE:
        of_scale = dot(g, w_sums)
    return force, of_mid, of_scale


@triton.jit
def scan_pair(
    w, g, y, points_ptr, points, decays, steps, N, STEP: tl.constexpr, MID: tl.constexpr,
    SCALE: tl.constexpr, R: tl.constexpr, G: tl.constexpr, BLOCK_D: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Sums of W and of g over all previous ranks, as they enter the gradients. For every rank:

    - forces, ``W · untied sums of g + g · untied sums of W``;
    - if MID, ``W · sums of g``, and if SCALE, ``g · sums of W``;
    - if there is a tuple y, y plus the sums of W, (G, BLOCK_D).

    Tuples are in the order of the scan.
    """
    group = tl.arange(0, G)
    w_sums = carry_in(w, decays, steps, STEP, R, G, BLOCK_D, LEVELS)
    g_sums = carry_in(g, decays, steps, STEP, R, G, BLOCK_D, LEVELS)
    previous = point_at(points_ptr, (group * R - 1) if STEP < 0 else (group * R + R), N)
    there = (group + STEP >= 0) & (group + STEP < G)
    tied = there & (previous == points[0])  # all ranks so far, with the previous group
    w_untied = tl.where(tied[:, None], 0.0, w_sums)
    g_untied = tl.where(tied[:, None], 0.0, g_sums)
    ties = (tied,)
    found = (dots(w[0], g[0], w_untied, g_untied, w_sums, g_sums, MID, SCALE),)
    added = () if y is None else (computed_here(y[0] + w_sums),)
    for i in tl.static_range(1, R):
        w_sums = (w_sums + w[i - 1]) * decays[i - 1][:, None]
        g_sums = (g_sums + g[i - 1]) * decays[i - 1][:, None]
        same = points[i] == points[i - 1]
        w_untied = tl.where(same[:, None], w_untied, w_sums)
        g_untied = tl.where(same[:, None], g_untied, g_sums)
        tied = tied & same
        ties = ties + (tied,)
        found = found + (dots(w[i], g[i], w_untied, g_untied, w_sums, g_sums, MID, SCALE),)
        if y is not None:
            added = added + (computed_here(y[i] + w_sums),)
    origin = origins(points_ptr, N, STEP, R, G)
    w_untied = of_groups(w_untied, origin, G, BLOCK_D)
    g_untied = of_groups(g_untied, origin, G, BLOCK_D)
    corrected = ()
    for i in tl.static_range(R):
        more = tl.sum(w[i] * g_untied, 1) + tl.sum(g[i] * w_untied, 1)
        force = computed_here(found[i][0] + tl.where(ties[i], more, 0.0))
        corrected = corrected + ((force, found[i][1], found[i][2]),)
    return corrected, added


@triton.jit
def zero_ranks(R: tl.constexpr, G: tl.constexpr):
    """A zero per rank, R tensors of (G,)."""
    found = ()
    for _ in tl.static_range(R):
        found = found + (tl.zeros((G,), tl.float32),)
    return found


@triton.jit
def load_group_ranks(x_ptr, N, R: tl.constexpr, G: tl.constexpr):
    """One number per rank, or one token, R tensors of (G,); zero past the end."""
    found = ()
    for r in tl.static_range(R):
        n = tl.arange(0, G) * R + r
        found = found + (tl.load(x_ptr + n, mask=n < N, other=0),)
    return found


@triton.jit
def load_group_rows(
    x_ptr, tokens, scale_ptr, N, d, D: tl.constexpr, R: tl.constexpr, G: tl.constexpr
):  # fmt: skip
    """Columns d of the rows of tokens, times their scales, R tiles of (G, BLOCK_D); zero past the
    end.
    """
    found = ()
    for r in tl.static_range(R):
        n = tl.arange(0, G) * R + r
        row_ptr = x_ptr + (tokens[r][:, None] * D + d)
        row = tl.load(row_ptr, mask=(n < N)[:, None] & (d < D), other=0.0).to(tl.float32)
        if scale_ptr is not None:
            row *= tl.load(scale_ptr + n, mask=n < N, other=0.0)[:, None]
        found = found + (row,)
    return found


@triton.jit(do_not_specialize=(*COUNTS, "N"))
def short_apply_kernel(
    x_ptr,  # (B, KEYS, D): rows of the keys
    key_order_ptr,  # (B, L, N) int32: the token of each rank
    key_scale_ptr,  # (B, L, N) float32, or None: ones
    key_points_ptr,  # (B, L, N) float32
    query_order_ptr,  # (B, L, N) int32
    query_scale_ptr,  # (B, L, N) float32, or None: ones
    query_points_ptr,  # (B, L, N) float32
    mid_scale_ptr,  # (B, L, N) float32
    inv_bandwidth_ptr,  # (B,) float32
    weight_ptr,  # (B, L) float32, or None: only totals are asked for
    out_ptr,  # (B, QUERIES, D) float32, or None
    g_ptr,  # (B, QUERIES, D): rows of the queries, for gradients; or None
    d_points_ptr,  # (B, L, N) float32: of the queries' points; or None, as all that follow
    d_query_scale_ptr,  # (B, L, N) float32
    d_mid_scale_ptr,  # (B, L, N) float32
    totals_ptr,  # (B, L) float32: ⟨g, plan x⟩ without the weight
    N, KEYS, QUERIES, L, D: tl.constexpr, R: tl.constexpr, G: tl.constexpr, LEVELS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds the plan of one slice, applied to the rows x of the keys, to the rows of the queries;
    and, with g, the gradients of ``weight · ⟨g, plan x⟩`` on the side of the queries.

    BLOCK_D columns at a time, whose dot products are added.
    """
    pair = tl.program_id(0).to(tl.int64)
    head = pair // L
    inv_bandwidth = tl.load(inv_bandwidth_ptr + head)
    rate = inv_bandwidth * LOG2E
    x_ptr += head * KEYS * D
    if g_ptr is not None:
        g_ptr += head * QUERIES * D
    if out_ptr is not None:
        out_ptr += head * QUERIES * D
    key_order_ptr += pair * N
    if key_scale_ptr is not None:
        key_scale_ptr += pair * N
    key_points_ptr += pair * N
    query_order_ptr += pair * N
    if query_scale_ptr is not None:
        query_scale_ptr += pair * N
    query_points_ptr += pair * N
    mid_scale_ptr += pair * N
    weight = 1.0
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + pair)
    MID: tl.constexpr = d_mid_scale_ptr is not None or totals_ptr is not None
    SCALE: tl.constexpr = d_query_scale_ptr is not None
    forces = zero_ranks(R, G)
    of_mid = zero_ranks(R, G)
    of_scale = zero_ranks(R, G)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)[None, :]
        points = group_points(key_points_ptr, N, R, G)
        tokens = load_group_ranks(key_order_ptr, N, R, G)
        mid_scale = load_group_ranks(mid_scale_ptr, N, R, G)
        x = load_group_rows(x_ptr, tokens, key_scale_ptr, N, d, D, R, G)
        decays = rank_decays(points, rate, R)
        before = group_decays(key_points_ptr, points[0], N, rate, -1, R, LEVELS)
        behind = group_decays(key_points_ptr, points[R - 1], N, rate, 1, R, LEVELS)
        y = group_times_kappa(x, decays, before, behind, R, G, BLOCK_D, LEVELS)
        w = ()
        for r in tl.static_range(R):
            w = w + (y[r] * mid_scale[r][:, None],)

        points = group_points(query_points_ptr, N, R, G)
        tokens = load_group_ranks(query_order_ptr, N, R, G)
        decays = rank_decays(points, rate, R)
        before = group_decays(query_points_ptr, points[0], N, rate, -1, R, LEVELS)
        behind = group_decays(query_points_ptr, points[R - 1], N, rate, 1, R, LEVELS)
        if g_ptr is None:
            y = group_times_kappa(w, decays, before, behind, R, G, BLOCK_D, LEVELS)
        else:
            g = load_group_rows(g_ptr, tokens, query_scale_ptr, N, d, D, R, G)
            y = None if out_ptr is None else w
            left, y = scan_pair(
                w, g, y, query_points_ptr, points, decays, before, N, -1, MID, SCALE, R, G, BLOCK_D,
                LEVELS,
            )  # fmt: skip
            y = None if out_ptr is None else backwards(y, R)
            right, y = scan_pair(
                backwards(w, R), backwards(g, R), y, query_points_ptr, backwards(points, R),
                backwards(decays, R - 1), behind, N, 1, MID, SCALE, R, G, BLOCK_D, LEVELS,
            )  # fmt: skip
            y = None if out_ptr is None else backwards(y, R)
            more_forces, more_of_mid, more_of_scale = (), (), ()
            for r in tl.static_range(R):
                own = tl.sum(w[r] * g[r], 1)
                l, m = left[r], right[R - 1 - r]
                more_forces = more_forces + (forces[r] + (m[0] - l[0]),)
                more_of_mid = more_of_mid + (of_mid[r] + (l[1] + own + m[1]),)
                more_of_scale = more_of_scale + (of_scale[r] + (l[2] + own + m[2]),)
            forces = more_forces
            if MID:
                of_mid = more_of_mid
            if SCALE:
                of_scale = more_of_scale
        if out_ptr is not None:
            for r in tl.static_range(R):
                n = tl.arange(0, G) * R + r
                row = y[r] * weight
                if query_scale_ptr is not None:
                    row *= tl.load(query_scale_ptr + n, mask=n < N, other=0.0)[:, None]
                row_ptr = out_ptr + (tokens[r][:, None] * D + d)
                tl.atomic_add(row_ptr, row, mask=(n < N)[:, None] & (d < D), sem="relaxed")

    total = tl.zeros((G,), tl.float32)
    for r in tl.static_range(R):
        n = tl.arange(0, G) * R + r
        total += of_mid[r]
        if d_points_ptr is not None:
            force = forces[r] * (weight * inv_bandwidth)
            tl.store(d_points_ptr + pair * N + n, force, mask=n < N)
        if d_mid_scale_ptr is not None:
            scale = tl.load(mid_scale_ptr + n, mask=n < N, other=0.0)
            d_scale = safe_divide(of_mid[r], scale) * weight
            tl.store(d_mid_scale_ptr + pair * N + n, d_scale, mask=n < N)
        if d_query_scale_ptr is not None:
            scale = tl.load(query_scale_ptr + n, mask=n < N, other=0.0)
            d_scale = safe_divide(of_scale[r], scale) * weight
            tl.store(d_query_scale_ptr + pair * N + n, d_scale, mask=n < N)
    if totals_ptr is not None:
        tl.store(totals_ptr + pair, tl.sum(total, 0))


def fits(
    shape: Shape, width: int, dtype: torch.dtype, metric: str, with_inv_bandwidth: bool = False
) -> bool:
    """Whether to hold sequences in registers: for narrow 16-bit rows, short and many slices, and
    one real pole.

    The shape is that of points, (batch, slices, ranks). With a power of two of columns a lane loads
    whole rows, and rows are exchanged without shared memory. Errors of single steps add up, which
    would matter for float32 rows. The gradient of the temperature and deterministic sums use
    chunks.
    """
    batch, slices, ranks = shape
    return (
        metric == "absolute"
        and width in WIDTHS
        and ranks <= MOST_RANKS
        and dtype.itemsize == 2
        and batch * slices >= LEAST_PAIRS
        and not with_inv_bandwidth
        and not torch.are_deterministic_algorithms_enabled()
    )


def config(ranks: int, width: int) -> dict[str, int]:
    """Ranks of a group, groups, and columns at a time: as many as registers allow."""
    least = ceil_div(max(1, ranks), LANES)
    size = next((size for size in GROUP_SIZES if size >= least), least)
    columns = min(MOST_COLUMNS, power_of_2(width), MOST_REGISTERS // power_of_2(size))
    return {
        "R": size, "G": LANES, "LEVELS": LANES.bit_length() - 1, "BLOCK_D": max(1, columns)
    }  # fmt: skip


@once
def _launch(pairs: int, slices: int, ranks: int, keys: int, queries: int, width: int) -> Launch:
    return Launch(
        short_apply_kernel, (pairs,), N=ranks, KEYS=keys, QUERIES=queries, L=slices, D=width,
        num_warps=1, **config(ranks, width),
    )  # fmt: skip


class ShortPlanKernels:
    """The plans of short slices on narrow rows of a dtype: launches of the kernel."""

    def __init__(self, plan: Plan, dtype: torch.dtype) -> None:
        self.plan = plan
        self.batch, self.slices, self.ranks = plan.key_points.shape

    def apply(
        self, x: Tensor, weight: Tensor, out: Tensor, ties: bool = False
    ) -> tuple[None, None]:
        """Adds ``Σ_l weight_l plan_l x`` to `out`. There are no states, and ties need none."""
        self._apply(self.plan, x, weight, out, None)
        return None, None

    def cross(self, g: Tensor, x: Tensor, out: Tensor) -> None:
        """``⟨g, plan_l x⟩`` of every slice to `out`, (batch, L)."""
        self._apply(self.plan, x, None, None, g, None, None, None, out)

    def grad(
        self, g: Tensor, x: Tensor, weight: Tensor, dx: Tensor | None, dg: Tensor | None,
        found: PlanGradients, x_states: object = None,
    ) -> None:  # fmt: skip
        """Gradients of ``Σ_l weight_l ⟨g, plan_l x⟩``: adds to dx and dg, writes to `found`."""
        self._apply(
            self.plan, x, weight, dg, g, found.query_points, found.query_scale, found.mid_scale,
            found.weight,
        )  # fmt: skip
        self._apply(self.plan.transposed(), g, weight, dx, x, found.key_points, found.key_scale)

    def _apply(
        self, plan: Plan, x: Tensor, weight: Tensor | None, out: Tensor | None, g: Tensor | None,
        d_points: Tensor | None = None, d_query_scale: Tensor | None = None,
        d_mid_scale: Tensor | None = None, totals: Tensor | None = None,
    ) -> None:  # fmt: skip
        """The plan from keys to queries, and with g its gradients on the side of the queries."""
        query_rows = out if g is None else g
        assert query_rows is not None
        _, keys, width = x.shape
        launch = _launch(
            self.batch * self.slices, self.slices, self.ranks, keys, query_rows.shape[-2], width
        )
        launch(
            x, plan.key_order, plan.key_scale, plan.key_points, plan.query_order, plan.query_scale,
            plan.query_points, plan.mid_scale, plan.inv_bandwidth, weight, out, g, d_points,
            d_query_scale, d_mid_scale, totals,
        )  # fmt: skip
