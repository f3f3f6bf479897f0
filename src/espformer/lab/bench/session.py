"""A run of the benchmark from its options to its files: behind the command, needs torch alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from espformer.lab.bench import terminal
from espformer.lab.bench.cases import Measurement
from espformer.lab.bench.measure import run_cases
from espformer.lab.bench.suites import SUITES, pick_device, select
from espformer.lab.bench.tables import file_stem, is_failure, write
from espformer.lab.machine import machine


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
    where = pick_device(device)
    chosen = {suite: select(suite, **choice) for suite in suites or ["quick"]}
    arguments = sys.argv[2:] if program[-1] == "bench" else sys.argv[1:]
    good = True
    for suite, cases in chosen.items():
        command = [*program, *_without_output(arguments)]
        stated = machine(command, where) | terminal.told(cases, row_seconds)
        title = (SUITES[suite].__doc__ or suite).splitlines()[0].rstrip(".")
        stem = None if output is None else output / file_stem(suite, where)
        rows: list[Measurement] = []
        with terminal.progress(suite, len(cases)) as show:
            for row in run_cases(cases, where, row_seconds=row_seconds):
                rows.append(row)
                show(row)
                if stem is not None:  # row by row: what is known is kept, whatever comes next
                    write(stem, title, rows, stated)
        terminal.print_tables(rows, stated)
        if stem is not None:
            for path in write(stem, title, rows, stated) + terminal.plot(stem, stated):
                print(f"written: {path}")
        good = good and not is_failure(rows)
    return good


def _without_output(arguments: Sequence[str]) -> list[str]:
    """Arguments but for the directory that results go to, which says nothing about them."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word in ("-o", "--output"):
            next(words, None)
        elif not word.startswith(("--output=", "-o")):
            kept.append(word)
    return kept
