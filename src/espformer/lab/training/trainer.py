"""One run, from its configuration to `results.json`: starts it, resumes it, or returns its
results.
"""

import contextlib
import dataclasses
import importlib.util
import json
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, RichProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from espformer.lab.clock import Stopwatch
from espformer.lab.data import Task
from espformer.lab.errors import RunError
from espformer.lab.files import LOCK, lock, new_directory, write_atomically
from espformer.lab.machine import device_name, run_conditions
from espformer.lab.recipes.build import has_sort_temperature
from espformer.lab.recipes.recipe import load_recipe
from espformer.lab.recipes.schema import FinetuneRun, Run, Schedule, TimingRun, TrainingRun
from espformer.lab.recipes.schema import Trainer as TrainerConfig
from espformer.lab.recipes.yaml_schema import plain
from espformer.lab.training import cuda_graphs
from espformer.lab.training.annealing import AnnealTemperature, StraightThroughShare
from espformer.lab.training.assemble import TaskData, load_task, load_weights, make_learner
from espformer.lab.training.attention import AttentionStatistics
from espformer.lab.training.checkpoints import AtomicCheckpointIO, Checkpoints, read_checkpoint
from espformer.lab.training.events import Listener, ReportProgress, listener
from espformer.lab.training.learner import LOG_EVERY, MARK, Learner
from espformer.lab.training.run_directory import (
    check_same,
    differences,
    identity,
    is_begun,
    is_first_process,
    read_results,
    run_directory,
)
from espformer.lab.training.timing import (
    Throughput,
    compare_with_softmax,
    in_this_thread,
    throughput_line,
    time_mechanism,
)
from espformer.nn import ESP, harden, soften

T = TypeVar("T")


def execute(
    run: Run,
    directory: Path,
    *,
    output: Path | None = None,
    progress: bool | None = None,
    tell: Listener | None = None,
) -> dict[str, Any]:
    """Do what is left of a run and return its results.

    A finished run is not touched; one that was interrupted goes on from its last checkpoint.

    Args:
        run: the run.
        directory: where its files are.
        output: where the runs of other recipes are, for one that starts from another.
        progress: show a progress bar; only on a terminal unless given.
        tell: called with every event of the training.
    """
    first = is_first_process()
    with contextlib.ExitStack() as held:
        if first:
            held.enter_context(new_directory(directory))
            held.enter_context(lock(directory / LOCK, wait=False))
        finished = read_results(directory)
        check_same(run, directory)
        if finished is not None:
            return finished
        with described(run, directory) if first else contextlib.nullcontext():
            if isinstance(run, TimingRun):
                results = time_mechanism(run)
            else:
                assert isinstance(run, TrainingRun)
                results = _train(run, directory, output, progress, tell)
            results = {**identity(run), **results, **run_conditions(), "config": plain(run)}
            if first:
                write_atomically(directory / "results.json", json.dumps(results, indent=1) + "\n")
        if first and isinstance(run, FinetuneRun):
            _keep_weights_alone(directory)
    return results


def _keep_weights_alone(directory: Path) -> None:
    """Drop the moments of the optimiser, two thirds of a checkpoint, from a finished run."""
    checkpoint = read_checkpoint(directory / "last.ckpt")
    checkpoint |= {"optimizer_states": [], "lr_schedulers": []}
    AtomicCheckpointIO().save_checkpoint(checkpoint, directory / "last.ckpt")
    (directory / "best.ckpt").unlink(missing_ok=True)


@contextlib.contextmanager
def described(run: Run, directory: Path) -> Iterator[None]:
    """Write `config.yaml`; remove it if the run fails before its first checkpoint."""
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
    run: TrainingRun,
    directory: Path,
    output: Path | None,
    progress: bool | None,
    tell: Listener | None,
) -> dict[str, Any]:
    if run.trainer.cuda_graph:
        cuda_graphs.check_possible(run)
    last = directory / "last.ckpt"
    # Read before anything is built: a checkpoint that cannot be used stops the run here.
    position = _position(last, run) if last.exists() else None
    # hard.ckpt and anneal/ belong to the older checkpoint and become stale.
    if is_first_process():
        for name in ("hard.ckpt", "hard.json"):
            (directory / name).unlink(missing_ok=True)
        if (directory / "anneal").is_dir():
            former = len(list(directory.glob("anneal-before-*")))
            (directory / "anneal").rename(directory / f"anneal-before-{former}")
    task = load_task(run)
    learner = make_learner(run, task)
    output = output or directory.parents[3]
    learner.begin(output, task, fresh=position is None)
    if position is None and run.start is not None:
        _begin_with(run, learner, output)
    trainer = make_trainer(
        run, directory, progress=progress, callbacks=learner.callbacks(), tell=tell
    )
    data = TaskData(run, task, position or (0, 0), least=_least_examples(learner.model))
    scores = Scores(trainer, learner, data)
    scores.before_training(directory / "start.json", fresh=position is None)
    watch = Stopwatch()
    _fit(trainer, learner, scores.data, None if position is None else last)
    seconds = watch.seconds
    keeper = _callback(trainer, Checkpoints)
    if not learner.keeps_best or task.valid is not None:
        scores.validation()
    scores.test("test")
    if run.harden:
        harden(learner.model)
        scores.test("hard")
        trainer.save_checkpoint(directory / "hard.ckpt", weights_only=True)
    best: dict[str, Any] = {}
    if learner.keeps_best:
        if keeper.best is not None and (directory / "best.ckpt").exists():
            scores.test("best", directory / "best.ckpt")
        best = {
            "best_epoch": keeper.best_epoch,
            "best_chosen_on": "test" if task.valid is None else "valid",
            "throughput": _compare_throughput(run, task, trainer),
        }
    return {
        "score": learner.score,
        "scores": scores.scores,
        **best,
        **learner.about(scores.recalls),
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "seconds": seconds + (keeper.seconds_before or 0.0),
        "seconds_before": keeper.seconds_before,
        "continued": position is not None,
        "samples_per_second": _callback(trainer, Throughput).samples_per_second,
        "parameters": sum(p.numel() for p in learner.model.parameters()),
        "data": task.info,
        "device": device_name(trainer.strategy.root_device),
        "devices": trainer.world_size,
    }


def _least_examples(model: nn.Module) -> int:
    """The least size of a batch: one example has no variance to normalise by."""
    return 1 + any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()
    )


def _fit(trainer: Trainer, learner: Learner, data: TaskData, checkpoint: Path | None) -> None:
    try:
        with in_this_thread():
            trainer.fit(learner, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    except SystemExit:
        raise RunError("stopped; the same command goes on from the last checkpoint") from None
    except torch.OutOfMemoryError as error:
        advice = learner.run.memory_advice
        raise RunError(f"the device ran out of memory: try {advice}") from error


class Scores:
    """Measures scores on the test data and keeps them by name, with macro recalls if there are."""

    def __init__(self, trainer: Trainer, learner: Learner, data: TaskData) -> None:
        self.trainer, self.learner, self.data = trainer, learner, data
        self.scores: dict[str, float] = {}
        self.recalls: dict[str, float] = {}

    def test(self, name: str, checkpoint: Path | None = None) -> None:
        found = self.trainer.test(
            self.learner, datamodule=self.data, verbose=False, ckpt_path=checkpoint,
            weights_only=True,
        )  # fmt: skip
        self.scores[name] = self._percent(found[0], "test")
        if "test/recall" in found[0]:
            self.recalls[name] = 100 * float(found[0]["test/recall"])

    def validation(self) -> None:
        """Keep the score of the last epoch's validation, unless the run is too short for one."""
        settings = self.learner.run.trainer
        if settings.validate_every > max(1, settings.epochs):
            return
        if f"valid/{self.learner.score}" not in self.trainer.callback_metrics:
            # Stopped after the last epoch.
            self.trainer.validate(self.learner, datamodule=self.data, verbose=False)
        self.scores["valid"] = self._percent(self.trainer.callback_metrics, "valid")

    def before_training(self, path: Path, *, fresh: bool) -> None:
        """Score the first weights: measured once, and kept in a file for a run that goes on."""
        names = self.learner.run.scores_before
        if not names:
            return
        if not fresh and path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            # Some files have the score of the start alone.
            self.scores |= kept["scores"] if "scores" in kept else {"start": kept["score"]}
            self.recalls |= kept.get("macro_recall", {})
            return
        for name in names:
            hard = name.endswith("_hard")
            if hard:
                harden(self.learner.model)
            self.test(name)
            if hard:
                soften(self.learner.model)
        if self.trainer.is_global_zero:
            kept = {"scores": self.scores, "macro_recall": self.recalls}
            write_atomically(path, json.dumps(kept) + "\n")

    def _percent(self, metrics: Mapping[str, Any], stage: str) -> float:
        """Return the score of an evaluation in percent (BLEU is one already)."""
        value = float(metrics[f"{stage}/{self.learner.score}"])
        return 100 * value if self.learner.score == "accuracy" else value


def _compare_throughput(run: TrainingRun, task: Task, trainer: Trainer) -> dict[str, Any] | None:
    """Time training steps beside softmax's, where the run asks for it and has a sort."""
    wanted = run.trainer.compare_throughput and run.task == "classification"
    if not wanted or not has_sort_temperature(run.mechanism) or trainer.world_size > 1:
        return None
    measured = compare_with_softmax(run, task, trainer.strategy.root_device)
    print(throughput_line(measured))
    return measured


def make_trainer(
    run: TrainingRun,
    directory: Path | None,
    *,
    progress: bool | None = None,
    callbacks: Sequence[Callback] = (),
    tell: Listener | None = None,
) -> Trainer:
    """Make the Lightning trainer of a run; without a directory it writes nothing.

    Args:
        run: the run.
        directory: where its files go.
        progress: show a progress bar; only on a terminal unless given.
        callbacks: those of the task, beside the ones of every training.
        tell: called with every event, see :mod:`espformer.lab.training.events`.
    """
    _quiet()
    config = run.trainer
    progress = sys.stderr.isatty() if progress is None else progress
    # Drawing after each step would take longer than the steps of a small model.
    every: list[Callback] = [RichProgressBar(20, leave=False)] if progress else []
    loggers: list[Any] = []
    if directory is not None:
        score = "valid/bleu" if run.task == "translation" else "valid/accuracy"
        every += [ReportProgress(score, tell or listener(), lines=not progress)]
        every += [*_training_callbacks(run, directory, score), *callbacks]
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
            callbacks=every,
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
    from espformer.lab.training.fsdp import ShardedStrategy

    return ShardedStrategy(config.devices)


def _training_callbacks(run: TrainingRun, directory: Path, score: str) -> list[Callback]:
    callbacks: list[Callback] = [
        Throughput(),
        LearningRateMonitor("epoch"),
        Checkpoints(directory, run.trainer.checkpoint_minutes, score),
    ]
    if run.annealing is not None:
        callbacks.append(AnnealTemperature(run.annealing))
    if run.straight_through is not None:
        callbacks.append(StraightThroughShare(run.straight_through, run.trainer.epochs))
    if run.trainer.attention_statistics:
        callbacks.append(AttentionStatistics())
    return callbacks


def _position(last: Path, run: TrainingRun) -> tuple[int, int]:
    """Read the position in a checkpoint of this run; refuse one of another run."""
    said = read_checkpoint(last)[MARK]
    changed = differences(plain(run), said["run"])
    if changed:
        raise RunError(f"{last}: belongs to another run: {changed}. Nothing was changed")
    return said["position"]["epoch"], said["position"]["batch"]


def _begin_with(run: TrainingRun, learner: Learner, output: Path) -> None:
    """Fill the model with the weights that the run starts from."""
    assert run.start is not None
    if run.start.checkpoint is not None:
        path = Path(run.start.checkpoint)
    else:
        before = start_run(run)
        path = run_directory(output, before) / "last.ckpt"
        if read_results(path.parent) is None:
            raise RunError(
                f"this run starts from another one that is not finished: {path.parent}. Do it "
                f"first: espformer train {before.recipe} --mechanism {before.label} "
                f"--setting '{before.setting}' --seed {before.seed}"
            )
    checkpoint = read_checkpoint(path)
    sorts = [module for module in learner.model.modules() if isinstance(module, ESP)]
    asked = [module.options for module in sorts]
    load_weights(learner.model, checkpoint["state_dict"], str(path))
    described = checkpoint[MARK]["run"]
    # Annealing goes on from where annealing has led to, unless the recipe asks for something else.
    go_on = run.annealing is not None and described["mechanism"] == plain(run.mechanism)
    for module, options in zip(sorts, asked, strict=True):
        module.options = dataclasses.replace(module.options, hard=False) if go_on else options
    if run.schedule.continues:
        learner.continued = _continued(run, described, checkpoint["global_step"], path)


def _continued(run: TrainingRun, before: dict[str, Any], steps: int, path: Path) -> Schedule:
    """The schedule of the run that this one starts from, at the step where that one stopped."""
    schedule = before.get("schedule", {})
    if schedule.get("name") != run.schedule.name:
        raise RunError(
            f"{path}: was trained with the schedule '{schedule.get('name')}', and this run cannot "
            f"continue it with '{run.schedule.name}'; give schedule.continues=false"
        )
    first = schedule.get("first_step", 0) + steps
    warmup = schedule["warmup_steps"]
    return dataclasses.replace(run.schedule, first_step=first, warmup_steps=warmup)


def start_run(run: TrainingRun, overrides: Sequence[str] = ()) -> Run:
    """The run of another recipe that this one starts from: same seed and, if it has it, setting."""
    assert run.start is not None
    assert run.start.recipe is not None
    recipe = load_recipe(run.start.recipe)
    setting = run.setting if run.setting in recipe.grid.settings else None
    return recipe.run(run.start.mechanism or run.label, setting, run.seed, overrides)


def _callback(trainer: Trainer, kind: type[T]) -> T:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next(callback for callback in callbacks if isinstance(callback, kind))


def _quiet() -> None:
    """Silences Lightning's messages that do not apply here."""
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
