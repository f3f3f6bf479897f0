"""The numbers that the paper prints, to stand beside ours.

Shahbazi et al., ESPFormer: Doubly-Stochastic Attention with Expected Sliced Transport Plans,
ICML 2025. Keys are (setting, label of the mechanism, score) of the recipes. Scores are percent, or
BLEU; `start`, `test` and `hard` are those before training, after it, and with exact sorting.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = ["TABLES", "Number", "Table"]


@dataclass(frozen=True)
class Number:
    """What the paper prints about one cell: some of these."""

    mean: float | None = None
    std: float | None = None
    best: float | None = None
    median: float | None = None
    worst: float | None = None


Key = tuple[str, str, str]


@dataclass(frozen=True)
class Table:
    """A table or figure: how its numbers are summed up over runs, and the numbers."""

    caption: str
    style: Literal["mean_std", "spread", "median", "figure"]
    numbers: dict[Key, Number]


def _mean_std(mean: float, std: float) -> Number:
    return Number(mean=mean, std=std)


def _spread(best: float, median: float, mean: float, worst: float) -> Number:
    return Number(best=best, median=median, mean=mean, worst=worst)


def _spreads(setting: str, rows: dict[str, tuple[float, float, float, float]]) -> dict[Key, Number]:
    return {(setting, label, "test"): _spread(*values) for label, values in rows.items()}


_CATS_DOGS = {
    "1%": ((55.07, 3.34), (53.78, 0.28), (49.71, 0.31), (55.66, 3.95)),
    "10%": ((69.56, 0.32), (67.34, 0.11), (57.25, 0.22), (71.49, 0.43)),
    "25%": ((74.56, 0.58), (74.86, 0.17), (72.25, 0.16), (75.40, 0.38)),
    "100%": ((79.12, 0.17), (78.85, 0.11), (78.49, 0.09), (79.47, 0.12)),
}
_ANNEALED = {
    "1%": ((55.66, 3.95), (57.86, 3.77), (58.52, 3.73)),
    "10%": ((71.49, 0.43), (72.22, 0.37), (72.71, 0.36)),
    "25%": ((75.40, 0.38), (75.92, 0.31), (75.92, 0.28)),
    "100%": ((79.47, 0.12), (80.61, 0.11), (81.23, 0.11)),
}
_SLICES = (1, 8, 32, 64, 128)
_SLICERS = {
    "tau=0.1": {
        "learnable": ((74.30, 0.48), (78.70, 0.32), (79.10, 0.22), (78.40, 0.26), (76.20, 0.42)),
        "frozen": ((66.50, 0.52), (72.80, 0.38), (78.30, 0.18), (79.20, 0.30), (79.60, 0.28)),
        "axis": (79.47, 0.12),
    },
    "tau=1": {
        "learnable": ((74.30, 0.48), (79.07, 0.30), (78.20, 0.35), (77.80, 0.21), (74.10, 0.46)),
        "frozen": ((66.50, 0.52), (73.11, 0.43), (77.95, 0.25), (78.80, 0.29), (78.40, 0.27)),
        "axis": (78.85, 0.31),
    },
    "tau=10": {
        "learnable": ((74.30, 0.48), (79.15, 0.29), (78.06, 0.27), (77.10, 0.23), (74.15, 0.44)),
        "frozen": ((66.50, 0.52), (73.45, 0.41), (76.85, 0.24), (77.85, 0.30), (78.10, 0.26)),
        "axis": (77.75, 0.32),
    },
}


def _cats_dogs() -> dict[Key, Number]:
    labels = ("sinkformer", "difftransformer", "transformer", "espformer")
    return {
        (fraction, label, "test"): _mean_std(*values)
        for fraction, row in _CATS_DOGS.items()
        for label, values in zip(labels, row, strict=True)
    }


def _annealed() -> dict[Key, Number]:
    return {
        (fraction, "espformer", score): _mean_std(*values)
        for fraction, row in _ANNEALED.items()
        for score, values in zip(("start", "test", "hard"), row, strict=True)
    }


def _slicers() -> dict[Key, Number]:
    numbers: dict[Key, Number] = {}
    for setting, rows in _SLICERS.items():
        for kind in ("learnable", "frozen"):
            for count, values in zip(_SLICES, rows[kind], strict=True):
                numbers[setting, f"{kind}-{count}", "test"] = _mean_std(*values)  # type: ignore[misc]
        numbers[setting, "axis-64", "test"] = _mean_std(*rows["axis"])  # type: ignore[arg-type]
    return numbers


TABLES: dict[str, Table] = {
    "cats-dogs": Table(
        "Cats and Dogs, accuracy (%) by share of the training data, mean ± std of 3 runs (Table 1)",
        "mean_std",
        _cats_dogs(),
    ),
    "cats-dogs-anneal": Table(
        "Cats and Dogs, accuracy (%) before annealing, after it, and hard; mean ± std of 3 runs "
        "(Table 1, right)",
        "mean_std",
        _annealed(),
    ),
    "cats-dogs-slicers": Table(
        "Cats and Dogs, accuracy (%) by slicer, number of slices and τ; mean ± std of 3 runs",
        "mean_std",
        _slicers(),
    ),
    "modelnet40-set": Table(
        "ModelNet40 with Set Transformers, test accuracy (%) of 4 runs",
        "spread",
        _spreads(
            "default",
            {
                "transformer": (87.8, 86.3, 85.8, 84.7),
                "difftransformer": (89.0, 88.7, 88.7, 88.6),
                "sinkformer": (89.1, 88.4, 88.3, 88.1),
                "espformer": (89.6, 89.5, 89.4, 89.1),
            },
        ),
    ),
    "modelnet40-pct": Table(
        "ModelNet40 with Point Cloud Transformers, test accuracy (%) of 4 runs",
        "spread",
        _spreads(
            "default",
            {
                "transformer": (93.2, 92.5, 92.5, 92.3),
                "difftransformer": (93.1, 92.8, 92.7, 92.6),
                "sinkformer": (93.1, 92.8, 92.7, 92.5),
                "espformer": (93.2, 92.9, 92.7, 92.6),
            },
        ),
    ),
    "imdb": Table(
        "IMDb, test accuracy (%)",
        "spread",
        _spreads(
            "default",
            {
                "transformer": (85.30, 85.25, 85.25, 85.20),
                "difftransformer": (85.50, 85.45, 85.45, 85.40),
                "sinkformer": (85.40, 85.39, 85.37, 85.30),
                "espformer": (85.50, 85.50, 85.47, 85.40),
            },
        ),
    ),
    "tweeteval": Table(
        "TweetEval sentiment, positive or negative, test accuracy (%)",
        "spread",
        _spreads(
            "default",
            {
                "transformer": (71.50, 71.35, 71.31, 71.10),
                "difftransformer": (72.60, 72.35, 72.31, 72.00),
                "sinkformer": (72.40, 72.30, 72.23, 71.90),
                "espformer": (72.60, 72.40, 72.36, 72.10),
            },
        ),
    ),
    "iwslt14": Table(
        "IWSLT'14 German to English after 25 epochs, BLEU, median of 4 runs",
        "median",
        {
            ("default", "transformer", "test"): Number(median=33.40),
            ("default", "difftransformer", "test"): Number(median=33.85),
        },
    ),
    "iwslt14-plug-and-play": Table(
        "IWSLT'14 German to English, BLEU with the mechanism plugged in (start) and after 10 more "
        "epochs (test), median of 4 runs",
        "median",
        {
            ("default", label, score): Number(median=value)
            for label, values in {
                "transformer": (33.40, 34.61),
                "sinkformer": (33.36, 34.61),
                "espformer": (33.38, 34.64),
                "difftransformer": (33.85, 34.78),
                "diff-sinkformer": (33.67, 34.81),
                "diff-espformer": (33.72, 34.83),
            }.items()
            for score, value in zip(("start", "test"), values, strict=True)
        },
    ),
    "mnist-patch-size": Table(
        "MNIST, test accuracy by patch size, mean of 3 runs (Figure in appendix A.2: no numbers "
        "are printed)",
        "figure",
        {},
    ),
    "runtime": Table(
        "Time of an attention layer by number of tokens, mean of 10 runs (Figures 3 and 4: no "
        "numbers are printed)",
        "figure",
        {},
    ),
}
