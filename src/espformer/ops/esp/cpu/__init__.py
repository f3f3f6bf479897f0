"""ESP attention by compiled recurrences (numba), for CPUs; its torch twin is `ops.esp.linear`."""

from __future__ import annotations

from dataclasses import replace

import numba  # without which there is nothing to try
import torch
from torch import Tensor

from espformer.ops.common.masks import zero_padding
from espformer.ops.esp import linear
from espformer.ops.esp.options import ESPOptions
from espformer.ops.esp.problem import Problem

try:
    from espformer.ops.esp.cpu import number_operators, operators, sort_operators, trial, units

    trial.try_kernel()
except Exception as error:  # whatever a numba that is not like the one we know may raise
    raise ImportError(
        f"the kernels cannot be compiled with numba {numba.__version__} "
        f"({type(error).__name__}: {error})"
    ) from error

FAR = 128.0  # in bandwidths; at this distance exp(-x) underflows in float32


def attend(problem: Problem, value: Tensor) -> Tensor:
    """``N · G V``: (batch, N, d), in linear time and memory; a head that holds NaN is all NaN."""
    marker = problem.nonfinite_marker().view(-1, 1, 1)
    if not _is_zero(marker):
        # A head with NaN is computed with zeros, because heads share a workspace.
        query, key = (x.masked_fill(marker.isnan(), 0) for x in (problem.query, problem.key))
        out = _attend_finite(replace(problem, query=query, key=key), value) + marker
    else:
        out = _attend_finite(problem, value)
    return zero_padding(out, problem.query_mask)


def _is_zero(marker: Tensor) -> bool:
    """Whether no head contains NaN, for certain: tensors without numbers cannot be asked."""
    if torch.compiler.is_compiling() or type(marker) is not Tensor:
        return False
    return not marker.isnan().any()


def _attend_finite(problem: Problem, value: Tensor) -> Tensor:
    """`attend` for numbers that are all finite; rows of padding hold any numbers."""
    if problem.options.inverse_temperature and problem.options.cost_exponent != 2:
        # The kernels weigh slices by mean squared distances alone.
        return linear.attend(problem, value)
    problem = problem.scaled()
    value = value.to(problem.dtype)
    options = problem.options
    inv_bandwidth = problem.inv_bandwidth()
    masks = problem.query_mask, problem.key_mask
    query_points, key_points = (
        _far_apart(x, inv_bandwidth)
        if side == problem.identity_side
        else _in_units(problem, x.contiguous(), mask)
        for side, x, mask in zip(("query", "key"), problem.projections(), masks, strict=True)
    )
    if options.hard:  # a hard sort gives the sorted numbers no gradient
        query_points, key_points = query_points.detach(), key_points.detach()
        inv_bandwidth = inv_bandwidth.detach()
        if not options.inverse_temperature:
            problem = replace(problem, query=problem.query.detach(), key=problem.key.detach())
    out: Tensor = operators.attend(
        problem.query, problem.key, value, query_points, key_points,
        inv_bandwidth.expand(len(value)), _slice_logits(problem, query_points),
        problem.centre().squeeze(-2), problem.query_mask, problem.key_mask,
        float(options.inverse_temperature), options.metric, options.balance, options.hard,
        options.ties, "" if problem.same_lengths else options.coupling,
    )[0]  # fmt: skip
    return out


def _in_units(problem: Problem, points: Tensor, mask: Tensor | None) -> Tensor:
    """As `Problem.in_units`."""
    if problem.options.temperature_unit == "absolute" or problem.options.hard:
        return points
    out: Tensor = units.in_spreads(points, mask)[0]
    return out


def _far_apart(points: Tensor, inv_bandwidth: Tensor) -> Tensor:
    """Points of an `identity_side`: in order, and so far apart that nothing mixes."""
    ranks = torch.arange(points.shape[-1], device=points.device, dtype=points.dtype)
    return (ranks * (FAR / inv_bandwidth.detach()).view(-1, 1, 1)).expand(points.shape)


def _slice_logits(problem: Problem, points: Tensor) -> Tensor | None:
    """The logits that are added to -τ D, (batch, L): learnt ones, and -∞ for dropped slices."""
    logits = problem.slice_logits
    if problem.keep is not None:
        logits = points.new_zeros(()) if logits is None else logits
        logits = logits.masked_fill(~problem.keep, -torch.inf)
    return None if logits is None else logits.expand(points.shape[:2])


def plan(problem: Problem) -> Tensor:
    """``N · G`` itself, (batch, N, M): the same operator applied to the identity."""
    key = problem.key
    eye = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device)
    return attend(problem, eye.expand(key.shape[0], -1, -1))


def takes_rows(numbers: Tensor, rows: Tensor, options: ESPOptions) -> bool:
    """Whether `mix` knows these options: it knows all, and takes all rows."""
    return True


def mix(
    numbers: Tensor, value: Tensor, mask: Tensor | None, options: ESPOptions, unit: str,
    *, back: bool,
) -> Tensor:  # fmt: skip
    """``A V``, or ``Aᵀ V`` if `back`, with A the soft sort of numbers: (batch, N, d).

    Numbers (batch, N) and values have one dtype; masked ranks or tokens get zeros. If a row of
    numbers contains NaN or an infinity, its result and its gradients are all NaN.
    """
    t = options.sort_temperature
    if not isinstance(t, Tensor):
        t = torch.full((1,), t, dtype=numbers.dtype)
    if options.hard:  # no gradient goes through the order
        numbers, t = numbers.detach(), t.detach()
    out: Tensor = sort_operators.mix(
        numbers, value, t, mask, back, unit, options.metric, options.balance, options.hard,
        options.ties,
    )[0]  # fmt: skip
    return out


def takes_numbers(numbers: Tensor, options: ESPOptions) -> bool:
    """Whether `mix_numbers` knows these options; it takes all numbers."""
    return options.metric == "absolute" and options.balance == "rows" and not options.hard


def mix_numbers(
    numbers: Tensor, mask: Tensor | None, options: ESPOptions, unit: str, *, ranks: bool
) -> Tensor:
    """``A x`` of numbers x (batch, N), or their expected `ranks`: `mix` of that one column.

    Ranks are ``Σ_n n A[n, i] / Σ_n A[n, i]``, counted from one; those of padding are zero.
    """
    t = options.sort_temperature
    given = (t, 0.0) if isinstance(t, Tensor) else (None, t)
    out: Tensor = number_operators.mix_numbers(numbers, given[0], mask, given[1], unit, ranks)[0]
    return out
