"""The command line: `espformer train`, `reproduce`, `evaluate`, `anneal`, `harden`, and more.

Each command is a function in a module of this package; its docstring is its help.
"""

import inspect
import re
import sys
from typing import Annotated

from espformer.ops.common.optional import how_to_install

try:
    import typer
    from rich.console import Console as _Console  # noqa: F401  (every command prints with it)
except ModuleNotFoundError as missing:
    raise SystemExit(f"the command line needs {how_to_install(missing.name, 'train')}") from None

from espformer.lab.cli import bench, export, finetune, plot, report, reproduce, results, train
from espformer.lab.errors import UserError
from espformer.lab.machine import remember_command

__all__ = ["app", "main"]

app = typer.Typer(
    name="espformer",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Doubly-stochastic attention through Expected Sliced Transport Plans: train, anneal and "
    "harden models, and reproduce the experiments of the paper.",
    epilog="Start with: [bold]espformer train digits[/]  (a minute on a laptop, no download). "
    "Then [bold]espformer harden runs/digits/default/espformer-default/seed-0[/].",
)


def _version(asked: bool) -> None:
    """Print the versions to include in a bug report."""
    if asked:
        import platform

        import torch

        from espformer import __version__
        from espformer.lab.machine import revision

        commit = revision()
        print(
            f"espformer {__version__}" + (f" at {commit}" if commit else "")
            + f", torch {torch.__version__}, Python {platform.python_version()}"
        )  # fmt: skip
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the versions."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options of every command; `main` accepts --debug at any position."""


def flowing(text: str) -> str:
    """Turn a docstring into help: each paragraph becomes one line, wrapped by the terminal.

    Example:
        >>> flowing("Draw it.\\n\\n    From a\\n    file.\\n\\n      like this")
        'Draw it.\\n\\nFrom a file.\\n\\n  like this'
    """
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(re.sub(r"\n(?! )", " ", paragraph) for paragraph in paragraphs)


for _command in (
    train.train, train.evaluate, train.anneal, train.harden, reproduce.reproduce, reproduce.recipes,
    finetune.finetune, export.export, bench.bench, plot.plot, report.report, results.results,
):  # fmt: skip
    app.command(help=flowing(_command.__doc__ or ""))(_command)


def main() -> None:
    """Run the command line; errors are printed as a message, with --debug also as a traceback."""
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    remember_command(sys.argv[1:])
    try:
        app()
    except Exception as error:
        if debug:
            raise
        if isinstance(error, UserError):
            print(f"error: {error}", file=sys.stderr)
        else:
            print(f"unexpected error: {type(error).__name__}: {error}", file=sys.stderr)
            print("(this should not happen; --debug shows where it did)", file=sys.stderr)
        raise SystemExit(1) from None
