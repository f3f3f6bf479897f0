r"""Slices of a converted head, chosen from the distribution of its queries and keys.

Softmax attention depends only on inner products of queries and keys, which do not change if both
are rotated. So the axes of a head that was trained with softmax are arbitrary. With covariances
:math:`C_q = R_q R_q^\top` and :math:`C_k = R_k R_k^\top` of the queries and keys of real tokens,
and :math:`R_q^\top R_k = P\,\mathrm{diag}(s)\,Q^\top`, the centred scores are

.. math:: (q - \bar q) \cdot (k - \bar k) = \sum_l s_l\, a_l\, b_l, \qquad
   a = P^\top R_q^{-1} (q - \bar q), \quad b = Q^\top R_k^{-1} (k - \bar k),

where every coordinate of a and b has variance one. So coordinate l contributes the share
:math:`s_l^2 / \sum s^2` of the variance of the scores, and queries and keys are scaled alike along
it. These coordinates, the largest first, become the axes of the head: the maps are linear, so they
are multiplied into the projections.

What remains is fitted to the outputs :math:`O` of softmax, head by head. With the plans
:math:`P_l(t)` of the slices at a temperature t,

.. math:: O \approx \Bigl(\sum_l \sigma_l\, P_l(t)\, V\Bigr) M + 1 c^\top :

weights :math:`\sigma \ge 0` of the slices by non-negative least squares, the map M and the offset c
by ridge regression towards the identity, t as the best of a few. M and c are multiplied into the
projection of the values. The offset models tokens that take the same weight in every row of
softmax, such as a separator: a matrix whose columns sum to one cannot give a token more than its
share.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from espformer.functional import esp_attention
from espformer.nn import ESP, Attention
from espformer.ops.esp.options import OPTIONS

__all__ = ["Call", "Projections", "find_projections", "fit_slices", "singular_axes"]

# What modules call the projections of their queries, keys and values.
_NAMES = (
    ("query", "key", "value"),
    ("q_proj", "k_proj", "v_proj"),
    ("q_lin", "k_lin", "v_lin"),
    ("linear_q", "linear_k", "linear_v"),
    ("q", "k", "v"),
)
_LEAST = 1e-6  # directions with less than this share of the largest variance are ignored
_TEMPERATURES = (0.05, 0.15, 0.4, 1.0)  # in units of the spread of what is sorted
_RIDGE = 1e-2  # of the mean variance of a feature


class Call(NamedTuple):
    """One call of a softmax mechanism.

    Attributes:
        query, key, value: ``(batch, heads, tokens, head_dim)``.
        output: what it gave.
        mask: ``(batch, tokens)``, which tokens took part, None if all.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    mask: Tensor | None

    def tokens(self, x: Tensor) -> Tensor:
        """``(heads, tokens, head_dim)`` of all sequences, without padding."""
        x = x.transpose(0, 1)
        return x.flatten(1, 2) if self.mask is None else x[:, self.mask]


class Projections(NamedTuple):
    """Views of a module's projections, ``(heads * head_dim, width)``, and of their biases."""

    query: Tensor
    key: Tensor
    value: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None
    value_bias: Tensor | None


def find_projections(module: nn.Module) -> Projections | None:
    """The projections of queries, keys and values, None where they are not found."""
    if isinstance(module, nn.MultiheadAttention):
        weights = (
            (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
            if module.in_proj_weight is None
            else module.in_proj_weight.chunk(3)
        )
        bias = module.in_proj_bias
        return Projections(*weights, *((None,) * 3 if bias is None else bias.chunk(3)))
    fused = getattr(module, "qkv", None)
    if isinstance(fused, nn.Linear):
        bias = fused.bias
        return Projections(
            *fused.weight.chunk(3), *((None,) * 3 if bias is None else bias.chunk(3))
        )
    for names in _NAMES:
        found = [getattr(module, name, None) for name in names]
        if all(isinstance(part, nn.Linear) for part in found):
            linear = cast(list[nn.Linear], found)
            return Projections(*(part.weight for part in linear), *(part.bias for part in linear))
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
    """R with C = R Rᵀ, and its inverse; directions without variance are not scaled."""
    variances, axes = torch.linalg.eigh(centred.mT @ centred / centred.shape[1])
    floor = _LEAST * variances.amax(-1, keepdim=True)
    roots = variances.clamp_min(floor.clamp_min(torch.finfo(variances.dtype).tiny)).sqrt()
    return axes * roots.unsqueeze(-2), (axes / roots.unsqueeze(-2)).mT


@torch.no_grad()
def fit_slices(module: nn.Module, mechanism: ESP, calls: list[Call]) -> bool:
    """Fit the slices, slice weights, temperatures and value projection of a module; False if this
    is not possible.

    Args:
        module: the converted attention module.
        mechanism: its mechanism, which sorts along axes.
        calls: what softmax got and gave in its place, with the weights that it has.
    """
    projections = find_projections(module)
    basis = _basis(mechanism)
    query = torch.cat([call.tokens(call.query) for call in calls], 1)
    key = torch.cat([call.tokens(call.key) for call in calls], 1)
    if projections is None or basis is None or not _plain(module, query, projections):
        return False
    heads, width = query.shape[0], query.shape[-1]
    query_map, key_map, query_mean, key_mean, _ = singular_axes(query, key)
    # Mechanisms multiply by their scale, so the coordinates are divided by it.
    factor = 1 / (width**-0.5 if mechanism.scale is None else cast(float, mechanism.scale))
    query_map, key_map = factor * query_map, factor * key_map
    for weight, bias, linear, mean in (
        (projections.query, projections.query_bias, query_map, query_mean),
        (projections.key, projections.key_bias, key_map, key_mean),
    ):
        # The coordinates are placed along the directions of the mechanism, which are orthonormal.
        placed = basis.to(linear).mT @ linear
        _multiply(weight, bias, placed, -(placed @ mean.unsqueeze(-1)).squeeze(-1))
    directions = None if mechanism.slicer is None else mechanism.slicer()
    count = width if directions is None else directions.shape[-2]
    turned = [
        call._replace(
            query=_apply(call.query, query_map, query_mean)[..., :count],
            key=_apply(call.key, key_map, key_mean)[..., :count],
        )
        for call in calls
    ]
    wanted = torch.cat([call.tokens(call.output) for call in calls], 1).double()
    best: list[Tensor] = []
    # A mechanism that sorts exactly, or in other units, keeps its temperature.
    fixed = mechanism.hard or mechanism.temperature_unit != "spread"
    for temperature in (None,) if fixed else _TEMPERATURES:
        given = _slice_outputs(mechanism, turned, temperature)
        if mechanism.slice_logits is not None:
            weights = _slice_weights(given, wanted)
        else:
            weights = wanted.new_full((heads, count), 1 / count)
        mixed = torch.einsum("hl,hltd->htd", weights.to(given), given).double()
        linear, offset = _ridge(mixed, wanted, projections.value_bias is not None)
        error = (mixed @ linear + offset.unsqueeze(1) - wanted).square().sum((1, 2))
        found = [weights, linear, offset, error, torch.full_like(error, temperature or 0)]
        if best and mechanism.log_sort_temperature is None:
            better = (error.sum() < best[3].sum()).expand(heads)
        else:
            better = error < best[3] if best else torch.ones_like(error, dtype=torch.bool)
        best = [
            new if not best else torch.where(better.view(-1, *[1] * (new.dim() - 1)), new, old)
            for new, old in zip(found, best or found, strict=True)
        ]
    weights, linear, offset, _, temperatures = best
    if mechanism.slice_logits is not None:
        mechanism.slice_logits.copy_(weights.clamp_min(1e-3).log())
    if not fixed:
        if mechanism.log_sort_temperature is not None:
            mechanism.log_sort_temperature.copy_(temperatures.log())
        else:
            mechanism.sort_temperature = float(temperatures[0])
    _multiply(projections.value, projections.value_bias, linear.mT, offset)
    return True


def _basis(mechanism: ESP) -> Tensor | None:
    """An orthonormal basis that begins with the directions of a mechanism; None if they are not."""
    assert mechanism.slicer is not None
    assert mechanism.head_dim is not None
    directions = mechanism.slicer()
    if directions is None:
        return torch.eye(mechanism.head_dim)
    directions = directions.detach()
    count = directions.shape[-2]
    identity = torch.eye(count).to(directions)
    if count > mechanism.head_dim or (directions @ directions.mT - identity).abs().max() > 1e-3:
        return None
    complete = torch.linalg.qr(directions.mT, mode="complete").Q.mT.clone()
    complete[..., :count, :] = directions
    return complete


def _multiply(weight: Tensor, bias: Tensor | None, linear: Tensor, offset: Tensor) -> None:
    """Change a projection such that it gives ``linear @ x + offset`` in each head instead of x."""
    heads, width = linear.shape[:2]
    rows = weight.unflatten(0, (heads, width))
    rows.copy_(linear.to(weight) @ rows)
    if bias is not None:
        part = bias.unflatten(0, (heads, width))
        part.copy_((linear.to(bias) @ part.unsqueeze(-1)).squeeze(-1) + offset.to(bias))


def _apply(x: Tensor, linear: Tensor, mean: Tensor) -> Tensor:
    return (x - mean.to(x).unsqueeze(-2)) @ linear.to(x).mT


def _slice_outputs(mechanism: ESP, calls: list[Call], temperature: float | None) -> Tensor:
    """The output of each slice alone, ``(heads, slices, tokens, head_dim)``."""
    outputs = []
    for call in calls:
        count = call.query.shape[-1]
        # Treat every slice as a head of width one.
        query, key = (x.transpose(2, 3).flatten(1, 2).unsqueeze(-1) for x in (call.query, call.key))
        value = call.value.repeat_interleave(count, dim=1)
        options = {name: getattr(mechanism.options, name) for name in OPTIONS}
        options |= {"inverse_temperature": 0.0, "scale": 1.0, "slice_dropout": 0.0}
        options["sort_temperature"] = (
            options["sort_temperature"] if temperature is None else temperature
        )
        output = esp_attention(query, key, value, mask=call.mask, **options)
        tokens = call.tokens(output)
        outputs.append(tokens.unflatten(0, (-1, count)))
    return torch.cat(outputs, 2)


def _slice_weights(given: Tensor, wanted: Tensor) -> Tensor:
    """Weights of slices that sum to one, by non-negative least squares on what varies."""
    features = (given - given.mean(2, keepdim=True)).flatten(2).double()
    target = (wanted - wanted.mean(1, keepdim=True)).flatten(1)
    gram = features @ features.mT
    moments = (features @ target.unsqueeze(-1)).squeeze(-1)
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    gram = gram + torch.diag_embed(1e-4 * diagonal.mean(-1, keepdim=True).expand_as(diagonal))
    weights = torch.full_like(moments, 1 / moments.shape[-1])
    for _ in range(100):  # coordinate descent
        for index in range(moments.shape[-1]):
            slope = moments[:, index] - (gram[:, index] * weights).sum(-1)
            step = slope / gram[:, index, index].clamp_min(torch.finfo(gram.dtype).tiny)
            weights[:, index] = (weights[:, index] + step).clamp_min(0)
    total = weights.sum(-1, keepdim=True)
    equal = torch.full_like(weights, 1 / weights.shape[-1])
    return torch.where(total > 0, weights / total.clamp_min(torch.finfo(gram.dtype).tiny), equal)


def _ridge(features: Tensor, wanted: Tensor, offset: bool) -> tuple[Tensor, Tensor]:
    """Ridge regression per head: M near the identity and c such that ``features @ M + c`` is near
    the target.
    """
    feature_mean, wanted_mean = features.mean(1, keepdim=True), wanted.mean(1, keepdim=True)
    if not offset:
        feature_mean, wanted_mean = torch.zeros_like(feature_mean), torch.zeros_like(wanted_mean)
    centred = features - feature_mean
    gram = centred.mT @ centred
    penalty = _RIDGE * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    linear = torch.linalg.solve(
        gram + penalty * identity, centred.mT @ (wanted - wanted_mean) + penalty * identity
    )
    return linear, (wanted_mean - feature_mean @ linear).squeeze(1)


def _plain(module: Any, query: Tensor, projections: Projections) -> bool:
    """Whether queries and keys are what the projections give, one head after the other.

    False if there are rotary positions, norms of queries and keys, or grouped heads in between.
    """
    between = any(
        not isinstance(getattr(module, name, None), nn.Identity | None)
        for name in ("q_norm", "k_norm", "query_norm", "key_norm", "q_layernorm", "k_layernorm")
    )
    width = query.shape[0] * query.shape[-1]
    shapes = all(len(weight) == width for weight in projections[:3])
    known = isinstance(module, nn.MultiheadAttention | Attention) or hasattr(module, "qkv")
    return shapes and not between and (known or not _has_positions(module))


def _has_positions(module: nn.Module) -> bool:
    """Whether the forward of a module turns its queries and keys by their positions."""
    original = getattr(type(module), "original", type(module))
    code = getattr(original.forward, "__code__", None)
    names = set(getattr(code, "co_names", ())) | set(getattr(code, "co_varnames", ()))
    return any("rotary" in name or "rope" in name for name in names)
