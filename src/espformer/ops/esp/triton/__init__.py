"""Fused GPU kernels for ESP attention; :mod:`espformer.ops.esp.linear` is their torch twin."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from espformer.ops.common.masks import zero_padding
from espformer.ops.esp import linear
from espformer.ops.esp.options import ESPOptions
from espformer.ops.esp.problem import LEAST_TEMPERATURE, MOST_TEMPERATURE, Problem, near_one
from espformer.ops.esp.triton import hard_plan, soft_attention
from espformer.ops.esp.triton.numbers import rank_numbers, sort_numbers
from espformer.ops.esp.triton.sort import blocks_of_tokens

MOST_WIDTH = 256
MOST_BLOCKS = 65_535  # of the second axis of a grid


def attend(problem: Problem, value: Tensor) -> Tensor:
    """``N · G V``: (batch, N, d) in the dtype of `value`; a head that holds NaN is all NaN.

    Rows of `value` that are padding are zero.
    """
    if _supported(problem, value):
        out = (hard_plan if problem.options.hard else soft_attention).attend(problem, value)
    else:
        out = (linear.attend(problem, value) + problem.nonfinite_marker().view(-1, 1, 1)).to(
            value.dtype
        )
    return zero_padding(out, problem.query_mask)


def _supported(problem: Problem, value: Tensor) -> bool:
    """Whether kernels exist: no float64, no wide heads, no offset that needs more than 32 bits."""
    if max(x.element_size() for x in (problem.query, problem.key, value)) > 4:
        return False
    _, queries, width = problem.query.shape  # which is that of the keys
    keys, values = problem.key.shape[-2], value.shape[-1]
    if max(width, values) > MOST_WIDTH:
        return False
    same = linear.same_lengths(problem)
    ranks = max(queries, keys) if same else queries + keys  # or pieces of them
    slices = width if problem.slices is None else problem.slices.shape[-2]
    if ranks * max(width, values, 2 * slices) >= 1 << 31:
        return False
    if blocks_of_tokens(max(queries, keys), width) > MOST_BLOCKS:
        return False
    options = problem.options
    if same:
        return not options.hard or options.ties == "stable"
    return not options.hard and options.coupling != "interpolate"  # which is not monotone


def plan(problem: Problem) -> Tensor:
    """``N · G``, (batch, N, M): the same operator applied to the identity, in blocks of columns."""
    key = problem.key
    eye = torch.eye(key.shape[-2], dtype=problem.dtype, device=key.device)
    rows = zero_padding(eye.expand(key.shape[0], -1, -1), problem.key_mask)
    return torch.cat([attend(problem, block) for block in rows.split(64, -1)], -1)


def takes_numbers(numbers: Tensor, options: ESPOptions) -> bool:
    """Whether `mix_numbers` knows these options, and numbers of this dtype."""
    return (
        options.metric == "absolute"
        and options.balance == "rows"
        and not options.hard
        and numbers.dtype == torch.float32
        and numbers.shape[-1] < 1 << 31
        and blocks_of_tokens(numbers.shape[-1], 1) <= MOST_BLOCKS
    )


def mix_numbers(
    numbers: Tensor, mask: Tensor | None, options: ESPOptions, unit: str, *, ranks: bool
) -> Tensor:
    """``A x`` of numbers x (batch, N), or their expected `ranks`, with A the soft sort of x.

    Ranks are ``Σ_n n A[n, i] / Σ_n A[n, i]``, counted from one; those of padding are zero.
    """
    t, batch = options.sort_temperature, numbers.shape[0]
    least, most = LEAST_TEMPERATURE["absolute"], MOST_TEMPERATURE
    operator = rank_numbers if ranks else sort_numbers
    in_spreads = unit == "spread"
    if in_spreads and not (isinstance(t, Tensor) or torch.compiler.is_compiling()):
        inv_bandwidth = numbers.new_full((batch,), 1 / min(max(t, least), most))
        return cast(Tensor, operator(numbers, inv_bandwidth, mask, in_spreads))
    factor = numbers.new_ones(batch, 1)
    if not in_spreads:  # beyond float32 neither a width nor its inverse would be a number
        numbers, factor = near_one(numbers)
    inv_bandwidth = 1 / (factor.squeeze(-1) * t).clamp(least, most)
    out: Tensor = operator(numbers, inv_bandwidth, mask, in_spreads)
    return out if ranks or in_spreads else out / factor
