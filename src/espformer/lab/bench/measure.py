"""Runs cases one after the other: checked first, then timed, within a budget of time each."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from espformer.lab import clock
from espformer.lab.bench.attentions import Attention, find, parameters
from espformer.lab.bench.cases import Case, Measurement, largest_error
from espformer.lab.bench.exact import Oracle, checked_heads, results
from espformer.lab.errors import first_line

# A captured graph keeps its memory, and only short calls are bound by launches.
GRAPH_MILLISECONDS, GRAPH_MEGABYTES = 60.0, 20_000.0


def run_cases(
    cases: Sequence[Case], device: torch.device, *, row_seconds: float = 3.0
) -> Iterator[Measurement]:
    """Measure one case after the other; one that fails in any way is a row that says how.

    Args:
        cases: what to measure, in this order.
        device: where.
        row_seconds: time for the calls of a row. One that would take longer, to judge by a smaller
            one of the same operator, is not run.
    """
    oracle, rows = Oracle(cases, device), list[Measurement]()
    for case in cases:
        predicted = _predicted_seconds(case, rows)
        missing = find(case).missing(case, device)
        if missing is not None:
            row = Measurement(case, status=f"skipped: {missing}")
        elif predicted > row_seconds:
            row = Measurement(case, status=f"too slow: about {predicted:.0f} s a call")
        else:
            row = _measure(case, device, oracle, row_seconds)
        oracle.done_with(case)
        rows.append(row)
        yield row


def _measure(case: Case, device: torch.device, oracle: Oracle, budget: float) -> Measurement:
    try:
        return _checked_and_timed(case, device, oracle, budget)
    except torch.OutOfMemoryError:
        status = "out of memory"
    except Exception as error:  # a broken kernel must not hide the other rows
        status = f"error: {type(error).__name__}: {first_line(error)}"
    finally:
        if device.type == "cuda":
            gc.collect()
            with contextlib.suppress(RuntimeError):  # a lost device raises again
                torch.cuda.empty_cache()
    return Measurement(case, status=status)


def _checked_and_timed(
    case: Case, device: torch.device, oracle: Oracle, budget: float
) -> Measurement:
    operator = find(case)
    attention = operator.make(case, device)
    inputs = case.inputs(device)
    got = results(attention, inputs, case.backward, checked_heads(case))
    try:
        want = oracle(case)
    except Exception as cause:
        raise RuntimeError(f"nothing to compare with: {first_line(cause)}") from cause
    error = largest_error(got, want)
    del got, want
    allowed = operator.tolerance(case.dtype)
    if not error <= allowed:
        return Measurement(case, error=error, status=f"FAILED: error above {allowed:.0e}")

    call = calling(attention, inputs, case.backward)
    size = sum(x.numel() * x.element_size() for x in inputs)
    estimate, peak = clock.seconds_and_peak(call, device, size)
    row = Measurement(case, 1e3 * estimate, peak_mb=peak, error=error)
    if estimate < budget / 2:
        row = replace(
            row, milliseconds=clock.median_milliseconds(call, device, estimate, budget / 4)
        )
    short = row.milliseconds < GRAPH_MILLISECONDS and row.peak_mb < GRAPH_MEGABYTES
    if device.type == "cuda" and operator.captured and short:
        try:
            row = replace(row, graph_milliseconds=clock.graph_milliseconds(call))
        except RuntimeError as reason:
            row = replace(row, status=f"ok, but not as a CUDA graph: {first_line(reason)}")
    return row


def calling(attention: Attention, inputs: Sequence[Tensor], backward: bool) -> Callable[[], object]:
    """Return the call that is timed: it computes the output, or the gradients too."""
    query, key, value, upstream = inputs
    if not backward:

        def forward() -> Tensor:
            with torch.no_grad():
                return attention(query, key, value)

        return forward
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    wanted = [*leaves, *parameters(attention)]
    return lambda: torch.autograd.grad(attention(*leaves), wanted, upstream, allow_unused=True)


def _predicted_seconds(case: Case, rows: Sequence[Measurement]) -> float:
    """Estimate the time from the largest smaller case of the same kind; 0 if there is none."""
    known = [
        row
        for row in rows
        if row.ok and _kind(row.case) == _kind(case) and row.case.tokens <= case.tokens
    ]
    if not known:
        return 0.0
    last = max(known, key=lambda row: row.case.tokens)
    ratio = case.tokens / last.case.tokens
    heads = case.heads / last.case.heads
    return last.milliseconds / 1e3 * ratio ** find(case).growth * heads


def _kind(case: Case) -> tuple[object, ...]:
    return (
        case.operator, case.backend, case.mode, case.width, case.qk_width, case.slices, case.learnt,
        case.dtype,
    )  # fmt: skip
