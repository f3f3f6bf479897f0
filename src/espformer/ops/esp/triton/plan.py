"""Sorted sides and the plans between them: what the kernels of soft attention are told.

`SortedSide → Plan → operator` is the only way through. At the border of an operator, which takes
and returns tensors, a plan is a tuple of arguments; behind it, it is a `Plan` again.

**N ≠ M, brought to ranks that meet one to one.** A monotone coupling cuts both sides into the same
pieces: piece s belongs to query rank rows[s] and to key rank columns[s], and carries weights[s].
Written out over pieces, a plan is one between sides of equal length. A key rank of several pieces
is an operand once, at its first piece (`key_scale` is zero at the others), and a query rank of
several pieces is read once, there too (`query_scale`):

    (A T B v)_i = Σ_s κ_q(i, rows[s]) · weights[s] · Σ_j κ_k(columns[s], j) v_j.

Pieces of one rank stand at the same point, which is a tie, and ties exert no force on each other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from espformer.ops.esp.coupling import Coupling

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


class Plan(NamedTuple):
    """The plan of every slice, from keys to queries, by rank:

    ``diag(query_scale) κ_q diag(mid_scale) κ_k diag(key_scale)``; rank n of the queries meets rank
    n of the keys.
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


PLAN_FIELDS = Plan._fields
# As in the schema of an operator.
PLAN_SCHEMA = (
    "Tensor query_points, Tensor key_points, Tensor query_order, Tensor key_order, "
    "Tensor inv_bandwidth, Tensor mid_scale, Tensor? key_scale, Tensor? query_scale, str metric"
)


def _part(x: Tensor | None, group: Group) -> Tensor | None:
    return x if x is None else x[group[0]] if x.dim() == 1 else x[group]


def make_plan(
    queries: SortedSide, keys: SortedSide, inv_bandwidth: Tensor, metric: str,
    coupling: Coupling | None,
) -> Plan:  # fmt: skip
    """The plans from keys to queries, rank to rank, or piece to piece of a coupling."""
    if coupling is None:
        return Plan(
            queries.points, keys.points, queries.order, keys.order, inv_bandwidth,
            queries.out_scale * keys.out_scale, keys.in_scale, queries.in_scale, metric,
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
