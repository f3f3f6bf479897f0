"""One look for every figure: colours that colour-blind readers can tell apart, one typography."""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from PIL import Image  # matplotlib requires it

# Okabe & Ito's palette.
QUERY = "#009E73"
KEY = "#D55E00"
LINE = "#2F4B7C"
INK = "#22272E"
MUTED = "#6B7480"
GRID = "#E6E9ED"
SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5B6470")

_MARKERS = ("o", "s", "^", "D", "v", "P", "X")

WEIGHTS = LinearSegmentedColormap.from_list(
    "weights", ["#FFFFFF", "#D6E4F0", "#8DB8DA", "#3F7FB5", "#1D4E89", "#0B2545"]
)

_SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.labelsize": 9.0,
    "axes.edgecolor": "#B8C0CA",
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "mathtext.fontset": "dejavusans",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.hashsalt": "espformer",
}


def look(index: int) -> dict[str, Any]:
    """Return the colour and the marker of a series; no two of the first 49 look alike."""
    marker = _MARKERS[index // len(SERIES) % len(_MARKERS)]
    return {"color": SERIES[index % len(SERIES)], "marker": marker}


@contextmanager
def figure_style() -> Iterator[None]:
    """Change the settings of matplotlib inside the block."""
    with mpl.rc_context(_SETTINGS):
        yield


def headline(figure: Figure, title: str, subtitle: str) -> None:
    """Write a bold title and a muted line under it, flush left, and make room for both."""
    height = figure.get_figheight()
    lines = subtitle.count("\n") + 1
    figure.text(0.012, 1 - 0.10 / height, title, fontsize=13, fontweight="bold", va="top")
    figure.text(
        0.012, 1 - 0.37 / height, subtitle, fontsize=9, color=MUTED, va="top", linespacing=1.35
    )
    top = 1 - (0.50 + 0.17 * lines) / height
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.set(rect=(0.005, 0.005, 0.99, top - 0.005))  # type: ignore[call-arg]


def panel_title(axes: Axes, title: str, note: str) -> None:
    """Write the name of a panel, and a muted note under it."""
    axes.set_title(title, fontweight="bold", pad=19)
    axes.annotate(
        note, (0.5, 1), xytext=(0, 5), xycoords="axes fraction", textcoords="offset points",
        ha="center", va="bottom", fontsize=8, color=MUTED, annotation_clip=False,
    )  # fmt: skip


def mean_line(
    axes: Axes, places: Sequence[float], values: Sequence[Sequence[float]], **looks: Any
) -> None:
    """Draw the mean and the standard deviation of the values at each place."""
    axes.errorbar(
        places,
        [statistics.fmean(some) for some in values],
        yerr=[statistics.stdev(some) if len(some) > 1 else 0.0 for some in values],
        capsize=2.5, linewidth=1.6, elinewidth=0.9, markersize=4.5, **looks,
    )  # fmt: skip


def save_figure(figure: Figure, stem: Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Writes ``stem.png`` and ``stem.svg``, or others; the same figure gives the same bytes."""
    paths = [stem.with_name(f"{stem.name}.{name}") for name in formats]
    for path, name in zip(paths, formats, strict=True):
        with figure_style():
            if name == "png":
                _save_png(figure, path)
            else:
                figure.savefig(path, metadata={"CreationDate" if name == "pdf" else "Date": None})
    return paths


def _save_png(figure: Figure, path: Path) -> None:
    """Save with a palette of 96 colours, which looks the same at a quarter of the size."""
    pixels = io.BytesIO()
    figure.savefig(pixels, dpi=140, format="png")
    with Image.open(pixels) as image:
        image.convert("RGB").quantize(96, dither=Image.Dither.NONE).save(path, optimize=True)
