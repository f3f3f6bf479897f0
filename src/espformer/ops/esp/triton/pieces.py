"""Plans between sides of two lengths, N ≠ M, as a one-to-one matching of pieces.

The torch twin is :class:`espformer.ops.esp.coupling.Coupling`.

A monotone coupling cuts both sides into the same pieces: piece s belongs to query rank rows[s] and
key rank columns[s], and has the weight weights[s]. In terms of pieces, a plan is between sides of
equal length. A key rank with several pieces is an operand only at its first piece (`key_scale` is
zero at the others), and a query rank with several pieces is read only at its first piece
(`query_scale`):

    (A T B v)_i = Σ_s κ_q(i, rows[s]) · weights[s] · Σ_j κ_k(columns[s], j) v_j.

Pieces of one rank have the same point. They are ties, which exert no force on each other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from espformer.ops.esp.coupling import Coupling
from espformer.ops.esp.triton.normalise import SortedSide
from espformer.ops.esp.triton.soft_plan import Plan


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
