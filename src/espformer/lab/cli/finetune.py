"""`espformer finetune`: swap the attention of a pre-trained encoder, then fine-tune it."""

from pathlib import Path
from typing import Annotated, Any

import typer

from espformer.lab.cli.options import Jobs, Output, Save, ShowProgress, whole_numbers
from espformer.lab.cli.reproduce import do_and_report


def finetune(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="Directory of a transformers model, or its name on the Hugging Face hub.",
        ),
    ],
    task: Annotated[str, typer.Option("--task", "-t", help="tweeteval or imdb.")] = "tweeteval",
    attention: Annotated[
        list[str] | None,
        typer.Option(
            "--attention",
            "-a",
            help="softmax (the original model), sinkhorn, esp, uniform, or one with options, "
            "LABEL={esp: {balance: both}}; may be repeated. By default the first three.",
        ),
    ] = None,
    learning_rate: Annotated[
        list[float] | None,
        typer.Option(
            "--learning-rate",
            "-r",
            help="Peak learning rate; may be repeated to try several. 1e-4 by default.",
        ),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, e.g. 0,1,2.")] = "0",
    epochs: Annotated[int, typer.Option(min=1, help="Training epochs.")] = 2,
    batch_size: Annotated[int, typer.Option(min=1, help="Batch size.")] = 64,
    anneal_to: Annotated[
        float, typer.Option(help="Sort temperature of ESP at the last step; 0 keeps it constant.")
    ] = 1e-3,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="First fit each attention to the original model, without labels."
        ),
    ] = False,
    calibration_steps: Annotated[
        int, typer.Option(min=0, help="Steps of --calibrate, the same for every attention.")
    ] = 200,
    precision: Annotated[
        str, typer.Option(help="Precision as Lightning names it: 32-true, bf16-mixed, ...")
    ] = "32-true",
    max_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Truncate texts to this many tokens; by default 128 (tweeteval) or 256 (imdb).",
        ),
    ] = None,
    data_dir: Annotated[
        str | None,
        typer.Option(
            "--data-dir",
            help="Data directory; by default ESPFORMER_DATA, then the Hugging Face hub.",
        ),
    ] = None,
    examples: Annotated[
        int | None,
        typer.Option(min=1, help="Use only this many texts of each split, to try it out."),
    ] = None,
    jobs: Jobs = 1,
    save: Save = None,
    output: Output = Path("runs"),
    progress: ShowProgress = None,
    table: Annotated[
        bool,
        typer.Option("--table/--no-table", hidden=True, help="Off in the runs of a comparison."),
    ] = True,
) -> None:
    """Swap the attention of a pre-trained encoder; evaluate before and after fine-tuning.

    A linear head is fitted once with the original attention, and all attentions start from it. So
    the score before training (plug and play) shows the effect of the swap alone. Then every
    attention is fine-tuned for the same number of steps. For ESP the sort temperature is annealed,
    and the result is scored soft and with an exact sort. With --calibrate every attention is first
    fitted to the outputs of the original model on training texts, without their labels; the score
    before training is then that of the calibrated model.

    Finished runs are kept, and interrupted ones resume. The table goes to OUTPUT/NAME/results.md.
    With --jobs on a GPU, start NVIDIA's MPS first: nvidia-cuda-mps-control -d.

    Examples:

      espformer finetune -m sentence-transformers/all-MiniLM-L6-v2 --seeds 0,1,2

      espformer finetune -m DIR -a softmax -a esp -r 5e-5 -r 2e-4 --jobs 4

      espformer finetune -m DIR -a softmax -a uniform -a esp

      espformer finetune -m DIR -a 'hard={esp: {straight_through: true}}'

      espformer finetune -m DIR --calibrate --calibration-steps 500

      espformer finetune -m DIR --data-dir DATA --examples 500 --epochs 1
    """
    from espformer.lab.cli.display import print_results
    from espformer.lab.errors import ConfigError
    from espformer.lab.results.result_files import write_report
    from espformer.lab.training import processes
    from espformer.lab.training.experiments import make_job
    from espformer.lab.training.finetuning import (
        fit_shared_head,
        head_file,
        make_experiment,
        read_attentions,
    )
    from espformer.lab.training.run_directory import run_directory
    from espformer.lab.training.trainer import execute

    attentions = read_attentions(attention or ["softmax", "sinkhorn", "esp"])
    rates = learning_rate or [1e-4]
    if len(set(rates)) < len(rates):
        raise ConfigError("--learning-rate: the same one is given twice")
    numbers = whole_numbers("--seeds", seeds)
    experiment = make_experiment(
        model,
        task,
        attentions,
        rates,
        numbers,
        epochs=epochs,
        batch_size=batch_size,
        anneal_to=anneal_to or None,
        precision=precision,
        max_length=max_length,
        data_dir=data_dir,
        examples=examples,
        calibration_steps=calibration_steps if calibrate else None,
    )
    runs: list[Any] = experiment.runs()
    if not head_file(output, runs[0]).exists():
        print("fitting the head with the original attention")
    fit_shared_head(runs[0], output)
    if len(runs) == 1:
        (run,) = runs
        directory = run_directory(output, run)
        print_results(execute(run, directory, output=output, progress=progress))
        print(directory)
        if table:
            print(*reversed(write_report(experiment, output, save)), sep="\n")
        return
    shared = [
        *("--model", model, "--task", task, "--epochs", str(epochs), "--output", str(output)),
        *("--batch-size", str(batch_size), "--anneal-to", repr(anneal_to), "--no-progress"),
        *("--precision", precision, "--no-table"),
        *(("--calibrate", "--calibration-steps", str(calibration_steps)) if calibrate else ()),
    ]
    for option, value in (
        ("--max-length", max_length),
        ("--data-dir", data_dir),
        ("--examples", examples),
    ):
        shared += [] if value is None else [option, str(value)]
    given = {text.partition("=")[0]: text for text in attention or attentions}
    work = [
        make_job(
            run,
            output,
            [
                *("finetune", *shared),
                *("--attention", given[run.label], "--seeds", str(run.seed)),
                *("--learning-rate", repr(run.optimizer.learning_rate)),
            ],
        )
        for run in runs
    ]
    do_and_report(experiment, work, jobs, output, save, processes.by_command)
