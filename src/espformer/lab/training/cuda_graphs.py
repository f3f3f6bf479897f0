"""The whole training step of a classifier as one CUDA graph.

With a small model the GPU finishes a step before Python has launched the next one. So forward,
backward and optimiser are recorded once for each shape of batch, and replayed with a single call.
The batch and the learning rates are copied into the tensors that the recorded step reads. Python
numbers, such as a sort temperature, are frozen in the recording; if one of them changes, the step
is recorded again.

Recording changes no result. The warm-up steps before a recording are ordinary training steps, and
so are those of the last, smaller batch of an epoch, which is never recorded. The random numbers are
the same too.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from espformer.lab.data import Batch
from espformer.lab.errors import RunError, first_line
from espformer.lab.recipes.schema import TrainingRun
from espformer.lab.training.learner import Classifier

# Steps of each shape before it is recorded: kernels compile, workspaces and states are made.
WARM_UP = 2


class CudaRecorder:
    """Recording by CUDA graphs, which share their memory: one replays at a time."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def run(self, function: Callable[[], None]) -> None:
        """Call the function, under the conditions of a recording."""
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            function()
        here.wait_stream(self.stream)

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Record the function without executing it, and return a function that replays it."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                function()
        except RuntimeError as error:
            raise RunError(
                f"this training step cannot be recorded as a CUDA graph ({first_line(error)}): "
                "something in it waits for the device. Train without it: trainer.cuda_graph=false"
            ) from error
        replay: Callable[[], None] = graph.replay
        return replay

    def forget(self) -> None:
        """Drop what was recorded: it will not be replayed any more."""
        # The memory of a pool is given back with its last graph, and the pool with it.
        self.pool = torch.cuda.graph_pool_handle()


def make_recorder(device: torch.device) -> CudaRecorder:
    """Return the recorder of a device."""
    return CudaRecorder(device)


def check_possible(run: TrainingRun) -> None:
    """Refuse to record where there is no CUDA device."""
    if run.trainer.accelerator == "cpu" or not torch.cuda.is_available():
        raise RunError(
            "trainer.cuda_graph needs a CUDA device, and this run is on "
            + ("the CPU" if run.trainer.accelerator == "cpu" else "a machine without one")
            + "; train without it: trainer.cuda_graph=false"
        )


def settings(model: nn.Module) -> tuple[Any, ...]:
    """Return the numbers, words and options of a model that a recorded step would freeze.

    Example:
        >>> layer = nn.Dropout(0.1)
        >>> before = settings(layer)
        >>> layer.p = 0.2
        >>> settings(layer) == before
        False
    """
    return tuple(
        (name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str) or dataclasses.is_dataclass(value)
    )


class Rates:
    """Learning rates as tensors that a recorded step reads.

    The optimiser's own stay plain numbers, which schedules change and checkpoints hold.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self._values = [float(group["lr"]) for group in optimizer.param_groups]
        # Fused optimisers read them as float32.
        self._tensors = [torch.tensor(value, device=device) for value in self._values]
        # Promises that no part of the state lies on the CPU; torch asks for it on CUDA alone.
        self._promise = {"capturable": True} if device.type == "cuda" else {}

    def update(self) -> None:
        """Bring the rates of the optimiser to the tensors."""
        for index, group in enumerate(self.optimizer.param_groups):
            if group["lr"] != self._values[index]:
                self._values[index] = group["lr"]
                self._tensors[index].fill_(group["lr"])

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within the block, the optimiser takes its rates from the tensors."""
        groups = self.optimizer.param_groups
        kept = [dict(group) for group in groups]
        for group, tensor in zip(groups, self._tensors, strict=True):
            group.update(lr=tensor, **self._promise)
        try:
            yield
        finally:
            for group, former in zip(groups, kept, strict=True):
                group.clear()
                group.update(former)


class StepGraphs:
    """Decides for each batch whether its step runs eagerly, is recorded, or is replayed.

    Args:
        step: a whole training step on a batch.
        recorder: records it.
        rates: learning rates of the optimiser.
        batch_size: examples of the batches that are worth recording; others are done as they stand.
    """

    def __init__(
        self, step: Callable[[Batch], None], recorder: CudaRecorder, rates: Rates, batch_size: int
    ) -> None:
        self.step, self.recorder, self.rates = step, recorder, rates
        self.batch_size = batch_size
        self._graphs: dict[Any, tuple[Batch, Callable[[], None]]] = {}
        self._seen: dict[Any, int] = {}
        self._settings: tuple[Any, ...] = ()

    def __call__(self, batch: Batch) -> None:
        """Do the training step of a batch."""
        if len(batch["labels"]) != self.batch_size:
            self.recorder.run(lambda: self.step(batch))
            return
        key = tuple(value.shape for value in batch.values())
        if key not in self._graphs:
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] <= WARM_UP:
                self.recorder.run(lambda: self.step(batch))
                return
            self._graphs[key] = self._record(batch)
        inputs, replay = self._graphs[key]
        for name, value in batch.items():
            inputs[name].copy_(value, non_blocking=True)
        self.rates.update()
        replay()

    def look_at(self, settings: tuple[Any, ...]) -> None:
        """Drop the recordings if the settings have changed."""
        if settings != self._settings:
            self.forget()
            self._settings = settings

    def forget(self) -> None:
        """Drop all recordings and the memory that they hold."""
        self._graphs.clear()
        self._seen.clear()
        self.recorder.forget()

    def _record(self, batch: Batch) -> tuple[Batch, Callable[[], None]]:
        inputs = {name: torch.empty_like(value) for name, value in batch.items()}

        def step() -> None:
            with self.rates.installed():
                self.step(inputs)

        return inputs, self.recorder.record(step)


class GraphedClassifier(Classifier):
    """A classifier whose training step, from augmentation to optimiser, is one CUDA graph.

    Lightning's hooks for the parts of a step have nothing left to do; its counters, schedules,
    checkpoints and callbacks work as ever.
    """

    def on_train_start(self) -> None:
        super().on_train_start()
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        self._optimizer: torch.optim.Optimizer = optimizer
        self._loss = torch.zeros((), device=self.device)
        self._graphs = StepGraphs(
            self._step,
            make_recorder(self.device),
            Rates(self._optimizer, self.device),
            self.run.data.batch_size,
        )
        # A run that goes on within an epoch does not start that epoch.
        self._graphs.look_at(settings(self.model))

    def on_train_epoch_start(self) -> None:
        # After the callbacks, which may have changed the temperature.
        self._graphs.look_at(settings(self.model))

    def on_train_end(self) -> None:
        self._graphs.forget()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self._graphs(batch)
        self.log_loss(self._loss)
        return self._loss

    def _step(self, batch: Batch) -> None:
        self._loss.copy_(self.take_step(self._optimizer, batch))

    def backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        """Part of the recorded step."""

    def optimizer_zero_grad(self, *args: Any, **options: Any) -> None:
        """Part of the recorded step."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        """Part of the recorded step; the closure leads to :meth:`training_step`."""
        optimizer_closure()
