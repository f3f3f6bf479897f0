"""Differentiable sorts side by side, forward and backward: ``python -m benchmarks.sorting``.

There are three tasks: sort numbers, rank them, and sort rows of eight values by one number. On a
CPU every method runs in a separate process for each task and batch size, with limits of time and
memory, so that a failure does not affect others and its peak memory is its own. On a GPU, which
counts its memory itself, methods share a process until one fails. Lengths ascend. Other
libraries are measured if they can be imported: torchsort, fast-soft-sort, diffsort and SoftTorch;
the table lists those that cannot.

The libraries relax the sort in different ways, each at its default softness. So each is compared
with itself in float64, output and gradients. Ours and the dense formula are compared with the dense
formula, and ours with the operator in torch if the dense formula would be too large. To measure on
a GPU: ``--device cuda``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.arguments import find_device, make_parser
from benchmarks.measure import Company, print_table, write_results
from benchmarks.memory import new_peak, resident_peak
from espformer import sorting
from espformer.lab.bench.cases import largest_error
from espformer.lab.bench.tables import file_stem
from espformer.lab.machine import machine

LENGTHS, BATCHES, WIDTH = (100, 1_000, 10_000, 100_000, 1_000_000), (1, 64), 8
TEMPERATURE = 0.1  # shares of the spread, which is one here
SECONDS, GIGABYTES = 8.0, 8.0  # limits: of one size, and again of its check; of a process
IMPORTS = 60.0  # seconds until a process has begun
COMPILES = 40.0  # seconds of the first call of a size on a GPU, which is not timed
DENSE_ORACLE = 1e7  # entries of all matrices: up to here the oracle is the dense formula
TORCH_ORACLE = 2e6  # numbers: up to here the oracle of ours is the operator in torch
TOLERANCE, PEER_TOLERANCE = 1e-3, 1e-2
ENOUGH = 0.5  # seconds of calls of one size

Sort = Callable[..., Tensor]


@dataclass(frozen=True)
class Row:
    """Time, memory and error of one method for one task and size."""

    task: str
    method: str
    numbers: str
    batch: int
    milliseconds: str
    times_ours: str
    memory_mb: str
    error: str
    status: str


def dense_matrix(x: Tensor) -> Tensor:
    """SoftSort as printed, in units of the spread: (batch, ranks, tokens)."""
    x = x / x.std(-1, correction=0, keepdim=True)
    ordered = x.sort(-1).values
    return (-(ordered.unsqueeze(-1) - x.unsqueeze(-2)).abs() / TEMPERATURE).softmax(-1)


def dense_sort(x: Tensor, values: Tensor | None = None) -> Tensor:
    rows = x.unsqueeze(-1) if values is None else values
    return (dense_matrix(x) @ rows).reshape(x.shape if values is None else values.shape)


def dense_rank(x: Tensor) -> Tensor:
    matrix = dense_matrix(x)
    numbered = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device)
    return (numbered @ matrix) / matrix.sum(-2)


def torch_rank(x: Tensor) -> Tensor:
    """Exact ranks. ``0 * x`` connects them to x, so that a backward pass is possible."""
    return (x.argsort(-1).argsort(-1) + 1).to(x.dtype) + 0 * x


def fast_soft_sort(name: str, x: Tensor) -> Tensor:
    from fast_soft_sort import pytorch_ops

    result: Tensor = getattr(pytorch_ops, name)(x)
    return result


def torchsort(name: str, x: Tensor) -> Tensor:
    import torchsort

    result: Tensor = getattr(torchsort, name)(x)
    return result


def softtorch(name: str, method: str, x: Tensor) -> Tensor:
    import softtorch

    if name == "rank":
        ranks: Tensor = softtorch.rank(x, dim=-1, method=method, descending=False)
        return ranks
    ordered: Tensor = softtorch.sort(x, method=method, return_indices=False).values
    return ordered


def softtorch_rows(x: Tensor, values: Tensor) -> Tensor:
    import softtorch

    rows: Tensor = softtorch.argsort(x, method="softsort") @ values
    return rows


def diffsort(x: Tensor) -> Tensor:
    """A network of a power of two; numbers far beyond fill it up, and come last."""
    from diffsort import DiffSortNet

    size = 1 << (x.shape[-1] - 1).bit_length()
    full = torch.nn.functional.pad(x, (0, size - x.shape[-1]), value=1e3)
    network = DiffSortNet("bitonic", size, device=x.device)
    ordered: Tensor = network(full)[0][..., : x.shape[-1]]
    return ordered


OURS, DENSE = "espformer", "SoftSort, dense"
METHODS: dict[str, dict[str, Sort]] = {
    "sort": {
        OURS: partial(sorting.soft_sort, temperature=TEMPERATURE),
        "torch.sort (hard)": lambda x: x.sort(-1).values,
        DENSE: dense_sort,
        "torchsort": partial(torchsort, "soft_sort"),
        "fast-soft-sort": partial(fast_soft_sort, "soft_sort"),
        "diffsort, bitonic": diffsort,
        "SoftTorch, SoftSort": partial(softtorch, "sort", "softsort"),
        "SoftTorch, fast_soft_sort": partial(softtorch, "sort", "fast_soft_sort"),
        "SoftTorch, network": partial(softtorch, "sort", "sorting_network"),
    },
    "rank": {
        OURS: partial(sorting.soft_rank, temperature=TEMPERATURE),
        "torch.argsort (hard)": torch_rank,
        DENSE: dense_rank,
        "torchsort": partial(torchsort, "soft_rank"),
        "fast-soft-sort": partial(fast_soft_sort, "soft_rank"),
        "SoftTorch, SoftSort": partial(softtorch, "rank", "softsort"),
        "SoftTorch, fast_soft_sort": partial(softtorch, "rank", "fast_soft_sort"),
    },
    "rows": {
        OURS: partial(sorting.soft_sort, temperature=TEMPERATURE),
        DENSE: dense_sort,
        "SoftTorch, SoftSort": softtorch_rows,
    },
}
MODULES = {
    "torchsort": "torchsort",
    "fast-soft-sort": "fast_soft_sort",
    "diffsort": "diffsort",
    "SoftTorch": "softtorch",
}


def package(method: str) -> str | None:
    return next((p for p in MODULES if method.startswith(p)), None)


def absent() -> list[str]:
    return [name for name, module in MODULES.items() if importlib.util.find_spec(module) is None]


def inputs(task: str, batch: int, count: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Numbers, and rows where there are some; drawn in float32, whatever the dtype."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, count)] + ([(batch, count, WIDTH)] if task == "rows" else [])
    drawn = (torch.randn(shape, generator=generator) for shape in shapes)
    return [x.to(device, dtype).requires_grad_() for x in drawn]


def forward_backward(sort: Sort, tensors: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients for a fixed upstream gradient."""
    out = sort(*tensors)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).sin()
    return [out, *torch.autograd.grad(out, tensors, upstream.view_as(out))]


def measure(task: str, method: str, count: int, batch: int, device: str) -> Iterator[dict]:
    """Yields the minimum seconds and the peak memory beyond the inputs, then the error."""
    sort = METHODS[task][method]
    tensors = inputs(task, batch, count, device, torch.float32)
    cuda = device == "cuda"
    if cuda:
        forward_backward(sort, tensors)  # kernels are compiled
        torch.cuda.synchronize()
        yield {"compiled": True}
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    else:
        before = new_peak()
    # On a CPU, measure the CPU time of the process: others may use the machine meanwhile.
    clock = time.perf_counter if cuda else time.process_time
    times: list[float] = []
    while not times or (sum(times) < ENOUGH and len(times) < 100):
        start = clock()
        got = forward_backward(sort, tensors)
        if cuda:
            torch.cuda.synchronize()
        times.append(clock() - start)
        if len(times) == 1:
            peak = torch.cuda.max_memory_allocated() if cuda else resident_peak()
    memory = (peak - before) / 1e6 if cuda else (peak - before) * 1e3
    yield {"seconds": min(times), "memory_mb": memory}
    exact = inputs(task, batch, count, device, torch.float64)
    if method in (OURS, DENSE) and batch * count**2 <= DENSE_ORACLE:
        sort = METHODS[task][DENSE]
    elif method == OURS and batch * count <= TORCH_ORACLE:
        sort = partial(sort, backend="linear")
    yield {"error": largest_error(got, forward_backward(sort, exact))}


def measure_all(task: str, methods: list[str], batch: int, counts: list[int], device: str) -> None:
    """Prints a line when a size starts, when it has been timed and when it has been checked.

    A method that runs out of the GPU's memory is left there, and the next one starts.
    """
    for method in methods:
        forward_backward(METHODS[task][method], inputs(task, 1, 8, device, torch.float32))
        for count in counts:
            print(json.dumps({"method": method, "count": count}), flush=True)
            try:
                for found in measure(task, method, count, batch, device):
                    print(json.dumps(found), flush=True)
            except torch.OutOfMemoryError:
                print(json.dumps({"status": "out of memory"}), flush=True)
                torch.cuda.empty_cache()


def run(
    task: str, methods: list[str], batch: int, counts: list[int], device: str
) -> dict[str, dict[int, dict]]:
    """Measure each method in a fresh process, by length, up to a failure and its cause."""
    command = [sys.executable, "-m", "benchmarks.sorting", "--device", device]
    command += ["--one", task, ";".join(methods), str(batch), *map(str, counts)]
    found: dict[str, dict[int, dict[str, Any]]] = {methods[0]: {}}
    late, method = "", methods[0]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=Path(__file__).parents[1]
        ) as process,
    ):
        assert process.stdout is not None
        limit, now = IMPORTS, None
        while True:
            timer = threading.Timer(limit, process.kill)
            timer.start()
            start, line = time.monotonic(), process.stdout.readline()
            timer.cancel()
            if not line:
                late = f"over {SECONDS:g} s" if time.monotonic() - start >= limit else ""
                break
            news = json.loads(line) if line.startswith("{") else {}
            if "count" in news:
                method = news["method"]
                now = found.setdefault(method, {}).setdefault(news["count"], {})
            elif now is not None:
                now.update(news)
            # On a GPU the first call of a size may compile kernels, which takes its time.
            limit = COMPILES if "count" in news and device == "cuda" else SECONDS
        process.wait()
        errors.seek(0)
        text = errors.read()
    unfinished = [n for n in counts if not {"error", "status"} & set(found[method].get(n, {}))]
    if unfinished:
        memory = any(x in text for x in ("memory", "MemoryError", "allocate"))
        last = text.strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
        found[method].setdefault(unfinished[0], {})["status"] = late or (
            "out of memory" if memory else last[0][:60]
        )
    return found


def row(task: str, method: str, count: int, batch: int, found: dict[str, Any], ours: float) -> Row:
    seconds, error = found.get("seconds"), found.get("error")
    status = found.get("status", "ok")
    if error is not None:
        limit = TOLERANCE if method in (OURS, DENSE) else PEER_TOLERANCE
        status = "ok" if error <= limit else "FAILED" if limit == TOLERANCE else "not itself"
    elif seconds is not None:
        status = f"not checked, float64: {status}"
    return Row(
        task, method, f"{count:,}", batch,
        "–" if seconds is None else f"{1e3 * seconds:,.2f}",
        "–" if seconds is None or math.isnan(ours) else f"{seconds / ours:.2f}",
        "–" if seconds is None else f"{found['memory_mb']:,.0f}",
        "–" if error is None else f"{error:.1e}",
        status,
    )  # fmt: skip


def sizes(
    task: str, methods: list[str], batch: int, counts: list[int], device: str
) -> dict[str, dict[int, dict[str, Any]]]:
    """Calls :func:`run` for one method after the other, or for all that are left on a GPU.

    It calls again after a failure, for the methods that are left; and for longer sequences of the
    same method if the size was timed and only its check failed.
    """
    found: dict[str, dict[int, dict[str, Any]]] = {}
    todo = [(method, list(counts)) for method in methods]
    while todo:
        method, left = todo[0]
        together = [method]
        if device == "cuda":  # where memory is measured without a process for each
            together = [name for name, sizes in todo if sizes == left]
        for name, measured in run(task, together, batch, left, device).items():
            found[name] = found.get(name, {}) | measured
            todo = [x for x in todo if x[0] != name]
            stopped = [n for n in left if "error" not in measured.get(n, {})]
            if not stopped:
                continue
            longer = left[left.index(stopped[0]) + 1 :]
            if "seconds" not in measured.get(stopped[0], {}):
                cause = {"status": f"see N = {stopped[0]:,}"}
                found[name] |= {n: dict(cause) for n in longer}
            elif [n for n in longer if n not in found[name]]:
                todo.insert(0, (name, longer))
    return found


def table(
    tasks: list[str], lengths: list[int], batches: list[int], device: str, methods: list[str] | None
) -> list[Row]:
    """The rows, ordered by size."""
    rows, missing, lengths = [], absent(), sorted(lengths)
    for task in tasks:
        for batch in batches:
            present = [
                method for method in METHODS[task]
                if package(method) not in missing and (not methods or method in methods)
            ]  # fmt: skip
            found = sizes(task, present, batch, lengths, device)
            for method, by_length in found.items():
                told = (f"{n:,}: {1e3 * x['seconds']:,.2f}" if "seconds" in x else
                        f"{n:,}: {x['status']}" for n, x in by_length.items())  # fmt: skip
                print(f"{task}, batch {batch}, {method}: {'; '.join(told)}", file=sys.stderr)
            for count in lengths:
                ours = found.get(OURS, {}).get(count, {}).get("seconds", math.nan)
                rows += [row(task, x, count, batch, found[x][count], ours) for x in found]
    return rows


def main() -> int:
    parser = make_parser("sorting", __doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure")
    parser.add_argument(
        "--tasks", nargs="+", choices=METHODS, default=list(METHODS), help="what is measured"
    )
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=list(LENGTHS), help="numbers of a row"
    )
    parser.add_argument(
        "--batches", nargs="+", type=int, default=list(BATCHES), help="rows at once"
    )
    parser.add_argument("--methods", nargs="+", help="some of them, by the names of the table")
    parser.add_argument("--dry-run", action="store_true", help="print, and write no results")
    parser.add_argument("--one", nargs="+", metavar="TASK METHODS BATCH N", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = find_device(parser, options.device)
    if options.one:
        task, named, batch, *counts = options.one
        if options.device == "cpu":
            limit = int(GIGABYTES * 1e9)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
            torch.set_num_threads(1)  # others would wait for work on the clock of the process
        measure_all(task, named.split(";"), int(batch), [int(n) for n in counts], options.device)
        return 0

    company = Company()
    rows = table(options.tasks, options.lengths, options.batches, options.device, options.methods)
    stated = machine(["python", "-m", "benchmarks.sorting", *sys.argv[1:]], device) | {
        "dtype": "float32",
        "shapes": f"(batch, N) normal numbers; rows: {WIDTH} values for each",
        "seeds": "0",
        "softness": f"espformer and dense SoftSort: {TEMPERATURE} of the spread; others: defaults",
        "absent": ", ".join(absent()) or "none",
        "company": str(company),
        "repeats": f"least of as many as fit in {ENOUGH:g} s, one at least, forward + backward; on "
        "a CPU the time that the process computed, on one thread",
        "memory": "peak above what the inputs and the loaded libraries take, in 10⁶ bytes",
        "limits": f"{SECONDS:g} s for a size, and again for its check; on a CPU {GIGABYTES:g} GB; "
        "on a GPU the first call, which compiles kernels, is not timed",
        "error": "largest ‖difference‖ / ‖exact‖ of output and gradients: espformer and dense "
        f"against the dense formula in float64 up to batch · N² = {DENSE_ORACLE:g}, espformer then "
        f"against its torch operator in float64 up to batch · N = {TORCH_ORACLE:g}; all others "
        f"against themselves in float64 ('not itself': off by more than {PEER_TOLERANCE:g})",
    }
    print_table(rows, stated)
    if not options.dry_run:
        for path in write_results(
            file_stem("sorting", device), "Differentiable sorts", rows, stated
        ):
            print(f"written: {path}")
    return 1 if any(x.status == "FAILED" for x in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
