"""The fused kernels as registered torch operators, with their fake and autograd rules.

- ``espformer::sorted_column``: κ on one column per slice (normalisers, balancing, column sums);
- ``espformer::apply_plans``: ``Σ_l σ_l A_lᵀ T B_l V``;
- ``espformer::cross_plans``: ``Σ_i q_i · (A_lᵀ T B_l K)_i`` for every slice, the part of the slice
  costs that is not a column;
- ``espformer::apply_matching`` and ``espformer::cross_matching``: the same two for hard sorting.

A soft plan is ``final · κ_q · query_scale · T · key_scale · κ_k · first``: four diagonal scalings
around the coupling. Slices are worked on in groups so that scratch stays under `SCRATCH_BYTES`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from espformer.ops.autograd import refuse_double_backward
from espformer.ops.coupling import Coupling
from espformer.ops.triton.gather import gather_dot, gather_sum
from espformer.ops.triton.launch import Rows, SortedSlices

SCRATCH_BYTES = 640 << 20

Group = tuple[slice, slice]


def _groups(batch: int, slices: int, bytes_per_pair: int) -> Iterator[Group]:
    """Parts of (batch, slices) whose scratch fits: whole heads, or some slices of one head."""
    pairs = max(1, SCRATCH_BYTES // bytes_per_pair)
    if pairs >= slices:
        heads = pairs // slices
        for b in range(0, batch, heads):
            yield slice(b, min(b + heads, batch)), slice(0, slices)
    else:
        for b in range(batch):
            for l in range(0, slices, pairs):
                yield slice(b, b + 1), slice(l, min(l + pairs, slices))


def _at(x: Tensor | None, group: Group) -> Tensor | None:
    return None if x is None else x[group]


def _coupling(
    rows: Tensor | None, columns: Tensor | None, weights: Tensor | None, b: slice, count: int
) -> Coupling | None:
    if rows is None or columns is None or weights is None:
        return None
    return Coupling(rows[b], columns[b], weights[b], count)


class _Plan:
    """One group of slices: both sides' kernels and everything that lies between them."""

    def __init__(
        self, group: Group, value: Tensor, query_values: Tensor, key_values: Tensor,
        query_order: Tensor, key_order: Tensor, inverse_width: Tensor, query_scale: Tensor,
        key_scale: Tensor, first: Tensor | None, final: Tensor | None, rows: Tensor | None,
        columns: Tensor | None, weights: Tensor | None, metric: str,
    ) -> None:  # fmt: skip
        pairs = 3 if value.dtype in (torch.bfloat16, torch.float16) else 4
        width = inverse_width[group[0]]
        self.query = SortedSlices(query_values[group], width, metric, pairs)
        self.key = SortedSlices(key_values[group], width, metric, pairs)
        self.query_order, self.key_order = query_order[group], key_order[group]
        self.query_scale, self.key_scale = query_scale[group], key_scale[group]
        self.first, self.final = _at(first, group), _at(final, group)
        self.coupling = _coupling(rows, columns, weights, group[0], query_values.shape[-1])
        self.back = _coupling(columns, rows, weights, group[0], key_values.shape[-1])
        self.tokens = Rows(value[group[0]], self.key_order, self.first)
        self.scratch = value.dtype

    def middle(self) -> tuple[Tensor, Tensor]:
        """``W = query_scale · T · y`` and ``y = key_scale · κ_k x`` in rank order."""
        states = self.key.states(self.tokens)
        shape = (*self.key_order.shape, self.tokens.data.shape[-1])
        y = self.tokens.data.new_empty(shape, dtype=self.scratch)
        if self.coupling is None:
            self.key.mix(self.tokens, states, self.key_scale * self.query_scale, "ranks", y)
            return y, y
        self.key.mix(self.tokens, states, self.key_scale, "ranks", y)
        w = self.coupling(y.float()) * self.query_scale.unsqueeze(-1)
        return w.to(self.scratch), y

    def finish(self, w: Tensor, states: Tensor, out: Tensor, scale: Tensor | None) -> None:
        """Adds ``scale · κ_q W`` to the rows of the queries' tokens."""
        if not torch.are_deterministic_algorithms_enabled():
            self.query.mix(Rows(w), states, scale, "tokens", out, self.query_order)
            return
        ranked = torch.empty_like(w, dtype=torch.float32)
        self.query.mix(Rows(w), states, scale, "ranks", ranked)
        out += gather_sum(ranked, _inverse(self.query_order), None, torch.float32)

    def backward(self, upstream: Tensor, final: Tensor | None, out: Tensor) -> tuple[Tensor, ...]:
        """Adds dV of ``⟨upstream, plan V⟩`` to `out`; slopes, and gradients of logs of scales."""
        w, y = self.middle()
        g = Rows(upstream, self.query_order, final)
        empty = torch.empty_like(self.query.values)
        query_slope, query_log, final_log = empty, torch.empty_like(empty), torch.empty_like(empty)
        key_slope = torch.empty_like(self.key.values)
        first_log = torch.empty_like(key_slope)
        rows = Rows(w)
        # OUT = query_scale · κ_q g replaces W when nothing is coupled in between.
        scale = self.query_scale * self.key_scale if self.coupling is None else self.query_scale
        d_rows = w if self.coupling is None else torch.empty_like(w)
        w_states, g_states = self.query.states(rows, ties=True), self.query.states(g, ties=True)
        self.query.grad(
            rows, g, w_states, g_states, query_slope, scale=scale, agree=query_log,
            align=final_log if self.final is not None else None, to="ranks", out=d_rows,
        )  # fmt: skip
        key_log = query_log
        if self.back is not None:
            dy = self.back(d_rows.float())
            key_log = (dy * y.float()).sum(-1)
            d_rows = (dy * self.key_scale.unsqueeze(-1)).to(self.scratch)
        p = Rows(d_rows)
        deterministic = torch.are_deterministic_algorithms_enabled()
        ranked = torch.empty_like(d_rows, dtype=torch.float32) if deterministic else out
        x_states, p_states = (self.key.states(r, ties=True) for r in (self.tokens, p))
        self.key.grad(
            self.tokens, p, x_states, p_states, key_slope, scale=self.first,
            agree=first_log if self.first is not None else None,
            to="ranks" if deterministic else "tokens", out=ranked, order=self.key_order,
        )  # fmt: skip
        if deterministic:
            out += gather_sum(ranked, _inverse(self.key_order), None, torch.float32)
        return query_slope, key_slope, query_log, key_log, first_log, final_log


def _inverse(order: Tensor) -> Tensor:
    ranks = torch.arange(order.shape[-1], device=order.device, dtype=order.dtype)
    return torch.empty_like(order).scatter_(-1, order.long(), ranks.expand_as(order))


def _plan_groups(value: Tensor, query_values: Tensor, key_values: Tensor) -> Iterator[Group]:
    batch, slices, tokens = key_values.shape
    rows = max(tokens, query_values.shape[-1])
    return _groups(batch, slices, rows * value.shape[-1] * (value.element_size() + 1))


@torch.library.custom_op("espformer::apply_plans", mutates_args=())
def apply_plans(
    value: Tensor, query_values: Tensor, key_values: Tensor, query_order: Tensor, key_order: Tensor,
    inverse_width: Tensor, query_scale: Tensor, key_scale: Tensor, first: Tensor | None,
    final: Tensor | None, rows: Tensor | None, columns: Tensor | None, weights: Tensor | None,
    metric: str,
) -> Tensor:  # fmt: skip
    """``Σ_l σ_l A_lᵀ T B_l V``, (batch, N, d), in the dtype of `value`; σ is in `query_scale`."""
    value = value.contiguous()
    batch, _, queries = query_values.shape
    out = value.new_zeros(batch, queries, value.shape[-1], dtype=torch.float32)
    for group in _plan_groups(value, query_values, key_values):
        plan = _Plan(
            group, value, query_values, key_values, query_order, key_order, inverse_width,
            query_scale, key_scale, first, final, rows, columns, weights, metric,
        )  # fmt: skip
        w, _ = plan.middle()
        plan.finish(w, plan.query.states(Rows(w)), out[group[0]], plan.final)
    return out.to(value.dtype)


@apply_plans.register_fake
def _(value: Tensor, query_values: Tensor, *_: Any) -> Tensor:
    return value.new_empty(value.shape[0], query_values.shape[-1], value.shape[-1])


@torch.library.custom_op("espformer::plans_backward", mutates_args=())
def plans_backward(
    upstream: Tensor, weight: Tensor | None, value: Tensor, query_values: Tensor,
    key_values: Tensor, query_order: Tensor, key_order: Tensor, inverse_width: Tensor,
    query_scale: Tensor, key_scale: Tensor, first: Tensor | None, final: Tensor | None,
    rows: Tensor | None, columns: Tensor | None, weights: Tensor | None, metric: str,
    with_upstream: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of ``Σ_l weight_l ⟨upstream, plan_l V⟩``.

    Returns dV, slopes of queries and keys, logarithmic gradients of query_scale, key_scale, first
    and final, and, if asked for, the gradient of `upstream` (else an empty tensor).
    """
    value, upstream = value.contiguous(), upstream.contiguous()
    d_value = torch.zeros_like(value, dtype=torch.float32)
    d_upstream = torch.zeros_like(upstream, dtype=torch.float32) if with_upstream else None
    full = [torch.empty_like(x) for x in (query_values, key_values, query_values, key_values,
                                          key_values, query_values)]  # fmt: skip
    for group in _plan_groups(value, query_values, key_values):
        plan = _Plan(
            group, value, query_values, key_values, query_order, key_order, inverse_width,
            query_scale, key_scale, first, final, rows, columns, weights, metric,
        )  # fmt: skip
        end = plan.final
        if weight is not None:
            shared = weight[group].unsqueeze(-1)
            end = shared.expand_as(plan.query_scale) if end is None else end * shared
            end = end.contiguous()
        if d_upstream is not None:
            w, _ = plan.middle()
            plan.finish(w, plan.query.states(Rows(w)), d_upstream[group[0]], end)
        found = plan.backward(upstream[group[0]], end, d_value[group[0]])
        for whole, part in zip(full, found, strict=True):
            whole[group] = part
    end_grad = value.new_empty(0) if d_upstream is None else d_upstream.to(upstream.dtype)
    return [d_value.to(value.dtype), *full, end_grad]


@plans_backward.register_fake
def _(
    upstream: Tensor, weight: Tensor | None, value: Tensor, query_values: Tensor,
    key_values: Tensor, *others: Any,
) -> list[Tensor]:  # fmt: skip
    q, k = query_values, key_values
    end = torch.empty_like(upstream) if others[-1] else value.new_empty(0)
    return [torch.empty_like(x) for x in (value, q, k, q, k, k, q)] + [end]


@torch.library.custom_op("espformer::cross_plans", mutates_args=())
def cross_plans(
    query: Tensor, key: Tensor, query_values: Tensor, key_values: Tensor, query_order: Tensor,
    key_order: Tensor, inverse_width: Tensor, query_scale: Tensor, key_scale: Tensor,
    first: Tensor | None, final: Tensor | None, rows: Tensor | None, columns: Tensor | None,
    weights: Tensor | None, metric: str,
) -> Tensor:  # fmt: skip
    """``Σ_i q_i · (A_lᵀ T B_l K)_i``: (batch, L)."""
    query, key = query.contiguous(), key.contiguous()
    totals = []
    for group in _plan_groups(key, query_values, key_values):
        plan = _Plan(
            group, key, query_values, key_values, query_order, key_order, inverse_width,
            query_scale, key_scale, first, final, rows, columns, weights, metric,
        )  # fmt: skip
        w = Rows(plan.middle()[0])
        totals.append(plan.query.dot(w, plan.final, query[group[0]], plan.query_order).flatten())
    return torch.cat(totals).view(query_values.shape[:2])


@cross_plans.register_fake
def _(query: Tensor, key: Tensor, query_values: Tensor, *_: Any) -> Tensor:
    return query_values.new_empty(query_values.shape[:2])


@torch.library.custom_op("espformer::sorted_column", mutates_args=())
def sorted_column(x: Tensor, values: Tensor, inverse_width: Tensor, metric: str) -> Tensor:
    """κ x for one column per slice, (batch, L, N)."""
    kernel = SortedSlices(values, inverse_width, metric)
    rows = Rows(x.contiguous().unsqueeze(-1))
    out = torch.empty_like(rows.data)
    kernel.mix(rows, kernel.states(rows), None, "ranks", out)
    return out.squeeze(-1)


@sorted_column.register_fake
def _(x: Tensor, values: Tensor, inverse_width: Tensor, metric: str) -> Tensor:
    return torch.empty_like(values)


@torch.library.custom_op("espformer::sorted_column_backward", mutates_args=())
def sorted_column_backward(
    upstream: Tensor, x: Tensor, values: Tensor, inverse_width: Tensor, metric: str
) -> tuple[Tensor, Tensor]:
    """κ P and the slope in the values."""
    kernel = SortedSlices(values, inverse_width, metric)
    rows, p = Rows(x.contiguous().unsqueeze(-1)), Rows(upstream.contiguous().unsqueeze(-1))
    out, slope = torch.empty_like(rows.data), torch.empty_like(values)
    kernel.grad(
        rows,
        p,
        kernel.states(rows, ties=True),
        kernel.states(p, ties=True),
        slope,
        to="ranks",
        out=out,
    )
    return out.squeeze(-1), slope


@sorted_column_backward.register_fake
def _(upstream: Tensor, x: Tensor, values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(values), torch.empty_like(values)


def _position_gradients(slope: Tensor, values: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """From the slope per unit of scaled distance: to the values and to the inverse width."""
    centred = values - values.mean(-1, keepdim=True)
    d_width = (slope * centred).sum((1, 2))
    return slope * width.view(-1, 1, 1), d_width


def _column_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.metric = inputs[3]


@refuse_double_backward("espformer::sorted_column")
def _column_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    x, values, width = ctx.saved_tensors
    dx, slope = sorted_column_backward(grads[0], x, values, width, ctx.metric)
    d_values, d_width = _position_gradients(slope, values, width)
    return dx, d_values, d_width, None


sorted_column.register_autograd(_column_backward, setup_context=_column_setup)


def _plan_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, metric = inputs
    ctx.save_for_backward(*tensors)
    ctx.metric = metric


def _over(log: Tensor, scale: Tensor | None) -> Tensor | None:
    """The gradient of a scale from its logarithmic gradient; zero where padding made it zero."""
    if scale is None:
        return None
    return torch.where(scale == 0, 0, log / scale)


def _plan_gradients(ctx: Any, tensors: tuple[Any, ...], found: list[Tensor]) -> list[Tensor | None]:
    """Gradients of everything after the rows, in the order of the operators' arguments."""
    query_values, key_values, _, _, width, query_scale, key_scale, first, final, *_ = tensors
    query_slope, key_slope, query_log, key_log, first_log, final_log = found
    d_query, query_width = _position_gradients(query_slope, query_values, width)
    d_key, key_width = _position_gradients(key_slope, key_values, width)
    return [
        d_query, d_key, None, None, query_width + key_width, _over(query_log, query_scale),
        _over(key_log, key_scale), _over(first_log, first), _over(final_log, final),
        None, None, None, None,
    ]  # fmt: skip


@refuse_double_backward("espformer::apply_plans")
def _apply_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    value, *rest = ctx.saved_tensors
    found = plans_backward(grads[0].to(value.dtype), None, value, *rest, ctx.metric, False)
    return (found[0], *_plan_gradients(ctx, tuple(rest), found[1:7]))


apply_plans.register_autograd(_apply_backward, setup_context=_plan_setup)


@refuse_double_backward("espformer::cross_plans")
def _cross_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    query, key, *rest = ctx.saved_tensors
    found = plans_backward(query, grads[0].contiguous(), key, *rest, ctx.metric, True)
    return (found[7], found[0], *_plan_gradients(ctx, tuple(rest), found[1:7]))


cross_plans.register_autograd(_cross_backward, setup_context=_plan_setup)


@torch.library.custom_op("espformer::apply_matching", mutates_args=())
def apply_matching(value: Tensor, weight: Tensor, match: Tensor, back: Tensor) -> Tensor:
    """``Σ_l weight_l V[match[l, i]]``; `back` is the inverse of `match` along tokens."""
    return gather_sum(value.contiguous(), match, weight.contiguous(), value.dtype)


@apply_matching.register_fake
def _(value: Tensor, weight: Tensor, match: Tensor, back: Tensor) -> Tensor:
    return torch.empty_like(value)


@torch.library.custom_op("espformer::cross_matching", mutates_args=())
def cross_matching(query: Tensor, key: Tensor, match: Tensor, back: Tensor) -> Tensor:
    """``Σ_i q_i · k[match[l, i]]``: (batch, L)."""
    return gather_dot(query.contiguous(), key.contiguous(), match)


@cross_matching.register_fake
def _(query: Tensor, key: Tensor, match: Tensor, back: Tensor) -> Tensor:
    return query.new_empty(match.shape[:2], dtype=torch.float32)


def _matching_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


@refuse_double_backward("espformer::apply_matching")
def _matching_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    value, weight, match, back = ctx.saved_tensors
    d_value = apply_matching(grads[0].to(value.dtype), weight, back, match)
    return d_value, cross_matching(grads[0].to(value.dtype), value, match, back), None, None


apply_matching.register_autograd(_matching_backward, setup_context=_matching_setup)


@refuse_double_backward("espformer::cross_matching")
def _cross_matching_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    query, key, match, back = ctx.saved_tensors
    d_query = apply_matching(key, grads[0], match, back)
    return d_query, apply_matching(query, grads[0], back, match), None, None


cross_matching.register_autograd(_cross_matching_backward, setup_context=_matching_setup)
