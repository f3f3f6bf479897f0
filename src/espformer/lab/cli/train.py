"""`espformer train`, `evaluate`, `anneal` and `harden`: commands for a single run."""

from pathlib import Path
from typing import Annotated

import typer

from espformer.lab.cli.options import (
    Checkpoint,
    DataDirectory,
    Output,
    Overrides,
    RecipeName,
    RunPath,
    ShowProgress,
    Which,
)


def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    mechanism: Annotated[
        str | None, typer.Option("--mechanism", "-m", help="Label of a mechanism in the recipe.")
    ] = None,
    setting: Annotated[
        str | None, typer.Option("--setting", "-s", help="Name of a setting in the recipe.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed; by default the first of the recipe.")
    ] = None,
    output: Output = Path("runs"),
    progress: ShowProgress = None,
) -> None:
    """Train one run of a recipe; repeat the command to resume an interrupted run.

    Examples:

      espformer train digits

      espformer train digits --mechanism sinkformer --seed 1 trainer.epochs=5

      espformer train cats-dogs --setting '2000 images' trainer.precision=bf16-mixed

      espformer train digits annealing.factor=0.8 harden=true --output elsewhere
    """
    from espformer.lab.cli.display import print_results
    from espformer.lab.recipes.recipe import load_recipe
    from espformer.lab.training.run_directory import is_first_process, read_results, run_directory
    from espformer.lab.training.trainer import execute

    run = load_recipe(recipe).run(mechanism, setting, seed, overrides or ())
    directory = run_directory(output, run)
    before = read_results(directory) is not None
    results = execute(run, directory, output=output, progress=progress)
    if before:
        print("This run was finished before; move its directory away to run it again.")
    print_results(results)
    if is_first_process():
        print(directory)


def evaluate(
    run: RunPath,
    checkpoint: Checkpoint = Which.last,
    hard: Annotated[bool, typer.Option("--hard", help="Sort exactly.")] = False,
    sort_temperature: Annotated[
        float | None, typer.Option(help="Use this sort temperature.")
    ] = None,
    data_dir: DataDirectory = None,
    progress: ShowProgress = None,
) -> None:
    """Evaluate a checkpoint on the test data, as saved or with a different sort.

    Examples:

      espformer evaluate runs/digits/default/espformer/seed-0

      espformer evaluate runs/digits/default/espformer/seed-0 --hard
    """
    from espformer.lab.cli.display import print_mapping
    from espformer.lab.training import posttrain

    print_mapping(
        posttrain.evaluate(
            run,
            which=checkpoint.value,
            hard=hard,
            sort_temperature=sort_temperature,
            data_directory=data_dir,
            progress=progress,
        )
    )


def anneal(
    run: RunPath,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of fine-tuning.")] = 40,
    factor: Annotated[float, typer.Option(help="t ← factor·t before each epoch.")] = 0.8,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="By default that of the training, which may be too high: on Cats and Dogs 5e-4 "
            "lost four points where 3e-5 lost none."
        ),
    ] = None,
    checkpoint: Checkpoint = Which.last,
    data_dir: DataDirectory = None,
    progress: ShowProgress = None,
) -> None:
    """Fine-tune a run while lowering its sort temperature, then evaluate it soft and hard.

    The annealed run is written to RUN/anneal. Repeat the command to resume after an interruption.

    Example:

      espformer anneal runs/digits/default/espformer/seed-0 --epochs 10
    """
    from espformer.lab.cli.display import print_results
    from espformer.lab.training import posttrain

    results = posttrain.anneal(
        run,
        which=checkpoint.value,
        epochs=epochs,
        factor=factor,
        learning_rate=learning_rate,
        data_directory=data_dir,
        progress=progress,
    )
    print_results(results)


def harden(
    run: RunPath,
    checkpoint: Checkpoint = Which.last,
    data_dir: DataDirectory = None,
    progress: ShowProgress = None,
) -> None:
    """Switch a trained run to exact sorting, evaluate it soft and hard, and save it as hard.ckpt.

    Example:

      espformer harden runs/digits/default/espformer/seed-0
    """
    from espformer.lab.cli.display import print_mapping
    from espformer.lab.training import posttrain

    print_mapping(
        posttrain.harden(run, which=checkpoint.value, data_directory=data_dir, progress=progress)
    )
