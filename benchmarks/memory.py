"""Peak memory of one forward and backward: ``python -m benchmarks.memory --help``.

It runs in a separate process, because a peak never falls: earlier work would count.
"""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.arguments import make_parser


class Memory(NamedTuple):
    """Gigabytes (10⁹ bytes) of resident memory."""

    baseline: float  # with torch and kernels loaded and the inputs made, before the call
    peak: float  # the largest until the backward was done

    @property
    def added(self) -> float:
        return self.peak - self.baseline


def peak_memory(tokens: int, slices: int, width: int, **options: str) -> Memory:
    """Measures in a fresh process."""
    arguments = {"tokens": tokens, "slices": slices, "width": width, **options}
    command = [sys.executable, "-m", "benchmarks.memory"]
    command += [f"--{key}={value}" for key, value in arguments.items()]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    return Memory(**json.loads(done.stdout))


def resident_peak() -> float:
    """The largest resident memory of this process so far."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would also count the process that started this one
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def new_peak() -> float:
    """Resets the peak of resident memory, if the system supports it, and returns the new one."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return resident_peak()


def main() -> None:
    parser = make_parser("memory", __doc__)
    parser.add_argument("--tokens", type=int, default=32_768, help="of the sequence")
    parser.add_argument("--slices", type=int, default=16, help="of the head")
    parser.add_argument("--width", type=int, default=64, help="of the head")
    parser.add_argument("--seed", type=int, default=0, help="of queries, keys and values")
    parser.add_argument(
        "--metric", default="absolute", choices=("absolute", "squared"), help="of the sort"
    )
    parser.add_argument("--balance", default="rows", choices=("rows", "both"), help="of the sort")
    parser.add_argument("--backend", default="linear", help="who computes it: linear, cpu or dense")
    options = parser.parse_args()

    from benchmarks.cpu import Setting

    setting = Setting(
        options.tokens, options.slices, options.width, options.metric, options.balance, options.seed
    )
    inputs = setting.inputs()
    if options.backend == "cpu":  # compile first: the compiler needs memory too, once per machine
        small = replace(setting, tokens=128)  # even shorter sequences use other kernels
        small.run(options.backend, small.inputs())
    baseline = resident_peak()
    setting.run(options.backend, inputs)
    print(json.dumps({"baseline": baseline, "peak": resident_peak()}))


if __name__ == "__main__":
    main()
