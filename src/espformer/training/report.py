"""Results of an experiment beside the paper's: a table in Markdown, and everything as JSON."""

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from espformer.training.checkpoints import write_atomically
from espformer.training.paper_numbers import TABLES, Number, Table
from espformer.training.recipe import Recipe
from espformer.training.records import read_results

__all__ = ["collect", "markdown", "summarise", "write_report"]

_SCORE_NAMES = {
    "start": "before training",
    "test": "after training",
    "hard": "hard sort",
    "best": "best epoch",
    "mean": "mean time",
    "median": "median time",
}


def collect(recipe: Recipe, output: Path) -> list[dict[str, Any]]:
    """Results of all finished runs of an experiment, in the order of its grid."""
    found = []
    for path in sorted((output / recipe.name).glob("*/*/seed-*/results.json")):
        results = read_results(path.parent)
        if results is not None:
            found.append(results)
    settings, labels = list(recipe.grid.settings), list(recipe.mechanisms)

    def place(results: dict[str, Any]) -> tuple[int, int, int]:
        setting, label = results["setting"], results["mechanism"]
        known = setting in settings and label in labels
        where = (settings.index(setting), labels.index(label)) if known else (len(settings), 0)
        return (*where, results["seed"])

    return sorted(found, key=place)


def summarise(values: list[float]) -> Number:
    """Best, median, mean, worst and standard deviation of some runs (one has no deviation).

    Example:
        >>> summarise([1.0, 2.0, 3.0])
        Number(mean=2.0, std=1.0, best=3.0, median=2.0, worst=1.0)
    """
    return Number(
        mean=statistics.fmean(values),
        std=statistics.stdev(values) if len(values) > 1 else None,
        best=max(values),
        median=statistics.median(values),
        worst=min(values),
    )


def markdown(recipe: Recipe, results: list[dict[str, Any]], command: str) -> str:
    """The table of an experiment, with the paper's numbers where it prints some."""
    table = TABLES.get(recipe.paper or "", Table("", "mean_std", {}))
    lines = [f"# {recipe.title}", ""]
    if table.caption:
        lines += [f"Paper: {table.caption}.", ""]
    if not results:
        return "\n".join([*lines, "No run is finished yet.", ""])
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    shown = ("mean",) if recipe.task == "runtime" else ("start", "test", "hard")
    for result in results:
        for score, value in result["scores"].items():
            if score in shown:
                groups[result["setting"], result["mechanism"], score].append(value)
    columns = _columns(table)
    head = ["setting", "mechanism", "score", "runs"]
    head += [f"{name}, here" for name in columns]
    if table.numbers:
        head += [f"{name}, paper" for name in columns]
    if recipe.task == "runtime":
        head = ["setting", "mechanism", "score", "runs", "ms, here", "row sums off", "columns off"]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for key, values in groups.items():
        setting, label, score = key
        cells = [setting, label, _SCORE_NAMES.get(score, score), str(len(values))]
        if recipe.task == "runtime":
            cells += [f"{statistics.fmean(values):.3g}", *_checks(results, setting, label)]
        else:
            ours, theirs = summarise(values), table.numbers.get(key, Number())
            cells += [_cell(ours, name) for name in columns]
            if table.numbers:
                cells += [_cell(theirs, name) for name in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *_conditions(results, command), ""])


def _columns(table: Table) -> tuple[str, ...]:
    if table.style == "spread":
        return ("best", "median", "mean", "worst")
    return ("median",) if table.style == "median" else ("mean ± std",)


def _cell(number: Number, column: str) -> str:
    if column == "mean ± std":
        if number.mean is None:
            return "–"
        return f"{number.mean:.2f}" + ("" if number.std is None else f" ± {number.std:.2f}")
    value = getattr(number, column)
    return "–" if value is None else f"{value:.2f}"


def _checks(results: list[dict[str, Any]], setting: str, label: str) -> list[str]:
    checks = [
        result.get("check", {})
        for result in results
        if (result["setting"], result["mechanism"]) == (setting, label)
    ]
    names = ("row_error", "column_error")
    return [
        f"{max(check[name] for check in checks):.1e}" if all(name in c for c in checks) else "–"
        for name in names
        for check in checks[:1]
    ]


def _conditions(results: list[dict[str, Any]], command: str) -> list[str]:
    def several(values: list[str]) -> str:
        return ", ".join(sorted(set(values)))

    precisions = [
        str(r["config"].get("trainer", {}).get("precision", r["config"].get("precision", "")))
        for r in results
    ]
    lines = [
        f"Made by `{command}`.",
        "",
        f"Device: {several([r['device'] for r in results])}; "
        f"precision {several(precisions)}; "
        f"torch {several([r['versions']['torch'] for r in results])}; "
        f"espformer {several([r['versions']['espformer'] for r in results])}; "
        f"seeds {several([str(r['seed']) for r in results])}.",
    ]
    data = results[0].get("data", {})
    if data.get("differences"):
        lines += ["", "Data, beside the published set:"]
        lines += [f"- {difference}" for difference in data["differences"]]
    return lines


def write_report(recipe: Recipe, output: Path, command: str) -> tuple[Path, str]:
    """Write `results.json` and `results.md` of an experiment; returns the latter and its text."""
    results = collect(recipe, output)
    text = markdown(recipe, results, command)
    directory = output / recipe.name
    write_atomically(directory / "results.json", json.dumps(results, indent=1) + "\n")
    write_atomically(directory / "results.md", text)
    return directory / "results.md", text
