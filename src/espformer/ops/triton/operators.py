"""Soft plans as registered torch operators, with their fake and autograd rules.

- ``espformer::apply_plans``: ``Σ_l weight_l A_lᵀ T B_l V``;
- ``espformer::cross_plans``: ``Σ_i q_i · (A_lᵀ T B_l K)_i`` for every slice, the part of the slice
  costs that is not a column;
- ``espformer::plans_backward``: the backward of both.

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
from espformer.ops.triton.column import width_gradient
from espformer.ops.triton.gather import gather_sum
from espformer.ops.triton.instructions import INTERPRETED
from espformer.ops.triton.launch import Rows, SortedSlices
from espformer.ops.triton.matching import match
from espformer.ops.triton.registration import operator

SCRATCH_BYTES = 400 << 20

Group = tuple[slice, slice]


def _groups(
    value: Tensor, query_values: Tensor, key_values: Tensor, coupled: bool
) -> Iterator[Group]:
    """Parts of (batch, slices) whose scratch fits: whole heads, or some slices of one head."""
    batch, slices, tokens = key_values.shape
    rows = max(tokens, query_values.shape[-1])
    # W and its states; a coupling works on float32 copies.
    bytes_each = value.element_size() + 1 + (24 if coupled else 0)
    pairs = max(1, SCRATCH_BYTES // max(1, rows * value.shape[-1] * bytes_each))
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
        width = inverse_width[group[0]]
        self.query = SortedSlices(query_values[group], width, metric, value.dtype)
        self.key = SortedSlices(key_values[group], width, metric, value.dtype)
        self.query_order, self.key_order = query_order[group], key_order[group]
        self.query_scale, self.key_scale = query_scale[group], key_scale[group]
        self.first, self.final = _at(first, group), _at(final, group)
        self.coupling = _coupling(rows, columns, weights, group[0], query_values.shape[-1])
        self.back = _coupling(columns, rows, weights, group[0], key_values.shape[-1])
        self.tokens = Rows(value[group[0]], self.key_order, self.first)
        self.deterministic = torch.are_deterministic_algorithms_enabled()
        # Means over all ranks: the range of float16 is too small (the interpreter has no other).
        narrow = value.dtype == torch.float16 and not INTERPRETED
        self.scratch = torch.bfloat16 if narrow else value.dtype

    def middle(self, ties: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``W = query_scale · T · y``, its states, ``y = key_scale · κ_k x``, and x's states."""
        x_states = self.key.states(self.tokens, ties)
        width = self.tokens.data.shape[-1]
        y = self.tokens.data.new_empty((*self.key_order.shape, width), dtype=self.scratch)
        if self.coupling is None:
            states = self.query.new_states(y, ties)
            self.key.mix(
                self.tokens, x_states, self.key_scale * self.query_scale, "ranks", y,
                into=self.query, into_states=states,
            )  # fmt: skip
            return y, self.query.scan(states, ties), y, x_states
        self.key.mix(self.tokens, x_states, self.key_scale, "ranks", y)
        w = (self.coupling(y.float()) * self.query_scale.unsqueeze(-1)).to(y.dtype)
        return w, self.query.states(Rows(w), ties), y, x_states

    def finish(self, w: Tensor, states: Tensor, weight: Tensor, out: Tensor) -> None:
        """Adds ``weight · final · κ_q W`` to the rows of the queries' tokens."""
        if not self.deterministic:
            self.query.mix(
                Rows(w), states, self.final, "tokens", out, weight=weight, order=self.query_order
            )
            return
        ranked = torch.empty_like(w, dtype=torch.float32)
        self.query.mix(Rows(w), states, self.final, "ranks", ranked)
        out += gather_sum(ranked, match(self.query_order, None), weight, torch.float32)

    def backward(
        self, upstream: Tensor, weight: Tensor, out: Tensor, d_upstream: Tensor | None,
        found: list[Tensor | None],
    ) -> None:  # fmt: skip
        """Adds dV of ``⟨upstream, weight · plan V⟩`` to `out`, and d`upstream` where asked for.

        Writes to `found` the slopes of queries and keys, and gradients of logarithms of scales,
        which do not have the weight in them yet. The two scales in the middle have the same
        gradient unless a coupling stands between them.
        """
        query_slope, key_slope, query_log, key_log, first_log, final_log = found
        assert query_slope is not None
        assert key_slope is not None
        ties = not self.query.complex
        w, w_states, y, x_states = self.middle(ties)
        if d_upstream is not None:
            self.finish(w, w_states, weight, d_upstream)
        g = Rows(upstream, self.query_order, self.final)
        g_states = self.query.states(g, ties)
        if self.coupling is None:  # OUT = query_scale · key_scale · κ_q g takes the place of W
            p, p_states = w, self.key.new_states(w, ties)
            self.query.grad(
                Rows(w), g, w_states, g_states, query_slope, weight=weight, agree=query_log,
                align=final_log, scale=self.query_scale * self.key_scale, to="ranks", out=p,
                into=self.key, into_states=p_states,
            )  # fmt: skip
            self.key.scan(p_states, ties)
        else:
            assert self.back is not None
            assert key_log is not None
            d_rows = torch.empty_like(w)
            self.query.grad(
                Rows(w), g, w_states, g_states, query_slope, weight=weight, agree=query_log,
                align=final_log, scale=self.query_scale, to="ranks", out=d_rows,
            )  # fmt: skip
            dy = self.back(d_rows.float())
            torch.sum(dy * y.float(), -1, out=key_log)
            p = (dy * self.key_scale.unsqueeze(-1)).to(w.dtype)
            p_states = self.key.states(Rows(p), ties)
        ranked = torch.empty_like(p, dtype=torch.float32) if self.deterministic else out
        self.key.grad(
            self.tokens, Rows(p), x_states, p_states, key_slope, scale=self.first, weight=weight,
            agree=first_log,
            to="ranks" if self.deterministic else "tokens", out=ranked, order=self.key_order,
        )  # fmt: skip
        if self.deterministic:
            out += gather_sum(ranked, match(self.key_order, None), weight, torch.float32)


@operator("apply_plans")
def apply_plans(
    value: Tensor, weight: Tensor, query_values: Tensor, key_values: Tensor, query_order: Tensor,
    key_order: Tensor, inverse_width: Tensor, query_scale: Tensor, key_scale: Tensor,
    first: Tensor | None, final: Tensor | None, rows: Tensor | None, columns: Tensor | None,
    weights: Tensor | None, metric: str,
) -> Tensor:  # fmt: skip
    """``Σ_l weight_l A_lᵀ T B_l V``, (batch, N, d), in the dtype of `value`."""
    batch, _, queries = query_values.shape
    out = value.new_zeros(batch, queries, value.shape[-1], dtype=torch.float32)
    for group in _groups(value, query_values, key_values, rows is not None):
        plan = _Plan(
            group, value, query_values, key_values, query_order, key_order, inverse_width,
            query_scale, key_scale, first, final, rows, columns, weights, metric,
        )  # fmt: skip
        w, states, *_ = plan.middle()
        plan.finish(w, states, weight[group], out[group[0]])
    return out.to(value.dtype)


@apply_plans.register_fake
def _(value: Tensor, weight: Tensor, query_values: Tensor, *_: Any) -> Tensor:
    return value.new_empty(value.shape[0], query_values.shape[-1], value.shape[-1])


@operator("cross_plans")
def cross_plans(
    query: Tensor, key: Tensor, query_values: Tensor, key_values: Tensor, query_order: Tensor,
    key_order: Tensor, inverse_width: Tensor, query_scale: Tensor, key_scale: Tensor,
    first: Tensor | None, final: Tensor | None, rows: Tensor | None, columns: Tensor | None,
    weights: Tensor | None, metric: str,
) -> Tensor:  # fmt: skip
    """``Σ_i q_i · (A_lᵀ T B_l K)_i``: (batch, L)."""
    totals = torch.empty_like(query_values[..., 0])
    for group in _groups(key, query_values, key_values, rows is not None):
        plan = _Plan(
            group, key, query_values, key_values, query_order, key_order, inverse_width,
            query_scale, key_scale, first, final, rows, columns, weights, metric,
        )  # fmt: skip
        w, states, *_ = plan.middle()
        totals[group] = plan.query.dot(
            Rows(w), states, plan.final, query[group[0]], plan.query_order
        )
    return totals


@cross_plans.register_fake
def _(query: Tensor, key: Tensor, query_values: Tensor, *_: Any) -> Tensor:
    return query_values.new_empty(query_values.shape[:2])


def _new_gradients(
    query_values: Tensor, key_values: Tensor, rows: Tensor | None, first: Tensor | None,
    final: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Room for slopes and logarithmic gradients; empty where there is nothing to differentiate."""
    q, k, nothing = query_values, key_values, query_values.new_empty(0)
    optional = ((rows, k), (first, k), (final, q))
    return [x.new_empty(x.shape) for x in (q, k, q)] + [
        nothing.new_empty(0 if given is None else x.shape) for given, x in optional
    ]


@operator("plans_backward")
def plans_backward(
    upstream: Tensor, weight: Tensor, value: Tensor, query_values: Tensor, key_values: Tensor,
    query_order: Tensor, key_order: Tensor, inverse_width: Tensor, query_scale: Tensor,
    key_scale: Tensor, first: Tensor | None, final: Tensor | None, rows: Tensor | None,
    columns: Tensor | None, weights: Tensor | None, metric: str, with_upstream: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of ``Σ_l weight_l ⟨upstream, plan_l V⟩``.

    Returns dV, slopes of queries and keys, logarithmic gradients of query_scale, key_scale (if it
    differs), first and final (without the weight), and, if asked for, the gradient of `upstream`.
    What does not exist is empty.
    """
    d_value = torch.zeros_like(value, dtype=torch.float32)
    d_upstream = torch.zeros_like(upstream, dtype=torch.float32) if with_upstream else None
    full = _new_gradients(query_values, key_values, rows, first, final)
    for group in _groups(value, query_values, key_values, rows is not None):
        plan = _Plan(
            group, value, query_values, key_values, query_order, key_order, inverse_width,
            query_scale, key_scale, first, final, rows, columns, weights, metric,
        )  # fmt: skip
        heads = group[0]
        plan.backward(
            upstream[heads], weight[group], d_value[heads],
            None if d_upstream is None else d_upstream[heads],
            [x[group] if x.numel() else None for x in full],
        )  # fmt: skip
    end = value.new_empty(0) if d_upstream is None else d_upstream.to(upstream.dtype)
    return [d_value.to(value.dtype), *full, end]


@plans_backward.register_fake
def _(
    upstream: Tensor, weight: Tensor, value: Tensor, query_values: Tensor, key_values: Tensor,
    query_order: Tensor, key_order: Tensor, inverse_width: Tensor, query_scale: Tensor,
    key_scale: Tensor, first: Tensor | None, final: Tensor | None, rows: Tensor | None,
    columns: Tensor | None, weights: Tensor | None, metric: str, with_upstream: bool,
) -> list[Tensor]:  # fmt: skip
    end = upstream.new_empty(upstream.shape) if with_upstream else value.new_empty(0)
    full = _new_gradients(query_values, key_values, rows, first, final)
    return [value.new_empty(value.shape), *full, end]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, metric = inputs
    ctx.save_for_backward(*tensors)
    ctx.metric = metric


def _over(log: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor | None:
    """The gradient of a scale from its logarithmic gradient; zero where padding made it zero."""
    if scale is None:
        return None
    return torch.where(scale == 0, 0, log * weight.unsqueeze(-1) / scale)


def _gradients(
    weight: Tensor, plan: list[Any], found: list[Tensor], need_width: bool
) -> list[Tensor | None]:
    """Gradients of the plan, in the order of the operators' arguments."""
    query_values, key_values, _, _, width, query_scale, key_scale, first, final, *_ = plan
    query_slope, key_slope, query_log, key_log, first_log, final_log = found
    key_log = key_log if key_log.numel() else query_log
    d_width = None
    if need_width:
        d_width = width_gradient(query_slope, query_values) + width_gradient(key_slope, key_values)
    width = width.view(-1, 1, 1)
    return [
        query_slope * width, key_slope * width, None, None, d_width,
        _over(query_log, weight, query_scale), _over(key_log, weight, key_scale),
        _over(first_log, weight, first),
        _over(final_log, weight, final), None, None, None, None,
    ]  # fmt: skip


@refuse_double_backward("espformer::apply_plans")
def _apply_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    value, weight, *plan = ctx.saved_tensors
    found = plans_backward(grads[0].to(value.dtype), weight, value, *plan, ctx.metric, False)
    d_weight = found[3].sum(-1)  # ⟨upstream, plan V⟩
    return (found[0], d_weight, *_gradients(weight, plan, found[1:7], ctx.needs_input_grad[6]))


apply_plans.register_autograd(_apply_backward, setup_context=_setup)


@refuse_double_backward("espformer::cross_plans")
def _cross_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    query, key, *plan = ctx.saved_tensors
    found = plans_backward(query, grads[0], key, *plan, ctx.metric, True)
    return (found[7], found[0], *_gradients(grads[0], plan, found[1:7], ctx.needs_input_grad[6]))


cross_plans.register_autograd(_cross_backward, setup_context=_setup)
