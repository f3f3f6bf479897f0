"""Sorted sides and the plans between them: the inputs of the kernels of soft attention.

`SortedSide → Plan → operator` is the only way through. ``espformer::sort_sides`` makes both sides:
every operator costs time of Python for itself, forwards and backwards. At the border of an
operator, which takes and returns tensors, a plan is a tuple of arguments; behind it, it is a `Plan`
again.

**N ≠ M as a one-to-one matching of pieces.** A monotone coupling cuts both sides into the same
pieces: piece s belongs to query rank rows[s] and key rank columns[s], and has the weight
weights[s]. In terms of pieces, a plan is between sides of equal length. A key rank with several
pieces is an operand only at its first piece (`key_scale` is zero at the others), and a query rank
with several pieces is read only at its first piece (`query_scale`):

    (A T B v)_i = Σ_s κ_q(i, rows[s]) · weights[s] · Σ_j κ_k(columns[s], j) v_j.

Pieces of one rank have the same point. They are ties, which exert no force on each other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from espformer.ops.common.autograd import refuse_double_backward
from espformer.ops.common.custom_op import operator
from espformer.ops.esp.coupling import Coupling
from espformer.ops.esp.triton.normalise import (
    balanced_scales,
    balanced_scales_backward,
    bandwidth_gradient,
    row_scales,
    row_scales_backward,
)
from espformer.ops.esp.triton.sort import rank_points, unrank_points

Group = tuple[slice, slice]  # some heads, and some of their slices


class SortedSide(NamedTuple):
    """Queries or keys, softly sorted on every slice: ``diag(out_scale) κ diag(in_scale)``."""

    points: Tensor  # (batch, L, N): sorted; padding repeats the last true one
    order: Tensor  # (batch, L, N) int32: the token at each rank
    lengths: Tensor | None  # (batch,), if some are padded
    out_scale: Tensor  # (batch, L, N); zero at padding
    in_scale: Tensor | None  # likewise; None where it is one

    def present(self) -> Tensor:
        """One at every rank that is not padding, (batch, L, N)."""
        if self.lengths is None:
            return self.points.new_ones(()).expand(self.points.shape)
        return valid_ranks(self.points, self.lengths).float().expand(self.points.shape)

    def counts(self) -> Tensor:
        """Tokens of every sequence, (batch,)."""
        if self.lengths is not None:
            return self.lengths
        batch, _, tokens = self.points.shape
        return torch.full((batch,), tokens, device=self.points.device)


def valid_ranks(points: Tensor, lengths: Tensor) -> Tensor:
    """Ranks that are not padding: (batch, 1, N)."""
    positions = torch.arange(points.shape[-1], device=points.device)
    return (positions < lengths.unsqueeze(-1)).unsqueeze(1)


@operator("sort_sides")
def sort_sides(
    query: Tensor, key: Tensor, slices: Tensor | None, query_mask: Tensor | None,
    key_mask: Tensor | None, query_lengths: Tensor | None, key_lengths: Tensor | None,
    key_inv_bandwidth: Tensor, query_inv_bandwidth: Tensor, scale: float, in_spreads: bool,
    balanced: bool, one_to_one: bool, metric: str, fp32_rows: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Points, tokens, spreads and scales of the queries, those of the keys, and `mid_scale`.

    The first three are those of ``espformer::rank_points``; scales are those of
    ``espformer::balanced_scales`` or ``espformer::row_scales``. `mid_scale` is their product if
    ranks meet one to one, else empty. Either side has the inverse bandwidth for itself, so that
    autograd adds up their gradients as those of two operators.
    """
    found = []
    scales = balanced_scales if balanced else row_scales
    sides = (
        (query, query_mask, query_lengths, query_inv_bandwidth),
        (key, key_mask, key_lengths, key_inv_bandwidth),
    )
    for x, mask, lengths, inv_bandwidth in sides:
        ranked = rank_points.inside(x, slices, mask, lengths, scale, in_spreads)
        points = ranked[0]
        found += [*ranked, scales.inside(points, lengths, inv_bandwidth, metric, fp32_rows)]
    q_points, q_order, q_spread, q_scale, k_points, k_order, k_spread, k_scale = found
    mid_scale = q_scale * k_scale if one_to_one else q_scale.new_empty(0)
    return (
        q_points, q_order, q_spread, q_scale, k_points, k_order, k_spread, k_scale, mid_scale
    )  # fmt: skip


@sort_sides.register_fake
def _(
    query: Tensor, key: Tensor, slices: Tensor | None, query_mask: Tensor | None,
    key_mask: Tensor | None, query_lengths: Tensor | None, key_lengths: Tensor | None,
    key_inv_bandwidth: Tensor, query_inv_bandwidth: Tensor, scale: float, in_spreads: bool,
    balanced: bool, one_to_one: bool, metric: str, fp32_rows: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    found: list[Tensor] = []
    for x in (query, key):
        shape = (x.shape[0], x.shape[2] if slices is None else slices.shape[-2], x.shape[1])
        points = x.new_empty(shape, dtype=torch.float32)
        spread = points.new_empty(shape[:2] if in_spreads else 0)
        order = x.new_empty(shape, dtype=torch.int32)
        found += [points, order, spread, torch.empty_like(points)]
    return (*found, torch.empty_like(found[0]) if one_to_one else found[0].new_empty(0))


@operator("sort_sides_backward")
def sort_sides_backward(
    d_points: Tensor | None, d_scale: Tensor | None, d_mid_scale: Tensor | None,
    other_scale: Tensor, points: Tensor, order: Tensor, spread: Tensor, scales: Tensor, x: Tensor,
    slices: Tensor | None, lengths: Tensor | None, inv_bandwidth: Tensor, scale: float,
    balanced: bool, metric: str, fp32_rows: bool, with_slices: bool, with_inv_bandwidth: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of one side: of its tokens, of the slices and of `inv_bandwidth`.

    The latter two are empty unless they are asked for.
    """
    if d_mid_scale is not None:
        met = d_mid_scale * other_scale
        d_scale = met if d_scale is None else met.add_(d_scale)
    d_inv_bandwidth = None
    if d_scale is not None:
        backward = balanced_scales_backward if balanced else row_scales_backward
        slope = backward.inside(d_scale, scales, points, inv_bandwidth, metric, fp32_rows)
        if with_inv_bandwidth:
            d_inv_bandwidth = bandwidth_gradient(slope, points, inv_bandwidth)
        d_points = slope if d_points is None else slope.add_(d_points)
    elif d_points is None:
        d_points = torch.zeros_like(points)
    if d_inv_bandwidth is None:
        none = inv_bandwidth.new_empty(0)
        d_inv_bandwidth = torch.zeros_like(inv_bandwidth) if with_inv_bandwidth else none
    dx, d_slices = unrank_points.inside(
        d_points, points, order, spread, x, slices, lengths, scale, with_slices
    )
    return dx, d_slices, d_inv_bandwidth


@sort_sides_backward.register_fake
def _(
    d_points: Tensor | None, d_scale: Tensor | None, d_mid_scale: Tensor | None,
    other_scale: Tensor, points: Tensor, order: Tensor, spread: Tensor, scales: Tensor, x: Tensor,
    slices: Tensor | None, lengths: Tensor | None, inv_bandwidth: Tensor, scale: float,
    balanced: bool, metric: str, fp32_rows: bool, with_slices: bool, with_inv_bandwidth: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    d_slices = slices if with_slices else None
    return (
        x.new_empty(x.shape),
        points.new_empty(0 if d_slices is None else d_slices.shape),
        inv_bandwidth.new_empty(inv_bandwidth.shape if with_inv_bandwidth else 0),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, slices, _, _, query_lengths, key_lengths, inv_bandwidth, _, *options = inputs
    ctx.scale, _, ctx.balanced, _, ctx.metric, ctx.fp32_rows = options
    *found, mid_scale = output
    ctx.save_for_backward(*found, query, key, slices, query_lengths, key_lengths, inv_bandwidth)
    _, q_order, q_spread, _, _, k_order, k_spread, _ = found
    nothing = () if mid_scale.numel() else (mid_scale,)
    ctx.mark_non_differentiable(q_order, q_spread, k_order, k_spread, *nothing)
    ctx.set_materialize_grads(False)


@refuse_double_backward("espformer::sort_sides")
def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    if all(x is None for x in grads):
        return (None,) * len(needs)
    *found, query, key, slices, q_lengths, k_lengths, inv_bandwidth = ctx.saved_tensors
    queries, keys = found[:4], found[4:]
    dq_points, _, _, dq_scale, dk_points, _, _, dk_scale, d_mid_scale = grads
    options = inv_bandwidth, ctx.scale, ctx.balanced, ctx.metric, ctx.fp32_rows, needs[2], needs[7]
    d_query = d_key = d_slices = dq_inv_bandwidth = dk_inv_bandwidth = None
    shared = needs[2] or needs[7]
    if needs[1] or shared:
        d_key, d_slices, dk_inv_bandwidth = sort_sides_backward(
            dk_points, dk_scale, d_mid_scale, queries[3], *keys, key, slices, k_lengths, *options
        )
    if needs[0] or shared:
        d_query, more, dq_inv_bandwidth = sort_sides_backward(
            dq_points, dq_scale, d_mid_scale, keys[3], *queries, query, slices, q_lengths, *options
        )
        d_slices = d_slices + more if needs[2] else None
    if not needs[7]:
        dq_inv_bandwidth = dk_inv_bandwidth = None
    return (
        d_query, d_key, d_slices if needs[2] else None, None, None, None, None, dk_inv_bandwidth,
        dq_inv_bandwidth, *(None,) * 6,
    )  # fmt: skip


sort_sides.register_autograd(_backward, setup_context=_setup)


class Plan(NamedTuple):
    """The plan of every slice, from keys to queries, by rank:

    ``diag(query_scale) κ_q diag(mid_scale) κ_k diag(key_scale)``; rank n of the queries is matched
    with rank n of the keys.
    """

    query_points: Tensor  # (batch, L, ranks), as all that follows
    key_points: Tensor
    query_order: Tensor  # int32: the token of each rank
    key_order: Tensor
    inv_bandwidth: Tensor  # (batch,)
    mid_scale: Tensor
    key_scale: Tensor | None  # None where it is one
    query_scale: Tensor | None
    metric: str

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All fields but the metric."""
        return self[:-1]

    def transposed(self) -> Plan:
        """The same plan from queries to keys."""
        return Plan(
            self.key_points, self.query_points, self.key_order, self.query_order,
            self.inv_bandwidth, self.mid_scale, self.query_scale, self.key_scale, self.metric,
        )  # fmt: skip

    def part(self, group: Group | None) -> Plan:
        """The plans of some slices of some heads."""
        if group is None:
            return self
        flat: tuple[Any, ...] = (*(_part(x, group) for x in self.tensors()), self.metric)
        return Plan(*flat)


# As in the schema of an operator.
PLAN_SCHEMA = (
    "Tensor query_points, Tensor key_points, Tensor query_order, Tensor key_order, "
    "Tensor inv_bandwidth, Tensor mid_scale, Tensor? key_scale, Tensor? query_scale, str metric"
)


def _part(x: Tensor | None, group: Group) -> Tensor | None:
    return x if x is None else x[group[0]] if x.dim() == 1 else x[group]


def make_plan(
    queries: SortedSide, keys: SortedSide, mid_scale: Tensor, inv_bandwidth: Tensor, metric: str,
    coupling: Coupling | None,
) -> Plan:  # fmt: skip
    """The plans from keys to queries, rank to rank, or piece to piece of a coupling."""
    if coupling is None:
        return Plan(
            queries.points, keys.points, queries.order, keys.order, inv_bandwidth, mid_scale,
            keys.in_scale, queries.in_scale, metric,
        )  # fmt: skip
    slices = queries.points.shape[1]
    rows, columns = (
        ranks.unsqueeze(1).expand(-1, slices, -1) for ranks in (coupling.rows, coupling.columns)
    )
    mid_scale = queries.out_scale.gather(-1, rows) * keys.out_scale.gather(-1, columns)
    return Plan(
        queries.points.gather(-1, rows),
        keys.points.gather(-1, columns),
        queries.order.gather(-1, rows),
        keys.order.gather(-1, columns),
        inv_bandwidth,
        mid_scale * coupling.weights.unsqueeze(1),
        _piece_scale(keys.in_scale, columns, _first_pieces(coupling.columns)),
        _piece_scale(queries.in_scale, rows, _first_pieces(coupling.rows)),
        metric,
    )


def _piece_scale(in_scale: Tensor | None, ranks: Tensor, first: Tensor) -> Tensor:
    return first.expand(ranks.shape) if in_scale is None else in_scale.gather(-1, ranks) * first


def _first_pieces(ranks: Tensor) -> Tensor:
    """One at the first piece of every rank, else zero: (batch, 1, pieces)."""
    new = ranks[:, 1:] != ranks[:, :-1]
    return torch.nn.functional.pad(new.float(), (1, 0), value=1.0).unsqueeze(1)
