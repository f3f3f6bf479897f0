"""Fused GPU kernels for ESP attention; :mod:`espformer.ops.esp` is the same in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from espformer.ops import esp
from espformer.ops.coupling import Coupling, couple
from espformer.ops.problem import Problem
from espformer.ops.triton import hard, operators
from espformer.ops.triton.column import sorted_column
from espformer.ops.triton.norms import norm_costs
from espformer.ops.triton.ranking import MOST_TOKENS, rank_halves
from espformer.ops.triton.refine import Sides, refine

MOST_WIDTH = 256


def attend(problem: Problem, value: Tensor) -> Tensor:
    """``N · G V``: (batch, N, d) in the dtype of `value`; a head that holds NaN is all NaN."""
    if not _supported(problem, value):
        return esp.attend(problem, value) + problem.poison().view(-1, 1, 1)
    if problem.hard:
        out = hard.attend(problem, value)
    else:
        queries = _rank(problem, problem.query, problem.query_mask, 0)
        keys = _rank(problem, problem.key, problem.key_mask, 1)
        out = _soft(problem, value, queries, keys)
    return (
        out if problem.query_mask is None else out.masked_fill(~problem.query_mask.unsqueeze(-1), 0)
    )


def _supported(problem: Problem, value: Tensor) -> bool:
    """Whether kernels exist: no float64, no wide heads, no offset that needs more than 32 bits."""
    operands = (problem.query, problem.key, value)
    if any(x.element_size() > 4 or x.shape[-1] > MOST_WIDTH for x in operands):
        return False
    if any(x.shape[-2] * x.shape[-1] >= 1 << 31 for x in operands):
        return False
    if esp.same_lengths(problem):
        return not problem.hard or problem.ties == "stable"
    return not problem.hard and problem.coupling != "interpolate"  # which is not monotone


def plan(problem: Problem) -> Tensor:
    """``N · G``, (batch, N, M): the same operator applied to the identity, in blocks of columns."""
    key = problem.key
    eye = torch.eye(key.shape[-2], dtype=problem.dtype, device=key.device)
    blocks = (block.expand(key.shape[0], -1, -1) for block in eye.split(64, -1))
    return torch.cat([attend(problem, block) for block in blocks], -1)


def _rank(problem: Problem, tokens: Tensor, mask: Tensor | None, side: int) -> esp.Ranking:
    """Sorted projections with the order in int32, and no `ranks`: nothing here needs them."""
    halves = tokens.dtype in (torch.bfloat16, torch.float16) and problem.scale > 0
    if problem.slices is None and halves and tokens.shape[-2] <= MOST_TOKENS:
        values, order = rank_halves(tokens, mask, problem.scale)
        lengths = torch.full((order.shape[0],), order.shape[-1], device=order.device)
        valid = None
        if mask is not None:
            lengths = mask.sum(-1)
            positions = torch.arange(order.shape[-1], device=order.device)
            valid = (positions < lengths.unsqueeze(-1)).unsqueeze(1)
        return esp.Ranking(values, order, order, valid, lengths)
    ranking = esp.sort_tokens(problem.scaled().projections()[side].contiguous(), mask)
    return ranking._replace(order=ranking.order.int(), values=ranking.values.contiguous())


def _centred(problem: Problem) -> tuple[Tensor, Tensor]:
    """Scaled queries and keys moved together to the middle of the keys, in the caller's dtype."""
    scaled = problem.scaled()
    centre = scaled.key.detach().mean(-2, keepdim=True).nan_to_num()
    pair = []
    for x, mask in ((scaled.query, problem.query_mask), (scaled.key, problem.key_mask)):
        x = x - centre
        x = x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0)
        pair.append(x.to(problem.query.dtype))
    return pair[0], pair[1]


def _soft(problem: Problem, value: Tensor, queries: esp.Ranking, keys: esp.Ranking) -> Tensor:
    # Beyond any meaning, but finite: infinity times the distance of equal numbers is no number.
    width = problem.inverse_width().clamp(max=1e30).expand(value.shape[0]).contiguous()
    coupling = None
    if not esp.same_lengths(problem):
        coupling = couple(
            problem.coupling, queries.lengths, keys.lengths, queries.values.shape[-1],
            keys.values.shape[-1], torch.float32,
        )  # fmt: skip
    mine, theirs = (_mixing(problem, side, width) for side in (queries, keys))
    sides = Sides(
        queries.values, keys.values, queries.order, keys.order, width,
        mine.scale_out.squeeze(-1), theirs.scale_out.squeeze(-1),
        _column(theirs.scale_in), _column(mine.scale_in),
    )  # fmt: skip
    if coupling is not None:
        sides = refine(sides, coupling)
    costs = torch.zeros_like(queries.values[..., 0])
    if problem.inverse_temperature:
        q, k = _centred(problem)
        cross = operators.cross_plans(q, k, *sides, problem.metric)
        norms = _norms(q, queries, mine, theirs, keys, coupling) + _norms(
            k, keys, theirs, mine, queries, _reversed(coupling, keys)
        )
        costs = (norms - 2 * cross) / queries.lengths.clamp(min=1).unsqueeze(-1)
    weights = problem.slice_weights(costs + problem.poison().unsqueeze(-1))
    return operators.apply_plans(value, weights, queries.order.shape[-1], *sides, problem.metric)


def _mixing(problem: Problem, side: esp.Ranking, width: Tensor) -> esp.SoftMixing:
    exact = problem.query.dtype == torch.float32

    def kernel(x: Tensor) -> Tensor:
        column: Tensor = sorted_column(x.squeeze(-1), side.values, width, problem.metric, exact)
        return column.unsqueeze(-1)

    return esp.SoftMixing(kernel, side, problem.balance)


def _column(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale.squeeze(-1)


def _reversed(coupling: Coupling | None, keys: esp.Ranking) -> Coupling | None:
    if coupling is None:
        return None
    return Coupling(coupling.columns, coupling.rows, coupling.weights, keys.values.shape[-1])


def _norms(
    x: Tensor, side: esp.Ranking, mine: esp.SoftMixing, theirs: esp.SoftMixing,
    other: esp.Ranking, coupling: Coupling | None,
) -> Tensor:  # fmt: skip
    """``Σ_i ‖x_i‖² (Sᵀ T S' 1)_i`` for every slice: what the squared norms cost, (batch, L)."""
    ones = other.values.new_ones(()).expand(other.values.shape).unsqueeze(-1)
    ones = ones if other.valid is None else ones * other.valid.unsqueeze(-1)
    # Row sums are one exactly unless they were balanced in finitely many steps.
    met = ones if theirs.scale_in is None else theirs.sort(ones)
    met = met if coupling is None else coupling(met)
    squares = x.float().square().sum(-1)
    costs: Tensor = norm_costs(squares, side.order, mine.unsort(met).squeeze(-1))
    return costs
