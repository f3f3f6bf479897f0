"""How long runs will take: a few steps measured here and now, times the number of steps."""

import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from espformer.lab.data import Task
from espformer.lab.training.assemble import load_task, make_learner
from espformer.lab.training.config import Run, TrainingRun
from espformer.lab.training.errors import UserError
from espformer.lab.training.learner import Learner
from espformer.lab.training.optimisers import make_optimizer

__all__ = ["Estimate", "Estimator", "words"]

# A forward without its backward, as a part of a training step.
_EVALUATION = 1 / 3
_PATIENCE_SECONDS = 1.0


@dataclass(frozen=True)
class Estimate:
    """Seconds of a run, or the reason why nothing can be said."""

    seconds: float | None
    steps: int | None
    reason: str = ""


def words(seconds: float) -> str:
    """A length of time as people say it.

    Example:
        >>> words(42), words(5400), words(200_000)
        ('42 s', '1.5 h', '2.3 days')
    """
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * length or (unit == "h" and seconds >= length):
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


class Estimator:
    """Estimates runs; what two runs share (data, the time of a step) is looked at once."""

    def __init__(self) -> None:
        self._tasks: dict[str, Task | str] = {}
        self._rates: dict[str, float | str] = {}

    def __call__(self, run: Run) -> Estimate:
        if not isinstance(run, TrainingRun):
            return Estimate(2.0, None)
        task = self._task(run)
        if isinstance(task, str):
            return Estimate(None, None, task)
        batches = _batches(run, task)
        steps = math.ceil(batches / run.trainer.accumulate) * run.trainer.epochs
        key = f"{run.model}{run.mechanism}{run.trainer.precision}{run.trainer.accelerator}"
        if key not in self._rates:
            self._rates[key] = _seconds_per_example(run, task)
        rate = self._rates[key]
        if isinstance(rate, str):
            return Estimate(None, steps, rate)
        split: Any = task.test if task.valid is None else task.valid
        examples = _examples(run, task) * run.trainer.epochs
        evaluations = math.ceil(run.trainer.epochs / run.trainer.validate_every) + 2
        work = examples + _EVALUATION * evaluations * len(split)
        return Estimate(work * rate / run.trainer.devices, steps)

    def _task(self, run: TrainingRun) -> Task | str:
        key = f"{run.data.set}{run.data.directory}"
        if key not in self._tasks:
            try:
                self._tasks[key] = load_task(run)
            except UserError as error:
                self._tasks[key] = str(error)
        return self._tasks[key]


def _examples(run: TrainingRun, task: Task) -> int:
    whole: Any = task.train
    limit = run.trainer.limit_batches
    return len(whole) if limit is None else min(len(whole), limit * run.data.batch_size)


def _batches(run: TrainingRun, task: Task) -> int:
    split: Any = task.train
    if run.data.max_tokens is not None and hasattr(split, "source_lengths"):
        lengths = torch.maximum(split.source_lengths, split.target_lengths)
        whole = math.ceil(int(lengths.sum()) / run.data.max_tokens)
    else:
        whole = math.ceil(len(split) / run.data.batch_size)
    return whole if run.trainer.limit_batches is None else min(whole, run.trainer.limit_batches)


def _seconds_per_example(run: TrainingRun, task: Task) -> float | str:
    """Time of a training step per example, from a few examples: fewer where one takes long."""
    use_gpu = run.trainer.accelerator != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if use_gpu else "cpu")
    learner = make_learner(run, task).to(device)
    optimizer = make_optimizer(learner.model, run.optimizer)
    half = "bf16" in run.trainer.precision or run.trainer.precision.startswith("16")
    most = min(run.data.batch_size, 64)
    count, rate = 1, 0.0
    try:
        while count <= most:
            for _ in range(2 if use_gpu else 1):  # the first step of a size also prepares
                began = time.perf_counter()
                with torch.autocast(device.type, torch.bfloat16, enabled=half):
                    loss = _loss(learner, _batch(task, count, device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if use_gpu:
                    torch.cuda.synchronize()
                rate = (time.perf_counter() - began) / count
            if rate * count > _PATIENCE_SECONDS:
                break
            count *= 2
    except torch.OutOfMemoryError:
        return "this device has too little memory for a batch"
    return rate


def _batch(task: Task, count: int, device: torch.device) -> dict[str, torch.Tensor]:
    examples: Any = task.train
    return {name: value.to(device) for name, value in examples.batch(range(count)).items()}


def _loss(learner: Learner, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    model = learner.model
    if "source" in batch:
        logits = model(batch["source"], batch["target"][:, :-1], source_mask=batch["source_mask"])
    else:
        inputs = learner.prepare(batch["inputs"], training=True)
        logits = model(inputs, mask=batch.get("mask"))
    total: torch.Tensor = logits.float().logsumexp(-1).mean()
    return total
