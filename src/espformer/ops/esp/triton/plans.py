"""Two sides that meet: the plans of all slices, as arguments of the operators.

**N ≠ M, brought to ranks that meet one to one.** A monotone coupling cuts both sides into the same
pieces: piece s belongs to query rank rows[s] and to key rank columns[s], and carries weights[s].
Written out over pieces, a plan is one between sides of equal length. A key rank of several pieces
is an operand once, at its first piece (`first` is zero at the others), and a query rank of several
pieces is read once, there too (`final`):

    (A T B v)_i = Σ_s κ_q(i, rows[s]) · weights[s] · Σ_j κ_k(columns[s], j) v_j.

Pieces of one rank stand at the same number, which is a tie, and ties exert no force on each other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from espformer.ops.esp.coupling import Coupling


def valid_ranks(values: Tensor, lengths: Tensor) -> Tensor:
    """Ranks that are no padding: (batch, 1, N)."""
    positions = torch.arange(values.shape[-1], device=values.device)
    return (positions < lengths.unsqueeze(-1)).unsqueeze(1)


class Side(NamedTuple):
    """Queries or keys, softly sorted on every slice: ``diag(scale) κ diag(factor)`` of ranks."""

    values: Tensor  # (batch, L, N): sorted numbers; padding repeats the last true one
    order: Tensor  # (batch, L, N) int32: the token at each rank
    lengths: Tensor | None  # (batch,), if some are padded
    scale: Tensor  # (batch, L, N); zero at padding
    factor: Tensor | None  # likewise; None where it is one

    def present(self) -> Tensor:
        """One at every rank that is no padding, (batch, L, N)."""
        if self.lengths is None:
            return self.values.new_ones(()).expand(self.values.shape)
        return valid_ranks(self.values, self.lengths).float().expand(self.values.shape)

    def counts(self) -> Tensor:
        """Tokens of every sequence, (batch,)."""
        if self.lengths is not None:
            return self.lengths
        batch, _, tokens = self.values.shape
        return torch.full((batch,), tokens, device=self.values.device)


class Plans(NamedTuple):
    """The plan of every slice, ``final · κ_q · scale · κ_k · first`` by rank, (batch, L, ranks)."""

    query_values: Tensor
    key_values: Tensor
    query_order: Tensor
    key_order: Tensor
    inverse_width: Tensor  # (batch,)
    scale: Tensor
    first: Tensor | None
    final: Tensor | None


def meet(queries: Side, keys: Side, inverse_width: Tensor, coupling: Coupling | None) -> Plans:
    """Plans from keys to queries, rank to rank, or piece to piece of a coupling."""
    if coupling is None:
        return Plans(
            queries.values, keys.values, queries.order, keys.order, inverse_width,
            queries.scale * keys.scale, keys.factor, queries.factor,
        )  # fmt: skip
    slices = queries.values.shape[1]
    rows, columns = (
        ranks.unsqueeze(1).expand(-1, slices, -1) for ranks in (coupling.rows, coupling.columns)
    )
    first, final = _starts(coupling.columns), _starts(coupling.rows)
    scale = queries.scale.gather(-1, rows) * keys.scale.gather(-1, columns)
    return Plans(
        queries.values.gather(-1, rows),
        keys.values.gather(-1, columns),
        queries.order.gather(-1, rows),
        keys.order.gather(-1, columns),
        inverse_width,
        scale * coupling.weights.unsqueeze(1),
        _factor(keys.factor, columns, first),
        _factor(queries.factor, rows, final),
    )


def _factor(factor: Tensor | None, ranks: Tensor, starts: Tensor) -> Tensor:
    return starts.expand(ranks.shape) if factor is None else factor.gather(-1, ranks) * starts


def _starts(ranks: Tensor) -> Tensor:
    """One at the first piece of every rank, else zero: (batch, 1, pieces)."""
    new = ranks[:, 1:] != ranks[:, :-1]
    return torch.nn.functional.pad(new.float(), (1, 0), value=1.0).unsqueeze(1)
