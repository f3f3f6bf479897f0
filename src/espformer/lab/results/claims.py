"""Claims of the paper and of ours about its mechanism, and a paired test of each.

Every claim has a bar that the difference of its rows must pass: 0 for "is better", `-margin` for
"does no harm". It held where the 95 % interval of the difference lies above the bar, and did not
where it lies below. The p is two-sided, of a difference at the bar: p < 0.05 says the same.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from espformer.lab.recipes.yaml_schema import read_yaml

__all__ = [
    "CLAIMS",
    "HARMLESS",
    "Claim",
    "Comparison",
    "Verdict",
    "compare",
    "verdict",
]

# A loss of accuracy, or of BLEU, that nobody would notice.
HARMLESS = 0.5


@dataclass(frozen=True)
class Claim:
    """One row does better than another, or, with a `margin`, at most that much worse.

    Rows are (label of a mechanism, score); a pair has the same setting and the same seed. A claim
    that the results themselves suggested is `post_hoc`: they cannot confirm it.
    """

    says: str
    row: tuple[str, str]
    other: tuple[str, str]
    by: str = "ours"
    margin: float | None = None
    post_hoc: bool = False

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


class Verdict(NamedTuple):
    """The outcome of a claim, and the same in words."""

    outcome: Literal["held", "failed", "open"]
    words: str


def _read() -> dict[str, tuple[Claim, ...]]:
    raw, _ = read_yaml(Path(__file__).with_suffix(".yaml"))
    return {name: tuple(_claims(entries)) for name, entries in raw.items()}


def _claims(entries: list[Any]) -> Iterator[Claim]:
    for entry in entries:
        if isinstance(entry, list):  # claims that several recipes share
            yield from _claims(entry)
        else:
            row, other = (
                (label, score or "test") for label, _, score in map(_split, entry["rows"])
            )
            rest = {key: value for key, value in entry.items() if key != "rows"}
            yield Claim(row=row, other=other, **rest)


def _split(row: str) -> tuple[str, str, str]:
    return row.partition(" ")


CLAIMS: dict[str, tuple[Claim, ...]] = _read()


def compare(claim: Claim, results: Sequence[dict[str, Any]]) -> Comparison | None:
    """Differences between the rows of a claim over their pairs; None without a pair."""
    values = [
        {
            (result["setting"], result["seed"]): result["scores"][score]
            for result in results
            if result["mechanism"] == label and score in result["scores"]
        }
        for label, score in (claim.row, claim.other)
    ]
    pairs = sorted(values[0].keys() & values[1].keys())
    if not pairs:
        return None
    differences = {pair: values[0][pair] - values[1][pair] for pair in pairs}
    by_setting = {
        name: statistics.fmean(d for (setting, _), d in differences.items() if setting == name)
        for name in dict.fromkeys(result["setting"] for result in results)
        if any(setting == name for setting, _ in pairs)
    }
    mean = statistics.fmean(differences.values())
    if len(pairs) < 2:
        return Comparison(len(pairs), by_setting, mean)
    bar = -(claim.margin or 0.0)
    if len(set(differences.values())) == 1:  # no deviation, and no t
        return Comparison(len(pairs), by_setting, mean, mean, mean, float(mean == bar))
    from scipy import stats  # takes a second to import

    tested = stats.ttest_1samp(list(differences.values()), popmean=bar)
    low, high = map(float, tested.confidence_interval(0.95))
    return Comparison(len(pairs), by_setting, mean, low, high, float(tested.pvalue))


def verdict(claim: Claim, found: Comparison) -> Verdict:
    """Say whether the claim held, by where the interval lies."""
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
