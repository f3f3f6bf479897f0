"""The benchmark on a terminal: progress while it runs, and its tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from espformer.lab.bench.cases import TOLERANCES, Case, Measurement
from espformer.lab.bench.tables import (
    COLUMNS,
    VERDICT_COLUMNS,
    aligned_table,
    cells,
    verdict_cells,
    verdicts,
)
from espformer.ops.common.optional import how_to_install


@contextmanager
def progress(suite: str, total: int) -> Iterator[Callable[[Measurement], None]]:
    """Yield a bar on the error stream, if rich is installed; yields what prints a finished row."""
    try:
        from rich import progress as bars
        from rich.console import Console
    except ModuleNotFoundError:
        done = iter(range(1, total + 1))
        yield lambda row: print(
            f"[{suite} {next(done)}/{total}] {_line(row)}", file=sys.stderr, flush=True
        )
        return
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
    )
    with bars.Progress(*columns, console=Console(stderr=True, soft_wrap=True)) as bar:
        task = bar.add_task(suite, total=total)

        def show(row: Measurement) -> None:
            bar.console.print(_line(row), highlight=False, markup=False)
            bar.advance(task)

        yield show


def print_tables(rows: Sequence[Measurement], stated: Mapping[str, str]) -> None:
    """The rows, the verdicts on targets if these were measured, and the conditions."""
    lines = aligned_table(COLUMNS, [cells(row) for row in rows])
    judged = verdicts(rows)
    if judged:
        lines += ["", *aligned_table(VERDICT_COLUMNS, [verdict_cells(one) for one in judged])]
    lines += ["", *(f"{key}: {value}" for key, value in stated.items())]
    print("\n".join(lines), flush=True)


def told(cases: Sequence[Case], row_seconds: float) -> dict[str, str]:
    """Conditions that the cases and the options decide."""
    dtypes = sorted({case.dtype for case in cases})
    limits = ", ".join(f"{name} {TOLERANCES[name]:.0e}" for name in dtypes)
    return {
        "dtype": ", ".join(dtypes),
        "shapes": "heads × tokens × width as in the table (heads = batch × heads), axis slices; "
        "queries, keys, values and upstream gradient from N(0, 1)",
        "temperatures": "absolute metric t = 0.1, squared t = 1e-3; τ = 0.1, in -mean τ = 0; "
        "Sinkhorn ε = 1",
        "seeds": ", ".join(str(seed) for seed in sorted({case.seed for case in cases})),
        "times": f"medians of 5 to 50 calls in about {row_seconds / 4:g} s, second-level cache "
        "written over before each; sorts included",
        "error": "largest ‖difference‖ / ‖exact‖ of output and gradients against float64 (dense "
        f"where it fits) on the first and the last head; allowed: {limits}, ten times that for "
        "peers",
        "peak_mb": "10⁶ bytes on the GPU: inputs, upstream gradient, results, all between",
    }


def plot(stem: Path, stated: Mapping[str, str]) -> list[Path]:
    """Draw the written table by number of tokens: if it has several, and matplotlib is there."""
    try:
        from espformer.lab.plots import read_timings, runtime, save_figure
    except ModuleNotFoundError as missing:
        print(f"no plot: it needs {how_to_install(missing.name, 'plots')}")
        return []
    timings = read_timings(stem.with_name(f"{stem.name}.csv"))
    if len({row.tokens for row in timings}) < 2:
        return []
    machine = stated.get("gpu", stated.get("cpu", ""))
    told = f"{machine}; torch {stated['torch']}; medians.\n{stated['command']}"
    return save_figure(runtime(timings, told), stem)


def _line(row: Measurement) -> str:
    case = row.case
    name = f"{case.operator}/{case.backend} {case.mode} N={case.tokens} heads={case.heads}"
    if not row.ok:
        return f"{name}: {row.status}"
    return f"{name}: {row.milliseconds:.3f} ms, error {row.error:.1e}"
