"""Attention to all tokens alike: the control of every comparison of attentions."""

import torch
from torch import Tensor

from espformer.functional.arguments import check_tokens
from espformer.nn.mechanisms import Mechanism
from espformer.ops.common.masks import resolve_masks, zero_padding

__all__ = ["Uniform"]


class Uniform(Mechanism):
    r"""Uniform attention: every query gets the mean of the values.

    .. math:: \mathrm{out}_i = \frac1M \sum_{j=1}^M v_j, \qquad i = 1 \dots N.

    It ignores queries and keys, and has no options and no parameters. It is the control of a
    comparison: if a model is as accurate with uniform attention as with another mechanism, the task
    does not show what that mechanism is good for. For N = M its matrix is doubly stochastic.

    Example:
        >>> import torch
        >>> x = torch.randn(2, 4, 5, 8)
        >>> Uniform()(x, x, x)[0, 0, 3].allclose(x[0, 0].mean(0))
        True
    """

    def __init__(self) -> None:
        super().__init__()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        lead = check_tokens("Uniform", query=query, key=key, value=value)
        query_mask, key_mask = resolve_masks("Uniform", query, key, query_mask, key_mask)
        total = zero_padding(value, key_mask).sum(-2, keepdim=True, dtype=_wide(value))
        mean = (total / _count(key, key_mask)).to(value.dtype)
        return zero_padding(mean.expand(*lead, query.shape[-2], -1), query_mask)

    def matrix(
        self,
        query: Tensor,
        key: Tensor,
        *,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        """One over the number of keys, in every entry of a key that takes part."""
        lead = check_tokens("Uniform", query=query, key=key)
        query_mask, key_mask = resolve_masks("Uniform", query, key, query_mask, key_mask)
        row = zero_padding(torch.ones_like(key[..., :1], dtype=_wide(key)), key_mask).mT
        row = (row / _count(key, key_mask)).to(query.dtype)
        return zero_padding(row.expand(*lead, query.shape[-2], -1), query_mask)


def _wide(x: Tensor) -> torch.dtype:
    """The dtype of sums: in float16 they may overflow."""
    return torch.promote_types(x.dtype, torch.float32)


def _count(key: Tensor, key_mask: Tensor | None) -> int | Tensor:
    """The number of keys that take part, at least 1."""
    return key.shape[-2] if key_mask is None else key_mask.sum(-1).clamp(min=1)[..., None, None]
