"""Callbacks that sharpen the sort while a model trains: a falling t, or more of the hard sort."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from espformer.lab.recipes.schema import Annealing, StraightThrough
from espformer.lab.training.learner import Learner
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
