"""All timing of the laboratory: the device is synchronised before the clock is read."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

Call = Callable[[], object]

# Larger than any L2 cache. It is overwritten between calls, so that no call finds its inputs in the
# cache.
FLUSH_BYTES = 256 << 20
FEWEST, MOST = 5, 50
CPU = torch.device("cpu")


class Stopwatch:
    """Counts seconds from when it is made or restarted; work queued on the device is waited for."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.restart(device)

    def restart(self, device: torch.device = CPU) -> None:
        self.device = device
        self._wait()
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        self._wait()
        return time.perf_counter() - self._began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def seconds_per_call(call: Call, device: torch.device = CPU, count: int = 1) -> float:
    """Return the seconds of a call, the mean of `count` that are queued one after the other."""
    watch = Stopwatch(device)
    for _ in range(count):
        call()
    return watch.seconds / count


def interleaved_seconds(
    calls: Sequence[Call],
    rounds: int,
    *,
    device: torch.device = CPU,
    warm_up: int = 1,
    counts: Sequence[int] | None = None,
) -> list[float]:
    """Return the median time of every call. The calls take turns, so that other load on the machine
    affects all alike.

    Args:
        calls: what is timed.
        rounds: how often each has its turn.
        device: it is waited for.
        warm_up: turns that are not counted.
        counts: calls of each in one turn; one unless given.
    """
    counts = [1] * len(calls) if counts is None else counts
    for _ in range(warm_up):
        for call in calls:
            call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, count, found in zip(calls, counts, times, strict=True):
            found.append(seconds_per_call(call, device, count))
    return [median(found) for found in times]


def seconds_and_peak(call: Call, device: torch.device, inputs: int = 0) -> tuple[float, float]:
    """Return the seconds of one call, and 10⁶ bytes at its peak with the inputs (CPU: NaN)."""
    if device.type != "cuda":
        return seconds_per_call(call, device), math.nan
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    inputs -= torch.cuda.memory_allocated(device)
    seconds = seconds_per_call(call, device)
    return seconds, (torch.cuda.max_memory_allocated(device) + inputs) / 1e6


def median_milliseconds(call: Call, device: torch.device, estimate: float, budget: float) -> float:
    """Return the median of as many calls as fit in `budget` seconds, if one takes `estimate`."""
    repeats = max(1 if estimate > budget / FEWEST else FEWEST, min(MOST, int(budget / estimate)))
    if device.type == "cuda":
        return _event_milliseconds(call, repeats)
    return 1e3 * interleaved_seconds([call], repeats, warm_up=0)[0]


def as_graph(call: Call) -> Call:
    """Return what replays the call, captured as a CUDA graph.

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

    def replay() -> Call:
        graph.replay()
        return call  # it holds the tensors that the graph reads

    return replay


def graph_milliseconds(call: Call) -> float:
    """Return the median of replays of the call, see :func:`as_graph`."""
    return _event_milliseconds(as_graph(call), 20)


def _event_milliseconds(call: Call, repeats: int) -> float:
    # Not triton.testing.do_bench: it makes at least eight calls however long one takes, and needs
    # Triton, which a benchmark of torch's own attentions does not.
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)]
    for start, end in events:
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in events)


def in_words(seconds: float) -> str:
    """Say a length of time as people do.

    Example:
        >>> in_words(42), in_words(5400), in_words(200_000)
        ('42 s', '1.5 h', '2.3 days')
    """
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * length or (unit == "h" and seconds >= length):
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
