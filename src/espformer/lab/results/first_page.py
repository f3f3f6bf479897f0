"""The first page of RESULTS.md: what the paper claims, its gap and ours, in one table."""

import statistics
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from espformer.lab.recipes.recipe import Recipe, load_recipe, recipe_names
from espformer.lab.results.claims import (
    CLAIMS,
    SIGNS,
    Claim,
    anchor,
    compared,
    gap_in_words,
    grid,
    signed,
    verdict,
)
from espformer.lab.results.paper_numbers import TABLES, Number

__all__ = ["first_table", "paper_gap"]

Result = dict[str, Any]


def first_table(every: Sequence[tuple[Recipe, list[Result]]]) -> list[str]:
    """Return the table of all experiments of the paper, a claim on each line.

    Args:
        every: experiments and their runs; those of the paper that are missing are said to be.
    """
    rows, outcomes, waiting = [], Counter[str](), 0
    for recipe, results in _of_the_paper(every):
        asked = [c for c in CLAIMS.get(recipe.name, ()) if c.front or c.by == "the paper"]
        found = {id(claim): comparison for claim, comparison in compared(recipe, results)}
        if not results:
            claims = [claim for claim in asked if claim.by == "the paper"]
            waiting += len(claims)
            rows.append(["", recipe.title, f"{len(claims)} claims", "", "not run", ""])
            continue
        name = f"[{recipe.title}](#{anchor(recipe.title)})"
        for claim in asked:
            comparison = found.get(id(claim))
            if comparison is None and claim.by != "the paper":
                continue  # a question of ours that these runs do not answer
            settings = set(comparison.by_setting) if comparison else {r["setting"] for r in results}
            gap = paper_gap(claim, recipe, settings) if claim.by == "the paper" else None
            theirs = "–" if gap is None else signed(gap)
            says = f"{claim.says[0].upper()}{claim.says[1:]}"
            says += "" if claim.by == "the paper" else " (ours)"
            if comparison is None:
                waiting += 1
                rows.append(["", name, says, theirs, "not run", ""])
            else:
                reached = verdict(claim, comparison)
                if claim.by == "the paper":
                    outcomes[reached.outcome] += 1
                ours = gap_in_words(comparison)
                rows.append([SIGNS[reached.outcome], name, says, theirs, ours, reached.words])
            name = ""
    if not any(outcomes.values()):
        return []
    tested = sum(outcomes.values())
    text = (
        f"These are the paper's claims about its experiments, and the same claims with our "
        f"defaults (ours). Of the paper's {tested} claims that were tested here, "
        f"{outcomes['held']} held (✓), {outcomes['failed']} did not (✗), and "
        f"{outcomes['open']} are not decided (?)"
        + (f"; {waiting} have not been run" if waiting else "")
        + ". A gap is the first score minus the second, in points of accuracy or BLEU. The paper's "
        "gap is the mean over the settings that were run here, if the paper prints numbers; ours "
        "has a 95 % interval."
    )
    head = ["", "experiment", "claim", "paper's gap", "our gap", "verdict"]
    title = "## The paper's claims, and the same with our defaults"
    return [title, "", *textwrap.wrap(text, 100), "", *grid([head, *rows])]


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
