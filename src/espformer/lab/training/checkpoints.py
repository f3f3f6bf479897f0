"""Checkpoints: written atomically, read without running code, refused if they are not ours."""

import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from espformer.lab.clock import Stopwatch
from espformer.lab.errors import RunError, first_line
from espformer.lab.files import check_directory, replacing
from espformer.lab.training.learner import MARK, Learner


def checkpoint_file(path: Path, which: str) -> Path:
    """Return the checkpoint `which` of a run's directory, or the file itself if it is one."""
    return path / f"{which}.ckpt" if path.is_dir() else path


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return a checkpoint of this library; anything else is refused with the reason.

    Only tensors and plain values are read: a file that holds code is refused, not run.
    """
    if not path.is_file():
        raise RunError(f"{path}: there is no such checkpoint (espformer train writes them)")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, zipfile.BadZipFile, ValueError, OSError) as error:
        raise RunError(
            f"{path}: cannot be read, it is cut off or damaged ({first_line(error)}). Nothing was "
            "changed; restore the file, or move it away to begin this run again"
        ) from None
    except Exception:  # UnpicklingError, and whatever a file that was never one leads to
        raise RunError(
            f"{path}: refused. It is no checkpoint of espformer: it holds objects that only "
            "running code could restore, or is no checkpoint at all. Nothing was changed"
        ) from None
    if not isinstance(checkpoint, dict) or MARK not in checkpoint:
        raise RunError(
            f"{path}: refused, this checkpoint was not written by espformer (it has no description "
            "of its run). Nothing was changed"
        )
    return checkpoint


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoints replace the former one in one step, and are read as tensors alone."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        del storage_options
        try:
            with replacing(Path(path)) as temporary:
                torch.save(checkpoint, temporary)
        except (OSError, RuntimeError) as error:
            # A full disk reaches us as a RuntimeError of torch's file writer.
            free = shutil.disk_usage(Path(path).parent).free
            raise RunError(
                f"{path}: the checkpoint could not be written ({first_line(error)}; "
                f"{free / 2**20:.0f} MB free). The one before it is as it was"
            ) from error

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        del map_location, weights_only
        return read_checkpoint(Path(path))


class Checkpoints(Checkpoint):
    """Keeps `last.ckpt`, to go on from, and `best.ckpt`, of the best validation.

    Saves at the end of each epoch, and inside an epoch when `minutes` have passed since the last
    time. The directory and the disk are looked at before the training begins.

    Args:
        directory: where the files go.
        minutes: time between checkpoints inside an epoch; 0 saves after every step.
        monitor: name of the score that decides what is best; the higher the better.
    """

    def __init__(self, directory: Path, minutes: float, monitor: str) -> None:
        self.directory = directory
        self.minutes = minutes
        self.monitor = monitor
        self.best: float | None = None
        self.best_epoch = -1
        self.seconds_before: float | None = 0.0
        """Seconds of former attempts, up to the checkpoint that is resumed; None: not known."""
        self._training, self._since_save = Stopwatch(), Stopwatch()

    @property
    def seconds(self) -> float | None:
        """Time of training so far, over all attempts; work that was lost in a stop is not in it."""
        if self.seconds_before is None:
            return None
        return self.seconds_before + self._training.seconds

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._training.restart()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            weights = sum(p.numel() * p.element_size() for p in pl_module.parameters())
            # Weights and two moments, in `last`, in `best`, and in the one being written.
            check_directory(self.directory, 3 * 3 * weights)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        done = batch_idx + 1
        # The end of the epoch saves what follows the last batch, and gradients that were
        # accumulated so far are in no checkpoint.
        inside = done < trainer.num_training_batches and done % trainer.accumulate_grad_batches == 0
        if inside and self._due(trainer, done):
            self._save(trainer, pl_module, (trainer.current_epoch, done))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        score = trainer.callback_metrics.get(self.monitor)
        if trainer.sanity_checking or trainer.state.fn != "fit" or score is None:
            return
        if self.best is None or float(score) > self.best:
            self.best, self.best_epoch = float(score), trainer.current_epoch
            trainer.save_checkpoint(self.directory / "best.ckpt", weights_only=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer, pl_module, (trainer.current_epoch + 1, 0))

    def _due(self, trainer: Trainer, done: int) -> bool:
        if self.minutes == 0:
            return True
        if trainer.world_size > 1 and done % 16:
            return False  # asking the first process costs a message
        late = self._since_save.seconds > 60 * self.minutes
        return bool(trainer.strategy.broadcast(late)) if trainer.world_size > 1 else late

    def _save(
        self, trainer: Trainer, pl_module: LightningModule, position: tuple[int, int]
    ) -> None:
        assert isinstance(pl_module, Learner)
        pl_module.position = position
        trainer.save_checkpoint(self.directory / "last.ckpt")
        self._since_save.restart()

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_epoch": self.best_epoch, "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.best_epoch = state_dict["best"], state_dict["best_epoch"]
        self.seconds_before = state_dict.get("seconds")  # some checkpoints do not tell
