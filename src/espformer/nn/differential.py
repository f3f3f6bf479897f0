r"""Differential attention around any mechanism (Ye et al. 2025).

Two attentions share the values, and one is subtracted from the other:

.. math::
    \mathrm{out} = (1 - \lambda_0)\, \mathrm{RMSNorm}\big((A_1 - \lambda A_2) V\big), \qquad
    \lambda = e^{\lambda_{q_1} \cdot \lambda_{k_1}} - e^{\lambda_{q_2} \cdot \lambda_{k_2}}
    + \lambda_0 .

References:
    Ye, Dong, Xia, Sun, Zhu, Huang, Wei, Differential Transformer, ICLR 2025.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from espformer.nn.mechanisms import Mechanism, own_draws

__all__ = ["Differential"]


class Differential(Mechanism):
    r"""The difference of two attentions of a base mechanism.

    As in the original, a layer keeps its projections and halves its heads: of H heads of width D,
    heads 2h and 2h+1 are the two (query, key) groups of differential head h, and their two values
    side by side are its value, of width 2D. So a layer needs no special case, and the
    projections have the same number of parameters as with any other mechanism. A single head is
    split into two groups of width D/2, with a value of width D.

    The base mechanism sees all 2·(H/2) groups as heads, so parameters per head (temperatures,
    slices) are learnt separately for both groups of each differential head.

    λ is one number per layer, from four vectors of the width of a group drawn from N(0, 0.1²), and
    the norm's weight is shared by the heads, both as in the original.

    Args:
        base: mechanism of both groups.
        lambda_init: λ₀ in [0, 1), or "depth" for 0.8 - 0.6·exp(-0.3·depth) of the original, with
            the depth given to :meth:`bind` (from 0).

    Example:
        >>> import torch
        >>> from espformer.nn import ESP
        >>> x = torch.randn(2, 4, 5, 8)
        >>> Differential(ESP(), lambda_init=0.5).bind(heads=4, head_dim=8)(x, x, x).shape
        torch.Size([2, 4, 5, 8])
    """

    def __init__(self, base: Mechanism, lambda_init: float | Literal["depth"] = 0.8) -> None:
        super().__init__()
        if not isinstance(base, Mechanism):
            raise TypeError(
                "Differential: base must be a mechanism such as espformer.nn.ESP(), "
                f"got {type(base).__name__}"
            )
        if isinstance(lambda_init, str) and lambda_init != "depth":
            raise ValueError(
                f'Differential: lambda_init must be "depth" or in [0, 1), got {lambda_init!r}'
            )
        if not isinstance(lambda_init, str) and not 0 <= lambda_init < 1:
            raise ValueError(
                f"Differential: lambda_init must be in [0, 1), got {lambda_init} "
                "(the output is multiplied by 1 - lambda_init)"
            )
        self.base = base
        self.has_sort_temperature = base.has_sort_temperature
        self.lambda_schedule = lambda_init
        self.lambda_init = 0.8 if isinstance(lambda_init, str) else float(lambda_init)

    @property
    def relative_cost(self) -> float:
        return 0.5 + self.base.relative_cost

    def build(self, heads: int, head_dim: int, value_dim: int, depth: int) -> None:
        if heads > 1 and heads % 2:
            raise ValueError(
                f"Differential: the number of heads must be even, or one, got {heads} (two heads "
                "form a pair; a single head is split in two)"
            )
        if heads == 1 and (head_dim % 2 or value_dim % 2):
            raise ValueError(
                f"Differential: a single head is split in two, so its widths must be even, got "
                f"{head_dim} and {value_dim} for values"
            )
        if self.lambda_schedule == "depth":
            self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth)
        groups, width = (heads, head_dim) if heads > 1 else (2, head_dim // 2)
        joined = 2 * value_dim if heads > 1 else value_dim
        self.base = self.base.bind(groups, width, value_dim=joined, depth=depth)
        self.lambda_q1 = nn.Parameter(torch.empty(width))
        self.lambda_k1 = nn.Parameter(torch.empty(width))
        self.lambda_q2 = nn.Parameter(torch.empty(width))
        self.lambda_k2 = nn.Parameter(torch.empty(width))
        self.norm = nn.RMSNorm(joined, eps=1e-5)
        with own_draws(depth):
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialise the vectors of λ and the norm; the base keeps its parameters."""
        for vector in self._lambda_vectors():
            nn.init.normal_(vector, std=0.1)
        self.norm.reset_parameters()

    def difference_weight(self) -> Tensor:
        """λ, a scalar."""
        wide = torch.promote_types(self.lambda_q1.dtype, torch.float32)
        q1, k1, q2, k2 = (vector.to(wide) for vector in self._lambda_vectors())
        return (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.lambda_init

    def _lambda_vectors(self) -> tuple[nn.Parameter, ...]:
        return self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        self.require_bound(query)
        query, key, value = (self._groups(x) for x in (query, key, value))
        # (batch, pairs, tokens, 2 · width): the two values of a pair side by side, for both groups.
        value = torch.cat(_pairs(value), dim=-1).repeat_interleave(2, dim=-3)
        groups = self.base(query, key, value, query_mask=query_mask, key_mask=key_mask)
        # In 16 bits the difference of two similar outputs would lose most of its precision.
        groups = groups.to(self.norm.weight.dtype)
        weight = self.difference_weight().to(groups.dtype)
        first, second = _pairs(groups)
        output = self.norm(first - weight * second) * (1 - self.lambda_init)
        return self._ungroup(output.to(value.dtype))

    def matrix(
        self,
        query: Tensor,
        key: Tensor,
        *,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        """A₁ - λ A₂ of each differential head, before the norm.

        ``(batch, heads, N, M)``: both heads of a pair have the same matrix, since both outputs are
        computed with it.
        """
        self.require_bound(query)
        matrix = self.base.matrix(
            self._groups(query), self._groups(key), query_mask=query_mask, key_mask=key_mask
        )
        weight = self.difference_weight().to(matrix.dtype)
        first, second = _pairs(matrix)
        matrix = first - weight * second
        return matrix if self.heads == 1 else matrix.repeat_interleave(2, dim=-3)

    def _groups(self, x: Tensor) -> Tensor:
        """``(batch, groups, tokens, width)``: the heads, or the two halves of a single one."""
        return torch.cat(x.chunk(2, dim=-1), dim=-3) if self.heads == 1 else x

    def _ungroup(self, x: Tensor) -> Tensor:
        """``(batch, pairs, tokens, 2 · width)`` to ``(batch, heads, tokens, head_dim)``."""
        return x if self.heads == 1 else x.unflatten(-1, (2, -1)).transpose(-3, -2).flatten(-4, -3)

    def extra_repr(self) -> str:
        return f"lambda_init={self.lambda_init:.3g}"


def _pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the second of every two heads, ``(batch, pairs, tokens, width)`` each."""
    return x[..., 0::2, :, :], x[..., 1::2, :, :]
