"""Soft sorts of rows as registered torch operators, with their fake and autograd rules.

- ``espformer::cpu_mix``: rows mixed by the soft sort of numbers, or by its transpose;
- ``espformer::cpu_mix_backward``: all gradients of that.

What the backward needs beside the inputs is O(N): order, points and scales, and a few numbers for
every row. They are outputs too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from espformer.ops.common.operators import operator, refuse_double_backward
from espformer.ops.esp.cpu import one_side
from espformer.ops.esp.cpu.measuring import Unit
from espformer.ops.esp.cpu.operators import (
    _array,
    _mask,
    _new_side,
    _nothing,
    _settings,
    _side,
    _Work,
)
from espformer.ops.esp.cpu.soft_plan import Settings
from espformer.ops.esp.problem import MOST_DOUBLINGS

OPTIONS = 6  # the last arguments of `cpu_mix`
DIFFERENTIABLE = 3  # the first: numbers, value, temperature


# Of a bandwidth: beyond these no result changes, and inverses stay far from the limits.
BANDWIDTHS = {"absolute": (1e-18, 1e25), "squared": (1e-12, 3e12)}
NARROW = 2  # columns that are mixed one by one


def _unit(temperature: Tensor, unit: str, metric: str) -> Unit:
    info = torch.finfo(temperature.dtype)
    return Unit(
        _array(temperature), unit == "spread", metric == "squared", *BANDWIDTHS[metric], info.eps,
        info.tiny**0.75, info.max, MOST_DOUBLINGS[temperature.dtype],
    )  # fmt: skip


def _narrow(value: Tensor, settings: Settings) -> bool:
    """Whether columns are mixed one by one: vectors would be mostly empty."""
    return value.shape[-1] <= NARROW and not settings.balanced


@operator("cpu_mix")
def mix(
    numbers: Tensor, value: Tensor, temperature: Tensor, mask: Tensor | None,
    back: bool, unit: str, metric: str, balance: str, hard: bool, ties: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``A V``, or ``Aᵀ V`` if `back`, (batch, N, d), with A the soft sort of numbers (batch, N).

    Beside it one over the bandwidths, (batch,), the shapes of the rows of numbers (see
    `one_side.measure`), and a side (see `Side`). `temperature` is (batch,) or (1,).
    """
    heads, tokens = numbers.shape
    inv_bandwidth = numbers.new_ones(heads)
    shapes = torch.ones(heads, 4, dtype=torch.float64)
    settings = _settings(inv_bandwidth, metric, balance, hard, ties)
    points = numbers.unsqueeze(1)
    parts = _new_side(points)
    side = _side(parts)
    work = _Work(settings, points, points, value.shape[-1])
    what = _unit(temperature, unit, metric), numbers, _mask(mask, heads)
    out = torch.empty_like(value)
    if _narrow(value, settings):
        work.run(one_side.mix_columns, *what, value, back, side, shapes, out)
        return out, inv_bandwidth, shapes, *parts  # type: ignore[return-value]
    work.run(one_side.sort_numbers, *what, side, shapes)
    origin = value.new_zeros(value.shape[-1])
    work.run(one_side.mix_rows, side, value, back, origin, out, width=value.shape[-1])
    return out, inv_bandwidth, shapes, *parts  # type: ignore[return-value]


@mix.register_fake
def _(numbers: Tensor, value: Tensor, *args: Any) -> tuple[Tensor, ...]:
    heads, tokens = numbers.shape
    return (
        value.new_empty(value.shape), numbers.new_empty(heads),
        numbers.new_empty(heads, 4, dtype=torch.float64),
        numbers.new_empty(heads, dtype=torch.int64),
        numbers.new_empty(heads, 1, tokens, dtype=torch.int32),
        numbers.new_empty(heads, 1, tokens), numbers.new_empty(heads, 1, tokens),
    )  # fmt: skip


@operator("cpu_mix_backward")
def mix_backward(
    upstream: Tensor, inv_bandwidth: Tensor, shapes: Tensor, lengths: Tensor, order: Tensor,
    points: Tensor, scales: Tensor, value: Tensor, temperature: Tensor,
    back: bool, unit: str, metric: str, balance: str, hard: bool, ties: str,
    rows: bool, slopes: bool, temperatures: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of numbers (with `slopes`), value (with `rows`) and temperature (with
    `temperatures`, which needs slopes); what is not wanted is empty.
    """
    settings = _settings(inv_bandwidth, metric, balance, hard, ties, slopes)
    heads, _, tokens = points.shape
    work = _Work(settings, points, points, 4 * value.shape[-1])
    d_numbers = points.new_zeros(heads, tokens if slopes else 0)
    d_rows = value.new_zeros(value.shape if rows else (heads, 0, 0))
    x, y = (upstream, value) if back else (value, upstream)
    side = _side([lengths, order, points, scales])
    what = _unit(temperature, unit, metric), side, shapes, x, y, back, rows
    d_temperature, d_temperatures = _nothing(value), points.new_zeros(heads)
    found = d_rows, d_numbers, d_temperatures
    if _narrow(value, settings):
        work.run(one_side.columns_gradient, *what, *found)
    else:
        columns = value.shape[-1]
        work.run(
            one_side.mix_gradient, *what, value.new_zeros(columns), *found, width=columns,
            pairs=True,
        )  # fmt: skip
    if temperatures:
        d_temperature = d_temperatures if len(temperature) == heads else d_temperatures.sum()[None]
    return (
        d_numbers if slopes else _nothing(points), d_rows if rows else _nothing(value),
        d_temperature,
    )  # fmt: skip


@mix_backward.register_fake
def _(upstream: Tensor, *args: Any) -> tuple[Tensor, ...]:
    points, value, temperature = args[4], args[6], args[7]
    rows, slopes, temperatures = args[-3:]
    return (
        points.new_empty((points.shape[0], points.shape[2]) if slopes else 0),
        value.new_empty(value.shape if rows else 0),
        value.new_empty(temperature.shape if temperatures else 0),
    )


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.options = inputs[-OPTIONS:]
    ctx.save_for_backward(*output[1:], inputs[1], inputs[2])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


@refuse_double_backward("espformer's linear-time attention")
def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    numbers, value, temperature = ctx.needs_input_grad[:DIFFERENTIABLE]
    if grads[0] is None:
        return (None,) * len(ctx.needs_input_grad)
    wanted = value, numbers or temperature, temperature
    d_numbers, d_rows, d_temperature = mix_backward(
        grads[0], *ctx.saved_tensors, *ctx.options, *wanted
    )
    rest = (None,) * (len(ctx.needs_input_grad) - DIFFERENTIABLE)
    return (
        d_numbers if numbers else None, d_rows if value else None,
        d_temperature if temperature else None, *rest,
    )  # fmt: skip


mix.register_autograd(_gradients, setup_context=_remember)
