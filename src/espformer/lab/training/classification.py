"""Training a classifier: cross-entropy, accuracy, augmentation on the device."""

import torch.nn.functional as F
from torch import Tensor

from espformer.lab.training.learner import Learner, at_least_float32

__all__ = ["Classifier"]


class Classifier(Learner):
    """Batches are mappings with ``inputs``, ``labels`` and, where there is padding, ``mask``.

    The model is called as ``model(inputs, mask=None)`` and gives logits, ``(batch, classes)``.
    """

    score = "accuracy"

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        inputs = self.prepare(batch["inputs"], training=self.training)
        logits: Tensor = self.model(inputs, mask=batch.get("mask"))
        return logits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss, _ = self.measure("train", batch)
        self.log_loss(loss)
        return self.weighted(loss, len(batch["labels"]))

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.measure("valid", batch)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.measure("test", batch)

    def measure(self, stage: str, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean loss of a batch and its logits; loss and accuracy are counted for the stage."""
        logits, labels = self(batch), batch["labels"]
        smoothing = self.run.label_smoothing if stage == "train" else 0.0
        loss = F.cross_entropy(at_least_float32(logits), labels, label_smoothing=smoothing)
        correct = (logits.detach().argmax(-1) == labels).sum()
        self.tallies[stage].add(loss, len(labels), correct)
        return loss, logits
