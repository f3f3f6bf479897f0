r"""Sinkhorn attention: scores scaled to given marginals, in the log domain.

With scores :math:`C_{ij} = \langle q_i, k_j \rangle \cdot \text{scale} / \varepsilon` the method
looks for potentials f, g such that :math:`P_{ij} = e^{C_{ij} + f_i + g_j}` has row sums 1/N and
column sums 1/M. From :math:`g^0 = 0` it alternates

.. math::
    f^{l+1} &= \log(1/N) - \log \textstyle\sum_j e^{C_{ij} + g^l_j} && l \text{ even,} \\
    g^{l+1} &= \log(1/M) - \log \textstyle\sum_i e^{C_{ij} + f^l_i} && l \text{ odd,}

(Shahbazi et al. 2025, appendix B; Sander et al. 2022), and the attention matrix is
:math:`A = N P`: rows sum to one, columns to N/M.

Two remarks make this short. The constants log(1/N) and log(1/M) only shift a potential, which the
next update undoes, so they are left out until the end. And exp(C + f + g) right after an update of
f is the row softmax of C + g (after one of g, the column softmax of C + f), so the last update and
the exponential are one softmax.

References:
    Sinkhorn, A relationship between arbitrary positive matrices and doubly stochastic matrices,
    1964. Cuturi, Sinkhorn distances, NeurIPS 2013. Sander, Ablin, Blondel, Peyré, Sinkformers:
    Transformers with doubly stochastic attention, AISTATS 2022. Shahbazi et al., ESPFormer, ICML
    2025.
"""

import torch
from torch import Tensor

from espformer.ops.common.masks import zero_padding
from espformer.ops.common.operators import without_autocast

__all__ = ["LEAST_EPSILON", "sinkhorn_matrix", "sinkhorn_normalize", "sinkhorn_output"]

# Potential of a masked token. It is finite, so that an empty sequence gives finite numbers (which
# are discarded) instead of inf - inf, and so low that its exponential is exactly zero.
_ABSENT = -1e30

# Scores are divided by epsilon. With this one they stay far above the potential of a masked token,
# and within float32, for tokens whose products are below 1e9. Smaller ones would gain nothing: the
# rounding of products near one is 1e13 epsilon already.
LEAST_EPSILON = 1e-20


def sinkhorn_normalize(
    scores: Tensor,
    *,
    iterations: int,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Attention matrix of Sinkhorn's algorithm after `iterations` updates, from its scores.

    `iterations` counts updates of one potential, as the paper and Sinkformers do: 1 normalises the
    rows (softmax attention), 2 the rows then the columns, 3 the rows once more. After an odd number
    the rows sum to one exactly and the columns to about N/M; after an even number it is the columns
    that are exact. 0 is the paper's S⁰, "classic self-attention": the same as 1.

    Lengths are those of each sequence: N and M count the tokens that take part. Rows of masked
    queries and columns of masked keys are zero.

    Args:
        scores: ``(..., N, M)``, float32 or float64.
        iterations: number of updates, at least 0.
        query_mask: boolean, broadcastable to ``(..., N)``, True = takes part.
        key_mask: boolean, broadcastable to ``(..., M)``, True = takes part.

    Returns:
        The attention matrix, ``(..., N, M)``.

    Example:
        >>> import torch
        >>> scores = torch.tensor([[1.0, 0.0], [3.0, 1.0]])
        >>> torch.equal(sinkhorn_normalize(scores, iterations=1), scores.softmax(-1))
        True
        >>> sinkhorn_normalize(scores, iterations=100).sum(-2)
        tensor([1., 1.])
    """
    queries = None if query_mask is None else query_mask.unsqueeze(-1)  # (..., N, 1)
    keys = None if key_mask is None else key_mask.unsqueeze(-2)  # (..., 1, M)
    updates = max(iterations, 1)

    logits = scores if keys is None else scores.masked_fill(~keys, _ABSENT)
    for update in range(1, updates):
        rows = update % 2 == 1
        potential = -logits.logsumexp(-1 if rows else -2, keepdim=True)
        present = queries if rows else keys
        if present is not None:
            potential = potential.masked_fill(~present, _ABSENT)
        logits = scores + potential

    if updates % 2 == 1:
        matrix = logits.softmax(-1)
    else:
        rows_over_columns = _length(queries, scores, -2) / _length(keys, scores, -1)
        matrix = logits.softmax(-2) * rows_over_columns

    present = queries if keys is None else keys if queries is None else queries & keys
    return matrix if present is None else matrix.masked_fill(~present, 0)


def sinkhorn_matrix(
    query: Tensor,
    key: Tensor,
    *,
    iterations: int,
    epsilon: float,
    scale: float,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Attention matrix of Sinkhorn attention, see :func:`sinkhorn_normalize`.

    Args:
        query: ``(..., N, head_dim)``.
        key: ``(..., M, head_dim)``.
        iterations: number of alternating updates.
        epsilon: entropic regularisation; the scores are ``query @ keyᵀ * scale / epsilon``.
        scale: factor on the scores, usually ``head_dim ** -0.5``.
        query_mask: boolean, broadcastable to ``(..., N)``, True = takes part.
        key_mask: boolean, broadcastable to ``(..., M)``, True = takes part.

    Returns:
        ``(..., N, M)`` in float32, or in float64 for float64 inputs: 16-bit scores would be rounded
        by more than one between neighbours at a small `epsilon`.

    Example:
        >>> import torch
        >>> x = torch.randn(2, 4, 5, 8)
        >>> sinkhorn_matrix(x, x, iterations=3, epsilon=1.0, scale=8 ** -0.5).shape
        torch.Size([2, 4, 5, 5])
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    with without_autocast(query.device):
        query = zero_padding(query, query_mask).to(dtype) * (scale / epsilon)
        key = zero_padding(key, key_mask).to(dtype)
        return sinkhorn_normalize(
            query @ key.mT, iterations=iterations, query_mask=query_mask, key_mask=key_mask
        )


def sinkhorn_output(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    iterations: int,
    epsilon: float,
    scale: float,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Output of Sinkhorn attention: :func:`sinkhorn_matrix` times `value`.

    Args:
        query: ``(..., N, head_dim)``.
        key: ``(..., M, head_dim)``.
        value: ``(..., M, width)``.
        iterations, epsilon, scale, query_mask, key_mask: as in :func:`sinkhorn_matrix`.

    Returns:
        ``(..., N, width)`` in the dtype of `value`; rows of masked queries are zero.
    """
    matrix = sinkhorn_matrix(
        query,
        key,
        iterations=iterations,
        epsilon=epsilon,
        scale=scale,
        query_mask=query_mask,
        key_mask=key_mask,
    )
    with without_autocast(query.device):
        return matrix.to(value.dtype) @ zero_padding(value, key_mask)


def _length(present: Tensor | None, scores: Tensor, dim: int) -> Tensor:
    """The number of tokens that take part along `dim`, at least 1; ``(..., 1, 1)``."""
    if present is None:
        return scores.new_full((1, 1), scores.shape[dim])
    return present.sum(dim, keepdim=True).clamp(min=1).to(scores.dtype)
