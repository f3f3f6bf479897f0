"""`espformer results`: write RESULTS.md from the files in results/."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer


def results(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Results files to merge into the directory first."),
    ] = None,
    directory: Annotated[
        Path, typer.Option("--directory", "-d", help="Directory of the results files.")
    ] = Path("results"),
    to: Annotated[Path, typer.Option("--to", help="The page to write.")] = Path("RESULTS.md"),
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail if the page is not up to date.")
    ] = False,
) -> None:
    """Write RESULTS.md from results/*.json: our numbers, the paper's, and verdicts on its claims.

    If matplotlib is installed, the figures of these results are redrawn next to their files.

    Examples:

      espformer reproduce digits --save results && espformer results

      espformer results runs/mnist-patch-size/results.json

      espformer results --check
    """
    from espformer.lab.errors import RunError
    from espformer.lab.files import refuse_directory, write_atomically
    from espformer.lab.results.page import results_page
    from espformer.lab.results.result_files import merge_files

    if files and not check:
        for path in merge_files(files, directory):
            print(path)
    if not check and find_spec("matplotlib"):
        from espformer.lab.results.figures import draw_beside

        for path in draw_beside(directory):
            print(path)
    refuse_directory(to, "RESULTS.md")
    text = results_page(directory, to)
    if not check:
        write_atomically(to, text)
        print(to)
        return
    if not to.is_file() or to.read_text(encoding="utf-8") != text:
        raise RunError(f"{to}: not what {directory} gives; write it again with espformer results")
    print(f"{to} is up to date")
