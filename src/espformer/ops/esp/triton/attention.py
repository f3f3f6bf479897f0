"""Attention by the fused kernels: hard (`hard_plan.py`), or soft, as one torch operator.

Each torch operator costs Python time per call, for small problems more than the kernels. So soft
attention is one operator, ``espformer::soft_attention``, plus one for its backward; their steps are
plain functions:

    sort_side  →  Plan  →  slice weights: centre_rows, norm_costs, cross_plans  →  apply_plans.

The torch twin is :func:`espformer.ops.esp.linear.attend`. Queries and keys of one shape, dtype and
mask are one side of twice as many heads (`normalise.py`), and all but the plans takes one launch
for both.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from espformer.ops.common.masks import zero_padding
from espformer.ops.common.operators import operator, refuse_double_backward, softmax_backward
from espformer.ops.esp import linear
from espformer.ops.esp.coupling import Coupling, couple
from espformer.ops.esp.problem import Problem, centre, least_cost, slice_weights
from espformer.ops.esp.triton import hard_plan
from espformer.ops.esp.triton.costs import (
    centre_rows,
    centre_rows_backward,
    norm_costs,
    norm_costs_backward,
)
from espformer.ops.esp.triton.normalise import (
    SortedSide,
    SortSettings,
    Tokens,
    bandwidth_gradient,
    sort_side,
    sort_side_backward,
)
from espformer.ops.esp.triton.soft_plan import (
    Chunks,
    Pieces,
    Plan,
    PlanGradients,
    apply_plans,
    cross_plans,
    keeps_states,
    plan_gradients,
)
from espformer.ops.esp.triton.sort import blocks_of_tokens, masked_lengths

MOST_WIDTH = 256
MOST_BLOCKS = 65_535  # of the second axis of a grid


class Operands(NamedTuple):
    """All arguments that are tensors. Gradients flow to those that `Gradients` has."""

    query: Tensor  # (batch, N, width)
    key: Tensor  # (batch, M, width)
    value: Tensor  # (batch, M, d)
    slices: Tensor | None  # (batch or 1, L, width); None is the axes
    slice_logits: Tensor | None  # (batch or 1, L)
    inv_bandwidth: Tensor  # (batch,) float32
    query_mask: Tensor | None  # (batch, N)
    key_mask: Tensor | None  # (batch, M)
    keep: Tensor | None  # (batch, L): slices that take part


class Gradients(NamedTuple):
    """For each operand with a gradient: the gradient, or whether it is needed."""

    query: Any
    key: Any
    value: Any
    slices: Any
    slice_logits: Any
    inv_bandwidth: Any


class Settings(NamedTuple):
    """All arguments that are not tensors."""

    one_to_one: bool  # whether rank n of the queries is matched with rank n of the keys
    one_mask: bool  # whether queries and keys have the same mask, which is `query_mask`
    keep_states: bool  # for the backward pass, if ranks are matched one to one
    scale: float
    in_spreads: bool
    balanced: bool
    metric: str
    coupling: str
    inverse_temperature: float
    cost_exponent: float


TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", bool: "bool", float: "float", str: "str"}
ARGUMENTS = ", ".join(
    f"{TYPES[kind]} {name}"
    for fields in (Operands, Settings)
    for name, kind in get_type_hints(fields).items()
)
TENSOR_COUNT, DIFFERENTIABLE = len(Operands._fields), len(Gradients._fields)


class Side(NamedTuple):
    """A side, or both together, for the backward pass."""

    points: Tensor
    order: Tensor
    spread: Tensor | None
    scales: Tensor
    rows: Tensor | None  # centred tokens, if slices are weighed by their costs
    squares: Tensor | None  # their squared norms

    def sorted(self) -> SortedSide:
        return SortedSide(*self[:4])


class Kept(NamedTuple):
    """Results of the forward pass that the backward pass needs."""

    weights: Tensor  # (batch, L)
    costs: Tensor | None  # (batch, L): mean squared distances
    mid_scale: Tensor | None  # (batch, L, N), if ranks are matched one to one
    x_states: Tensor | None
    w_states: Tensor | None
    sides: tuple[Side, ...]  # queries and keys, or both together

    def flat(self) -> tuple[Tensor | None, ...]:
        nothing = () if len(self.sides) == 2 else (None,) * len(Side._fields)
        return *self[:-1], *(x for side in self.sides for x in side), *nothing

    @staticmethod
    def of(flat: Any) -> Kept:
        """The inverse of :meth:`flat`; what was None may also be empty."""
        found: Any = iter([None if x is None or x.shape == (0,) else x for x in flat])
        own: Any = {name: next(found) for name in Kept._fields if name != "sides"}
        first, second = (Side(*[next(found) for _ in Side._fields]) for _ in range(2))
        return Kept(**own, sides=(first,) if second.points is None else (first, second))


KEPT_COUNT = len(Kept._fields) - 1 + 2 * len(Side._fields)


class Call:
    """The arguments of the operator, and what the forward and the backward pass make of them."""

    def __init__(self, *arguments: Any) -> None:
        self.operands = Operands(*arguments[:TENSOR_COUNT])
        self.settings = settings = Settings(*arguments[TENSOR_COUNT:])
        query, key, query_mask = self.operands.query, self.operands.key, self.operands.query_mask
        self.row_dtype = query.dtype
        q_lengths = masked_lengths(query_mask)
        one_mask = settings.one_mask
        if one_mask and query.dtype == key.dtype and query.shape == key.shape:
            self.tokens: tuple[Tokens, ...] = (Tokens(query, key, query_mask, q_lengths),)
        else:
            if query.dtype != key.dtype:
                self.row_dtype = torch.promote_types(query.dtype, key.dtype)
            key_mask = query_mask if one_mask else self.operands.key_mask
            k_lengths = q_lengths if one_mask else masked_lengths(key_mask)
            self.tokens = (
                Tokens(query, None, query_mask, q_lengths),
                Tokens(key, None, key_mask, k_lengths),
            )
        self.fp32_rows = self.row_dtype == torch.float32
        self.sort_settings = SortSettings(
            settings.scale, settings.in_spreads, settings.balanced, settings.metric, self.fp32_rows
        )

    def plan(
        self, sides: tuple[SortedSide, ...], mid_scale: Tensor | None
    ) -> tuple[Plan, tuple[SortedSide, SortedSide], Coupling | None, Pieces | None]:
        """The plans, the queries and keys that they are between, and their pieces if N ≠ M."""
        queries, keys = sides[0].halves() if len(sides) == 1 else sides
        settings = self.settings
        if settings.one_to_one:
            if mid_scale is None:
                mid_scale = queries.scales * keys.scales
            balanced = settings.balanced
            plan = Plan(
                queries.points, keys.points, queries.order, keys.order, self.operands.inv_bandwidth,
                mid_scale, keys.scales if balanced else None, queries.scales if balanced else None,
                settings.metric,
            )  # fmt: skip
            return plan, (queries, keys), None, None
        # Sequences without padding have one coupling for all of them.
        batch, slices, _ = queries.points.shape
        count = 1 if all(lengths is None for *_, lengths in self.tokens) else batch
        of_queries, of_keys = (
            torch.full((count,), x.shape[1], device=x.device) if lengths is None else lengths
            for x, _, _, lengths in self.tokens
        )
        coupling = couple(
            settings.coupling, of_queries, of_keys, queries.points.shape[-1],
            keys.points.shape[-1], torch.float32,
        )  # fmt: skip
        pieces = Pieces.of(coupling, batch, slices)
        plan = pieces.plan(
            queries, keys, self.operands.inv_bandwidth, settings.balanced, settings.metric
        )
        return plan, (queries, keys), coupling, pieces

    def centred(self, centre: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Centred rows of every side and their squared norms."""
        dtype, scale = self.row_dtype, self.settings.scale
        return [centre_rows(x.to(dtype), y, centre, mask, scale) for x, y, mask, _ in self.tokens]

    def norm_arguments(
        self, side: Side, i: int, coupling: Coupling | None
    ) -> tuple[tuple[Any, ...], Tensor | None]:
        """Arguments of :func:`norm_costs` for side i, and the factor of the coupling on its scales
        (None if one to one).

        A squared norm is weighed by ``Sᵀ T S' 1`` at its token. A rank of the other side takes one,
        or nothing if it is padding.
        """
        out_scale, factor = side.scales, None
        if coupling is not None:
            x, _, _, lengths = self.tokens[1 - i]
            present = torch.ones(x.shape[:2], device=x.device)
            if lengths is not None:
                ranks = torch.arange(x.shape[1], device=x.device)
                present = (ranks < lengths.unsqueeze(-1)).float()
            if i == 1:
                columns, rows, count = coupling.rows, coupling.columns, side.points.shape[-1]
                coupling = Coupling(rows, columns, coupling.weights, count)
            factor = coupling(present[:, None, :, None]).squeeze(-1)
            out_scale = out_scale * factor
        in_scale = side.scales if self.settings.balanced else None
        return (
            side.squares, side.order, out_scale, in_scale, side.points, self.operands.inv_bandwidth,
            self.settings.metric, self.fp32_rows,
        ), factor  # fmt: skip

    def row_halves(self, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Rows of the queries and of the keys."""
        queries, keys = rows[0].chunk(2) if len(rows) == 1 else rows
        return queries, keys

    def per_token(self, total: Tensor) -> Tensor:
        """Sums over queries, (batch, L), divided by their number."""
        lengths = self.tokens[0].lengths
        if lengths is None:
            return total / max(1, self.operands.query.shape[1])
        return total / lengths.clamp(min=1).unsqueeze(-1)


@operator(
    "soft_attention",
    f"({ARGUMENTS}) -> ({', '.join(['Tensor'] * (1 + KEPT_COUNT))})",
    keeps=True,
)
def soft_attention(*arguments: Any) -> tuple[Tensor | None, ...]:
    """``N · G V``, (batch, N, d), and what the backward pass needs."""
    call = Call(*arguments)
    operands, settings = call.operands, call.settings
    sorted_sides = tuple(
        sort_side(tokens, operands.slices, operands.inv_bandwidth, call.sort_settings)
        for tokens in call.tokens
    )
    plan, _, coupling, _ = call.plan(sorted_sides, None)
    costs = None
    if settings.inverse_temperature:
        mask = call.tokens[-1].mask
        rows = call.centred(centre(operands.key, mask, torch.float32).squeeze(-2))
        sides = tuple(Side(*side, *more) for side, more in zip(sorted_sides, rows, strict=True))
        norms = [
            norm_costs(*call.norm_arguments(side, i, coupling)[0]) for i, side in enumerate(sides)
        ]
        of_queries, of_keys = call.row_halves(norms)
        crossed = cross_plans(*call.row_halves([r for r, _ in rows]), plan)
        costs = call.per_token(torch.sub(of_queries + of_keys, crossed, alpha=2))
    else:
        sides = tuple(Side(*side, None, None) for side in sorted_sides)
    weights = slice_weights(
        costs, operands.slice_logits, operands.keep, settings.inverse_temperature,
        settings.cost_exponent, torch.float32,
    )  # fmt: skip
    batch, slices, _ = plan.query_points.shape
    if weights is None:
        weights = plan.query_points.new_full((batch, slices), 1 / slices)
    elif weights.shape[0] != batch:
        weights = weights.expand(batch, -1).contiguous()
    out, states = apply_plans(
        operands.value, weights, operands.query.shape[1], plan, settings.keep_states
    )
    mid_scale = plan.mid_scale if settings.one_to_one else None
    return out, *Kept(weights, costs, mid_scale, *states, sides).flat()


@soft_attention.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    operands, settings = Operands(*arguments[:TENSOR_COUNT]), Settings(*arguments[TENSOR_COUNT:])
    query, key, value, slices = operands.query, operands.key, operands.value, operands.slices
    batch, queries, width = query.shape
    keys = key.shape[1]
    count = width if slices is None else slices.shape[-2]
    both = settings.one_mask and query.dtype == key.dtype and query.shape == key.shape
    row_dtype = torch.promote_types(query.dtype, key.dtype)
    empty = operands.inv_bandwidth.new_empty

    def side(heads: Any, tokens: Any) -> Side:
        shape = (heads, count, tokens)
        weighed = bool(settings.inverse_temperature)
        return Side(
            empty(shape), empty(shape, dtype=torch.int32),
            empty(shape[:2]) if settings.in_spreads else None, empty(shape),
            empty((heads, tokens, width), dtype=row_dtype) if weighed else None,
            empty((heads, tokens)) if weighed else None,
        )  # fmt: skip

    sides = (side(2 * batch, queries),) if both else (side(batch, queries), side(batch, keys))
    x_states = w_states = None
    if settings.keep_states:
        chunks = Chunks(batch, count, queries, settings.metric, value.dtype)
        state_rows = chunks.state_rows(ties=True)
        if state_rows:
            shape = (batch, count, chunks.count, state_rows, value.shape[-1])
            x_states, w_states = (empty(shape, dtype=chunks.state_dtype()) for _ in range(2))
    kept = Kept(
        empty((batch, count)), empty((batch, count)) if settings.inverse_temperature else None,
        empty((batch, count, queries)) if settings.one_to_one else None, x_states, w_states, sides,
    )  # fmt: skip
    out = value.new_empty((batch, queries, value.shape[-1]))
    return out, *(query.new_empty(0) if x is None else x for x in kept.flat())


@operator(
    "soft_attention_backward",
    f"(Tensor upstream, bool[] needed, {ARGUMENTS}, Tensor?[] kept) "
    f"-> ({', '.join(['Tensor'] * DIFFERENTIABLE)})",
)
def soft_attention_backward(
    upstream: Tensor, needed: list[bool], *arguments: Any
) -> tuple[Tensor | None, ...]:
    """Gradients of the six operands; None for those that are not needed.

    The steps of the forward pass, from the last to the first. All gradients of plans by rank are
    one tensor, `ranked` (:meth:`PlanGradients.new` says in which order).
    """
    call, kept = Call(*arguments[:-1]), Kept.of(arguments[-1])
    operands, settings, sides = call.operands, call.settings, kept.sides
    value, inv_bandwidth = operands.value, operands.inv_bandwidth
    needs = Gradients(*needed)
    sorted_sides = tuple(side.sorted() for side in sides)
    plan, (queries, keys), coupling, pieces = call.plan(sorted_sides, kept.mid_scale)

    # Plans, applied to values.
    upstream = upstream.to(value.dtype)
    if not any(needs._replace(value=False)):
        transposed = plan.transposed()
        applied, _ = apply_plans(upstream, kept.weights, value.shape[1], transposed, False)
        return Gradients(None, None, applied, None, None, None)
    weighed = kept.costs is not None
    ranked, of_plan = PlanGradients.new(
        plan, settings.balanced, weighed or needs.slice_logits, needs.inv_bandwidth
    )
    d_value = torch.zeros_like(value, dtype=torch.float32) if needs.value else None
    states = None if kept.x_states is None else (kept.x_states, kept.w_states)
    plan_gradients(plan, upstream, kept.weights, value, d_value, None, of_plan, states)
    if d_value is not None:
        d_value = d_value.to(value.dtype)
    d_inv_bandwidth = of_plan.summed_inv_bandwidth()

    # Slice weights, from costs: of plans between centred rows, and of their squared norms.
    d_logits = d_rows = None
    of_norms: list[NormGradients] = []
    if of_plan.weight is not None:
        d_logits = softmax_backward(of_plan.weight, kept.weights)
    if kept.costs is not None and d_logits is not None:
        d_norms = call.per_token(_cost_gradient(d_logits, kept.costs, settings))
        d_rows, d_ranked, d_inv_crossed = _cross_gradients(
            call, kept, plan, d_norms * -2, needs.inv_bandwidth
        )
        ranked += d_ranked
        d_inv_bandwidth = _sum(d_inv_bandwidth, d_inv_crossed)
        for i, side in enumerate(sides):
            of_norms.append(_norm_gradients(call, side, i, coupling, d_norms))
            if needs.inv_bandwidth:
                d_inv_norms = bandwidth_gradient(of_norms[i].points, side.points, inv_bandwidth)
                d_inv_bandwidth = _sum(d_inv_bandwidth, d_inv_norms)

    # Points and scales of every side, back to its tokens.
    d_tokens: list[Tensor] = []
    d_slices = None
    by_side, d_mid_scale = _by_side(call, ranked, queries, keys, pieces)
    for i in reversed(range(len(sides))):
        d_points, d_scales = by_side[i]
        if of_norms:
            d_points += of_norms[i].points
            d_norm_scales = of_norms[i].scales
            d_scales = d_norm_scales if d_scales is None else d_norm_scales.add_(d_scales)
        dx, dy, d_slices_here, d_inv_here = sort_side_backward(
            d_points, d_scales, d_mid_scale, sorted_sides[i], call.tokens[i], operands.slices,
            inv_bandwidth, call.sort_settings, needs.slices, needs.inv_bandwidth,
        )  # fmt: skip
        if d_rows is not None:
            mask, rows = call.tokens[i].mask, sides[i].rows
            assert rows is not None
            d_squares = of_norms[i].squares
            centre_rows_backward(d_rows[i], d_squares, rows, mask, settings.scale, dx, dy)
        d_tokens = [dx, *d_tokens] if dy is None else [dx, dy]
        d_slices = _sum(d_slices, d_slices_here)
        d_inv_bandwidth = _sum(d_inv_bandwidth, d_inv_here)
    if d_logits is not None and operands.slice_logits is not None:
        d_logits = d_logits.sum_to_size(operands.slice_logits.shape)
    d_query, d_key = d_tokens
    found = Gradients(d_query, d_key, d_value, d_slices, d_logits, d_inv_bandwidth)
    return tuple(x if need else None for x, need in zip(found, needs, strict=True))


@soft_attention_backward.register_fake
def _(upstream: Tensor, needed: list[bool], *arguments: Any) -> tuple[Tensor, ...]:
    operands = arguments[:DIFFERENTIABLE]
    return tuple(
        x.new_empty(x.shape) if need and x is not None else upstream.new_empty(0)
        for x, need in zip(operands, needed, strict=True)
    )


def _cost_gradient(d_logits: Tensor, costs: Tensor, settings: Settings) -> Tensor:
    """The gradient of mean squared distances from that of ``-τ D``."""
    d_costs = d_logits * -settings.inverse_temperature
    power = settings.cost_exponent / 2
    if power == 1:
        return d_costs
    least = least_cost(costs.dtype)
    return torch.where(costs < least, 0.0, d_costs * power * costs.clamp(min=least) ** (power - 1))


def _cross_gradients(
    call: Call, kept: Kept, plan: Plan, weight: Tensor, with_inv_bandwidth: bool
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """Gradients of ``Σ_l weight_l ⟨Q, plan_l K⟩``: of centred rows by side, in float32; of the
    plan, by rank; and of the inverse bandwidth.
    """
    rows = [side.rows for side in kept.sides if side.rows is not None]
    d_rows = [torch.zeros_like(x, dtype=torch.float32) for x in rows]
    (query, key), (d_query, d_key) = call.row_halves(rows), call.row_halves(d_rows)
    ranked, of_plan = PlanGradients.new(
        plan, call.settings.balanced, weight=False, inv_bandwidth=with_inv_bandwidth
    )
    plan_gradients(plan, query, weight, key, d_key, d_query, of_plan)
    return d_rows, ranked, of_plan.summed_inv_bandwidth()


class NormGradients(NamedTuple):
    """Gradients of a side from the sums of its squared norms."""

    squares: Tensor  # (heads, N), by token
    scales: Tensor  # (heads, L, N), by rank
    points: Tensor  # (heads, L, N)


def _norm_gradients(
    call: Call, side: Side, i: int, coupling: Coupling | None, d_norms: Tensor
) -> NormGradients:
    """Gradients of the sums of squared norms, (heads, L), of side i."""
    arguments, factor = call.norm_arguments(side, i, coupling)
    d_squares, d_out_scale, d_in_scale, d_points = norm_costs_backward(d_norms, *arguments)
    if factor is not None:
        d_out_scale = d_out_scale * factor
    if d_in_scale is not None:
        d_out_scale += d_in_scale
    return NormGradients(d_squares, d_out_scale, d_points)


def _by_side(
    call: Call, ranked: Tensor, queries: SortedSide, keys: SortedSide, pieces: Pieces | None
) -> tuple[list[tuple[Tensor, Tensor | None]], Tensor | None]:
    """Gradients of the points and of the scales of every side, from those of the plan, `ranked`.

    If queries and keys are one side, also that of the product of their scales, which is then not
    part of the others.
    """
    *by_side, d_mid_scale = ranked.unbind(0)
    balanced = call.settings.balanced
    if pieces is not None:
        d_outer_scales = (by_side[2], by_side[3]) if balanced else None
        d_points = by_side[0], by_side[1]
        return pieces.gradients(queries, keys, d_points, d_outer_scales, d_mid_scale), None
    if len(call.tokens) == 1:
        d_outer_scale = ranked[2:4].flatten(0, 1) if balanced else None
        return [(ranked[:2].flatten(0, 1), d_outer_scale)], d_mid_scale
    d_scales = [d_mid_scale * keys.scales, d_mid_scale * queries.scales]
    if balanced:
        d_scales = [x.add_(more) for x, more in zip(d_scales, by_side[2:], strict=True)]
    return [(by_side[0], d_scales[0]), (by_side[1], d_scales[1])], None


def _sum(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return y if x is None else x if y is None else x + y


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.settings = inputs[TENSOR_COUNT:]
    ctx.save_for_backward(*inputs[:TENSOR_COUNT], *output[1:])


@refuse_double_backward("espformer::soft_attention")
def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * (len(ctx.needs_input_grad) - DIFFERENTIABLE)
    if grads[0] is None:
        return (None,) * len(ctx.needs_input_grad)
    tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[:DIFFERENTIABLE]
    found = soft_attention_backward(
        grads[0], list(needed), *tensors[:TENSOR_COUNT], *ctx.settings, list(tensors[TENSOR_COUNT:])
    )
    return *(x if need else None for x, need in zip(found, needed, strict=True)), *nothing


soft_attention.register_autograd(_backward, setup_context=_setup)


def _soft(problem: Problem, value: Tensor) -> Tensor:
    """Soft attention; all NaN in a head that holds one."""
    batch, options = value.shape[0], problem.options
    inv_bandwidth = problem.inv_bandwidth(batch)
    if inv_bandwidth.shape[0] != batch:
        inv_bandwidth = inv_bandwidth.expand(batch).contiguous()
    one_to_one = problem.same_lengths
    one_mask = problem.query_mask is problem.key_mask
    operands = Operands(
        problem.query, problem.key, value, problem.slices, problem.slice_logits, inv_bandwidth,
        problem.query_mask, None if one_mask else problem.key_mask, problem.keep,
    )  # fmt: skip
    settings = Settings(
        one_to_one=one_to_one,
        one_mask=one_mask,
        keep_states=_keeps_states(problem, value, one_to_one),
        scale=problem.scale,
        in_spreads=options.temperature_unit == "spread",
        balanced=options.balance == "both",
        metric=options.metric,
        coupling=options.coupling,
        inverse_temperature=options.inverse_temperature,
        cost_exponent=options.cost_exponent,
    )
    out: Tensor = soft_attention(*operands, *settings)
    return out


def _keeps_states(problem: Problem, value: Tensor, one_to_one: bool) -> bool:
    """Whether to keep the states for the backward pass: if they are few, and a gradient is needed
    that is not that of the values alone.

    Not if N ≠ M: how many pieces there are is not known yet.

    Under torch.compile, where sizes may be symbolic, the states are recomputed.
    """
    if not one_to_one or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    query, key, slices = problem.query, problem.key, problem.slices
    operands = query, key, slices, problem.slice_logits, problem.options.sort_temperature
    if not any(isinstance(x, Tensor) and x.requires_grad for x in operands):
        return False
    count = query.shape[-1] if slices is None else slices.shape[-2]
    shape = query.shape[0], count, query.shape[1]
    return keeps_states(value, shape, problem.options.metric)


def attend(problem: Problem, value: Tensor) -> Tensor:
    """``N · G V``: (batch, N, d) in the dtype of `value`; a head that holds NaN is all NaN.

    Rows of `value` that are padding are zero.
    """
    if _supported(problem, value):
        out = (hard_plan.attend if problem.options.hard else _soft)(problem, value)
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
    same = problem.same_lengths
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
    return torch.cat([attend(problem, block) for block in rows.split(MOST_WIDTH, -1)], -1)
