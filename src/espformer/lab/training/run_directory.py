"""The directory of a run: where it is, the description, results and logs in it."""

import csv
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml

from espformer.lab.errors import RunError
from espformer.lab.recipes.schema import Run
from espformer.lab.recipes.yaml_schema import plain

# Where descriptions hold the arguments that were given, and no others.
_GIVEN = (("mechanism",), ("model",), ("data", "set"))
# What a description means that does not state these keys.
_UNSAID = (("temperature_unit", "absolute"), ("slicer", "axis"))
# Keys that may differ between two attempts at one run: they change only where it is computed.
WHERE = (
    ("data", "workers"), ("data", "directory"), ("trainer", "accelerator"), ("trainer", "devices"),
    ("trainer", "strategy"), ("trainer", "checkpoint_minutes"), ("trainer", "compile"),
    ("trainer", "attention_statistics"), ("trainer", "cuda_graph"),
    ("trainer", "compare_throughput"),
)  # fmt: skip


def run_directory(output: Path, run: Run) -> Path:
    """The directory of a run: recipe, setting, mechanism, seed."""
    return output / run.recipe / _slug(run.setting) / _slug(run.label) / f"seed-{run.seed}"


def identity(run: Run) -> dict[str, Any]:
    """Return what tells a run from the others, as its results say it."""
    return {
        "recipe": run.recipe,
        "mechanism": run.label,
        "setting": run.setting,
        "seed": run.seed,
    }


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._=%+-" else "-" for c in name)


def read_results(directory: Path) -> dict[str, Any] | None:
    """Return the results of a finished run, or None."""
    path = directory / "results.json"
    if not path.exists():
        return None
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise RunError(f"{path}: cannot be read ({error}); move it away to run again") from None
    if not isinstance(results, dict) or "scores" not in results:
        raise RunError(f"{path}: these are not the results of a run; move the file away")
    return results


def is_begun(directory: Path) -> bool:
    """Say whether there is work of a run in a directory: a checkpoint, or results."""
    return (directory / "results.json").exists() or any(directory.glob("*.ckpt"))


def check_same(run: Run, directory: Path) -> None:
    """Refuse a directory that holds work of a run with other settings."""
    path = directory / "config.yaml"
    if not (path.exists() and is_begun(directory)):
        return
    try:
        there = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError):
        there = None
    if not isinstance(there, dict):
        raise RunError(f"{path}: cannot be read; move the directory away to begin this run again")
    changed = differences(plain(run), there)
    if changed:
        raise RunError(
            f"{directory}: holds a run with other settings: {changed}. Move the directory away, or "
            "choose another --output where the command has it (train, reproduce, finetune)"
        )


def differences(asked: dict[str, Any], there: dict[str, Any]) -> str:
    """Say what differs between two descriptions; nothing if nothing that matters does."""
    changed = [
        f"{key} is {theirs!r} there and {ours!r} here"
        for key, ours, theirs in changes(asked, there)
    ]
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return "; ".join(changed[:3]) + more


def changes(asked: dict[str, Any], there: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Key path, value asked for and value there of all that matters and differs.

    A description without a switch means that it is off; but not in arguments, of which only those
    are written down that were given. One without a unit of temperatures, or without a slicer, means
    absolute temperatures along the axes.
    """
    ours, theirs = _flat(asked), _flat(there)

    def value(of: dict[tuple[str, ...], Any], key: tuple[str, ...]) -> Any:
        off = of.get(key) is False and not any(key[: len(part)] == part for part in _GIVEN)
        unsaid = (key[-1], of.get(key)) in _UNSAID if key else False
        return None if off or unsaid else of.get(key)

    return [
        (".".join(key), ours.get(key), theirs.get(key))
        for key in sorted({*ours, *theirs})
        if value(ours, key) != value(theirs, key) and key not in WHERE
    ]


def _flat(value: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if not isinstance(value, dict) or not value:
        return {path: value}
    return {
        place: item
        for key, part in value.items()
        for place, item in _flat(part, (*path, key)).items()
    }


def is_first_process() -> bool:
    """Whether this process writes files and speaks to the user, of those that train together."""
    return (
        int(os.environ.get("LOCAL_RANK", "0")) == 0 and int(os.environ.get("NODE_RANK", "0")) == 0
    )


def read_curves(directory: Path) -> dict[str, dict[int, float]]:
    """Logged numbers of a run by name and epoch; of repeated epochs the last attempt counts."""
    curves: dict[str, dict[int, float]] = defaultdict(dict)
    files = {
        int(path.parent.name.rpartition("-")[2]): path
        for path in (directory / "logs").glob("attempt-*/metrics.csv")
    }
    for _, path in sorted(files.items()):
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                for name, text in row.items():
                    if name not in ("epoch", "step") and text and row.get("epoch"):
                        curves[name][int(float(row["epoch"]))] = float(text)
    return dict(curves)
