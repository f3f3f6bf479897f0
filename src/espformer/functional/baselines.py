"""The baselines of ESP attention, as functions: softmax and Sinkhorn.

They take the shapes and the masks of :func:`espformer.esp_attention`.
"""

from functools import partial
from types import ModuleType

import torch.nn.functional as F
from torch import Tensor

from espformer.functional.arguments import (
    are_nested,
    check_scale,
    check_tokens,
    one_of,
    refuse_causal,
    runs_kernels,
    under_transforms,
)
from espformer.ops.common.masks import resolve_masks, zero_padding
from espformer.ops.common.operators import is_recorded
from espformer.ops.common.packing import attend_nested, refuse_masks
from espformer.ops.sinkhorn.torch import LEAST_EPSILON, sinkhorn_matrix, sinkhorn_output

__all__ = ["sinkhorn_attention", "sinkhorn_plan", "softmax_attention", "softmax_plan"]

SINKHORN_BACKENDS = ("auto", "torch", "triton")


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    r"""Softmax attention, :math:`\mathrm{softmax}(Q K^\top \cdot \text{scale})\, V`.

    :func:`torch.nn.functional.scaled_dot_product_attention` with the padding masks of this library.

    Args:
        query: ``(batch, heads, N, head_dim)``.
        key: ``(batch, heads, M, head_dim)``.
        value: ``(batch, heads, M, width)``.
        scale: factor on the scores; ``head_dim ** -0.5`` by default.
        dropout: probability of dropping an entry of the matrix.
        mask: for self-attention, boolean ``(batch, N)``, True = the token takes part.
        query_mask, key_mask: for cross-attention instead of `mask`, ``(batch, N)`` and ``(batch,
            M)``. If N = M, a key mask needs a query mask beside it.

    Returns:
        ``(batch, heads, N, width)``. Rows of masked queries, and of queries that have no key left,
        are zero.

    Example:
        >>> import torch
        >>> x = torch.randn(2, 4, 5, 8)
        >>> softmax_attention(x, x, x).shape
        torch.Size([2, 4, 5, 8])

    References:
        Vaswani et al., Attention is all you need, NeurIPS 2017.
    """
    check_tokens("softmax_attention", query=query, key=key, value=value)
    check_scale("softmax_attention", scale)
    query_mask, key_mask = resolve_masks(
        "softmax_attention", query, key, query_mask, key_mask, mask
    )
    pairs = None
    present = None if query_mask is None else query_mask.unsqueeze(-1)
    if key_mask is not None:
        # A softmax over no keys is undefined, and so is its gradient. So a query without keys
        # attends to all of them, and its row is set to zero afterwards.
        has_keys = key_mask.any(-1, keepdim=True)
        pairs = (key_mask | ~has_keys).unsqueeze(-2)
        present = has_keys.unsqueeze(-1) if present is None else present & has_keys.unsqueeze(-1)
    output = F.scaled_dot_product_attention(
        zero_padding(query, query_mask),
        zero_padding(key, key_mask),
        zero_padding(value, key_mask),
        attn_mask=pairs,
        dropout_p=dropout,
        scale=scale,
    )
    return output if present is None else output.masked_fill(~present, 0)


def softmax_plan(
    query: Tensor,
    key: Tensor,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """The attention matrix of :func:`softmax_attention`: only its rows sum to one.

    Args:
        query: ``(batch, heads, N, head_dim)``.
        key: ``(batch, heads, M, head_dim)``.
        scale, mask, query_mask, key_mask: as in :func:`softmax_attention`.

    Returns:
        ``(batch, heads, N, M)`` in the dtype of `query`.

    Example:
        >>> import torch
        >>> q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)
        >>> softmax_plan(q, k).sum(-1).allclose(torch.ones(1, 2, 3))
        True
    """
    check_tokens("softmax_plan", query=query, key=key)
    check_scale("softmax_plan", scale)
    query_mask, key_mask = resolve_masks("softmax_plan", query, key, query_mask, key_mask, mask)
    # Softmax is Sinkhorn's algorithm stopped after its first update.
    return sinkhorn_matrix(
        query,
        key,
        iterations=1,
        epsilon=1.0,
        scale=_default_scale(query, scale),
        query_mask=query_mask,
        key_mask=key_mask,
    ).to(query.dtype)


def sinkhorn_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    iterations: int = 3,
    epsilon: float = 1.0,
    scale: float | None = None,
    mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    backend: str = "auto",
    is_causal: bool = False,
) -> Tensor:
    r"""Doubly-stochastic attention by Sinkhorn's algorithm (Sinkformers).

    .. math:: \mathrm{out} = \mathrm{diag}(u)\, \exp(Q K^\top \cdot \text{scale} / \varepsilon)\,
              \mathrm{diag}(w)\, V,

    where u and w are updated in turns, in the log domain: u so that rows sum to one, then w so that
    columns sum to N/M.

    Args:
        query: ``(batch, heads, N, head_dim)``. Queries, keys and values may be jagged nested
            tensors of that shape; then so is the output.
        key: ``(batch, heads, M, head_dim)``.
        value: ``(batch, heads, M, width)``.
        iterations: number of updates, rows first; 0 and 1 are softmax attention. After an odd
            number the rows sum to one exactly, after an even number the columns to N/M.
        epsilon: ε, the entropic regularisation, at least 1e-20. Smaller values bring the plan
            closer to a permutation and need more iterations.
        scale: factor on the scores; ``head_dim ** -0.5`` by default.
        mask: for self-attention, boolean ``(batch, N)``, True = the token takes part.
        query_mask, key_mask: for cross-attention instead of `mask`, ``(batch, N)`` and ``(batch,
            M)``. If N = M, a key mask needs a query mask beside it.
        backend: ``"torch"`` (forms the matrix), ``"triton"`` (fused kernels for CUDA tensors that
            never form it: memory is linear in N) or ``"auto"``: triton on a GPU, otherwise torch.
            Cases that the kernels do not cover (float64, heads wider than 256) fall back to torch.
            Both backends differentiate through every update.
        is_causal: True is an error: a causal doubly-stochastic matrix is the identity.

    Returns:
        ``(batch, heads, N, width)``; rows of masked queries are zero.

    Example:
        >>> import torch
        >>> x = torch.randn(2, 4, 5, 8)
        >>> torch.allclose(sinkhorn_attention(x, x, x, iterations=1), softmax_attention(x, x, x),
        ...                atol=1e-6)
        True

    References:
        Sander, Ablin, Blondel, Peyré, Sinkformers: Transformers with doubly stochastic attention,
        AISTATS 2022.
    """
    refuse_causal("sinkhorn_attention", is_causal)
    if are_nested("sinkhorn_attention", query, key, value):
        refuse_masks("sinkhorn_attention", mask, query_mask, key_mask)
        attention = partial(
            sinkhorn_attention, iterations=iterations, epsilon=epsilon, scale=scale, backend=backend
        )
        return attend_nested("sinkhorn_attention", attention, query, key, value)
    check_tokens("sinkhorn_attention", query=query, key=key, value=value)
    check_sinkhorn("sinkhorn_attention", iterations, epsilon, scale)
    query_mask, key_mask = resolve_masks(
        "sinkhorn_attention", query, key, query_mask, key_mask, mask
    )
    one_of("sinkhorn_attention", "backend", backend, SINKHORN_BACKENDS)
    kernels = _kernels("sinkhorn_attention", backend, query, key, value)
    output = sinkhorn_output if kernels is None else kernels.output
    result: Tensor = output(
        query,
        key,
        value,
        iterations=iterations,
        epsilon=epsilon,
        scale=_default_scale(query, scale),
        query_mask=query_mask,
        key_mask=key_mask,
    )
    return result


def sinkhorn_plan(
    query: Tensor,
    key: Tensor,
    *,
    iterations: int = 3,
    epsilon: float = 1.0,
    scale: float | None = None,
    mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """The attention matrix of :func:`sinkhorn_attention`: in the limit, rows sum to one.

    Columns then sum to N/M.

    Args:
        query: ``(batch, heads, N, head_dim)``.
        key: ``(batch, heads, M, head_dim)``.
        iterations, epsilon, scale, mask, query_mask, key_mask, is_causal: as in
            :func:`sinkhorn_attention`.

    Returns:
        ``(batch, heads, N, M)`` in the dtype of `query`.

    Example:
        >>> import torch
        >>> x = torch.randn(1, 2, 5, 8)
        >>> sinkhorn_plan(x, x, iterations=100).sum(-2).allclose(torch.ones(1, 2, 5))
        True
    """
    check_tokens("sinkhorn_plan", query=query, key=key)
    refuse_causal("sinkhorn_plan", is_causal)
    check_sinkhorn("sinkhorn_plan", iterations, epsilon, scale)
    query_mask, key_mask = resolve_masks("sinkhorn_plan", query, key, query_mask, key_mask, mask)
    return sinkhorn_matrix(
        query,
        key,
        iterations=iterations,
        epsilon=epsilon,
        scale=_default_scale(query, scale),
        query_mask=query_mask,
        key_mask=key_mask,
    ).to(query.dtype)


def _kernels(
    name: str, backend: str, query: Tensor, key: Tensor, value: Tensor
) -> ModuleType | None:
    """The fused kernels, if they are requested or selected and support the problem."""
    on_gpu = query.device.type == "cuda"
    transformed = under_transforms(name, backend, "torch")
    if backend == "torch" or (backend == "auto" and (not on_gpu or transformed or is_recorded())):
        return None
    runs_kernels(name, query, key, value)
    try:
        from espformer.ops.sinkhorn import triton as sinkhorn
    except ImportError as error:
        if backend == "auto":
            return None
        raise ImportError(
            'backend="triton" needs triton >= 3.6 (pip install triton); backend="torch" does not'
        ) from error
    return sinkhorn if sinkhorn.supported(query, key, value) else None


def _default_scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def check_sinkhorn(name: str, iterations: int, epsilon: float, scale: float | None) -> None:
    check_scale(name, scale)
    if not isinstance(iterations, int) or iterations < 0:
        raise ValueError(
            f"{name}: iterations must be an integer >= 0, got {iterations!r} (0 and 1 are softmax "
            "attention)"
        )
    if isinstance(epsilon, str | bool) or not hasattr(epsilon, "__float__"):
        raise TypeError(f"{name}: epsilon must be a number, got {epsilon!r}")
    if not epsilon > 0:
        raise ValueError(
            f"{name}: epsilon must be > 0, got {epsilon} (a smaller epsilon is closer to a "
            "permutation; for an exact one use esp_attention with hard=True)"
        )
    if epsilon < LEAST_EPSILON:
        raise ValueError(
            f"{name}: epsilon must be at least {LEAST_EPSILON}, got {epsilon} (scores are divided "
            "by it and would overflow)"
        )
