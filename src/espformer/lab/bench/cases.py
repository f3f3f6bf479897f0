"""A case, which is to be measured, and the measurement of one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

MODES = ("forward", "forward+backward")

# Largest error of 16-bit and of float32 results, relative, in the Frobenius norm of the output and
# of every gradient. The limit for peers is wider: it is meant to catch mistakes, not rounding.
TOLERANCES = {"bfloat16": 5e-3, "float16": 5e-3, "float32": 2e-5, "float64": 1e-9}
PEER_FACTOR = 10


@dataclass(frozen=True)
class Case:
    """One row: an operator at a size. `heads` is batch × heads: both are only many problems."""

    operator: str
    backend: str
    mode: str = "forward"
    tokens: int = 1024
    heads: int = 64
    width: int = 64
    slices: int | None = None  # projected; unless given the axes of queries and keys
    qk_width: int | None = None  # of queries and keys; `width`, that of values, unless given
    learnt: bool = False  # slices are parameters, and have a gradient
    dtype: str = "bfloat16"
    seed: int = 0

    @property
    def backward(self) -> bool:
        return self.mode != "forward"

    @property
    def slice_count(self) -> int:
        return self.query_width if self.slices is None else self.slices

    @property
    def query_width(self) -> int:
        """The width of queries and keys."""
        return self.width if self.qk_width is None else self.qk_width

    def inputs(self, device: torch.device) -> list[Tensor]:
        """Queries, keys, values and an upstream gradient, the same for every operator."""
        generator = torch.Generator(device).manual_seed(self.seed)
        dtype = getattr(torch, self.dtype)
        widths = (self.query_width, self.query_width, self.width, self.width)
        shapes = [(1, self.heads, self.tokens, width) for width in widths]
        return [
            torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
            for shape in shapes
        ]

    def shrunk(self, factor: int) -> Case:
        """Return the same with `factor` times fewer tokens and heads, to try things out."""
        tokens, heads = max(4, self.tokens // factor), max(2, self.heads // factor)
        return replace(self, tokens=tokens, heads=min(self.heads, heads))


@dataclass(frozen=True)
class Measurement:
    """The measurement of a case; numbers that could not be had are NaN."""

    case: Case
    milliseconds: float = math.nan  # median of calls, as a program would make them
    graph_milliseconds: float = math.nan  # of replays of a CUDA graph: no launches from Python
    peak_mb: float = math.nan  # 10⁶ bytes: inputs, outputs and everything between
    error: float = math.nan
    status: str = "ok"

    @property
    def ok(self) -> bool:
        return self.status.startswith("ok")


def largest_error(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Return the largest ``‖got - want‖ / ‖want‖`` of two lists of tensors; NaN stays NaN."""
    tiny = torch.finfo(torch.float64).tiny
    errors = [
        (a.double() - b.double()).norm() / b.double().norm().clamp(min=tiny)
        for a, b in zip(got, want, strict=True)
    ]
    return float(torch.stack(errors).detach().max())
