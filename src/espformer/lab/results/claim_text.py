"""Claims in words: a sentence each below the table of an experiment, a line each above them all."""

import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from espformer.lab.recipes.recipe import Recipe
from espformer.lab.results.claims import CLAIMS, Claim, Comparison, compare, verdict

__all__ = ["SCORES", "anchor", "claim_sentences", "claims_table", "grid"]

Result = dict[str, Any]

SCORES = {"start": ", before training", "test": "", "hard": ", hard sort", "mean": ""}
"""Scores that tables show, and what they add to the name of a row."""

_SIGNS = {"held": "✓", "failed": "✗", "open": "?"}


def grid(rows: list[list[str]]) -> list[str]:
    """Return a table in Markdown; the first row is its head."""
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return [head, "|" + "---|" * len(rows[0]), *body, ""]


def anchor(heading: str) -> str:
    """Return the fragment by which a heading of a page can be linked.

    Example:
        >>> anchor("MNIST, impact of patch size")
        'mnist-impact-of-patch-size'
    """
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def claim_sentences(recipe: Recipe, results: list[Result]) -> list[str]:
    """Say whether each claim held, with the difference and the test."""
    lines = [_sentence(claim, found) for claim, found in _compared(recipe, results)]
    return [*lines, ""] if lines else []


def claims_table(every: Sequence[tuple[Recipe, list[Result]]]) -> list[str]:
    """Return all claims of a page, a line each, and how many held; nothing where there is none."""
    rows, outcomes, afterwards, better = [], Counter[str](), 0, 0
    for recipe, results in every:
        for claim, found in _compared(recipe, results):
            reached = verdict(claim, found)
            outcomes[reached.outcome] += 1
            afterwards += claim.post_hoc
            better += claim.margin is None
            interval = "" if found.low is None else f" ({_interval(found)})"
            rows.append([
                _SIGNS[reached.outcome],
                f"[{recipe.name}](#{anchor(recipe.title)})",
                f"{claim.says[0].upper()}{claim.says[1:]} ({claim.source})",
                reached.words,
                f"{_signed(found.mean)}{interval}",
                "–" if found.p is None else _probability(found.p),
            ])  # fmt: skip
    if not rows:
        return []
    count = len(rows)
    counts = (
        f"Of {count} claims, {outcomes['held']} held (✓), {outcomes['failed']} did not (✗), and "
        f"{outcomes['open']} are not decided (?); {afterwards} were asked after seeing these runs. "
        "Differences are in points, with 95 % intervals. No p is corrected for the number of "
        f"claims: if nothing made a difference, {better / 20:.1f} of the {better} that something "
        "is better would be decided by chance."
    )
    head = ["", "experiment", "claim", "verdict", "difference", "p"]
    return ["## Claims", "", *textwrap.wrap(counts, 100), "", *grid([head, *rows])]


def _compared(recipe: Recipe, results: list[Result]) -> list[tuple[Claim, Comparison]]:
    found = ((claim, compare(claim, results)) for claim in CLAIMS.get(recipe.name, ()))
    return [(claim, comparison) for claim, comparison in found if comparison is not None]


def _sentence(claim: Claim, found: Comparison) -> str:
    text = f"- {claim.says[0].upper()}{claim.says[1:]} ({claim.source}): "
    text += f"**{verdict(claim, found).words}**. `{_row(claim.row)}` minus `{_row(claim.other)}` "
    text += f"is {_signed(found.mean)} points"
    if found.low is None or found.p is None:
        return f"{text} in one pair."
    test = f"paired t-test of {found.pairs} pairs"
    if claim.margin is not None:
        test += f" against a loss of {claim.margin:g} points"
    test += f", p {'' if found.p < 1e-4 else '= '}{_probability(found.p)}"
    if len(found.by_setting) > 1:
        means = (f"{setting} {_signed(mean)}" for setting, mean in found.by_setting.items())
        test += f"; {', '.join(means)}"
    return f"{text}, 95 % interval {_interval(found)} ({test})."


def _interval(found: Comparison) -> str:
    assert found.low is not None
    assert found.high is not None
    return f"{_signed(found.low)} to {_signed(found.high)}"


def _probability(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"{p:.2g}"


def _signed(points: float) -> str:
    """Two decimals, or one digit that is not zero: the side of zero is always seen."""
    return f"{points:+.2f}" if abs(points) >= 0.005 or points == 0 else f"{points:+.1g}"


def _row(row: tuple[str, str]) -> str:
    return row[0] + SCORES[row[1]]
