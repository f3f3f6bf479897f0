"""Arguments and options that several commands share."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from espformer.lab.errors import ConfigError


class Which(StrEnum):
    """A checkpoint of a run."""

    last = "last"
    best = "best"
    hard = "hard"


RecipeName = Annotated[
    str, typer.Argument(help="Name of a recipe (see `espformer recipes`) or path to a .yaml file.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY.PATH=VALUE]...",
        help="Override keys of the recipe, e.g. trainer.epochs=5 "
        "mechanism.esp.sort_temperature=0.1 trainer.precision=bf16-mixed",
    ),
]
Output = Annotated[Path, typer.Option("--output", "-o", help="Directory that holds all runs.")]
RunPath = Annotated[
    Path, typer.Argument(help="Directory of a run, or one of its checkpoint files.")
]
Checkpoint = Annotated[Which, typer.Option("--checkpoint", help="Checkpoint of the run to use.")]
DataDirectory = Annotated[
    str | None,
    typer.Option("--data-dir", help="Data directory; by default the one used in training."),
]
ShowProgress = Annotated[
    bool | None,
    typer.Option(
        "--progress/--no-progress", help="Show a progress bar; by default on a terminal only."
    ),
]


Jobs = Annotated[
    int,
    typer.Option(
        "--jobs", "-j", min=1, help="Runs at the same time; on a GPU, start NVIDIA's MPS first."
    ),
]
Save = Annotated[
    Path | None,
    typer.Option(help="Also save the results to this directory, for `espformer results`."),
]


def whole_numbers(option: str, text: str) -> list[int]:
    """Return the numbers of an option such as `--seeds 0,1,2`, each of them once.

    Example:
        >>> whole_numbers("--seeds", "0,1,2")
        [0, 1, 2]
    """
    try:
        numbers = [int(part) for part in text.split(",")]
        if min(numbers) >= 0 and len(set(numbers)) == len(numbers):
            return numbers
    except ValueError:
        pass
    raise ConfigError(f"{option}: expected different numbers such as 0,1,2, got '{text}'")
