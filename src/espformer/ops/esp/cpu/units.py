"""Numbers in units of their spread, as registered torch operators with their autograd rules.

- ``espformer::cpu_in_spreads``: the numbers of every slice over their standard deviation;
- ``espformer::cpu_in_spreads_backward``: the gradient of that.

The torch twin is `with_spread` of :mod:`espformer.ops.esp.problem`, with a dozen tensor operations
forward and backward, which took a tenth of the time of a call.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from espformer.ops.common.operators import operator, refuse_double_backward
from espformer.ops.esp.cpu.compiling import kernel, part, relaxed, stand_alone
from espformer.ops.esp.cpu.threads import run, split_work

MULTIPLICATIONS = 8  # for each number, which decides how many threads are worth it
# Of a slice. MEAN is that of the results, measured from the first of them; MOVES is one over n, or
# zero if there is no spread.
SPREAD, MEAN, MOVES = range(3)


@relaxed("reassoc", "contract")
def _largest(x, taken):  # type: ignore[no-untyped-def]
    stand_alone()
    found = x.dtype.type(0)
    for i in range(len(x)):
        found = max(found, abs(x[i] * taken[i]))
    return found


@relaxed("reassoc", "contract")
def _sum(x, taken):  # type: ignore[no-untyped-def]
    stand_alone()
    found = 0.0
    for i in range(len(x)):
        found += np.float64(x[i]) * taken[i]
    return found


@relaxed("reassoc", "contract")
def _sum_of_squares(x, taken, mean, factor):  # type: ignore[no-untyped-def]
    stand_alone()
    found = 0.0
    for i in range(len(x)):
        off = (x[i] - mean) * factor * taken[i]
        found += off * off
    return found


@part
def _first(taken):  # type: ignore[no-untyped-def]
    """Where the first number that takes part stands; zero if none does."""
    stand_alone()
    for i in range(len(taken)):
        if taken[i] > 0:
            return i
    return 0


@kernel
def divide(h0, h1, l0, l1, points, mask, least, rounding, out, shapes, taken):  # type: ignore[no-untyped-def]
    """Divides by the deviation of the numbers that take part, or by the largest of them if they
    differ by rounding alone.
    """
    size = points.shape[2]
    for head in range(h0, h1):
        n = size
        for i in range(size):
            taken[i] = 1
        if mask.shape[1] > 0:
            n = 0
            for i in range(size):
                taken[i] = 1 if mask[head, i] else 0
                n += 1 if mask[head, i] else 0
        n = max(n, 1)
        for l in range(l0, l1):
            x, y, shape = points[head, l], out[head, l], shapes[head, l]
            largest = max(np.float64(_largest(x, taken)), least)
            mean = _sum(x, taken) / n
            variance = _sum_of_squares(x, taken, mean, 1 / largest) / n
            spread, moves = largest * np.sqrt(variance), 1.0 / n
            if variance <= rounding * rounding:
                spread, moves = largest, 0.0
            divisor = x.dtype.type(spread)
            for i in range(size):
                y[i] = x[i] / divisor
            # Measured from one of the numbers: far from zero, the mean itself has too few digits.
            mean = mean / np.float64(divisor) - np.float64(y[_first(taken)])
            shape[SPREAD], shape[MEAN], shape[MOVES] = spread, mean, moves


@kernel
def divide_gradient(h0, h1, l0, l1, upstream, mask, out, shapes, d_points, taken):  # type: ignore[no-untyped-def]
    """``(g_i - (Σ g y) (y_i - mean) / n) / spread``, or zero if there is no spread."""
    size = out.shape[2]
    for head in range(h0, h1):
        for i in range(size):
            taken[i] = 1
        if mask.shape[1] > 0:
            for i in range(size):
                taken[i] = 1 if mask[head, i] else 0
        for l in range(l0, l1):
            g, y, dx, shape = upstream[head, l], out[head, l], d_points[head, l], shapes[head, l]
            number = g.dtype.type
            share, mean = number(_sum(g, y) * shape[MOVES]), number(shape[MEAN])
            middle = y[_first(taken)]
            spread = number(shape[SPREAD])
            if shape[MOVES] == 0:
                for i in range(size):
                    dx[i] = 0
                continue
            for i in range(size):
                dx[i] = (g[i] - share * taken[i] * ((y[i] - middle) - mean)) / spread


@cache
def _limits(dtype: torch.dtype) -> tuple[float, float]:
    """The least spread, and the deviation of numbers that differ by rounding, see `with_spread`."""
    info = torch.finfo(dtype)
    return info.tiny**0.75, 8 * info.eps


def _array(x: Tensor) -> np.ndarray:
    found: np.ndarray = x.detach().numpy()
    return found


def _run(function: Any, points: Tensor, mask: Tensor | None, *operands: Any) -> None:
    heads, slices, tokens = points.shape
    kept = np.zeros((heads, 0), np.bool_) if mask is None else _array(mask)
    first, dtype = _array(points), _array(points).dtype
    rest = tuple(_array(x) if isinstance(x, Tensor) else x for x in operands)

    def arguments(_: int) -> tuple[Any, ...]:
        return first, kept, *rest, np.empty(tokens, dtype)

    run(function, split_work(heads, slices, heads * slices * tokens * MULTIPLICATIONS), arguments)


@operator("cpu_in_spreads")
def in_spreads(points: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Points (batch, L, N) over the spread of those that `mask` (batch, N) keeps, and its shape."""
    out = torch.empty_like(points)
    shapes = torch.empty(*points.shape[:2], 3, dtype=torch.float64)
    _run(divide, points, mask, *_limits(points.dtype), out, shapes)
    return out, shapes


@in_spreads.register_fake
def _(points: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    shapes = points.new_empty(*points.shape[:2], 3, dtype=torch.float64)
    return points.new_empty(points.shape), shapes


@operator("cpu_in_spreads_backward")
def in_spreads_backward(
    upstream: Tensor, mask: Tensor | None, out: Tensor, shapes: Tensor
) -> Tensor:
    """The gradient of points."""
    found = torch.empty_like(upstream)
    _run(divide_gradient, upstream, mask, out, shapes, found)
    return found


@in_spreads_backward.register_fake
def _(upstream: Tensor, mask: Tensor | None, out: Tensor, shapes: Tensor) -> Tensor:
    return out.new_empty(out.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[1], *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


@refuse_double_backward("espformer's linear-time attention")
def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    if grads[0] is None:
        return None, None
    return in_spreads_backward(grads[0], *ctx.saved_tensors), None


in_spreads.register_autograd(_gradients, setup_context=_remember)
