"""Ways to compute many narrow heads, side by side: ``python -m benchmarks.narrow_rows``.

Narrow rows are computed in registers (`short_plan.py`) or in chunks (`soft_plan.py`), and
normalisers of short slices in registers (`short_columns.py`) or by scans. Each problem is computed
in every way, as CUDA graphs that take turns. Output and gradients are compared with float64 first.
"""

from __future__ import annotations

import sys
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

SIZES = (  # tokens, heads, width
    (197, 4096, 8), (197, 8192, 4), (50, 4096, 8), (197, 512, 8), (197, 128, 8), (256, 2048, 8),
    (197, 1024, 16),
)  # fmt: skip
NEVER = 1 << 60  # more slices than there are
# The least slices that are computed in registers, and whose columns are.
WAYS = {
    "registers": (1, 1),
    "registers, columns by scans": (1, NEVER),
    "chunks": (NEVER, 1),
    "chunks, columns by scans": (NEVER, NEVER),
}
IN_A_ROW = 5


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


def choose(way: str) -> None:
    """Makes all calls from now on compute in this way."""
    from espformer.ops.common import triton as launches
    from espformer.ops.esp.triton import short_columns, short_plan

    short_plan.LEAST_PAIRS, short_columns.LEAST_PAIRS = WAYS[way]
    launches.forget()


def measure(
    attention: str, size: tuple[int, int, int], rounds: int, device: torch.device
) -> list[Row]:
    tokens, heads, width = size
    case = Case(attention, "triton", MODES[1], tokens=tokens, heads=heads, width=width)
    exact, errors, forward, both = Oracle([case], device)(case), [], [], []
    for way in WAYS:
        choose(way)
        call = find(case).make(case, device)
        got = results(call, case.inputs(device), True, checked_heads(case))
        errors.append(largest_error(got, exact))
        forward.append(as_graph(calling(call, case.inputs(device), False)))
        both.append(as_graph(calling(call, case.inputs(device), True)))
    counts = [IN_A_ROW] * 2 * len(WAYS)
    calls = [*forward, *both]
    seconds = interleaved_seconds(calls, rounds, device=device, warm_up=2, counts=counts)
    rows = []
    for i, (way, error) in enumerate(zip(WAYS, errors, strict=True)):
        right = error <= find(case).tolerance(case.dtype)
        times = (f"{1e3 * s:.3f}" if right else "" for s in seconds[i :: len(WAYS)])
        rows.append(Row(*size, way, *times, f"{error:.1e}" if right else f"FAILED: {error:.1e}"))
    return rows


def main() -> None:
    parser = make_parser("narrow_rows", __doc__)
    parser.add_argument("--rounds", type=int, default=7, help="turns of every way")
    parser.add_argument(
        "--attention", choices=list(ESP), default="esp-default",
        help="esp: weighed by costs; esp-balanced: with scales too",
    )  # fmt: skip
    options = parser.parse_args()
    device = find_device(parser, "cuda")
    rows = [
        row for size in SIZES for row in measure(options.attention, size, options.rounds, device)
    ]
    stated = machine(["python", "-m", "benchmarks.narrow_rows", *sys.argv[1:]], device)
    stated["times"] = f"milliseconds of a replayed graph, medians; {IN_A_ROW} in a row"
    print_table(rows, stated)
    if any(row.failed for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
