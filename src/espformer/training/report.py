"""Results of an experiment, collected from its runs and written beside the paper's."""

import math
from pathlib import Path
from typing import Any

from espformer.training.checkpoints import read_checkpoint, write_atomically
from espformer.training.errors import RunError
from espformer.training.figures import read_curves
from espformer.training.recipe import Recipe
from espformer.training.records import read_results
from espformer.training.results import Results, save_file
from espformer.training.section import in_order, markdown

__all__ = ["collect", "write_report"]

Result = dict[str, Any]


def collect(recipe: Recipe, output: Path) -> list[Result]:
    """Results of all finished runs of an experiment, in the order of its grid.

    With what only the files of a run tell: how its attention came out, and temperatures it learnt.
    """
    found = []
    for path in sorted((output / recipe.name).glob("*/*/seed-*/results.json")):
        results = read_results(path.parent)
        if results is not None:
            found.append(results | _attention(path.parent) | _temperatures(path.parent, results))
    return in_order(recipe, found)


def _attention(directory: Path) -> dict[str, Any]:
    """Errors of sums and entropy of the attention, as the last epoch logged them."""
    curves = read_curves(directory)
    last = {
        name.removeprefix("attention/"): epochs[max(epochs)]
        for name, epochs in curves.items()
        if name.startswith("attention/")
    }
    return {"attention": last} if last else {}


def _temperatures(directory: Path, results: Result) -> dict[str, Any]:
    """Sort temperatures that a run learnt, of all layers and heads."""
    if "learn_temperature" not in str(results.get("config", {}).get("mechanism")):
        return {}
    try:
        state = read_checkpoint(directory / "last.ckpt")["state_dict"]
    except RunError:
        return {}
    learnt = [
        math.exp(number)
        for name, value in state.items()
        if name.endswith("log_sort_temperature")
        for number in value.tolist()
    ]
    return {"learnt_sort_temperatures": learnt} if learnt else {}


def write_report(
    recipe: Recipe, output: Path, command: str, save: Path | None = None
) -> tuple[Path, str]:
    """Write `results.json` and `results.md` of an experiment; returns the latter and its text.

    Args:
        recipe: the experiment.
        output: directory of all runs.
        command: what made them.
        save: directory to keep the results in as well, merged with those that are there.
    """
    results = Results(recipe.name, recipe.title, [command], collect(recipe, output))
    text = markdown(recipe, results.runs, command)
    directory = output / recipe.name
    if results.runs:
        save_file(results, directory / "results.json", merge=False)
        if save is not None:
            save_file(results, save / f"{recipe.name}.json")
    write_atomically(directory / "results.md", text)
    return directory / "results.md", text
