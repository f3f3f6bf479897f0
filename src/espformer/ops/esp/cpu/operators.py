"""The kernels as registered torch operators, with their fake and autograd rules.

- ``espformer::cpu_attend``: sorted numbers, slice costs, weights and output, in one call;
- ``espformer::cpu_attend_backward``: all gradients of that.

Besides the inputs, the backward pass needs the order, points and scales of every slice, O(L N), and
the weights of the slices. They are outputs too.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from espformer.ops.common.operators import operator, refuse_double_backward
from espformer.ops.esp.balancing import chebyshev_exponents
from espformer.ops.esp.coupling import couple
from espformer.ops.esp.cpu import gradients, short_gradients, short_plan, soft_plan
from espformer.ops.esp.cpu.kappa import table_of
from espformer.ops.esp.cpu.short_workspace import (
    ALL,
    FORWARD,
    REACH,
    REACH_OF_FLOAT32,
    new_short_workspace,
)
from espformer.ops.esp.cpu.simd import LANES
from espformer.ops.esp.cpu.soft_plan import Pairs, Settings, Side
from espformer.ops.esp.cpu.threads import once_per_thread, run, split_work
from espformer.ops.esp.cpu.workspace import new_workspace

OPTIONS = 6  # the last arguments of `cpu_attend`
DIFFERENTIABLE = 7  # the first: query, key, value, points of both, inv_bandwidth, slice_logits


def _lanes(width: int) -> tuple[int, ...]:
    """The lanes of a block of columns: 16 or 32."""
    return LANES[16 if width <= 16 else 32]


def _array(x: Tensor) -> np.ndarray:
    found: np.ndarray = (x.detach() if x.requires_grad else x).numpy()
    return found


def _mask(mask: Tensor | None, heads: int) -> np.ndarray:
    return np.zeros((heads, 0), np.bool_) if mask is None else _array(mask)


def _side(parts: list[Tensor]) -> Side:
    return Side(*(_array(x) for x in parts))


def _new_side(points: Tensor) -> list[Tensor]:
    """Lengths, order, points and scales."""
    lengths = torch.empty(points.shape[0], dtype=torch.int64)
    order = torch.empty(points.shape, dtype=torch.int32)
    return [lengths, order, torch.empty_like(points), torch.empty_like(points)]


@cache
def _exponents(dtype: np.dtype) -> np.ndarray:
    """Exponents of the balancing steps."""
    return np.array(chebyshev_exponents(), dtype)


def _settings(
    inv_bandwidth: Tensor, metric: str, balance: str, hard: bool, ties: str,
    slopes: bool = False, form: str = "recurrences",
) -> Settings:  # fmt: skip
    poles_of = "absolute" if hard or form != RECURRENCES else metric  # which has none
    table, poles = table_of(poles_of, inv_bandwidth.dtype)
    exponents = _exponents(table.dtype)
    balanced = balance == "both" and not hard
    return Settings(
        _array(inv_bandwidth), hard, ties == "average", balanced, slopes, exponents,
        table, poles, metric == "squared", form == BANDS,
    )  # fmt: skip


# Up to this many tokens plans are matrices: 4 N³ multiplications instead of some dozens of N d. Of
# the squared metric these are bands if there are more than FEW tokens, and for up to MANY tokens if
# bands are less work than recurrences.
SHORT = {"absolute": 32, "squared": 96}
FEW, MANY = 32, 512
RECURRENCES, MATRICES, BANDS = "recurrences", "matrices", "bands"


def _form_of(
    query: tuple[Tensor, Tensor | None], key: tuple[Tensor, Tensor | None], inv_bandwidth: Tensor,
    metric: str, hard: bool, columns: int,
) -> str:  # fmt: skip
    """How plans are applied to rows of so many columns in all.

    `query` and `key` are points (batch, L, N), and which of them take part, see `_near`.
    """
    heads, slices, _ = query[0].shape
    tokens = max(x.shape[-1] for x, _ in (query, key))
    if hard or tokens > (SHORT[metric] if metric == "absolute" else MANY):
        return RECURRENCES
    if metric == "absolute" or tokens <= FEW or heads * slices == 0:
        return MATRICES
    near = max(_near(*side, inv_bandwidth) for side in (query, key))
    if tokens <= SHORT[metric]:
        return BANDS if near + 8 < 0.9 * tokens else MATRICES
    # What is done for each rank, as measured: changes of order, products, and all else with a band.
    # Threads share the slices of a head only in recurrences.
    wide = near + 8  # whole tiles
    less = tokens**2 / 2150 + wide * (wide / 185 + 0.54) < columns + 48
    return BANDS if less and heads >= torch.get_num_threads() else RECURRENCES


def _near(points: Tensor, kept: Tensor | None, inv_bandwidth: Tensor) -> float:
    """How many numbers are within reach of one, on average; of two slices only.

    All tokens take part, or those that are kept: a mask (batch, N), or lengths (batch,).
    """
    numbers, inverse = _array(points), _array(inv_bandwidth)
    heads, slices, tokens = points.shape
    reach = REACH if points.dtype == torch.float64 else REACH_OF_FLOAT32
    found = []
    for index in {0, heads * slices // 2}:
        head, l = divmod(index, slices)
        x = numbers[head, l]
        if kept is not None:
            x = x[_array(kept[head])] if kept.dtype == torch.bool else x[: int(kept[head])]
        x, far = np.sort(x), reach**0.5 / inverse[head]
        within = np.searchsorted(x, x + far, "right") - np.searchsorted(x, x - far)
        found.append(float(within.mean()) if len(x) else 0.0)
    return max(found)


def _run_short(
    kernel: Any, settings: Settings, points: tuple[Tensor, Tensor], columns: int, matrices: int,
    *operands: Any,
) -> None:  # fmt: skip
    """Runs a kernel of `short_plan` on all heads; threads share these, and no slices."""
    heads, slices, _ = points[0].shape
    tokens = max(x.shape[-1] for x in points)
    operands = tuple(_array(x) if isinstance(x, Tensor) else x for x in operands)
    steps = len(settings.exponents) + 1 if settings.balanced else 0

    workspace = once_per_thread(
        lambda: new_short_workspace(tokens, columns, settings.table.dtype, steps, matrices)
    )

    def arguments(_: int) -> tuple[Any, ...]:
        return settings, *operands, workspace()

    run(kernel, split_work(heads, 1, slices * heads * tokens**3), arguments)


def _zeros(like: Tensor, *shape: int) -> Tensor:
    """Zeros of a dtype, of the shape of `like` unless another is given.

    The memory comes zeroed from the system. torch would fill it with all its threads, which then
    keep spinning on the cores that our threads are about to use.
    """
    return torch.from_numpy(np.zeros(shape or tuple(like.shape), _array(like).dtype))


class _Work:
    """One call, divided into shares for threads, each with its own workspace."""

    def __init__(
        self, settings: Settings, q_points: Tensor, k_points: Tensor, multiplications: int
    ) -> None:
        heads, slices, tokens = q_points.shape
        self.settings, self.dtype = settings, q_points.dtype
        self.tokens = max(tokens, k_points.shape[-1])
        amount = heads * slices * self.tokens * multiplications
        self.shares = split_work(heads, slices, amount)
        self.parts = 1 + max((share.part for share in self.shares), default=0)

    def run(
        self, kernel: Any, *operands: Any, sums: tuple[Tensor, ...] = (), width: int = 0,
        pairs: bool = False, rows: bool = True,
    ) -> None:  # fmt: skip
        """Runs a kernel: settings, operands, what it adds to, buffers, and lanes.

        `sums` have one part for every share of a head. There are lanes for `rows` of `width`
        columns, if the kernel takes any, and for `pairs` that contribute to the gradient of the
        points.
        """
        operands = tuple(_array(x) if isinstance(x, Tensor) else x for x in operands)
        lanes = _lanes(width) if rows else gradients.PAIR_LANES
        steps = len(self.settings.exponents) + 1 if self.settings.balanced else 0
        blocks = -(-(max(steps, 1) + 2) // gradients.IN_BLOCK) if pairs else 0

        sizes = {"columns": width, "lanes": lanes, "steps": steps, "pairs": blocks}
        workspace = once_per_thread(
            lambda: new_workspace(self.tokens, self.settings.table, **sizes)
        )

        def arguments(index: int) -> tuple[Any, ...]:
            own = (_array(x[self.shares[index].part]) for x in sums)
            return self.settings, *operands, *own, workspace(), *(lanes,) * (rows and width > 0)

        run(kernel, self.shares, arguments)

    def zeros(self, like: Tensor, wanted: bool = True) -> Tensor:
        """Zeros for the partial sums of as many shares as there are of a head."""
        return _zeros(like, self.parts, *(like.shape if wanted else (len(like), 0, 0)))


def _pairs(
    coupling: str, lengths: tuple[Tensor, Tensor], rows: int, columns: int, dtype: torch.dtype
) -> Pairs:
    """The non-zero entries of the coupling; none if ranks are matched one to one."""
    if coupling:
        found = couple(coupling, *lengths, rows, columns, dtype)
        return Pairs(_array(found.rows), _array(found.columns), _array(found.weights))
    none = torch.empty(len(lengths[0]), 0, dtype=torch.int64)
    return Pairs(_array(none), _array(none), _array(none.to(dtype)))


@operator("cpu_attend")
def attend(
    query: Tensor, key: Tensor, value: Tensor, query_points: Tensor, key_points: Tensor,
    inv_bandwidth: Tensor, slice_logits: Tensor | None, centre: Tensor,
    query_mask: Tensor | None, key_mask: Tensor | None,
    tau: float, metric: str, balance: str, hard: bool, ties: str, coupling: str,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    """``N · G V`` (batch, N, d); the weights of the slices; two sides (see `Side`).

    `query_points` (batch, L, N) and `key_points` are what is sorted, `inv_bandwidth` is (batch,),
    `slice_logits` (batch, L), `centre` (batch, m). `coupling` is empty if every sequence has as
    many queries as keys.
    """
    heads, slices, tokens = query_points.shape
    width = value.shape[-1] + (query.shape[-1] if tau else 0)
    sides = (query_points, query_mask), (key_points, key_mask)
    form = _form_of(*sides, inv_bandwidth, metric, hard, width)
    settings = _settings(inv_bandwidth, metric, balance, hard, ties, form=form)
    q_parts, k_parts = _new_side(query_points), _new_side(key_points)
    queries, keys = _side(q_parts), _side(k_parts)
    origin = _zeros(value, heads, value.shape[-1])
    if form != RECURRENCES:
        for parts, mask in ((q_parts, query_mask), (k_parts, key_mask)):
            lengths = parts[2].shape[-1] if mask is None else mask.sum(-1)
            parts[0].copy_(torch.as_tensor(lengths))
        lengths_of_both = q_parts[0], k_parts[0]
        pairs = _pairs(coupling, lengths_of_both, tokens, key_points.shape[-1], query.dtype)
        # They hold logits first. Large ones lose too many digits in float32.
        weights = query.new_empty(heads, slices, dtype=torch.float64)
        out = _zeros(value, heads, tokens, value.shape[-1])
        logits = query.new_empty(heads, 0) if slice_logits is None else slice_logits
        _run_short(
            short_plan.attend_short, settings, (query_points, key_points),
            max(value.shape[-1], query.shape[-1]), FORWARD, queries, keys, pairs, tau,
            query, key, value, query_points, key_points, _mask(query_mask, heads),
            _mask(key_mask, heads), logits, centre, origin, out, weights,
        )  # fmt: skip
        return out, weights.to(query.dtype), *q_parts, *k_parts  # type: ignore[return-value]
    work = _Work(settings, query_points, key_points, width)
    work.run(soft_plan.sort_side, query_points, _mask(query_mask, heads), queries)
    work.run(soft_plan.sort_side, key_points, _mask(key_mask, heads), keys)
    pairs = _pairs(coupling, (q_parts[0], k_parts[0]), tokens, key_points.shape[-1], query.dtype)
    plan = queries, keys, pairs
    costs = _zeros(query, heads, slices)
    if tau:
        work.run(soft_plan.slice_costs, *plan, query, key, centre, costs, width=query.shape[-1])
    logits = -tau * costs
    weights = (logits if slice_logits is None else logits + slice_logits).softmax(-1)
    out = work.zeros(value.new_empty(heads, tokens, value.shape[-1]))
    work.run(
        soft_plan.apply_plans, *plan, value, weights, origin, sums=(out,), width=value.shape[-1]
    )
    return _add_up(out), weights, *q_parts, *k_parts  # type: ignore[return-value]


def _add_up(partial: Tensor) -> Tensor:
    """The sum over the shares of a head, in a fixed order."""
    return partial[0] if len(partial) == 1 else partial.sum(0)


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *args: Any) -> tuple[Tensor, ...]:
    out = value.new_empty(*query.shape[:2], value.shape[-1])
    sides = [
        x for numbers in args[:2]
        for x in (
            numbers.new_empty(numbers.shape[0], dtype=torch.int64),
            numbers.new_empty(numbers.shape, dtype=torch.int32),
            numbers.new_empty(numbers.shape),
            numbers.new_empty(numbers.shape),
        )
    ]  # fmt: skip
    return out, args[0].new_empty(args[0].shape[:2]), *sides


def _gradient_shapes(wanted: list[bool], *operands: Tensor) -> list[tuple[int, ...]]:
    """The shapes of the gradients; empty where none is wanted."""
    return [tuple(x.shape) if want else (0,) for x, want in zip(operands, wanted, strict=True)]


@operator("cpu_attend_backward")
def attend_backward(
    upstream: Tensor, out: Tensor, weights: Tensor,
    q_lengths: Tensor, q_order: Tensor, q_points: Tensor, q_scales: Tensor,
    k_lengths: Tensor, k_order: Tensor, k_points: Tensor, k_scales: Tensor,
    query: Tensor, key: Tensor, value: Tensor, inv_bandwidth: Tensor, centre: Tensor,
    tau: float, metric: str, balance: str, hard: bool, ties: str, coupling: str,
    costs: bool, slopes: bool, with_inv_bandwidth: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key (with `costs`), value, both points (with `slopes`), inv_bandwidth
    (if `with_inv_bandwidth`, which needs slopes), slice_logits; what is not wanted is empty.
    """
    heads, slices, tokens = q_points.shape
    columns = value.shape[-1] + (query.shape[-1] if tau else 0)
    kept = (q_points, q_lengths), (k_points, k_lengths)
    form = _form_of(*kept, inv_bandwidth, metric, hard, columns)
    settings = _settings(inv_bandwidth, metric, balance, hard, ties, slopes, form)
    queries = _side([q_lengths, q_order, q_points, q_scales])
    keys = _side([k_lengths, k_order, k_points, k_scales])
    pairs = _pairs(coupling, (q_lengths, k_lengths), tokens, k_points.shape[-1], query.dtype)
    plan = queries, keys, pairs
    if form != RECURRENCES:
        made = [_zeros(x) if costs else _zeros(x, heads, 0, 0) for x in (query, key)]
        made += [_zeros(value)]
        made += [_zeros(x) for x in (q_points, k_points)] if slopes else [
            _zeros(x, heads, slices, 0) for x in (q_points, k_points)
        ]  # fmt: skip
        d_inv_bandwidths = _zeros(q_points, 2, heads, slices)
        d_logits = _zeros(weights)
        _run_short(
            short_gradients.short_gradient, settings, (q_points, k_points),
            max(value.shape[-1], query.shape[-1]), ALL, *plan, tau, upstream, out,
            weights, query, key, value, centre, _zeros(value, heads, value.shape[-1]), *made,
            *d_inv_bandwidths, d_logits,
        )  # fmt: skip
        wanted = costs, costs, True, slopes, slopes
        found = [x if want else _nothing(x) for x, want in zip(made, wanted, strict=True)]
        d_inv_bandwidth = d_inv_bandwidths.sum((0, -1)) if with_inv_bandwidth else _nothing(query)
        return *found, d_inv_bandwidth, d_logits  # type: ignore[return-value]
    columns = value.shape[-1] + (query.shape[-1] if costs else 0)
    work = _Work(settings, q_points, k_points, 4 * columns)
    sides = tuple(_new_gradient(x, slopes, settings.balanced) for x in (q_points, k_points))
    d_value, forms = work.zeros(value), _zeros(weights)
    origin = _zeros(value, heads, value.shape[-1])
    work.run(
        gradients.plans_gradient, *plan, upstream, value, origin, weights, *sides, forms,
        sums=(work.zeros(value, wanted=False), d_value), width=value.shape[-1],
    )  # fmt: skip
    d_query, d_key = (work.zeros(x, wanted=costs) for x in (query, key))
    d_logits = weights * (forms - (weights * forms).sum(-1, keepdim=True))
    d_costs = -tau * d_logits if costs else _zeros(weights, heads, 0)
    if costs:
        share = -2 * d_costs / q_lengths.clamp(min=1).unsqueeze(-1)
        work.run(
            gradients.plans_gradient, *plan, query, key, centre, share, *sides,
            _zeros(forms), sums=(d_query, d_key), width=query.shape[-1],
        )  # fmt: skip
    d_points = [_zeros(x) if slopes else _zeros(x, heads, 0, 0) for x in (q_points, k_points)]
    if costs or slopes:
        work.run(
            gradients.finish_gradient, *plan, query, key, centre, d_costs, *sides, *d_points,
            sums=(d_query, d_key), width=query.shape[-1], pairs=True, rows=False,
        )  # fmt: skip
    found = [_add_up(x) if costs else _nothing(x) for x in (d_query, d_key)] + [_add_up(d_value)]
    found += [x if slopes else _nothing(x) for x in d_points]
    d_inv_bandwidth = _nothing(query)
    if with_inv_bandwidth:
        d_inv_bandwidth = torch.from_numpy(sum(side.inv_bandwidth for side in sides).sum(-1))
    return *found, d_inv_bandwidth, d_logits  # type: ignore[return-value]


def _nothing(like: Tensor) -> Tensor:
    """An empty tensor for a gradient that is not needed; a new one each time, since outputs of an
    operator must not alias.
    """
    return like.new_empty(0)


def _new_gradient(points: Tensor, slopes: bool, balanced: bool) -> gradients.SideGradient:
    heads, slices, tokens = points.shape
    many = tokens if slopes else 0
    return gradients.SideGradient(
        _array(_zeros(points, heads, slices, many)),
        _array(_zeros(points, heads, slices, many)),
        _array(_zeros(points, heads, slices if slopes and balanced else 0, many)),
        _array(_zeros(points, heads, slices)),
    )


@attend_backward.register_fake
def _(upstream: Tensor, out: Tensor, weights: Tensor, *args: Any) -> tuple[Tensor, ...]:
    q_points, k_points, (query, key, value, inv_bandwidth) = args[2], args[6], args[8:12]
    costs, slopes, with_inv_bandwidth = args[-3:]
    shapes = _gradient_shapes(
        [costs, costs, True, slopes, slopes, with_inv_bandwidth, True],
        query, key, value, q_points, k_points, inv_bandwidth, weights,
    )  # fmt: skip
    return tuple(query.new_empty(shape) for shape in shapes)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, _, _, inv_bandwidth, _, centre = inputs[:8]
    ctx.options = inputs[-OPTIONS:]
    ctx.save_for_backward(*output, query, key, value, inv_bandwidth, centre)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


@refuse_double_backward("espformer's linear-time attention")
def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    tau = ctx.options[0]
    upstream = grads[0]
    if upstream is None:
        return (None,) * len(needs)
    with_inv_bandwidth = needs[5]
    slopes = with_inv_bandwidth or needs[3] or needs[4]
    costs = bool(tau) and (slopes or needs[0] or needs[1])
    found = attend_backward(
        upstream, *ctx.saved_tensors, *ctx.options, costs, slopes, with_inv_bandwidth
    )
    rest = (None,) * (len(needs) - DIFFERENTIABLE)
    wanted = (costs, costs, True, slopes, slopes, with_inv_bandwidth, True)
    return *(
        x if want and need else None
        for x, want, need in zip(found, wanted, needs[:DIFFERENTIABLE], strict=True)
    ), *rest


attend.register_autograd(_gradients, setup_context=_remember)
