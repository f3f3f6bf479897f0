"""Attention to all tokens alike: the control of every comparison of attentions."""

from torch import Tensor

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
        query_mask, key_mask = resolve_masks("Uniform", query, key, query_mask, key_mask)
        value = zero_padding(value, key_mask)
        if key_mask is None:
            mean = value.mean(-2, keepdim=True)
        else:
            count = key_mask.sum(-1).clamp(min=1).to(value.dtype)[..., None, None]
            mean = value.sum(-2, keepdim=True) / count
        output = mean.expand(*mean.shape[:-2], query.shape[-2], mean.shape[-1])
        return zero_padding(output, query_mask)

    def matrix(
        self,
        query: Tensor,
        key: Tensor,
        *,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        """One over the number of keys, in every entry of a key that takes part."""
        query_mask, key_mask = resolve_masks("Uniform", query, key, query_mask, key_mask)
        weight = key.new_ones(key.shape[:-1])
        if key_mask is not None:
            weight = weight * key_mask
        weight = weight / weight.sum(-1, keepdim=True).clamp(min=1)
        matrix = weight[..., None, :].expand(*query.shape[:-1], key.shape[-2])
        return zero_padding(matrix, query_mask)
