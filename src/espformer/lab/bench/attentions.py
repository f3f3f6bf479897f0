"""The registry: ESP attention by backend, and what it is compared with."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from espformer import functional
from espformer.lab.bench.cases import PEER_FACTOR, TOLERANCES, Case
from espformer.lab.bench.kernel_attention import kernel_attention
from espformer.nn import Differential, Softmax

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

_SHARP: dict[str, Any] = {"metric": "squared", "sort_temperature": 1e-3}
_MEAN: dict[str, Any] = {"inverse_temperature": 0.0}
_PLAIN: dict[str, Any] = {
    "sort_temperature": 0.1, "temperature_unit": "absolute", "inverse_temperature": 0.1,
}  # fmt: skip
# Options of esp_attention. Without a name of its own: absolute metric, t = τ = 0.1 in absolute
# units, soft sort; "esp-default" has none, whatever they are.
ESP: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "esp-default": {},
        "esp": _PLAIN,
        "esp-mean": _PLAIN | _MEAN,
        "esp-balanced": _PLAIN | {"balance": "both"},
        "esp-padded": _PLAIN,
        "esp-squared": _PLAIN | _SHARP,
        "esp-squared-mean": _PLAIN | _SHARP | _MEAN,
        "esp-hard": _PLAIN | {"hard": True},
        "esp-hard-mean": _PLAIN | _MEAN | {"hard": True},
    }
)

SINKHORN: Mapping[str, int] = MappingProxyType({f"sinkhorn-{s}": s for s in (1, 3, 5, 21)})


@dataclass(frozen=True)
class Operator:
    """An attention and the way it is computed."""

    name: str
    backend: str
    make: Callable[[Case, torch.device], Attention]
    growth: int  # time grows with this power of the number of tokens
    ours: bool = False
    device: str | None = None  # the one kind of device that it runs on
    package: str | None = None  # that it needs
    forward_only: bool = False
    captured: bool = True  # whether it is also timed as a CUDA graph

    def missing(self, case: Case, device: torch.device) -> str | None:
        """Say what is missing to run it; None if nothing is."""
        if self.device is not None and device.type != self.device:
            return "needs a CUDA device" if self.device == "cuda" else "runs on a CPU"
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if self.forward_only and case.backward:
            return "has no gradients"
        return None

    def tolerance(self, dtype: str) -> float:
        return TOLERANCES[dtype] * (1 if self.ours else PEER_FACTOR)


def esp(case: Case, device: torch.device, *, backend: str) -> Attention:
    """ESP attention with the options of the case's name; padded, it has a quarter of padding."""
    options = dict(ESP[case.operator])
    if case.operator == "esp-padded":
        true_ones = torch.arange(case.tokens, device=device) < -(-3 * case.tokens // 4)
        options["query_mask"] = options["key_mask"] = true_ones.unsqueeze(0)
    if case.slices is not None:
        generator = torch.Generator().manual_seed(case.seed)
        theta = torch.randn(case.slices, case.query_width, generator=generator, dtype=torch.float64)
        options["slices"] = F.normalize(theta, dim=-1).to(device).requires_grad_(case.learnt)
    return partial(functional.esp_attention, backend=backend, **options)


def parameters(attention: Attention) -> list[Tensor]:
    """The parameters of an attention besides its inputs: slices."""
    slices = attention.keywords.get("slices") if isinstance(attention, partial) else None
    return [slices] if slices is not None and slices.requires_grad else []


# How many arrays of (heads, slices, N, N) numbers Algorithm 1 holds at once.
_DENSE_ARRAYS = 8


def _dense(case: Case, device: torch.device) -> Attention:
    """Algorithm 1 in groups of heads: all at once, even 1024 tokens do not fit."""
    attention = esp(case, device, backend="dense")
    memory = 8 << 30
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory // 4
    size = 4 * _DENSE_ARRAYS * case.slice_count * case.tokens**2
    group = max(1, memory // size)

    def in_groups(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = zip(*(x.split(group, dim=1) for x in (query, key, value)), strict=True)
        return torch.cat([attention(*part) for part in parts], dim=1)

    return in_groups


def _softmax(case: Case, device: torch.device, *, flash: bool) -> Attention:
    if not flash:
        return F.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(query, key, value)

    return attention


def _sinkhorn(
    case: Case, device: torch.device, *, backend: str = "torch", compiled: bool = False
) -> Attention:
    attention = partial(
        functional.sinkhorn_attention, iterations=SINKHORN[case.operator], backend=backend
    )
    if not compiled:
        return attention
    torch.compiler.reset()  # every case has the compiler to itself, and sizes as constants
    return torch.compile(attention, fullgraph=True, dynamic=False)


def _flash_sinkhorn(case: Case, device: torch.device) -> Attention:
    """The kernels of FlashSinkhorn, one head after the other: they take one problem at a time.

    Their score is ``2 · cost_scale · q·k / eps``, and with eps = 1 their shifted potentials are
    ours; they have no gradient through the updates.
    """
    kernels = importlib.import_module("flash_sinkhorn.kernels")
    scores = importlib.import_module("flash_sinkhorn.kernels.sinkhorn_flashstyle_sqeuclid")
    updates, half = SINKHORN[case.operator], case.width**-0.5 / 2
    zeros = torch.zeros(case.tokens, device=device)

    def one_head(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        f, g = zeros, zeros
        for update in range(updates):
            if update % 2 == 0:
                f = scores.flashsinkhorn_lse(query, key, g, 1.0, cost_scale=half)
            else:
                g = scores.flashsinkhorn_lse(key, query, f, 1.0, cost_scale=half)
        out: Tensor = kernels.apply_plan_mat_flashstyle(
            query, key, f, g, zeros, zeros, value, eps=1.0, axis=1, cost_scale=half,
            allow_tf32=True,
        )  # fmt: skip
        return out

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads = zip(*(x.flatten(0, 1).float().unbind() for x in (query, key, value)), strict=True)
        out = torch.stack([one_head(*head) for head in heads])
        return out.view(*query.shape[:-1], value.shape[-1]).to(value.dtype)

    return attention


def differential(
    case: Case, device: torch.device, heads: int | None = None, dtype: str | None = None
) -> Attention:
    """Differential attention whose parameters depend on the case's seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        module = Differential(Softmax()).bind(case.heads if heads is None else heads, case.width)
    return module.requires_grad_(False).to(device, getattr(torch, dtype or case.dtype))


def _registry() -> dict[tuple[str, str], Operator]:
    found = []
    for name in ESP:
        found += [
            Operator(name, "triton", partial(esp, backend="triton"), 1, ours=True, device="cuda"),
            Operator(
                name, "cpu", partial(esp, backend="cpu"), 1, ours=True, device="cpu",
                package="numba",
            ),
            Operator(name, "linear", partial(esp, backend="linear"), 1, ours=True, captured=False),
            Operator(name, "dense", _dense, 2, captured=False),
        ]  # fmt: skip
    found += [
        Operator("softmax", "flash", partial(_softmax, flash=True), 2, device="cuda"),
        Operator("softmax", "sdpa", partial(_softmax, flash=False), 2),
        Operator("differential", "sdpa", differential, 2),
        Operator("kernel", "linear", lambda case, device: kernel_attention, 1, captured=False),
    ]
    for name in SINKHORN:
        found += [
            Operator(name, "eager", _sinkhorn, 2),
            Operator(name, "compiled", partial(_sinkhorn, compiled=True), 2),
            Operator(
                name, "triton", partial(_sinkhorn, backend="triton"), 2, ours=True, device="cuda"
            ),
            Operator(
                name, "flash_sinkhorn", _flash_sinkhorn, 2, device="cuda",
                package="flash_sinkhorn", forward_only=True, captured=False,
            ),
        ]  # fmt: skip
    return {(operator.name, operator.backend): operator for operator in found}


OPERATORS: Mapping[tuple[str, str], Operator] = MappingProxyType(_registry())


def find(case: Case) -> Operator:
    return OPERATORS[case.operator, case.backend]
