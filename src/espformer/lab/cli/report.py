"""`espformer report`: a page about trained runs."""

from pathlib import Path
from typing import Annotated

import typer

from espformer.lab.cli.options import DataDirectory, whole_numbers
from espformer.ops.common.optional import how_to_install


def report(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs on the same data.")],
    to: Annotated[Path, typer.Option("--to", help="The page to write.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    examples: Annotated[
        str | None,
        typer.Option(help="Indices of the test examples to show; by default the first six."),
    ] = None,
    data_dir: DataDirectory = None,
) -> None:
    """Write one HTML page about trained runs: curves, attention maps, softness, slices, plans.

    The page is self-contained and needs no network. Runs that were annealed (`espformer anneal`)
    are shown soft, annealed and hard.

    Examples:

      espformer report runs/digits/default/espformer-default/seed-0

      espformer report runs/digits/default/*/seed-0 --examples 7,8
    """
    import shlex
    import sys

    from espformer.lab.errors import UserError

    try:
        from espformer.lab.report import write_page
        from espformer.lab.report.inspection import open_run
    except ModuleNotFoundError as error:
        raise UserError(f"the page needs {how_to_install(error.name, 'train,plots')}") from None
    places = None if examples is None else whole_numbers("--examples", examples)
    opened = [open_run(path, data_dir) for path in runs]
    command = shlex.join(["espformer", *sys.argv[1:]])
    print(write_page(opened, to, command=command, title=title, examples=places))
