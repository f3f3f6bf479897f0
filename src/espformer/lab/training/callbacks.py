"""Callbacks around the steps: they sharpen the sort, watch the attention, count samples."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from espformer.lab.clock import Stopwatch
from espformer.lab.recipes.schema import Annealing, StraightThrough
from espformer.lab.training.attention import (
    attention_statistics,
    recorded_calls,
    slice_statistics,
)
from espformer.lab.training.learner import Learner
from espformer.nn import ESP, anneal, set_sort_temperature, set_straight_through

__all__ = [
    "AnnealTemperature",
    "AttentionStatistics",
    "StraightThroughShare",
    "Throughput",
]


def _model(module: LightningModule) -> torch.nn.Module:
    assert isinstance(module, Learner)
    return module.model


class AnnealTemperature(Callback):
    """t ← factor·t before each epoch, once per epoch however often the run was interrupted.

    The temperatures themselves are saved with the model, each head's own where they are learnt.
    """

    def __init__(self, config: Annealing) -> None:
        self.config = config
        self.epoch = -1

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = _model(pl_module)
        if trainer.current_epoch > self.epoch:
            if self.epoch < 0 and self.config.start is not None:
                set_sort_temperature(model, self.config.start)
            anneal(model, self.config.factor)
            self.epoch = trainer.current_epoch
        pl_module.log("sort_temperature", _mean_temperature(model), rank_zero_only=True)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = state_dict["epoch"]


def _mean_temperature(model: torch.nn.Module) -> float:
    """Over all mechanisms and, where they are learnt, heads."""
    means = []
    for mechanism in model.modules():
        if isinstance(mechanism, ESP):
            with torch.no_grad():
                value: Any = torch.as_tensor(mechanism.sort_temperature)
            # With FSDP each process has the temperatures of some heads.
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            means.append(float(value.double().mean()))
    return sum(means) / len(means)


class StraightThroughShare(Callback):
    """Moves the forward from the soft to the hard sort while gradients stay the soft sort's."""

    def __init__(self, config: StraightThrough, epochs: int) -> None:
        self.config = config
        self.epochs = max(1, epochs - 1 if config.epochs is None else config.epochs)

    def share(self, epoch: int) -> float:
        way = min(1.0, epoch / self.epochs)
        return self.config.start + (self.config.end - self.config.start) * way

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        share = self.share(trainer.current_epoch)
        set_straight_through(_model(pl_module), share)
        pl_module.log("straight_through", share, rank_zero_only=True)


class AttentionStatistics(Callback):
    """Logs how the attention is after epochs with a validation, on a few fixed examples of it.

    :func:`~espformer.lab.training.attention.attention_statistics` each time, and after the last
    epoch :func:`~espformer.lab.training.attention.slice_statistics` too.
    """

    examples = 4

    def __init__(self) -> None:
        self._batch: dict[str, Tensor] | None = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Learner)
        model: Any = pl_module.model
        loader: Any = trainer.val_dataloaders
        done, every = trainer.current_epoch + 1, trainer.check_val_every_n_epoch or 1
        last = done == trainer.max_epochs
        if (
            loader is None
            or not hasattr(model, "attention_matrices")
            or not (last or done % every == 0)
        ):
            return
        if self._batch is None:
            batch = next(iter(loader))
            few = {
                name: value[: self.examples]
                for name, value in batch.items()
                if name in ("inputs", "mask") and value is not None
            }
            self._batch = few if "inputs" in few else None
        if self._batch is None:
            return
        batch = {name: value.to(pl_module.device) for name, value in self._batch.items()}
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            inputs = pl_module.prepare(batch["inputs"], training=False)
            with recorded_calls(model) as calls:
                matrices = model.attention_matrices(inputs, batch.get("mask"))
            found = attention_statistics(matrices) | (slice_statistics(calls) if last else {})
        for name, value in found.items():
            pl_module.log(f"attention/{name}", value, rank_zero_only=True)


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
