"""What the paper says of its mechanism, what we expect of it, and a paired test of each."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["CLAIMS", "Claim", "Comparison", "compare", "student_two_sided", "verdict"]

# A loss of accuracy, or of BLEU, that nobody would notice.
HARMLESS = 0.5


@dataclass(frozen=True)
class Claim:
    """One row does better than another, or, with a `margin`, at most that much worse.

    Rows are (label of a mechanism, score); a pair has the same setting and the same seed.
    """

    says: str
    row: tuple[str, str]
    other: tuple[str, str]
    by: str = "ours"
    margin: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Differences over pairs: their mean, its 95 % interval, and a paired t-test."""

    pairs: int
    settings: int
    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None


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
    return losses + tuple(
        Claim(
            f"{name} is better when hard than hardening alone",
            (label, "hard"),
            ("only-harden", "hard"),
        )
        for label, name in ways.items()
    )


CLAIMS: dict[str, tuple[Claim, ...]] = {
    **{
        name: _beats(_BASELINES)
        for name in ("cats-dogs", "imdb", "modelnet40-set", "modelnet40-pct")
    },
    "mnist-patch-size": _beats(_BASELINES) + _VARIANTS,
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
    differences = [values[0][pair] - values[1][pair] for pair in pairs]
    return _summary(differences, len({setting for setting, _ in pairs}), claim.margin or 0.0)


def _summary(differences: list[float], settings: int, margin: float) -> Comparison:
    count, mean = len(differences), statistics.fmean(differences)
    if count < 2:
        return Comparison(count, settings, mean)
    error = statistics.stdev(differences) / math.sqrt(count)
    half = error * _student_quantile(0.95, count - 1)
    if error == 0:
        p = 1.0 if mean == 0 and not margin else 0.0
    elif margin:
        # One-sided: how likely is this, or better, if the true loss were the margin?
        t = (mean + margin) / error
        p = student_two_sided(t, count - 1) / 2
        p = p if t > 0 else 1 - p
    else:
        p = student_two_sided(mean / error, count - 1)
    return Comparison(count, settings, mean, mean - half, mean + half, p)


def verdict(claim: Claim, found: Comparison) -> str:
    """Whether the claim held, in a few words."""
    if found.low is None or found.high is None or found.p is None:
        return "a single pair decides nothing"
    if claim.margin is not None:
        if found.low > -claim.margin:
            return "held"
        if found.high < -claim.margin:
            return "did not hold"
        return "not decided"
    if found.p < 0.05:
        return "held" if found.mean > 0 else "did not hold, the opposite is true here"
    if found.p < 0.2:
        return f"not decided, leaning {'that' if found.mean > 0 else 'the other'} way"
    return "no difference seen"


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
