"""`RESULTS.md`: scores and the paper's claims on the first page, then every experiment."""

import os
import statistics
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from espformer.lab.errors import UserError
from espformer.lab.recipes.recipe import Recipe, load_recipe, recipe_names
from espformer.lab.recipes.schema import Grid
from espformer.lab.results.claims import (
    CLAIMS,
    HARMLESS,
    UNCERTAIN,
    Claim,
    Comparison,
    anchor,
    compared,
    count_claims,
    gap_in_words,
    grid,
    in_numbers,
    name_of,
    signed,
    verdict,
)
from espformer.lab.results.paper_numbers import TABLES, Number
from espformer.lab.results.result_files import Results, read_file
from espformer.lab.results.result_tables import ATTENTION, in_order, markdown, trained_otherwise

Result = dict[str, Any]

_INTRODUCTION = """\
# Results

Scores are test accuracy in percent, or BLEU, after the last epoch: no epoch is selected by its test
score. `±` is the standard deviation over seeds. `espformer results` writes this page from the files
in `results/`, which `espformer reproduce --save results` writes.
"""

_GAP = f"""\
A gap is the first score minus the second, in points, over the settings and seeds that both have, so
it may differ from that of the means above. The paper's is the mean over the settings that were run
here, if it prints numbers. Ours has a 95 % interval; if that is wider than {UNCERTAIN} points, the
gap is too uncertain to say. See [how a claim is judged](#how-a-claim-is-judged). ¹ marks
experiments whose learning rate or number of epochs is not the paper's, as their sections say:
there, "the paper's settings" are those of its attention alone.
"""

# Rows of recipes of the paper that are columns of the first table. The paper has neither uniform
# attention nor our defaults.
_COLUMNS = (
    "uniform", "transformer", "difftransformer", "sinkformer", "espformer", "espformer-default",
)  # fmt: skip

_RULES = """\
## How a claim is judged

A claim compares two rows over pairs of runs with the same setting and seed. Such runs have the same
batches, subsets, learning rate and precision, unless the verdict says otherwise. They have the same
initial weights if both rows have the same parameters and neither has frozen slices, which are
drawn. The claim sets a threshold: 0 points for "is better", {margin} for "does no harm" or "loses
nothing". It **held** if the 95 % interval of the mean difference lies above the threshold, **did
not hold** if it lies below, and is **not decided** if the interval contains the threshold. p
belongs to a paired, two-sided t-test against the threshold, so p < 0.05 says the same as the
interval.

Limits of these tests: intervals describe the variation over seeds, not over test data, which are
the same in all runs. With three pairs, the test relies on normally distributed differences; a test
without that assumption cannot reach 5 % with fewer than six pairs. If settings are pooled, pairs
have equal weight and count as independent, also those of one seed. Differences between settings
widen the interval, and nothing is said about settings that were not run.
A claim that was made after seeing the runs needs new runs to confirm it, whatever its p.
"""


_TABLES = f"""\
## About the tables

{ATTENTION}

Commands are given without options that change nothing in the numbers: how many runs are done at
once, and where results go.
"""


def results_page(directory: Path, page: Path = Path("RESULTS.md")) -> str:
    """`RESULTS.md`: scores and the paper's claims, and a section for each file.

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
    counted = count_claims(every)
    rules = [_RULES.format(margin=-HARMLESS), *_wrapped(counted)] if counted else []
    return "\n".join([_INTRODUCTION, *first_page(every), *sections, *rules, _TABLES])


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
    return Recipe(name=results.experiment, title=results.title, task=task, mechanisms={}, grid=grid)


def first_page(every: Sequence[tuple[Recipe, list[Result]]]) -> list[str]:
    """Return what became of the paper's claims, with its settings and with our defaults.

    Args:
        every: experiments and their runs; those of the paper that are missing count as not run.
    """
    paper: list[_Tested] = []
    defaults: list[_Tested] = []
    waiting: dict[str, list[Claim]] = {}
    for recipe, results in _of_the_paper(every):
        found = {id(claim): comparison for claim, comparison in compared(recipe, results)}
        mark = "¹" if trained_otherwise(recipe, TABLES[recipe.paper or ""], results) else ""
        for claim in CLAIMS[recipe.name]:
            comparison = found.get(id(claim))
            theirs = claim.by == "the paper"
            if comparison is None:
                if theirs:
                    waiting.setdefault(recipe.name, []).append(claim)
            elif theirs or claim.front:
                reached = verdict(claim, comparison)
                cells = [f"[{recipe.title}](#{anchor(recipe.title)}){mark}"]
                if theirs:
                    gap = paper_gap(claim, recipe, set(comparison.by_setting))
                    cells.append("–" if gap is None else signed(gap))
                cells += [gap_in_words(comparison), str(reached)]
                about = (comparison.pairs, comparison.unlike)
                tested = _Tested(claim.sentence, cells, reached.outcome, *about)
                (paper if theirs else defaults).append(tested)
    if not paper:
        return []
    others = _other_data(every, waiting)
    lines = [
        "## In short", "",
        f"- The paper's settings: of its {len(paper)} claims that were tested here, "
        f"{_counted(paper)}; {sum(map(len, waiting.values()))} were not run{_elsewhere(others)}.",
    ]  # fmt: skip
    if defaults:
        lines.append(
            f"- Our defaults: of {len(defaults)} such claims about them, {_counted(defaults)}."
        )
    held = [tested for tested in paper + defaults if tested.outcome == "held"]
    unlike = sum(bool({"learning rates", "precision"} & {*tested.unlike}) for tested in held)
    apart = f", and {unlike} compare rows with different learning rates or precision"
    lines.append(
        "- Verdicts are not corrected for their number: the more claims are tested, the more hold "
        f"by chance. Of the {len(held)} that held, {sum(tested.pairs <= 3 for tested in held)} "
        f"rest on two or three pairs of runs{apart if unlike else ''}."
    )
    lines += ["", *_scores(every)]
    lines += ["## The paper's claims", "", *_wrapped(_GAP)]
    lines += _once(["claim", "experiment", "paper's gap", "our gap", "verdict"], paper)
    if defaults:
        lines += ["The same with our defaults instead of the paper's settings:", ""]
        lines += _once(["claim", "experiment", "our gap", "verdict"], defaults)
    return [*lines, *_not_run(waiting, others)]


class _Tested(NamedTuple):
    """A claim that was tested: what it says, its other cells in a table, and what became of it."""

    claim: str
    cells: list[str]
    outcome: str
    pairs: int
    unlike: tuple[str, ...]


def _counted(tested: Sequence[_Tested]) -> str:
    """Count the outcomes, and those that are open for want of a second pair of runs."""
    outcomes = Counter[str](one.outcome for one in tested)
    return in_numbers(outcomes, sum(one.pairs == 1 for one in tested))


def _once(head: list[str], tested: Sequence[_Tested]) -> list[str]:
    """Return a table in which each claim is written in the first of its rows."""
    lines = [head]
    for claim in dict.fromkeys(one.claim for one in tested):
        first, *others = [one.cells for one in tested if one.claim == claim]
        lines += [[claim, *first], *(["", *cells] for cells in others)]
    return grid(lines)


Outcome = tuple[Recipe, Recipe, Claim, Comparison]


def _other_data(
    every: Sequence[tuple[Recipe, list[Result]]], waiting: dict[str, list[Claim]]
) -> list[Outcome]:
    """Find the same claims about other data: recipe, the recipe instead of it, claim, outcome."""
    there = {recipe.name: (recipe, results) for recipe, results in every}
    tested: list[Outcome] = []
    for recipe, claims in ((load_recipe(name), claims) for name, claims in waiting.items()):
        other = there.get(TABLES[recipe.paper or ""].instead or "")
        if other is not None:
            found = {_statement(claim): (claim, outcome) for claim, outcome in compared(*other)}
            same = [found[key] for key in map(_statement, claims) if key in found]
            tested += [(recipe, other[0], *pair) for pair in same]
    return tested


def _statement(claim: Claim) -> tuple[Any, ...]:
    """Return what a claim says, whoever says it, and about whichever data."""
    return claim.says, claim.row, claim.other, claim.margin


def _elsewhere(others: list[Outcome]) -> str:
    """Say how many claims were tested on other data instead, and how many of them held."""
    if not others:
        return ""
    held = sum(verdict(claim, found).outcome == "held" for _, _, claim, found in others)
    return (
        f", but {len(others)} of these were tested [on other data](#claims-that-were-not-run), "
        f"where {held or 'none'} held"
    )


def _not_run(waiting: dict[str, list[Claim]], others: list[Outcome]) -> list[str]:
    """List the experiments whose claims were not run, and claims tested on other data instead."""
    if not waiting:
        return []
    missing = [f"{load_recipe(name).title} ({len(claims)})" for name, claims in waiting.items()]
    lines = ["### Claims that were not run", "", *_wrapped(f"{'; '.join(missing)}.")]
    for name in dict.fromkeys(other.name for _, other, _, _ in others):
        same = [outcome for outcome in others if outcome[1].name == name]
        recipe, other, _, _ = same[0]
        outcomes = Counter[str](verdict(claim, found).outcome for _, _, claim, found in same)
        lines += _wrapped(
            f"Of the claims about {recipe.title}, {len(same)} were tested on other data instead, "
            f"in [{other.title}](#{anchor(other.title)}): {in_numbers(outcomes)}."
        )
        rows = [["claim", "paper's gap, on its data", "our gap, on ours", "verdict"]]
        for _, _, claim, found in same:
            gap = paper_gap(claim, recipe)
            said = "–" if gap is None else signed(gap)
            rows.append([claim.sentence, said, gap_in_words(found), str(verdict(claim, found))])
        lines += grid(rows)
    return lines


def _wrapped(text: str) -> list[str]:
    return [*textwrap.wrap(text, 100, break_on_hyphens=False), ""]


def _scores(every: Sequence[tuple[Recipe, list[Result]]]) -> list[str]:
    """Return mean scores of the paper's attentions and of ours in its experiments."""
    shown = [
        (recipe, results)
        for recipe, results in _of_the_paper(every)
        if results and {*_COLUMNS} - {"espformer-default", "uniform"} <= {*recipe.mechanisms}
    ]
    short = Counter(recipe.title.split(",")[0] for recipe, _ in shown)
    rows, most, apart = [], 0, False
    for recipe, results in shown:
        settings = dict.fromkeys(result["setting"] for result in results)
        for setting in settings:
            tested = {label: _tested(results, setting, label) for label in recipe.mechanisms}
            means = {label: statistics.fmean(found) for label, found in tested.items() if found}
            if not means:  # of mechanisms that the recipe has no more
                continue
            runs = sorted({len(tested[label]) for label in means})
            cells = []
            for label in _COLUMNS:
                here = f"{means[label]:.2f}" if label in means else "–"
                found = tested.get(label) or [0.0]
                if max(found) - min(found) > UNCERTAIN:
                    here, apart = f"{here}²", True
                there = TABLES[recipe.paper or ""].numbers.get((setting, label, "test"), Number())
                said = _middle(there)
                cells.append(here if said is None else f"{here} ({said:.2f})")
            others = {
                label: mean
                for label, mean in means.items()
                if "esp" in label and label not in _COLUMNS
            }
            best = max(others, key=others.__getitem__, default=None)
            most = max(most, len(others))
            cells.append("–" if best is None else f"{others[best]:.2f}: {name_of(best)}")
            name = recipe.title.split(",")[0]
            name = f"[{recipe.title if short[name] > 1 else name}](#{anchor(recipe.title)})"
            seeds = "–".join(str(number) for number in dict.fromkeys((runs[0], runs[-1])))
            rows.append([f"{name}, {setting}" if len(settings) > 1 else name, seeds, *cells])
    if not rows:
        return []
    text = (
        "Mean scores over seeds, in brackets what the paper prints. Many of our runs are shorter "
        "than the paper's or have less data, as their sections say, so compare numbers of a row. "
        "Uniform attention is the mean of all tokens: where it is as accurate as the others, the "
        "experiment does not need attention. "
        f"The last column is the best of up to {most} variants of ESP, chosen by the very score "
        "that is shown, so it flatters."
    )
    if apart:
        text += (
            f" ² marks means of runs that are more than {UNCERTAIN} points apart, which say "
            "nothing about the attention."
        )
    names = {label: name_of(label) for label in _COLUMNS}
    names["espformer"] = "ESP with the paper's settings"
    names["espformer-default"] = "ESP with our defaults"
    head = ["experiment", "seeds", *names.values(), "best variant of ESP"]
    return [*_wrapped(text), *grid([head, *rows])]


def _tested(results: list[Result], setting: str, label: str) -> list[float]:
    return [
        result["scores"]["test"]
        for result in results
        if (result["setting"], result["mechanism"]) == (setting, label)
        and "test" in result["scores"]
    ]


def _of_the_paper(
    every: Sequence[tuple[Recipe, list[Result]]],
) -> list[tuple[Recipe, list[Result]]]:
    """Return the experiments that the paper has, with their results or without."""
    there = {recipe.name: (recipe, results) for recipe, results in every}
    known = [there.get(name) or (load_recipe(name), []) for name in recipe_names()]
    return [pair for pair in known if pair[0].paper is not None and CLAIMS.get(pair[0].name)]


def paper_gap(claim: Claim, recipe: Recipe, settings: set[str] | None = None) -> float | None:
    """Return the mean difference of the paper's numbers; None where it prints none.

    Args:
        claim: its two rows.
        recipe: the experiment, with the name of the paper's table.
        settings: only of these, as far as the paper has them; of all unless given.
    """
    numbers = TABLES[recipe.paper or ""].numbers
    if claim.settings is not None:
        pairs = [claim.settings]
    else:
        pairs = [(setting, setting) for setting in dict.fromkeys(key[0] for key in numbers)]
        pairs = [pair for pair in pairs if settings is None or pair[0] in settings]
    gaps = []
    for pair in pairs:
        cells = [
            _middle(numbers.get((setting, *row), Number()))
            for setting, row in zip(pair, (claim.row, claim.other), strict=True)
        ]
        if cells[0] is not None and cells[1] is not None:
            gaps.append(cells[0] - cells[1])
    return statistics.fmean(gaps) if gaps else None


def _middle(number: Number) -> float | None:
    return number.median if number.mean is None else number.mean
