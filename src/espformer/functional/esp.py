"""ESP attention and its matrix: arguments are checked, a backend is picked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from espformer.functional.arguments import (
    flat,
    make_problem,
    one_of,
    runs_kernels,
    under_transforms,
)
from espformer.ops.common.masks import zero_padding
from espformer.ops.esp import linear, reference
from espformer.ops.esp.problem import Problem

BACKENDS = ("auto", "dense", "linear", "triton")


def esp_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    sort_temperature: float | Tensor = 0.1,
    inverse_temperature: float = 0.1,
    metric: str = "absolute",
    balance: str = "rows",
    hard: bool = False,
    straight_through: bool | float = False,
    ties: str = "stable",
    coupling: str = "quantile",
    slices: Tensor | None = None,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    slice_dropout: float = 0.0,
    backend: str = "auto",
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    r"""Doubly-stochastic attention through Expected Sliced Transport Plans, in linear time.

    Queries and keys are projected on L slices :math:`\theta_l` and (softly) sorted on each. Equal
    ranks meet, which gives a transport plan per slice, and the plans are averaged with weights
    that favour cheap ones:

    .. math::

        A_l[n, i] &= \mathrm{softmax}_i\bigl(-\mathrm{dist}(\mathrm{sort}(Q\theta_l)_n,
                     (Q\theta_l)_i) / t\bigr), \qquad B_l \text{ likewise from the keys},\\
        U_l &= \tfrac1N A_l^\top B_l, \qquad D_l = \sum_{ij} \|q_i - k_j\|^2 U_l[i, j],\\
        \mathrm{out} &= N \sum_l \mathrm{softmax}(-\tau D)_l \, U_l V.

    Time is O(L N (log N + d + m)) and memory O(L N) beyond inputs and outputs; no N×N matrix is
    made, forwards or backwards. Inputs of 16 bits are computed in float32; on a GPU their rows are
    multiplied as they are, and added up in float32.

    Args:
        query: ``(batch, heads, N, m)``.
        key: ``(batch, heads, M, m)``.
        value: ``(batch, heads, M, d)``.
        sort_temperature: t > 0, how soft the sort is: a number, or a tensor that broadcasts to
            ``(batch, heads)``, for instance ``(heads,)``; gradients flow to it.
        inverse_temperature: τ ≥ 0, how much cheap slices are preferred; 0 is the plain mean.
        metric: ``"absolute"``, ``dist = |x - y|`` (exact in linear time), or ``"squared"``, the
            paper's: a sum of a few exponentials, within 2e-7 in float32 and 3e-11 in float64 of
            every pair's kernel. For a token far from nearly all others these errors add up, to
            attention that is slightly negative: 3e-8 N in all at most, in float32. The kernels for
            16-bit inputs have fewer exponentials: 1.5e-5, and 2.1e-6 N in all.
        balance: ``"rows"``, the paper: soft attention is only roughly doubly stochastic.
            ``"both"``: every soft sort is scaled to be doubly stochastic, and so is the attention,
            at every temperature: sums are off by about 1e-6, at worst by 1e-4 (up to 65,536
            tokens).
        hard: sort exactly, without a gradient through the sort: exactly doubly stochastic where
            N = M or with the quantile coupling.
        straight_through: True: the output of the hard operator with the gradient of the soft one.
            A number in [0, 1] is the share of the hard output in a mix. Without effect if `hard`.
        ties: for hard sorting, ``"stable"`` (earlier tokens first) or ``"average"``, the lifted
            plan, which shares mass equally among tied tokens.
        coupling: for N ≠ M, ``"quantile"`` (exact marginals), ``"interpolate"`` or ``"identity"``
            (the paper's).
        slices: Θ, ``(L, m)`` or ``(heads, L, m)``, rows of unit norm; None is the m axes.
        query_mask: ``(batch, N)``, True = takes part. Padded queries get zeros.
        key_mask: ``(batch, M)``; alone it also masks the queries if N = M. Every sequence is a
            measure of its own: a padded batch gives what each sequence alone gives.
        scale: multiplies queries and keys; default ``m ** -0.5``.
        slice_dropout: the probability to leave out a slice; the weights of the others are
            renormalised and at least one stays.
        backend: ``"linear"`` (plain torch), ``"triton"`` (fused kernels for CUDA tensors),
            ``"dense"`` (Algorithm 1 as printed: O(L N²), for checks) or ``"auto"``: triton on a
            GPU, else linear. What the kernels do not cover (float64; heads wider than 256; hard
            sorting with averaged ties or N ≠ M; the interpolated coupling) is computed by
            ``"linear"`` there too. Under ``torch.func`` (grad, vmap, jvp) it is dense: the others
            have hand-written gradients that transforms cannot look into. Under ``torch.compile``
            large problems, and lengths that vary, are one operator that is not looked into.
        attn_mask: only for calls written for ``scaled_dot_product_attention``: a boolean padding
            mask over keys, ``(batch, 1, 1, M)``. Anything else is refused.
        is_causal: refused: a causal doubly-stochastic matrix is the identity.

    Returns:
        ``(batch, heads, N, d)`` in the dtype of `value`.

    Example:
        >>> import torch, espformer
        >>> q, k, v = torch.randn(3, 2, 4, 10, 8).unbind()
        >>> espformer.esp_attention(q, k, v).shape
        torch.Size([2, 4, 10, 8])
        >>> ones = torch.ones(2, 4, 10, 1)  # row sums: exact when hard
        >>> bool((espformer.esp_attention(q, k, ones, hard=True) - 1).abs().max() < 1e-6)
        True

    References:
        [1] Shahbazi et al., *ESPFormer: Doubly-Stochastic Attention with Expected Sliced Transport
        Plans*, ICML 2025. [2] Liu et al., *Expected Sliced Transport Plans*, ICLR 2025.
        [3] Prillo & Eisenschlos, *SoftSort*, ICML 2020.
    """
    name = "esp_attention"
    problem, lead = make_problem(
        name, query, key, value,
        sort_temperature=sort_temperature, inverse_temperature=inverse_temperature, metric=metric,
        balance=balance, hard=hard, ties=ties, coupling=coupling, slices=slices,
        query_mask=query_mask, key_mask=key_mask, scale=scale, slice_dropout=slice_dropout,
        attn_mask=attn_mask, is_causal=is_causal,
    )  # fmt: skip
    with _without_autocast(query.device):
        rows = zero_padding(flat(value, lead), problem.key_mask)
        module = _backend(name, backend, query, key, value)
        out = _run(name, module, problem, straight_through, lambda b, p: b.attend(p, rows))
    return out.to(value.dtype).view(*lead, *out.shape[-2:])


def esp_plan(
    query: Tensor,
    key: Tensor,
    *,
    sort_temperature: float | Tensor = 0.1,
    inverse_temperature: float = 0.1,
    metric: str = "absolute",
    balance: str = "rows",
    hard: bool = False,
    straight_through: bool | float = False,
    ties: str = "stable",
    coupling: str = "quantile",
    slices: Tensor | None = None,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    slice_dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """The attention matrix of :func:`esp_attention`, ``N · G``: for looking at, not for speed.

    It is made by the same operator: ``esp_plan(q, k) @ v`` is ``esp_attention(q, k, v)``. Rows sum
    to one and columns to N/M when `hard` or balanced, if N = M or with the quantile coupling.
    Arguments are those of :func:`esp_attention`.

    Returns:
        ``(batch, heads, N, M)`` in the dtype of `query`.

    Example:
        >>> import torch, espformer
        >>> q, k = torch.randn(2, 1, 1, 5, 3).unbind()
        >>> plan = espformer.esp_plan(q, k, hard=True, inverse_temperature=0.0)
        >>> bool((plan.sum(-1) - 1).abs().max() < 1e-6), bool((plan.sum(-2) - 1).abs().max() < 1e-6)
        (True, True)
    """
    name = "esp_plan"
    problem, lead = make_problem(
        name, query, key, None,
        sort_temperature=sort_temperature, inverse_temperature=inverse_temperature, metric=metric,
        balance=balance, hard=hard, ties=ties, coupling=coupling, slices=slices,
        query_mask=query_mask, key_mask=key_mask, scale=scale, slice_dropout=slice_dropout,
    )  # fmt: skip
    with _without_autocast(query.device):
        module = _backend(name, backend, query, key)
        plan = _run(name, module, problem, straight_through, lambda b, p: b.plan(p))
    return plan.to(query.dtype).view(*lead, *plan.shape[-2:])


def _run(
    name: str, module: ModuleType, problem: Problem, straight_through: bool | float,
    compute: Callable[[Any, Problem], Tensor],
) -> Tensor:  # fmt: skip
    """The soft operator, the hard one, or a mix with the soft one's gradient."""
    share = float(straight_through)
    if not 0 <= share <= 1:
        raise ValueError(
            f"{name}: straight_through must be True, False or the share of the hard output in "
            f"[0, 1], got {straight_through}"
        )
    out = compute(module, problem)
    if share and not problem.hard:
        with torch.no_grad():
            hard = compute(module, replace(problem, hard=True))
            mixed = hard if share == 1 else torch.lerp(out, hard, share)
        compiling = torch.compiler.is_compiling()
        passing = _StraightThrough if compiling else _StraightThroughBothWays
        out = passing.apply(out, mixed)
    if module in (linear, reference):  # the kernels put it in the weights of the slices
        out = zero_padding(out + problem.poison().view(-1, 1, 1), problem.query_mask)
    return out


def _without_autocast(device: torch.device) -> AbstractContextManager[None]:
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _backend(name: str, backend: str, *tokens: Tensor) -> ModuleType:
    one_of(name, "backend", backend, BACKENDS)
    if under_transforms(name, backend, "dense") or backend == "dense":
        return reference
    if backend == "linear" or (backend == "auto" and tokens[0].device.type != "cuda"):
        return linear
    runs_kernels(name, *tokens)
    try:
        from espformer.ops.esp import (
            triton as kernels,  # torch.compile can follow this, not importlib
        )
    except ImportError as error:
        if backend == "auto":
            return linear
        raise ImportError(
            'backend="triton" needs triton >= 3.6 (pip install triton); backend="linear" does not'
        ) from error
    return kernels


class _StraightThrough(torch.autograd.Function):
    """The second argument, with the gradient of the first: exact, unlike adding a difference."""

    generate_vmap_rule = True

    @staticmethod
    def forward(soft: Tensor, shown: Tensor) -> Tensor:
        return shown.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _StraightThroughBothWays(_StraightThrough):
    """The same with a forward mode; torch.compile does not trace functions that have one."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return tangents[0]
