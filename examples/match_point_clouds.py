"""Carry one cloud of points onto another: ``python examples/match_point_clouds.py``.

Two clouds in the plane, a ring and two moons, and a plan that says which point goes where. ESP
sorts both along a few directions and averages the matchings; ``inverse_temperature`` prefers the
directions in which little has to be carried. Softmax attention is no plan at all: many points go to
few. The exact plan, from scipy, is the cheapest to carry out, and O(N³) to find. ESP's sums are
exact and it takes O(L N log N), but it carries more than it must: a mean of matchings spreads each
point.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor

import espformer


def ring(n: int, generator: torch.Generator) -> Tensor:
    angles = 2 * math.pi * torch.rand(n, generator=generator)
    radii = 1 + 0.05 * torch.randn(n, generator=generator)
    return torch.stack((radii * angles.cos(), radii * angles.sin()), -1)


def moons(n: int, generator: torch.Generator) -> Tensor:
    angles = math.pi * torch.rand(n, generator=generator)
    upper = torch.stack((angles.cos(), angles.sin()), -1)
    lower = torch.stack((1 - angles.cos(), 0.5 - angles.sin()), -1)
    moon = torch.where((torch.arange(n) % 2 == 0)[:, None], upper, lower)
    return moon + 0.05 * torch.randn(n, 2, generator=generator) - torch.tensor([0.5, 0.25])


def directions(count: int) -> Tensor:
    """Unit vectors, evenly over half a turn."""
    angles = math.pi * torch.arange(count) / count
    return torch.stack((angles.cos(), angles.sin()), -1)


def cost(plan: Tensor, x: Tensor, y: Tensor) -> float:
    """Mean squared distance that is carried; rows of the plan sum to one."""
    return float((plan * torch.cdist(x, y).square()).sum() / len(x))


def exact_plan(x: Tensor, y: Tensor) -> Tensor:
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(torch.cdist(x, y).square().numpy())
    plan = torch.zeros(len(x), len(y))
    plan[rows, columns] = 1
    return plan


def plans(x: Tensor, y: Tensor, slices: int) -> dict[str, Tensor]:
    """Matrices (points, points) by name. ``scale=1`` leaves distances as they are."""
    sliced = {"slices": directions(slices), "scale": 1.0}
    found = {
        "softmax": espformer.functional.softmax_plan(x, y, scale=4.0),
        "Sinkhorn, 20 steps": espformer.sinkhorn_plan(x, y, iterations=20, epsilon=0.2),
        "ESP, hard, plain mean": espformer.esp_plan(x, y, hard=True, **sliced),
        "ESP, hard, cheap slices": espformer.esp_plan(
            x, y, hard=True, inverse_temperature=200.0, **sliced
        ),
        "ESP, soft, balanced": espformer.esp_plan(
            x, y, sort_temperature=0.05, balance="both", inverse_temperature=200.0, **sliced
        ),
    }
    try:
        found["exact (scipy)"] = exact_plan(x, y)
    except ImportError:
        print("scipy is not installed: the exact plan is left out")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=400)
    parser.add_argument("--slices", type=int, default=32)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    x, y = ring(options.points, generator), moons(options.points, generator)

    print(f"{options.points} points; {options.slices} directions")
    print(f"{'plan':26}{'cost':>8}{'rows off by':>14}{'columns off by':>16}")
    for name, plan in plans(x, y, options.slices).items():
        rows, columns = (float((plan.sum(dim) - 1).abs().max()) for dim in (-1, -2))
        print(f"{name:26}{cost(plan, x, y):8.4f}{rows:14.1e}{columns:16.1e}")


if __name__ == "__main__":
    main()
