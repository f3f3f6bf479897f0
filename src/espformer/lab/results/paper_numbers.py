"""The numbers of the paper, and our differences from it: `paper_numbers.yaml` and
`paper_differences.yaml`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from espformer.lab.recipes.yaml_schema import read_yaml


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
    out_of_reach: dict[str, str] = field(default_factory=dict)
    """Settings that cannot be run here, and why."""
    instead: str | None = None
    """A recipe that tests claims about this table on other data."""


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
            table.get("out_of_reach", {}),
            table.get("instead"),
        )
        for name, table in raw.items()
    }


TABLES: dict[str, Table] = _read()


@dataclass(frozen=True)
class Differences:
    """A difference of a recipe from the paper."""

    values: dict[str, Any] = field(default_factory=dict)
    """Key path of a run, and its value in the paper."""
    words: list[str] = field(default_factory=list)


DIFFERENCES: dict[str, Differences] = {
    name: Differences(**entry)
    for name, entry in read_yaml(Path(__file__).with_name("paper_differences.yaml"))[0].items()
}
