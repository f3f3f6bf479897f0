"""`espformer bench`: time the attentions on this machine, and check their results."""

from pathlib import Path
from typing import Annotated

import typer


def bench(
    suites: Annotated[
        list[str] | None,
        typer.Argument(
            help="quick, defaults, targets, paper, long or peers (see above); quick by default."
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cuda or cpu; auto uses a GPU if there is one.")
    ] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16 or float32 instead of the suite's.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Lengths instead of the suite's, e.g. 512,1024.")
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option(min=1, help="Number of heads times batch size, instead of the suite's."),
    ] = None,
    width: Annotated[
        int | None, typer.Option(min=1, help="Head width instead of the suite's.")
    ] = None,
    operators: Annotated[
        str | None, typer.Option(help="Only these attentions, e.g. esp,sinkhorn-3.")
    ] = None,
    backends: Annotated[
        str | None, typer.Option(help="Only these implementations, e.g. triton,flash.")
    ] = None,
    modes: Annotated[
        str | None, typer.Option(help="Only these: forward, forward+backward.")
    ] = None,
    shrink: Annotated[
        int, typer.Option(min=1, help="Divide tokens and heads by this, for a quick trial.")
    ] = 1,
    row_seconds: Annotated[float, typer.Option(help="Seconds for each row.")] = 3.0,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Directory for CSV, markdown and plot.")
    ] = Path("benchmarks/results"),
    save: Annotated[bool, typer.Option("--save/--no-save", help="Write the files.")] = True,
) -> None:
    """Time attentions on this machine; rows with wrong results get no time.

    Suites: quick has a few rows at 256 tokens; defaults compares ESP as it comes with softmax and
    Sinkhorn, 256 to 16,384 tokens; targets has the sizes at which the GPU kernels have targets for
    their speed; paper has the paper's runtime figures, 50 to 1,000 tokens; long goes from 4,096 to
    a million tokens; peers compares all attentions at 1,024 tokens.

    The output and the gradients of every row are first compared with float64. Times are medians.
    On a GPU, `milliseconds` is the time of a normal call, and `graph_milliseconds` that of a
    replayed CUDA graph, without launch overhead. Rows that run out of memory or time say so. If
    only torch is installed, `python -m espformer.lab.bench` takes the same options.

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
