"""Training throughput of a run beside that of softmax attention, on the same machine."""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from espformer.lab.data import Task
from espformer.lab.training import graphs
from espformer.lab.training.assemble import make_learner
from espformer.lab.training.classification import Classifier
from espformer.lab.training.config import TrainingRun
from espformer.lab.training.records import device_name
from espformer.lab.training.strict import Spec

__all__ = ["beside_softmax", "in_words"]

ROUNDS = 5
_SECONDS_OF_A_ROUND = 0.2


def beside_softmax(run: TrainingRun, task: Task, device: torch.device) -> dict[str, Any]:
    """Examples per second of training steps, with the run's mechanism and with softmax.

    Everything else is the same: model, batch (which lies on the device), precision, optimiser, and
    whether steps are recorded. The two take turns, so that what else happens on the machine happens
    to both; a device is waited for before the clock is read.

    Returns:
        ``samples_per_second`` and ``softmax_samples_per_second`` (medians), their ratio ``share``,
        and the conditions.
    """
    both = [run, dataclasses.replace(run, mechanism=Spec("softmax", {}))]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        steps = [_step(one, task, device) for one in both]
    times: list[list[float]] = [[], []]
    counts = [1, 1]
    for index, step in enumerate(steps):
        for _ in range(graphs.WARM_UP + 2):
            step()
        counts[index] = max(1, int(_SECONDS_OF_A_ROUND / _seconds(step, 1, device)))
    for _ in range(ROUNDS):
        for index, step in enumerate(steps):
            times[index].append(_seconds(step, counts[index], device))
    size = run.data.batch_size
    own, softmax = (size / statistics.median(series) for series in times)
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


def in_words(measured: dict[str, Any]) -> str:
    """The measurement in a line."""
    return (
        f"throughput of training: {measured['samples_per_second']:,.0f} samples/s, "
        f"{100 * measured['share']:.0f} % of the {measured['softmax_samples_per_second']:,.0f} of "
        f"softmax attention (batches of {measured['batch_size']}, {measured['precision']}"
        + (", recorded steps" if measured["cuda_graph"] else "")
        + f", {measured['device']})"
    )


def _step(run: TrainingRun, task: Task, device: torch.device) -> Callable[[], None]:
    plain = dataclasses.replace(run, trainer=dataclasses.replace(run.trainer, cuda_graph=False))
    learner = make_learner(plain, task).to(device)
    assert isinstance(learner, Classifier)
    if run.trainer.precision.endswith("-true"):
        learner.model.to(_DTYPES[run.trainer.precision])
    learner.train()
    optimizer = learner.configure_optimizers()["optimizer"]
    examples: Any = task.train
    rows = torch.arange(run.data.batch_size) % len(examples)
    batch = {name: value.to(device) for name, value in examples.batch(rows).items()}
    mixed = run.trainer.precision.endswith("-mixed")

    def step(inputs: dict[str, torch.Tensor]) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16) if mixed else contextlib.nullcontext():
            loss, _ = learner.measure("train", inputs)
        loss.backward()
        if run.optimizer.clip_norm is not None:
            nn.utils.clip_grad_norm_(learner.model.parameters(), run.optimizer.clip_norm)
        optimizer.step()

    if not run.trainer.cuda_graph:
        return lambda: step(batch)
    rates = graphs.Rates(optimizer, device)
    recorder = graphs.make_recorder(device)
    recorded = graphs.StepGraphs(step, recorder, rates, run.data.batch_size)
    return lambda: recorded(batch)


_DTYPES = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "64-true": torch.float64}


def _seconds(step: Callable[[], None], count: int, device: torch.device) -> float:
    """Seconds of a step, the mean of `count`."""
    _wait(device)
    began = time.perf_counter()
    for _ in range(count):
        step()
    _wait(device)
    return (time.perf_counter() - began) / count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
