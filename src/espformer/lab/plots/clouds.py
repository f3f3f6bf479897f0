"""Plans to look at: example clouds, and what softmax, Sinkhorn and ESP make of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def example_clouds(points: int = 14, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Queries on an arc and keys in two groups, in the plane: (points, 2) each."""
    generator = torch.Generator().manual_seed(seed)

    def noise(size: float) -> Tensor:
        return size * torch.randn(points, 2, generator=generator, dtype=torch.float64)

    angle = torch.linspace(-0.75 * math.pi, 0.75 * math.pi, points, dtype=torch.float64)
    queries = 2.4 * torch.stack([angle.sin(), 0.75 * angle.cos()], -1) + noise(0.15)
    side = torch.where(torch.arange(points) % 2 == 0, 1.0, -1.0).double()
    keys = torch.stack([1.5 * side, 0.7 * side], -1) + noise(0.75)
    return queries, keys


def fan_of_slices(count: int) -> Tensor:
    """``count`` directions of the plane, evenly spread: (count, 2)."""
    angle = (torch.arange(count, dtype=torch.float64) + 0.5) * math.pi / count
    return torch.stack([angle.cos(), angle.sin()], -1)


def sinkhorn_plans(
    queries: Tensor, keys: Tensor, steps: Sequence[int] = (0, 3, 21), epsilon: float = 1.0
) -> list[NamedPlan]:
    """Softmax attention and Sinkhorn attention after some steps."""
    return [
        NamedPlan(
            f"Sinkhorn, S = {count}" if count > 1 else f"Softmax (S = {count})",
            sinkhorn_plan(queries, keys, iterations=count, epsilon=epsilon),
        )
        for count in steps
    ]


def esp_plans(
    queries: Tensor,
    keys: Tensor,
    inverse_temperatures: Sequence[float] = (0, 1, 10),
    slices: int = 64,
    sort_temperature: float = 0.1,
) -> list[NamedPlan]:
    """Soft ESP at some inverse temperatures, the last of them sorted exactly as well."""
    theta = fan_of_slices(slices).to(queries)
    soft = [
        NamedPlan(
            f"Soft ESP, τ = {tau:g}",
            esp_plan(
                queries, keys, slices=theta, inverse_temperature=tau,
                sort_temperature=sort_temperature,
            ),
        )
        for tau in inverse_temperatures
    ]  # fmt: skip
    tau = inverse_temperatures[-1]
    exact = esp_plan(queries, keys, slices=theta, inverse_temperature=tau, hard=True)
    return [*soft, NamedPlan(f"Hard ESP, τ = {tau:g}", exact)]


def short(error: float, rounding: float = 1e-12) -> str:
    """Return an error in as few characters as tell it: 1.3, 0.04, 2e-06, and 0 for rounding."""
    if error < rounding:
        return "0"
    return f"{error:.2g}" if error >= 1e-3 else f"{error:.0e}"
