"""Train, anneal and harden ESP attention in a few minutes: ``python -m espformer.lab.demo``."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from espformer.lab.clock import Stopwatch
from espformer.ops.common.optional import how_to_install

if TYPE_CHECKING:
    from rich.console import Console

    from espformer.lab.training.events import Event, Listener

DESCRIPTION = """\
Trains six kinds of attention on handwritten digits (softmax, differential, Sinkhorn, ESP with the
library's defaults, at the paper's temperature, and learning its temperature) with the same budget,
anneals the ESP models over further epochs, hardens them, and shows the results: a table here, and
one HTML page with curves, attention maps, transport plans and slice weights. It takes a few minutes
on a laptop and needs no network."""

EPILOG = """\
examples:
  python -m espformer.lab.demo                     into demo-output/, page demo-output/report.html
  python -m espformer.lab.demo --quick             two epochs each: to see that everything works
  python -m espformer.lab.demo --output elsewhere  another folder

Finished runs are kept: repeating the command only rewrites the page."""

LABELS = (
    "transformer", "difftransformer", "sinkformer", "espformer-default", "espformer-paper",
    "espformer-learnt",
)  # fmt: skip
ANNEALING_EPOCHS = 10
# Annealing divides t by a hundred: the paper's 1e-3 becomes 1e-5, where soft and hard hardly
# differ.
FACTOR = 0.01 ** (1 / ANNEALING_EPOCHS)
ANNEALING_RATE = 1e-4  # at that of training, 3e-3, annealing destroys what was learnt
QUICK = ("trainer.epochs=2", "trainer.limit_batches=6")


class Progress:
    """One line per task: a progress bar while it runs, then its result."""

    def __init__(self, console: Console, names: Sequence[str], epochs: Sequence[int]) -> None:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self.console = console
        self.bars = Bars(
            TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn(),
            TextColumn("{task.fields[told]}", style="dim"),
            console=console, redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self.tasks = {
            name: self.bars.add_task(name, total=total, start=False, told="")
            for name, total in zip(names, epochs, strict=True)
        }

    @contextlib.contextmanager
    def doing(self, name: str) -> Iterator[tuple[Listener, Callable[[str], None]]]:
        """Run a block; yields what takes the events of its training, and its closing words."""
        task = self.tasks[name]
        self.bars.start_task(task)

        def hear(event: Event) -> None:
            score = event.get("score")
            told = "" if score is None else f"accuracy {100 * score:.1f} %"
            self.bars.update(task, completed=event["epoch"], told=told)

        def close(words: str) -> None:
            total = self.bars.tasks[task].total
            self.bars.update(task, completed=total, told=words)
            self.bars.stop_task(task)
            if not self.console.is_terminal:
                self.console.print(f"  {name}: {words}", highlight=False)

        with contextlib.redirect_stdout(io.StringIO()):  # the lines of a log
            yield hear, close


def train_all(output: Path, quick: bool, console: Console) -> list[Path]:
    """Train every attention, anneal and harden those that sort; returns their directories."""
    from espformer.lab.recipes.build import has_sort_temperature
    from espformer.lab.recipes.recipe import load_recipe
    from espformer.lab.recipes.schema import TrainingRun
    from espformer.lab.training import posttrain
    from espformer.lab.training.run_directory import run_directory
    from espformer.lab.training.trainer import execute

    recipe = load_recipe("digits")
    overrides = ["trainer.accelerator=cpu", *(QUICK if quick else ())]
    runs = [recipe.run(label, overrides=overrides) for label in LABELS]
    epochs = 2 if quick else ANNEALING_EPOCHS
    steps: list[tuple[str, int]] = []
    for run in runs:
        assert isinstance(run, TrainingRun)
        steps.append((run.label, run.trainer.epochs))
        if has_sort_temperature(run.mechanism):
            steps.append((f"{run.label}, t falls", epochs))
    directories = [run_directory(output / "runs", run) for run in runs]
    progress = Progress(console, [name for name, _ in steps], [count for _, count in steps])
    shown = progress.bars if console.is_terminal else contextlib.nullcontext()
    with shown:
        for run, directory in zip(runs, directories, strict=True):
            with progress.doing(run.label) as (hear, close):
                results = execute(run, directory, progress=False, tell=hear)
                close(f"accuracy {results['scores']['test']:.1f} %")
            if has_sort_temperature(run.mechanism):
                with progress.doing(f"{run.label}, t falls") as (hear, close):
                    scores = posttrain.anneal(
                        directory, epochs=epochs, factor=FACTOR, learning_rate=ANNEALING_RATE,
                        progress=False, tell=hear,
                    )["scores"]  # fmt: skip
                    close(f"accuracy {scores['test']:.1f} %, hard {scores['hard']:.1f} %")
    return directories


def show_table(console: Console, rows: Sequence[Any]) -> None:
    """Print a row for each attention: its score, the errors of its sums, and its cost."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from espformer.lab.report.summary import COLUMNS, NOTE, cells

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, name in enumerate(COLUMNS):
        # Two words of a head may stand above each other, so the table fits 80 columns.
        head = name.replace(" ", "\n")
        table.add_column(head, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)
    console.print(NOTE, style="dim", highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m espformer.lab.demo",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), metavar="FOLDER",
        help="where runs and page go; made if it does not exist (default: demo-output)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="two short epochs each, in seconds")
    options = parser.parse_args(arguments)
    watch = Stopwatch()
    try:
        from rich.console import Console

        from espformer.lab.errors import UserError
        from espformer.lab.report import write_page
        from espformer.lab.report.inspection import open_run
        from espformer.lab.report.summary import summarise
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("espformer"):
            raise
        print(
            "The demo trains models and draws a page, which needs "
            + how_to_install(error.name, "train,plots"),
            file=sys.stderr,
        )
        return 1
    # A separate handle, because the output of training is redirected while it runs.
    console = Console(file=sys.stdout)
    console.print("[bold]Six kinds of attention learn to read digits[/]")
    page = options.output / "report.html"
    try:
        directories = train_all(options.output, options.quick, console)
        trained = [open_run(directory) for directory in directories]
        show_table(console, [summarise(one) for one in trained])
        with console.status("drawing the page"):
            write_page(trained, page, command="make demo")
    except (UserError, OSError) as error:
        print(f"The demo could not go on: {error}", file=sys.stderr)
        return 1
    print(f"Done in {watch.seconds:.0f} s. The report is in {page.resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
