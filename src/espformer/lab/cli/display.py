"""The results of a run, and the plan of an experiment, as the command line shows them."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from espformer.lab.clock import in_words
from espformer.lab.training.experiments import Job
from espformer.lab.training.run_directory import is_first_process
from espformer.lab.training.timing import Estimator


def show_plan(console: Console, work: list[Job], at_once: int) -> None:
    """Print a table of the runs of an experiment: state, and about how long each takes here.

    Steps are measured for minutes if the models are large; what is measured goes to stderr.
    """
    rows: dict[tuple[str, str, str], list[Job]] = defaultdict(list)
    for job in work:
        rows[job.run.recipe, job.run.setting, job.run.label].append(job)
    several = len({recipe for recipe, _, _ in rows}) > 1
    table = Table(*["recipe"] * several)
    for name in ("setting", "mechanism", "seeds", "state", "steps", "about, each"):
        table.add_column(name, no_wrap=name in ("setting", "mechanism"))  # what --only takes
    total, unknown = 0.0, set()
    with _measuring(len(rows)) as (say, advance):
        estimate = Estimator(say)
        for (recipe, setting, label), jobs in rows.items():
            left = [job for job in jobs if job.state != "finished"]
            guess = estimate(jobs[0].run)
            if guess.seconds is None and left:
                unknown.add(guess.reason)
            total += (guess.seconds or 0.0) * len(left)
            states = ", ".join(sorted({job.state for job in jobs}))
            seeds = " ".join(str(job.run.seed) for job in jobs)
            steps = "" if guess.steps is None else f"{guess.steps:,}"
            each = "?" if guess.seconds is None else in_words(guess.seconds)
            table.add_row(*[recipe] * several, setting, label, seeds, states, steps, each)
            advance()
    console.print(table)
    for reason in sorted(unknown):
        console.print(f"no estimate: {reason}", highlight=False, markup=False)
    together = f", {in_words(total / at_once)} if {at_once} at once cost nothing"
    console.print(
        f"{len(work)} runs, {sum(job.state == 'finished' for job in work)} finished; about "
        f"{in_words(total)} of computing here"
        + (" for the others" if unknown else "")
        + (together if at_once > 1 else "")
    )


@contextmanager
def _measuring(rows: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """Show on stderr how many of the rows have an estimate: a bar, or lines if it is no terminal.

    Yields:
        What says what is done now, and what tells that a row has its estimate.
    """
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    what_is_done = TextColumn("{task.description}", markup=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), what_is_done)
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("estimating", total=rows)

        def say(what: str) -> None:
            bar.update(task, description=what)
            if not shown:
                row = int(bar.tasks[0].completed) + 1
                console.print(f"[row {row} of {rows}] {what}", markup=False)

        yield say, lambda: bar.advance(task)


def print_results(results: dict[str, Any]) -> None:
    """Print the scores of a run in a line."""
    if not is_first_process():
        return
    scores = ", ".join(f"{name} {value:.2f}" for name, value in results["scores"].items())
    line = f"{results['mechanism']}: {results['score']} {scores}"
    rate = results.get("samples_per_second")
    if rate:
        line += f"; {rate:,.0f} samples/s in training"
    print(f"{line} ({results['device']})")


def print_mapping(values: dict[str, Any]) -> None:
    """Print names and values, one on each line."""
    if is_first_process():
        for name, value in values.items():
            print(f"{name}: {value:.2f}" if isinstance(value, float) else f"{name}: {value}")
