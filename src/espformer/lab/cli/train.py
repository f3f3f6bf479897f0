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
        str | None,
        typer.Option(
            "--mechanism",
            "-m",
            help="Row of the recipe, a label under `mechanisms`; by default its "
            "`default_mechanism`.",
        ),
    ] = None,
    setting: Annotated[
        str | None,
        typer.Option(
            "--setting",
            "-s",
            help="Setting of the recipe, such as '2000 images'; by default the first.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**32 - 1, help="Seed; by default the recipe's first."),
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
    hard: Annotated[bool, typer.Option("--hard", help="Sort exactly instead of softly.")] = False,
    sort_temperature: Annotated[
        float | None,
        typer.Option(help="Sort softly with this temperature instead of the saved one."),
    ] = None,
    data_dir: DataDirectory = None,
    progress: ShowProgress = None,
) -> None:
    """Evaluate a checkpoint on the test data, as saved or with a different sort.

    Examples:

      espformer evaluate runs/digits/default/espformer-default/seed-0

      espformer evaluate runs/digits/default/espformer-default/seed-0 --hard
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
    factor: Annotated[
        float, typer.Option(help="Multiply the sort temperature by this before each epoch.")
    ] = 0.8,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="By default the one used in training, which may be too high: on Cats and Dogs "
            "(200 images) annealing at 5e-4 lost four points, at 3e-5 none."
        ),
    ] = None,
    checkpoint: Checkpoint = Which.last,
    data_dir: DataDirectory = None,
    progress: ShowProgress = None,
) -> None:
    """Fine-tune a run while lowering its sort temperature, then evaluate it soft and hard.

    The annealed run is written to RUN/anneal. Repeat the command to resume after an interruption.

    Example:

      espformer anneal runs/digits/default/espformer-default/seed-0 --epochs 10
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

      espformer harden runs/digits/default/espformer-default/seed-0
    """
    from espformer.lab.cli.display import print_mapping
    from espformer.lab.training import posttrain

    print_mapping(
        posttrain.harden(run, which=checkpoint.value, data_directory=data_dir, progress=progress)
    )
