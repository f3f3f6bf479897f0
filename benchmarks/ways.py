"""Ways to compute one problem with the GPU kernels, side by side, as CUDA graphs that take turns.

Output and gradients of every way are compared with float64 first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from benchmarks.arguments import find_device, make_parser
from benchmarks.measure import print_table
from espformer.lab.bench.attentions import ESP, find
from espformer.lab.bench.cases import MODES, Case, largest_error
from espformer.lab.bench.exact import Oracle, checked_heads, results
from espformer.lab.bench.measure import calling
from espformer.lab.clock import as_graph, interleaved_seconds
from espformer.lab.machine import machine

IN_A_ROW = 5
Ways = dict[str, Callable[[], None]]  # each makes all calls from now on compute in this way


@dataclass(frozen=True)
class Row:
    """One problem, computed in one way."""

    tokens: int
    heads: int
    width: int
    way: str
    forward_ms: str
    both_ms: str
    error: str

    @property
    def failed(self) -> bool:
        return self.error.startswith("FAILED")


def measure(case: Case, ways: Ways, rounds: int, device: torch.device) -> list[Row]:
    from espformer.ops.common import triton as launches

    exact, errors, forward, both = Oracle([case], device)(case), [], [], []
    for choose in ways.values():
        choose()
        launches.forget()
        call = find(case).make(case, device)
        got = results(call, case.inputs(device), True, checked_heads(case))
        errors.append(largest_error(got, exact))
        forward.append(as_graph(calling(call, case.inputs(device), False)))
        both.append(as_graph(calling(call, case.inputs(device), True)))
    counts = [IN_A_ROW] * 2 * len(ways)
    calls = [*forward, *both]
    seconds = interleaved_seconds(calls, rounds, device=device, warm_up=2, counts=counts)
    rows = []
    for i, (way, error) in enumerate(zip(ways, errors, strict=True)):
        right = error <= find(case).tolerance(case.dtype)
        times = (f"{1e3 * s:.3f}" if right else "" for s in seconds[i :: len(ways)])
        told = f"{error:.1e}" if right else f"FAILED: {error:.1e}"
        rows.append(Row(case.tokens, case.heads, case.width, way, *times, told))
    return rows


def compare(
    name: str, description: str | None, sizes: Iterable[tuple[int, int, int]], ways: Ways,
    dtype: str,
) -> None:  # fmt: skip
    """The program of a benchmark: measures problems of (tokens, heads, width) in all ways."""
    parser = make_parser(name, description)
    parser.add_argument("--rounds", type=int, default=7, help="turns of every way")
    parser.add_argument(
        "--attention", choices=list(ESP), default="esp-default",
        help="esp: weighed by costs; esp-balanced: with scales too",
    )  # fmt: skip
    options = parser.parse_args()
    device = find_device(parser, "cuda")
    rows = []
    for tokens, heads, width in sizes:
        case = Case(
            options.attention, "triton", MODES[1], tokens=tokens, heads=heads, width=width,
            dtype=dtype,
        )  # fmt: skip
        rows += measure(case, ways, options.rounds, device)
    stated = machine(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]], device)
    stated["dtype"], stated["slices"] = dtype, "one per column"
    stated["times"] = f"milliseconds of a replayed graph, medians; {IN_A_ROW} in a row"
    print_table(rows, stated)
    if any(row.failed for row in rows):
        raise SystemExit(1)
