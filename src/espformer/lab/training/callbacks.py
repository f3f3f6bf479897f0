"""Callbacks around the steps: they sharpen the sort, watch the attention, count samples."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from espformer.lab.clock import Stopwatch
from espformer.lab.recipes.schema import Annealing, StraightThrough
from espformer.lab.training.learner import Learner
from espformer.nn import ESP, anneal, set_sort_temperature, set_straight_through

__all__ = [
    "AnnealTemperature",
    "AttentionStatistics",
    "StraightThroughShare",
    "Throughput",
    "attention_statistics",
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


def attention_statistics(matrices: list[Tensor]) -> dict[str, float]:
    """Say how far attention matrices are from doubly stochastic, and how spread out they are.

    Args:
        matrices: ``(batch, heads, N, M)`` each; empty rows and columns are padding. Matrices with
            negative entries (differential attention) are no distributions and are left out.

    Returns:
        ``row_error`` and ``column_error``, the mean distance of the sums from one and from N/M, and
        ``entropy``, the mean over rows divided by that of the uniform row: 1 is uniform, 0 a
        permutation. Empty if nothing can be said.

    Example:
        >>> attention_statistics([torch.eye(4).expand(1, 1, 4, 4)])
        {'row_error': 0.0, 'column_error': 0.0, 'entropy': 0.0}
    """
    row_errors, column_errors, entropies = [], [], []
    for matrix in matrices:
        matrix = matrix.detach().float()
        if bool((matrix < -1e-6).any()):
            continue
        rows = matrix.ne(0).any(-1)
        columns = matrix.ne(0).any(-2)
        ratio = rows.sum(-1, keepdim=True) / columns.sum(-1, keepdim=True).clamp(min=1)
        row_errors.append((matrix.sum(-1) - 1).abs()[rows])
        column_errors.append((matrix.sum(-2) - ratio).abs()[columns])
        uniform = columns.sum(-1, keepdim=True).clamp(min=2).log()
        entropies.append((torch.special.entr(matrix.clamp(min=0)).sum(-1) / uniform)[rows])
    if not row_errors or not sum(part.numel() for part in row_errors):
        return {}
    parts = {"row_error": row_errors, "column_error": column_errors, "entropy": entropies}
    return {name: float(torch.cat(values).mean()) for name, values in parts.items()}


class AttentionStatistics(Callback):
    """Logs :func:`attention_statistics` after each epoch, on a few fixed validation examples."""

    examples = 4

    def __init__(self) -> None:
        self._batch: dict[str, Tensor] | None = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Learner)
        model: Any = pl_module.model
        loader: Any = trainer.val_dataloaders
        if loader is None or not hasattr(model, "attention_matrices"):
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
            matrices = model.attention_matrices(inputs, batch.get("mask"))
        for name, value in attention_statistics(matrices).items():
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
