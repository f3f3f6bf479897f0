"""The attention of a trained model: a matrix for each head, its row and column sums beside it."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm, TwoSlopeNorm
from matplotlib.figure import Figure
from torch import Tensor

from espformer.lab.plots.clouds import NamedPlan, short, sum_errors
from espformer.lab.plots.style import (
    KEY,
    MUTED,
    QUERY,
    WEIGHTS,
    figure_style,
    headline,
    panel_title,
)


def attention_maps(plans: Sequence[NamedPlan], title: str, subtitle: str) -> Figure:
    """Return a row of panels for each plan, one panel for each of its heads.

    Args:
        plans: names and matrices, ``(heads, N, M)`` each.
        title: of the figure.
        subtitle: what was attended to: a line under the title.
    """
    heads = max(len(plan.matrix) for plan in plans)
    with figure_style():
        figure = Figure(figsize=(2.7 * heads + 0.6, 2.95 * len(plans) + 0.7), layout="constrained")
        headline(figure, title, subtitle)
        axes = figure.subplots(len(plans), heads, squeeze=False)
        for row, plan in zip(axes, plans, strict=True):
            for cell in row[len(plan.matrix) :]:
                cell.set_axis_off()
            for head, (cell, matrix) in enumerate(zip(row, plan.matrix, strict=False)):
                errors = sum_errors(matrix)
                _draw(cell, matrix.detach().cpu())
                name = plan.name if heads == 1 else f"{plan.name}, head {head + 1}"
                note = f"rows ± {short(errors.rows)}, columns ± {short(errors.columns)}"
                panel_title(cell, name, note)
    return figure


def _draw(axes: Axes, matrix: Tensor) -> None:
    """Draw a matrix, with bars for its sums: rows at the right, columns below; a tick is one."""
    low, high = float(matrix.min()), max(float(matrix.max()), 1e-12)
    if low < -1e-6:
        axes.imshow(matrix.numpy(), cmap="RdBu", norm=TwoSlopeNorm(0, vmin=-high, vmax=high))
    else:
        axes.imshow(matrix.numpy(), cmap=WEIGHTS, norm=PowerNorm(0.5, vmin=0, vmax=high))
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(True)
    rows, columns = matrix.sum(-1).tolist(), matrix.sum(-2).tolist()
    most = max(2.0, *rows, *columns)
    right = axes.inset_axes((1.03, 0.0, 0.17, 1.0))
    right.barh(range(len(rows)), rows, height=0.8, color=QUERY)
    right.set(xlim=(0, most), ylim=(len(rows) - 0.5, -0.5), yticks=[], xticks=[1])
    below = axes.inset_axes((0.0, -0.20, 1.0, 0.17))
    below.bar(range(len(columns)), columns, width=0.8, color=KEY)
    below.set(ylim=(most, 0), xlim=(-0.5, len(columns) - 0.5), xticks=[], yticks=[1])
    right.axvline(1, color=MUTED, linewidth=0.8)
    below.axhline(1, color=MUTED, linewidth=0.8)
    for panel in (right, below):
        panel.tick_params(labelsize=7, length=2)
        panel.spines[:].set_visible(False)
