"""Padding masks, with the same rules for every attention of the library.

A mask is boolean; ``True`` = the token takes part. There are masks for queries and for keys, but
not for (query, key) pairs: a lower-triangular matrix whose rows and columns all sum to one is the
identity, so causal masks make no sense here.
"""

import torch
from torch import Tensor

__all__ = ["resolve_masks", "zero_padding"]

ATTENTION = ("query_mask", "key_mask")


def resolve_masks(
    name: str,
    query: Tensor,
    key: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    mask: Tensor | None = None,
    labels: tuple[str, str] = ATTENTION,
) -> tuple[Tensor | None, Tensor | None]:
    """Check the padding masks of an attention call and bring them to broadcastable shapes.

    Each mask may have the shape ``(batch, tokens)``, one mask for all heads, or ``(batch, 1,
    tokens)`` or ``(batch, heads, tokens)``; in general, for queries of shape ``(..., heads, N,
    head_dim)``, the shapes ``(..., N)``, ``(..., 1, N)`` and ``(..., heads, N)``.

    In self-attention one mask serves both sides: pass it as ``mask``, or the same tensor twice. The
    same tensor is then returned twice, so callers know, without reading it, that every sequence has
    as many queries as keys. A ``key_mask`` alone does not say whether padded tokens are queries,
    too, where there are as many queries as keys, and is refused there.

    Args:
        name: the calling function, for the error messages.
        query: queries, ``(batch, heads, N, head_dim)``.
        key: keys, ``(batch, heads, M, head_dim)``.
        query_mask: which queries take part, or None for all of them.
        key_mask: which keys take part, or None for all of them.
        mask: which tokens take part in self-attention, instead of the two.
        labels: what the caller calls the two masks, for the error messages.

    Returns:
        The two masks, broadcastable to ``query.shape[:-1]`` and ``key.shape[:-1]``, or None.

    Raises:
        TypeError: a mask that is not a tensor.
        ValueError: a mask that is not boolean, not of one of those shapes, or on another device; a
            `mask` beside others, or for as many queries as keys only a `key_mask`.

    Example:
        >>> import torch
        >>> x = torch.randn(2, 4, 3, 8)
        >>> lengths = torch.tensor([3, 1])
        >>> mask = torch.arange(3) < lengths[:, None]
        >>> query_mask, key_mask = resolve_masks("example", x, x, None, None, mask)
        >>> query_mask.shape, query_mask is key_mask
        (torch.Size([2, 1, 3]), True)
    """
    as_many = query.shape[-2] == key.shape[-2]
    if mask is not None:
        if query_mask is not None or key_mask is not None or not as_many:
            raise ValueError(
                f"{name}: mask is for self-attention, where it says which tokens take part as "
                f"queries and as keys; with {query.shape[-2]} queries and {key.shape[-2]} keys, or "
                "to mask them apart, pass query_mask and key_mask instead of it"
            )
        mask = _resolve(name, "mask", mask, key, query)
        return mask, mask
    one = query_mask is key_mask and as_many
    attends = labels == ATTENTION
    if key_mask is not None:
        key_mask = _resolve(name, labels[1], key_mask, key, query, attends)
        if query_mask is None and as_many:
            raise ValueError(
                f"{name}: {labels[1]} alone does not say which queries are padding, and there are "
                f"as many queries as keys ({key.shape[-2]}). In self-attention, pass it as "
                f"{labels[0]} too (functions: as mask=...); in cross-attention, pass a "
                f"{labels[0]}, of ones if no query is padding"
            )
    if one:
        return key_mask, key_mask
    if query_mask is not None:
        query_mask = _resolve(name, labels[0], query_mask, query, key, attends)
    return query_mask, key_mask


def zero_padding(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Replace masked tokens by zeros, whatever they hold, including NaN.

    A weight of zero is not enough: ``0 * NaN`` is NaN, in the forward and the backward pass.

    Args:
        tokens: ``(batch, heads, tokens, width)``.
        mask: broadcastable to ``tokens.shape[:-1]``, as :func:`resolve_masks` returns it.

    Example:
        >>> import torch
        >>> zero_padding(torch.tensor([[1.0], [torch.nan]]), torch.tensor([True, False]))
        tensor([[1.],
                [0.]])
    """
    return tokens if mask is None else tokens.masked_fill(~mask.unsqueeze(-1), 0)


def _resolve(
    name: str, argument: str, mask: Tensor, tokens: Tensor, others: Tensor, attends: bool = True
) -> Tensor:
    """One mask over `tokens`, brought to a shape broadcastable to ``tokens.shape[:-1]``.

    `attends` says that there are queries and keys, of which somebody may want to mask pairs.
    """
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"{name}: {argument} must be a torch.Tensor, got {type(mask).__name__}; convert it "
            "with torch.as_tensor"
        )
    full = tokens.shape[:-1]
    per_sequence = tokens.shape[:-3] + full[-1:]
    # The shape that this function returns, so that it also accepts a resolved mask.
    resolved = (*tokens.shape[:-3], 1, full[-1]) if tokens.ndim >= 3 else full

    if mask.shape not in (per_sequence, full, resolved):
        accepted = " or ".join(str(tuple(shape)) for shape in dict.fromkeys((per_sequence, full)))
        pair = (tokens.shape[-2], others.shape[-2])
        pair = pair if argument == "query_mask" else pair[::-1]
        if attends and mask.ndim >= 2 and mask.shape[-2:] == pair:
            raise ValueError(
                f"{name}: {argument} of shape {tuple(mask.shape)} masks (query, key) pairs, but "
                "only padding can be masked: a causal matrix that is doubly stochastic is the "
                "identity. Say which tokens take part with mask (or query_mask and key_mask), "
                f"boolean, of shape {accepted}"
            )
        raise ValueError(
            f"{name}: {argument} must have shape {accepted} to mask tokens of shape "
            f"{tuple(tokens.shape)}, got {tuple(mask.shape)}"
        )
    if mask.dtype != torch.bool:
        raise ValueError(
            f"{name}: {argument} must be boolean (True = takes part), got {mask.dtype}; additive "
            "masks are not supported, because only padding can be masked (for a mask of 0 and 1 "
            f"pass {argument}.bool())"
        )
    if mask.device != tokens.device:
        raise ValueError(
            f"{name}: {argument} is on {mask.device} but the tokens it masks are on "
            f"{tokens.device}; move it there with {argument}.to({str(tokens.device)!r})"
        )
    return mask.unsqueeze(-2) if mask.shape == per_sequence and tokens.ndim >= 3 else mask
