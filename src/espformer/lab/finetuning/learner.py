"""How a pre-trained classifier is trained: its learning rate, its temperature, its scores."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from espformer.lab.finetuning.config import FinetuneRun
from espformer.lab.finetuning.model import PooledClassifier
from espformer.lab.training.classification import Classifier
from espformer.lab.training.learner import LOG_EVERY
from espformer.lab.training.optimisers import make_optimizer
from espformer.nn import anneal, get_sort_temperatures

__all__ = ["AnnealByStep", "FinetuneLearner", "warm_up_and_decay"]


def warm_up_and_decay(step: int, steps: int, warmup: float) -> float:
    """Factor of the learning rate: up in a line over `warmup` of the steps, then down to zero.

    Example:
        >>> [round(warm_up_and_decay(step, 10, 0.2), 3) for step in (0, 1, 2, 6, 10)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    return max(0.0, (steps - step) / max(1, steps - rising))


class FinetuneLearner(Classifier):
    """A :class:`Classifier` whose learning rate falls to zero; tests also give the macro recall.

    Macro recall is what TweetEval is scored by: a model that always says the largest class has a
    decent accuracy, and the macro recall of a coin.
    """

    def __init__(self, run: FinetuneRun, model: PooledClassifier) -> None:
        super().__init__(run, model)
        self.finetune = run
        self.confusion: Tensor | None = None
        """Of the test so far, ``(classes, classes)``: rows are true, columns are found."""

    def configure_optimizers(self) -> Any:
        config = self.run.optimizer
        # Lightning does not clip for fused optimisers under autocast.
        mixed = self.run.trainer.precision.endswith("mixed")
        optimizer = make_optimizer(self.model, config, allow_fused=not mixed)
        steps, warmup = int(self.trainer.estimated_stepping_batches), self.finetune.warmup
        schedule = LambdaLR(optimizer, lambda step: warm_up_and_decay(step, steps, warmup))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def on_test_epoch_start(self) -> None:
        super().on_test_epoch_start()
        self.confusion = None

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        _, logits = self.measure("test", batch)
        classes = logits.shape[-1]
        pairs = classes * batch["labels"] + logits.argmax(-1)
        counts = torch.bincount(pairs, minlength=classes**2).view(classes, classes)
        self.confusion = counts if self.confusion is None else self.confusion + counts

    def on_test_epoch_end(self) -> None:
        super().on_test_epoch_end()
        if self.confusion is not None:
            recalls = self.confusion.diagonal() / self.confusion.sum(1).clamp(min=1)
            self.log("test/recall", recalls.mean())


class AnnealByStep(Callback):
    """The sort temperature goes from what it is to `end`, by the same factor before each step.

    Temperatures are part of the weights, so a run that goes on from a checkpoint goes on here too.
    """

    def __init__(self, start: float, end: float) -> None:
        self.start, self.end = start, end
        self.factor = 1.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        steps = int(trainer.estimated_stepping_batches)
        self.factor = (self.end / self.start) ** (1 / max(1, steps))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, FinetuneLearner)
        if trainer.fit_loop.total_batch_idx % trainer.accumulate_grad_batches == 0:
            anneal(pl_module.model, self.factor)
        if (trainer.global_step + 1) % LOG_EVERY == 0:
            found = get_sort_temperatures(pl_module.model).values()
            numbers = torch.tensor([x for t in found for x in (t if isinstance(t, list) else [t])])
            pl_module.log("sort_temperature", numbers.mean(), rank_zero_only=True)
