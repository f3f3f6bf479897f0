"""Sorted sides and the plans between them: the inputs of the kernels of soft attention.

`sort_side → Plan → kernels` is the only way through. Queries and keys of one shape are one *side*
of twice as many heads, the keys after the queries, so that every kernel is launched once for both.

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

from espformer.ops.esp.coupling import Coupling
from espformer.ops.esp.triton.normalise import (
    balanced_scales,
    balanced_scales_backward,
    bandwidth_gradient,
    row_scales,
    row_scales_backward,
)
from espformer.ops.esp.triton.points import point_gradients, sort_points

Group = tuple[slice, slice]  # some heads, and some of their slices


class Tokens(NamedTuple):
    """The tokens of one side, or of both if they have one shape, dtype and mask."""

    x: Tensor  # (batch, N, m)
    y: Tensor | None  # likewise: the keys, if x are the queries
    mask: Tensor | None  # (batch, N), of either
    lengths: Tensor | None  # (batch,) int32, if there is a mask


class SortedSide(NamedTuple):
    """Tokens softly sorted on every slice: ``diag(scale) κ``, or ``diag(scale) κ diag(scale)`` if
    balanced. With two sides, heads are those of the queries, then those of the keys.
    """

    points: Tensor  # (heads, L, N): sorted; padding repeats the last true one
    order: Tensor  # (heads, L, N) int32: the token at each rank
    spread: Tensor | None  # (heads, L), if points are in units of it
    scale: Tensor  # (heads, L, N); zero at padding

    def halves(self) -> tuple[SortedSide, SortedSide]:
        """The queries and the keys of two sides, without the spread."""
        points, order, scale = self.points.chunk(2), self.order.chunk(2), self.scale.chunk(2)
        return (
            SortedSide(points[0], order[0], None, scale[0]),
            SortedSide(points[1], order[1], None, scale[1]),
        )


class SortSettings(NamedTuple):
    """How tokens are sorted."""

    scale: float  # what tokens are multiplied by
    in_spreads: bool  # whether points are divided by their spread
    balanced: bool
    metric: str
    fp32_rows: bool


def sort_side(
    tokens: Tokens, slices: Tensor | None, inv_bandwidth: Tensor, settings: SortSettings
) -> SortedSide:
    """Sorts and normalises."""
    scale, in_spreads, balanced, metric, fp32_rows = settings
    points, order, spread = sort_points(
        tokens.x, tokens.y, slices, tokens.mask, tokens.lengths, scale, in_spreads
    )
    scales = balanced_scales if balanced else row_scales
    found = scales(points, tokens.lengths, inv_bandwidth, metric, fp32_rows)
    return SortedSide(points, order, spread, found)


def sort_side_backward(
    d_points: Tensor, d_scale: Tensor | None, d_mid_scale: Tensor | None, side: SortedSide,
    tokens: Tokens, slices: Tensor | None, inv_bandwidth: Tensor, settings: SortSettings,
    with_slices: bool, with_inv_bandwidth: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x, of y, of the slices and of `inv_bandwidth`; None if there is no such.

    Two sides may have the gradient of the product of their scales, `d_mid_scale`.
    """
    arguments = side.scale, side.points, inv_bandwidth, settings.metric, settings.fp32_rows
    if not settings.balanced:
        slope = row_scales_backward(d_scale, *arguments, d_mid_scale)
    else:
        if d_mid_scale is not None:
            others = side.scale.view(2, *d_mid_scale.shape).flip(0)
            of_mid = (others * d_mid_scale).view(side.scale.shape)
            d_scale = of_mid if d_scale is None else of_mid.add_(d_scale)
        assert d_scale is not None
        slope = balanced_scales_backward(d_scale, *arguments)
    d_inv_bandwidth = None
    if with_inv_bandwidth:
        d_inv_bandwidth = bandwidth_gradient(slope, side.points, inv_bandwidth)
    dx, dy, d_slices = point_gradients(
        slope, d_points, side.points, side.order, side.spread, tokens.x, tokens.y, slices,
        tokens.lengths, settings.scale, with_slices,
    )  # fmt: skip
    return dx, dy, d_slices, d_inv_bandwidth


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


def _part(x: Tensor | None, group: Group) -> Tensor | None:
    return x if x is None else x[group[0]] if x.dim() == 1 else x[group]


class Pieces(NamedTuple):
    """The pieces of a monotone coupling, for every slice: (batch, L, pieces)."""

    rows: Tensor  # the query rank of each piece
    columns: Tensor  # its key rank
    weights: Tensor  # (batch, 1, pieces)
    first_of_row: Tensor  # likewise: one at the first piece of every query rank, else zero
    first_of_column: Tensor

    @staticmethod
    def of(coupling: Coupling, slices: int) -> Pieces:
        rows, columns = (
            ranks.unsqueeze(1).expand(-1, slices, -1) for ranks in (coupling.rows, coupling.columns)
        )
        first = _first_pieces(coupling.rows), _first_pieces(coupling.columns)
        return Pieces(rows, columns, coupling.weights.unsqueeze(1), *first)

    def plan(
        self, queries: SortedSide, keys: SortedSide, inv_bandwidth: Tensor, balanced: bool,
        metric: str,
    ) -> Plan:  # fmt: skip
        """The plans from keys to queries, piece to piece."""
        rows, columns = self.rows, self.columns
        query_scale, key_scale = queries.scale.gather(-1, rows), keys.scale.gather(-1, columns)
        return Plan(
            queries.points.gather(-1, rows),
            keys.points.gather(-1, columns),
            queries.order.gather(-1, rows),
            keys.order.gather(-1, columns),
            inv_bandwidth,
            query_scale * key_scale * self.weights,
            self._first(key_scale, self.first_of_column, balanced),
            self._first(query_scale, self.first_of_row, balanced),
            metric,
        )

    @staticmethod
    def _first(scale: Tensor, first: Tensor, balanced: bool) -> Tensor:
        return (scale * first if balanced else first.expand(scale.shape)).contiguous()

    def gradients(
        self, queries: SortedSide, keys: SortedSide, d_points: tuple[Tensor, Tensor],
        d_first: tuple[Tensor, Tensor] | None, d_mid_scale: Tensor,
    ) -> list[tuple[Tensor, Tensor | None]]:  # fmt: skip
        """Gradients of points and scales of the queries, and of the keys, from those by piece.

        `d_first` are those of `query_scale` and `key_scale`, if these are scales of the sides.
        """
        scales = queries.scale.gather(-1, self.rows), keys.scale.gather(-1, self.columns)
        d_mid_scale = d_mid_scale * self.weights
        found: list[tuple[Tensor, Tensor | None]] = []
        for i, (side, ranks, first) in enumerate(
            (
                (queries, self.rows, self.first_of_row),
                (keys, self.columns, self.first_of_column),
            )
        ):
            d_scale = d_mid_scale * scales[1 - i]
            if d_first is not None:
                d_scale += d_first[i] * first
            found.append(
                (
                    torch.zeros_like(side.points).scatter_add_(-1, ranks, d_points[i]),
                    torch.zeros_like(side.scale).scatter_add_(-1, ranks, d_scale),
                )
            )
        return found


def _first_pieces(ranks: Tensor) -> Tensor:
    """One at the first piece of every rank, else zero: (batch, 1, pieces)."""
    new = ranks[:, 1:] != ranks[:, :-1]
    return torch.nn.functional.pad(new.float(), (1, 0), value=1.0).unsqueeze(1)
