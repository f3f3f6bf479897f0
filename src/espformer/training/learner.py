"""What all training has: random numbers of a step, the optimiser, and what a checkpoint says."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from espformer.training.batches import mix_seed
from espformer.training.config import TrainingRun
from espformer.training.optimisers import make_optimizer, make_schedule
from espformer.training.strict import plain

__all__ = ["MARK", "Learner", "at_least_float32"]

MARK = "espformer"
"""Key of a checkpoint under which a run describes itself."""


def at_least_float32(x: Tensor) -> Tensor:
    """Losses of 16-bit logits are computed in 32 bits; wider ones stay as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Learner(LightningModule):
    """A model and how it is trained; subclasses say what the loss and the score are.

    The random numbers of a step (dropout, augmentation) are decided by the seed, the step and the
    process, so a run that goes on from a checkpoint draws what it would have drawn.

    Args:
        run: the run.
        model: the model.
        augment: random changes of the inputs of a training batch, on the device.
        normalise: from stored inputs to those of the model, on the device.
    """

    score = "accuracy"
    """What is logged as `valid/…` and `test/…` and decides which epoch is best, in percent."""

    def __init__(
        self,
        run: TrainingRun,
        model: nn.Module,
        augment: nn.Module | None = None,
        normalise: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.run = run
        self.model = model
        self.augment = augment
        self.normalise = normalise
        self.position = (0, 0)
        """(epoch, batch) at which training goes on; set by who saves a checkpoint."""

    @torch.no_grad()
    def prepare(self, inputs: Tensor, *, training: bool) -> Tensor:
        """What the model is given for the stored inputs of a batch."""
        if training and self.augment is not None:
            inputs = self.augment(inputs)
        return inputs if self.normalise is None else self.normalise(inputs)

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.model, self.run.optimizer)
        rate = self.run.optimizer.learning_rate
        schedule = make_schedule(optimizer, self.run.schedule, rate)
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        step = self.trainer.fit_loop.total_batch_idx
        torch.manual_seed(mix_seed(self.run.seed, step, self.global_rank))

    def weighted(self, loss: Tensor, count: int | Tensor) -> Tensor:
        """The mean over this process's share, weighted so that processes add up to one mean."""
        self.log("step_loss", loss.detach(), prog_bar=True, on_step=True, on_epoch=False)
        world = self.trainer.world_size
        if world == 1:
            return loss
        dtype = torch.promote_types(loss.dtype, torch.float32)
        local = torch.as_tensor(count, device=loss.device, dtype=dtype)
        total = self.trainer.strategy.reduce(local.clone(), reduce_op="sum")
        return loss * (world * local / total)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        epoch, batch = self.position
        checkpoint[MARK] = {
            "run": plain(self.run),
            "position": {"epoch": epoch, "batch": batch},
        }
