"""`espformer bench`: time the attentions on this machine, and check what is timed."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["bench"]


def bench(
    suites: Annotated[
        list[str] | None,
        typer.Argument(help="quick, targets, paper, long or peers; quick if none."),
    ] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu; auto takes a GPU.")] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16 or float32 instead of the suite's.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Lengths instead of the suite's, e.g. 512,1024.")
    ] = None,
    heads: Annotated[
        int | None, typer.Option(min=1, help="Batch × heads instead of the suite's.")
    ] = None,
    width: Annotated[
        int | None, typer.Option(min=1, help="Of a head, instead of the suite's.")
    ] = None,
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
    CUDA graph, without the launches. Rows that do not fit or take too long say so. Where there is
    only torch, `python -m espformer.lab.bench` takes the same options.

    Examples:

      espformer bench

      espformer bench targets paper long

      espformer bench peers --tokens 512,2048 --operators esp,softmax

      espformer bench quick --device cpu --dtype float32 --no-save
    """
    from espformer.lab.bench.session import run
    from espformer.lab.errors import UserError

    try:
        good = run(
            suites or [], device=device, dtype=dtype, tokens=tokens, heads=heads, width=width,
            operators=operators, backends=backends, modes=modes, shrink=shrink,
            row_seconds=row_seconds, output=output if save else None,
        )  # fmt: skip
    except ValueError as error:
        raise UserError(f"bench: {error}") from None
    if not good:
        raise typer.Exit(1)
