r"""Slices of a converted head, chosen from what its queries and keys do.

Softmax attention knows queries and keys by their products alone, which do not change when both are
rotated: the axes of a head that was trained with it mean nothing. With covariances
:math:`C_q = R_q R_q^\top` and :math:`C_k = R_k R_k^\top` of the queries and keys of real tokens,
and :math:`R_q^\top R_k = P\,\mathrm{diag}(s)\,Q^\top`, the centred scores are

.. math:: (q - \bar q) \cdot (k - \bar k) = \sum_l s_l\, a_l\, b_l, \qquad
   a = P^\top R_q^{-1} (q - \bar q), \quad b = Q^\top R_k^{-1} (k - \bar k),

where every coordinate of a and b has variance one. So coordinate l contributes the share
:math:`s_l^2 / \sum s^2` of the variance of the scores, and queries and keys are scaled alike along
it. These coordinates, the largest first, become the axes of the head: the maps are linear, so they
are multiplied into the projections.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from espformer.nn import ESP, Attention

__all__ = ["Projections", "align", "find_projections", "singular_axes"]

# What modules call the projections of their queries and keys.
_PAIRS = (
    ("query", "key"),
    ("q_proj", "k_proj"),
    ("q_lin", "k_lin"),
    ("linear_q", "linear_k"),
    ("q", "k"),
)
_LEAST = 1e-6  # share of the largest variance that a direction needs to be one


class Projections(NamedTuple):
    """Views of a module's projections, ``(heads * head_dim, width)``, and of their biases."""

    query: Tensor
    key: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None


def find_projections(module: nn.Module) -> Projections | None:
    """The projections of queries and keys, None where they are not found."""
    if isinstance(module, nn.MultiheadAttention):
        if module.in_proj_weight is None:
            query, key = module.q_proj_weight, module.k_proj_weight
        else:
            query, key = module.in_proj_weight.chunk(3)[:2]
        bias = (None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)[:2]
        return Projections(query, key, *bias)
    fused = getattr(module, "qkv", None)
    if isinstance(fused, nn.Linear):
        bias = (None, None) if fused.bias is None else fused.bias.chunk(3)[:2]
        return Projections(*fused.weight.chunk(3)[:2], *bias)
    for names in _PAIRS:
        first, second = (getattr(module, name, None) for name in names)
        if isinstance(first, nn.Linear) and isinstance(second, nn.Linear):
            return Projections(first.weight, second.weight, first.bias, second.bias)
    return None


def singular_axes(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The map of the formula above, for each head.

    Args:
        query: ``(heads, tokens, head_dim)``, of real tokens.
        key: the same for keys.

    Returns:
        ``(heads, head_dim, head_dim)`` for queries and keys, a = query_map @ (q - query_mean); the
        means ``(heads, head_dim)``; and the singular values, in descending order.
    """
    query, key = query.double(), key.double()
    query_mean, key_mean = query.mean(1), key.mean(1)
    query_root, query_inverse = _root(query - query_mean[:, None])
    key_root, key_inverse = _root(key - key_mean[:, None])
    left, values, right = torch.linalg.svd(query_root.mT @ key_root)
    return left.mT @ query_inverse, right @ key_inverse, query_mean, key_mean, values


def _root(centred: Tensor) -> tuple[Tensor, Tensor]:
    """R with C = R Rᵀ, and its inverse; directions in which nothing varies are left alone."""
    variances, axes = torch.linalg.eigh(centred.mT @ centred / centred.shape[1])
    floor = _LEAST * variances.amax(-1, keepdim=True)
    roots = variances.clamp_min(floor.clamp_min(torch.finfo(variances.dtype).tiny)).sqrt()
    return axes * roots.unsqueeze(-2), (axes / roots.unsqueeze(-2)).mT


@torch.no_grad()
def align(module: nn.Module, mechanism: ESP, query: Tensor, key: Tensor) -> bool:
    """Let the axes of a module's heads be the coordinates of the formula; False if they cannot.

    Args:
        module: the converted attention module.
        mechanism: its mechanism, which sorts along axes.
        query: what the module gives to its mechanism, ``(heads, tokens, head_dim)``.
        key: the same for keys.
    """
    projections = find_projections(module)
    if projections is None or not _plain(module, query, key, projections):
        return False
    query_map, key_map, query_mean, key_mean, values = singular_axes(query, key)
    heads, width = query.shape[0], query.shape[-1]
    # Mechanisms multiply by their scale, which is made for coordinates of this size.
    factor = 1 / (width**-0.5 if mechanism.scale is None else cast(float, mechanism.scale))
    for weight, bias, linear, mean in (
        (projections.query, projections.query_bias, query_map, query_mean),
        (projections.key, projections.key_bias, key_map, key_mean),
    ):
        linear = (factor * linear).to(weight)
        rows = weight.unflatten(0, (heads, width))
        rows.copy_(linear @ rows)
        if bias is not None:
            bias_rows = bias.unflatten(0, (heads, width))
            bias_rows.copy_((linear @ (bias_rows - mean.to(bias)).unsqueeze(-1)).squeeze(-1))
    if mechanism.slice_logits is not None:
        shares = values.square() / values.square().sum(-1, keepdim=True)
        count = mechanism.slice_logits.shape[-1]
        mechanism.slice_logits.copy_(shares[:, :count].clamp_min(_LEAST).log())
    return True


def _plain(module: Any, query: Tensor, key: Tensor, projections: Projections) -> bool:
    """Whether queries and keys are what the projections give, one head after the other.

    Rotations by position, norms of queries and keys and heads in groups stand between.
    """
    between = any(
        not isinstance(getattr(module, name, None), nn.Identity | None)
        for name in ("q_norm", "k_norm", "query_norm", "key_norm", "q_layernorm", "k_layernorm")
    )
    shapes = query.shape[0] * query.shape[-1] == len(projections.query) == len(projections.key)
    known = isinstance(module, nn.MultiheadAttention | Attention) or hasattr(module, "qkv")
    return shapes and not between and (known or not _has_positions(module))


def _has_positions(module: nn.Module) -> bool:
    """Whether the forward of a module turns its queries and keys by their positions."""
    original = getattr(type(module), "original", type(module))
    code = getattr(original.forward, "__code__", None)
    names = set(getattr(code, "co_names", ())) | set(getattr(code, "co_varnames", ()))
    return any("rotary" in name or "rope" in name for name in names)
