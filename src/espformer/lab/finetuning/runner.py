"""One fine-tuning run, from its description to `results.json`: new, continued or finished."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from safetensors.torch import load, save

from espformer.lab.data import Task
from espformer.lab.finetuning.config import FinetuneRun
from espformer.lab.finetuning.learner import AnnealByStep, FinetuneLearner
from espformer.lab.finetuning.model import head_for, load_tokenizer, make_model, weights_info
from espformer.lab.finetuning.texts import load_texts
from espformer.lab.training.assemble import TaskData
from espformer.lab.training.callbacks import Throughput
from espformer.lab.training.checkpoints import (
    AtomicCheckpointIO,
    Checkpoints,
    check_directory,
    read_checkpoint,
    write_atomically,
)
from espformer.lab.training.errors import RunError
from espformer.lab.training.learner import MARK
from espformer.lab.training.records import (
    check_same,
    conditions,
    device_name,
    differences,
    only_one,
    read_results,
)
from espformer.lab.training.runner import described, make_trainer, score_percent
from espformer.lab.training.strict import plain
from espformer.nn import get_sort_temperatures, harden, soften

__all__ = ["execute", "fit_shared_head", "head_file"]


def head_file(output: Path, run: FinetuneRun) -> Path:
    """Where the head lies that all runs of an experiment begin with."""
    return output / run.recipe / "head.safetensors"


def fit_shared_head(run: FinetuneRun, output: Path) -> Path:
    """Fit the head of an experiment with the original attention, unless it is there."""
    path = head_file(output, run)
    # What the head depends on; the files of the model may lie elsewhere tomorrow.
    said = {"data": run.data.set.plain(), "max_length": run.max_length, **weights_info(run.path)}
    said.pop("path", None)
    note = path.with_suffix(".json")
    if path.exists() and note.exists():
        if json.loads(note.read_text(encoding="utf-8")) != said:
            raise RunError(
                f"{path}: was fitted with another model, other data or another max_length; choose "
                "another --output, or move the directory away"
            )
        return path
    check_directory(path.parent)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    head = head_for(run, load_texts(run, load_tokenizer(run.path)), device)
    write_atomically(path, save({name: x.contiguous() for name, x in head.items()}))
    write_atomically(note, json.dumps(said, indent=1) + "\n")
    return path


def execute(
    run: FinetuneRun, directory: Path, head: Path, *, progress: bool | None = None
) -> dict[str, Any]:
    """Do what is left of a run and return its results.

    A finished run is not touched; one that was interrupted goes on from its last checkpoint.

    Args:
        run: the run.
        directory: where its files are.
        head: file of the fitted head.
        progress: show a progress bar; only on a terminal unless given.
    """
    check_directory(directory)
    with only_one(directory / ".lock"):
        finished = read_results(directory)
        check_same(run, directory)
        if finished is not None:
            return finished
        identity = {
            "recipe": run.recipe,
            "mechanism": run.label,
            "setting": run.setting,
            "seed": run.seed,
        }
        with described(run, directory):
            results = identity | _train(run, directory, head, progress)
            results |= {**conditions(), "config": plain(run)}
            write_atomically(directory / "results.json", json.dumps(results, indent=1) + "\n")
        _keep_weights_alone(directory)
    return results


def _keep_weights_alone(directory: Path) -> None:
    """A finished run needs no moments of the optimiser, two thirds of a checkpoint."""
    checkpoint = read_checkpoint(directory / "last.ckpt")
    checkpoint |= {"optimizer_states": [], "lr_schedulers": []}
    AtomicCheckpointIO().save_checkpoint(checkpoint, directory / "last.ckpt")
    (directory / "best.ckpt").unlink(missing_ok=True)


def _train(run: FinetuneRun, directory: Path, head: Path, progress: bool | None) -> dict[str, Any]:
    last = directory / "last.ckpt"
    position = _position(last, run) if last.exists() else (0, 0)
    task = load_texts(run, load_tokenizer(run.path))
    learner = _learner(run, task, head)
    data = TaskData(run, task, position)
    trainer = make_trainer(run, directory, progress=progress)
    learner.lines = trainer.progress_bar_callback is None
    if run.anneal_to is not None:
        _callbacks(trainer).append(AnnealByStep(_temperature(learner), run.anneal_to))
    scores, recalls = _start(trainer, learner, data, directory)
    began = time.perf_counter()
    try:
        trainer.fit(
            learner,
            datamodule=data,
            ckpt_path=last if last.exists() else None,
            weights_only=True,
        )
    except SystemExit:
        raise RunError("stopped; the same command goes on from the last checkpoint") from None
    except torch.OutOfMemoryError as error:
        raise RunError(
            "the device ran out of memory: try a smaller --batch-size, fewer --jobs, or "
            "--precision bf16-mixed"
        ) from error
    seconds = time.perf_counter() - began
    before = next(c for c in _callbacks(trainer) if isinstance(c, Checkpoints)).seconds_before
    weights = weights_info(run.path)
    if weights.get("stored_in", ["F32"]) != ["F32"]:
        stored = " and ".join(weights["stored_in"])
        task.info["differences"].append(f"the model's weights were stored in {stored}")
    if "valid/accuracy" not in trainer.callback_metrics:  # stopped after the last epoch
        trainer.validate(learner, datamodule=data, verbose=False)
    scores["valid"] = 100 * float(trainer.callback_metrics["valid/accuracy"])
    _score("test", trainer, learner, data, scores, recalls)
    if run.harden:
        harden(learner.model)
        _score("hard", trainer, learner, data, scores, recalls)
        trainer.save_checkpoint(directory / "hard.ckpt", weights_only=True)
    rate = next(c for c in _callbacks(trainer) if isinstance(c, Throughput)).samples_per_second
    return {
        "score": learner.score,
        "scores": scores,
        "macro_recall": recalls,
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "seconds": seconds + (before or 0.0),
        "seconds_before": before,
        "continued": position != (0, 0),
        "samples_per_second": rate,
        "parameters": sum(p.numel() for p in learner.model.parameters()),
        "weights": weights,
        "data": task.info,
        "device": device_name(trainer.strategy.root_device),
        "devices": trainer.world_size,
    }


def _learner(run: FinetuneRun, task: Task, head: Path) -> FinetuneLearner:
    if not head.is_file():
        raise RunError(f"{head}: the head is not there; espformer finetune fits it first")
    torch.manual_seed(run.seed)
    assert task.classes is not None
    return FinetuneLearner(run, make_model(run, task.classes, load(head.read_bytes())))


def _position(last: Path, run: FinetuneRun) -> tuple[int, int]:
    """Where the run of a checkpoint stood; refuses one of another run."""
    said = read_checkpoint(last)[MARK]
    changed = differences(plain(run), said["run"])
    if changed:
        raise RunError(f"{last}: belongs to another run: {changed}. Nothing was changed")
    return said["position"]["epoch"], said["position"]["batch"]


def _start(
    trainer: Trainer, learner: FinetuneLearner, data: TaskData, directory: Path
) -> tuple[dict[str, float], dict[str, float]]:
    """The scores before training, soft and hard: measured once and kept for a run that goes on."""
    path = directory / "start.json"
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        return kept["scores"], kept["macro_recall"]
    scores: dict[str, float] = {}
    recalls: dict[str, float] = {}
    _score("start", trainer, learner, data, scores, recalls)
    if learner.run.harden:
        harden(learner.model)
        _score("start_hard", trainer, learner, data, scores, recalls)
        soften(learner.model)
    write_atomically(path, json.dumps({"scores": scores, "macro_recall": recalls}) + "\n")
    return scores, recalls


def _score(
    name: str,
    trainer: Trainer,
    learner: FinetuneLearner,
    data: TaskData,
    scores: dict[str, float],
    recalls: dict[str, float],
) -> None:
    found = trainer.test(learner, datamodule=data, verbose=False)
    scores[name] = score_percent(found, learner)
    recalls[name] = 100 * float(found[0]["test/recall"])


def _temperature(learner: FinetuneLearner) -> float:
    """The sort temperature that the mechanisms begin with."""
    first = next(iter(get_sort_temperatures(learner.model).values()))
    return first[0] if isinstance(first, list) else first


def _callbacks(trainer: Trainer) -> list[Any]:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks
