"""Transport between point clouds, slice by slice, with hard sorts."""

from __future__ import annotations

import math
from functools import partial
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from espformer.functional.arguments import check_tokens, is_integer, make_problem
from espformer.ops.common.masks import resolve_masks
from espformer.ops.common.operators import is_exporting, is_transformed, without_autocast
from espformer.ops.esp import linear
from espformer.ops.esp.coupling import couple
from espformer.ops.esp.options import Options
from espformer.ops.esp.problem import Problem


class SlicedPlan(NamedTuple):
    """A matching for every slice, and its cost.

    Attributes:
        matches: ``(..., L, N)``: x[i] is matched with ``y[matches[l, i]]``.
        cost: ``(..., L)``: the mean of ``‖x[i] - y[matches[l, i]]‖²``.
    """

    matches: Tensor
    cost: Tensor

    def cheapest(self) -> Tensor:
        """The matching of the slice with the lowest cost, ``(..., N)``."""
        best = self.cost.argmin(-1)[..., None, None]
        return self.matches.take_along_dim(best, -2).squeeze(-2)


def sliced_wasserstein(
    x: Tensor,
    y: Tensor,
    *,
    slices: int | Tensor = 64,
    p: float = 2.0,
    x_mask: Tensor | None = None,
    y_mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""The sliced Wasserstein distance of two point clouds, batched.

    .. math::  \Bigl(\frac1L \sum_l W_p^p(x\theta_l, y\theta_l)\Bigr)^{1/p}, \qquad
               W_p^p = \frac1N \sum_n |\mathrm{sort}(x\theta)_n - \mathrm{sort}(y\theta)_n|^p,

    with the optimal quantile coupling for N ≠ M. Time is O(L N log N). Gradients flow to x, y and
    slices, and are zero if the clouds are equal.

    Args:
        x: ``(..., N, m)``; leading dimensions broadcast.
        y: ``(..., M, m)``.
        slices: how many directions to draw, or Θ itself, ``(L, m)``, rows of unit norm.
        p: the power, at least one; ``math.inf`` for the largest distance on any slice.
        x_mask, y_mask: ``(..., N)`` and ``(..., M)``, True = takes part.
        generator: draws the directions, if `slices` is a number, and may be on another device. By
            default torch's global generator draws, so every call has new directions. For the same
            ones in every call pass Θ, or a generator with the same seed.

    Returns:
        The shape of x without its last two dimensions.

    Example:
        >>> import torch
        >>> from espformer.sorting import sliced_wasserstein
        >>> x = torch.randn(5, 100, 3)
        >>> sliced_wasserstein(x, x[:, torch.randperm(100)], slices=8).allclose(torch.zeros(5))
        True
    """
    name = "sliced_wasserstein"
    if not isinstance(p, Real) or not p >= 1:
        raise ValueError(f"{name}: p must be a number of at least 1, got {p!r}")
    problem, lead = _problem(name, x, y, slices, generator, x_mask, y_mask)
    with without_autocast(x.device):
        q, k = problem.projections()
    a, b = linear.sort_tokens(q, problem.query_mask), linear.sort_tokens(k, problem.key_mask)
    if q.shape == k.shape and x_mask is None and y_mask is None:
        gaps, weights = (a.points - b.points).abs(), None
    else:
        ranks = a.points.shape[-1], b.points.shape[-1]
        pairs = couple("quantile", a.lengths, b.lengths, *ranks, problem.dtype)
        count = q.shape[-2]
        ends = (
            side.points.gather(-1, index.unsqueeze(1).expand(-1, count, -1))
            for side, index in ((a, pairs.rows), (b, pairs.columns))
        )
        weights = pairs.weights.unsqueeze(1)
        gaps = torch.sub(*ends).abs().masked_fill(weights == 0, 0)
    largest = gaps.amax((-2, -1))
    if math.isinf(p):
        distance = largest
    else:  # of gaps between zero and one, whose powers do not overflow
        unit = largest.detach().masked_fill(largest == 0, 1)
        powers = (gaps / unit[:, None, None]).pow(p)
        if weights is None:
            power = powers.mean((-2, -1))
        else:
            power = (powers * weights).sum(-1).mean(-1) / a.lengths.clamp(min=1)
        zero = power == 0
        distance = unit * power.masked_fill(zero, 1).pow(1 / p).masked_fill(zero, 0)
    return (distance + problem.nonfinite_marker()).to(x.dtype).view(lead)


def sliced_plan(
    x: Tensor,
    y: Tensor,
    *,
    slices: int | Tensor = 64,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> SlicedPlan:
    """The matching of two point clouds on every slice, as permutations, batched.

    On a line, the optimal matching pairs equal ranks. Each slice thus gives one matching of the
    points, in O(N (log N + m)) and without a matrix. Even the cheapest costs at least as much as
    optimal transport: between the clouds of ``examples/match_point_clouds.py`` more than three
    times as much. One use is to pair batches for flow matching. For a soft plan, or a mean over
    slices, see :func:`espformer.esp_plan`.

    Args:
        x, y: ``(..., N, m)``, with the same number of points; leading dimensions broadcast.
        slices: how many directions to draw, or Θ itself, ``(L, m)``.
        mask: ``(..., N)``, True = takes part, for both clouds; masked points are matched last.
        generator: draws the directions, as in :func:`sliced_wasserstein`; without it, every call
            has new ones from torch's global generator.

    Returns:
        `matches`, ``(..., L, N)``: x[i] is matched with ``y[matches[l, i]]``, where equal
        projections keep their order; and `cost`, ``(..., L)``, the mean of
        ``‖x[i] - y[matches[l, i]]‖²``, which is differentiable. ``cheapest()`` is the matching of
        the slice with the lowest cost.

    Example:
        >>> import torch
        >>> from espformer.sorting import sliced_plan
        >>> x = torch.randn(5, 100, 2)
        >>> plan = sliced_plan(x, x.flip(-2) + 3.0, slices=8)
        >>> bool((plan.cheapest() == torch.arange(100).flip(0)).all()), plan.cost.shape
        (True, torch.Size([5, 8]))
    """
    name = "sliced_plan"
    problem, lead = _problem(name, x, y, slices, generator, mask, mask, ("mask", "mask"))
    if x.shape[-2] != y.shape[-2]:
        raise ValueError(
            f"{name}: x and y must have equally many points, got {tuple(x.shape)} and "
            f"{tuple(y.shape)}; for other plans use espformer.esp_plan"
        )
    with without_autocast(x.device):
        q, k = (side.detach() for side in problem.projections())
    queries = linear.rank_tokens(q, problem.query_mask)
    keys = linear.rank_tokens(k, problem.key_mask)
    matches = keys.order.gather(-1, queries.ranks)
    # Padding holds zeros and is matched with padding, so it costs nothing.
    cost = _costs(problem.query, problem.key, matches) / queries.lengths.clamp(min=1).unsqueeze(-1)
    cost = (cost + problem.nonfinite_marker().unsqueeze(-1)).to(x.dtype)
    return SlicedPlan(matches.view(*lead, *matches.shape[1:]), cost.view(*lead, cost.shape[-1]))


def _costs(x: Tensor, y: Tensor, matches: Tensor) -> Tensor:
    """``Σ_i ‖x[i] - y[matches[l, i]]‖²`` of clouds (batch, N, m): (batch, L), in groups of slices.

    A sum of squares keeps its digits where clouds are close to each other and far from zero.
    """

    def group(x: Tensor, y: Tensor, matches: Tensor) -> Tensor:
        slices, width = matches.shape[1], y.shape[-1]
        index = matches.unsqueeze(-1).expand(-1, -1, -1, width)
        matched = y.unsqueeze(1).expand(-1, slices, -1, -1).gather(-2, index)
        return (x.unsqueeze(1) - matched).square().sum((-2, -1))

    if is_exporting() or torch.jit.is_tracing():  # a graph serves other sizes: no groups
        return group(x, y, matches)
    parts = matches.split(max(1, linear.GROUP_ELEMENTS // max(1, x.numel())), 1)
    if len(parts) > 1 and not is_transformed():  # the backward pass recomputes a group, too
        group = partial(checkpoint, group, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([group(x, y, part) for part in parts], 1)


def _problem(
    name: str, x: Tensor, y: Tensor, slices: int | Tensor, generator: torch.Generator | None,
    x_mask: Tensor | None, y_mask: Tensor | None,
    labels: tuple[str, str] = ("x_mask", "y_mask"),
) -> tuple[Problem, torch.Size]:  # fmt: skip
    """Hard attention between the points, whose projections are sorted.

    The labels are what the caller calls the masks.
    """
    check_tokens(name, ("batch", "points", "width"), x=x, y=y)
    width = x.shape[-1]
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"{name}: generator must be a torch.Generator, got {type(generator).__name__} (for a "
            "seed pass torch.Generator().manual_seed(seed))"
        )
    if not isinstance(slices, Tensor):
        if not is_integer(slices) or slices < 1:
            raise ValueError(
                f"{name}: slices must be an integer of at least 1, or a tensor of directions, "
                f"(L, {width}), got {slices}"
            )
        device = x.device if generator is None else generator.device
        drawn = torch.randn(slices, width, generator=generator, device=device, dtype=torch.float32)
        slices = torch.nn.functional.normalize(drawn, dim=-1).to(x.device)
    elif slices.dim() < 2 or slices.shape[-1] != width:
        raise ValueError(
            f"{name}: slices must have shape (L, {width}) for points of that width, got "
            f"{tuple(slices.shape)}"
        )
    if x_mask is None and y_mask is not None:
        x_mask = x.new_ones(x.shape[:-1], dtype=torch.bool)
    query_mask, key_mask = resolve_masks(name, x, y, x_mask, y_mask, labels=labels)
    options: Options = {"hard": True, "scale": 1.0}
    problem, lead = make_problem(
        name, x, y, None, options, slices=slices, slice_logits=None, query_mask=query_mask,
        key_mask=key_mask,
    )  # fmt: skip
    return problem.scaled(), lead
