"""The section of an experiment in RESULTS.md: its table next to the paper's, claims and
conditions.
"""

import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from espformer.lab.clock import in_words
from espformer.lab.recipes.recipe import Recipe, load_recipe, recipe_names
from espformer.lab.recipes.yaml_schema import Origins, plain, read_text, set_path
from espformer.lab.results.claims import SCORES, claims_table, grid, name_of
from espformer.lab.results.paper_numbers import DIFFERENCES, TABLES, Differences, Number, Table
from espformer.lab.training.run_directory import WHERE, changes

Result = dict[str, Any]

_WAYS = {"spread": ("best", "median", "mean", "worst"), "median": ("median", "mean ± std")}


def in_order(recipe: Recipe, results: list[Result]) -> list[Result]:
    """Results in the order of the recipe's grid; those that it does not know come last."""
    settings, labels = list(recipe.grid.settings), list(recipe.mechanisms)

    def place(result: Result) -> tuple[int, int, int]:
        setting, label = result["setting"], result["mechanism"]
        known = setting in settings and label in labels
        where = (settings.index(setting), labels.index(label)) if known else (len(settings), 0)
        return (*where, result["seed"])

    return sorted(results, key=place)


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


def markdown(
    recipe: Recipe, results: list[Result], level: int = 1, picture: str | None = None
) -> str:
    """Return the section of an experiment: table, claims, conditions, what differs from the paper.

    Args:
        recipe: the experiment.
        results: its runs.
        level: of the heading.
        picture: address of a figure to show.
    """
    table = TABLES.get(recipe.paper or "", Table("", "mean_std", {}))
    lines = [f"{'#' * level} {recipe.title}", ""]
    if table.caption:
        lines += [f"Paper: {table.caption}.", ""]
    if recipe.note:
        lines += [recipe.note, ""]
    if not results:
        return "\n".join([*lines, "No run is finished yet.", ""])
    if recipe.task == "runtime":
        lines += _runtime(results)
    else:
        lines += _scores(table, results)
        if recipe.name in recipe_names():
            lines += [_rows(recipe), ""]
        if picture is not None:
            lines += [f"![{recipe.title}: the scores of the table as a figure]({picture})", ""]
        lines += claims_table(recipe, results)
    lines += _differences(recipe, table, results)
    measured = _attention(results)
    if measured:
        measured += [ATTENTION, ""] if level == 1 else []
        lines += _folded("Attention, sizes and times", measured, level)
    lines += _folded("Commands and machines", [*_conditions(results), ""], level)
    return "\n".join(lines)


def _folded(title: str, lines: list[str], level: int) -> list[str]:
    """Fold lines under a title on a page of many sections; leave them on a page of one."""
    if level == 1:
        return lines
    return ["<details markdown>", f"<summary>{title}</summary>", "", *lines, "</details>", ""]


def _scores(table: Table, results: list[Result]) -> list[str]:
    """Scores by mechanism, of each setting or in each way of summing up, ours above the paper's."""
    values: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for result in results:
        for score, value in result["scores"].items():
            if score in SCORES:
                values[result["setting"], result["mechanism"], score].append(value)
    settings = list(dict.fromkeys(result["setting"] for result in results))
    rows = list(dict.fromkeys((label, score) for _, label, score in values))
    columns = [(setting, "mean ± std") for setting in settings]
    heads = list(settings)
    if table.style == "spread" or len(settings) == 1:
        ways = _WAYS.get(table.style, ("mean ± std",))
        columns = [(setting, way) for setting in settings for way in ways]
        heads = [way if len(settings) == 1 else f"{setting}: {way}" for setting, way in columns]
    beside = any(key[0] in settings for key in table.numbers)
    lines = [["mechanism", *([""] if beside else []), "runs", *heads]]
    for label, score in rows:
        name = name_of(label) + (SCORES[score] or _label(label))
        found = {
            setting: values[setting, label, score]
            for setting in settings
            if (setting, label, score) in values
        }
        counts = sorted(map(len, found.values()))
        count = "–".join(str(number) for number in dict.fromkeys((counts[0], counts[-1])))
        ours = {setting: summarise(scores) for setting, scores in found.items()}
        cells = [_cell(ours.get(setting, Number()), way) for setting, way in columns]
        lines.append([name, *(["here"] if beside else []), count, *cells])
        theirs = {
            setting: table.numbers.get((setting, label, score), Number()) for setting in settings
        }
        if any(number != Number() for number in theirs.values()):
            cells = [_cell(theirs[setting], way) for setting, way in columns]
            lines.append(["", "paper", "", *cells])
    return grid(lines)


def _label(label: str) -> str:
    """Return the label of a row, by which commands call it, if it has another name."""
    return "" if name_of(label) == label else f" (`{label}`)"


def _rows(recipe: Recipe) -> str:
    """Say what the rows are."""
    known = f"What the rows are: `espformer recipes {recipe.name}`."
    if recipe.paper is None or "espformer" not in recipe.mechanisms:
        return known
    return f"{known} `espformer` has the paper's settings."


def _cell(number: Number, column: str) -> str:
    if column == "mean ± std":
        if number.mean is None:
            return "–"
        return f"{number.mean:.2f}" + ("" if number.std is None else f" ± {number.std:.2f}")
    value = getattr(number, column)
    return "–" if value is None else f"{value:.2f}"


# What the attention of a run is measured by: the name in its results, and the head of a column.
_MEASURES = {
    "row_error": "error of row sums", "column_error": "error of column sums",
    "entropy": "entropy (uniform: 1)", "slice_weight": "largest slice weight (equal: 1)",
    "spread": "spread of projections", "sort_temperature": "t",
}  # fmt: skip

ATTENTION = """\
Errors are mean distances of row and column sums from one, and the entropy of a row is relative to a
uniform one, on four examples of the last evaluation; matrices with negative entries, which
differential attention may have, are excluded. The largest slice weight is relative to equal
weights. The spread is the standard deviation of the sorted projections, and t the temperature. All
are means over layers and heads, after the last epoch. Examples per second count training steps
only; runs may have shared the machine with others."""
"""The meaning of the columns of :func:`_attention`."""


def _attention(results: list[Result]) -> list[str]:
    """Write the table of what attention came out as, sizes, times, and learnt temperatures."""
    known = {name for result in results for name in result.get("attention", {})}
    if not known:
        return []
    heads = {name: head for name, head in _MEASURES.items() if name in known}
    learns = any("learnt_sort_temperatures" in result for result in results)
    lines = [
        ["mechanism", *heads.values(), "parameters", "seconds per run", "examples per second"]
        + (["t learnt"] if learns else [])
    ]
    for label in dict.fromkeys(result["mechanism"] for result in results):
        group = [result for result in results if result["mechanism"] == label]
        cells = [name_of(label)]
        for name in heads:
            measured = [run.get("attention", {}) for run in group]
            numbers = [found[name] for found in measured if name in found]
            form = ".4g" if name.startswith("slice_weight") else ".2g"
            cells.append(f"{statistics.fmean(numbers):{form}}" if numbers else "–")
        cells.append(_range([run.get("parameters") for run in group], ",.0f"))
        cells.append(_range([_seconds(run) for run in group], ",.0f"))
        cells.append(_range([run.get("samples_per_second") for run in group], ",.0f"))
        if learns:
            learnt = [t for run in group for t in run.get("learnt_sort_temperatures", [])]
            cells.append(_range(learnt, ".2g"))
        lines.append(cells)
    return grid(lines)


def _seconds(result: Result) -> float | None:
    """Return the seconds of the whole run; None if those before an interruption are not known."""
    if result.get("continued") and result.get("seconds_before") is None:
        return None
    return result.get("seconds")


def _range(values: Sequence[float | None], form: str) -> str:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "–"
    low, high = f"{min(numbers):{form}}", f"{max(numbers):{form}}"
    return low if low == high else f"{low} to {high}"


def _runtime(results: list[Result]) -> list[str]:
    lines = [["setting", "mechanism", "milliseconds", *list(_MEASURES.values())[:2]]]
    for result in results:
        check = result.get("check", {})
        errors = [
            f"{check[name]:.1e}" if name in check else "–" for name in ("row_error", "column_error")
        ]
        row = [result["setting"], name_of(result["mechanism"])]
        lines.append([*row, f"{result['scores']['mean']:.3g}", *errors])
    return grid(lines)


# Options of a command that do not change what comes out.
_ELSEWHERE = re.compile(r" (--jobs|-j|--save|--output|-o)[ =]\S+| --skip-saved| --no-progress")


def _conditions(results: list[Result]) -> list[str]:
    """Say where runs were made and by which command: what all share once, then what differs."""
    parts: dict[tuple[str, tuple[str, ...]], list[Result]] = defaultdict(list)
    for result in results:
        command = _ELSEWHERE.sub("", result.get("command") or "")
        parts[command, _machine(result)].append(result)
    shared = [fact for fact in next(iter(parts))[1] if all(fact in facts for _, facts in parts)]
    known = [seconds for result in results if (seconds := _seconds(result)) is not None]
    every = f"- {_count(results)}; {in_words(sum(known))} of training, summed over runs."
    unknown = len(results) - len(known)
    if unknown:
        which = "a run" if unknown == 1 else f"{unknown} runs"
        every += f" Neither this nor the seconds per run count {which} that went on after a stop"
        every += " and did not keep the time before it."
    settings = len({result["setting"] for result in results}) > 1
    lines = [every, f"- Made on {'; '.join(shared)}."] if shared else [every]
    for (command, facts), part in parts.items():
        rest = [fact for fact in facts if fact not in shared]
        made = [_count(part, settings), *rest] if len(parts) > 1 else ["command"]
        if command or rest:
            lines.append(f"- {'; '.join(made)}" + (f": `{command}`" if command else ""))
    return lines


def _machine(result: Result) -> tuple[str, ...]:
    """Device, precision and versions behind a run."""
    config, versions = result["config"], result["versions"]
    precision = config.get("trainer", config).get("precision", "")
    facts = [result["device"], f"precision {precision}", f"torch {versions['torch']}"]
    facts.append(f"espformer {versions['espformer']}")
    revision = versions.get("revision")
    return (*facts, f"commit {revision}") if revision else tuple(facts)


def _count(results: list[Result], settings: bool = False) -> str:
    """Say how many runs, of which settings if there are several, with which seeds."""
    runs = f"{len(results)} run{'' if len(results) == 1 else 's'}"
    which = [", ".join(dict.fromkeys(result["setting"] for result in results))] if settings else []
    seeds = sorted({result["seed"] for result in results})
    seed = f"seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))}"
    return ", ".join([runs, *which, seed])


# Parts of a run that the paper tells, where a recipe has its number.
_TOLD = (
    "annealing.", "beam", "data.batch_size", "data.max_tokens", "data.set.", "label_smoothing",
    "mechanism.", "model.", "optimizer.learning_rate", "optimizer.name", "schedule.",
    "trainer.epochs",
)  # fmt: skip


# Differences that no score of the last epoch depends on; a copied recipe has a name of its own.
_NO_MATTER = ("trainer.validate_every", "recipe")


def _differences(recipe: Recipe, table: Table, results: list[Result]) -> list[str]:
    """List what is not as in the paper, or not as in the recipe where there is no paper."""
    of = "paper" if table.caption else "recipe"
    if recipe.paper in recipe_names() and recipe.paper != recipe.name:
        recipe = load_recipe(recipe.paper)  # a copy of it, whose changes are differences too
    changed = _changed(recipe, table, results)
    lines = [*DIFFERENCES.get(recipe.name, Differences()).words] if table.caption else []
    lines += [f"{setting}: {why}" for setting, why in table.out_of_reach.items()]
    settings, labels, seeds = (
        {result[key] for result in results} for key in ("setting", "mechanism", "seed")
    )
    left = [name for name in recipe.grid.settings if name not in settings]
    if left:
        lines.append(f"settings not run: {', '.join(left)}")
    left = [name_of(label) for label in recipe.mechanisms if label not in labels]
    if left:
        lines.append(f"mechanisms not run: {', '.join(left)}")
    if len(seeds) != len(recipe.grid.seeds):
        lines.append(f"seeds: {len(seeds)} instead of {len(recipe.grid.seeds)}")
    facts = [fact for run in results for fact in run.get("data", {}).get("differences", [])]
    lines += [f"data: {fact}" for fact in dict.fromkeys(facts)]
    if not lines and not changed:
        return []
    keys = grid([["setting", "here", of], *changed]) if changed else []
    points = [*(f"- {line}" for line in lines), ""] if lines else []
    return [f"Differs from the {of}:", "", *keys, *points]


def _changed(recipe: Recipe, table: Table, results: list[Result]) -> list[list[str]]:
    """Return key, value here and value there, of the paper as far as it tells, or of the recipe."""
    printed = {label for _, label, _ in table.numbers} if table.numbers else set(recipe.mechanisms)
    theirs = DIFFERENCES.get(recipe.name, Differences()).values
    changed: dict[tuple[str, str], dict[str, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        label, setting = result["mechanism"], result["setting"]
        if label not in recipe.mechanisms or setting not in recipe.grid.settings:
            continue
        asked = plain(recipe.run(label, setting, result["seed"]))
        for key, value in theirs.items():
            set_path(asked, tuple(key.split(".")), value, Origins(), "")
        for key, wanted, here in changes(asked, result["config"]):
            if key == "start.overrides":
                for name, value in _overrides(here):
                    changed[f"`{name}` of the runs before", f"as `{asked['start']['recipe']}`"][
                        value
                    ].append(result)
            # Nothing is said of a key that a result does not have.
            elif here is not None or key.startswith(("mechanism", "model", "data.set")):
                theirs_too = label in printed or not key.startswith("mechanism")
                told = not table.caption or (theirs_too and key.startswith(_TOLD))
                there = _value(wanted) + ("" if told else " (recipe)")
                if key not in _NO_MATTER:
                    changed[f"`{key}`", there][_value(here)].append(result)
    return [
        [
            key,
            ", ".join(f"{here}{_only_of(runs, results)}" for here, runs in values.items()),
            wanted,
        ]
        for (key, wanted), values in changed.items()
    ]


def trained_otherwise(recipe: Recipe, table: Table, results: list[Result]) -> bool:
    """Whether learning rates or epochs of some runs are not those of the paper."""
    described = [result for result in results if "config" in result]
    keys = {key for key, *_ in _changed(recipe, table, described)}
    return not keys.isdisjoint(("`optimizer.learning_rate`", "`trainer.epochs`"))


def _overrides(texts: list[str] | None) -> list[tuple[str, str]]:
    """Keys and values of overrides that scores may depend on."""
    pairs = [text.split("=", 1) for text in texts or []]
    return [
        (key, _value(read_text(value)))
        for key, value in pairs
        if tuple(key.split(".")) not in WHERE and key not in _NO_MATTER
    ]


def _value(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _only_of(some: list[Result], results: list[Result]) -> str:
    """Name the settings or mechanisms of some results, or both, where they are not all.

    Example:
        >>> every = [{"setting": s, "mechanism": m} for s in "xy" for m in "abc"]
        >>> _only_of(every[:3], every), _only_of(every[:2] + every[3:5], every)
        (' (x)', ' (all but c)')
    """
    if len(some) == len(results):
        return ""
    names = []
    for field, shown in (("setting", str), ("mechanism", name_of)):
        every = dict.fromkeys(result[field] for result in results)
        here = dict.fromkeys(result[field] for result in some)
        rest = [name for name in every if name not in here]
        if rest:
            short = len(rest) == 1 and len(here) > 1
            text = f"all but {shown(rest[0])}" if short else ", ".join(map(shown, here))
            names.append((here, text, field))
    for here, text, field in names:  # one of the two may say it all
        if len(some) == sum(result[field] in here for result in results):
            return f" ({text})"
    return f" ({'; '.join(text for _, text, _ in names)})" if names else ""
