"""Fused GPU kernels for ESP attention; :mod:`espformer.ops.esp.linear` is their torch twin."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from espformer.ops.esp.options import ESPOptions
from espformer.ops.esp.problem import LEAST_TEMPERATURE, MOST_TEMPERATURE, near_one
from espformer.ops.esp.triton.attention import MOST_BLOCKS, attend, plan
from espformer.ops.esp.triton.numbers import mix_rows, rank_numbers, sort_numbers, values_fit
from espformer.ops.esp.triton.sort import blocks_of_tokens

__all__ = ["attend", "mix", "mix_numbers", "plan", "takes_numbers", "takes_rows"]


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


def takes_rows(numbers: Tensor, rows: Tensor, options: ESPOptions) -> bool:
    """Whether `mix` knows these options, and numbers and rows of this dtype and these shapes."""
    fits = values_fit(tuple(rows.shape))
    return fits and takes_numbers(numbers, options) and not options.straight_through


def mix(
    numbers: Tensor, rows: Tensor, mask: Tensor | None, options: ESPOptions, unit: str,
    *, back: bool,
) -> Tensor:  # fmt: skip
    """``A V``, or ``Aᵀ V`` if `back`, with A the soft sort of numbers (batch, N): (batch, N, d)."""
    numbers, inv_bandwidth, _ = _in_units(numbers, options, unit)
    return cast(Tensor, mix_rows(numbers, rows, inv_bandwidth, mask, unit == "spread", back))


def mix_numbers(
    numbers: Tensor, mask: Tensor | None, options: ESPOptions, unit: str, *, ranks: bool
) -> Tensor:
    """``A x`` of numbers x (batch, N), or their expected `ranks`, with A the soft sort of x.

    Ranks are ``Σ_n n A[n, i] / Σ_n A[n, i]``, counted from one; those of padding are zero.
    """
    numbers, inv_bandwidth, factor = _in_units(numbers, options, unit)
    operator = rank_numbers if ranks else sort_numbers
    out: Tensor = operator(numbers, inv_bandwidth, mask, unit == "spread")
    return out if ranks or factor is None else out / factor


def _in_units(
    numbers: Tensor, options: ESPOptions, unit: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Numbers, times a factor if one is returned, and their inverse bandwidths, (batch,)."""
    t, batch = options.sort_temperature, numbers.shape[0]
    least, most = LEAST_TEMPERATURE["absolute"], MOST_TEMPERATURE
    if unit == "spread":
        if isinstance(t, Tensor) or torch.compiler.is_compiling():
            return numbers, 1 / (numbers.new_ones(batch) * t).clamp(least, most), None
        return numbers, numbers.new_full((batch,), 1 / min(max(t, least), most)), None
    # Beyond float32 neither a width nor its inverse would be a number.
    numbers, factor = near_one(numbers)
    return numbers, 1 / (factor.squeeze(-1) * t).clamp(least, most), factor
