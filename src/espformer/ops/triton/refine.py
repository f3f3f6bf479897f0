"""N ≠ M, brought to ranks that meet one to one.

A monotone coupling cuts both sides into the same pieces: piece s belongs to query rank rows[s] and
to key rank columns[s], and carries weights[s]. Written out over pieces, a plan is one between sides
of equal length. A key rank of several pieces is an operand once, at its first piece (`first` is
zero at the others), and a query rank of several pieces is read once, there too (`final`):

    (A T B v)_i = Σ_s κ_q(i, rows[s]) · weights[s] · Σ_j κ_k(columns[s], j) v_j.

Pieces of one rank stand at the same number, which is a tie, and ties exert no force on each other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from espformer.ops.coupling import Coupling


class Sides(NamedTuple):
    """Both sides of every slice's plan by rank, (batch, L, ranks): arguments of the operators."""

    query_values: Tensor
    key_values: Tensor
    query_order: Tensor
    key_order: Tensor
    inverse_width: Tensor  # (batch,)
    query_scale: Tensor
    key_scale: Tensor
    first: Tensor | None
    final: Tensor | None


def refine(sides: Sides, coupling: Coupling) -> Sides:
    """The same plans over the pieces of a coupling."""
    slices = sides.query_values.shape[1]
    rows, columns = (
        ranks.unsqueeze(1).expand(-1, slices, -1) for ranks in (coupling.rows, coupling.columns)
    )
    first, final = _starts(coupling.columns), _starts(coupling.rows)
    return Sides(
        sides.query_values.gather(-1, rows),
        sides.key_values.gather(-1, columns),
        sides.query_order.gather(-1, rows),
        sides.key_order.gather(-1, columns),
        sides.inverse_width,
        sides.query_scale.gather(-1, rows) * coupling.weights.unsqueeze(1),
        sides.key_scale.gather(-1, columns),
        first.expand(columns.shape)
        if sides.first is None
        else sides.first.gather(-1, columns) * first,
        final.expand(rows.shape) if sides.final is None else sides.final.gather(-1, rows) * final,
    )


def _starts(ranks: Tensor) -> Tensor:
    """One at the first piece of every rank, else zero: (batch, 1, pieces)."""
    new = ranks[:, 1:] != ranks[:, :-1]
    return torch.nn.functional.pad(new.float(), (1, 0), value=1.0).unsqueeze(1)
