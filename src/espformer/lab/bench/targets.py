"""Targets of the fused kernels on an H200, each with the rows that decide it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from espformer.lab.bench.cases import Case, Measurement

__all__ = ["NO_TARGET", "TARGETS", "Target", "Verdict", "judge", "target_cases"]

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
    """Met only by rows that are all right; the graph's number is shown, never judged."""
    rows = [found[case] for case in target.cases]
    error = max((row.error for row in rows if not math.isnan(row.error)), default=math.nan)
    value = target.value(rows)
    captured = not any(math.isnan(row.graph_milliseconds) for row in rows)
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
    if target.reaches(value, target.aim):
        verdict = "met, and the aim"
    elif target.reaches(value, target.required):
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


def _against(ours: str, lengths: Sequence[int], heads: int) -> tuple[Case, ...]:
    pairs = [
        (
            Case(ours, "triton", tokens=n, heads=heads),
            Case("softmax", "flash", tokens=n, heads=heads),
        )
        for n in lengths
    ]
    return tuple(case for pair in pairs for case in pair)


_SOFT = Case("esp-mean", "triton")
_TRAINED = Case("esp", "triton", BOTH)

TARGETS: tuple[Target, ...] = (
    Target("soft forward, τ = 0, absolute, N = 1024", (_SOFT,), _milliseconds, "ms", 0.9, 0.4),
    Target(
        "soft forward, τ = 0, squared, N = 1024", (Case("esp-squared-mean", "triton"),),
        _milliseconds, "ms", 2.5, 1.0,
    ),
    Target(
        "soft forward + backward, τ = 0.1, N = 1024", (_TRAINED,),
        _milliseconds, "ms", 4.5, 2.0,
    ),
    Target(
        "hard forward, τ = 0, N = 1024", (Case("esp-hard-mean", "triton"),),
        _milliseconds, "ms", 0.30, 0.15,
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
        "the same against the fused Sinkhorn S = 3",
        (_TRAINED, Case("sinkhorn-3", "triton", BOTH)), _times_faster, "× the speed",
        math.nan, math.nan, more_is_better=True,
    ),
    Target(
        "hard forward faster than flash attention from",
        _against("esp-hard-mean", (4096, 16384), 64), _faster_from, "tokens", 16384, 4096,
    ),
    Target(
        "soft forward faster than flash attention from, 16 heads",
        _against("esp-mean", (16384, 32768, 65536), 16), _faster_from, "tokens", 65536, 16384,
    ),
    Target(
        "forward + backward, N = 16384, 16 heads, peak memory",
        (Case("esp", "triton", BOTH, tokens=16384, heads=16),), _megabytes, "MB", 1500, 800,
    ),
    Target(
        "soft forward + backward, τ = 0.1, N = 197, 512 heads (a ViT)",
        (Case("esp", "triton", BOTH, tokens=197, heads=512),), _milliseconds, "ms", 12, 5,
    ),
    Target(
        "forward + backward, N = 1048576, one head",
        (Case("esp", "triton", BOTH, tokens=1 << 20, heads=1),), _milliseconds, "ms",
        math.inf, 1000,
    ),
)  # fmt: skip


def target_cases() -> list[Case]:
    """Return every row that a target needs, once."""
    return list(dict.fromkeys(case for target in TARGETS for case in target.cases))
