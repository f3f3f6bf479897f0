"""A call of ESP attention, checked and brought to one shape: the input of every backend."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from espformer.ops.esp.options import ESPOptions

# Lower temperatures change nothing, because the bandwidth is already far below any distance. Above
# these values the derivatives of 1/t and 1/sqrt(t) are at most 1e36, which float32 can hold.
LEAST_TEMPERATURE = {"absolute": 1e-18, "squared": 1e-24}
MOST_TEMPERATURE = 1e25  # all numbers near one are equal at this width
# Numbers are scaled by at most this power of two; one over a width, times it, does not overflow.
MOST_DOUBLINGS = {torch.float32: 100, torch.float64: 900}


@dataclass(frozen=True)
class Problem:
    """All inputs that determine the plan; ``batch`` is the product of all leading dimensions.

    Queries and keys have the caller's dtype and are not scaled yet, so that a kernel can sort
    16-bit numbers directly. Padded tokens hold zeros. Masks are True where a token takes part.
    """

    query: Tensor  # (batch, N, m)
    key: Tensor  # (batch, M, m)
    # The scale is set; a temperature is a number, or a tensor of shape (batch,) or (1,).
    options: ESPOptions = field(default_factory=lambda: ESPOptions(scale=1.0))
    slices: Tensor | None = None  # Θ, (batch or 1, L, m); None means the axes
    slice_logits: Tensor | None = None  # b, (batch or 1, L): learnt preferences of slices
    query_mask: Tensor | None = None  # (batch, N)
    key_mask: Tensor | None = None  # (batch, M)
    keep: Tensor | None = None  # (batch, L): True for slices that slice dropout keeps
    # "query" or "key": the soft sort of that side is the identity, because its numbers are in order
    # (padding last) and far apart. It has as many tokens as the other side. A backend may skip it.
    identity_side: str = ""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computation: float64 for float64 inputs, else float32."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    @property
    def scale(self) -> float:
        """The factor that queries and keys are multiplied by."""
        assert self.options.scale is not None
        return self.options.scale

    @property
    def same_lengths(self) -> bool:
        """Whether every sequence has as many queries as keys, known from shapes and masks alone."""
        same_tokens = self.query.shape[-2] == self.key.shape[-2]
        return same_tokens and (self.query_mask is self.key_mask or bool(self.identity_side))

    def with_options(self, **changes: Any) -> Problem:
        """The same problem with other options."""
        return replace(self, options=replace(self.options, **changes))

    def scaled(self) -> Problem:
        """The same problem with queries and keys scaled, in the dtype of the computation."""
        query, key = self.query.to(self.dtype) * self.scale, self.key.to(self.dtype) * self.scale
        return replace(self, query=query, key=key).with_options(scale=1.0)

    def nonfinite_marker(self) -> Tensor:
        """NaN for every head that contains NaN or an infinity, else zero: (batch,).

        A sort ranks NaN like any number and would hide it. Added to the output, this shows it.
        """
        tensors = (self.query, self.key, self.slices)
        zero, *others = (_zero_if_finite(x.detach()) for x in tensors if x is not None)
        for other in others:
            zero = zero + other
        return zero.to(self.dtype)

    def temperatures(self) -> Tensor:
        """t as a tensor, (batch,) or (1,)."""
        t = self.options.sort_temperature
        if isinstance(t, Tensor):
            return t
        # torch.compile treats this factor as an input of its graph. With torch.full it would
        # recompile for every temperature.
        return torch.ones(1, device=self.query.device, dtype=self.dtype) * t

    def inv_bandwidth(self, count: int = 1) -> Tensor:
        """One over the width of the sort kernel: ``1/t``, or ``1/sqrt(t)`` for squared distances.

        In units of the spread it is ``1/t`` for both metrics, because points are divided by their
        spread. The shape is that of a temperature tensor, (batch,) or (1,). For a number it is
        (count,) with equal entries, made in one launch, and (1,) under ``torch.compile``.
        """
        t, metric = self.options.sort_temperature, self.options.metric
        linear = metric == "absolute" or self.options.temperature_unit == "spread"
        power, least = (-1.0, 1e-18) if linear else (-0.5, LEAST_TEMPERATURE[metric])
        lowest = 1e-30  # for a kernel this wide all numbers are equal
        if not (isinstance(t, Tensor) or torch.compiler.is_compiling()):
            inverse = max(max(t, least) ** power, lowest)
            return torch.full((count,), inverse, device=self.query.device, dtype=self.dtype)
        return (self.temperatures().clamp(min=least) ** power).clamp(min=lowest)

    def projections(self) -> tuple[Tensor, Tensor]:
        """Queries and keys on every slice: ``(batch, L, N)`` and ``(batch, L, M)``."""
        if self.slices is None:
            return self.query.mT, self.key.mT
        return self.slices @ self.query.mT, self.slices @ self.key.mT

    def in_units(self, points: Tensor, valid: Tensor | None) -> Tensor:
        """Points in the unit of the temperature: divided by their spread, or as they are.

        Args:
            points: (batch, L, N), in any order. Entries that are not tokens hold any finite number.
            valid: broadcastable to points, True for tokens that take part.
        """
        if self.options.temperature_unit == "absolute" or self.options.hard:
            return points
        points, spread = with_spread(points, valid)
        return points / spread

    def centre(self) -> Tensor:
        """The mean of the keys that take part, (batch, 1, m), without a gradient.

        Costs do not change if both clouds are translated. Centred, they do not lose precision by
        cancellation.
        """
        return centre(self.key, self.key_mask, self.dtype)

    def slice_weights(self, costs: Tensor | None) -> Tensor | None:
        """``σ = softmax(b - τ D)`` over the slices that dropout kept; None for the plain mean.

        Args:
            costs: mean squared distances, (batch, L), of which D is a power.
        """
        options = self.options
        return slice_weights(
            costs, self.slice_logits, self.keep, options.inverse_temperature,
            options.cost_exponent, self.dtype,
        )  # fmt: skip


def _zero_if_finite(x: Tensor) -> Tensor:
    """Zero for every matrix, (batch, …), or NaN if it contains NaN or an infinity."""
    if x.device.type == "cpu":  # where this takes a tenth of the time of a norm, but two launches
        return (x * 0).sum((-2, -1))
    return torch.linalg.vector_norm(x, torch.inf, (-2, -1)) * 0


def centre(key: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """:meth:`Problem.centre` of keys and their mask."""
    key = key.detach()
    if mask is None:
        mean = key.mean(-2, keepdim=True, dtype=dtype)
    else:  # padded tokens hold zeros
        count = mask.sum(-1, dtype=dtype).clamp(min=1)
        mean = key.sum(-2, keepdim=True, dtype=dtype) / count.view(-1, 1, 1)
    return mean.nan_to_num()


def least_cost(dtype: torch.dtype) -> float:
    """Below this, the root of a cost has no slope: at zero it would be infinite."""
    return float(torch.finfo(dtype).tiny ** 0.5)


def slice_weights(
    costs: Tensor | None, slice_logits: Tensor | None, keep: Tensor | None,
    inverse_temperature: float, cost_exponent: float, dtype: torch.dtype,
) -> Tensor | None:  # fmt: skip
    """:meth:`Problem.slice_weights` of these arguments."""
    logits = None
    if costs is not None:
        power = cost_exponent / 2
        if power != 1:
            # NaN is not below the least cost, so it keeps its gradient; clamp would give it none.
            least = least_cost(costs.dtype)
            costs = costs.masked_fill(costs < least, least) ** power
        logits = -inverse_temperature * costs
    if slice_logits is not None:
        logits = slice_logits if logits is None else logits + slice_logits
    if keep is not None:
        zero = torch.zeros((), device=keep.device, dtype=dtype)
        logits = (zero if logits is None else logits).masked_fill(~keep, -torch.inf)
    return None if logits is None else logits.softmax(-1)


def with_spread(points: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """The points of every slice, (batch, L, N), and their standard deviation, (batch, L, 1).

    Points that differ only by rounding have no spread: their largest is returned instead, which is
    never zero, and they have no gradient. Rounding, divided by something near zero, would be taken
    for one.
    """
    variance, largest, flat = _spread(points, valid)
    spread = largest * torch.where(flat, 1, variance).sqrt()
    return torch.where(flat, points.detach(), points), spread


def without_spread(points: Tensor, valid: Tensor | None) -> Tensor:
    """Whether the points of a slice differ only by rounding, (batch, L, 1), as `with_spread`."""
    return _spread(points.detach(), valid)[-1]


def _spread(points: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The variance relative to the largest point, that point, and whether there is no spread.

    Relative to the largest, squares stay in the range of float32.
    """
    here = points if valid is None else torch.where(valid, points, 0)
    least = torch.finfo(points.dtype).tiny ** 0.75  # so that its inverse does not overflow
    largest = here.detach().abs().amax(-1, keepdim=True).clamp(min=least)
    if valid is None:
        variance = ((points - points.mean(-1, keepdim=True)) / largest).square().mean(-1, True)
    else:
        count = valid.sum(-1, keepdim=True).clamp(min=1)
        centred = torch.where(valid, points - here.sum(-1, keepdim=True) / count, 0)
        variance = (centred / largest).square().sum(-1, keepdim=True) / count
    # NaN is not without spread: it keeps its gradient.
    return variance, largest, variance <= (8 * torch.finfo(points.dtype).eps) ** 2


def near_one(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers times a power of two, which is exact, so that the largest is near one.

    Then neither their spread nor a thousand kernel widths leave the range of their dtype.
    """
    largest, most = numbers.detach().abs().amax(-1, keepdim=True), MOST_DOUBLINGS[numbers.dtype]
    exponent = torch.frexp(largest).exponent.clamp(-most, most)
    factor = torch.exp2(-exponent.to(numbers.dtype))
    return numbers * factor, factor
