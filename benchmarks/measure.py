"""Code that the benchmarks share: timers, errors, conditions and tables."""

from __future__ import annotations

import csv
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from espformer.lab.bench.tables import aligned_table, markdown_table
from espformer.lab.machine import machine

RESULTS = Path(__file__).parent / "results"

# Largest relative error of a float32 result against the float64 oracle.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Row:
    """One line of the table; every cell is formatted text."""

    measurement: str
    tokens: int
    slices: int | str
    metric: str
    balance: str
    result: str
    compared_with: str
    ratio: str
    error: str
    target: str
    verdict: str

    @property
    def failed(self) -> bool:
        return self.verdict == "FAILED"


def header(rows: Sequence[Any]) -> list[str]:
    """The names of the columns, from the fields of the row's dataclass."""
    return [field.name.replace("_", " ") for field in fields(rows[0])]


def verdict(met: bool, error: float | None = None, tolerance: float = TOLERANCE) -> str:
    """``ok`` if the target is met and the error is within the tolerance."""
    right = error is None or error <= tolerance  # False for NaN
    return "ok" if met and right else "FAILED"


class Company:
    """The CPU time that other processes used meanwhile, which makes timings unreliable."""

    def __init__(self) -> None:
        self.start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Wall-clock seconds, busy seconds of all cores, and CPU seconds of this process."""
        stat = Path("/proc/stat")
        if not stat.exists():
            return None
        ticks = [int(x) for x in stat.read_text().split("\n", 1)[0].split()[1:9]]
        busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # idle and I/O wait
        return time.monotonic(), busy, sum(os.times()[:4])

    def __str__(self) -> str:
        now = self._now()
        if now is None or self.start is None:
            return "not known"
        wall, busy, own = (b - a for a, b in zip(self.start, now, strict=True))
        return f"other processes used {max(busy - own, 0) / wall:.2f} cores on average"


ENOUGH = 6.0  # seconds, over all calls, after which no further round starts


def least_seconds(
    calls: Sequence[Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.process_time,
    enough: float = ENOUGH,
) -> list[float]:
    """The minimum time of each call, over ``rounds + 1`` rounds, or fewer once `enough` has passed.

    The calls take turns. By default the clock counts CPU time of this process, which other
    processes on the machine hardly affect; on one idle thread it equals wall-clock time. The first
    round, which may be slow, counts only if there is no other.
    """
    found = [float("inf")] * len(calls)
    began = clock()
    for _ in range(rounds + 1):
        for i, call in enumerate(calls):
            start = clock()
            call()
            found[i] = min(found[i], clock() - start)
        if clock() - began > enough:
            break
    return found


def conditions(module: str, **more: object) -> dict[str, str]:
    """The conditions needed to reproduce the numbers."""
    stated = machine(["python", "-m", module, *sys.argv[1:]], torch.device("cpu"))
    return stated | {key: str(value) for key, value in more.items()}


def print_table(rows: Sequence[Any], stated: dict[str, str]) -> None:
    for line in aligned_table(header(rows), [[str(cell) for cell in astuple(row)] for row in rows]):
        print(line)
    print()
    for key, value in stated.items():
        print(f"{key}: {value}")


def write_results(name: str, title: str, rows: Sequence[Any], stated: dict[str, str]) -> list[Path]:
    """``results/name.md`` for people and ``results/name.csv`` for programs."""
    RESULTS.mkdir(exist_ok=True)
    markdown, table = RESULTS / f"{name}.md", RESULTS / f"{name}.csv"
    cells = [[str(cell) for cell in astuple(row)] for row in rows]
    lines = [f"# {title}", ""]
    lines += [f"- {key}: {value}" for key, value in stated.items()]
    lines += ["", *markdown_table(header(rows), cells)]
    markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*header(rows), *stated])
        writer.writerows([*line, *stated.values()] for line in cells)
    return [markdown, table]
