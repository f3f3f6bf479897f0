"""A class token that attends by softmax; the other tokens use any mechanism."""

import torch
from torch import Tensor

from espformer.nn.mechanisms import Mechanism, Softmax, Wrapper

__all__ = ["ClassToken"]


class ClassToken(Wrapper):
    """The first token attends to all tokens by softmax; the others attend to each other by `base`.

    A doubly-stochastic plan gives every token the same total weight, including the class token.
    Here the class token reads from all tokens by softmax and does not take part in the plan. It
    must not be masked.

    Args:
        base: mechanism of the other tokens.

    Example:
        >>> import torch
        >>> from espformer.nn import ESP
        >>> x = torch.randn(2, 4, 5, 8)
        >>> rows = ClassToken(ESP(hard=True)).bind(4, 8).matrix(x, x).sum(-1)
        >>> rows.allclose(torch.ones(2, 4, 5))
        True

    References:
        LOTFormer, arXiv 2509.23436, treats its class token in this way.
    """

    def __init__(self, base: Mechanism) -> None:
        super().__init__(base)
        self.reader = Softmax()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        _check_tokens(query, key)
        first = self.reader(
            query[..., :1, :], key, value, query_mask=_first(query_mask), key_mask=key_mask
        )
        others = self.base(
            query[..., 1:, :], key[..., 1:, :], value[..., 1:, :], **_others(query_mask, key_mask)
        )
        return torch.cat([first, others], -2)

    def matrix(
        self,
        query: Tensor,
        key: Tensor,
        *,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        _check_tokens(query, key)
        first = self.reader.matrix(
            query[..., :1, :], key, query_mask=_first(query_mask), key_mask=key_mask
        )
        others = self.base.matrix(
            query[..., 1:, :], key[..., 1:, :], **_others(query_mask, key_mask)
        )
        return torch.cat([first, torch.nn.functional.pad(others, (1, 0))], -2)


def _check_tokens(query: Tensor, key: Tensor) -> None:
    if min(query.shape[-2], key.shape[-2]) < 2:
        raise ValueError(
            "ClassToken: there must be tokens beside the class token, got queries of shape "
            f"{tuple(query.shape)} and keys of shape {tuple(key.shape)}"
        )


def _first(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask[..., :1]


def _others(query_mask: Tensor | None, key_mask: Tensor | None) -> dict[str, Tensor | None]:
    """The masks of the other tokens; the mask of self-attention stays one tensor."""
    keys = None if key_mask is None else key_mask[..., 1:]
    if query_mask is key_mask:
        return {"query_mask": keys, "key_mask": keys}
    queries = None if query_mask is None else query_mask[..., 1:]
    return {"query_mask": queries, "key_mask": keys}
