"""ESP attention in linear time: slice costs and plans applied to values, without any N×N matrix.

In rank order a soft sort is ``A = S P``: P permutes tokens into ranks, and S mixes neighbouring
ranks, ``S = diag(out) κ diag(in)`` with κ the kernel of the sorted numbers. So

    slice_costs:  D_l = (1/N) Σ_n [ (A‖q‖²)_n (TB1)_n + (A1)_n (TB‖k‖²)_n - 2 (AQ)_n · (TBK)_n ]
    apply_plans:  N · Σ_l σ_l U_l V = Σ_l σ_l A_lᵀ T B_l V

are gathers and products with κ. Slices are processed in groups. Beyond inputs, outputs and the
sorted numbers, memory holds the intermediates of one group at a time. The backward pass recomputes
them, also group by group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from espformer.ops.common.operators import is_exporting, refuse_double_backward
from espformer.ops.esp.balancing import chebyshev_exponents
from espformer.ops.esp.coupling import Coupling, couple
from espformer.ops.esp.custom_op import as_custom_op
from espformer.ops.esp.exponentials import exponential_sum
from espformer.ops.esp.problem import Problem
from espformer.ops.esp.sorted_kernel import SortedKernel

# Elements of one (batch, slices, tokens, width) intermediate: large enough to amortise the
# overhead of an operator call, small enough to stay near the caches.
GROUP_ELEMENTS = 1 << 22


class Ranking(NamedTuple):
    """Tokens of every slice in ascending order; ranks past a sequence's length hold its padding."""

    points: Tensor  # (batch, L, N): sorted projections; padding repeats the last true one
    order: Tensor  # (batch, L, N): the token at each rank
    ranks: Tensor  # (batch, L, N): the rank of each token
    valid: Tensor | None  # (batch, 1, N): ranks that are not padding
    lengths: Tensor  # (batch,)
    identity: bool = False  # the soft sort is the identity; the tokens are in order already

    def group(self, part: slice, points: Tensor) -> Ranking:
        """The ranking of some slices; `points` replaces theirs, so that gradients flow to it."""
        return self._replace(points=points, order=self.order[:, part], ranks=self.ranks[:, part])


def rank_tokens(projections: Tensor, mask: Tensor | None) -> Ranking:
    """Sorts the tokens of every slice; padded tokens come last, whatever their projection."""
    ranking = sort_tokens(projections, mask)
    order = ranking.order
    positions = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return ranking._replace(ranks=torch.zeros_like(order).scatter(-1, order, positions))


def sort_tokens(projections: Tensor, mask: Tensor | None) -> Ranking:
    """Like :func:`rank_tokens`, but without the rank of each token: `ranks` is not valid."""
    batch, _, tokens = projections.shape
    projections = projections.contiguous()  # a sort would keep the strides of a transposed matrix
    positions = torch.arange(tokens, device=projections.device)
    if mask is None:
        points, order = projections.sort(dim=-1, stable=True)
        valid, lengths = None, positions.new_full((batch,), tokens)
    else:
        keys = projections.masked_fill(~mask.unsqueeze(1), torch.inf)
        order = keys.argsort(dim=-1, stable=True)
        lengths = mask.sum(-1)
        valid = (positions < lengths.unsqueeze(-1)).unsqueeze(1)
        # Padding repeats the point of the last real token, at distance zero, with a zero operand.
        last = order.gather(
            -1, (lengths - 1).clamp(min=0).view(-1, 1, 1).expand(-1, order.shape[1], 1)
        )
        points = projections.gather(-1, torch.where(valid, order, last))
    return Ranking(points, order, order, valid, lengths)


def in_order(projections: Tensor, mask: Tensor | None) -> Ranking:
    """The ranking of an `identity_side`, whose tokens are in order already."""
    batch, slices, tokens = projections.shape
    positions = torch.arange(tokens, device=projections.device)
    if mask is None:
        valid, lengths = None, positions.new_full((batch,), tokens)
    else:
        valid, lengths = mask.unsqueeze(1), mask.sum(-1)
    order = positions.expand(batch, slices, tokens)
    return Ranking(projections, order, order, valid, lengths, identity=True)


class _Pick(torch.autograd.Function):
    """Rows of (batch, tokens, width) in the order of every slice: (batch, slices, tokens, width).

    The backward gathers through the inverse permutation instead of scattering.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.shared = x.dim() == 3
        return _pick(x, order)

    @staticmethod
    @refuse_double_backward("espformer's linear-time attention")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx = _pick(grads[0], ctx.saved_tensors[0])
        return (dx.sum(1) if ctx.shared else dx), None, None


def _pick(x: Tensor, order: Tensor) -> Tensor:
    """``x[b, (l,) order[b, l, n]]``, as one row copy per (slice, rank)."""
    width, tokens = x.shape[-1], x.shape[-2]
    operands = (order.shape[0], 1, 1) if x.dim() == 3 else (*order.shape[:2], 1)
    first = torch.arange(math.prod(operands), device=x.device) * tokens
    rows = order + first.view(operands)
    return x.reshape(-1, width).index_select(0, rows.flatten()).view(*order.shape, width)


def to_ranks(x: Tensor, ranking: Ranking) -> Tensor:
    """P x: token rows (batch, N, width) to rank rows (batch, L, N, width); padding becomes zero."""
    rows: Tensor
    if ranking.identity:
        rows = x.unsqueeze(1).expand(-1, ranking.order.shape[1], -1, -1)
    else:
        rows = _Pick.apply(x, ranking.order, ranking.ranks)
    return rows if ranking.valid is None else torch.where(ranking.valid.unsqueeze(-1), rows, 0)


def to_tokens(y: Tensor, ranking: Ranking) -> Tensor:
    """Pᵀ y: rank rows to token rows, slice by slice; padding becomes zero."""
    if ranking.valid is not None:
        y = torch.where(ranking.valid.unsqueeze(-1), y, 0)
    if ranking.identity:
        return y
    rows: Tensor = _Pick.apply(y, ranking.ranks, ranking.order)
    return rows


class SoftMixing:
    """S of a soft sort, ``diag(out) κ diag(in)``: row-stochastic, or doubly stochastic."""

    def __init__(
        self, kernel: Callable[[Tensor], Tensor], points: Tensor, valid: Tensor | None, balance: str
    ) -> None:
        self.kernel = kernel
        present = points.new_ones(()).expand(points.shape)
        absent = None
        if valid is not None:
            absent = ~valid.unsqueeze(-1)
            present = present * valid
        present = present.unsqueeze(-1)
        row_sums = self._filled(self.kernel(present), absent)
        self.scale_in: Tensor | None = None
        if balance == "rows":
            self.scale_out = row_sums.reciprocal()
            if absent is not None:  # padded ranks neither give nor receive weight
                self.scale_out = self.scale_out.masked_fill(absent, 0)
            return
        x = row_sums.rsqrt() * present
        for exponent in chebyshev_exponents():
            x = x * self._filled(x * self.kernel(x), absent) ** -exponent
        self.scale_in = self.scale_out = x

    @staticmethod
    def _filled(x: Tensor, absent: Tensor | None) -> Tensor:
        return x if absent is None else x.masked_fill(absent, 1)

    def sort(self, x: Tensor) -> Tensor:
        """S x, both in rank order."""
        return self.scale_out * self.kernel(x if self.scale_in is None else self.scale_in * x)

    def unsort(self, y: Tensor) -> Tensor:
        """Sᵀ y."""
        y = self.kernel(self.scale_out * y)
        return y if self.scale_in is None else self.scale_in * y


class HardMixing:
    """S of a hard sort: the identity, or the average over tied ranks. Symmetric in both cases."""

    def __init__(self, ranking: Ranking, problem: Problem) -> None:
        self.tie: Tensor | None = None
        if problem.options.ties == "average" and not ranking.identity:
            new = ranking.points[..., 1:] != ranking.points[..., :-1]
            if ranking.valid is not None:
                new = new | (ranking.valid[..., 1:] != ranking.valid[..., :-1])
            tie = torch.nn.functional.pad(new.cumsum(-1), (1, 0))
            ones = torch.ones_like(ranking.points)
            sizes = torch.zeros_like(ones).scatter_add_(-1, tie, ones).gather(-1, tie)
            self.tie, self.inv_count = tie.unsqueeze(-1), (1 / sizes).unsqueeze(-1)

    def sort(self, x: Tensor) -> Tensor:
        if self.tie is None:
            return x
        tie = self.tie.expand_as(x)
        return torch.zeros_like(x).scatter_add(-2, tie, x * self.inv_count).gather(-2, tie)

    unsort = sort


def _mixing(ranking: Ranking, problem: Problem, inv_bandwidth: Tensor) -> SoftMixing | HardMixing:
    if problem.options.hard or ranking.identity:
        return HardMixing(ranking, problem)
    table = exponential_sum(problem.options.metric, ranking.points.dtype)
    kernel = SortedKernel(ranking.points, inv_bandwidth.view(-1, 1, 1), table)
    return SoftMixing(kernel, ranking.points, ranking.valid, problem.options.balance)


def slice_costs(
    query: Tensor, key: Tensor, queries: Ranking, keys: Ranking, inv_bandwidth: Tensor,
    coupling: Coupling | None, problem: Problem,
) -> Tensor:  # fmt: skip
    """D, the transport cost of every slice's plan: (batch, L)."""
    centre = problem.centre()
    elements = max(query.shape[-2], key.shape[-2]) * (query.shape[-1] + 2)

    def costs(
        part: slice, q: Tensor, k: Tensor, q_points: Tensor, k_points: Tensor,
        inv_bandwidth: Tensor,
    ) -> Tensor:  # fmt: skip
        mine, theirs = queries.group(part, q_points), keys.group(part, k_points)
        a = _mixing(mine, problem, inv_bandwidth).sort(to_ranks(moments(q - centre), mine))
        b = _mixing(theirs, problem, inv_bandwidth).sort(to_ranks(comoments(k - centre), theirs))
        if coupling is not None:
            b = coupling(b)
        return (a * b).sum((-2, -1)) / mine.lengths.clamp(min=1).unsqueeze(-1)

    return _by_slice_groups(
        costs,
        elements,
        (query, key),
        (queries.points, keys.points),
        inv_bandwidth,
        concatenate=True,
    )


def moments(x: Tensor) -> Tensor:
    """Columns (x, ‖x‖², 1), whose product with ``comoments(y)`` is ``‖x - y‖²``."""
    return torch.cat([x, x.square().sum(-1, keepdim=True), torch.ones_like(x[..., :1])], -1)


def comoments(y: Tensor) -> Tensor:
    """Columns (-2 y, 1, ‖y‖²)."""
    return torch.cat([-2 * y, torch.ones_like(y[..., :1]), y.square().sum(-1, keepdim=True)], -1)


def apply_plans(
    value: Tensor, weights: Tensor, queries: Ranking, keys: Ranking, inv_bandwidth: Tensor,
    coupling: Coupling | None, problem: Problem,
) -> Tensor:  # fmt: skip
    """``Σ_l σ_l A_lᵀ T B_l V``: values (batch, M, d) and weights (batch, L) to (batch, N, d)."""
    elements = max(queries.points.shape[-1], value.shape[-2]) * value.shape[-1]

    def output(
        part: slice, v: Tensor, q_points: Tensor, k_points: Tensor, weight: Tensor,
        inv_bandwidth: Tensor,
    ) -> Tensor:  # fmt: skip
        mine, theirs = queries.group(part, q_points), keys.group(part, k_points)
        y = _mixing(theirs, problem, inv_bandwidth).sort(to_ranks(v, theirs))
        if coupling is not None:
            y = coupling(y)
        y = to_tokens(_mixing(mine, problem, inv_bandwidth).unsort(y), mine)
        return torch.einsum("blnd,bl->bnd", y, weight)

    return _by_slice_groups(
        output,
        elements,
        (value,),
        (queries.points, keys.points, weights),
        inv_bandwidth,
        concatenate=False,
    )


def attend(problem: Problem, value: Tensor) -> Tensor:
    """``N · G V``: (batch, N, d), in time and memory linear in N."""
    if torch.compiler.is_compiling() and not is_exporting() and not _worth_tracing(problem, value):
        return _attend_as_custom_op(problem, value)
    return _attend(problem, value)


def _worth_tracing(problem: Problem, value: Tensor) -> bool:
    """Whether a compiler should trace the operator: the slices form one group of static size."""
    from torch.fx.experimental.symbolic_shapes import has_static_value  # slow: imports sympy

    batch, tokens, head_dim = problem.query.shape
    of_a_slice = max(head_dim + 2, value.shape[-1]) * max(tokens, problem.key.shape[-2])
    slices = head_dim if problem.slices is None else problem.slices.shape[-2]
    elements = batch * slices * of_a_slice
    return has_static_value(elements) and elements <= GROUP_ELEMENTS


def _attend(problem: Problem, value: Tensor) -> Tensor:
    problem, value = problem.scaled(), value.to(problem.dtype)
    q_projections, k_projections = problem.projections()
    queries = _rank_side(problem, "query", q_projections, problem.query_mask)
    keys = _rank_side(problem, "key", k_projections, problem.key_mask)
    coupling = None
    if not problem.same_lengths:
        coupling = couple(
            problem.options.coupling, queries.lengths, keys.lengths,
            queries.points.shape[-1], keys.points.shape[-1], value.dtype,
        )  # fmt: skip
    inv_bandwidth = problem.inv_bandwidth()
    if problem.options.hard:  # a hard sort gives the sorted numbers no gradient
        queries = queries._replace(points=queries.points.detach())
        keys = keys._replace(points=keys.points.detach())
        inv_bandwidth = inv_bandwidth.detach()
    costs = None
    if problem.options.inverse_temperature:
        costs = slice_costs(
            problem.query, problem.key, queries, keys, inv_bandwidth, coupling, problem
        )
    weights = problem.slice_weights(costs)
    if weights is None:
        batch, slices, _ = queries.points.shape
        weights = queries.points.new_full((batch, slices), 1 / slices)
    return apply_plans(value, weights, queries, keys, inv_bandwidth, coupling, problem)


def _rank_side(problem: Problem, side: str, projections: Tensor, mask: Tensor | None) -> Ranking:
    """One side in rank order, in the unit of the temperature."""
    if side == problem.identity_side:
        return in_order(projections, mask)
    ranking = rank_tokens(projections, mask)
    return ranking._replace(points=problem.in_units(ranking.points, ranking.valid))


_attend_as_custom_op = as_custom_op("linear", _attend)


def plan(problem: Problem) -> Tensor:
    """``N · G`` itself, (batch, N, M): the same operator applied to the identity."""
    key = problem.key
    eye = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device)
    return attend(problem, eye.expand(key.shape[0], -1, -1))


def _by_slice_groups(
    fn: Callable[..., Tensor], elements: int, shared: tuple[Tensor, ...],
    sliced: tuple[Tensor, ...], inv_bandwidth: Tensor, *, concatenate: bool,
) -> Tensor:  # fmt: skip
    """``fn(group, *shared, *(t[:, group] for t in sliced), inv_bandwidth)`` for all groups.

    The results are summed, or concatenated along the slices. A slice has intermediates of so many
    `elements`.
    """
    batch, slices = sliced[0].shape[:2]
    # An exported graph serves all batch sizes and lengths, so its groups cannot depend on them.
    size = slices if is_exporting() else max(1, GROUP_ELEMENTS // max(1, batch * elements))
    size = -(-slices // -(-slices // size))  # the same number of groups, of nearly equal sizes
    groups = [slice(i, min(i + size, slices)) for i in range(0, slices, size)]
    if len(groups) == 1:
        return fn(groups[0], *shared, *sliced, inv_bandwidth)
    tensors = (*shared, *sliced, inv_bandwidth)
    total: Tensor = _SliceGroups.apply(fn, groups, concatenate, len(shared), *tensors)
    return total


class _SliceGroups(torch.autograd.Function):
    """Runs a function group by group, in the forward and again in the backward pass.

    So only the graph of one group exists at a time.
    """

    @staticmethod
    def forward(
        ctx: Any, fn: Callable[..., Tensor], groups: list[slice], concatenate: bool, shared: int,
        *tensors: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.fn, ctx.groups, ctx.concatenate, ctx.shared = fn, groups, concatenate, shared
        ctx.save_for_backward(*tensors)
        results = (fn(group, *_part(tensors, shared, group)) for group in groups)
        if concatenate:
            return torch.cat(list(results), 1)
        total = next(results)
        for result in results:
            total = total + result
        return total

    @staticmethod
    @refuse_double_backward("espformer's linear-time attention")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors, shared = ctx.saved_tensors, ctx.shared
        needed = [i for i, need in enumerate(ctx.needs_input_grad[4:]) if need]
        totals: list[Tensor | None] = [None] * len(tensors)
        for i in needed:
            totals[i] = torch.zeros_like(tensors[i])
        for group in ctx.groups:
            parts = [part.detach() for part in _part(tensors, shared, group)]
            for i in needed:
                parts[i].requires_grad_()
            with torch.enable_grad():
                result = ctx.fn(group, *parts)
            grad = grads[0][:, group] if ctx.concatenate else grads[0]
            found = torch.autograd.grad(result, [parts[i] for i in needed], grad, allow_unused=True)
            for i, g in zip(needed, found, strict=True):
                total = totals[i]
                if g is not None and total is not None:
                    (total[:, group] if shared <= i < len(tensors) - 1 else total).add_(g)
        return None, None, None, None, *totals


def _part(tensors: tuple[Tensor, ...], shared: int, group: slice) -> list[Tensor]:
    """The arguments of one group: shared tensors and the last one whole, the others sliced."""
    last = len(tensors) - 1
    return [t[:, group] if shared <= i < last else t for i, t in enumerate(tensors)]
