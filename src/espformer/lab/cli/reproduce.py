"""`espformer reproduce` and `recipes`: whole experiments, and a list of recipes."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from espformer.lab.cli.options import Jobs, Output, Overrides, RecipeName, Save, whole_numbers

if TYPE_CHECKING:
    from espformer.lab.recipes.recipe import Recipe
    from espformer.lab.training.experiments import Job
    from espformer.lab.training.processes import Launch


def reproduce(
    experiment: RecipeName,
    overrides: Overrides = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds instead of those of the recipe, e.g. 0,1,2.")
    ] = None,
    jobs: Jobs = 1,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Run only this row (mechanism) or setting; may be repeated."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show what would run, and about how long it would take."),
    ] = False,
    save: Save = None,
    skip_saved: Annotated[
        bool, typer.Option("--skip-saved", help="Skip runs with results in the --save directory.")
    ] = False,
    output: Output = Path("runs"),
) -> None:
    """Train all runs of an experiment and print their table beside the paper's numbers.

    Finished runs are kept, and interrupted ones resume. Runs are ordered by seed, so that an
    interruption leaves complete comparisons. The table goes to OUTPUT/EXPERIMENT/results.md.

    If you change trainer.epochs, milestones, warm-up and annealing are rescaled. Some recipes start
    from the trained runs of another recipe, which keep their own epochs; start.overrides changes
    them.

    With --jobs on a GPU, start NVIDIA's MPS first (nvidia-cuda-mps-control -d). Without it the runs
    take turns, and each is many times slower. trainer.cuda_graph=true speeds up small models a lot.

    Examples:

      espformer reproduce digits --jobs 2

      espformer reproduce cats-dogs --only '200 images' --only espformer --dry-run

      espformer reproduce mnist-patch-size --seeds 0 data.directory=DIR

      espformer reproduce tweeteval --jobs 12 --save results --skip-saved
    """
    from espformer.lab.cli.display import show_plan
    from espformer.lab.recipes.recipe import load_recipe
    from espformer.lab.results.result_files import beside_saved
    from espformer.lab.training.experiments import plan

    recipe = load_recipe(experiment)
    work = plan(
        recipe,
        experiment,
        output,
        seeds=None if seeds is None else whole_numbers("--seeds", seeds),
        only=only or (),
        overrides=overrides or (),
    )
    work = beside_saved(recipe, work, save, skip=skip_saved)
    if dry_run:
        show_plan(Console(), work, jobs)
        return
    do_and_report(recipe, work, jobs, output, save)


def do_and_report(
    recipe: "Recipe",
    work: "list[Job]",
    jobs: int,
    output: Path,
    save: Path | None,
    launcher: "Launch | None" = None,
) -> None:
    """Execute the runs of an experiment, then write and print its table, even if interrupted.

    It also writes the results of other experiments that these runs start from.
    """
    from espformer.lab.machine import revision
    from espformer.lab.recipes.recipe import load_recipe
    from espformer.lab.results.result_files import write_report
    from espformer.lab.training.experiments import do_all

    # Runs use the code that is loaded now, whatever is committed while they train.
    os.environ["ESPFORMER_REVISION"] = revision() or ""
    try:
        failed = do_all(work, jobs, Console(), launcher)
    finally:
        others = dict.fromkeys(job.run.recipe for job in work if job.run.recipe != recipe.name)
        for name in others:
            print(write_report(load_recipe(name), output, save)[0])
        print(*reversed(write_report(recipe, output, save)), sep="\n")
    if failed:
        raise typer.Exit(1)


def recipes(
    name: Annotated[
        str | None, typer.Argument(help="The recipe to print; without a name, all are listed.")
    ] = None,
) -> None:
    """List the recipes, or print one to copy and edit.

    Example:

      espformer recipes digits > mine.yaml && espformer train mine.yaml
    """
    from espformer.lab.recipes.recipe import load_recipe, recipe_names

    console = Console()
    if name is not None:
        print(Path(load_recipe(name).origins.file).read_text(encoding="utf-8"), end="")
        return
    table = Table("recipe", "experiment", "mechanisms", "settings", "runs")
    table.columns[0].no_wrap = True
    for known in recipe_names():
        recipe = load_recipe(known)
        settings, labels = len(recipe.grid.settings), len(recipe.mechanisms)
        runs = settings * labels * len(recipe.grid.seeds)
        table.add_row(known, recipe.title, str(labels), str(settings), str(runs))
    console.print(table)
