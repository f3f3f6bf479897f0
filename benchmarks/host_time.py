"""Attention called from Python and as a CUDA graph: ``python -m benchmarks.host_time``.

A graph replays kernels without Python, so the difference is what launching them costs. Calls are
queued, 20 in a row, and the device is waited for after the last: the time of a call is that of the
slower of the two, Python or the device. The backward pass runs in a thread of autograd's own, and,
in a second measurement, in the thread that calls it (`set_multithreading_enabled`). The attentions
have their turns one after the other. Output and gradients are compared with float64 first. Kernels
are compiled by one process per attention, at the same time.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.arguments import find_device, make_parser
from benchmarks.measure import print_table
from espformer.lab.bench.attentions import find
from espformer.lab.bench.cases import MODES, Case, largest_error
from espformer.lab.bench.exact import Oracle, checked_heads, results
from espformer.lab.bench.measure import calling
from espformer.lab.clock import as_graph, interleaved_seconds
from espformer.lab.machine import machine

BOTH = MODES[1]
CASES: Mapping[str, Case] = MappingProxyType(
    {
        "default": Case("esp-default", "triton", BOTH, tokens=197, heads=512, slices=8),
        "mean": Case("esp-mean", "triton", BOTH, qk_width=8),
        "costs": Case("esp", "triton", BOTH, qk_width=8),
        "hard": Case("esp-hard-mean", "triton", MODES[0], qk_width=8),
        "sinkhorn": Case("sinkhorn-3", "triton", BOTH),
    }
)
IN_A_ROW = 20
TARGET = 1.15  # times the graph


@dataclass(frozen=True)
class Row:
    """One attention."""

    name: str
    operator: str
    mode: str
    tokens: int
    heads: int
    slices: int
    launches: str
    from_python: str  # microseconds
    one_thread: str
    as_graph: str
    ratio: str  # of one thread and the graph
    error: str

    @property
    def failed(self) -> bool:
        return self.error.startswith("FAILED")


def call_of(case: Case, device: torch.device) -> Callable[[], object]:
    return calling(find(case).make(case, device), case.inputs(device), case.backward)


def in_one_thread(call: Callable[[], object]) -> Callable[[], object]:
    """The call, with the backward pass in the thread that calls it."""

    def alone() -> object:
        with torch.autograd.set_multithreading_enabled(False):
            return call()

    return alone


def error_of(case: Case, device: torch.device) -> float:
    """The largest relative error of output and gradients against float64."""
    attention = find(case).make(case, device)
    got = results(attention, case.inputs(device), case.backward, checked_heads(case))
    return largest_error(got, Oracle([case], device)(case))


def launches_of(call: Callable[[], object]) -> float:
    """Kernels that a call launches, those of torch included."""
    calls = 3
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    return sum(e.count for e in found.key_averages() if e.self_device_time_total > 0) / calls


def compile_all(names: list[str]) -> None:
    """Compiles the kernels of all attentions, each in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.host_time", "--compile-only", "--only"]
    processes = [subprocess.Popen([*command, name]) for name in names]
    if any(process.wait() for process in processes):
        raise SystemExit("a process that compiles kernels failed; what it printed says why")


def main() -> None:
    parser = make_parser("host_time", __doc__)
    parser.add_argument(
        "--only", nargs="+", default=list(CASES), choices=list(CASES), help="some of them"
    )
    parser.add_argument("--rounds", type=int, default=15, help="turns of every attention")
    parser.add_argument("--compile-only", action="store_true", help="call each once, and end")
    options = parser.parse_args()
    device = find_device(parser, "cuda")
    cases = {name: CASES[name] for name in options.only}
    if options.compile_only:
        for case in cases.values():
            call_of(case, device)()
        torch.cuda.synchronize()
        return
    compile_all(list(cases))
    errors = {name: error_of(case, device) for name, case in cases.items()}
    calls = [call_of(case, device) for case in cases.values()]
    timed = [*calls, *map(in_one_thread, calls), *map(as_graph, calls)]
    counts = [IN_A_ROW] * len(timed)
    seconds = interleaved_seconds(timed, options.rounds, device=device, warm_up=3, counts=counts)
    launches = [launches_of(call) for call in calls]  # last: a profiler slows down what follows
    rows = []
    for i, (name, case) in enumerate(cases.items()):
        python, alone, graph = (1e6 * x for x in seconds[i :: len(calls)])
        right = errors[name] <= find(case).tolerance(case.dtype)
        row = Row(
            name, case.operator, case.mode, case.tokens, case.heads, case.slice_count,
            f"{launches[i]:.0f}",
            *(f"{x:.0f}" if right else "" for x in (python, alone, graph)),
            f"{alone / graph:.2f}" if right else "",
            f"{errors[name]:.1e}" if right else f"FAILED: {errors[name]:.1e}",
        )  # fmt: skip
        rows.append(row)
    stated = machine(["python", "-m", "benchmarks.host_time", *sys.argv[1:]], device)
    stated["times"] = f"microseconds a call, medians; {IN_A_ROW} calls are queued in a row"
    stated["target"] = f"a call from one thread takes at most {TARGET} times the graph"
    print_table(rows, stated)
    if any(row.failed for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
