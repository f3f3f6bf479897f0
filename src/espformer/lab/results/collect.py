"""Results of an experiment, collected from its runs and written beside the paper's."""

import math
from pathlib import Path
from typing import Any

from espformer.lab.errors import ConfigError, RunError
from espformer.lab.files import write_atomically
from espformer.lab.recipes.recipe import Recipe
from espformer.lab.recipes.yaml_schema import plain
from espformer.lab.results.result_files import Results, key, read_file, save_file
from espformer.lab.results.result_tables import in_order, markdown
from espformer.lab.training.checkpoints import read_checkpoint
from espformer.lab.training.experiments import Job
from espformer.lab.training.run_directory import differences, read_curves, read_results

__all__ = ["beside_saved", "collect", "write_report"]

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


def write_report(recipe: Recipe, output: Path, save: Path | None = None) -> tuple[Path, str]:
    """Write `results.json` and `results.md` of an experiment; returns the latter and its text.

    Args:
        recipe: the experiment.
        output: directory of all runs.
        save: directory to keep the results in as well, merged with those that are there.
    """
    results = Results(recipe.name, recipe.title, collect(recipe, output))
    text = markdown(recipe, results.runs)
    directory = output / recipe.name
    if results.runs:
        save_file(results, directory / "results.json", merge=False)
        if save is not None:
            save_file(results, save / f"{recipe.name}.json")
    write_atomically(directory / "results.md", text)
    return directory / "results.md", text


def beside_saved(recipe: Recipe, work: list[Job], save: Path | None, *, skip: bool) -> list[Job]:
    """The jobs whose results can join those that are saved, told before hours are spent on them.

    Args:
        recipe: the experiment.
        work: its jobs, and those that it starts from.
        save: directory of saved results.
        skip: leave out what is saved.
    """
    if save is None:
        if skip:
            raise ConfigError("--skip-saved: say with --save DIR where the results are")
        return work
    path = save / f"{recipe.name}.json"
    if not path.exists():
        return work
    saved = read_file(path)
    own = {job.directory: _outline(job) for job in work if job.run.recipe == recipe.name}
    saved.merged(Results(recipe.name, recipe.title, list(own.values()))).check_rows()
    if not skip:
        return work
    there = saved.by_key()
    left = [job for job in work if job.directory in own and not _is_saved(job, there, path)]
    needed = {path for job in left for path in job.needs}
    return [job for job in work if job in left or job.directory in needed]


def _is_saved(job: Job, there: dict[tuple[str, str, int], Result], path: Path) -> bool:
    """Say whether the result of a job is there; one with other settings is refused."""
    outline = _outline(job)
    result = there.get(key(outline))
    if result is None:
        return False
    if changed := differences(outline["config"], result["config"]):
        raise RunError(
            f"--skip-saved: {path} has {job.name} with other settings: {changed}. Give the same "
            "settings, or leave out --skip-saved to replace what is there"
        )
    return True


def _outline(job: Job) -> Result:
    """Return what is known of a result before the run."""
    run = job.run
    return {
        "setting": run.setting,
        "mechanism": run.label,
        "seed": run.seed,
        "config": plain(run),
    }
