"""Simple figures: the curves of a run, the scores of an experiment."""

import csv
import statistics
from collections import defaultdict
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from espformer.lab.training.errors import RunError, UserError
from espformer.lab.training.recipe import Recipe

__all__ = ["plot_experiment", "plot_run", "read_curves"]

_CURVES = (
    ("loss", ("train/loss", "valid/loss")),
    ("score", ("train/accuracy", "valid/accuracy", "valid/bleu")),
    ("attention", ("attention/row_error", "attention/column_error", "attention/entropy")),
    ("sort temperature", ("sort_temperature",)),
)


def read_curves(directory: Path) -> dict[str, dict[int, float]]:
    """Logged numbers of a run by name and epoch; of repeated epochs the last attempt counts."""
    curves: dict[str, dict[int, float]] = defaultdict(dict)
    for path in sorted((directory / "logs").glob("attempt-*/metrics.csv"), key=_attempt):
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                for name, text in row.items():
                    if name not in ("epoch", "step") and text and row.get("epoch"):
                        curves[name][int(float(row["epoch"]))] = float(text)
    return dict(curves)


def _attempt(path: Path) -> int:
    return int(path.parent.name.rpartition("-")[2])


def plot_run(directory: Path) -> Any:
    """Loss, score, attention statistics and temperature of a run, by epoch."""
    curves = read_curves(directory)
    panels = [
        (title, shown)
        for title, names in _CURVES
        if (shown := [name for name in names if name in curves])
    ]
    if not panels:
        raise RunError(f"{directory}: nothing was logged there yet")
    with _style():
        figure = _figure(4 * len(panels), 3.2)
        for axis, (title, names) in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
        ):
            for name in names:
                epochs = sorted(curves[name])
                axis.plot(epochs, [curves[name][epoch] for epoch in epochs], label=name)
            if title == "sort temperature":
                axis.set_yscale("log")
            axis.set(title=title, xlabel="epoch")
            axis.legend()
        return figure


def plot_experiment(recipe: Recipe, results: list[dict[str, Any]]) -> Any:
    """Mean score of each mechanism over the settings, with the range of its runs."""
    if not results:
        raise RunError(f"no run of {recipe.name} is finished yet")
    score = "mean" if recipe.task == "runtime" else "test"
    settings = [s for s in recipe.grid.settings if any(r["setting"] == s for r in results)]
    with _style():
        figure = _figure(6, 4)
        axis = figure.subplots()
        for label in recipe.mechanisms:
            values = _by_setting(results, label, settings, score)
            if values:
                means = [statistics.fmean(numbers) for numbers in values.values()]
                low = [m - min(n) for m, n in zip(means, values.values(), strict=True)]
                high = [max(n) - m for m, n in zip(means, values.values(), strict=True)]
                axis.errorbar(
                    list(values), means, yerr=[low, high], label=label, marker="o", capsize=3
                )
        axis.set_xticks(range(len(settings)), settings)
        axis.set(title=recipe.title, ylabel=results[0]["score"])
        if recipe.task == "runtime":
            axis.set_yscale("log")
        axis.legend()
        return figure


def _by_setting(
    results: list[dict[str, Any]], label: str, settings: list[str], score: str
) -> dict[int, list[float]]:
    """Scores of a mechanism by the place of their setting."""
    values: dict[int, list[float]] = defaultdict(list)
    for result in results:
        if result["mechanism"] == label and score in result["scores"]:
            values[settings.index(result["setting"])].append(result["scores"][score])
    return dict(sorted(values.items()))


def _style() -> AbstractContextManager[None]:
    try:
        from espformer.lab.plots.style import figure_style
    except ImportError as error:
        raise UserError(f'figures need {error.name}: pip install "espformer[plots]"') from None
    return figure_style()


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
