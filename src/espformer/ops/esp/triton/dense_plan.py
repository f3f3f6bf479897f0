"""Soft plans on short sequences: κ between all ranks and all tokens, without states.

The torch twins are those of `soft_plan.py`, whose operators choose between the two (:func:`fits`).
States of the squared metric are twelve float32 rows per chunk. A few hundred tokens are few enough
to compute κ as a whole, in registers, where the tensor cores take it:

    W = mid_scale · κ_k x,    (κ_k)_nj = κ(s_n - s(j)),    out = weight · κ_qᵀ W,

with ranks n in sorted order and tokens j in their own order; s_n is the point of a rank, s(j) the
point of a token. So rows need not be gathered: those of a head lie in shared memory for all slices,
and rows of the result are summed over slices in registers. W exists for a block of ranks at a time.
Before, :func:`place_kernel` writes the points of every slice by rank and by token.

**Backward.** As in `soft_plan.py` it is the same program, run once for each side. With the small
matrices ``M = W gᵀ`` (ranks × tokens), rows of ``κ_q' · M`` sum to the slope of the point as that
of a rank, and columns to its slope as that of a token. :func:`join_kernel` adds the two.

Tokens are divided into tiles of TILE, and a last one of its own size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from espformer.ops.common.triton import Launch, Shape, ceil_div, once, power_of_2
from espformer.ops.esp.triton.dense_columns import SLOPE
from espformer.ops.esp.triton.plan import Plan
from espformer.ops.esp.triton.primitives import (
    INTERPRETED,
    copy_sign,
    exp2_minus_abs,
    exp2_minus_square,
    gap_unit,
    rounded_product,
    safe_divide,
    to_wide_range,
    transposed_product,
)

if TYPE_CHECKING:
    from espformer.ops.esp.triton.soft_plan import PlanGradients

METRICS = ("squared",)  # the absolute one has a single real pole, whose states cost less
# Chunks are faster for narrow rows, for a few ranks, and in the backward of more than 128: two
# blocks, of which the second is often half empty, and one program at a time on a multiprocessor.
LEAST_RANKS, MOST_RANKS, MOST_RANKS_GRAD = 33, 256, 128
LEAST_WIDTH, MOST_WIDTH = 33, 64
# Most ranks of a program, tokens of a tile, and the least of the last tile: κ with 16 columns, made
# in registers, is a right operand that the compiler does not store correctly.
BLOCK, TILE, LEAST_TILE = 128, 64, 32
SCRATCH_BYTES = 1 << 29
REGISTERS = {"rows": 128, "grad": 128, "all": None, "cross": None}  # 128: two programs at once
LEAST_PROGRAMS = 528  # twice as many as a GPU runs at once
FIELDS = tl.constexpr(5)  # of `placed`: points of keys by rank, by token, of queries, `mid_scale`

if INTERPRETED:

    @triton.jit
    def prefetch(ptr):
        pass

    @triton.jit
    def differences_like(points, others, product):
        return others[None, :] - points[:, None]
else:

    @triton.jit
    def prefetch(ptr):
        """Brings what is there to the L1 cache."""
        tl.inline_asm_elementwise(
            "prefetch.global.L1 [$1]; mov.b32 $0, 0;", "=r,l", [ptr.to(tl.int64)], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip

    @triton.jit
    def differences_like(points, others, product):
        """``others_j - points_n``, held by the same threads as a product of that shape."""
        return tl.inline_asm_elementwise(
            "sub.f32 $0, $1, $2;", "=f,f,f,f", [others[None, :], points[:, None], product],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit(do_not_specialize=("L",))
def place_kernel(
    key_points_ptr,  # (B, L, N) float32
    key_order_ptr,  # (B, L, N) int32: the token of each rank
    query_points_ptr,  # (B, L, N) float32
    query_order_ptr,  # (B, L, N) int32
    mid_scale_ptr,  # (B, L, N) float32
    inv_bandwidth_ptr,  # (B,) float32
    placed_ptr,  # (B, L, FIELDS, ROOM) float32
    N, L, COMPLEX: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Points of one slice by rank and by token, in the unit of κ, and `mid_scale`; then zeros.

    Points are taken relative to the point nearest to zero, where floats are densest.
    """
    pair = tl.program_id(0).to(tl.int64)
    rate = gap_unit(tl.load(inv_bandwidth_ptr + pair // L), COMPLEX)
    n = tl.arange(0, ROOM)
    inside = n < N
    placed_ptr += pair * FIELDS * ROOM
    place_side(key_points_ptr + pair * N, key_order_ptr + pair * N, rate, placed_ptr, n, N)
    placed_ptr += 2 * ROOM
    place_side(query_points_ptr + pair * N, query_order_ptr + pair * N, rate, placed_ptr, n, N)
    mid_scale = tl.load(mid_scale_ptr + pair * N + n, mask=inside, other=0.0)
    tl.store(placed_ptr + 2 * ROOM + n, mid_scale)


@triton.jit
def place_side(points_ptr, order_ptr, rate, to_ptr, n, N):
    """The points of one side, by rank and by token."""
    ROOM: tl.constexpr = n.shape[0]
    inside = n < N
    nearest = tl.minimum(tl.maximum(tl.load(points_ptr), 0.0), tl.load(points_ptr + N - 1))
    points = tl.load(points_ptr + n, mask=inside, other=0.0) - nearest
    points = tl.where(inside, rounded_product(points, rate), 0.0)
    tl.store(to_ptr + n, points)
    token = tl.load(order_ptr + n, mask=inside, other=0)
    tl.store(to_ptr + ROOM + tl.where(inside, token, n), points)


@triton.jit
def load_tiles(
    x_ptr, N, D: tl.constexpr, BLOCK_D: tl.constexpr,
    TILES: tl.constexpr, TILE: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """All rows of a head, as a tuple of (tokens, columns); zero past the end."""
    d = tl.arange(0, BLOCK_D)[None, :]
    tiles = ()
    for c in tl.static_range(TILES):
        i = c * TILE + tl.arange(0, TAIL if c == TILES - 1 else TILE)[:, None]
        tiles = tiles + (tl.load(x_ptr + i * D + d, mask=(i < N) & (d < D), other=0.0),)
    return tiles


@triton.jit
def filled(x_ptr, value: tl.constexpr, N, SIZE: tl.constexpr):
    """A (SIZE, 16) matrix of one value in the type of x, of which the compiler knows nothing."""
    past = N + tl.arange(0, SIZE)[:, None]
    return tl.load(x_ptr + past + tl.arange(0, 16)[None, :], mask=past < N, other=value)


@triton.jit
def differences(points, others, like, blank, blank_tile):
    """``others_j - points_n``, held as the tensor cores take operands.

    For a matrix made from two vectors, the compiler would choose a layout that sends every entry
    through shared memory. So it is made like a product of the same shape, or added to one of zeros.
    """
    if like is not None and like.shape[1] == others.shape[0]:
        gap = differences_like(points, others, like)
    else:
        gap = tl.dot(blank, tl.trans(blank_tile), others[None, :] - points[:, None])
    return gap


@triton.jit
def kernel_of(gap, COMPLEX: tl.constexpr):
    """κ of scaled differences."""
    return exp2_minus_square(gap) if COMPLEX else exp2_minus_abs(gap)


@triton.jit
def slope_of(kappa, gap, COMPLEX: tl.constexpr):
    """κ' of scaled differences, SLOPE times smaller in the squared metric; zero between equals."""
    return gap * kappa if COMPLEX else copy_sign(kappa, gap)


@triton.jit
def add_product(x, y, total):
    """``total + x y`` in float32."""
    if x.dtype == tl.float32:
        total = tl.dot(x, y, total, input_precision="tf32x3")
    else:
        total = tl.dot(x, y, total)
    return total


@triton.jit
def times_kernel(
    x, points, others_ptr, like, blank, blank_tile, blank_tail, COMPLEX: tl.constexpr,
    TILES: tl.constexpr, TILE: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """κ x at ranks with these points, in float32; `others_ptr` has the points of the tokens.

    `like` is a product of (ranks, columns), or None.
    """
    total = tl.zeros((points.shape[0], x[0].shape[1]), tl.float32)
    for c in tl.static_range(TILES):
        others = tl.load(others_ptr + c * TILE + tl.arange(0, TAIL if c == TILES - 1 else TILE))
        gap = differences(
            points, others, like if c == 0 else total, blank,
            blank_tail if c == TILES - 1 else blank_tile,
        )  # fmt: skip
        total = add_product(kernel_of(gap, COMPLEX).to(x[c].dtype), x[c], total)
    return total


@triton.jit
def program_block(BLOCKS: tl.constexpr, C: tl.constexpr):
    """The head of this program, its block, and the ranks of that."""
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    return head, block, block * C + tl.arange(0, C)


@triton.jit
def next_slice(placed_ptr, l, L, ROOM: tl.constexpr):
    """Where points and `mid_scale` of a slice are; brings those of the next one near."""
    lines = tl.minimum(tl.arange(0, ROOM // 4) * 32, FIELDS * ROOM - 1)
    prefetch(placed_ptr + tl.minimum(l + 1, L - 1) * (FIELDS * ROOM) + lines)
    return placed_ptr + l * (FIELDS * ROOM)


@triton.jit(do_not_specialize=("L", "PART"))
def dense_apply_kernel(
    x_ptr,  # (B, N, D): rows of the keys
    placed_ptr,  # (B, L, FIELDS, ROOM) float32
    inv_bandwidth_ptr,  # (B,) float32
    weight_ptr,  # (B, L) float32
    out_ptr,  # (B, N, D) float32, or None
    g_ptr,  # (B, N, D): upstream rows of the queries; or None
    by_rank_ptr,  # (B, L, ROOM) float32: slopes of the queries' points as those of ranks
    by_token_ptr,  # (B, L, BLOCKS, ROOM) float32: as those of tokens
    d_mid_scale_ptr,  # (B, L, N) float32, or None
    totals_ptr,  # (B, L, BLOCKS) float32, or None: ⟨g, plan x⟩ without the weight
    N, L, PART, D: tl.constexpr, COMPLEX: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCKS: tl.constexpr, C: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
    TAIL: tl.constexpr, ROOM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds the plans of PART slices, through one block of ranks, to the rows of the queries.

    With rows g also the gradients of ``weight · ⟨g, plan x⟩`` on the side of the queries. If
    TRANSPOSED, keys are what the plan calls queries.
    """
    head, block, n = program_block(BLOCKS, C)
    x = load_tiles(x_ptr + head * N * D, N, D, BLOCK_D, TILES, TILE, TAIL)
    blank = filled(x_ptr, 0.0, N, C)
    blank_tile = filled(x_ptr, 0.0, N, TILE)
    blank_tail = filled(x_ptr, 0.0, N, TAIL)
    if g_ptr is not None:
        g = load_tiles(g_ptr + head * N * D, N, D, BLOCK_D, TILES, TILE, TAIL)
        unit = tl.load(inv_bandwidth_ptr + head) * (SLOPE if COMPLEX else 1.0)
    placed_ptr += head * L * (FIELDS * ROOM)
    keys_at: tl.constexpr = 2 * ROOM if TRANSPOSED else 0
    queries_at: tl.constexpr = 0 if TRANSPOSED else 2 * ROOM
    out = ()
    for c in tl.static_range(TILES if out_ptr is not None else 0):
        out = out + (tl.zeros((BLOCK_D, TAIL if c == TILES - 1 else TILE), tl.float32),)
    first = tl.program_id(1) * PART
    for l in tl.range(first, tl.minimum(first + PART, L), num_stages=1):
        pair = head * L + l
        here = next_slice(placed_ptr, l, L, ROOM)
        k_points = tl.load(here + keys_at + n)
        q_points = tl.load(here + queries_at + n)
        mid_scale = tl.load(here + 4 * ROOM + n)
        weight = tl.load(weight_ptr + pair)
        early, late = weight, 1.0  # W has the weight
        if totals_ptr is not None:  # which are wanted without it
            early, late = 1.0, weight
        w = times_kernel(
            x, k_points, here + keys_at + ROOM, None, blank, blank_tile, blank_tail, COMPLEX,
            TILES, TILE, TAIL,
        )  # fmt: skip
        like = w
        w = (w * (mid_scale * early)[:, None]).to(to_wide_range(x[0]).dtype)
        slope = tl.zeros((C,), tl.float32)
        mid_dots = tl.zeros((C,), tl.float32)
        new = ()
        for c in tl.static_range(TILES):
            tokens = c * TILE + tl.arange(0, TAIL if c == TILES - 1 else TILE)
            others = tl.load(here + queries_at + ROOM + tokens)
            if g_ptr is not None:
                m = transposed_product(w, to_wide_range(g[c]))
                gap = differences_like(q_points, others, m)
                kappa = kernel_of(gap, COMPLEX)
                if d_mid_scale_ptr is not None:
                    mid_dots += tl.sum(kappa * m, 1)
                force = slope_of(kappa, gap, COMPLEX) * m
                slope += tl.sum(force, 1)
                at = by_token_ptr + (pair * BLOCKS + block) * ROOM + tokens
                tl.store(at, tl.sum(force, 0) * (-late * unit))
            else:
                gap = differences(
                    q_points, others, like, blank, blank_tail if c == TILES - 1 else blank_tile
                )
                kappa = kernel_of(gap, COMPLEX)
            if out_ptr is not None:
                new = new + (add_product(tl.trans(w), kappa.to(w.dtype), out[c]),)
        if out_ptr is not None:
            out = new
        if g_ptr is not None:
            tl.store(by_rank_ptr + pair * ROOM + n, slope * (late * unit))
            if d_mid_scale_ptr is not None:
                d_mid_scale = safe_divide(mid_dots * late, mid_scale)
                tl.store(d_mid_scale_ptr + pair * N + n, d_mid_scale, mask=n < N)
            if totals_ptr is not None:
                tl.store(totals_ptr + pair * BLOCKS + block, tl.sum(mid_dots, 0))
    if out_ptr is not None:
        d = tl.arange(0, BLOCK_D)[:, None]
        for c in tl.static_range(TILES):
            i = c * TILE + tl.arange(0, TAIL if c == TILES - 1 else TILE)[None, :]
            to = out_ptr + head * N * D + i * D + d
            tl.atomic_add(to, out[c], mask=(i < N) & (d < D), sem="relaxed")


@triton.jit(do_not_specialize=("L", "PART"))
def dense_cross_kernel(
    x_ptr,  # (B, N, D): rows of the keys
    g_ptr,  # (B, N, D): rows of the queries
    placed_ptr,  # (B, L, FIELDS, ROOM) float32
    totals_ptr,  # (B, L, BLOCKS) float32
    N, L, PART, D: tl.constexpr, COMPLEX: tl.constexpr, BLOCKS: tl.constexpr, C: tl.constexpr,
    TILES: tl.constexpr, TILE: tl.constexpr, TAIL: tl.constexpr, ROOM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``⟨g, plan x⟩ = Σ_n mid_scale_n (κ_k x)_n · (κ_q g)_n``, one partial sum per block."""
    head, block, n = program_block(BLOCKS, C)
    x = load_tiles(x_ptr + head * N * D, N, D, BLOCK_D, TILES, TILE, TAIL)
    g = load_tiles(g_ptr + head * N * D, N, D, BLOCK_D, TILES, TILE, TAIL)
    blank = filled(x_ptr, 0.0, N, C)
    blank_tile = filled(x_ptr, 0.0, N, TILE)
    blank_tail = filled(x_ptr, 0.0, N, TAIL)
    placed_ptr += head * L * (FIELDS * ROOM)
    first = tl.program_id(1) * PART
    for l in tl.range(first, tl.minimum(first + PART, L), num_stages=1):
        here = next_slice(placed_ptr, l, L, ROOM)
        k_points = tl.load(here + n)
        q_points = tl.load(here + 2 * ROOM + n)
        mid_scale = tl.load(here + 4 * ROOM + n)
        y = times_kernel(
            x, k_points, here + ROOM, None, blank, blank_tile, blank_tail, COMPLEX, TILES, TILE,
            TAIL,
        )  # fmt: skip
        z = times_kernel(
            g, q_points, here + 3 * ROOM, y, blank, blank_tile, blank_tail, COMPLEX, TILES, TILE,
            TAIL,
        )  # fmt: skip
        total = tl.sum(tl.sum(y * z, 1) * mid_scale, 0)
        tl.store(totals_ptr + (head * L + l) * BLOCKS + block, total)


@triton.jit
def join_kernel(
    by_rank_ptr,  # (B, L, ROOM) float32
    by_token_ptr,  # (B, L, BLOCKS, ROOM) float32
    order_ptr,  # (B, L, N) int32: the token of each rank
    d_points_ptr,  # (B, L, N) float32
    N, BLOCKS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The gradient of the points of a slice: slopes as those of ranks, and as those of tokens."""
    pair = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, ROOM)
    inside = n < N
    token = tl.load(order_ptr + pair * N + n, mask=inside, other=0)
    slope = tl.load(by_rank_ptr + pair * ROOM + n, mask=inside, other=0.0)
    for block in tl.static_range(BLOCKS):
        at = by_token_ptr + (pair * BLOCKS + block) * ROOM + token
        slope += tl.load(at, mask=inside, other=0.0)
    tl.store(d_points_ptr + pair * N + n, slope, mask=inside)


def fits(
    shape: Shape, keys: int, queries: int, width: int, dtype: torch.dtype, metric: str,
    scales: bool, backward: bool, with_inv_bandwidth: bool = False,
) -> bool:  # fmt: skip
    """Whether to compute κ as a whole: for short sequences of 16-bit rows in the squared metric.

    The shape is that of points, (batch, slices, ranks). Chunks process what has more ranks than
    tokens (N ≠ M), `scales` at the ends of a plan, and the gradient of the temperature.
    """
    return (
        metric in METRICS
        and shape[-1] == keys == queries
        and LEAST_RANKS <= keys <= (MOST_RANKS_GRAD if backward else MOST_RANKS)
        and LEAST_WIDTH <= width <= MOST_WIDTH
        and dtype.itemsize == 2
        and not scales
        and not with_inv_bandwidth
    )


def pairs_at_once(ranks: int) -> int:
    """The number of (head, slice) pairs whose points and slopes fit in the scratch memory."""
    sizes = _sizes(1, max(1, ranks))
    each = (FIELDS.value + 1 + sizes["BLOCKS"]) * sizes["ROOM"] * 4
    return max(1, SCRATCH_BYTES // each)


@once
def _sizes(slices: int, ranks: int) -> dict[str, int]:
    """Blocks of ranks, tiles of tokens, and the room for either, as arguments of all kernels."""
    block = BLOCK if ranks > BLOCK // 2 else BLOCK // 2
    blocks, tiles = ceil_div(ranks, block), ceil_div(ranks, TILE)
    tail = max(LEAST_TILE, power_of_2(ranks - (tiles - 1) * TILE))
    room = power_of_2(max(blocks * block, (tiles - 1) * TILE + tail))
    return {
        "N": ranks, "L": slices, "C": block, "BLOCKS": blocks, "TILES": tiles, "TILE": TILE,
        "TAIL": tail, "ROOM": room,
    }  # fmt: skip


@once
def _launch(
    name: str, shape: Shape, width: int, metric: str, in_order: bool, transposed: bool = False
) -> Launch:
    """Launches a kernel of products; a program processes all slices of a head.

    If these programs would not fill a GPU, it processes some of them, unless rows are to be added
    in order: two numbers that are added to zero may come in any.
    """
    batch, slices, ranks = shape
    sizes = _sizes(slices, ranks)
    programs = batch * sizes["BLOCKS"]
    parts = 1 if in_order else min(slices, max(1, LEAST_PROGRAMS // programs))
    part = ceil_div(slices, parts)
    kernel, sides = dense_apply_kernel, {"TRANSPOSED": transposed}
    if name == "cross":
        kernel, sides = dense_cross_kernel, {}
    return Launch(
        kernel, (programs, ceil_div(slices, part)), PART=part, D=width,
        COMPLEX=metric != "absolute", BLOCK_D=max(16, power_of_2(width)),
        num_warps=max(1, sizes["C"] // 16), maxnreg=REGISTERS[name], **sizes, **sides,
    )  # fmt: skip


@once
def _place(shape: Shape, metric: str) -> Launch:
    batch, slices, ranks = shape
    room = _sizes(slices, ranks)["ROOM"]
    return Launch(
        place_kernel, (batch * slices,), N=ranks, L=slices, COMPLEX=metric != "absolute",
        ROOM=room, num_warps=1,
    )  # fmt: skip


@once
def _join(shape: Shape) -> Launch:
    batch, slices, ranks = shape
    sizes = _sizes(slices, ranks)
    return Launch(
        join_kernel, (batch * slices,), N=ranks, BLOCKS=sizes["BLOCKS"], ROOM=sizes["ROOM"],
        num_warps=1,
    )  # fmt: skip


class DensePlanKernels:
    """The plans of short sequences on rows of a dtype: launches of the kernels above."""

    in_order = True  # rows of all slices can be added to the same rows, and always give the same

    def __init__(self, plan: Plan, dtype: torch.dtype) -> None:
        self.plan, self.shape = plan, plan.key_points.shape
        self.sizes = _sizes(*self.shape[1:])
        self.placed = self._new(FIELDS.value, self.sizes["ROOM"])
        _place(self.shape, plan.metric)(
            plan.key_points, plan.key_order, plan.query_points, plan.query_order, plan.mid_scale,
            plan.inv_bandwidth, self.placed,
        )  # fmt: skip

    def apply(
        self, x: Tensor, weight: Tensor, out: Tensor, ties: bool = False
    ) -> tuple[None, None]:
        """Adds ``Σ_l weight_l plan_l x`` to `out`. There are no states, and ties need none."""
        self._apply(x, weight, out, transposed=False)
        return None, None

    def cross(self, g: Tensor, x: Tensor, out: Tensor) -> None:
        """``⟨g, plan_l x⟩`` of every slice to `out`, (batch, L)."""
        totals = self._new(self.sizes["BLOCKS"])
        self._launch("cross", x)(x, g, self.placed, totals)
        torch.sum(totals, -1, out=out)

    def grad(
        self, g: Tensor, x: Tensor, weight: Tensor, dx: Tensor, dg: Tensor | None,
        found: PlanGradients, x_states: object = None,
    ) -> None:  # fmt: skip
        """Gradients of ``Σ_l weight_l ⟨g, plan_l x⟩``: adds to dx and dg, writes to `found`."""
        plan = self.plan
        blocks, room = self.sizes["BLOCKS"], self.sizes["ROOM"]
        totals = None if found.weight is None else self._new(blocks)
        slopes = self._new(room), self._new(blocks, room)
        join = _join(self.shape)
        self._apply(x, weight, dg, g, *slopes, found.mid_scale, totals, transposed=False)
        join(*slopes, plan.query_order, found.query_points)
        self._apply(g, weight, dx, x, *slopes, transposed=True)
        join(*slopes, plan.key_order, found.key_points)
        if totals is not None:
            torch.sum(totals, -1, out=found.weight)

    def _apply(
        self, x: Tensor, weight: Tensor, out: Tensor | None, g: Tensor | None = None,
        by_rank: Tensor | None = None, by_token: Tensor | None = None,
        d_mid_scale: Tensor | None = None, totals: Tensor | None = None, *, transposed: bool,
    ) -> None:  # fmt: skip
        """The plan from keys to queries, and with g its gradients on the side of the queries."""
        name = "rows" if g is None else "grad" if out is None else "all"
        self._launch(name, x, transposed)(
            x, self.placed, self.plan.inv_bandwidth, weight, out, g, by_rank, by_token,
            d_mid_scale, totals,
        )  # fmt: skip

    def _launch(self, name: str, x: Tensor, transposed: bool = False) -> Launch:
        in_order = torch.are_deterministic_algorithms_enabled()
        return _launch(name, self.shape, x.shape[-1], self.plan.metric, in_order, transposed)

    def _new(self, *sizes: int) -> Tensor:
        """A buffer of so many numbers for every slice."""
        return self.plan.mid_scale.new_empty(*self.shape[:2], *sizes)
