"""A run in one row: scores soft, sharp and hard, errors of the sums, size and speed."""

from __future__ import annotations

from typing import NamedTuple

from espformer.lab.names import NAMES
from espformer.lab.plots import clouds
from espformer.lab.plots.clouds import sum_errors
from espformer.lab.report.inspection import Trained

COLUMNS = (
    "attention", "soft", "sharp", "hard", "rows off", "columns off", "parameters", "ms/step",
)  # fmt: skip
NOTE = (
    "Accuracy in percent on the test data: soft after training, sharp after further epochs in "
    "which t falls (the others get none), hard with exact sorting. Off: the largest distance of a "
    "sum from one, soft → hard, on sixteen test examples. Differential attention is a difference "
    "of two, which does not sum to one."
)
"""The meaning of the columns."""

# Examples whose attention is looked at for the errors of its sums.
LOOKED_AT = 16


class Summary(NamedTuple):
    """A row of the table; None where a run has no such number."""

    name: str
    soft: float
    sharp: float | None
    hard: float | None
    rows: float
    columns: float
    hard_rows: float | None
    hard_columns: float | None
    parameters: int
    milliseconds: float | None


def heading_of(label: str) -> str:
    """Return the name of a row, as it stands at the head of a table or a picture.

    Example:
        >>> heading_of("transformer"), heading_of("mine")
        ('Softmax', 'mine')
    """
    name = NAMES.get(label)
    return label if name is None else f"{name[0].upper()}{name[1:]}"


def summarise(trained: Trained) -> Summary:
    """Scores of the run and of the annealing after it, and its sums on a few test examples."""
    results, last = trained.results, trained.annealed or trained
    hard = last.results["scores"].get("hard")
    sharp = None if trained.annealed is None else last.results["scores"]["test"]
    rows, columns = _errors(trained)
    hard_rows, hard_columns = (None, None) if hard is None else _errors(last.hardened())
    rate = results.get("samples_per_second")
    return Summary(
        heading_of(trained.label), results["scores"]["test"], sharp, hard,
        rows, columns, hard_rows, hard_columns, results["parameters"],
        None if not rate else 1000 * trained.run.data.batch_size / rate,
    )  # fmt: skip


def _errors(trained: Trained) -> tuple[float, float]:
    test = trained.task.test
    count = min(LOOKED_AT, len(test))  # type: ignore[arg-type]
    found = [
        sum_errors(matrix)
        for index in range(count)
        for matrix in trained.matrices(trained.example(index))
    ]
    return max(rows for rows, _ in found), max(columns for _, columns in found)


def cells(row: Summary) -> list[str]:
    """Return the row as text."""
    return [
        row.name,
        f"{row.soft:.1f}",
        "–" if row.sharp is None else f"{row.sharp:.1f}",
        "–" if row.hard is None else f"{row.hard:.1f}",
        _both(row.rows, row.hard_rows),
        _both(row.columns, row.hard_columns),
        f"{row.parameters:,}",
        "–" if row.milliseconds is None else f"{row.milliseconds:.1f}",
    ]


def _both(soft: float, hard: float | None) -> str:
    return short(soft) if hard is None else f"{short(soft)} → {short(hard)}"


def short(error: float) -> str:
    """Return an error of float32 sums in as few characters as tell it, and 0 for rounding.

    Example:
        >>> short(1.31), short(0.042), short(2.4e-5), short(1e-7)
        ('1.3', '0.042', '2e-05', '0')
    """
    return clouds.short(error, rounding=2e-6)
