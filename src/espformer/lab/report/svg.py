"""Charts as SVG text whose colours are CSS variables: one file for light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from torch import Tensor

WIDTH, HEIGHT = 440, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 12, 34


class Series(NamedTuple):
    """A line: its name, the number of its colour, and its points."""

    name: str
    colour: int
    points: Sequence[tuple[float, float]]


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between two others, at most `most` steps of 1, 2 or 5 times a power of ten.

    Example:
        >>> ticks(0, 15)
        [0, 5, 10, 15]
    """
    span = max(high - low, 1e-12)
    power = 10 ** math.floor(math.log10(span / most))
    step = next(power * k for k in (1, 2, 5, 10) if span / (power * k) <= most)
    first = math.ceil(low / step - 1e-9)
    found = [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]
    return [int(value) if float(value).is_integer() else value for value in found]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten from below `low` to above `high`, every second or third where there are many.

    Example:
        >>> log_ticks(2e-3, 0.5)
        [0.001, 0.01, 0.1, 1.0]
    """
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    step = max(1, math.ceil((last - first) / 5))
    return [10.0**power for power in range(first, max(last, first + 1) + 1, step)]


def line_chart(name: str, series: Sequence[Series], *, summary: str, log: bool = False) -> str:
    """Return a chart of lines by epoch; numbers under the pointer are shown by the page's script.

    Args:
        name: identifier of the chart in the page.
        series: lines; on a logarithmic axis points at or below zero are left out.
        summary: alternative text.
        log: logarithmic vertical axis.
    """
    lines = [
        (one, [(x, y) for x, y in one.points if not log or y > 0]) for one in series if one.points
    ]
    xs = [x for _, points in lines for x, _ in points]
    ys = [y for _, points in lines for _, y in points]
    left, right = min(xs), max(max(xs), min(xs) + 1)
    if log:
        marks = log_ticks(min(ys), max(ys))
        low, high = math.log10(marks[0]), math.log10(max(marks[-1], max(ys)))
    else:
        margin = 0.04 * (max(ys) - min(ys) or abs(min(ys)) or 1)
        low, high = min(ys) - margin, max(ys) + margin
        marks = ticks(low, high)

    def place(x: float, y: float) -> tuple[float, float]:
        y = math.log10(y) if log else y
        across = (x - left) / (right - left)
        up = (y - low) / (high - low)
        return (
            _LEFT + across * (WIDTH - _LEFT - _RIGHT),
            HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM),
        )

    parts = [_open(f"chart-{name}", summary, WIDTH, HEIGHT, "chart")]
    for mark in marks:
        y = place(left, mark)[1]
        if y < _TOP - 1 or y > HEIGHT - _BOTTOM + 1:
            continue
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" '
                     f'y2="{y:.1f}"/>')  # fmt: skip
        parts.append(f'<text class="tick" x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">'
                     f"{_number(mark)}</text>")  # fmt: skip
    for mark in (mark for mark in ticks(left, right, 6) if float(mark).is_integer()):
        x = place(mark, 10.0**low if log else low)[0]
        parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - _BOTTOM + 17}" '
                     f'text-anchor="middle">{_number(mark)}</text>')  # fmt: skip
    parts.append(f'<text class="tick axis" x="{WIDTH - _RIGHT}" y="{HEIGHT - 3}" '
                 f'text-anchor="end">epoch</text>')  # fmt: skip
    for one, points in lines:
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in (place(*point) for point in points))
        parts.append(f'<path class="line c{one.colour}" d="{path}"/>')
        x, y = place(*points[-1])
        parts.append(f'<circle class="dot c{one.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>')
    parts.append('<line class="cursor" x1="0" x2="0" '
                 f'y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" visibility="hidden"/></svg>')  # fmt: skip
    return "".join(parts)


def frame() -> dict[str, float]:
    """The place of the plot inside a line chart, which the script needs to read the pointer."""
    return {"width": WIDTH, "left": _LEFT, "right": WIDTH - _RIGHT}


def bar_chart(name: str, values: Sequence[float], colour: int, summary: str, level: float) -> str:
    """Bars side by side, and a dashed line at `level`."""
    width, height = 300, 96
    top = 1.15 * max(*values, level)
    step = width / len(values)
    gap = min(2.0, 0.25 * step)
    parts = [_open(f"bars-{name}", summary, width, height, "bars")]
    for index, value in enumerate(values):
        tall = (height - 4) * value / top
        parts.append(f'<rect class="bar c{colour}" x="{index * step + gap / 2:.2f}" '
                     f'y="{height - tall:.2f}" width="{step - gap:.2f}" height="{tall:.2f}" '
                     'rx="1"/>')  # fmt: skip
    y = height - (height - 4) * level / top
    parts.append(f'<line class="level" x1="0" x2="{width}" y1="{y:.2f}" y2="{y:.2f}"/></svg>')
    return "".join(parts)


def plan_panel(name: str, queries: Tensor, keys: Tensor, matrix: Tensor | None, alt: str) -> str:
    """Two clouds in the plane and a line for every weight of a plan between them."""
    low = [float(min(queries[:, i].min(), keys[:, i].min())) for i in (0, 1)]
    high = [float(max(queries[:, i].max(), keys[:, i].max())) for i in (0, 1)]
    size, margin = 240.0, 12.0
    scale = (size - 2 * margin) / max(high[0] - low[0], high[1] - low[1])
    height = 2 * margin + scale * (high[1] - low[1])

    def place(point: Tensor) -> tuple[float, float]:
        x, y = point.tolist()
        return margin + scale * (x - low[0]), height - margin - scale * (y - low[1])

    parts = [_open(f"plan-{name}", alt, size, height, "plan")]
    if matrix is not None:
        weights = [
            (float(matrix[i, j]), i, j) for i in range(len(queries)) for j in range(len(keys))
        ]
        for weight, i, j in sorted(weights):
            if weight < 2e-3:
                continue
            (x1, y1), (x2, y2) = place(queries[i]), place(keys[j])
            parts.append(
                f'<line class="weight" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
                f'stroke-width="{0.3 + 5.2 * min(weight, 1):.2f}" '
                f'stroke-opacity="{0.10 + 0.80 * min(weight, 1) ** 0.6:.2f}"/>'
            )
    for x, y in map(place, queries):
        parts.append(f'<circle class="query" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
    for x, y in map(place, keys):
        parts.append(
            f'<rect class="key" x="{x - 3.6:.1f}" y="{y - 3.6:.1f}" width="7.2" height="7.2"/>'
        )
    return "".join([*parts, "</svg>"])


def _open(identifier: str, summary: str, width: float, height: float, kind: str) -> str:
    return (
        f'<svg id="{escape(identifier)}" class="{kind}" viewBox="0 0 {width:g} {height:.0f}" '
        f'role="img" aria-label="{escape(summary)}">'
    )


def _number(value: float) -> str:
    if value and (abs(value) < 1e-2 or abs(value) >= 1e5):
        mantissa, _, power = f"{value:.0e}".partition("e")
        raised = str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        return f"{'' if mantissa == '1' else mantissa + '·'}10{raised}"
    return f"{value:,.6g}"
