"""A small problem that shows whether the kernels of a GPU compute what they should.

Kernels are compiled where they are used, by whatever compiler comes with torch and for GPUs that
nobody has tried, so the first call tries them: a plan and all of its gradients, with ties and
several segments and warps, against matrices in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from espformer.ops.esp.cuda.recurrences import RecurrencePlanKernels
from espformer.ops.esp.triton.soft_plan import Plan, PlanGradients

HEADS, SLICES, RANKS, WIDTH = 2, 2, 70, 16
ALLOWED = 1e-4  # relative error


class _Side:
    """Points with ties, the token of each rank, rows, and κ and its slope in float64."""

    def __init__(self, rate: Tensor, device: torch.device, generator: torch.Generator) -> None:
        ranked = HEADS, SLICES, RANKS
        points = torch.randn(ranked, generator=generator).mul(3).round().div(3).sort(-1).values
        self.points = points.to(device)
        self.order = torch.rand(ranked, generator=generator).argsort(-1).to(device)
        self.rows = torch.randn(HEADS, RANKS, WIDTH, generator=generator).to(device)
        gap = (self.points.unsqueeze(-1) - self.points.unsqueeze(-2)).double()
        self.kappa = torch.exp(-gap.abs() * rate.view(-1, 1, 1, 1))
        self.slope = -gap.sign() * self.kappa * rate.view(-1, 1, 1, 1)

    def by_rank(self) -> Tensor:
        rows = self.rows.double().unsqueeze(1).expand(-1, SLICES, -1, -1)
        return rows.gather(2, self.order.unsqueeze(-1).expand_as(rows))

    def by_token(self, ranked: Tensor, weight: Tensor) -> Tensor:
        index = self.order.unsqueeze(-1).expand_as(ranked)
        tokens = torch.zeros_like(ranked).scatter(2, index, ranked)
        return (tokens * weight.view(HEADS, SLICES, 1, 1)).sum(1)

    def forces(self, x: Tensor, p: Tensor) -> Tensor:
        return (x * (self.slope @ p) + p * (self.slope @ x)).sum(-1)


def try_kernels(device: torch.device) -> None:
    """Raises an error if the kernels fail, or compute something else."""
    generator = torch.Generator().manual_seed(0)
    rate = torch.tensor([1.0, 1.5], device=device)
    weight = torch.tensor([[0.25, 0.75], [0.5, 1.0]], device=device)
    queries, keys = (_Side(rate, device, generator) for _ in range(2))
    mid = torch.rand(HEADS, SLICES, RANKS, generator=generator).to(device)
    plan = Plan(
        queries.points, keys.points, queries.order.int(), keys.order.int(), rate, mid, None, None,
        "absolute",
    )  # fmt: skip
    kernels = RecurrencePlanKernels(plan, torch.float32)
    out, dx = (torch.zeros_like(keys.rows) for _ in range(2))
    kernels.apply(keys.rows, weight, out)
    _, found = PlanGradients.new(plan, scales=False, weight=False, inv_bandwidth=False)
    kernels.grad(queries.rows, keys.rows, weight, dx, None, found)

    x, g = keys.by_rank(), queries.by_rank()
    y, z = keys.kappa @ x, queries.kappa @ g
    w, u = (mid.unsqueeze(-1) * each for each in (y, z))
    each = weight.unsqueeze(-1)
    expected = {
        "plan": (out, queries.by_token(queries.kappa @ w, weight)),
        "gradient of the rows": (dx, keys.by_token(keys.kappa @ u, weight)),
        "gradient of the queries' points": (found.query_points, queries.forces(g, w) * each),
        "gradient of the keys' points": (found.key_points, keys.forces(x, u) * each),
        "gradient of the scales": (found.mid_scale, (y * z).sum(-1) * each),
    }
    for what, (got, right) in expected.items():
        assert got is not None
        error = float((got - right).norm() / right.norm())
        if not error <= ALLOWED:
            raise ArithmeticError(f"a kernel in CUDA C++ computes a wrong {what}, off by {error:g}")
