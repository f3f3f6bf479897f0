"""Scores by setting: the paper's figure of accuracy by patch size, and others like it."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from espformer.plots.style import SERIES, figure_style, headline

__all__ = ["Score", "scores_by_setting"]

_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


class Score(NamedTuple):
    """The score of a run."""

    series: str
    setting: str
    value: float


def scores_by_setting(scores: Sequence[Score], title: str, unit: str, conditions: str) -> Figure:
    """Mean and standard deviation over runs, a line for each series.

    Settings that are numbers with a name, such as ``patch=4``, stand at their numbers on a
    logarithmic axis with the name below it; others stand side by side.
    """
    settings = list(dict.fromkeys(score.setting for score in scores))
    numbers = [re.fullmatch(r"(.+)=([0-9.]+)", setting) for setting in settings]
    numeric = all(numbers) and len({m[1] for m in numbers if m}) == 1
    places = {
        setting: float(match[2]) if numeric and match else float(index)
        for index, (setting, match) in enumerate(zip(settings, numbers, strict=True))
    }
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for score in scores:
        values[score.series][score.setting].append(score.value)
    with figure_style():
        figure = Figure(figsize=(8.6, 4.8), layout="constrained")
        headline(figure, title, conditions)
        axes = figure.subplots()
        for index, (name, line) in enumerate(values.items()):
            # Neighbours stand a little apart, so that their bars do not hide each other.
            aside = 1 + 0.012 * (index - (len(values) - 1) / 2) if numeric else 1.0
            known = sorted(line, key=lambda setting: places[setting])
            axes.errorbar(
                [places[s] * aside for s in known],
                [statistics.fmean(line[s]) for s in known],
                yerr=[statistics.stdev(line[s]) if len(line[s]) > 1 else 0.0 for s in known],
                label=name, capsize=2.5, linewidth=1.6, elinewidth=0.9, markersize=4.5,
                color=SERIES[index % len(SERIES)],
                marker=_MARKERS[index // len(SERIES) % len(_MARKERS)],
            )  # fmt: skip
        if numeric:
            axes.set_xscale("log", base=2)
            first = next(match for match in numbers if match)
            axes.set_xticks(list(places.values()), [f"{place:g}" for place in places.values()])
            axes.minorticks_off()
            axes.set_xlabel(first[1])
        else:
            axes.set_xticks(list(places.values()), settings)
        axes.set_ylabel(unit)
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
