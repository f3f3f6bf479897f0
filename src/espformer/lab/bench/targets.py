"""Targets of the fused kernels on an H200, each with the rows that decide it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from espformer.lab.bench.cases import Case, Measurement

Found = Mapping[Case, Measurement]

BOTH = "forward+backward"
NO_TARGET = "for information"


@dataclass(frozen=True)
class Target:
    """One target: the number that the rows give, what it must reach, and what is aimed at."""

    title: str
    cases: tuple[Case, ...]
    value: Callable[[Sequence[Measurement]], float]
    unit: str
    required: float
    aim: float
    more_is_better: bool = False
    as_graph: bool = False  # judged by the number that the rows give as CUDA graphs

    def reaches(self, value: float, target: float) -> bool:
        return value >= target if self.more_is_better else value <= target  # NaN reaches nothing


@dataclass(frozen=True)
class Verdict:
    """A target and what was measured."""

    target: Target
    value: float
    graph_value: float
    verdict: str
    error: float  # the largest of its rows


def judge(target: Target, found: Found) -> Verdict:
    """Compare a target with its measured rows: a wrong result fails it, however fast it was."""
    rows = [found[case] for case in target.cases]
    error = max((row.error for row in rows if not math.isnan(row.error)), default=math.nan)
    value = target.value(rows)
    captured = not any(math.isnan(row.graph_milliseconds) for row in rows)
    captured = captured and target.value is not _over_graph  # which is of both
    graph = target.value([_replayed(row) for row in rows]) if captured else math.nan
    if any(row.status.startswith("FAILED") for row in rows):
        return Verdict(target, math.nan, math.nan, "FAILED: a result is wrong", error)
    broken = [row for row in rows if not row.ok and not row.status.startswith("too slow")]
    if math.isnan(value) and broken:
        first = broken[0]
        where = f"{first.case.operator}/{first.case.backend}"
        return Verdict(target, value, graph, f"not measured ({where}: {first.status})", error)
    if math.isnan(target.required):
        return Verdict(target, value, graph, NO_TARGET, error)
    judged = graph if target.as_graph else value
    if target.reaches(judged, target.aim):
        verdict = "met, and the aim"
    elif target.reaches(judged, target.required):
        verdict = "met"
    elif target.reaches(graph, target.required):
        verdict = "missed (met as a CUDA graph)"
    else:
        verdict = "missed"
    return Verdict(target, value, graph, verdict, error)


def _replayed(row: Measurement) -> Measurement:
    """Return the row with the time of the replayed graph as its time."""
    return replace(row, milliseconds=row.graph_milliseconds)


def _milliseconds(rows: Sequence[Measurement]) -> float:
    return rows[0].milliseconds


def _over_graph(rows: Sequence[Measurement]) -> float:
    """Say how much longer a call takes than its graph."""
    (row,) = rows
    return row.milliseconds / row.graph_milliseconds


def _megabytes(rows: Sequence[Measurement]) -> float:
    return rows[0].peak_mb


def _times_faster(rows: Sequence[Measurement]) -> float:
    """Say how much longer the second row takes than the first."""
    return rows[1].milliseconds / rows[0].milliseconds


def _faster_from(rows: Sequence[Measurement]) -> float:
    """Return the smallest number of tokens from which every first of a pair beats the second."""
    pairs = sorted(zip(rows[::2], rows[1::2], strict=True), key=lambda pair: pair[0].case.tokens)
    if any(math.isnan(row.milliseconds) for pair in pairs for row in pair):
        return math.nan
    faster_from = math.inf
    for ours, theirs in reversed(pairs):
        if ours.milliseconds >= theirs.milliseconds:
            break
        faster_from = ours.case.tokens
    return faster_from


def _against(
    ours: Case, lengths: Sequence[int], heads: int, mode: str = "forward"
) -> tuple[Case, ...]:
    """Return pairs for each length: our row, and that of flash attention with heads of width 64."""
    return tuple(
        replace(case, tokens=tokens, heads=heads, mode=mode)
        for tokens in lengths
        for case in (ours, Case("softmax", "flash"))
    )


def _step(
    title: str, operator: str, required: float, aim: float, backend: str = "triton", **sizes: Any
) -> Target:
    """Make a target for the time of forward and backward, replayed as a graph."""
    case = Case(operator, backend, BOTH, **sizes)
    return Target(title, (case,), _milliseconds, "ms", required, aim, as_graph=True)


_SOFT, _HARD = Case("esp-mean", "triton"), Case("esp-hard-mean", "triton")
_TRAINED = Case("esp", "triton", BOTH)
_SINKHORN = Case("sinkhorn-3", "triton", BOTH)
_VIT: dict[str, Any] = {"tokens": 197, "heads": 512}  # batch 64 of the paper's ViT, 8 heads
_DEFAULT = Case("esp-default", "triton", BOTH, slices=8, **_VIT)
_NARROW: dict[str, Any] = {"qk_width": 8}
_LEARNT: dict[str, Any] = {"slices": 8, "learnt": True}
_NOTHING = math.nan

TARGETS: tuple[Target, ...] = (
    Target(
        "soft forward, τ = 0, absolute, N = 1024", (_SOFT,), _milliseconds, "ms", 0.6, 0.4,
        as_graph=True,
    ),
    Target(
        "soft forward, τ = 0, squared, N = 1024", (Case("esp-squared-mean", "triton"),),
        _milliseconds, "ms", 2.5, 1.0,
    ),
    Target(
        "hard forward, τ = 0, N = 1024", (_HARD,), _milliseconds, "ms", 0.11, 0.08, as_graph=True
    ),
    _step("soft forward + backward, τ = 0.1, N = 1024", "esp", 4.0, 2.5),
    _step("the same, τ = 0", "esp-mean", 2.2, 1.5),
    _step("soft forward + backward, τ = 0.1, N = 197, 512 heads (a ViT)", "esp", 6.5, 4, **_VIT),
    _step("the same, τ = 0", "esp-mean", 3.5, 2.5, **_VIT),
    _step("the same, squared, τ = 0.1", "esp-squared", 11, 7, **_VIT),
    _step("8 axes to sort, τ = 0, N = 1024", "esp-mean", 0.35, 0.22, **_NARROW),
    _step("8 axes to sort, τ = 0.1, N = 1024", "esp", 0.6, 0.4, **_NARROW),
    _step("8 learnt slices, τ = 0, N = 1024", "esp-mean", 0.45, 0.3, **_LEARNT),
    _step("8 learnt slices, τ = 0.1, N = 1024", "esp", 0.75, 0.5, **_LEARNT),
    _step(
        "64 heads of 8, default, N = 197, batch 64", "esp-default", 1.5, 0.8, tokens=197,
        heads=4096, width=8,
    ),
    _step(
        "128 heads of 4, default, N = 197, batch 64", "esp-default", 1.5, 0.8, tokens=197,
        heads=8192, width=4,
    ),
    _step("flash attention, 8 heads of 64", "softmax", _NOTHING, _NOTHING, "flash", **_VIT),
    _step("fused Sinkhorn S = 3, 8 heads of 64", "sinkhorn-3", _NOTHING, _NOTHING, **_VIT),
    _step(
        "default ESP, 8 frozen slices, 8 heads of 64, N = 197, batch 64", "esp-default", _NOTHING,
        _NOTHING, slices=8, **_VIT,
    ),
    Target(
        "default ESP against the fused Sinkhorn S = 3, N = 197, batch 64",
        (_DEFAULT, replace(_SINKHORN, **_VIT)), _times_faster, "× the speed",
        0.5, 0.83, more_is_better=True, as_graph=True,
    ),
    *(
        Target(f"{name}, called from Python, over its graph", (case,), _over_graph, "×", 1.15, 1.05)
        for name, case in (
            ("soft forward + backward, τ = 0.1", _TRAINED), ("hard forward", _HARD),
            ("fused Sinkhorn S = 3, forward + backward", _SINKHORN),
        )
    ),
    Target(
        "soft forward against dense ESP, N = 1024", (_SOFT, Case("esp-mean", "dense")),
        _times_faster, "× the speed", 200, 500, more_is_better=True,
    ),
    Target(
        "soft forward + backward against eager Sinkhorn S = 3, N = 1024",
        (_TRAINED, Case("sinkhorn-3", "eager", BOTH)), _times_faster, "× the speed", 2, 5,
        more_is_better=True,
    ),
    Target(
        "the same against the fused Sinkhorn S = 3", (_TRAINED, _SINKHORN), _times_faster,
        "× the speed", _NOTHING, _NOTHING, more_is_better=True,
    ),
    Target(
        "hard forward faster than flash attention from", _against(_HARD, (4096, 16384), 64),
        _faster_from, "tokens", 16384, 4096,
    ),
    Target(
        "soft forward faster than flash attention from, 16 heads",
        _against(_SOFT, (16384, 32768, 65536), 16), _faster_from, "tokens", 65536, 16384,
    ),
    Target(
        "training step faster than that of flash attention from, τ = 0, 64 axes, 16 heads",
        _against(_SOFT, (16384, 32768, 65536, 131072), 16, BOTH), _faster_from, "tokens", 32768,
        16384,
    ),
    Target(
        "the same, 8 axes to sort",
        _against(replace(_SOFT, **_NARROW), (2048, 4096, 8192, 16384), 16, BOTH), _faster_from,
        "tokens", 4096, 2048,
    ),
    Target(
        "forward + backward, N = 16384, 16 heads, peak memory",
        (Case("esp", "triton", BOTH, tokens=16384, heads=16),), _megabytes, "MB", 1000, 800,
    ),
    Target(
        "forward + backward, N = 1048576, one head",
        (Case("esp", "triton", BOTH, tokens=1 << 20, heads=1),), _milliseconds, "ms",
        math.inf, 1000,
    ),
)  # fmt: skip


def target_cases() -> list[Case]:
    """Targets of the fused kernels, and the rows that decide them."""
    return list(dict.fromkeys(case for target in TARGETS for case in target.cases))
