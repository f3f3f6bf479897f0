"""Timing: one attention layer, a training step compared with softmax, and estimates for whole
runs.
"""

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from espformer.lab.clock import Stopwatch, interleaved_seconds, seconds_per_call
from espformer.lab.data import Batch, Task
from espformer.lab.errors import RunError, UserError
from espformer.lab.machine import device_name, pick_device
from espformer.lab.recipes.build import build_mechanism
from espformer.lab.recipes.schema import Run, TimingRun, TrainingRun
from espformer.lab.recipes.yaml_schema import Spec, plain
from espformer.lab.training import cuda_graphs
from espformer.lab.training.assemble import TaskData, load_task, make_learner
from espformer.lab.training.attention import attention_statistics
from espformer.nn import Attention

ROUNDS = 5
SECONDS_OF_A_ROUND = 0.2
# A forward without its backward, as a part of a training step.
_EVALUATION = 1 / 3
_PATIENCE_SECONDS = 0.5
_DTYPES = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "64-true": torch.float64}


def time_mechanism(run: TimingRun) -> dict[str, Any]:
    """Time an attention layer in self-attention, the paper's wall-clock comparison.

    The error of the row and column sums is reported with the milliseconds, so that a fast but wrong
    layer is noticed.
    """
    torch.manual_seed(run.seed)
    if run.accelerator == "gpu" and not torch.cuda.is_available():
        raise RunError(
            "accelerator=gpu: there is no GPU here; accelerator=auto takes what there is"
        )
    device = pick_device(run.accelerator)
    layer = Attention(run.dim, run.heads, build_mechanism(run.mechanism))
    layer = layer.to(device, _DTYPES[run.precision])
    shape = (run.batch_size, run.tokens, run.dim)
    x = torch.randn(shape, device=device, dtype=_DTYPES[run.precision])

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    def both() -> None:
        layer.zero_grad()
        layer(x).sum().backward()

    call = both if run.backward else forward
    for _ in range(3):
        call()
    times = [1000 * seconds_per_call(call, device) for _ in range(run.repeats)]
    with torch.no_grad():
        _, matrix = layer(x[:1], return_matrix=True)
    return {
        "score": "milliseconds",
        "scores": {"mean": statistics.fmean(times), "median": statistics.median(times)},
        "best": min(times),
        "repeats": run.repeats,
        "check": attention_statistics([matrix]),
        "device": device_name(device),
        "seconds": sum(times) / 1000,
    }


class Throughput(Callback):
    """Counts examples per second of training, over all devices, from the second step on.

    Waiting for data is part of it; validation is not.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.seconds = 0.0
        self._steps = 0
        self._in_epoch = 0
        self._watch = Stopwatch()

    @property
    def samples_per_second(self) -> float | None:
        return self.samples / self.seconds if self.seconds > 0 else None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restart(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._steps += 1
        if self._steps == 1:
            self._restart(pl_module)  # the first step also compiles and allocates
            return
        some = batch["labels"] if "labels" in batch else batch["source"]
        self._in_epoch += len(some) * trainer.world_size
        if trainer.is_last_batch and self._in_epoch:
            seconds = self._watch.seconds
            self.seconds += seconds
            self.samples += self._in_epoch
            pl_module.log(
                "samples_per_second", self._in_epoch / seconds,
                on_step=False, on_epoch=True, rank_zero_only=True,
            )  # fmt: skip

    def _restart(self, pl_module: LightningModule) -> None:
        self._in_epoch = 0
        self._watch.restart(pl_module.device)


def compare_with_softmax(run: TrainingRun, task: Task, device: torch.device) -> dict[str, Any]:
    """Count examples per second of training steps, with the run's mechanism and with softmax.

    Everything else is the same: model, batch (which lies on the device), precision, optimiser, and
    whether steps are recorded. The two take turns, so that what else happens on the machine happens
    to both.

    Returns:
        ``samples_per_second`` and ``softmax_samples_per_second`` (medians), their ratio ``share``,
        and the conditions.
    """
    both = [run, dataclasses.replace(run, mechanism=Spec("softmax", {}))]
    examples: Any = task.train
    size = min(run.data.batch_size, len(examples))
    batch = _batch(task, torch.arange(size), device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        steps = [partial(_training_step(one, task, device), batch) for one in both]
    counts = []
    for step in steps:
        for _ in range(cuda_graphs.WARM_UP + 2):
            step()
        counts.append(max(1, int(SECONDS_OF_A_ROUND / seconds_per_call(step, device))))
    times = interleaved_seconds(steps, ROUNDS, device=device, warm_up=0, counts=counts)
    own, softmax = (size / seconds for seconds in times)
    return {
        "samples_per_second": own,
        "softmax_samples_per_second": softmax,
        "share": own / softmax,
        "batch_size": size,
        "steps": [ROUNDS * count for count in counts],
        "precision": run.trainer.precision,
        "cuda_graph": run.trainer.cuda_graph,
        "device": device_name(device),
    }


def throughput_line(measured: dict[str, Any]) -> str:
    """Say the measurement of :func:`compare_with_softmax` in a line."""
    return (
        f"throughput of training: {measured['samples_per_second']:,.0f} samples/s, "
        f"{100 * measured['share']:.0f} % of the {measured['softmax_samples_per_second']:,.0f} of "
        f"softmax attention (batches of {measured['batch_size']}, {measured['precision']}"
        + (", recorded steps" if measured["cuda_graph"] else "")
        + f", {measured['device']})"
    )


def in_this_thread() -> contextlib.AbstractContextManager[None]:
    """Keep backward passes in the thread that calls them.

    autograd otherwise hands each of them to a thread of the GPU, which takes longer than small
    models compute: docs/performance.md. A process trains on one device.
    """
    return torch.autograd.set_multithreading_enabled(False)


def _training_step(run: TrainingRun, task: Task, device: torch.device) -> Callable[[Batch], None]:
    """Make a function that does a whole training step on a batch, as the run does it."""
    eager = dataclasses.replace(run, trainer=dataclasses.replace(run.trainer, cuda_graph=False))
    learner = make_learner(eager, task).to(device)
    precision = run.trainer.precision
    if precision.endswith("-true"):
        learner.model.to(_DTYPES[precision])
    learner.train()
    optimizer = learner.configure_optimizers()["optimizer"]
    mixed = precision.endswith("-mixed")

    def step(batch: Batch) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed), in_this_thread():
            learner.take_step(optimizer, batch)

    if not run.trainer.cuda_graph:
        return step
    rates = cuda_graphs.Rates(optimizer, device)
    recorder = cuda_graphs.make_recorder(device)
    return cuda_graphs.StepGraphs(step, recorder, rates, run.data.batch_size)


def _batch(task: Task, rows: Any, device: torch.device) -> Batch:
    examples: Any = task.train
    return {name: value.to(device) for name, value in examples.batch(rows).items()}


@dataclass(frozen=True)
class Estimate:
    """Seconds of a run, or the reason why nothing can be said."""

    seconds: float | None
    steps: int | None
    reason: str = ""


class Estimator:
    """Estimates how long runs take: a few steps measured here, times the number of steps.

    Data and the time of a step, which several runs share, are looked at once.

    Args:
        say: told what is read or measured, before it is. Either may take minutes.
    """

    def __init__(self, say: Callable[[str], object] = lambda what: None) -> None:
        self._say = say
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
        few, times = _with_few_slices(run)
        kind = _what_costs(plain(few.mechanism))
        key = f"{run.model}{kind}{run.trainer.precision}{run.trainer.accelerator}"
        if key not in self._rates:
            self._say(f"timing a few steps of {run.recipe}, {run.setting}, {run.label}")
            self._rates[key] = _seconds_per_example(few, task)
        rate = self._rates[key]
        if isinstance(rate, str):
            return Estimate(None, steps, rate)
        split: Any = task.test if task.valid is None else task.valid
        if run.task == "translation":  # a rate per token, padding included
            epoch = float(batches * (run.data.max_tokens or _padded(run, task.train)))
            evaluation = _padded(run, split)
        else:
            epoch, evaluation = _examples(run, task), len(split)
        evaluations = math.ceil(run.trainer.epochs / run.trainer.validate_every) + 2
        work = epoch * run.trainer.epochs + _EVALUATION * evaluations * evaluation
        return Estimate(times * work * rate / run.trainer.devices, steps)

    def _task(self, run: TrainingRun) -> Task | str:
        key = f"{run.data.set}{run.data.directory}"
        if key not in self._tasks:
            self._say(f"reading the data of {run.recipe}, {run.setting}")
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
        whole = len(TaskData(run, task).train_dataloader())
    else:
        whole = math.ceil(len(split) / run.data.batch_size)
    return whole if run.trainer.limit_batches is None else min(whole, run.trainer.limit_batches)


def _padded(run: TrainingRun, split: Any) -> float:
    """Count the tokens of sentence pairs in batches of like length, padding included."""
    size = run.data.eval_batch_size or run.data.batch_size
    lengths = torch.maximum(split.source_lengths, split.target_lengths).sort().values
    return float(sum(len(batch) * int(batch[-1]) for batch in lengths.split(size)))


# Slices that are timed: a step of many takes as many times longer, and would be waited for.
_FEW_SLICES = 8


def _with_few_slices(run: TrainingRun) -> tuple[TrainingRun, float]:
    """Return the run with at most a few slices, and the factor that its steps take longer."""
    slices = run.mechanism.arguments.get("slices")
    if not isinstance(slices, int) or slices <= _FEW_SLICES:
        return run, 1.0
    few = Spec(run.mechanism.name, {**run.mechanism.arguments, "slices": _FEW_SLICES})
    return dataclasses.replace(run, mechanism=few), slices / _FEW_SLICES


# Numbers of a mechanism that no step takes longer for.
_FREE = (
    "sort_temperature", "inverse_temperature", "temperature_unit", "lambda_init", "epsilon",
    "coupling",
)  # fmt: skip


def _what_costs(mechanism: Any) -> Any:
    """Return the part of a mechanism's description that the time of a step depends on.

    Example:
        >>> _what_costs({"esp": {"slicer": "frozen", "slices": 8, "sort_temperature": 0.1}})
        {'esp': {'slices': 8}}
    """
    if not isinstance(mechanism, dict):
        return mechanism
    same = (*_FREE, "slicer") if "slices" in mechanism else _FREE
    return {name: _what_costs(value) for name, value in mechanism.items() if name not in same}


def _seconds_per_example(run: TrainingRun, task: Task) -> float | str:
    """Time a training step per example, with a few of them: fewer where one takes long.

    Of sentence pairs it is the time per token of a batch as the training has them.
    """
    device = pick_device(run.trainer.accelerator)
    eager = dataclasses.replace(run, trainer=dataclasses.replace(run.trainer, cuda_graph=False))
    train = _training_step(eager, task, device)
    examples: Any = task.train

    def step() -> None:
        train(_batch(task, range(count), device))

    # Two at least: batch norms need a variance.
    most = max(2, min(run.data.batch_size, 64, len(examples)))
    count, rate = 2, 0.0
    try:
        while count <= most and rate * count / 2 <= _PATIENCE_SECONDS:
            if count == 2 or device.type == "cuda":
                step()  # the first step compiles; on a GPU the first of every size prepares
            rate = seconds_per_call(step, device) / count
            count *= 2
    except torch.OutOfMemoryError:
        return "this device has too little memory for a batch"
    if run.task == "translation":
        batch = _batch(task, range(count // 2), device)
        rate *= count // 2 / max(batch[name].numel() for name in ("source", "target"))
    return rate
