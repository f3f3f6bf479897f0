"""Plans to look at: example clouds, and what softmax, Sinkhorn and ESP make of them."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from espformer.functional import esp_plan, sinkhorn_plan


class NamedPlan(NamedTuple):
    """An attention matrix, (N, M), and what to call it."""

    name: str
    matrix: Tensor


class SumErrors(NamedTuple):
    """The largest distance of a row sum, and of a column sum, from one."""

    rows: float
    columns: float


def sum_errors(matrix: Tensor) -> SumErrors:
    """Say how far a matrix (..., N, N) is from doubly stochastic."""
    matrix = matrix.detach().double()
    return SumErrors(*(float((matrix.sum(dim) - 1).abs().max()) for dim in (-1, -2)))


def example_clouds() -> tuple[Tensor, Tensor]:
    """Queries on an arc and keys in two groups, in the plane: (14, 2) each."""
    points, generator = 14, torch.Generator().manual_seed(3)

    def noise(size: float) -> Tensor:
        return size * torch.randn(points, 2, generator=generator, dtype=torch.float64)

    angle = torch.linspace(-0.75 * math.pi, 0.75 * math.pi, points, dtype=torch.float64)
    queries = 2.4 * torch.stack([angle.sin(), 0.75 * angle.cos()], -1) + noise(0.15)
    side = torch.where(torch.arange(points) % 2 == 0, 1.0, -1.0).double()
    keys = torch.stack([1.5 * side, 0.7 * side], -1) + noise(0.75)
    return queries, keys


def sinkhorn_plans(queries: Tensor, keys: Tensor) -> list[NamedPlan]:
    """Return the matrices of softmax, and of Sinkhorn attention after some steps."""
    steps = {"Softmax (S = 0)": 0, "Sinkhorn, S = 3": 3, "Sinkhorn, S = 21": 21}
    return [
        NamedPlan(name, sinkhorn_plan(queries, keys, iterations=count, epsilon=1.0))
        for name, count in steps.items()
    ]


def esp_plans(queries: Tensor, keys: Tensor) -> list[NamedPlan]:
    """Return the matrices of soft ESP at some inverse temperatures, and of hard ESP."""
    angle = (torch.arange(64, dtype=torch.float64) + 0.5) * math.pi / 64
    theta = torch.stack([angle.cos(), angle.sin()], -1).to(queries)  # a fan of the plane
    plan = partial(esp_plan, queries, keys, slices=theta)
    soft = [
        NamedPlan(
            f"Soft ESP, τ = {tau}", plan(inverse_temperature=float(tau), sort_temperature=0.1)
        )
        for tau in (0, 1, 10)
    ]
    return [*soft, NamedPlan("Hard ESP, τ = 10", plan(inverse_temperature=10.0, hard=True))]


def short(error: float, rounding: float = 1e-12) -> str:
    """Return an error in as few characters as tell it: 1.3, 0.04, 2e-06, and 0 for rounding."""
    if error < rounding:
        return "0"
    return f"{error:.2g}" if error >= 1e-3 else f"{error:.0e}"
