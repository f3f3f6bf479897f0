"""What an ESP attention call asks for, checked and in one shape: the input of every backend."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

BALANCES = ("rows", "both")
TIES = ("stable", "average")
COUPLINGS = ("quantile", "interpolate", "identity")

# Sharper is no different: the width is far below any distance of numbers. From here on the
# derivatives of 1/t and 1/sqrt(t) are at most 1e36, which float32 can hold.
LEAST_TEMPERATURE = {"absolute": 1e-18, "squared": 1e-24}


@dataclass(frozen=True)
class Problem:
    """Everything that decides the plan; ``batch`` stands for all leading dimensions with the heads.

    Queries and keys have the caller's dtype and are not scaled yet, so that a kernel may sort
    16-bit numbers as such; padded tokens hold zeros. Masks are True where a token takes part.
    """

    query: Tensor  # (batch, N, m)
    key: Tensor  # (batch, M, m)
    scale: float  # multiplies both
    sort_temperature: float | Tensor  # t; a tensor is (batch,) or (1,)
    inverse_temperature: float = 0.1  # τ
    slices: Tensor | None = None  # Θ, (batch or 1, L, m); None means the axes
    metric: str = "absolute"
    balance: str = "rows"
    hard: bool = False
    ties: str = "stable"
    coupling: str = "quantile"
    query_mask: Tensor | None = None  # (batch, N)
    key_mask: Tensor | None = None  # (batch, M)
    keep: Tensor | None = None  # (batch, L): slices that slice dropout left in

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in: float64 for float64 inputs, else float32."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    def scaled(self) -> Problem:
        """The same problem with queries and keys scaled, in the dtype that is computed in."""
        query, key = self.query.to(self.dtype) * self.scale, self.key.to(self.dtype) * self.scale
        return replace(self, query=query, key=key, scale=1.0)

    def poison(self) -> Tensor:
        """NaN for every head that holds NaN or an infinity, else zero: (batch,).

        A sort has a place for NaN and would hide it; whoever holds one shall see it.
        """
        held = (
            (self.query, self.key) if self.slices is None else (self.query, self.key, self.slices)
        )
        zero, *others = (
            torch.linalg.vector_norm(x.detach(), torch.inf, (-2, -1)) * 0 for x in held
        )
        for other in others:
            zero = zero + other
        return zero.to(self.dtype)

    def temperatures(self) -> Tensor:
        """t as a tensor, (batch,) or (1,)."""
        t = self.sort_temperature
        if isinstance(t, Tensor):
            return t
        # A compiler keeps a factor apart from its graph; `torch.full` it would compile anew for
        # every temperature.
        return torch.ones(1, device=self.query.device, dtype=self.dtype) * t

    def inverse_width(self, count: int = 1) -> Tensor:
        """One over the width of the sort kernel: ``1/t`` (absolute) or ``1/sqrt(t)`` (squared).

        (batch,); of a number that is not compiled, `count` times the same in one launch, else (1,).
        """
        t, power = self.sort_temperature, -1.0 if self.metric == "absolute" else -0.5
        least, lowest = LEAST_TEMPERATURE[self.metric], 1e-30  # all numbers are equal to that
        if not (isinstance(t, Tensor) or torch.compiler.is_compiling()):
            inverse = max(max(t, least) ** power, lowest)
            return torch.full((count,), inverse, device=self.query.device, dtype=self.dtype)
        return (self.temperatures().clamp(min=least) ** power).clamp(min=lowest)

    def projections(self) -> tuple[Tensor, Tensor]:
        """Queries and keys on every slice: ``(batch, L, N)`` and ``(batch, L, M)``."""
        if self.slices is None:
            return self.query.mT, self.key.mT
        return self.slices @ self.query.mT, self.slices @ self.key.mT

    def centre(self) -> Tensor:
        """The mean of the keys that take part, (batch, 1, m), without a gradient.

        Costs do not change when both clouds move together, and near the origin they do not cancel.
        """
        key = self.key.detach()
        if self.key_mask is None:
            mean = key.mean(-2, keepdim=True, dtype=self.dtype)
        else:  # padded tokens hold zeros
            count = self.key_mask.sum(-1, dtype=self.dtype).clamp(min=1)
            mean = key.sum(-2, keepdim=True, dtype=self.dtype) / count.view(-1, 1, 1)
        return mean.nan_to_num()

    def slice_weights(self, costs: Tensor) -> Tensor:
        """``σ = softmax(-τ D)`` over the slices that dropout kept."""
        logits = -self.inverse_temperature * costs
        if self.keep is not None:
            logits = logits.masked_fill(~self.keep, -torch.inf)
        return logits.softmax(-1)
