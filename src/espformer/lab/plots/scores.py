"""Scores by setting: the paper's figure of accuracy by patch size, and others like it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from espformer.lab.plots.style import figure_style, headline, look, mean_line


class Score(NamedTuple):
    """The score of a run."""

    series: str
    setting: str
    value: float


class _Places(NamedTuple):
    """Positions of settings on the axis, and the labels below it."""

    of: dict[str, float]
    numeric: bool
    name: str


def scores_by_setting(
    scores: Sequence[Score],
    title: str,
    unit: str,
    conditions: str,
    *,
    panels: Mapping[str, Sequence[str]] | None = None,
    label: str | None = None,
) -> Figure:
    """Mean and standard deviation over runs, a line for each series.

    Settings that are numbers with a name, such as ``patch=4``, stand at their numbers on a
    logarithmic axis with the name below it; others stand side by side.

    Args:
        scores: of all runs; series keep their order.
        title: of the figure.
        unit: of the scores.
        conditions: a line below the title.
        panels: titles, and which series each panel shows, each at its own scale; one panel with
            all of them unless given.
        label: what stands below the axis instead of the settings' name.
    """
    places = _places(list(dict.fromkeys(score.setting for score in scores)))
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for score in scores:
        values[score.series][score.setting].append(score.value)
    looks = {name: look(i) for i, name in enumerate(values)}
    shown = [(None, list(values))] if panels is None else list(panels.items())
    with figure_style():
        figure = Figure(figsize=(8.6, 5.0), layout="constrained")
        headline(figure, title, conditions)
        for axes, (heading, wanted) in zip(
            figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True
        ):
            names = [name for name in wanted if name in values]
            for index, name in enumerate(names):
                aside = index - (len(names) - 1) / 2
                _line(axes, name, values[name], places, aside, looks[name])
            _dress(axes, places, label or places.name)
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
            if heading is not None:
                axes.set_title(heading, loc="left", fontweight="bold")
        figure.axes[0].set_ylabel(unit)
    return figure


def _places(settings: list[str]) -> _Places:
    numbers = [re.fullmatch(r"(.+)=([0-9.]+)", setting) for setting in settings]
    names = {match[1] for match in numbers if match}
    if all(numbers) and len(names) == 1:
        of = {match[0]: float(match[2]) for match in numbers if match}
        return _Places(dict(sorted(of.items(), key=lambda item: item[1])), True, names.pop())
    return _Places({setting: float(i) for i, setting in enumerate(settings)}, False, "")


def _line(
    axes: Axes,
    name: str,
    line: Mapping[str, Sequence[float]],
    places: _Places,
    aside: float,
    looks: Mapping[str, Any],
) -> None:
    known = [setting for setting in places.of if setting in line]
    # Neighbours stand a little apart, so that their bars do not hide each other.
    x = [
        places.of[setting] * 1.018**aside if places.numeric else places.of[setting] + 0.02 * aside
        for setting in known
    ]
    mean_line(axes, x, [line[setting] for setting in known], label=name, **looks)


def _dress(axes: Axes, places: _Places, label: str) -> None:
    if places.numeric:
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(places.of.values()), [f"{place:g}" for place in places.of.values()])
        axes.minorticks_off()
        axes.set_xlabel(label)
    else:
        axes.set_xticks(list(places.of.values()), list(places.of))
    axes.grid(axis="y")
