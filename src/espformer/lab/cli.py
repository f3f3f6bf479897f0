"""The command line: `espformer train`, `reproduce`, `evaluate`, `anneal`, `harden`, and more."""

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError as missing:
    raise SystemExit(
        f'the command line needs {missing.name}: pip install "espformer[train]"'
    ) from None

from espformer.lab.commands import flowing
from espformer.lab.commands.bench import bench
from espformer.lab.commands.export import export
from espformer.lab.commands.finetune import finetune
from espformer.lab.commands.plot import plot
from espformer.lab.commands.report import report
from espformer.lab.commands.results import results
from espformer.lab.revision import remember_command

__all__ = ["app", "main"]

app = typer.Typer(
    name="espformer",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Doubly-stochastic attention through Expected Sliced Transport Plans: train, sharpen, "
    "harden, and re-run the experiments of the paper.",
    epilog="Begin with: [bold]espformer train digits[/]  (a minute on a laptop, no download). "
    "Then [bold]espformer harden runs/digits/default/espformer/seed-0[/].",
)


class Which(StrEnum):
    """A checkpoint of a run."""

    last = "last"
    best = "best"
    hard = "hard"


RecipeName = Annotated[
    str, typer.Argument(help="Name of a recipe (see `espformer recipes`) or path of a .yaml.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY.PATH=VALUE]...",
        help="Values that win over the recipe, e.g. trainer.epochs=5 "
        "mechanism.esp.sort_temperature=0.1 trainer.precision=bf16-mixed",
    ),
]
Output = Annotated[Path, typer.Option("--output", "-o", help="Directory of all runs.")]
RunPath = Annotated[
    Path, typer.Argument(help="Directory of a run, or one of its checkpoint files.")
]
Checkpoint = Annotated[Which, typer.Option("--checkpoint", help="Which checkpoint of the run.")]
DataDirectory = Annotated[
    str | None, typer.Option("--data-dir", help="Where the data are; as in training if not given.")
]
ShowProgress = Annotated[
    bool | None,
    typer.Option("--progress/--no-progress", help="Progress bar; on a terminal by default."),
]


def _version(asked: bool) -> None:
    """What a report of a mistake should begin with."""
    if asked:
        import platform

        import torch

        from espformer import __version__
        from espformer.lab.revision import revision

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
        typer.Option("--version", callback=_version, is_eager=True, help="Say what this is."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options of every command; `main` reads --debug wherever it stands."""


@app.command()
def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    mechanism: Annotated[
        str | None, typer.Option("--mechanism", "-m", help="Label of a mechanism of the recipe.")
    ] = None,
    setting: Annotated[
        str | None, typer.Option("--setting", "-s", help="Name of a setting of the recipe.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed; the recipe's first if not given.")] = None,
    output: Output = Path("runs"),
    progress: ShowProgress = None,
) -> None:
    """Train one run of a recipe; the same command again goes on where it was interrupted.

    Examples:

      espformer train digits

      espformer train digits --mechanism sinkformer --seed 1 trainer.epochs=5

      espformer train cats-dogs --setting 10% trainer.precision=bf16-mixed

      espformer train digits annealing.factor=0.8 harden=true --output elsewhere
    """
    from espformer.lab.training.display import print_results
    from espformer.lab.training.recipe import load_recipe
    from espformer.lab.training.records import is_first_process, read_results, run_directory
    from espformer.lab.training.runner import execute

    run = load_recipe(recipe).run(mechanism, setting, seed, overrides or ())
    directory = run_directory(output, run)
    before = read_results(directory) is not None
    results = execute(run, directory, output=output, progress=progress)
    if before:
        print("This run was finished before; move its directory away to run it again.")
    print_results(results)
    if is_first_process():
        print(directory)


@app.command()
def evaluate(
    run: RunPath,
    checkpoint: Checkpoint = Which.last,
    hard: Annotated[bool, typer.Option("--hard", help="Sort exactly.")] = False,
    sort_temperature: Annotated[
        float | None, typer.Option(help="Sort with this temperature.")
    ] = None,
    data_dir: DataDirectory = None,
    progress: ShowProgress = None,
) -> None:
    """Score a checkpoint on the test data, as it was saved or with another sort.

    Examples:

      espformer evaluate runs/digits/default/espformer/seed-0

      espformer evaluate runs/digits/default/espformer/seed-0 --hard
    """
    from espformer.lab.training import life
    from espformer.lab.training.display import print_mapping

    print_mapping(
        life.evaluate(
            run,
            which=checkpoint.value,
            hard=hard,
            sort_temperature=sort_temperature,
            data_directory=data_dir,
            progress=progress,
        )
    )


@app.command()
def anneal(
    run: RunPath,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of fine-tuning.")] = 40,
    factor: Annotated[float, typer.Option(help="t ← factor·t before each epoch.")] = 0.8,
    learning_rate: Annotated[
        float | None, typer.Option(help="Of the fine-tuning; as in training if not given.")
    ] = None,
    checkpoint: Checkpoint = Which.last,
    data_dir: DataDirectory = None,
    progress: ShowProgress = None,
) -> None:
    """Fine-tune a trained run while its sort temperature falls, then score it soft and hard.

    The work goes to RUN/anneal, and goes on there when it was interrupted.

    Example:

      espformer anneal runs/digits/default/espformer/seed-0 --epochs 10
    """
    from espformer.lab.training import life
    from espformer.lab.training.display import print_results

    results = life.anneal(
        run,
        which=checkpoint.value,
        epochs=epochs,
        factor=factor,
        learning_rate=learning_rate,
        data_directory=data_dir,
        progress=progress,
    )
    print_results(results)


@app.command()
def harden(
    run: RunPath,
    checkpoint: Checkpoint = Which.last,
    data_dir: DataDirectory = None,
    progress: ShowProgress = None,
) -> None:
    """Switch a trained run to exact sorting, score it both ways, and keep it as hard.ckpt.

    Example:

      espformer harden runs/digits/default/espformer/seed-0
    """
    from espformer.lab.training import life
    from espformer.lab.training.display import print_mapping

    print_mapping(
        life.harden(run, which=checkpoint.value, data_directory=data_dir, progress=progress)
    )


@app.command()
def reproduce(
    experiment: RecipeName,
    overrides: Overrides = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds instead of the recipe's, e.g. 0,1,2.")
    ] = None,
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=1, help="Runs at once; on a GPU under MPS.")
    ] = 1,
    only: Annotated[
        list[str] | None, typer.Option(help="Keep this mechanism or setting; may be repeated.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would run, and about how long.")
    ] = False,
    save: Annotated[
        Path | None,
        typer.Option(help="Also keep the results in this directory, for `espformer results`."),
    ] = None,
    skip_saved: Annotated[
        bool, typer.Option("--skip-saved", help="Leave out runs that --save has the results of.")
    ] = False,
    output: Output = Path("runs"),
) -> None:
    """Do all runs of an experiment and put the results beside the paper's.

    Finished runs are kept, interrupted ones go on, seed by seed, so that an interrupt leaves whole
    comparisons. The table goes to OUTPUT/EXPERIMENT/results.md.

    With --jobs on a GPU, start NVIDIA's MPS first (nvidia-cuda-mps-control -d): without it the runs
    take turns, and each is many times slower. Small models gain much from trainer.cuda_graph=true.

    Examples:

      espformer reproduce digits --jobs 2

      espformer reproduce cats-dogs --only 1% --only espformer --dry-run

      espformer reproduce mnist-patch-size --seeds 0 data.directory=DIR

      espformer reproduce tweeteval --jobs 12 --save results --skip-saved
    """
    from espformer.lab.revision import revision
    from espformer.lab.training.display import show_plan
    from espformer.lab.training.experiments import do_all, plan
    from espformer.lab.training.recipe import load_recipe
    from espformer.lab.training.report import beside_saved, write_report

    recipe = load_recipe(experiment)
    work = plan(
        recipe,
        experiment,
        output,
        seeds=_seeds(seeds),
        only=only or (),
        overrides=overrides or (),
    )
    work = beside_saved(recipe, work, save, skip=skip_saved)
    console = Console()
    if dry_run:
        show_plan(console, work, jobs)
        return
    # Runs have the code that is loaded now, whatever is committed while they train.
    os.environ["ESPFORMER_REVISION"] = revision() or ""
    try:
        failed = do_all(work, jobs, console)
    finally:  # an interrupt, too, leaves the results of the runs that were finished
        path, text = write_report(recipe, output, save)
        print(text)
        print(path)
    if failed:
        raise typer.Exit(1)


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this recipe.")] = None,
) -> None:
    """List the recipes, or print one: a file to copy and change.

    Example:

      espformer recipes digits > mine.yaml && espformer train mine.yaml
    """
    from espformer.lab.training.recipe import load_recipe, recipe_names

    console = Console()
    if name is not None:
        print(Path(load_recipe(name).origins.file).read_text(encoding="utf-8"), end="")
        return
    table = Table("recipe", "what it is", "mechanisms", "settings", "runs")
    for known in recipe_names():
        recipe = load_recipe(known)
        settings, labels = len(recipe.grid.settings), len(recipe.mechanisms)
        runs = settings * labels * len(recipe.grid.seeds)
        table.add_row(known, recipe.title, str(labels), str(settings), str(runs))
    console.print(table)


app.command()(finetune)
app.command()(export)
app.command()(bench)
app.command()(plot)
app.command()(report)
app.command()(results)
for command in app.registered_commands:
    command.help = flowing(command.callback.__doc__ or "")


def _seeds(text: str | None) -> list[int] | None:
    from espformer.lab.training.errors import ConfigError

    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--seeds: expected numbers such as 0,1,2, got '{text}'") from None


def main() -> None:
    """Run the command line; mistakes are told in words, with --debug also as a traceback."""
    from espformer.lab.training.errors import UserError

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


if __name__ == "__main__":
    main()
