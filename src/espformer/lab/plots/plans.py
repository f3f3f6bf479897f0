"""Figures of attention as a transport plan: the weights between tokens, and row and column sums.

Every function takes plain tensors and returns a :class:`matplotlib.figure.Figure` that is attached
to no window. Errors of sums are largest absolute differences from one.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import PowerNorm, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator
from torch import Tensor

from espformer.functional import esp_plan
from espformer.lab.plots.clouds import NamedPlan, short, sum_errors
from espformer.lab.plots.style import (
    INK,
    KEY,
    LINE,
    MUTED,
    QUERY,
    SERIES,
    WEIGHTS,
    figure_style,
    headline,
    panel_title,
)


def plan_comparison(
    queries: Tensor, keys: Tensor, top: Sequence[NamedPlan], bottom: Sequence[NamedPlan]
) -> Figure:
    """Return the paper's figure of plans: two clouds in the plane, a line for every weight.

    Args:
        queries: ``(N, 2)``.
        keys: ``(M, 2)``.
        top: plans of the upper row, which also shows the points alone.
        bottom: plans of the lower row.
    """
    columns = max(len(top) + 1, len(bottom))
    with figure_style():
        figure = Figure(figsize=(2.75 * columns, 6.0), layout="constrained")
        axes = figure.subplots(2, columns, squeeze=False)
        figure.get_layout_engine().set(wspace=0.02, hspace=0.06)  # type: ignore[union-attr, call-arg]
        headline(
            figure,
            "Who attends to whom",
            "Line width is the attention weight. Under each name: the largest distance from one of "
            "a row sum (what a query gives) and of a column sum (what a key receives).",
        )
        points = axes[0, 0]
        _draw_points(points, queries, keys)
        _frame(points, queries, keys)
        panel_title(points, "The tokens", f"{len(queries)} queries, {len(keys)} keys in the plane")
        points.legend(handles=_point_legend(), loc="lower center", ncols=2, handletextpad=0.1)
        for row, plans in enumerate((top, bottom)):
            cells = list(axes[row])[1 if row == 0 else 0 :]
            for cell, plan in zip(cells, plans, strict=False):
                _draw_plan(cell, queries, keys, plan.matrix)
                _frame(cell, queries, keys)
                errors = sum_errors(plan.matrix)
                panel_title(
                    cell,
                    plan.name,
                    f"rows ± {short(errors.rows)}, columns ± {short(errors.columns)}",
                )
            for cell in cells[len(plans) :]:
                cell.set_axis_off()
    return figure


def row_column_sums(plans: Sequence[NamedPlan]) -> Figure:
    """Draw what every token gives and receives: row and column sums, in ascending order."""
    with figure_style():
        figure = Figure(figsize=(10.4, 4.4), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        headline(
            figure,
            "What every token gives, and what it receives",
            "Sums of the attention matrix, in ascending order. Doubly stochastic means: both are "
            "flat at one.",
        )
        every = torch.cat([plan.matrix.sum(dim) for plan in plans for dim in (-1, -2)])
        smallest, largest = float(every.min()), float(every.max())
        for panel, dim, title in (
            (axes[0], -1, "Row sums: what a query gives"),
            (axes[1], -2, "Column sums: what a key receives"),
        ):
            for i, plan in enumerate(plans):
                sums = plan.matrix.detach().sum(dim).sort().values
                # Lines at one lie on top of each other: later ones are thinner, so all show.
                panel.plot(
                    torch.linspace(0, 100, len(sums)), sums, label=_with_errors(plan),
                    color=SERIES[i % len(SERIES)], zorder=2 + i, solid_capstyle="butt",
                    linewidth=3.4 - 2.2 * i / max(len(plans) - 1, 1),
                )  # fmt: skip
            panel.set_title(title, fontweight="bold")
            panel.set_xlabel("tokens, in per cent")
            panel.set_xlim(0, 100)
            panel.set_yscale("log", base=2)
            panel.set_ylim(max(smallest / 1.15, 1 / 64), 1.15 * largest)
            panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{Fraction(value)}"))
            panel.grid(axis="y")
            panel.set_axisbelow(True)
        axes[0].set_ylabel("sum (logarithmic)")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", labelspacing=1.1)
    return figure


def _with_errors(plan: NamedPlan) -> str:
    errors = sum_errors(plan.matrix)
    return f"{plan.name}\nrows ± {short(errors.rows)}, columns ± {short(errors.columns)}"


def softness(
    queries: Tensor, keys: Tensor, sort_temperatures: Sequence[float] = (1, 0.1, 0.01, 0.001),
    *, metric: str = "absolute",
) -> Figure:  # fmt: skip
    """Return the attention matrix as the sort temperature falls, and its limit, the hard sort.

    Rows of the matrix are sorted by the first coordinate of the queries, columns by that of the
    keys, so a plan that follows the first axis alone would be a diagonal.

    Args:
        queries: ``(N, m)``.
        keys: ``(N, m)``.
        sort_temperatures: one column of panels each.
        metric: how the soft sort compares numbers.
    """
    rows, columns = queries[:, 0].argsort(), keys[:, 0].argsort()
    settings = [(f"t = {t:g}", {"sort_temperature": t}) for t in sort_temperatures]
    settings.append(("hard", {"hard": True}))
    balances = ("rows", "both")
    matrices = [
        [esp_plan(queries, keys, metric=metric, balance=balance, **o) for _, o in settings]  # type: ignore[arg-type]
        for balance in balances
    ]
    # One scale for all panels; the square root lets the faint ones of a soft sort show.
    norm = PowerNorm(0.5, vmin=0, vmax=max(float(m.max()) for row in matrices for m in row))
    with figure_style():
        figure = Figure(figsize=(2.1 * len(settings) + 0.9, 6.1), layout="constrained")
        axes = figure.subplots(2, len(settings), squeeze=False)
        headline(
            figure,
            "From soft to hard",
            "ESP attention matrices as the sort temperature t falls, and their limit. Under each "
            "panel's name: the largest\ndistance of a row or column sum from one. "
            'balance="both" keeps every soft sort doubly stochastic on the way.',
        )
        for row, balance in enumerate(balances):
            for panel, (name, _), matrix in zip(axes[row], settings, matrices[row], strict=True):
                image = panel.imshow(
                    matrix[rows][:, columns].detach(), cmap=WEIGHTS, norm=norm,
                    interpolation="nearest",
                )  # fmt: skip
                panel.set(xticks=[], yticks=[])
                panel.spines[:].set_visible(True)
                panel_title(panel, name, f"sums ± {short(max(sum_errors(matrix)))}")
                panel.set_xlabel("keys", color=MUTED, labelpad=2)
            axes[row, 0].set_ylabel(f'balance="{balance}"\nqueries', color=INK)
        bar = figure.colorbar(image, ax=axes, shrink=0.6, aspect=28, pad=0.015)
        bar.outline.set_visible(False)
        bar.set_label("weight")
    return figure


class Measurement(NamedTuple):
    """Time of one call for a number of tokens."""

    series: str
    tokens: int
    seconds: float


def cost_curve(measurements: Sequence[Measurement], conditions: str) -> Figure:
    """Time per token against the number of tokens: flat is linear time, slope one is quadratic.

    Args:
        measurements: of any number of series; those of one series are joined.
        conditions: what was measured, on what: a line under the title.
    """
    with figure_style():
        figure = Figure(figsize=(7.2, 4.6), layout="constrained")
        axes = figure.subplots()
        headline(figure, "Time per token", conditions)
        for i, name in enumerate(dict.fromkeys(m.series for m in measurements)):
            points = sorted((m.tokens, m.seconds) for m in measurements if m.series == name)
            tokens = [n for n, _ in points]
            microseconds = [1e6 * seconds / n for n, seconds in points]
            color = SERIES[i % len(SERIES)]
            axes.plot(tokens, microseconds, "o-", color=color, linewidth=2, markersize=5)
            axes.annotate(
                name, (tokens[-1], microseconds[-1]), xytext=(8, 0), textcoords="offset points",
                color=color, fontweight="bold", va="center", annotation_clip=False,
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        every = sorted({m.tokens for m in measurements})
        axes.set_xticks(every, [f"{n:,}" for n in every])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("tokens N")
        axes.set_ylabel("microseconds per token")
        axes.grid(axis="y")
        axes.set_axisbelow(True)
    return figure


def _draw_plan(axes: Axes, queries: Tensor, keys: Tensor, matrix: Tensor) -> None:
    weights = matrix.detach().double().flatten()
    pairs = torch.cartesian_prod(torch.arange(len(queries)), torch.arange(len(keys)))
    order = weights.argsort()
    order = order[weights[order] > 2e-3]
    starts, ends = queries[pairs[order, 0]], keys[pairs[order, 1]]
    segments = torch.stack([starts, ends], 1).detach().numpy()
    shown = weights[order].clamp(max=1)
    colors = [(*to_rgb(LINE), float(0.10 + 0.80 * w**0.6)) for w in shown]
    widths = (0.25 + 4.25 * shown).tolist()
    axes.add_collection(LineCollection(list(segments), colors=colors, linewidths=widths, zorder=1))
    _draw_points(axes, queries, keys)


def _draw_points(axes: Axes, queries: Tensor, keys: Tensor) -> None:
    for points, color, marker, size in ((queries, QUERY, "o", 34), (keys, KEY, "s", 30)):
        x, y = points.detach().T
        axes.scatter(x, y, s=size, c=color, marker=marker, linewidths=1.0, edgecolors="white",
                     zorder=3)  # fmt: skip


def _point_legend() -> list[Line2D]:
    return [
        Line2D([], [], color=color, marker=marker, linestyle="", markersize=6, label=label)
        for label, color, marker in (("query", QUERY, "o"), ("key", KEY, "s"))
    ]


def _frame(axes: Axes, queries: Tensor, keys: Tensor) -> None:
    points = torch.cat([queries, keys]).detach()
    low, high = points.amin(0), points.amax(0)
    margin = 0.10 * float((high - low).max())
    axes.set_xlim(float(low[0]) - margin, float(high[0]) + margin)
    axes.set_ylim(float(low[1]) - 1.7 * margin, float(high[1]) + margin)
    axes.set_aspect("equal")
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(True)
