"""Time and memory of attentions by number of tokens, from the table of `espformer bench`."""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from espformer.lab.plots.style import figure_style, headline, look

_NEEDED = ("operator", "backend", "mode", "tokens", "milliseconds", "status")


class Timing(NamedTuple):
    """A row of the table."""

    series: str
    mode: str
    tokens: int
    heads: int
    dtype: str
    milliseconds: float
    peak_mb: float | None
    captured: bool = False  # as a CUDA graph, without the time that Python takes to launch it


def read_timings(path: Path) -> list[Timing]:
    """Return the rows of a benchmark's CSV that are right; those that failed a check have no time.

    Raises:
        ValueError: if the file has not the columns of a benchmark.
    """
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    missing = [name for name in _NEEDED if not rows or name not in rows[0]]
    if missing:
        raise ValueError(f"the columns {', '.join(missing)} are missing")
    return [
        Timing(
            f"{row['operator']} ({row['backend']})" + _axes(row),
            row["mode"],
            int(row["tokens"]),
            int(row.get("heads") or 1),
            row.get("dtype") or "",
            float(row.get("graph_milliseconds") or row["milliseconds"]),
            float(row["peak_mb"]) if row.get("peak_mb") else None,
            bool(row.get("graph_milliseconds")),
        )
        for row in rows
        if row["status"].startswith("ok") and row["milliseconds"]
    ]


def _axes(row: Mapping[str, str]) -> str:
    """Tell rows whose queries and keys are narrower than their values from others of the name."""
    narrow = row.get("width", "").endswith("to sort")
    return f", {row['slices']} axes" if narrow else ""


def runtime(timings: Sequence[Timing], conditions: str) -> Figure:
    """Return a panel of times for each mode, and one of memory; lines are operators.

    Where the table has several numbers of heads or several dtypes, the one with most rows is drawn.
    """
    if not timings:
        raise ValueError("no row of the table has a time that passed its check")
    ((heads, dtype), _), *_ = Counter((row.heads, row.dtype) for row in timings).most_common(1)
    kept = [row for row in timings if (row.heads, row.dtype) == (heads, dtype)]
    modes = list(dict.fromkeys(row.mode for row in kept))
    names = list(dict.fromkeys(row.series for row in kept))
    panels: list[tuple[str, str, Callable[[Timing], float | None]]] = [
        (mode, "milliseconds", lambda row: row.milliseconds) for mode in modes
    ]
    if any(row.peak_mb for row in kept):
        panels.append((modes[-1], "peak memory, MB", lambda row: row.peak_mb))
    with figure_style():
        figure = Figure(figsize=(3.9 * len(panels) + 2.2, 4.6), layout="constrained")
        told = f"{heads} head{'' if heads == 1 else 's'}, {dtype}. {conditions}".strip()
        if any(row.captured for row in kept):
            told += " Times are those of CUDA graphs where they could be captured."
        headline(figure, "Cost of an attention by number of tokens", told)
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for panel, (mode, unit, value) in zip(axes, panels, strict=True):
            _lines(panel, [row for row in kept if row.mode == mode], names, value)
            panel.set_title(mode if unit == "milliseconds" else f"{mode}, memory")
            panel.set_ylabel(unit)
        lines = {line.get_label(): line for panel in axes for line in panel.lines}
        figure.legend(
            list(lines.values()), [str(name) for name in lines], loc="outside right center"
        )
    return figure


def _lines(
    axes: Axes, rows: list[Timing], names: list[str], value: Callable[[Timing], float | None]
) -> None:
    points: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        number = value(row)
        if number:
            points[row.series][row.tokens] = number
    for name, line in points.items():
        tokens = sorted(line)
        axes.plot(
            tokens, [line[n] for n in tokens], label=name, linewidth=1.5, markersize=4,
            **look(names.index(name)),
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    every = sorted({row.tokens for row in rows})
    axes.set_xticks(every, [f"{n:,}" for n in every], rotation=45 if len(every) > 5 else 0)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:,g}"))
    axes.set_xlabel("tokens N")
    axes.grid(axis="y")
