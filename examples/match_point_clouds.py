"""Transport one point cloud to another: ``python examples/match_point_clouds.py``.

The clouds are a ring and two moons in the plane; a plan says which point goes where. ESP sorts both
along a few directions and averages the matchings; ``inverse_temperature`` favours directions with a
low transport cost. Softmax attention is not a transport plan: it sends many points to a few. The
exact plan, from scipy, has the lowest cost but takes O(N³) to compute. ESP has exact sums and takes
O(L N log N), but a higher cost, because a mean of matchings spreads the mass of each point.
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
    """Unit vectors, evenly spaced over half a turn."""
    angles = math.pi * torch.arange(count) / count
    return torch.stack((angles.cos(), angles.sin()), -1)


def cost(plan: Tensor, x: Tensor, y: Tensor) -> float:
    """Mean squared transport distance; rows of the plan sum to one."""
    return float((plan * torch.cdist(x, y).square()).sum() / len(x))


def exact_plan(x: Tensor, y: Tensor) -> Tensor:
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(torch.cdist(x, y).square().numpy())
    plan = torch.zeros(len(x), len(y))
    plan[rows, columns] = 1
    return plan


def plans(x: Tensor, y: Tensor, slices: int) -> dict[str, Tensor]:
    """Matrices (points, points) by name. ``scale=1`` keeps the original distances."""
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
        print("scipy is not installed: the exact plan is skipped")
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
