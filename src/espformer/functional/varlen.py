"""Attention of packed sequences: the tokens of all sequences are concatenated, without padding.

Shapes are those of flash attention's varlen functions: ``(tokens, heads, width)`` and cumulative
sequence lengths. For jagged nested tensors, call :func:`espformer.esp_attention` and
:func:`espformer.sinkhorn_attention` directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Unpack

from torch import Tensor

from espformer.functional.arguments import check_tensor, refuse_causal
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
    is_causal: bool = False,
    **options: Unpack[Options],
) -> Tensor:
    """:func:`espformer.esp_attention` of packed sequences, each on its own.

    The result equals that of the padded call, up to rounding. Sequences of similar length are
    padded together, so the cost depends on the number of tokens, not on the longest sequence.
    Python needs the lengths: pass `cu_seqlens` on the CPU to avoid a GPU synchronisation.

    Args:
        query: ``(tokens of queries, heads, m)``, sequence after sequence.
        key: ``(tokens of keys, heads, m)``.
        value: ``(tokens of keys, heads, d)``.
        cu_seqlens_q: cumulative sequence lengths of the queries: integers,
            ``(sequences + 1,)``, starting with 0. Sequences may be empty.
        cu_seqlens_k: the same for the keys; `cu_seqlens_q` by default. A query without keys gets
            zeros.
        slices, slice_logits, backend, is_causal: as in :func:`espformer.esp_attention`.
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
    packing = _packing(name, query, key, value, cu_seqlens_q, cu_seqlens_k, is_causal)
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
    is_causal: bool = False,
) -> Tensor:
    """:func:`espformer.sinkhorn_attention` of packed sequences, each on its own.

    Args:
        query: ``(tokens of queries, heads, head_dim)``, sequence after sequence.
        key: ``(tokens of keys, heads, head_dim)``.
        value: ``(tokens of keys, heads, width)``.
        cu_seqlens_q, cu_seqlens_k: as in :func:`espformer.esp_attention_varlen`.
        iterations, epsilon, scale, backend, is_causal: as in :func:`espformer.sinkhorn_attention`.

    Returns:
        ``(tokens of queries, heads, width)``.

    Example:
        >>> import torch, espformer
        >>> x = torch.randn(7, 2, 8)
        >>> espformer.sinkhorn_attention_varlen(x, x, x, [0, 4, 4, 7]).shape
        torch.Size([7, 2, 8])
    """
    name = "sinkhorn_attention_varlen"
    packing = _packing(name, query, key, value, cu_seqlens_q, cu_seqlens_k, is_causal)
    attention = partial(
        sinkhorn_attention, iterations=iterations, epsilon=epsilon, scale=scale, backend=backend
    )
    return packing.attend(attention, query, key, value)


def _packing(
    name: str, query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int] | None, is_causal: bool,
) -> Packing:  # fmt: skip
    """The boundaries of the sequences; raises for what no attention could compute."""
    for label, x in {"query": query, "key": key, "value": value}.items():
        check_tensor(name, label, x)
    refuse_causal(name, is_causal)
    return Packing(cu_seqlens_q, cu_seqlens_k, device=query.device, name=name)
