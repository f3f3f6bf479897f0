"""The paper's figure of plans: two clouds of tokens, and the attention weights between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from espformer.lab.plots.clouds import NamedPlan, short, sum_errors
from espformer.lab.plots.style import KEY, LINE, QUERY, figure_style, headline, panel_title


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
