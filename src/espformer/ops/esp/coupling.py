"""Couplings: how the ranks of N queries are matched with the ranks of M keys.

A coupling is the matrix T in ``N · U_l = A_lᵀ T B_l``, given by its non-zero entries. With as many
queries as keys T is the identity, and this module is not used. Sequences of one batch may have
different lengths, so every sequence has its own entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Coupling:
    """``T[rows[s], columns[s]] += weights[s]``; all of shape (batch, pairs), or (1, pairs) if all
    sequences have the same lengths.
    """

    rows: Tensor
    columns: Tensor
    weights: Tensor
    row_count: int

    def __call__(self, y: Tensor) -> Tensor:
        """``T y``: (batch, slices, M, width) to (batch, slices, N, width)."""
        batch, slices, _, width = y.shape
        picked = torch.gather(y, 2, _expand(self.columns, batch, slices, width))
        picked = picked * self.weights[:, None, :, None]
        out = y.new_zeros(batch, slices, self.row_count, width)
        return out.scatter_add(2, _expand(self.rows, batch, slices, width), picked)

    def matrix(self, column_count: int) -> Tensor:
        """T itself, (batch, N, M)."""
        eye = torch.eye(column_count, dtype=self.weights.dtype, device=self.weights.device)
        return self(eye.expand(self.rows.shape[0], 1, -1, -1)).squeeze(1)


def _expand(index: Tensor, batch: int, slices: int, width: int) -> Tensor:
    return index[:, None, :, None].expand(batch, slices, -1, width)


def couple(
    name: str, n: Tensor, m: Tensor, rows: int, columns: int, dtype: torch.dtype
) -> Coupling:
    """The coupling ``name`` of n (of ``rows``) queries and m (of ``columns``) keys per sequence.

    - ``"quantile"``: the optimal plan between uniform measures on a line. Rank i covers
      ``[i/n, (i+1)/n]``, rank j covers ``[j/m, (j+1)/m]``, and they share the overlap. At most
      n + m - 1 pairs; rows sum to one and columns to n/m, exactly.
    - ``"interpolate"``: the paper's linear interpolation as intended. Query rank i lies at
      ``i · m/n`` between the key ranks ``floor`` and ``floor + 1``, and the nearer one gets more
      weight. (The printed formula swaps the weights and counts integers twice.) Column sums are
      uneven.
    - ``"identity"``: the rectangular identity of the paper's tables. Rank i is matched with rank i,
      and the surplus ranks of the longer side are not matched.
    """
    n, m = n.long().unsqueeze(-1), m.long().unsqueeze(-1)  # (batch, 1); n·m may need 64 bits
    if name == "identity":
        rank = torch.arange(max(rows, columns), device=n.device).expand(n.shape[0], -1)
        met = (rank < torch.minimum(n, m)).to(dtype)
        return Coupling(rank.clamp(max=rows - 1), rank.clamp(max=columns - 1), met, rows)
    if name == "interpolate":
        rank = torch.arange(rows, device=n.device).expand(n.shape[0], -1)
        below = rank * m // n.clamp(min=1)
        above = ((rank * m) % n.clamp(min=1)).to(dtype) / n.clamp(min=1)
        inside = ((rank < n) & (m > 0)).to(dtype)
        last = (m - 1).clamp(min=0)
        columns_ = torch.cat([torch.minimum(below, last), torch.minimum(below + 1, last)], -1)
        weights = torch.cat([(1 - above) * inside, above * inside], -1)
        return Coupling(torch.cat([rank, rank], -1), columns_, weights, rows)
    # Cut points of both measures in units of 1/(n m). Each interval between two cuts is one pair.
    starts = torch.cat(
        [
            torch.minimum(torch.arange(rows, device=n.device), n) * m,
            torch.minimum(torch.arange(columns, device=n.device), m) * n,
        ],
        -1,
    )
    starts = starts.sort(-1).values
    ends = torch.cat([starts[:, 1:], n * m], -1)
    weights = (ends - starts).to(dtype) / m.clamp(min=1)
    row = torch.minimum(starts // m.clamp(min=1), (n - 1).clamp(min=0))
    column = torch.minimum(starts // n.clamp(min=1), (m - 1).clamp(min=0))
    return Coupling(row, column, weights, rows)
