"""Hard plans on the GPU: a sort of both sides, and one gather."""

from __future__ import annotations

import torch
from torch import Tensor

from espformer.ops.esp import linear
from espformer.ops.esp.problem import Problem
from espformer.ops.esp.triton.matching import apply_matching, match, matching_costs
from espformer.ops.esp.triton.ranking import MOST_TOKENS, match_halves


def attend(problem: Problem, value: Tensor) -> Tensor:
    """``N · G V`` for stable ties and as many queries as keys; all NaN in a head that holds one."""
    query, key, mask = problem.query, problem.key, problem.query_mask
    matches, shares = _matches(problem)
    costs = None
    if problem.options.inverse_temperature:
        lengths = query.shape[-2] if mask is None else mask.sum(-1, keepdim=True).clamp(min=1)
        costs = matching_costs(query, key, matches) * (problem.scale**2 / lengths)
        if problem.slices is not None:
            costs = costs + shares * 0  # NaN in the slices does not show in distances
    weights = problem.slice_weights(costs)
    if weights is not None:  # NaN shows in distances, and in the plain mean
        shares = weights if costs is not None else weights + shares * 0
    return apply_matching(value, shares, matches)


def _matches(problem: Problem) -> tuple[Tensor, Tensor]:
    """The key that each query meets, (batch, L, N) in int32, and the weights of a plain mean."""
    with torch.no_grad():  # a permutation has no gradient
        query, key = problem.query, problem.key
        masks = problem.query_mask, problem.key_mask
        halves = query.dtype == key.dtype and query.dtype in (torch.bfloat16, torch.float16)
        halves = halves and query.shape[-2] <= MOST_TOKENS and problem.scale > 0
        if not halves or problem.slices is not None or problem.identity_side:
            sides = problem.scaled().projections()
            rankings = (linear.sort_tokens(*side) for side in zip(sides, masks, strict=True))
            orders = [ranking.order.int() for ranking in rankings]
            shares = problem.nonfinite_marker().unsqueeze(-1) + 1 / orders[0].shape[1]
            return match(*orders), shares.expand(orders[0].shape[:2])
        found: tuple[Tensor, Tensor] = match_halves(query, key, masks[0])
        return found
