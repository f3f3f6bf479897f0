"""Soft sorts and ranks of numbers as registered torch operators, with their autograd rules.

- ``espformer::cpu_sort_or_rank``: numbers softly sorted, or their soft ranks;
- ``espformer::cpu_sort_or_rank_backward``: the gradients of that.

They are what `sort_operators` does for one column and rows that sum to one, in the absolute metric,
with a fraction of the work around them: a thousand numbers take less time than a dozen tensor
operations would.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from espformer.ops.common.operators import operator, refuse_double_backward
from espformer.ops.esp.cpu.numbers import (
    MANY,
    OF_RANKS,
    OF_SORT,
    SHAPE,
    sort_or_rank,
    sort_or_rank_gradient,
)
from espformer.ops.esp.cpu.operators import _array
from espformer.ops.esp.cpu.threads import run, split_work
from espformer.ops.esp.cpu.workspace import DIGITS
from espformer.ops.esp.problem import MOST_DOUBLINGS

BANDWIDTHS = 1e-18, 1e25  # beyond these no result changes, and inverses stay far from the limits
MULTIPLICATIONS = 32  # for each number, which decides how many threads are worth it


@cache
def _constants(dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Limits of bandwidths and numbers, see `Unit`; no mask; and no temperatures."""
    info = torch.finfo(dtype)
    none = np.empty(0, np.float64 if dtype == torch.float64 else np.float32)
    limits = np.array([*BANDWIDTHS, info.eps, info.tiny**0.75, info.max, MOST_DOUBLINGS[dtype]])
    return limits, np.empty((0, 0), np.bool_), none


def _new_buffers(tokens: int, dtype: np.dtype) -> np.ndarray:
    """Whole vectors are computed with, past the last number too."""
    return np.empty((MANY, -(-tokens // 16) * 16), dtype)


@operator("cpu_sort_or_rank")
def mix_numbers(
    numbers: Tensor, temperature: Tensor | None, mask: Tensor | None, t: float, unit: str,
    ranks: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Soft sorts of numbers (batch, N), or their `ranks`; and what the backward needs.

    Temperatures are (batch,), or one number t for all rows.
    """
    heads, tokens = numbers.shape
    limits, no_mask, constant = _constants(numbers.dtype)
    out, kept, order = _outputs(numbers, ranks)
    x, found, saved, orders = _array(numbers), out.numpy(), kept.numpy(), order.numpy()
    temperatures = constant if temperature is None else _array(temperature)
    masked = no_mask if mask is None else mask.numpy()

    def arguments(_: int) -> tuple[Any, ...]:
        return (
            x, masked, temperatures, t, unit == "spread", limits, ranks, found, saved,
            orders, np.empty(SHAPE), np.empty(2 * tokens, np.uint64),
            np.empty((3, max(tokens, DIGITS)), np.int32), _new_buffers(tokens, x.dtype),
        )  # fmt: skip

    run(sort_or_rank, split_work(heads, 1, heads * tokens * MULTIPLICATIONS), arguments)
    return out, kept, order


def _outputs(numbers: Tensor, ranks: bool) -> tuple[Tensor, Tensor, Tensor]:
    heads, tokens = numbers.shape
    kept = numbers.new_empty(heads, OF_RANKS if ranks else OF_SORT, tokens + SHAPE)
    order = torch.empty(heads, tokens + 1, dtype=torch.int32, device=numbers.device)
    return numbers.new_empty(heads, tokens), kept, order


@mix_numbers.register_fake
def _(numbers: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(numbers, args[-1])


@operator("cpu_sort_or_rank_backward")
def mix_numbers_backward(
    upstream: Tensor, kept: Tensor, order: Tensor, temperature: Tensor | None, t: float, unit: str,
    ranks: bool,
) -> list[Tensor]:  # fmt: skip
    """The gradient of numbers (batch, N), and that of temperatures (batch,) if there are some."""
    heads, tokens = upstream.shape
    limits, _, constant = _constants(upstream.dtype)
    found = [torch.empty_like(upstream)]
    g, saved, orders = _array(upstream), kept.numpy(), order.numpy()
    if temperature is None:
        temperatures, d_temperatures = constant, np.empty(heads, g.dtype)
    else:
        found.append(torch.empty_like(temperature))
        temperatures, d_temperatures = _array(temperature), found[1].numpy()
    d_numbers = found[0].numpy()

    def arguments(_: int) -> tuple[Any, ...]:
        return (
            g, temperatures, t, unit == "spread", limits, ranks, saved, orders,
            d_numbers, d_temperatures, _new_buffers(tokens, g.dtype),
        )  # fmt: skip

    run(sort_or_rank_gradient, split_work(heads, 1, heads * tokens * MULTIPLICATIONS), arguments)
    return found


@mix_numbers_backward.register_fake
def _(
    upstream: Tensor, kept: Tensor, order: Tensor, temperature: Tensor | None, *args: Any
) -> list[Tensor]:  # fmt: skip
    return [x.new_empty(x.shape) for x in (upstream, temperature) if x is not None]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.options = inputs[3:]
    ctx.save_for_backward(*output[1:], inputs[1])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


@refuse_double_backward("espformer's linear-time attention")
def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    if grads[0] is None:
        return (None,) * 6
    d_numbers, *rest = mix_numbers_backward(grads[0], *ctx.saved_tensors, *ctx.options)
    return d_numbers, rest[0] if rest else None, None, None, None, None


mix_numbers.register_autograd(_gradients, setup_context=_remember)
