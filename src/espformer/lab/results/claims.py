"""What the paper says of its mechanism, what we expect of it, and a paired test of each.

Every claim has a bar that the difference of its rows must pass: 0 for "is better", `-margin` for
"does no harm". It held where the 95 % interval of the difference lies above the bar, and did not
where it lies below. The p is two-sided, of a difference at the bar: p < 0.05 says the same.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

__all__ = [
    "CLAIMS",
    "HARMLESS",
    "Claim",
    "Comparison",
    "Verdict",
    "compare",
    "student_two_sided",
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
    """What became of a claim, and that in words."""

    outcome: Literal["held", "failed", "open"]
    words: str


def _beats(others: dict[str, str], by: str = "the paper") -> tuple[Claim, ...]:
    return tuple(
        Claim(
            f"ESP attention is more accurate than {name}",
            ("espformer", "test"), (other, "test"), by,
        )
        for other, name in others.items()
    )  # fmt: skip


_BASELINES = {
    "transformer": "softmax attention",
    "difftransformer": "differential attention",
    "sinkformer": "Sinkhorn attention",
}
_VARIANTS = (
    Claim(
        "a softer sort than the paper's learns better",
        ("espformer-soft", "test"),
        ("espformer", "test"),
    ),
    Claim(
        "learning t, from the paper's on, does better than keeping it",
        ("espformer-learnt", "test"),
        ("espformer", "test"),
    ),
    Claim(
        "balance, doubly stochastic while soft, does no harm",
        ("espformer-balanced", "test"),
        ("espformer", "test"),
        margin=HARMLESS,
    ),
    Claim(
        "the absolute metric loses nothing against a squared one as wide",
        ("espformer-absolute", "test"),
        ("espformer-soft", "test"),
        margin=HARMLESS,
    ),
)
_AFTERWARDS = (
    Claim(
        "ESP attention that learns t is more accurate than Sinkhorn attention",
        ("espformer-learnt", "test"),
        ("sinkformer", "test"),
        post_hoc=True,
    ),
    Claim(
        "the difference of two ESP attentions is more accurate than Sinkhorn attention",
        ("diff-espformer", "test"),
        ("sinkformer", "test"),
        post_hoc=True,
    ),
)


def _hardening() -> tuple[Claim, ...]:
    ways = {
        "anneal": "annealing, the paper's way,",
        "straight-through": "training straight through a hard sort",
        "mix": "moving from the soft to the hard sort",
    }
    losses = tuple(
        Claim(
            f"hardening loses accuracy after {name.rstrip(',')}", (label, "test"), (label, "hard")
        )
        for label, name in (("only-harden", "soft training"), ("anneal", "annealing"))
    )
    better = tuple(
        Claim(
            f"{name} is better when hard than hardening alone",
            (label, "hard"),
            ("only-harden", "hard"),
        )
        for label, name in ways.items()
    )
    improves = Claim(
        "annealing improves accuracy, as the paper finds on Cats and Dogs",
        ("anneal", "test"),
        ("anneal", "start"),
        post_hoc=True,
    )
    return (*losses, *better, improves)


CLAIMS: dict[str, tuple[Claim, ...]] = {
    **{
        name: _beats(_BASELINES)
        for name in ("cats-dogs", "imdb", "modelnet40-set", "modelnet40-pct")
    },
    "mnist-patch-size": _beats(_BASELINES) + _VARIANTS + _AFTERWARDS,
    "tweeteval": _beats(_BASELINES) + _VARIANTS,
    "cats-dogs-anneal": (
        Claim(
            "annealing improves accuracy",
            ("espformer", "test"), ("espformer", "start"), "the paper",
        ),
        Claim(
            "hard sorting improves it further",
            ("espformer", "hard"), ("espformer", "test"), "the paper",
        ),
    ),
    "iwslt14-plug-and-play": tuple(
        Claim(
            f"{label} is better than {other} after fine-tuning",
            (label, "test"), (other, "test"), "the paper",
        )
        for label, other in (("espformer", "transformer"), ("diff-espformer", "difftransformer"))
    ),
    "digits": (
        *_beats({"transformer": "softmax attention"}, "ours"),
        Claim(
            "a softer sort than the paper's learns better",
            ("espformer", "test"),
            ("espformer-paper", "test"),
        ),
        Claim(
            "learning t, from the paper's on, does better than keeping it",
            ("espformer-learnt", "test"),
            ("espformer-paper", "test"),
        ),
        Claim(
            "balance, doubly stochastic while soft, does no harm",
            ("espformer-balanced", "test"),
            ("espformer", "test"),
            margin=HARMLESS,
        ),
    ),
    "mnist-hypotheses": (
        *(
            Claim(
                f"a softer sort than the paper's learns better: t = {t}",
                (f"squared-{t}", "test"),
                ("squared-0.001", "test"),
            )
            for t in ("0.01", "0.1", "1")
        ),
        Claim(
            "the absolute metric loses nothing against the squared one",
            ("absolute-0.3", "test"),
            ("squared-0.1", "test"),
            margin=HARMLESS,
        ),
        *(
            Claim(
                f"balance does no harm at t = {t}",
                (f"balanced-{t}", "test"),
                (f"squared-{t}", "test"),
                margin=HARMLESS,
            )
            for t in ("0.001", "0.1")
        ),
        *(
            Claim(
                f"a learnable t finds the right softness from t = {t}",
                (f"learnt-from-{t}", "test"),
                ("squared-0.1", "test"),
                margin=HARMLESS,
            )
            for t in ("0.001", "0.1", "10")
        ),
    ),
    "mnist-hardening": _hardening(),
}  # fmt: skip


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
    error = statistics.stdev(differences.values()) / math.sqrt(len(pairs))
    half = error * _student_quantile(0.95, len(pairs) - 1)
    above = mean + (claim.margin or 0.0)
    if error == 0:
        p = 1.0 if above == 0 else 0.0
    else:
        p = student_two_sided(above / error, len(pairs) - 1)
    return Comparison(len(pairs), by_setting, mean, mean - half, mean + half, p)


def verdict(claim: Claim, found: Comparison) -> Verdict:
    """Whether the claim held, by where the interval lies."""
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


def student_two_sided(t: float, freedom: int) -> float:
    """P(|T| >= |t|) of Student's distribution with a whole number of degrees of freedom.

    With θ = atan(|t| / √ν), P(|T| < |t|) is a finite sum of powers of cos θ (Abramowitz and Stegun
    26.7.3 and 26.7.4).

    Example:
        >>> round(student_two_sided(4.303, 2), 4)
        0.05
    """
    angle = math.atan(abs(t) / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    first = 1 if freedom % 2 == 0 else 2
    term, total = (1.0, 0.0) if freedom % 2 == 0 else (cosine, 0.0)
    for k in range(first, freedom, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    inside = sine * total if freedom % 2 == 0 else 2 / math.pi * (angle + sine * total)
    return min(1.0, max(0.0, 1 - inside))


def _student_quantile(inside: float, freedom: int) -> float:
    """The t with P(|T| < t) = `inside`, by bisection."""
    low, high = 0.0, 1.0
    while 1 - student_two_sided(high, freedom) < inside:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if 1 - student_two_sided(middle, freedom) < inside:
            low = middle
        else:
            high = middle
    return high
