"""The registry: ESP attention by backend, and what it is compared with."""

from __future__ import annotations

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
from espformer.bench.cases import PEER_FACTOR, TOLERANCES, Case
from espformer.nn import Differential, Softmax

__all__ = ["ESP", "OPERATORS", "SINKHORN", "Operator", "differential", "esp", "find"]

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

# Options of esp_attention. Without a name of its own: absolute metric, t = τ = 0.1, soft sort.
ESP: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "esp": {},
        "esp-mean": {"inverse_temperature": 0.0},
        "esp-balanced": {"balance": "both"},
        "esp-squared": {"metric": "squared", "sort_temperature": 1e-3},
        "esp-squared-mean": {
            "metric": "squared", "sort_temperature": 1e-3, "inverse_temperature": 0.0,
        },
        "esp-hard": {"hard": True},
        "esp-hard-mean": {"hard": True, "inverse_temperature": 0.0},
    }
)  # fmt: skip

SINKHORN: Mapping[str, int] = MappingProxyType({f"sinkhorn-{s}": s for s in (1, 3, 5, 21)})


@dataclass(frozen=True)
class Operator:
    """An attention and the way it is computed."""

    name: str
    backend: str
    make: Callable[[Case, torch.device], Attention]
    growth: int  # time grows with this power of the number of tokens
    ours: bool = False
    needs: str = "any"  # "cuda", or the name of a package

    def missing(self, device: torch.device) -> str | None:
        """What is not there to run it, in words."""
        if self.needs == "cuda" and device.type != "cuda":
            return "needs a CUDA device"
        if self.needs not in ("any", "cuda") and importlib.util.find_spec(self.needs) is None:
            return f"{self.needs} is not installed"
        return None

    def tolerance(self, dtype: str) -> float:
        return TOLERANCES[dtype] * (1 if self.ours else PEER_FACTOR)


def esp(case: Case, device: torch.device, *, backend: str) -> Attention:
    """ESP attention with the options of the case's name."""
    options = dict(ESP[case.operator])
    if case.slices is not None:
        generator = torch.Generator().manual_seed(case.seed)
        theta = torch.randn(case.slices, case.width, generator=generator, dtype=torch.float64)
        options["slices"] = F.normalize(theta, dim=-1).to(device)
    return partial(functional.esp_attention, backend=backend, **options)


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


def _sinkhorn(case: Case, device: torch.device, *, compiled: bool = False) -> Attention:
    attention = partial(functional.sinkhorn_attention, iterations=SINKHORN[case.operator])
    return torch.compile(attention, fullgraph=True) if compiled else attention


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
            Operator(name, "triton", partial(esp, backend="triton"), 1, ours=True, needs="cuda"),
            Operator(name, "linear", partial(esp, backend="linear"), 1, ours=True),
            Operator(name, "dense", _dense, 2),
        ]
    found += [
        Operator("softmax", "flash", partial(_softmax, flash=True), 2, needs="cuda"),
        Operator("softmax", "sdpa", partial(_softmax, flash=False), 2),
        Operator("differential", "sdpa", differential, 2),
    ]
    for name in SINKHORN:
        found += [
            Operator(name, "eager", _sinkhorn, 2),
            Operator(name, "compiled", partial(_sinkhorn, compiled=True), 2),
        ]
    return {(operator.name, operator.backend): operator for operator in found}


OPERATORS: Mapping[tuple[str, str], Operator] = MappingProxyType(_registry())


def find(case: Case) -> Operator:
    return OPERATORS[case.operator, case.backend]
