"""One run, from its description to `results.json`: started, continued, or found finished."""

import contextlib
import importlib.util
import json
import logging
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, RichProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from espformer.lab.training import graphs
from espformer.lab.training.assemble import TaskData, load_task, load_weights, make_learner
from espformer.lab.training.callbacks import (
    AnnealTemperature,
    AttentionStatistics,
    StraightThroughShare,
    Throughput,
)
from espformer.lab.training.checkpoints import (
    AtomicCheckpointIO,
    Checkpoints,
    check_directory,
    read_checkpoint,
    write_atomically,
)
from espformer.lab.training.config import Run, TimingRun, TrainingRun
from espformer.lab.training.config import Trainer as TrainerConfig
from espformer.lab.training.errors import RunError
from espformer.lab.training.learner import LOG_EVERY, MARK, Learner
from espformer.lab.training.recipe import load_recipe
from espformer.lab.training.records import (
    check_same,
    conditions,
    device_name,
    differences,
    is_begun,
    is_first_process,
    only_one,
    read_results,
    run_directory,
)
from espformer.lab.training.specs import mechanism_uses_esp
from espformer.lab.training.strict import plain
from espformer.lab.training.throughput import beside_softmax, in_words
from espformer.nn import harden, soften

__all__ = ["described", "execute", "make_trainer", "score_percent"]

T = TypeVar("T")


def execute(
    run: Run, directory: Path, *, output: Path | None = None, progress: bool | None = None
) -> dict[str, Any]:
    """Do what is left of a run and return its results.

    A finished run is not touched; one that was interrupted goes on from its last checkpoint.

    Args:
        run: the run.
        directory: where its files are.
        output: where the runs of other recipes are, for one that starts from another.
        progress: show a progress bar; only on a terminal unless given.
    """
    first = is_first_process()
    if first:
        check_directory(directory)
    with only_one(directory / ".lock") if first else contextlib.nullcontext():
        finished = read_results(directory)
        check_same(run, directory)
        if finished is not None:
            return finished
        with described(run, directory) if first else contextlib.nullcontext():
            if isinstance(run, TimingRun):
                from espformer.lab.training.timing import time_mechanism

                results = time_mechanism(run)
            else:
                assert isinstance(run, TrainingRun)
                results = _train(run, directory, output, progress)
            results = {**_identity(run), **results, **conditions(), "config": plain(run)}
            if first:
                write_atomically(directory / "results.json", json.dumps(results, indent=1) + "\n")
    return results


@contextlib.contextmanager
def described(run: Run, directory: Path) -> Iterator[None]:
    """Keep `config.yaml` in the directory of a run, for whose work it speaks.

    A run that fails before its first checkpoint leaves the directory free for other settings.
    """
    if not is_begun(directory):
        _forget(directory)
    text = yaml.safe_dump(plain(run), sort_keys=False, allow_unicode=True)
    write_atomically(directory / "config.yaml", text)
    try:
        yield
    finally:
        if not is_begun(directory):
            _forget(directory)


def _forget(directory: Path) -> None:
    for name in ("config.yaml", "start.json"):
        (directory / name).unlink(missing_ok=True)


def _train(
    run: TrainingRun, directory: Path, output: Path | None, progress: bool | None
) -> dict[str, Any]:
    if run.trainer.cuda_graph:
        graphs.check_possible(run)
    last = directory / "last.ckpt"
    # Read before anything is built: a checkpoint that cannot be used stops the run here.
    position = _position(last, run) if last.exists() else None
    if is_first_process():  # hardened out of an interrupted run, which now changes
        for name in ("hard.ckpt", "hard.json"):
            (directory / name).unlink(missing_ok=True)
    task = load_task(run)
    learner = make_learner(run, task)
    if position is None and run.start is not None:
        _begin_with(run, learner, directory, output)
    data = TaskData(run, task, position or (0, 0))
    trainer = make_trainer(run, directory, progress=progress)
    learner.lines = trainer.progress_bar_callback is None
    scores: dict[str, float] = {}
    if run.start is not None:
        scores["start"] = _start_score(trainer, learner, data, directory, position is None)
    began = time.perf_counter()
    try:
        trainer.fit(
            learner,
            datamodule=data,
            ckpt_path=None if position is None else last,
            weights_only=True,
        )
    except SystemExit:
        raise RunError("stopped; the same command goes on from the last checkpoint") from None
    except torch.OutOfMemoryError as error:
        raise RunError(
            "the device ran out of memory: try a smaller data.batch_size (half of it with "
            "trainer.accumulate=2 is the same step), or trainer.precision=bf16-mixed"
        ) from error
    seconds = time.perf_counter() - began
    keeper = _callback(trainer, Checkpoints)
    before = keeper.seconds_before
    scores["test"] = score_percent(trainer.test(learner, datamodule=data, verbose=False), learner)
    if run.harden:
        harden(learner.model)
        hard = trainer.test(learner, datamodule=data, verbose=False)
        scores["hard"] = score_percent(hard, learner)
        trainer.save_checkpoint(directory / "hard.ckpt", weights_only=True)
    if keeper.best is not None and (directory / "best.ckpt").exists():
        best = trainer.test(
            learner, datamodule=data, verbose=False, ckpt_path=directory / "best.ckpt",
            weights_only=True,
        )  # fmt: skip
        scores["best"] = score_percent(best, learner)
    rate = _callback(trainer, Throughput).samples_per_second
    compared = None
    if _compares(run) and trainer.world_size == 1:
        compared = beside_softmax(run, task, trainer.strategy.root_device)
        print(in_words(compared))
    return {
        "score": learner.score,
        "scores": scores,
        "best_epoch": keeper.best_epoch,
        "best_chosen_on": "test" if task.valid is None else "valid",
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "seconds": seconds + (before or 0.0),
        "seconds_before": before,
        "continued": position is not None,
        "samples_per_second": rate,
        "throughput": compared,
        "parameters": sum(p.numel() for p in learner.model.parameters()),
        "data": task.info,
        "device": device_name(trainer.strategy.root_device),
        "devices": trainer.world_size,
    }


def _compares(run: TrainingRun) -> bool:
    wanted = run.trainer.compare_throughput and run.task == "classification"
    return wanted and mechanism_uses_esp(run.mechanism)


def make_trainer(
    run: TrainingRun,
    directory: Path | None,
    *,
    progress: bool | None = None,
    evaluation: bool = False,
) -> Trainer:
    """The Lightning trainer of a run; without a directory, or for evaluation, it writes nothing."""
    _quiet()
    config = run.trainer
    progress = sys.stderr.isatty() if progress is None else progress
    # Drawing after each step would take longer than the steps of a small model.
    callbacks: list[Callback] = [RichProgressBar(20, leave=False)] if progress else []
    loggers: list[Any] = []
    if directory is not None and not evaluation:
        callbacks += _training_callbacks(run, directory)
        # One folder per attempt: a logger begins its file anew, and the former one is worth having.
        attempt = f"attempt-{len(list((directory / 'logs').glob('attempt-*')))}"
        loggers.append(
            CSVLogger(directory, name="logs", version=attempt, flush_logs_every_n_steps=1)
        )
        if importlib.util.find_spec("tensorboard") or importlib.util.find_spec("tensorboardX"):
            loggers.append(TensorBoardLogger(directory, name="logs", version=attempt))
    try:
        return Trainer(
            accelerator=config.accelerator,
            devices=config.devices,
            strategy=_strategy(config),
            precision=config.precision,
            max_epochs=config.epochs,
            deterministic=config.deterministic,
            accumulate_grad_batches=config.accumulate,
            gradient_clip_val=run.optimizer.clip_norm,
            check_val_every_n_epoch=config.validate_every,
            limit_train_batches=config.limit_batches,
            limit_val_batches=config.limit_eval_batches,
            limit_test_batches=config.limit_eval_batches,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            sync_batchnorm=config.devices > 1 and torch.cuda.is_available(),
            enable_progress_bar=progress,
            enable_model_summary=False,
            enable_checkpointing=bool(loggers),
            logger=loggers,
            log_every_n_steps=LOG_EVERY,
            callbacks=callbacks,
            plugins=[AtomicCheckpointIO()],
            default_root_dir=directory,
        )
    except MisconfigurationException as error:
        raise RunError(
            f"trainer.accelerator={config.accelerator}, trainer.devices={config.devices}: not "
            f"possible on this machine: {error}"
        ) from None


def _strategy(config: TrainerConfig) -> Any:
    if config.strategy != "fsdp":
        return config.strategy
    from espformer.lab.training.sharding import ShardedStrategy

    return ShardedStrategy(config.devices)


def _training_callbacks(run: TrainingRun, directory: Path) -> list[Callback]:
    score = "bleu" if run.task == "translation" else "accuracy"
    minutes = run.trainer.checkpoint_minutes
    callbacks: list[Callback] = [
        Throughput(),
        LearningRateMonitor("epoch"),
        Checkpoints(directory, minutes, f"valid/{score}"),
    ]
    if run.annealing is not None:
        callbacks.append(AnnealTemperature(run.annealing))
    if run.straight_through is not None:
        callbacks.append(StraightThroughShare(run.straight_through, run.trainer.epochs))
    if run.trainer.attention_statistics:
        callbacks.append(AttentionStatistics())
    return callbacks


def score_percent(metrics: Any, learner: Learner) -> float:
    """The score of an evaluation in percent (BLEU is one already)."""
    value = float(metrics[0][f"test/{learner.score}"])
    return 100 * value if learner.score == "accuracy" else value


def _position(last: Path, run: TrainingRun) -> tuple[int, int]:
    """Where the run of a checkpoint stood; refuses one of another run."""
    said = read_checkpoint(last)[MARK]
    changed = differences(plain(run), said["run"])
    if changed:
        raise RunError(f"{last}: belongs to another run: {changed}. Nothing was changed")
    return said["position"]["epoch"], said["position"]["batch"]


def _begin_with(run: TrainingRun, learner: Learner, directory: Path, output: Path | None) -> None:
    """Fill the model with the weights that the run starts from."""
    assert run.start is not None
    if run.start.checkpoint is not None:
        path = Path(run.start.checkpoint)
    else:
        before = start_run(run)
        path = run_directory(output or directory.parents[3], before) / "last.ckpt"
        if read_results(path.parent) is None:
            raise RunError(
                f"this run starts from another one that is not finished: {path.parent}. Do it "
                f"first: espformer train {before.recipe} --mechanism {before.label} "
                f"--setting '{before.setting}' --seed {before.seed}"
            )
    load_weights(learner.model, read_checkpoint(path)["state_dict"], str(path))
    with contextlib.suppress(ValueError):  # no ESP mechanism inside
        soften(learner.model)


def start_run(run: TrainingRun, overrides: Sequence[str] = ()) -> Run:
    """The run of another recipe that this one starts from: same seed and, if it has it, setting."""
    assert run.start is not None
    assert run.start.recipe is not None
    recipe = load_recipe(run.start.recipe)
    setting = run.setting if run.setting in recipe.grid.settings else None
    return recipe.run(run.start.mechanism or run.label, setting, run.seed, overrides)


def _start_score(
    trainer: Trainer, learner: Learner, data: TaskData, directory: Path, fresh: bool
) -> float:
    """Score before training, measured once and kept for a run that goes on."""
    path = directory / "start.json"
    if not fresh and path.exists():
        return float(json.loads(path.read_text(encoding="utf-8"))["score"])
    score = score_percent(trainer.test(learner, datamodule=data, verbose=False), learner)
    if trainer.is_global_zero:
        write_atomically(path, json.dumps({"score": score}) + "\n")
    return score


def _callback(trainer: Trainer, kind: type[T]) -> T:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next(callback for callback in callbacks if isinstance(callback, kind))


def _identity(run: Run) -> dict[str, Any]:
    return {
        "recipe": run.recipe,
        "mechanism": run.label,
        "setting": run.setting,
        "seed": run.seed,
    }


def _quiet() -> None:
    """Lightning's greetings and advice for other people's loops."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for message in (
        ".*does not have many workers.*",
        ".*smaller than the logging interval.*",
        ".*Checkpoint directory .* exists and is not empty.*",
        ".*when logging on epoch level in distributed setting.*",
        ".*LeafSpec.* is deprecated.*",
        ".*You are running the .* without a `val_dataloader`.*",
    ):
        warnings.filterwarnings("ignore", message)
