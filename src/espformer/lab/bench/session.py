"""A run of the benchmark from its options to its files: behind the command, needs torch alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from espformer.lab.bench.cases import TOLERANCES, Case, Measurement
from espformer.lab.bench.measure import run_cases
from espformer.lab.bench.suites import SUITES, device_of, select
from espformer.lab.bench.tables import (
    COLUMNS,
    VERDICT_COLUMNS,
    aligned_table,
    cells,
    file_stem,
    is_failure,
    verdict_cells,
    verdicts,
    write,
)
from espformer.lab.machine import machine
from espformer.ops.common.optional import how_to_install


def run(
    suites: Sequence[str],
    *,
    device: str = "auto",
    row_seconds: float = 3.0,
    output: Path | None = Path("benchmarks/results"),
    program: Sequence[str] = ("espformer", "bench"),
    **choice: Any,
) -> bool:
    """Run suites, print their tables and write them to `output`; whether all is as it should be.

    The options are those of ``espformer bench``; `program` is how it was called, and `choice` goes
    to :func:`~espformer.lab.bench.suites.select`.

    Raises:
        ValueError: an option that does not say what it should.
    """
    where = device_of(device)
    chosen = {suite: select(suite, **choice) for suite in suites or ["quick"]}
    arguments = sys.argv[2:] if program[-1] == "bench" else sys.argv[1:]
    good = True
    for suite, cases in chosen.items():
        command = [*program, *_without_output(arguments)]
        stated = machine(command, where) | _told(cases, row_seconds)
        title = (SUITES[suite].__doc__ or suite).splitlines()[0].rstrip(".")
        stem = None if output is None else output / file_stem(suite, where)
        rows: list[Measurement] = []
        with _progress(suite, len(cases)) as show:
            for row in run_cases(cases, where, row_seconds=row_seconds):
                rows.append(row)
                show(row)
                if stem is not None:  # row by row: what is known is kept, whatever comes next
                    write(stem, title, rows, stated)
        _print_tables(rows, stated)
        if stem is not None:
            for path in write(stem, title, rows, stated) + _plot(stem, stated):
                print(f"written: {path}")
        good = good and not is_failure(rows)
    return good


def _without_output(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without the directory of the results, which does not change them."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word in ("-o", "--output"):
            next(words, None)
        elif not word.startswith(("--output=", "-o")):
            kept.append(word)
    return kept


@contextmanager
def _progress(suite: str, total: int) -> Iterator[Callable[[Measurement], None]]:
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


def _print_tables(rows: Sequence[Measurement], stated: Mapping[str, str]) -> None:
    """Print the rows, the verdicts on targets if these were measured, and the conditions."""
    lines = aligned_table(COLUMNS, [cells(row) for row in rows])
    judged = verdicts(rows)
    if judged:
        lines += ["", *aligned_table(VERDICT_COLUMNS, [verdict_cells(one) for one in judged])]
    lines += ["", *(f"{key}: {value}" for key, value in stated.items())]
    print("\n".join(lines), flush=True)


def _told(cases: Sequence[Case], row_seconds: float) -> dict[str, str]:
    """Return the conditions that follow from the cases and the options."""
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


def _plot(stem: Path, stated: Mapping[str, str]) -> list[Path]:
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
