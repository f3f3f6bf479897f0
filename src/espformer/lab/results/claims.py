"""Claims of the paper and of ours about its mechanism, and a paired test of each.

Every claim has a threshold for the difference of its rows: 0 for "is better", `-margin` for "does
no harm". It held if the 95 % interval of the difference lies above the threshold, and did not hold
if it lies below. p belongs to a two-sided test against the threshold, so p < 0.05 says the same.
"""

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from espformer.lab.data import available, options
from espformer.lab.names import NAMES
from espformer.lab.recipes.recipe import Recipe
from espformer.lab.recipes.yaml_schema import Origins, Spec, parse, read_yaml

Result = dict[str, Any]

# A loss of accuracy, or of BLEU, that is considered negligible.
HARMLESS = 0.5
# Points between two scores, or in an interval, from which on their mean says nothing.
UNCERTAIN = 20


@dataclass(frozen=True)
class Claim:
    """One row does better than another, or, with a `margin`, at most that much worse.

    Rows are (label of a mechanism, score); a pair has the same setting and the same seed, or, with
    `settings` for the two rows, the same seed. A claim that the results themselves suggested is
    `post_hoc`: they cannot confirm it.
    """

    says: str
    row: tuple[str, str]
    other: tuple[str, str]
    by: str = "ours"
    margin: float | None = None
    post_hoc: bool = False
    settings: tuple[str, str] | None = None
    front: bool = False
    """It stands on the first page, where the paper's own claims are."""

    @property
    def sentence(self) -> str:
        return f"{self.says[0].upper()}{self.says[1:]}"

    @property
    def source(self) -> str:
        """Who says so, and whether before these runs."""
        return f"{self.by}, asked after seeing these runs" if self.post_hoc else self.by


@dataclass(frozen=True)
class Comparison:
    """Differences over pairs: their mean, its 95 % interval, and a paired t-test."""

    pairs: int
    by_setting: dict[str, float]
    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    unlike: tuple[str, ...] = ()
    """What the two runs of some pair do not share, although a fair comparison would."""


class Verdict(NamedTuple):
    """The outcome of a claim, and the same in words."""

    outcome: Literal["held", "failed", "open"]
    words: str

    def __str__(self) -> str:
        return f"{SIGNS[self.outcome]} {self.words}"


def _read() -> dict[str, tuple[Claim, ...]]:
    raw, _ = read_yaml(Path(__file__).with_suffix(".yaml"))
    return {name: tuple(_claims(entries)) for name, entries in raw.items()}


def _claims(entries: list[Any]) -> Iterator[Claim]:
    for entry in entries:
        if isinstance(entry, list):  # claims that several recipes share
            yield from _claims(entry)
        else:
            row, other = (
                (label, score or "test")
                for label, _, score in (row.partition(" ") for row in entry["rows"])
            )
            rest = {key: value for key, value in entry.items() if key not in ("rows", "settings")}
            settings = tuple(entry["settings"]) if "settings" in entry else None
            yield Claim(row=row, other=other, settings=settings, **rest)


CLAIMS: dict[str, tuple[Claim, ...]] = _read()


def compare(claim: Claim, results: Sequence[dict[str, Any]]) -> Comparison | None:
    """Compare the rows of a claim, run by run; None if they have no pair of runs."""
    apart = claim.settings or (None, None)
    runs = [
        {
            ("" if only else result["setting"], result["seed"]): result
            for result in results
            if result["mechanism"] == label
            and score in result["scores"]
            and only in (None, result["setting"])
        }
        for (label, score), only in zip((claim.row, claim.other), apart, strict=True)
    ]
    pairs = sorted(runs[0].keys() & runs[1].keys())
    if not pairs:
        return None
    differences = {
        pair: runs[0][pair]["scores"][claim.row[1]] - runs[1][pair]["scores"][claim.other[1]]
        for pair in pairs
    }
    unlike = () if claim.settings else _unlike(claim, [(runs[0][p], runs[1][p]) for p in pairs])
    by_setting = {
        name: statistics.fmean(d for (setting, _), d in differences.items() if setting == name)
        for name in ("", *dict.fromkeys(result["setting"] for result in results))
        if any(setting == name for setting, _ in pairs)
    }
    mean = statistics.fmean(differences.values())
    if len(pairs) < 2:
        return Comparison(len(pairs), by_setting, mean, unlike=unlike)
    bar = -(claim.margin or 0.0)
    if len(set(differences.values())) == 1:  # no deviation, and no t
        return Comparison(len(pairs), by_setting, mean, mean, mean, float(mean == bar), unlike)
    from scipy import stats  # takes a second to import

    tested = stats.ttest_1samp(list(differences.values()), popmean=bar)
    low, high = map(float, tested.confidence_interval(0.95))
    return Comparison(len(pairs), by_setting, mean, low, high, float(tested.pvalue), unlike)


def _unlike(claim: Claim, pairs: list[tuple[Result, Result]]) -> tuple[str, ...]:
    """Name what differs within some pair; a score before training has no learning rate."""
    untrained = claim.row[1].startswith("start") and claim.other[1].startswith("start")
    compared = {"batches": _batches, "precision": _precision}
    if not untrained:
        compared["learning rates"] = _learning_rate
    return tuple(
        name
        for name, settings in compared.items()
        if any(settings(one) != settings(other) for one, other in pairs)
    )


def _precision(result: Result) -> Any:
    return (result.get("config", {}).get("trainer") or {}).get("precision")


def _learning_rate(result: Result) -> Any:
    return (result.get("config", {}).get("optimizer") or {}).get("learning_rate")


def _batches(result: Result) -> dict[str, Any]:
    """The settings that decide the batches of a run; options that are not written down had their
    defaults."""
    data = {**(result.get("config", {}).get("data") or {})}
    if data.get("set"):
        given = parse(Spec, data["set"], Origins())
        known = options(given.name) if given.name in available() else {}
        data["set"] = (
            given.name,
            {
                name: value
                for name, value in given.arguments.items()
                if name not in known or value != known[name]
            },
        )
    elsewhere = ("workers", "directory", "eval_batch_size")
    return {name: value for name, value in data.items() if value and name not in elsewhere}


def verdict(claim: Claim, found: Comparison) -> Verdict:
    """Say whether the claim held, by where the interval lies."""
    reached = _by_interval(claim, found)
    if not found.unlike:
        return reached
    unlike = " and ".join(found.unlike)
    return reached._replace(words=f"{reached.words} (rows with different {unlike})")


def _by_interval(claim: Claim, found: Comparison) -> Verdict:
    if found.low is None or found.high is None:
        return Verdict("open", "a single pair decides nothing")
    if claim.margin is None:
        if found.low > 0:
            return Verdict("held", "held")
        if found.high < 0:
            return Verdict("failed", "did not hold, the opposite is seen")
        if found.low > -HARMLESS and found.high < HARMLESS:
            return Verdict("open", f"not decided; any difference is below {HARMLESS:g} points")
        return Verdict("open", "not decided")
    within = f"within {claim.margin:g} points"
    if found.low > 0:
        return Verdict("held", "held, it is even better")
    if found.low > -claim.margin:
        smaller = "; a smaller loss is seen" if found.high < 0 else ""
        return Verdict("held", f"held {within}{smaller}")
    if found.high < -claim.margin:
        return Verdict("failed", f"did not hold, a loss of more than {claim.margin:g} points")
    loss = f"; a loss is seen, perhaps {within}" if found.high < 0 else ""
    return Verdict("open", f"not decided{loss}")


SCORES = {
    "start": ", before fine-tuning", "start_hard": ", before fine-tuning, hard sort",
    "test": "", "hard": ", hard sort", "mean": "",
}  # fmt: skip
"""Scores that tables show, and what they add to the name of a row."""


def name_of(label: str) -> str:
    """Return the name of a row; a label that is not known is one."""
    return NAMES.get(label, label)


SIGNS = {"held": "✓", "failed": "✗", "open": "?"}
"""The marks of the outcomes of claims."""


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


def claims_table(recipe: Recipe, results: list[Result]) -> list[str]:
    """Return the claims about an experiment: difference, test and verdict; nothing without any."""
    found = compared(recipe, results)
    if not found:
        return []
    pooled = any(len(comparison.by_setting) > 1 for _, comparison in found)
    head = ["claim", "rows", "difference, 95 % interval", "pairs", "p", "verdict"]
    lines = [[*head, "by setting"] if pooled else head]
    for claim, comparison in found:
        rows = [name_of(label) + SCORES[score] for label, score in (claim.row, claim.other)]
        if claim.settings is not None:
            rows = [f"{row}, {only}" for row, only in zip(rows, claim.settings, strict=True)]
        against = "" if claim.margin is None else f" (against -{claim.margin:g})"
        cells = [
            f"{claim.sentence} ({claim.source})",
            " − ".join(rows),
            gap_in_words(comparison),
            str(comparison.pairs),
            "–" if comparison.p is None else _probability(comparison.p) + against,
            str(verdict(claim, comparison)),
        ]
        means = comparison.by_setting.items() if len(comparison.by_setting) > 1 else ()
        if pooled:
            cells.append(", ".join(f"{setting} {signed(mean)}" for setting, mean in means))
        lines.append(cells)
    return grid(lines)


def count_claims(every: Sequence[tuple[Recipe, list[Result]]]) -> str:
    """Say how many of all claims held, and how many would by chance; nothing without any."""
    found = [pair for recipe, results in every for pair in compared(recipe, results)]
    if not found:
        return ""
    outcomes = Counter[str](verdict(*pair).outcome for pair in found)
    afterwards = sum(claim.post_hoc for claim, _ in found)
    better = sum(claim.margin is None for claim, _ in found)
    return (
        f"Of the {len(found)} claims on this page, {in_numbers(outcomes)}; {afterwards} were asked "
        "after seeing these runs. p values are not corrected for the number of claims: if nothing "
        f"made a difference, {better / 20:.1f} of the {better} claims that something is better "
        "would be decided by chance."
    )


def in_numbers(outcomes: Counter[str], single: int = 0) -> str:
    """Count the claims that held, did not, and are not decided; `single` of these have one pair."""
    why = f", {single} of them because they have a single pair of runs" if single else ""
    return (
        f"{outcomes['held']} held (✓), {outcomes['failed']} did not (✗), and {outcomes['open']} "
        f"are not decided (?){why}"
    )


def compared(recipe: Recipe, results: list[Result]) -> list[tuple[Claim, Comparison]]:
    """Return the claims about a recipe that the results have a pair for, and what they say."""
    found = ((claim, compare(claim, results)) for claim in CLAIMS.get(recipe.name, ()))
    return [(claim, comparison) for claim, comparison in found if comparison is not None]


def gap_in_words(found: Comparison) -> str:
    """Return the mean difference and its interval, where there is one and the mean says something.

    Example:
        >>> gap_in_words(Comparison(2, {}, 1.0, 0.5, 1.5)), gap_in_words(Comparison(1, {}, 1.0))
        ('+1.00 (+0.50 to +1.50)', '+1.00')
        >>> gap_in_words(Comparison(2, {}, 20.0, -100.0, 140.0))
        'too uncertain to say (-100.00 to +140.00)'
    """
    if found.low is None or found.high is None:
        return signed(found.mean)
    wide = found.high - found.low > UNCERTAIN
    middle = "too uncertain to say" if wide else signed(found.mean)
    return f"{middle} ({signed(found.low)} to {signed(found.high)})"


def _probability(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"{p:.2g}"


def signed(points: float) -> str:
    """Two decimals, or more until one digit is not zero, so that the sign is always visible."""
    return f"{points:+.2f}" if abs(points) >= 0.005 or points == 0 else f"{points:+.1g}"
