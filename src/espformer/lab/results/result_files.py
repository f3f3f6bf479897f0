"""Results to keep: all runs of an experiment in one small file, and `RESULTS.md` made of them.

A file `results/EXPERIMENT.json` has what all runs share under `common`, and each run in a line of
its own with the rest: its scores, and the command, the machine and the commit behind them. Parts of
an experiment that were done apart are merged.
"""

import dataclasses
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espformer.lab.errors import RunError, UserError
from espformer.lab.files import lock, write_atomically
from espformer.lab.recipes.recipe import Recipe, load_recipe, recipe_names
from espformer.lab.recipes.schema import Grid
from espformer.lab.recipes.yaml_schema import Origins
from espformer.lab.results.claims import HARMLESS, claims_table
from espformer.lab.results.first_page import first_table
from espformer.lab.results.result_tables import in_order, markdown
from espformer.lab.training.run_directory import differences

__all__ = ["Results", "key", "merge_files", "read_file", "results_page", "save_file"]

Result = dict[str, Any]

_INTRODUCTION = """\
# Results

Made by `espformer results` from the files in `results/`, which `espformer reproduce --save results`
writes; never by hand. Scores are test accuracy in percent, or BLEU, after the last epoch: no epoch
is chosen by its test score. `±` is the standard deviation over seeds.
"""

_RULES = """\
### How a claim is judged

A claim is about the difference of two rows over pairs of runs with the same setting and seed, so
the same batches and subsets, and the same first weights where both rows have the same parameters.
It sets a bar: 0 points for "is better", {margin} for "does no harm" or "loses nothing". It **held**
where the 95 % interval of the mean difference lies above the bar, **did not hold** where it lies
below, and is **not decided** where the bar is inside. The p is that of a paired, two-sided t-test
of a difference at the bar, so p < 0.05 says the same as the interval.

What these tests cannot say: intervals are about other seeds, not about other test data, which are
the same in all runs. Three pairs lean on normal differences: a test without that assumption cannot
reach 5 % with fewer than six. Where settings are pooled, what differs between them widens the
interval, and nothing is said about settings that were not run. A claim that was asked after seeing
the runs is a question for new ones, whatever its p.
"""


@dataclass(frozen=True)
class Results:
    """The runs of an experiment."""

    experiment: str
    title: str
    runs: list[Result]

    def merged(self, newer: "Results") -> "Results":
        """These runs and newer ones, which replace those of the same setting, mechanism, seed."""
        return dataclasses.replace(newer, runs=list((self.by_key() | newer.by_key()).values()))

    def by_key(self) -> dict[tuple[str, str, int], Result]:
        """Return the runs by setting, mechanism and seed."""
        return {key(run): run for run in self.runs}

    def check_rows(self) -> None:
        """Refuse runs of one row of the table that differ in more than their seed."""
        first: dict[tuple[str, str], Result] = {}
        for run in self.runs:
            one = first.setdefault((run["setting"], run["mechanism"]), run)
            changed = differences(*({**r["config"], "seed": None} for r in (run, one)))
            if changed:
                raise RunError(
                    f"results of {self.experiment}: {run['mechanism']} in {run['setting']} was run "
                    f"with different settings: {changed}. Remove the older runs to begin anew"
                )

    def text(self) -> str:
        """Return the file: what runs share once, then a line for each."""
        runs = sorted(map(_for_others, self.runs), key=key)
        common = _shared(runs)
        about = {"experiment": self.experiment, "title": self.title}
        head = json.dumps({**about, "common": common}, indent=1, ensure_ascii=False)
        lines = ",\n".join(
            "  " + json.dumps(_without(run, common), ensure_ascii=False) for run in runs
        )
        return f'{head[:-2]},\n "runs": [\n{lines}\n ]\n}}\n'


def _for_others(run: Result) -> Result:
    """A run without the path that its data had on this machine: checksums tell what they are."""
    source = run.get("data", {}).get("source", "")
    if not Path(source).is_absolute():
        return run
    return {**run, "data": {**run["data"], "source": Path(source).name}}


def key(run: Result) -> tuple[str, str, int]:
    """Return what tells a run of an experiment from the others."""
    return run["setting"], run["mechanism"], run["seed"]


def read_file(path: Path) -> Results:
    """Return the runs of a file that :func:`save_file` wrote."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        runs = [_joined(raw["common"], run) for run in raw["runs"]]
        return Results(raw["experiment"], raw["title"], runs)
    except FileNotFoundError:
        raise RunError(f"{path}: there is no such file") from None
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise RunError(
            f"{path}: not a file of results ({type(error).__name__}: {error}); expected what "
            "`espformer reproduce` writes as results.json"
        ) from None


def save_file(results: Results, path: Path, *, merge: bool = True) -> Path:
    """Write results; with `merge` to keep them, with those that the file has already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock(path.parent, wait=True):  # parts of an experiment may end at the same time
        if merge:
            results = read_file(path).merged(results) if path.exists() else results
            results.check_rows()
        write_atomically(path, results.text())
    return path


def results_page(directory: Path, page: Path = Path("RESULTS.md")) -> str:
    """`RESULTS.md`: the paper's claims, all claims, and a section for each file.

    A picture beside a file and named like it, `EXPERIMENT.png`, is shown in its section.

    Args:
        directory: where the files are.
        page: where the text will be, which pictures are linked from.
    """
    files = sorted(directory.glob("*.json"))
    if not files:
        raise UserError(
            f"{directory}: no results there; make some with espformer reproduce digits --save "
            f"{directory}"
        )
    every = [
        (recipe := _recipe(results), in_order(recipe, results.runs))
        for results in map(read_file, files)
    ]
    every.sort(key=lambda pair: (pair[0].paper is None, pair[0].name))
    sections = [
        markdown(recipe, runs, level=2, picture=_picture(directory / f"{recipe.name}.png", page))
        for recipe, runs in every
    ]
    claims = claims_table(every)
    judged = [*claims, _RULES.format(margin=-HARMLESS)] if claims else []
    return "\n".join([_INTRODUCTION, *first_table(every), *judged, *sections])


def _picture(path: Path, page: Path) -> str | None:
    """Return the address of a picture on a page, if there is one."""
    return Path(os.path.relpath(path, page.parent)).as_posix() if path.is_file() else None


def _recipe(results: Results) -> Recipe:
    """Return the recipe of an experiment; one that only has a name for those that came without."""
    if results.experiment in recipe_names():
        return load_recipe(results.experiment)
    task = results.runs[0]["config"].get("task", "classification")
    seeds = sorted({run["seed"] for run in results.runs})
    grid = Grid(seeds=seeds, settings={run["setting"]: {} for run in results.runs})
    return Recipe(results.experiment, results.title, task, None, "", {}, grid, {}, Origins())


def _shared(values: list[Any]) -> Any:
    """Find what is the same in all mappings, and in mappings within them."""
    first = values[0]
    shared = {}
    for key, value in first.items():
        others = [other.get(key) for other in values]
        if all(other == value for other in others):
            shared[key] = value
        elif all(isinstance(other, dict) for other in others):
            inner = _shared(others)
            if inner:
                shared[key] = inner
    return shared


def _without(value: Result, shared: Result) -> Result:
    """Return a mapping without what is shared; an empty mapping that was there stays."""
    rest = {}
    for key, item in value.items():
        if key not in shared:
            rest[key] = item
        elif item != shared[key]:
            rest[key] = _without(item, shared[key])
    return rest


def _joined(shared: Any, rest: Any) -> Any:
    if not isinstance(shared, dict) or not isinstance(rest, dict):
        return rest
    joined = dict(shared)
    for key, item in rest.items():
        joined[key] = _joined(shared[key], item) if key in shared else item
    return joined


def merge_files(paths: Iterable[Path], directory: Path) -> list[Path]:
    """Add files of results to those of a directory, each under the name of its experiment."""
    return [
        save_file(results, directory / f"{results.experiment}.json")
        for results in map(read_file, paths)
    ]
