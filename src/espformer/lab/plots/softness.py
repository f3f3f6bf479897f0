"""Accuracy by the softness of the sort: both metrics, balance, and learnt temperatures."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from espformer.lab.plots.style import MUTED, SERIES, figure_style, headline, mean_line


class SoftScore(NamedTuple):
    """The score of a run of ESP, and how it sorted."""

    series: str
    metric: str
    sort_temperature: float
    value: float
    learnt: bool = False

    @property
    def width(self) -> float:
        """The width of the soft sort: t with the absolute metric, √t with the squared one."""
        t = self.sort_temperature
        return math.sqrt(t) if self.metric == "squared" else t


def scores_by_softness(
    scores: Sequence[SoftScore],
    others: Mapping[str, Sequence[float]],
    title: str,
    unit: str,
    conditions: str,
) -> Figure:
    """Mean and standard deviation by width of the soft sort; a mark for each run that learnt t.

    Args:
        scores: of the runs of ESP; those of a series with a given t make a line, those that learnt
            it are marks at what they learnt.
        others: scores of attentions without a sort, drawn as levels, or named.
        title: of the figure.
        unit: of the scores.
        conditions: a line below the title.
    """
    lines: dict[str, list[SoftScore]] = defaultdict(list)
    for score in scores:
        lines[score.series].append(score)
    with figure_style():
        figure = Figure(figsize=(8.6, 4.8), layout="constrained")
        headline(figure, title, conditions)
        axes = figure.subplots()
        for index, (name, runs) in enumerate(lines.items()):
            colour = SERIES[index % len(SERIES)]
            if any(run.learnt for run in runs):
                axes.plot(
                    [run.width for run in runs], [run.value for run in runs], linestyle="",
                    marker="*", markersize=9, markeredgewidth=0, color=colour, label=name,
                )  # fmt: skip
            else:
                _line(axes, name, runs, 1.03 ** (index - 1), colour)
        _levels(axes, others)
        axes.set_xscale("log")
        axes.set_xticks(
            [0.01, 0.03, 0.1, 0.3, 1, 3, 10], ["0.01", "0.03", "0.1", "0.3", "1", "3", "10"]
        )
        axes.minorticks_off()
        widths = [score.width for score in scores]
        axes.set_xlim(min(widths) / 1.25, max(widths) * 1.25)
        axes.set(xlabel="width of the soft sort: √t squared, t absolute", ylabel=unit)
        axes.grid(axis="y")
        named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        order = [*lines, *(name for name in named if name not in lines)]
        axes.legend(
            [named[name] for name in order], order, loc="center left", bbox_to_anchor=(1.0, 0.5)
        )
    return figure


def _line(axes: Axes, name: str, runs: Sequence[SoftScore], aside: float, colour: str) -> None:
    by_width: dict[float, list[float]] = defaultdict(list)
    for run in runs:
        by_width[run.width].append(run.value)
    widths = sorted(by_width)
    # Two points are no curve.
    look: dict[str, Any] = (
        {"marker": "o", "linestyle": "-"} if len(widths) > 2 else {"marker": "s", "linestyle": ""}
    )
    values = [by_width[width] for width in widths]
    mean_line(axes, [width * aside for width in widths], values, label=name, color=colour, **look)


def _levels(axes: Axes, others: Mapping[str, Sequence[float]]) -> None:
    """Draw a line across for each level; one far off is only named, so that curves keep room."""
    low, high = axes.get_ylim()
    far = []
    for (name, values), style in zip(others.items(), cycle((":", "--", "-."))):
        mean = statistics.fmean(values)
        if low - (high - low) / 2 < mean < high + (high - low) / 2:
            axes.axhline(mean, color=MUTED, linestyle=style, linewidth=1.2, label=name)
        else:
            far.append(f"{name} {mean:.2f}, {'below' if mean < low else 'above'} the axis")
    if far:
        axes.annotate(
            "\n".join(far), (0.99, 0.02), xycoords="axes fraction", color=MUTED, fontsize=8.5,
            ha="right",
        )  # fmt: skip
