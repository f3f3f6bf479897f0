"""After training: evaluate, anneal and harden, each from a checkpoint.

train soft → anneal (t ← 0.8 t, 40 epochs) → harden → evaluate exact doubly-stochastic attention
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from espformer.lab.data import Task
from espformer.lab.errors import RunError
from espformer.lab.files import LOCK, check_directory, lock, write_atomically
from espformer.lab.machine import run_conditions
from espformer.lab.recipes.build import has_sort_temperature
from espformer.lab.recipes.recipe import run_from_plain
from espformer.lab.recipes.schema import Annealing, Schedule, Start, TrainingRun
from espformer.lab.training.assemble import TaskData, load_task, load_weights, make_learner
from espformer.lab.training.checkpoints import checkpoint_file, read_checkpoint
from espformer.lab.training.events import Listener
from espformer.lab.training.learner import MARK, Learner
from espformer.lab.training.trainer import Scores, execute, make_trainer
from espformer.nn import ESP, set_sort_temperature
from espformer.nn import harden as harden_model

CHECKPOINTS = ("last", "best", "hard")
_SOFT = "take a soft checkpoint, such as --checkpoint last"


def open_checkpoint(path: Path, which: str = "last") -> tuple[TrainingRun, Path]:
    """Return the run that a directory or a checkpoint file belongs to, and the checkpoint."""
    file = checkpoint_file(path, which)
    if path.is_dir() and not file.exists():
        there = [name for name in CHECKPOINTS if checkpoint_file(path, name).exists()]
        hint = f"choose from {', '.join(there)}" if there else "no run was trained there"
        raise RunError(f"{path}: has no checkpoint '{which}', {hint}")
    said = read_checkpoint(file)[MARK]["run"]
    if said.get("task") == "finetuning":
        raise RunError(
            f"{file}: a fine-tuned model of transformers; its scores are in results.json beside "
            "it, espformer.lab.training.pretrained.load_classifier opens it, and espformer export "
            "writes it as a graph"
        )
    run = run_from_plain(said, str(file))
    if not isinstance(run, TrainingRun):
        raise RunError(f"{file}: a timing has no model to work with")
    return run, file


def evaluate(
    path: Path,
    *,
    which: str = "last",
    hard: bool = False,
    sort_temperature: float | None = None,
    data_directory: str | None = None,
    progress: bool | None = None,
) -> dict[str, Any]:
    """Score of a checkpoint on the test data, as it was saved or with another sort."""
    run, file = open_checkpoint(path, which)
    if (hard or sort_temperature is not None) and not has_sort_temperature(run.mechanism):
        raise RunError(f"{file}: {run.mechanism} has no sort to change")
    if hard and sort_temperature is not None:
        raise RunError("an exact sort has no temperature: give --hard or --sort-temperature")
    scores = _ready(run, file, data_directory, progress)
    model = scores.learner.model
    if sort_temperature is not None:
        if _is_hard(model):
            raise RunError(f"{file}: sorts exactly, a temperature would change nothing; {_SOFT}")
        try:
            set_sort_temperature(model, sort_temperature)
        except ValueError as error:
            raise RunError(str(error)) from None
    if hard:
        harden_model(model)
    scores.test("test")
    return {"checkpoint": str(file), "score": scores.learner.score, **scores.scores}


def anneal(
    path: Path,
    *,
    which: str = "last",
    epochs: int = 40,
    factor: float = 0.8,
    learning_rate: float | None = None,
    data_directory: str | None = None,
    progress: bool | None = None,
    tell: Listener | None = None,
) -> dict[str, Any]:
    """Fine-tune while the sort temperature falls, then evaluate soft and hard.

    The work is a run of its own in `anneal/` beside the checkpoint, which goes on when interrupted.
    """
    run, file = open_checkpoint(path, which)
    if not has_sort_temperature(run.mechanism):
        raise RunError(f"{file}: {run.mechanism} has no sort temperature to anneal")
    if epochs < 1:
        raise RunError(f"epochs must be at least 1, got {epochs}: t falls before each of them")
    run = _with_data(run, data_directory)
    try:
        optimizer = run.optimizer
        if learning_rate is not None:
            optimizer = dataclasses.replace(optimizer, learning_rate=learning_rate)
        annealed = dataclasses.replace(
            run,
            optimizer=optimizer,
            schedule=Schedule(),
            trainer=dataclasses.replace(
                run.trainer,
                epochs=epochs,
                cuda_graph=run.trainer.cuda_graph and torch.cuda.is_available(),
            ),
            annealing=Annealing(factor=factor),
            straight_through=None,
            start=Start(checkpoint=str(file.resolve())),
            harden=True,
        )
    except ValueError as error:
        raise RunError(str(error)) from None
    return execute(annealed, file.parent / "anneal", progress=progress, tell=tell)


def harden(
    path: Path,
    *,
    which: str = "last",
    data_directory: str | None = None,
    progress: bool | None = None,
) -> dict[str, Any]:
    """Evaluate a checkpoint soft and hard, and keep the hard one as `hard.ckpt`."""
    run, file = open_checkpoint(path, which)
    if not has_sort_temperature(run.mechanism):
        raise RunError(f"{file}: {run.mechanism} has no sort to harden")
    check_directory(file.parent, file.stat().st_size)
    with lock(file.parent / LOCK, wait=False):
        scores = _ready(run, file, data_directory, progress)
        if _is_hard(scores.learner.model):
            raise RunError(f"{file}: sorts exactly already; {_SOFT}")
        scores.test("soft")
        harden_model(scores.learner.model)
        scores.test("hard")
        target = file.parent / "hard.ckpt"
        scores.trainer.save_checkpoint(target, weights_only=True)
        results = {
            "checkpoint": str(file),
            "hard_checkpoint": str(target),
            "score": scores.learner.score,
            **scores.scores,
            **run_conditions(),
        }
        write_atomically(file.parent / "hard.json", json.dumps(results, indent=1) + "\n")
    return results


def _is_hard(model: nn.Module) -> bool:
    return any(isinstance(module, ESP) and module.hard for module in model.modules())


def restore(
    run: TrainingRun, file: Path, data_directory: str | None
) -> tuple[TrainingRun, Task, Learner]:
    """Return a run with its data, which may be elsewhere now, and the model of a checkpoint."""
    run = _with_data(run, data_directory)
    task = load_task(run)
    learner = make_learner(run, task)
    load_weights(learner.model, read_checkpoint(file)["state_dict"], str(file))
    return run, task, learner


def _with_data(run: TrainingRun, directory: str | None) -> TrainingRun:
    if directory is None:
        return run
    return dataclasses.replace(run, data=dataclasses.replace(run.data, directory=directory))


def _ready(
    run: TrainingRun, file: Path, data_directory: str | None, progress: bool | None
) -> Scores:
    """Return what scores the model of a checkpoint on the test data."""
    run, task, learner = restore(run, file, data_directory)
    return Scores(make_trainer(run, None, progress=progress), learner, TaskData(run, task))
