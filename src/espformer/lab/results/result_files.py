"""Results of an experiment: collected from its runs, and kept in one small file.

A file `results/EXPERIMENT.json` has what all runs share under `common`, and each run in a line of
its own with the rest: its scores, and the command, the machine and the commit behind them. Parts of
an experiment that were done apart are merged.
"""

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espformer.lab.errors import ConfigError, RunError
from espformer.lab.files import lock, write_atomically
from espformer.lab.recipes.recipe import Recipe
from espformer.lab.recipes.yaml_schema import plain
from espformer.lab.results.result_tables import in_order, markdown
from espformer.lab.training.checkpoints import read_checkpoint
from espformer.lab.training.experiments import Job
from espformer.lab.training.run_directory import (
    differences,
    identity,
    read_curves,
    read_results,
)

Result = dict[str, Any]


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
            asked, there = ({**each["config"], "seed": None} for each in (run, one))
            changed = differences(asked, there)
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


def merge_files(paths: Iterable[Path], directory: Path) -> list[Path]:
    """Add files of results to those of a directory, each under the name of its experiment."""
    return [
        save_file(results, directory / f"{results.experiment}.json")
        for results in map(read_file, paths)
    ]


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
    """Return the jobs to do; refuse, before hours are spent, what could not join saved results.

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
    return {**identity(job.run), "config": plain(job.run)}
