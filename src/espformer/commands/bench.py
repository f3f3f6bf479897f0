"""`espformer bench`: time the attentions on this machine, and check what is timed."""

import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["bench"]


def bench(
    suites: Annotated[
        list[str] | None, typer.Argument(help="quick, musts, paper, long or peers; quick if none.")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu; auto takes a GPU.")] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16 or float32 instead of the suite's.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Lengths instead of the suite's, e.g. 512,1024.")
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Batch × heads instead of the suite's.")] = None,
    width: Annotated[int | None, typer.Option(help="Of a head, instead of the suite's.")] = None,
    operators: Annotated[str | None, typer.Option(help="Keep these, e.g. esp,sinkhorn-3.")] = None,
    backends: Annotated[str | None, typer.Option(help="Keep these, e.g. triton,flash.")] = None,
    modes: Annotated[
        str | None, typer.Option(help="Keep these: forward, forward+backward.")
    ] = None,
    shrink: Annotated[
        int, typer.Option(min=1, help="Divide tokens and heads by this, to try a suite out.")
    ] = 1,
    row_seconds: Annotated[float, typer.Option(help="Time for the calls of one row.")] = 3.0,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Directory of CSV, markdown and plot.")
    ] = Path("benchmarks/results"),
    save: Annotated[bool, typer.Option("--save/--no-save", help="Write the files.")] = True,
) -> None:
    """Time attentions on this machine; a row whose result is wrong has no time.

    Every row is first compared with float64, output and gradients. Times are medians; on a GPU
    `milliseconds` is a call as a program makes it, `graph_milliseconds` the same replayed as a
    CUDA graph, without the launches. Rows that do not fit or take too long say so.

    Examples:

      espformer bench

      espformer bench musts paper long

      espformer bench peers --tokens 512,2048 --operators esp,softmax --modes forward

      espformer bench quick --device cpu --dtype float32 --no-save
    """
    from rich.console import Console

    from espformer.bench import display
    from espformer.bench.conditions import machine
    from espformer.bench.report import file_stem, is_failure, write
    from espformer.bench.runner import run_cases
    from espformer.bench.suites import SUITES, pick_device, select
    from espformer.training.errors import UserError

    try:
        where = pick_device(device)
        chosen = {
            suite: select(
                suite, dtype=dtype, tokens=tokens, heads=heads, width=width, operators=operators,
                backends=backends, modes=modes, shrink=shrink,
            )
            for suite in suites or ["quick"]
        }  # fmt: skip
    except ValueError as error:
        raise UserError(f"bench: {error}") from None

    console, failed = Console(), False
    for suite, cases in chosen.items():
        with display.progress(suite, len(cases)) as show:
            rows = run_cases(cases, where, row_seconds=row_seconds, report=show)
        stated = machine(["espformer", *sys.argv[1:]], where) | display.told(cases, row_seconds)
        display.print_tables(console, rows, stated)
        if save:
            stem = output / file_stem(suite, where)
            title = (SUITES[suite].__doc__ or suite).splitlines()[0].rstrip(".")
            for path in write(stem, title, rows, stated) + display.plot(stem, rows, stated):
                print(f"written: {path}")
        failed |= is_failure(rows)
    if failed:
        raise typer.Exit(1)
