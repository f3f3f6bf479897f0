"""Clocks: medians of calls and of replayed CUDA graphs, and the peak of the memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median

import torch

__all__ = ["graph_milliseconds", "milliseconds", "once"]

Call = Callable[[], object]

# More than any second-level cache: written between calls, so that none finds its inputs there.
FLUSH_BYTES = 256 << 20
FEWEST, MOST = 5, 50


def once(call: Call, device: torch.device, inputs: int = 0) -> tuple[float, float]:
    """Seconds of one call, and 10⁶ bytes at its peak with `inputs` bytes of inputs (CPU: NaN)."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        inputs -= torch.cuda.memory_allocated(device)
    start = time.perf_counter()
    call()
    if not on_gpu:
        return time.perf_counter() - start, math.nan
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    return seconds, (torch.cuda.max_memory_allocated(device) + inputs) / 1e6


def milliseconds(call: Call, device: torch.device, estimate: float, budget: float) -> float:
    """Median of as many calls as fit in `budget` seconds when one takes `estimate` seconds."""
    repeats = max(1 if estimate > budget / FEWEST else FEWEST, min(MOST, int(budget / estimate)))
    if device.type == "cuda":
        return _event_milliseconds(call, repeats)
    return median(1e3 * once(call, device)[0] for _ in range(repeats))


def graph_milliseconds(call: Call, repeats: int = 20) -> float:
    """Median of replays of the call captured as a CUDA graph.

    Raises:
        RuntimeError: the call cannot be captured.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return _event_milliseconds(graph.replay, repeats)


def _event_milliseconds(call: Call, repeats: int) -> float:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)]
    for start, end in events:
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in events)
