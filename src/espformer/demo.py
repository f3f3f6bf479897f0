"""A tour in pictures: ``python -m espformer.demo``."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from espformer.functional import (
    esp_attention,
    esp_plan,
    sinkhorn_attention,
    sinkhorn_plan,
    softmax_attention,
    softmax_plan,
)

DESCRIPTION = """\
A tour of espformer in four pictures, in under two minutes on a laptop:

  plans      who attends to whom, for softmax, Sinkhorn and ESP attention
  sums       what every token gives and receives under each of them
  softness   ESP attention matrices as the sort temperature falls to a hard sort
  cost       time per token against the number of tokens, dense against linear time

Each is written as PNG and as SVG. Numbers printed on the way are measured here and now."""

EPILOG = """\
examples:
  python -m espformer.demo                     all pictures, into demo-output/
  python -m espformer.demo --quick             small sizes, a few seconds
  python -m espformer.demo --output pictures   somewhere else"""

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Plan = Callable[[Tensor, Tensor], Tensor]


class Mechanism(NamedTuple):
    """A name, the attention and its matrix."""

    name: str
    attention: Attention
    plan: Plan


class Row(NamedTuple):
    """What the table says of a mechanism."""

    name: str
    row_error: float
    column_error: float
    milliseconds: float


def _mechanism(name: str, attention: Any, plan: Any, **options: Any) -> Mechanism:
    return Mechanism(name, partial(attention, **options), partial(plan, **options))


MECHANISMS = (
    _mechanism("Softmax", softmax_attention, softmax_plan),
    _mechanism("Sinkhorn, 3 steps", sinkhorn_attention, sinkhorn_plan, iterations=3),
    _mechanism("Sinkhorn, 21 steps", sinkhorn_attention, sinkhorn_plan, iterations=21),
    _mechanism("Soft ESP", esp_attention, esp_plan),
    _mechanism("Soft ESP, balanced", esp_attention, esp_plan, balance="both"),
    _mechanism("Hard ESP", esp_attention, esp_plan, hard=True),
)


class Screen:
    """Prints the story: with rich where it is installed, plainly where it is not."""

    def __init__(self) -> None:
        self.rich: Any = None
        with suppress(ImportError):
            from rich.console import Console

            self.rich = Console(highlight=False)

    def heading(self, text: str) -> None:
        if self.rich:
            self.rich.print(f"\n[bold]{text}[/bold]")
        else:
            print(f"\n{text}\n{'-' * len(text)}")

    def say(self, text: str) -> None:
        """A paragraph, broken into lines that fit."""
        columns = min(shutil.get_terminal_size().columns, 88)
        for line in textwrap.wrap(text, columns):
            self.line(line)

    def line(self, text: str = "") -> None:
        """A line as it is."""
        print(text, flush=True)

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        lines = [tuple(header), *map(tuple, rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
        for number, line in enumerate(lines):
            cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
            self.line("  " + "  ".join([line[0].ljust(widths[0]), *cells[1:]]))
            if number == 0:
                self.line("  " + "  ".join("-" * width for width in widths))

    def progress(self, items: Sequence[Any], label: str) -> Iterator[Any]:
        """The items one by one, with a bar that says how many are done."""
        if self.rich:
            from rich.progress import track

            yield from track(items, f"  {label}", console=self.rich, transient=True)
            return
        for done, item in enumerate(items):
            if sys.stdout.isatty():
                filled = round(20 * done / len(items))
                print(f"\r  {label} [{'#' * filled:20}] {done}/{len(items)}", end="", flush=True)
            yield item
        if sys.stdout.isatty():
            print("\r" + " " * 79 + "\r", end="")


def compare(tokens: int, width: int, repeats: int, screen: Screen) -> list[Row]:
    """Sums and times of every mechanism on the same random head, forward and backward."""
    q, k, v = _tokens(tokens, width)
    rows = []
    for mechanism in screen.progress(MECHANISMS, "mechanisms"):
        with torch.no_grad():
            matrix = mechanism.plan(q, k)
        row_error, column_error = (float((matrix.sum(d) - 1).abs().max()) for d in (-1, -2))
        seconds = _seconds(mechanism.attention, (q, k, v), repeats)
        rows.append(Row(mechanism.name, row_error, column_error, 1e3 * seconds))
    return rows


def tour(output: Path, quick: bool, screen: Screen) -> list[Row]:
    """Draws everything into ``output`` and returns the table."""
    from espformer import plots

    output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)

    screen.heading("1. Who attends to whom")
    screen.say(
        "In softmax attention every query gives one unit of attention, but a few keys may take "
        "nearly all of it. Doubly-stochastic attention gives every key its unit too. Sinkhorn's "
        "algorithm gets there step by step; ESP sorts queries and keys along slices and lets "
        "equal ranks meet."
    )
    queries, keys = plots.example_clouds()
    top, bottom = plots.sinkhorn_plans(queries, keys), plots.esp_plans(queries, keys)
    _save(plots.plan_comparison(queries, keys, top, bottom), output / "plans", screen)

    tokens, width = (128, 16) if quick else (512, 32)
    screen.heading("2. What every token gives, and what it receives")
    screen.say(
        f"{tokens} random tokens of width {width}, one head, float32, {torch.get_num_threads()} "
        "threads; time is forward and backward. Errors are the largest distance of a sum from one."
    )
    rows = compare(tokens, width, repeats=2 if quick else 5, screen=screen)
    screen.table(
        ("mechanism", "row-sum error", "column-sum error", "time"),
        (
            (r.name, f"{r.row_error:.1e}", f"{r.column_error:.1e}", f"{r.milliseconds:.1f} ms")
            for r in rows
        ),
    )
    q, k, _ = _tokens(min(tokens, 256), width)
    with torch.no_grad():
        named = [plots.NamedPlan(m.name, m.plan(q, k)[0, 0]) for m in MECHANISMS]
    _save(plots.row_column_sums(named), output / "sums", screen)

    screen.heading("3. From soft to hard")
    screen.say(
        "Training needs a soft sort, whose temperature t may fall. A soft sort is only roughly "
        "doubly stochastic unless it is balanced; a hard sort always is."
    )
    x, to_queries, to_keys = (torch.randn(n, 4, dtype=torch.float64) for n in (40, 4, 4))
    _save(plots.softness(x @ to_queries, x @ to_keys), output / "softness", screen)

    screen.heading("4. What it costs")
    _cost(output, quick, screen)
    return rows


def _cost(output: Path, quick: bool, screen: Screen) -> None:
    """Times the dense formula against the linear-time operator, and checks that they agree."""
    from espformer import plots

    slices, width = 16, 32
    lengths = [64, 128, 256, 512] if quick else [128, 256, 512, 1024, 2048, 4096, 8192]
    dense_up_to = lengths[-2] if quick else 1024
    theta = torch.eye(width)[:slices]
    runs = [("linear time", n) for n in lengths]
    runs += [("dense", n) for n in lengths if n <= dense_up_to]
    measurements = []
    for name, n in screen.progress(runs, "tokens"):
        backend = "dense" if name == "dense" else "linear"
        attention = partial(esp_attention, slices=theta, backend=backend)
        seconds = _seconds(attention, _tokens(n, width), repeats=2 if quick else 3)
        measurements.append(plots.Measurement(name, n, seconds))
    error = _disagreement(dense_up_to, width, theta)
    times = {(m.series, m.tokens): m.seconds for m in measurements}
    linear, dense = (1e3 * times[name, dense_up_to] for name in ("linear time", "dense"))
    screen.say(
        f"The formula as it is printed makes an N×N matrix for each of {slices} slices; the "
        f"linear-time operator makes none. At {dense_up_to} tokens, forward and backward, the "
        f"formula takes {dense:,.0f} ms and the operator {linear:,.0f} ms. The operator's output "
        f"and gradients in float32 are within {error:.0e} of the formula in float64 (relative)."
    )
    conditions = (
        f"ESP attention, forward and backward, one head, {slices} slices, width {width}, float32, "
        f"{torch.get_num_threads()} threads."
    )
    _save(plots.cost_curve(measurements, conditions), output / "cost", screen)


def _tokens(count: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    q, k, v = (torch.randn(1, 1, count, width, generator=generator) for _ in range(3))
    # Twice the usual spread: trained attention is sharper than that of random weights.
    return (2 * q).requires_grad_(), (2 * k).requires_grad_(), v.requires_grad_()


def _seconds(attention: Attention, inputs: tuple[Tensor, Tensor, Tensor], repeats: int) -> float:
    """Median time of a forward and a backward, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        torch.autograd.grad(attention(*inputs).square().sum(), inputs)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def _disagreement(tokens: int, width: int, theta: Tensor) -> float:
    """Largest relative error of the output and the gradients against the dense float64 formula."""
    results = []
    for backend, dtype in (("linear", torch.float32), ("dense", torch.float64)):
        inputs = [x.detach().to(dtype).requires_grad_() for x in _tokens(tokens, width)]
        out = esp_attention(*inputs, slices=theta.to(dtype), backend=backend)
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    return max(
        float(((got.double() - want).norm() / want.norm()).detach())
        for got, want in zip(*results, strict=True)
    )


def _save(figure: Any, stem: Path, screen: Screen) -> None:
    from espformer import plots

    plots.save_figure(figure, stem)
    screen.line(f"  drawn: {stem.name}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m espformer.demo",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), metavar="FOLDER",
        help="where the pictures go; made if it does not exist (default: demo-output)",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true", help="small sizes: a few seconds instead of a minute"
    )
    options = parser.parse_args(arguments)
    screen = Screen()
    start = time.perf_counter()
    try:
        tour(options.output, options.quick, screen)
    except ModuleNotFoundError as error:
        if error.name not in ("matplotlib", "PIL"):
            raise
        print(
            f"The demo draws with matplotlib, which needs {error.name}, and that is not installed: "
            "pip install 'espformer[plots]', or pip install matplotlib.",
            file=sys.stderr,
        )
        return 1
    except OSError as error:
        print(
            f"Could not write the pictures to {options.output}: {error.strerror or error}. Name a "
            "folder that you may write to, with --output FOLDER.",
            file=sys.stderr,
        )
        return 1
    seconds = time.perf_counter() - start
    screen.line(f"\nDone in {seconds:.0f} s. The pictures are in {options.output.resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
