"""`espformer train`, `evaluate`, `anneal` and `harden`: one run and what comes after it."""

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

__all__ = ["anneal", "evaluate", "harden", "train"]


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
    """Switch a trained run to exact sorting, score it both ways, and keep it as hard.ckpt.

    Example:

      espformer harden runs/digits/default/espformer/seed-0
    """
    from espformer.lab.cli.display import print_mapping
    from espformer.lab.training import posttrain

    print_mapping(
        posttrain.harden(run, which=checkpoint.value, data_directory=data_dir, progress=progress)
    )
