"""Attention of packed sequences: tokens of all sequences one after the other, no padding.

Shapes are those of flash attention's functions of that kind: ``(tokens, heads, width)``, and where
sequences begin. Jagged nested tensors go through :func:`espformer.esp_attention` and
:func:`espformer.sinkhorn_attention` themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Unpack

from torch import Tensor

from espformer.functional.baselines import sinkhorn_attention
from espformer.functional.esp import esp_attention
from espformer.ops.common.packing import Packing
from espformer.ops.esp.options import Options, takes_options

__all__ = ["esp_attention_varlen", "sinkhorn_attention_varlen"]


@takes_options
def esp_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    *,
    slices: Tensor | None = None,
    slice_logits: Tensor | None = None,
    backend: str = "auto",
    **options: Unpack[Options],
) -> Tensor:
    """:func:`espformer.esp_attention` of packed sequences, each by itself.

    Equal to the padded call to rounding. Sequences of similar length are padded together, so that
    the cost follows the number of tokens, not the longest sequence. The lengths have to be known
    where Python runs: pass `cu_seqlens` on the CPU, or the GPU is waited for.

    Args:
        query: ``(tokens of queries, heads, m)``, sequence after sequence.
        key: ``(tokens of keys, heads, m)``.
        value: ``(tokens of keys, heads, d)``.
        cu_seqlens_q: the number of query tokens before each sequence, and of all: integers,
            ``(sequences + 1,)``, beginning with 0. Sequences may be empty.
        cu_seqlens_k: likewise of the keys; the same unless given. A query without keys gets zeros.
        slices, slice_logits, backend: as in :func:`espformer.esp_attention`.
        {options}

    Returns:
        ``(tokens of queries, heads, d)`` in the dtype of `value`.

    Example:
        >>> import torch, espformer
        >>> x = torch.randn(7, 2, 8)  # sequences of 4, 0 and 3 tokens, two heads
        >>> out = espformer.esp_attention_varlen(x, x, x, torch.tensor([0, 4, 4, 7]))
        >>> first = x[None, :4].transpose(1, 2)
        >>> alone = espformer.esp_attention(first, first, first).transpose(1, 2)[0]
        >>> torch.allclose(out[:4], alone, atol=1e-6)
        True
    """
    name = "esp_attention_varlen"
    t = options.get("sort_temperature")
    if isinstance(t, Tensor) and t.dim() > 1 and t.shape[0] != 1:
        raise ValueError(
            f"{name}: sort_temperature of shape {tuple(t.shape)} has one temperature per sequence; "
            "for packed sequences it is a number, or (heads,)"
        )
    packing = Packing(cu_seqlens_q, cu_seqlens_k, device=query.device, name=name)
    attention = partial(
        esp_attention, slices=slices, slice_logits=slice_logits, backend=backend, **options
    )
    return packing.attend(attention, query, key, value)


def sinkhorn_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    *,
    iterations: int = 3,
    epsilon: float = 1.0,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """:func:`espformer.sinkhorn_attention` of packed sequences, each by itself.

    Args:
        query: ``(tokens of queries, heads, head_dim)``, sequence after sequence.
        key: ``(tokens of keys, heads, head_dim)``.
        value: ``(tokens of keys, heads, width)``.
        cu_seqlens_q, cu_seqlens_k: as in :func:`espformer.esp_attention_varlen`.
        iterations, epsilon, scale, backend: as in :func:`espformer.sinkhorn_attention`.

    Returns:
        ``(tokens of queries, heads, width)``.

    Example:
        >>> import torch, espformer
        >>> x = torch.randn(7, 2, 8)
        >>> espformer.sinkhorn_attention_varlen(x, x, x, [0, 4, 4, 7]).shape
        torch.Size([7, 2, 8])
    """
    name = "sinkhorn_attention_varlen"
    packing = Packing(cu_seqlens_q, cu_seqlens_k, device=query.device, name=name)
    attention = partial(
        sinkhorn_attention, iterations=iterations, epsilon=epsilon, scale=scale, backend=backend
    )
    return packing.attend(attention, query, key, value)
