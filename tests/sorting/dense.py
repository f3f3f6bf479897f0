"""What espformer.sorting computes, as dense formulas in float64, one row of numbers at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sort_matrix(
    x: Tensor,
    *,
    temperature: float | Tensor = 0.1,
    unit: str = "spread",
    metric: str = "absolute",
    balance: str = "rows",
    descending: bool = False,
    hard: bool = False,
) -> Tensor:
    """``softmax_i(-dist(sort(x)_n, x_i) / t)`` of x (N,): ranks × tokens."""
    order = x.argsort(descending=descending, stable=True)
    if hard:
        return torch.eye(len(x), dtype=x.dtype)[order]
    if unit == "spread":
        spread = x.std(correction=0)
        x = x / torch.where(spread > 0, spread, 1)
        temperature = temperature if metric == "absolute" else temperature**2
    distance = (x[order].unsqueeze(-1) - x).abs()
    if metric == "squared":
        distance = distance.square()
    if balance == "rows":
        return (-distance / temperature).softmax(-1)
    kernel = (-distance / temperature).exp()
    # diag(u) κ diag(u) in rank order, by square roots until nothing changes.
    by_rank = kernel[:, order]
    scale = by_rank.sum(-1).rsqrt()
    for _ in range(60):
        scale = (scale / (by_rank @ scale)).sqrt()
    return scale.unsqueeze(-1) * kernel * scale[order.argsort()]


def rank(x: Tensor, **options: Any) -> Tensor:
    """Expected ranks, counted from one, of columns that sum to one."""
    matrix = sort_matrix(x, **options)
    numbered = torch.arange(1, len(x) + 1, dtype=x.dtype)
    return (numbered @ matrix) / matrix.sum(0)


def pearson(a: Tensor, b: Tensor) -> Tensor:
    return torch.corrcoef(torch.stack([a, b]))[0, 1]


def quantile(x: Tensor, q: float, **options: Any) -> Tensor:
    ascending = sort_matrix(x, **options) @ x
    place = q * (len(x) - 1)
    below = int(place)
    above = min(below + 1, len(x) - 1)
    return ascending[below] + (place - below) * (ascending[above] - ascending[below])


def topk(x: Tensor, k: int, **options: Any) -> Tensor:
    return sort_matrix(x, **{"balance": "both", "descending": True, **options})[:k].sum(0)
