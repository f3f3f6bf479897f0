"""Training a classifier: cross-entropy, accuracy, augmentation on the device."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from espformer.training.config import TrainingRun
from espformer.training.learner import Learner, at_least_float32

__all__ = ["Classifier"]


class Classifier(Learner):
    """Batches are mappings with ``inputs``, ``labels`` and, where there is padding, ``mask``.

    Args:
        run: the run.
        model: ``model(inputs, mask=None)`` gives logits, ``(batch, classes)``.
        classes: number of classes.
        augment, normalise: as in :class:`Learner`.
    """

    score = "accuracy"

    def __init__(
        self,
        run: TrainingRun,
        model: nn.Module,
        classes: int,
        augment: nn.Module | None = None,
        normalise: nn.Module | None = None,
    ) -> None:
        super().__init__(run, model, augment, normalise)
        self.accuracies = nn.ModuleDict(
            {
                stage: MulticlassAccuracy(num_classes=classes, average="micro")
                for stage in ("train_accuracy", "valid_accuracy", "test_accuracy")
            }
        )
        self.losses = nn.ModuleDict(
            {stage: MeanMetric() for stage in ("train_loss", "valid_loss", "test_loss")}
        )

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        inputs = self.prepare(batch["inputs"], training=self.training)
        logits: Tensor = self.model(inputs, mask=batch.get("mask"))
        return logits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self._measure("train", batch)
        return self.weighted(loss, len(batch["labels"]))

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._measure("valid", batch)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._measure("test", batch)

    def _measure(self, stage: str, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = self(batch), batch["labels"]
        smoothing = self.run.label_smoothing if stage == "train" else 0.0
        loss = F.cross_entropy(at_least_float32(logits), labels, label_smoothing=smoothing)
        accuracy: Any = self.accuracies[f"{stage}_accuracy"]
        mean: Any = self.losses[f"{stage}_loss"]
        accuracy.update(logits, labels)
        mean.update(loss.detach(), weight=len(labels))
        self._log_epoch(f"{stage}/accuracy", accuracy, stage)
        self._log_epoch(f"{stage}/loss", mean, stage)
        return loss

    def _log_epoch(self, name: str, metric: Any, stage: str) -> None:
        self.log(name, metric, on_step=False, on_epoch=True, prog_bar=stage != "test")
