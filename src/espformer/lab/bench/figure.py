"""Time by number of tokens, one line for each operator and backend."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from espformer.lab.bench.cases import MODES, Measurement
from espformer.lab.plots.style import SERIES, figure_style, headline, save_figure

# Not as many as colours, so that a pair of both is seldom met twice.
_MARKERS = ("o", "s", "^", "D", "v")


def draw(stem: Path, rows: Sequence[Measurement], stated: Mapping[str, str]) -> list[Path]:
    """``stem.png`` and ``stem.svg``: a panel for each mode; only rows that are right are drawn.

    Fused kernels have solid lines, everything else dashed ones. Only rows with the most common
    number of heads can be compared; where those have fewer than two lengths there is no figure.
    """
    counts = Counter(row.case.heads for row in rows if row.ok)
    most = max(counts, key=lambda heads: (counts[heads], heads), default=1)
    drawn = [row for row in rows if row.ok and row.case.heads == most]
    if len({row.case.tokens for row in drawn}) < 2:
        return []
    modes = [mode for mode in MODES if any(row.case.mode == mode for row in drawn)]
    names = list(dict.fromkeys((row.case.operator, row.case.backend) for row in drawn))
    with figure_style():
        figure = Figure(figsize=(4.6 * len(modes) + 1.9, 4.6), layout="constrained")
        panels = figure.subplots(1, len(modes), squeeze=False, sharey=True)[0]
        for axes, mode in zip(panels, modes, strict=True):
            lines = defaultdict(list)
            for row in drawn:
                if row.case.mode == mode:
                    lines[row.case.operator, row.case.backend].append(row)
            for name, found in lines.items():
                index = names.index(name)
                found.sort(key=lambda row: row.case.tokens)
                axes.plot(
                    [row.case.tokens for row in found], [row.milliseconds for row in found],
                    color=SERIES[index % len(SERIES)], marker=_MARKERS[index % len(_MARKERS)],
                    linestyle="-" if name[1] == "triton" else "--",
                    markersize=4.5, linewidth=1.4, label=" / ".join(name),
                )  # fmt: skip
            lengths = sorted({row.case.tokens for rows_of in lines.values() for row in rows_of})
            axes.set(xscale="log", yscale="log", xlabel="tokens", title=mode)
            axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
            axes.set_xticks([], minor=True)
            axes.grid(visible=True)
        panels[0].set_ylabel("milliseconds")
        panels[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        machine = stated.get("gpu", stated.get("cpu", ""))
        headline(
            figure,
            "Time of an attention",
            f"{machine}; torch {stated['torch']}; {stated['dtype']}; {most} heads; medians\n"
            f"{stated['command']}",
        )
    return save_figure(figure, stem)
