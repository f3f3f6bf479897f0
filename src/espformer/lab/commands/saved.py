"""Figures of saved results: accuracy by patch size, and by the softness of the sort."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["FIGURES", "draw_beside"]

Result = dict[str, Any]

# Rows of mnist-patch-size that the paper has; two of them stand beside ours as well.
_PAPER = ("transformer", "difftransformer", "sinkformer", "espformer")
_BESIDE = ("sinkformer", "espformer")


def patch_size(path: Path) -> Any:
    """The paper's figure, and beside it the rows that the paper does not have."""
    from espformer.lab import plots
    from espformer.lab.plots.scores import Score

    title, runs = _read(path, "patch-size")
    scores = [Score(run["mechanism"], run["setting"], run["scores"]["test"]) for run in runs]
    ours = [name for name in dict.fromkeys(s.series for s in scores) if name not in _PAPER]
    panels = {
        "Attentions of the paper": _PAPER,
        "Variants of ESP, at another scale": (*_BESIDE, *ours),
    }
    return plots.scores_by_setting(
        scores, title, _unit(runs), _conditions(runs, path),
        panels=panels if ours else None, label="side of a patch, pixels",
    )  # fmt: skip


def softness(path: Path) -> Any:
    """Accuracy by width of the soft sort, of both metrics, balanced, and with a learnt t."""
    from espformer.lab import plots
    from espformer.lab.plots.softness import SoftScore
    from espformer.lab.training.errors import UserError

    title, runs = _read(path, "softness")
    scores: list[SoftScore] = []
    others: dict[str, list[float]] = {}
    for run in runs:
        mechanism, value = run["config"]["mechanism"], run["scores"]["test"]
        esp = mechanism.get("esp") if isinstance(mechanism, dict) else None
        if esp is None:
            others.setdefault(run["mechanism"], []).append(value)
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
    """Draw the figures of the files in a directory, each beside its file and named like it."""
    from espformer.lab.plots import save_figure

    files = {directory / f"{name}.json": draw for name, draw in FIGURES.values()}
    return [
        save_figure(draw(file), file.with_suffix(""), ["png"])[0]
        for file, draw in files.items()
        if file.is_file()
    ]


def _read(path: Path, figure: str) -> tuple[str, list[Result]]:
    """Title and runs of a file, in the order of the recipe; other experiments are refused."""
    from espformer.lab.training.errors import UserError
    from espformer.lab.training.recipe import load_recipe
    from espformer.lab.training.results import read_file
    from espformer.lab.training.section import in_order

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
