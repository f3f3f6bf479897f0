"""Soft plans as registered torch operators, with their fake and autograd rules.

- ``espformer::apply_plans``: ``Σ_l weight_l A_lᵀ B_l V``;
- ``espformer::cross_plans``: ``Σ_i q_i · (A_lᵀ B_l K)_i`` for every slice, the part of the slice
  costs that is not a column;
- ``espformer::plans_backward``: the backward of both.

A soft plan is ``final · κ_q · scale · κ_k · first``: three diagonal scalings and
two sorted kernels whose ranks meet one to one (`plans.py` brings N ≠ M to that). Slices are worked
on in groups so that their states stay under `SCRATCH_BYTES`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from espformer.ops.common.autograd import refuse_double_backward
from espformer.ops.common.custom_op import operator
from espformer.ops.esp.triton.launch import Gradients, PlanKernels

# More leave the second-level cache, fewer take more launches.
SCRATCH_BYTES = {"absolute": 80 << 20, "squared": 160 << 20}

Group = tuple[slice, slice]


def _groups(x: Tensor, *plan: Any, backward: bool = False) -> Iterator[tuple[Group, PlanKernels]]:
    """Parts of (batch, slices) whose states fit, whole heads or some slices of one, and kernels."""
    values, metric = plan[0], plan[-1]
    batch, slices, _ = values.shape
    each = PlanKernels.scratch_bytes(x, values, metric, backward)
    pairs = max(1, SCRATCH_BYTES[metric] // max(1, each))
    heads, part = (pairs // slices, slices) if pairs >= slices else (1, pairs)
    for b in range(0, batch, max(1, heads)):
        for l in range(0, slices, max(1, part)):
            group = slice(b, min(b + heads, batch)), slice(l, min(l + part, slices))
            yield group, PlanKernels(x.dtype, metric, *(_part(t, group) for t in plan[:-1]))


def _part(x: Any, group: Group) -> Any:
    return x if x is None else x[group[0]] if x.dim() == 1 else x[group]


def _room(out: Tensor, group: Group) -> Tensor:
    """What a group adds its rows to: `out` itself, or rows of its own slices where it must not
    matter who comes first.
    """
    rows, slices = out[group[0]], group[1]
    if not torch.are_deterministic_algorithms_enabled():
        return rows
    return out.new_zeros(len(rows), slices.stop - slices.start, *out.shape[1:])


def _collect(out: Tensor, group: Group, rows: Tensor) -> None:
    """Brings the rows of a group's slices to `out`, if they are not there yet."""
    if rows.dim() == 4:
        out[group[0]] += rows.sum(1)


@operator("apply_plans")
def apply_plans(
    value: Tensor, weight: Tensor, queries: int, query_values: Tensor, key_values: Tensor,
    query_order: Tensor, key_order: Tensor, inverse_width: Tensor, scale: Tensor,
    first: Tensor | None, final: Tensor | None, metric: str,
) -> Tensor:  # fmt: skip
    """``Σ_l weight_l A_lᵀ B_l V``, (batch, queries, d), in the dtype of `value`."""
    out = value.new_zeros(value.shape[0], queries, value.shape[-1], dtype=torch.float32)
    for group, plans in _groups(
        value, query_values, key_values, query_order, key_order, inverse_width, scale,
        first, final, metric,
    ):  # fmt: skip
        rows = _room(out, group)
        plans.apply(value[group[0]], weight[group], rows)
        _collect(out, group, rows)
    return out.to(value.dtype)


@apply_plans.register_fake
def _(value: Tensor, weight: Tensor, queries: int, *_: Any) -> Tensor:
    return value.new_empty(value.shape[0], queries, value.shape[-1])


@operator("cross_plans")
def cross_plans(
    query: Tensor, key: Tensor, query_values: Tensor, key_values: Tensor, query_order: Tensor,
    key_order: Tensor, inverse_width: Tensor, scale: Tensor,
    first: Tensor | None, final: Tensor | None, metric: str,
) -> Tensor:  # fmt: skip
    """``Σ_i q_i · (A_lᵀ B_l K)_i``: (batch, L)."""
    totals = query_values.new_empty(query_values.shape[:2])
    for group, plans in _groups(
        key, query_values, key_values, query_order, key_order, inverse_width, scale,
        first, final, metric,
    ):  # fmt: skip
        plans.cross(query[group[0]], key[group[0]], totals[group])
    return totals


@cross_plans.register_fake
def _(query: Tensor, key: Tensor, query_values: Tensor, *_: Any) -> Tensor:
    return query_values.new_empty(query_values.shape[:2])


def _new_gradients(
    values: Tensor, first: Tensor | None, final: Tensor | None,
    weight: bool, width: bool, factors: bool,
) -> list[Tensor]:  # fmt: skip
    """Room for the fields of `Gradients`; empty where there is nothing to differentiate."""
    sliced = [values.new_empty(values.shape[:2] if x else 0) for x in (weight, width)]
    ranked = [values.new_empty(values.shape) for _ in range(3)]
    wanted = [factors and x is not None for x in (first, final)]
    return sliced + ranked + [values.new_empty(values.shape if x else 0) for x in wanted]


@operator("plans_backward")
def plans_backward(
    upstream: Tensor, weight: Tensor, value: Tensor, query_values: Tensor, key_values: Tensor,
    query_order: Tensor, key_order: Tensor, inverse_width: Tensor, scale: Tensor,
    first: Tensor | None, final: Tensor | None, metric: str,
    with_upstream: bool, with_factors: bool, with_width: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of ``Σ_l weight_l ⟨upstream, plan_l V⟩``.

    Returns dV, the fields of `Gradients`, and the gradient of `upstream`. That and the gradient of
    the weight exclude each other; `first` and `final` have one `with_factors`, the inverse width
    `with_width`. What is not there is empty.
    """
    d_value = torch.zeros_like(value, dtype=torch.float32)
    d_upstream = torch.zeros_like(upstream, dtype=torch.float32) if with_upstream else None
    found = _new_gradients(query_values, first, final, not with_upstream, with_width, with_factors)
    for group, plans in _groups(
        value, query_values, key_values, query_order, key_order, inverse_width, scale,
        first, final, metric, backward=True,
    ):  # fmt: skip
        rows = _room(d_value, group)
        upstream_rows = None if d_upstream is None else _room(d_upstream, group)
        plans.grad(
            upstream[group[0]], value[group[0]], weight[group], rows, upstream_rows,
            Gradients(*(x[group] if x.numel() else None for x in found)),  # type: ignore[arg-type]
        )  # fmt: skip
        _collect(d_value, group, rows)
        if d_upstream is not None and upstream_rows is not None:
            _collect(d_upstream, group, upstream_rows)
    end = value.new_empty(0) if d_upstream is None else d_upstream.to(upstream.dtype)
    return [d_value.to(value.dtype), *found, end]


@plans_backward.register_fake
def _(
    upstream: Tensor, weight: Tensor, value: Tensor, query_values: Tensor, key_values: Tensor,
    query_order: Tensor, key_order: Tensor, inverse_width: Tensor, scale: Tensor,
    first: Tensor | None, final: Tensor | None, metric: str,
    with_upstream: bool, with_factors: bool, with_width: bool,
) -> list[Tensor]:  # fmt: skip
    end = upstream.new_empty(upstream.shape) if with_upstream else value.new_empty(0)
    found = _new_gradients(query_values, first, final, not with_upstream, with_width, with_factors)
    return [value.new_empty(value.shape), *found, end]


def _plan_gradients(found: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Gradients of the plan, in the order of the operators' arguments."""
    d_width, d_query_values, d_key_values, d_scale, *d_factors = found
    d_first, d_final = (x if x.numel() else None for x in d_factors)
    return (
        d_query_values, d_key_values, None, None, d_width.sum(-1) if d_width.numel() else None,
        d_scale, d_first, d_final, None,
    )  # fmt: skip


def _apply_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    value, weight, _, *plan, ctx.metric = inputs
    ctx.save_for_backward(value, weight, *plan)


@refuse_double_backward("espformer::apply_plans")
def _apply_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    value, weight, *plan = ctx.saved_tensors
    needs = ctx.needs_input_grad
    d_value, d_weight, *found, _ = plans_backward(
        grads[0].to(value.dtype), weight, value, *plan, ctx.metric, False, any(needs[-3:-1]),
        needs[7],
    )  # fmt: skip
    return d_value, d_weight, None, *_plan_gradients(found)


apply_plans.register_autograd(_apply_backward, setup_context=_apply_setup)


def _cross_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.metric = inputs
    ctx.save_for_backward(*tensors)


@refuse_double_backward("espformer::cross_plans")
def _cross_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    query, key, *plan = ctx.saved_tensors
    needs = ctx.needs_input_grad
    d_key, _, *found, d_query = plans_backward(
        query, grads[0], key, *plan, ctx.metric, True, any(needs[-3:-1]), needs[6]
    )
    return d_query, d_key, *_plan_gradients(found)


cross_plans.register_autograd(_cross_backward, setup_context=_cross_setup)
