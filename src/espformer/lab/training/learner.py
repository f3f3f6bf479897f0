"""The Lightning modules: what every task shares, and classification."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from espformer.lab.data import Task
from espformer.lab.recipes.schema import Schedule, TrainingRun
from espformer.lab.recipes.yaml_schema import plain
from espformer.lab.training.batches import mix_seed
from espformer.lab.training.events import ReportProgress
from espformer.lab.training.optimizers import make_optimizer, make_schedule

LOG_EVERY = 50
"""Steps from one logged loss to the next."""

MARK = "espformer"
"""Key of a checkpoint under which a run describes itself."""


def at_least_float32(x: Tensor) -> Tensor:
    """Widen 16-bit logits, of which the loss is computed in 32 bits; keep wider ones."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class EpochMeans:
    """Mean loss and accuracy over examples, from sums that are read once, at the end.

    The sums stay where they are when they are reset, so a recorded step can add to them.

    Example:
        >>> means = EpochMeans()
        >>> means.add(torch.tensor(1.0), count=3, correct=torch.tensor(2))
        >>> means.add(torch.tensor(2.0), count=1, correct=torch.tensor(1))
        >>> means.means()
        {'loss': 1.25, 'accuracy': 0.75}
    """

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def prepare(self, device: torch.device) -> Tensor:
        """Make room for the sums, ``(loss, count, correct)``, unless it is there."""
        if self._sums is None or self._sums.device != device:
            # Many small numbers are added to a large one; only Apple's devices lack float64.
            dtype = torch.float32 if device.type == "mps" else torch.float64
            self._sums = torch.zeros(3, dtype=dtype, device=device)
        return self._sums

    def add(self, loss: Tensor, count: int | Tensor, correct: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            loss: mean over the batch.
            count: examples (or tokens) of the batch.
            correct: how many of them were classified correctly.
        """
        total, counted, right = self.prepare(loss.device).unbind()
        total += loss.detach() * count
        counted += count
        if correct is not None:
            right += correct

    def reset(self) -> None:
        """Begin again from zero."""
        if self._sums is not None:
            self._sums.zero_()

    def means(self, reduce: Callable[[Tensor], Tensor] | None = None) -> dict[str, float]:
        """Loss and accuracy; `reduce` adds up the sums of several processes."""
        if self._sums is None:
            return {}
        sums = self._sums if reduce is None else reduce(self._sums.clone())
        loss, count, correct = sums.tolist()
        return {"loss": loss / count, "accuracy": correct / count} if count else {}

    def state(self) -> list[float]:
        """Return the sums as numbers, for a checkpoint."""
        return [0.0, 0.0, 0.0] if self._sums is None else self._sums.tolist()

    def load(self, state: list[float], device: torch.device) -> None:
        """Go on from the sums of a checkpoint."""
        self.prepare(device).copy_(torch.tensor(state))


class Learner(LightningModule):
    """A model and how it is trained; subclasses say what the loss and the score are.

    The random numbers of a step (dropout, augmentation) are decided by the seed, the step and the
    process, so a run that goes on from a checkpoint draws what it would have drawn. Losses and
    accuracies are summed on the device and read when an epoch ends; within it, a loss is read and
    logged only every few steps, so that steps are queued without waiting for the device.

    Args:
        run: the run.
        model: the model.
        augment: random changes of the inputs of a training batch, on the device.
        normalise: from stored inputs to those of the model, on the device.
    """

    score = "accuracy"
    """Name of the score, logged as `valid/…` and `test/…`; it decides which epoch is best."""

    keeps_best = True
    """Whether the epoch of the best validation is kept and scored, beside the last one."""

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
        self.means_of = {stage: EpochMeans() for stage in ("train", "valid", "test")}
        self.continued: Schedule | None = None
        """The schedule of the run that this one starts from, where it goes on with that."""
        self.position = (0, 0)
        """(epoch, batch) at which training goes on; set by who saves a checkpoint."""
        self._sharded = False
        self._summed: list[float] | None = None

    def begin(self, output: Path, task: Task, *, fresh: bool) -> None:
        """Fill in weights that other work has left or that data decide, for tasks that need some.

        Args:
            output: directory of all runs.
            task: the data of the run.
            fresh: no checkpoint will be loaded over them.
        """

    def callbacks(self) -> list[Callback]:
        """Return what this task adds to the callbacks of a training."""
        return []

    def about(self, recalls: dict[str, float]) -> dict[str, Any]:
        """Return what this task adds to the results; `recalls` are macro recalls by score."""
        return {}

    def measure(self, stage: str, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean loss of a batch, which is counted for the stage, and what else it gives."""
        raise NotImplementedError

    @torch.no_grad()
    def prepare(self, inputs: Tensor, *, training: bool) -> Tensor:
        """Turn the stored inputs of a batch into those of the model."""
        if training and self.augment is not None:
            inputs = self.augment(inputs)
        if self.normalise is not None:
            inputs = self.normalise(inputs)
        if inputs.is_floating_point() and self.run.trainer.precision.endswith("true"):
            inputs = inputs.to(next(self.model.parameters()).dtype)
        return inputs

    def configure_model(self) -> None:
        if self.run.trainer.strategy == "fsdp" and not self._sharded:
            from espformer.lab.training.fsdp import shard

            mesh: Any = self.device_mesh
            shard(self.model, mesh["data_parallel"])
            self._sharded = True

    def configure_optimizers(self) -> Any:
        config = self.run.optimizer
        # Lightning does not clip for fused optimisers under autocast.
        clips_mixed = config.clip_norm is not None and self.run.trainer.precision.endswith("mixed")
        optimizer = make_optimizer(self.model, config, allow_fused=not clips_mixed)
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer)}

    def schedule(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return how the learning rate changes, in the form that Lightning takes."""
        rate = self.run.optimizer.learning_rate
        return make_schedule(optimizer, self.continued or self.run.schedule, rate)

    def on_train_start(self) -> None:
        self.means_of["train"].prepare(self.device)
        if self._summed is not None:
            self.means_of["train"].load(self._summed, self.device)
            self._summed = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        step = self.trainer.fit_loop.total_batch_idx
        seed = mix_seed(self.run.seed, step, self.global_rank)
        # torch.manual_seed would also look after the devices that are not used, at some length.
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index or 0].manual_seed(seed)
        elif self.device.type != "cpu":
            torch.manual_seed(seed)

    def on_train_epoch_end(self) -> None:
        self._log_means("train")
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ReportProgress):
                callback.report_epoch(self.trainer)

    def on_validation_epoch_end(self) -> None:
        self._log_means("valid")

    def on_test_epoch_end(self) -> None:
        self._log_means("test")

    def _log_means(self, stage: str) -> None:
        """Log the means of an epoch, and begin anew for the next one."""
        world, strategy = self.trainer.world_size, self.trainer.strategy
        reduce = None if world == 1 else lambda sums: strategy.reduce(sums, reduce_op="sum")
        for name, value in self.means_of[stage].means(reduce).items():
            if name in ("loss", self.score):
                self.log(f"{stage}/{name}", value, prog_bar=stage != "test")
        self.means_of[stage].reset()

    def log_loss(self, loss: Tensor) -> None:
        """Log the loss of every few steps; reading every loss would synchronise the device."""
        if (self.trainer.global_step + 1) % LOG_EVERY == 0:
            self.log("step_loss", loss.detach(), prog_bar=True, on_step=True, on_epoch=False)

    def weighted(self, loss: Tensor, count: int | Tensor) -> Tensor:
        """Weight the mean of this process by its count, so that the average is the mean of all."""
        world = self.trainer.world_size
        if world == 1:
            return loss
        dtype = torch.promote_types(loss.dtype, torch.float32)
        local = torch.as_tensor(count, device=loss.device, dtype=dtype)
        total = self.trainer.strategy.reduce(local.clone(), reduce_op="sum")
        return loss * (world * local / total)

    def take_step(self, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
        """Do a whole training step without Lightning, under the caller's autocast."""
        optimizer.zero_grad(set_to_none=True)
        loss, _ = self.measure("train", batch)
        with torch.autocast(self.device.type, enabled=False):
            loss.backward()
            if self.run.optimizer.clip_norm is not None:
                # In Lightning's order: a norm is a sum, which is rounded in some order.
                every = [weight for group in optimizer.param_groups for weight in group["params"]]
                nn.utils.clip_grad_norm_(every, self.run.optimizer.clip_norm)
            optimizer.step()
        return loss.detach()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        epoch, batch = self.position
        checkpoint[MARK] = {
            "run": plain(self.run),
            "position": {"epoch": epoch, "batch": batch},
            "summed": self.means_of["train"].state() if batch else None,
            "continued": plain(self.continued),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._summed = checkpoint[MARK].get("summed")
        continued = checkpoint[MARK].get("continued")
        self.continued = None if continued is None else Schedule(**continued)


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
        self.means_of[stage].add(loss, len(labels), correct)
        return loss, logits
