"""Figures of results: the curves of a run, the scores of an experiment, figures of the paper.

Nothing here imports matplotlib before something is drawn.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from espformer.lab.errors import RunError, UserError
from espformer.lab.recipes.recipe import Recipe, load_recipe
from espformer.lab.results.claims import name_of
from espformer.lab.results.result_files import read_file
from espformer.lab.results.result_tables import in_order
from espformer.lab.training.run_directory import read_curves

Result = dict[str, Any]

_CURVES = (
    ("loss", ("train/loss", "valid/loss")),
    ("score", ("train/accuracy", "valid/accuracy", "valid/bleu")),
    ("attention", ("attention/row_error", "attention/column_error", "attention/entropy")),
    ("sort temperature", ("sort_temperature",)),
)
# Rows of mnist-patch-size that the paper has; two of them are shown with ours as well.
_PAPER = tuple(map(name_of, ("transformer", "difftransformer", "sinkformer", "espformer")))
_BOTH = tuple(map(name_of, ("sinkformer", "espformer")))


def patch_size(path: Path) -> Any:
    """Return the paper's figure, and next to it the rows that the paper does not have."""
    from espformer.lab import plots
    from espformer.lab.plots.scores import Score

    title, runs = _read(path, "patch-size")
    scores = [
        Score(name_of(run["mechanism"]), run["setting"], run["scores"]["test"]) for run in runs
    ]
    ours = [name for name in dict.fromkeys(score.series for score in scores) if name not in _PAPER]
    panels = {
        "Attentions of the paper": _PAPER,
        "Variants of ESP, at another scale": (*_BOTH, *ours),
    }
    return plots.scores_by_setting(
        scores, title, _unit(runs), _conditions(runs, path),
        panels=panels if ours else None, label="side of a patch, pixels",
    )  # fmt: skip


def softness(path: Path) -> Any:
    """Accuracy by width of the soft sort, of both metrics, balanced, and with a learnt t."""
    from espformer.lab import plots
    from espformer.lab.plots.softness import SoftScore

    title, runs = _read(path, "softness")
    scores: list[SoftScore] = []
    others: dict[str, list[float]] = {}
    for run in runs:
        mechanism, value = run["config"]["mechanism"], run["scores"]["test"]
        esp = mechanism.get("esp") if isinstance(mechanism, dict) else None
        if esp is None:
            others.setdefault(name_of(run["mechanism"]), []).append(value)
            continue
        name = f"{esp['metric']} metric" + (", balanced" if esp.get("balance") == "both" else "")
        if not esp.get("learn_temperature"):
            scores.append(SoftScore(name, esp["metric"], esp["sort_temperature"], value))
            continue
        name += f", t learnt from {esp['sort_temperature']:g}"
        for t in run.get("learnt_sort_temperatures", []):
            scores.append(SoftScore(name, esp["metric"], t, value, learnt=True))
    if not scores:
        raise UserError(f"{path}: no runs of ESP attention there; expected mnist-hypotheses")
    conditions = f"{_conditions(runs, path)} Stars: single runs, at the t they learnt."
    return plots.scores_by_softness(scores, others, title, _unit(runs), conditions)


FIGURES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "patch-size": ("mnist-patch-size", patch_size),
    "softness": ("mnist-hypotheses", softness),
}
"""Name of a figure: the experiment that it is of, and who draws it from a file of results."""


def draw_beside(directory: Path) -> list[Path]:
    """Draw the figures of the files in a directory, each next to its file and named like it."""
    from espformer.lab.plots import save_figure

    files = {directory / f"{name}.json": draw for name, draw in FIGURES.values()}
    return [
        save_figure(draw(file), file.with_suffix(""), ["png"])[0]
        for file, draw in files.items()
        if file.is_file()
    ]


def _read(path: Path, figure: str) -> tuple[str, list[Result]]:
    """Read title and runs of a file, in the order of the recipe; refuse other experiments."""

    results, wanted = read_file(path), FIGURES[figure][0]
    if results.experiment != wanted:
        raise UserError(
            f"{path}: has results of {results.experiment}, and plot {figure} draws those of "
            f"{wanted}; espformer plot EXPERIMENT draws the runs of any experiment"
        )
    return results.title, in_order(load_recipe(results.experiment), results.runs)


def _unit(runs: list[Result]) -> str:
    score = runs[0]["score"]
    return f"test {score}" + (", %" if score == "accuracy" else "")


def _conditions(runs: list[Result], path: Path) -> str:
    seeds = len({run["seed"] for run in runs})
    epochs = ", ".join(str(n) for n in sorted({run["epochs"] for run in runs}))
    return f"Mean and standard deviation of {seeds} seeds, {epochs} epochs. From {path.name}."


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
    from matplotlib.figure import Figure

    from espformer.lab.plots.style import figure_style

    with figure_style():
        figure = Figure(figsize=(4 * len(panels), 3.2), layout="constrained")
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
    """Mean score of each mechanism by setting, with its standard deviation over runs."""
    if not results:
        raise RunError(f"no run of {recipe.name} is finished yet")
    from espformer.lab.plots.scores import Score, scores_by_setting
    from espformer.lab.plots.style import figure_style

    timed = recipe.task == "runtime"
    score = "mean" if timed else "test"
    scores = [
        Score(name_of(run["mechanism"]), run["setting"], run["scores"][score])
        for run in results
        if score in run["scores"]
    ]
    seeds = len({run["seed"] for run in results})
    conditions = f"Mean and standard deviation of {seeds} seed{'' if seeds == 1 else 's'}."
    with figure_style():
        figure = scores_by_setting(scores, recipe.title, results[0]["score"], conditions)
        if timed:
            figure.axes[0].set_yscale("log")
        return figure
