"""ESP attention by compiled recurrences (numba), for CPUs; its torch twin is `ops.esp.linear`."""

from __future__ import annotations

import torch
from torch import Tensor

from espformer.ops.esp.cpu import operators
from espformer.ops.esp.linear import same_lengths
from espformer.ops.esp.problem import Problem


def attend(problem: Problem, value: Tensor) -> Tensor:
    """``N · G V``: (batch, N, d), in time and memory linear in N."""
    problem, value = problem.scaled(), value.to(problem.dtype)
    query_numbers, key_numbers = problem.projections()
    inv_bandwidth = problem.inverse_width()
    if problem.hard:  # no gradient reaches the numbers that are sorted
        query_numbers, key_numbers = query_numbers.detach(), key_numbers.detach()
        inv_bandwidth = inv_bandwidth.detach()
    out: Tensor = operators.attend(
        problem.query, problem.key, value, query_numbers, key_numbers,
        inv_bandwidth.expand(len(value)), problem.centre().squeeze(-2),
        problem.query_mask, problem.key_mask, problem.keep, float(problem.inverse_temperature),
        problem.metric, problem.balance, problem.hard, problem.ties,
        "" if same_lengths(problem) else problem.coupling,
    )[0]  # fmt: skip
    return out


def plan(problem: Problem) -> Tensor:
    """``N · G`` itself, (batch, N, M): the same operator applied to the identity."""
    key = problem.key
    eye = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device)
    return attend(problem, eye.expand(key.shape[0], -1, -1))
