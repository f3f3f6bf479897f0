"""Fused GPU kernels for ESP attention; :mod:`espformer.ops.esp.linear` is their torch twin."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from espformer.ops.esp.options import ESPOptions
from espformer.ops.esp.problem import LEAST_TEMPERATURE, MOST_TEMPERATURE, near_one
from espformer.ops.esp.triton.attention import MOST_BLOCKS, attend, plan
from espformer.ops.esp.triton.numbers import rank_numbers, sort_numbers
from espformer.ops.esp.triton.points import blocks_of_tokens

__all__ = ["attend", "mix_numbers", "plan", "takes_numbers"]


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
