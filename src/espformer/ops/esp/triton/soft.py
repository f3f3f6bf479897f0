"""Soft plans on the GPU: both sides sorted and normalised, their costs, and the plans applied."""

from __future__ import annotations

import torch
from torch import Tensor

from espformer.ops.esp import linear
from espformer.ops.esp.coupling import Coupling, couple
from espformer.ops.esp.problem import Problem
from espformer.ops.esp.triton.balance import balanced_scales
from espformer.ops.esp.triton.column import row_scales
from espformer.ops.esp.triton.norms import centre_rows, norm_costs
from espformer.ops.esp.triton.operators import apply_plans, cross_plans
from espformer.ops.esp.triton.plans import Plans, Side, meet, valid_ranks
from espformer.ops.esp.triton.ranking import MOST_TOKENS, rank_halves


def attend(problem: Problem, value: Tensor) -> Tensor:
    """``N · G V``; all NaN in a head that holds one."""
    batch = value.shape[0]
    width = problem.inv_bandwidth(batch).expand(batch).contiguous()
    ranked = _rank(problem)
    queries = _sorted(problem, *ranked[0], problem.query_mask, width)
    keys = _sorted(problem, *ranked[1], problem.key_mask, width)
    coupling = None
    if not linear.same_lengths(problem):
        coupling = couple(
            problem.options.coupling, queries.counts(), keys.counts(), queries.values.shape[-1],
            keys.values.shape[-1], torch.float32,
        )  # fmt: skip
    plans = meet(queries, keys, width, coupling)
    weights = _weights(problem, queries, keys, plans, coupling)
    return apply_plans(value, weights, queries.order.shape[-1], *plans, problem.options.metric)


def _exact(problem: Problem) -> bool:
    """Whether rows of queries and keys meet in float32."""
    return torch.promote_types(problem.query.dtype, problem.key.dtype) == torch.float32


def _ranks_halves(problem: Problem) -> bool:
    """Whether numbers are sorted as 16-bit words, which shows NaN in all numbers of its slice."""
    most = max(problem.query.shape[-2], problem.key.shape[-2])
    halves = all(x.dtype in (torch.bfloat16, torch.float16) for x in (problem.query, problem.key))
    return halves and problem.slices is None and problem.scale > 0 and most <= MOST_TOKENS


def _rank(problem: Problem) -> list[tuple[Tensor, Tensor]]:
    """Sorted numbers and the token at each rank in int32, (batch, L, N), of queries and of keys."""
    masks = problem.query_mask, problem.key_mask
    if _ranks_halves(problem):
        tokens = problem.query, problem.key
        return [rank_halves(*side, problem.scale) for side in zip(tokens, masks, strict=True)]
    rankings = (
        linear.sort_tokens(*side)
        for side in zip(problem.scaled().projections(), masks, strict=True)
    )
    return [(side.points.contiguous(), side.order.int()) for side in rankings]


def _sorted(
    problem: Problem, values: Tensor, order: Tensor, mask: Tensor | None, width: Tensor
) -> Side:
    """A side from its ranking, normalised."""
    lengths = None if mask is None else mask.sum(-1, dtype=torch.int32)
    values = problem.in_units(values, None if lengths is None else valid_ranks(values, lengths))
    exact = _exact(problem)
    if problem.options.balance == "rows":
        scale = row_scales(values, lengths, width, problem.options.metric, exact)
        return Side(values, order, lengths, scale, None)
    scale = balanced_scales(values, lengths, width, problem.options.metric, exact)
    return Side(values, order, lengths, scale, scale)


def _weights(
    problem: Problem, queries: Side, keys: Side, plans: Plans, coupling: Coupling | None
) -> Tensor:
    """σ of every slice, (batch, L)."""
    batch, slices, tokens = queries.values.shape
    costs = None
    if problem.options.inverse_temperature:
        centre = problem.centre().squeeze(-2)
        query, key = problem.query, problem.key
        both = torch.promote_types(query.dtype, key.dtype)
        q, q_squares = centre_rows(query.to(both), centre, problem.query_mask, problem.scale)
        k, k_squares = centre_rows(key.to(both), centre, problem.key_mask, problem.scale)
        back = None
        if coupling is not None:
            back = Coupling(coupling.columns, coupling.rows, coupling.weights, keys.order.shape[-1])
        norms = _norms(problem, q_squares, queries, keys, plans.inverse_width, coupling)
        norms = norms + _norms(problem, k_squares, keys, queries, plans.inverse_width, back)
        costs = torch.sub(norms, cross_plans(q, k, *plans, problem.options.metric), alpha=2)
        if queries.lengths is None:
            costs = costs / max(1, tokens)
        else:
            costs = costs / queries.lengths.clamp(min=1).unsqueeze(-1)
    weights = problem.slice_weights(costs)
    if weights is None:
        weights = queries.values.new_full((batch, slices), 1 / slices)
    return weights if _ranks_halves(problem) else weights + problem.nonfinite_marker().unsqueeze(-1)


def _norms(
    problem: Problem, squares: Tensor, side: Side, other: Side, width: Tensor,
    coupling: Coupling | None,
) -> Tensor:  # fmt: skip
    """Squared norms of a side, each times ``Sᵀ T S' 1``, which its token gives away: (batch, L)."""
    met = None  # what a rank of the other side takes in all: one, or nothing if it is padding
    if coupling is not None:
        met = coupling(other.present().unsqueeze(-1)).squeeze(-1)
    given = side.scale if met is None else side.scale * met
    costs: Tensor = norm_costs(
        squares, side.order, given, side.factor, side.values, width, problem.options.metric,
        _exact(problem),
    )  # fmt: skip
    return costs
