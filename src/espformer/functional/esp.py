"""ESP attention and its matrix: check the arguments and select a backend."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, NoReturn, Unpack

import torch
from torch import Tensor

from espformer.functional.arguments import (
    are_nested,
    flat,
    make_problem,
    one_of,
    runs_kernels,
    under_transforms,
)
from espformer.ops.common.masks import zero_padding
from espformer.ops.common.operators import (
    PLAIN,
    has_dispatch_modes,
    is_exporting,
    is_recorded,
    without_autocast,
)
from espformer.ops.common.optional import how_to_install
from espformer.ops.common.packing import attend_nested, refuse_masks
from espformer.ops.esp import linear, reference
from espformer.ops.esp.options import ESPOptions, Options, takes_options
from espformer.ops.esp.problem import Problem

BACKENDS = ("auto", "dense", "linear", "cpu", "triton")
"""The implementations that `backend` can name, see :func:`esp_attention`."""

TESTED_NUMBA = "0.68"
_broken: list[str] = []  # why the kernels for CPUs cannot be used, so that this is tried once


@takes_options
def esp_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    slices: Tensor | None = None,
    slice_logits: Tensor | None = None,
    mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    backend: str = "auto",
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    **options: Unpack[Options],
) -> Tensor:
    r"""Doubly-stochastic attention through Expected Sliced Transport Plans, in linear time.

    Queries and keys are projected onto L slices :math:`\theta_l` and (softly) sorted on each.
    Matching equal ranks gives one transport plan per slice. The plans are averaged with weights
    that favour low costs:

    .. math::

        A_l[n, i] &= \mathrm{softmax}_i\bigl(-\mathrm{dist}(\mathrm{sort}(Q\theta_l)_n,
                     (Q\theta_l)_i) / t\bigr), \qquad B_l \text{ likewise from the keys},\\
        U_l &= \tfrac1N A_l^\top B_l, \qquad D_l = \sum_{ij} \|q_i - k_j\|^2 U_l[i, j],\\
        \mathrm{out} &= N \sum_l \mathrm{softmax}(b - \tau D)_l \, U_l V.

    Time is O(L N (log N + d + m)) and memory O(L N) beyond inputs and outputs. No N×N matrix is
    formed in the forward or backward pass. 16-bit inputs are computed in float32; on a GPU their
    rows are multiplied in 16 bits and accumulated in float32.

    Args:
        query: ``(batch, heads, N, m)``. Queries, keys and values may be jagged nested tensors of
            that shape, with sequences of different lengths; then so is the output.
        key: ``(batch, heads, M, m)``.
        value: ``(batch, heads, M, d)``.
        slices: Θ, ``(L, m)`` or ``(heads, L, m)``, rows of unit norm; None means the m axes.
        slice_logits: b, ``(L,)`` or ``(heads, L)``, a preference for slices in addition to their
            cost; gradients flow to it.
        mask: for self-attention, ``(batch, N)``, True = the token takes part. Padded tokens get
            zeros, and each sequence of a padded batch gives the same result as on its own.
        query_mask: for cross-attention instead of `mask`, ``(batch, N)``.
        key_mask: likewise ``(batch, M)``. If N = M, it needs a `query_mask` beside it, of ones if
            no query is padding.
        backend: ``"linear"`` (plain torch), ``"cpu"`` (kernels compiled by numba, many times
            faster; extra ``cpu``), ``"triton"`` (fused kernels for CUDA tensors), ``"dense"``
            (Algorithm 1 as printed: O(L N²), for checks) or ``"auto"``: triton on a GPU, cpu on a
            CPU if numba is installed, otherwise linear. All compute the same attention.
            ``"auto"`` falls back to ``"linear"`` for cases that the Triton kernels do not cover
            (float64; heads wider than 256; hard sorting with averaged ties or N ≠ M; the
            interpolated coupling), during export (``torch.export``, ONNX), and on CPUs for tensor
            subclasses and under dispatch modes. It uses the dense formula under ``torch.func``
            (grad, vmap, jvp), because the hand-written gradients of the others do not support
            these transforms, and for soft attention under ``torch.jit.trace`` and in exports of
            any length, because the linear-time soft sort has a graph for each length. Under
            ``torch.compile`` the kernels are custom operators; ``"linear"`` is traced for small
            problems of fixed size and is a custom operator otherwise.
        attn_mask: only for calls written for ``scaled_dot_product_attention``: a boolean padding
            mask over keys, ``(batch, 1, 1, M)``, taken as `mask` if N = M and as `key_mask`
            otherwise. Anything else is an error.
        is_causal: True is an error: a causal doubly-stochastic matrix is the identity.
        {options}

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
    if are_nested(name, query, key, value):
        refuse_masks(name, mask, query_mask, key_mask, attn_mask)
        attention = partial(
            esp_attention, slices=slices, slice_logits=slice_logits, backend=backend,
            is_causal=is_causal, **options,
        )  # fmt: skip
        return attend_nested(name, attention, query, key, value)
    problem, lead = make_problem(
        name, query, key, value, options, slices=slices, slice_logits=slice_logits,
        query_mask=query_mask, key_mask=key_mask, mask=mask, attn_mask=attn_mask,
        is_causal=is_causal,
    )  # fmt: skip
    rows = zero_padding(flat(value, lead), problem.key_mask)
    out = attend(name, problem, rows, backend)
    return out.to(value.dtype).view(*lead, *out.shape[-2:])


def attend(name: str, problem: Problem, rows: Tensor, backend: str) -> Tensor:
    """``N · G V`` of a checked problem, by the requested backend: (batch, N, d).

    Rows of values, (batch, M, d), are zero where they are padding.
    """
    with without_autocast(rows.device):
        module = _backend_of(problem, name, backend, problem.query, problem.key, rows)
        return _run(module, problem, lambda b, p: b.attend(p, rows))


@takes_options
def esp_plan(
    query: Tensor,
    key: Tensor,
    *,
    slices: Tensor | None = None,
    slice_logits: Tensor | None = None,
    mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    backend: str = "auto",
    is_causal: bool = False,
    **options: Unpack[Options],
) -> Tensor:
    """The attention matrix of :func:`esp_attention`, ``N · G``: for inspection, not for speed.

    The same operator computes it: ``esp_plan(q, k) @ v`` equals ``esp_attention(q, k, v)``. With
    `hard` or balancing, rows sum to one and columns to N/M (for N = M, or with the quantile
    coupling). The arguments are those of :func:`esp_attention`.

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
        name, query, key, None, options, slices=slices, slice_logits=slice_logits,
        query_mask=query_mask, key_mask=key_mask, mask=mask, is_causal=is_causal,
    )  # fmt: skip
    with without_autocast(query.device):
        module = _backend_of(problem, name, backend, query, key)
        plan = _run(module, problem, lambda b, p: b.plan(p))
    return plan.to(query.dtype).view(*lead, *plan.shape[-2:])


def _run(module: ModuleType, problem: Problem, compute: Callable[[Any, Problem], Tensor]) -> Tensor:
    """The output of a backend: soft, hard, or a mix of both with the gradient of the soft one."""
    given = problem.options

    def with_options(options: ESPOptions) -> Tensor:
        return compute(module, problem if options is given else replace(problem, options=options))

    out = straight_through(given, with_options)
    if module in (linear, reference):  # the kernels add the marker to the slice weights
        out = zero_padding(out + problem.nonfinite_marker().view(-1, 1, 1), problem.query_mask)
    return out


def straight_through(options: ESPOptions, compute: Callable[[ESPOptions], Tensor]) -> Tensor:
    """The result with these options, mixed with the hard result by their `straight_through`."""
    share = float(options.straight_through)
    out = compute(options)
    if share and not options.hard:
        with torch.no_grad():
            hard = compute(replace(options, hard=True))
        out = pass_through(out, hard, share)
    return out


def pass_through(soft: Tensor, hard: Tensor, share: float = 1.0) -> Tensor:
    """A mix with this share of `hard`, and the gradient of `soft`."""
    mixed = hard if share == 1 else torch.lerp(soft.detach(), hard, share)
    compiling = torch.compiler.is_compiling()
    passing = _StraightThrough if compiling else _StraightThroughBothWays
    out: Tensor = passing.apply(soft, mixed)
    return out


def _backend_of(problem: Problem, name: str, backend: str, *tokens: Tensor) -> ModuleType:
    """The module of a backend, for this problem.

    A soft sort in linear time cuts the sequence into chunks, so its graph has one length, and
    ``torch.jit.trace`` cannot record its gradient. There ``"auto"`` selects the dense formula.
    """
    module = pick_backend(name, backend, *tokens)
    if module is linear and not problem.options.hard and is_recorded():
        if backend == "auto" and not (is_exporting() and _has_one_length(problem)):
            return reference
        if not is_exporting():
            _refuse_tracing(name, backend)
    return module


def _has_one_length(problem: Problem) -> bool:
    """Whether the graph that is exported is for these numbers of tokens only."""
    from torch.fx.experimental.symbolic_shapes import has_static_value  # slow: imports sympy

    return all(has_static_value(x.shape[-2]) for x in (problem.query, problem.key))


def _refuse_tracing(name: str, backend: str) -> NoReturn:
    raise ValueError(
        f'{name}: torch.jit.trace cannot record backend="{backend}"; pass backend="auto" or "dense"'
    )


def pick_backend(name: str, backend: str, *tokens: Tensor) -> ModuleType:
    """The module of a backend; :func:`esp_attention` says which one `"auto"` selects."""
    one_of(name, "backend", backend, BACKENDS)
    if under_transforms(name, backend, "dense") or backend == "dense":
        return reference
    if is_recorded():
        if backend in ("cpu", "triton") and not is_exporting():  # results would be constants
            _refuse_tracing(name, backend)
        if backend == "auto":
            return linear
    device = tokens[0].device.type
    if backend == "cpu":
        return _cpu_kernels(name, device)
    if backend == "auto" and device == "cpu" and _takes_kernels(*tokens):
        try:
            return _cpu_kernels(name, device)
        except ModuleNotFoundError:
            return linear
        except ImportError as error:
            warnings.warn(f'{error}. backend="auto" uses torch instead', stacklevel=2)
            return linear
    nvidia = device == "cuda" and torch.version.hip is None  # kernels have NVIDIA's instructions
    if backend == "linear" or (backend == "auto" and not nvidia):
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


def _takes_kernels(*tokens: Tensor) -> bool:
    """Whether a compiled kernel may run.

    Tensor subclasses and dispatch modes support torch's own operators only.
    """
    if torch.compiler.is_compiling():
        return True
    return all(type(x) in PLAIN for x in tokens) and not has_dispatch_modes()


def _cpu_kernels(name: str, device: str) -> ModuleType:
    """The compiled kernels for CPUs."""
    if device != "cpu":
        raise ValueError(
            f'{name}: backend="cpu" needs tensors on a CPU, got tensors on {device}; '
            'backend="auto" selects one for the device'
        )
    if _broken:
        raise ImportError(_broken[0])
    try:
        from espformer.ops.esp import cpu
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'backend="cpu" needs {how_to_install("numba", "cpu")}; backend="linear" does not'
        ) from error
    except ImportError as error:
        _broken.append(
            f'backend="cpu" does not work here: {error}. It was tested with numba {TESTED_NUMBA} '
            f'(pip install "numba=={TESTED_NUMBA}.*"); backend="linear" needs none'
        )
        raise ImportError(_broken[0]) from error
    return cpu


class _StraightThrough(torch.autograd.Function):
    """Returns the second argument, with the gradient of the first.

    This is exact, unlike ``soft + (hard - soft).detach()``, which rounds.
    """

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
    """The same with forward-mode AD. torch.compile does not trace functions that have a jvp."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return tangents[0]
