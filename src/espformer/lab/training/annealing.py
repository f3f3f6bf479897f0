"""Callbacks that sharpen the sort while a model trains: a falling t, or more of the hard sort."""

from statistics import fmean, geometric_mean
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from espformer.lab.recipes.schema import Annealing, StraightThrough
from espformer.lab.training.learner import LOG_EVERY, Learner
from espformer.nn import ESP, anneal, set_sort_temperature, set_straight_through


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
        pl_module.log("sort_temperature", fmean(sort_temperatures(model)), rank_zero_only=True)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = state_dict["epoch"]


def sort_temperatures(model: torch.nn.Module) -> list[float]:
    """Return the sort temperatures of all mechanisms and, where they are learnt, heads."""
    found: list[float] = []
    for mechanism in model.modules():
        if isinstance(mechanism, ESP):
            with torch.no_grad():
                value: Any = torch.as_tensor(mechanism.sort_temperature, dtype=torch.float64)
            # With FSDP each process has the temperatures of some heads.
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            found += value.flatten().tolist()
    return found


class AnnealByStep(Callback):
    """The sort temperature goes from what it is to `end`, by the same factor before each step.

    Where temperatures differ, after a calibration, their geometric mean ends there. They are part
    of the weights, so a run that goes on from a checkpoint goes on here too.
    """

    def __init__(self, end: float) -> None:
        self.end = end
        self.start: float | None = None
        self.factor = 1.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = _model(pl_module)
        if self.start is None:
            self.start = geometric_mean(sort_temperatures(model))
        steps = int(trainer.estimated_stepping_batches)
        self.factor = (self.end / self.start) ** (1 / max(1, steps))

    def state_dict(self) -> dict[str, Any]:
        return {"start": self.start}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.start = state_dict["start"]

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        model = _model(pl_module)
        if trainer.fit_loop.total_batch_idx % trainer.accumulate_grad_batches == 0:
            anneal(model, self.factor)
        if (trainer.global_step + 1) % LOG_EVERY == 0:
            mean = fmean(sort_temperatures(model))
            pl_module.log("sort_temperature", mean, rank_zero_only=True)


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
