"""The numbers that the paper prints, read from `paper_numbers.yaml`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from espformer.lab.recipes.yaml_schema import read_yaml

__all__ = ["TABLES", "Number", "Table"]


@dataclass(frozen=True)
class Number:
    """The numbers of one cell; the paper prints some of them."""

    mean: float | None = None
    std: float | None = None
    best: float | None = None
    median: float | None = None
    worst: float | None = None


Key = tuple[str, str, str]
Style = Literal["mean_std", "spread", "median", "figure"]


@dataclass(frozen=True)
class Table:
    """A table or figure: how its numbers are summed up over runs, and the numbers.

    Numbers are by (setting, label of the mechanism, score).
    """

    caption: str
    style: Style
    numbers: dict[Key, Number]


_CELLS: dict[Style, tuple[str, ...]] = {
    "mean_std": ("mean", "std"),
    "spread": ("best", "median", "mean", "worst"),
    "median": ("median",),
}


def _read() -> dict[str, Table]:
    raw, _ = read_yaml(Path(__file__).with_suffix(".yaml"))
    return {
        name: Table(
            table["caption"],
            table["style"],
            {
                (setting, label, score): Number(
                    **dict(zip(_CELLS[table["style"]], map(float, cell), strict=True))
                )
                for setting, rows in table.get("numbers", {}).items()
                for label, scores in rows.items()
                for score, cell in scores.items()
            },
        )
        for name, table in raw.items()
    }


TABLES: dict[str, Table] = _read()
