"""Inputs for the tests of the operator, and comparisons of its outputs and gradients."""

from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from espformer import esp_attention

METRICS, BALANCES, UNITS = ("absolute", "squared"), ("rows", "both"), ("spread", "absolute")
COUPLINGS = ("quantile", "interpolate", "identity")
# Options with a way of their own through the operator.
VARIANTS: dict[str, dict[str, Any]] = {
    "rows": {},
    "both": {"balance": "both"},
    "squared": {"metric": "squared"},
    "hard": {"hard": True},
    "average": {"hard": True, "ties": "average"},
    "straight-through": {"straight_through": True},
}

# Linear against dense in float64: absolute for outputs, relative for gradients. The squared metric
# is a sum of exponentials, good to 3e-11, and its slope to 1e-9.
OUTPUT_TOLERANCE = {"absolute": 1e-10, "squared": 1e-7}
GRADIENT_TOLERANCE = {"absolute": 1e-8, "squared": 1e-6}


# Backends in linear time that run here, and the oracle.
LINEAR_TIME = ("linear", "cpu") if find_spec("numba") else ("linear",)
BACKENDS = (*LINEAR_TIME, "dense")


def tokens(
    *lead: int, n: int, m: int | None = None, head_dim: int = 4, width: int = 3
) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries ``(*lead, n, head_dim)``, keys and values ``(*lead, m, width)`` in float64."""
    m = n if m is None else m
    query = torch.randn(*lead, n, head_dim, dtype=torch.float64)
    key = torch.randn(*lead, m, head_dim, dtype=torch.float64)
    return query, key, torch.randn(*lead, m, width, dtype=torch.float64)


def some(*shape: int, share: float = 0.7) -> Tensor:
    """A random mask over tokens at any position; every sequence keeps one token at least."""
    mask = torch.rand(shape) < share
    mask[..., 0] |= ~mask.any(-1)
    return mask


def differentiate(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> dict[str, Tensor]:
    """The output of ``esp_attention`` and, by name, its gradients for a fixed upstream gradient.

    Gradients are those of query, key and value, and of slices, their logits and sort_temperature if
    they are tensors; no gradient counts as zero.
    """
    inputs = {"query": query, "key": key, "value": value}
    for name in ("slices", "slice_logits", "sort_temperature"):
        if isinstance(options.get(name), Tensor):
            inputs[name] = options.pop(name)
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    output = esp_attention(**leaves, **options)
    upstream = torch.sin(torch.arange(output.numel()) + 1.0).view_as(output).to(output.dtype)
    grads = torch.autograd.grad(output, list(leaves.values()), upstream, allow_unused=True)
    results = {"output": output.detach()}
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        results[name] = torch.zeros_like(leaf) if grad is None else grad
    return results


def assert_agree(
    actual: dict[str, Tensor],
    expected: dict[str, Tensor],
    *,
    output: float,
    gradients: float,
    floor: float = 1e-3,
    floor_of_temperature: float | None = None,
) -> None:
    """Outputs within ``output``; gradients within ``gradients`` times their largest entry.

    A gradient that is zero by construction (a sort that is all but hard, one token) has no scale
    of its own: ``floor`` is the smallest that is used, unless the temperature has one of its own.
    """
    floors = {"sort_temperature": floor if floor_of_temperature is None else floor_of_temperature}
    assert actual.keys() == expected.keys()
    for name, number in actual.items():
        reference = expected[name].double()
        assert number.shape == reference.shape, name
        if not number.numel():
            continue
        scale = float(reference.abs().max()) if name != "output" else 1.0
        least = floors.get(name, floor)
        bound = output if name == "output" else gradients * max(scale, least)
        error = float((number.double() - reference).abs().max())
        assert error <= bound, (
            f"{name}: off by {error:.2e}, allowed {bound:.2e} (scale {scale:.2e})"
        )


def assert_linear_is_dense(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> None:
    """The linear-time backend against Algorithm 1 as printed, outputs and all gradients."""
    assert_same(query, key, value, "linear", "dense", **options)


def assert_same(
    query: Tensor, key: Tensor, value: Tensor, backend: str, oracle: str, *,
    slack: float = 1.0, **options: Any,
) -> None:  # fmt: skip
    """One backend against another in float64, outputs and all gradients."""
    metric = options.get("metric", "absolute")
    # Forces between tokens are of the order 1/width: their rounding is, and where tokens tie, so
    # is a slope that is off by 2e-9 (squared). Times tokens they add up to the slices' gradients.
    t = float(torch.as_tensor(options.get("sort_temperature", 0.3)).min())
    if options.get("temperature_unit", "spread") == "spread" and metric == "squared":
        t = t**2
    floor = 1e-3 + (1e-6 / t if metric == "absolute" else 1e-2 / t**0.5)
    floor *= max(1.0, float(query.abs().max()), float(key.abs().max()))
    rounding = 0.0
    if options.get("temperature_unit", "spread") == "spread":
        # Points are divided by their spread, and so are forces. A quotient is off by a rounding of
        # itself, which moves a distance of x widths by that many widths, and x² by 2x times as
        # many, in either backend. Beyond x = 4 the Gaussian is small.
        sides = ((query, options.get("query_mask")), (key, options.get("key_mask")))
        least = min(1.0, *(_least_spread(x, mask, options.get("slices")) for x, mask in sides))
        largest = max(1.0, float(query.abs().max()), float(key.abs().max()))
        width = t if metric == "absolute" else t**0.5
        rounding = torch.finfo(torch.float64).eps * largest / (least * min(1.0, width))
        rounding *= 1.0 if metric == "absolute" else 16.0
        # Forces of order one may cancel, as those of a single key do. Their roundings do not.
        exact = GRADIENT_TOLERANCE[metric]
        floor = (exact * floor + rounding) / (exact + rounding) / least
    assert_agree(
        differentiate(query, key, value, backend=backend, **options),
        differentiate(query, key, value, backend=oracle, **options),
        output=slack * (OUTPUT_TOLERANCE[metric] + rounding),
        gradients=slack * (GRADIENT_TOLERANCE[metric] + rounding),
        floor=floor,
        # It is a sum of forces times points, over t: what cancels in it is as many times larger.
        floor_of_temperature=floor / min(1.0, t),
    )


def _least_spread(x: Tensor, mask: Tensor | None, slices: Tensor | None) -> float:
    """The smallest standard deviation of the points of a slice that is not zero."""
    points = x if slices is None else x @ slices.mT
    if mask is None:
        mask = torch.ones(x.shape[:-1])
    here = mask if mask.dim() == x.dim() - 1 else mask.unsqueeze(-2)
    here = (here / here.sum(-1, keepdim=True).clamp(min=1)).unsqueeze(-1)
    mean = (here * points).sum(-2, keepdim=True)
    spread = (here * (points - mean).square()).sum(-2).sqrt()
    return float(spread[spread > 1e-12].min()) if (spread > 1e-12).any() else 1.0


def sequence_by_sequence(
    attention: Any, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor
) -> Tensor:
    """The oracle of packed sequences, (tokens, heads, width): a loop over them."""
    parts = []
    for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        if b > a and d > c:
            one = (x.transpose(0, 1).unsqueeze(0) for x in (q[a:b], k[c:d], v[c:d]))
            parts.append(attention(*one)[0].transpose(0, 1))
        else:
            parts.append(v.new_zeros(b - a, *v.shape[1:]))
    return torch.cat(parts)


def cloud(kind: str, *shape: int) -> Tensor:
    """Tokens of one of the `KINDS` of clouds, in float64."""
    x = torch.randn(shape, dtype=torch.float64)
    return {
        "normal": lambda: x,
        "ties": lambda: x.round(),
        "one-point": lambda: torch.ones_like(x),
        "clusters": lambda: x.round() + 1e-4 * torch.randn_like(x),
        "narrow": lambda: 5 + 1e-6 * x,
        "wide": lambda: 100 * x,
        "heavy": lambda: x**3,
        "far": lambda: x + 1e3,
    }[kind]()


KINDS = ("normal", "ties", "one-point", "clusters", "narrow", "wide", "heavy", "far")
