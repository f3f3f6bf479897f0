"""Progress of a training as events, for the display of many runs and for the demo.

An event is a small mapping such as ``{"state": "training", "epoch": 3, "epochs": 20, "score":
0.91}``. A run that another process watches appends its events, a line of JSON each, to the file
that the variable ESPFORMER_EVENTS names.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from espformer.lab.clock import Stopwatch
from espformer.lab.files import tail

Event = dict[str, Any]
Listener = Callable[[Event], None]

ENVIRONMENT = "ESPFORMER_EVENTS"

SILENCE_SECONDS = 20.0
"""After which a log without a progress bar says how far long work is."""


class Lines:
    """Prints lines; some of them only where nothing was printed for :data:`SILENCE_SECONDS`."""

    def __init__(self) -> None:
        self._silence = Stopwatch()

    def print(self, line: str) -> None:
        print(line, flush=True)
        self._silence.restart()

    def break_silence(self, line: str) -> None:
        if self._silence.seconds > SILENCE_SECONDS:
            self.print(line)


def listener() -> Listener | None:
    """Return what writes events to the file that the environment names, if it names one."""
    path = os.environ.get(ENVIRONMENT)
    if not path:
        return None

    def write(event: Event) -> None:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    return write


def last_event(path: Path) -> Event:
    """Read the newest event of a file; nothing where there is none, or while it is written."""
    whole = tail(path).rpartition("\n")[0]
    try:
        event: Event = json.loads(whole.rpartition("\n")[2])
        return event
    except ValueError:
        return {}


class ReportProgress(Callback):
    """Tells a listener, and the log of a run without a progress bar, of every epoch.

    Args:
        score: name of the logged score.
        tell: called with each event.
        lines: also print a line for people.
    """

    def __init__(self, score: str, tell: Listener | None, *, lines: bool) -> None:
        self.score, self.tell, self.lines = score, tell, lines
        self._epoch, self._printed = Stopwatch(), Lines()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._emit(trainer, trainer.current_epoch)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._epoch.restart()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        what = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}"
        self._break_silence(trainer, what, batch_idx, trainer.num_training_batches)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any,
        batch_idx: int, dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        self._break_silence(trainer, "validation", batch_idx, trainer.num_val_batches)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any,
        batch_idx: int, dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        self._break_silence(trainer, "test", batch_idx, trainer.num_test_batches)

    def _break_silence(self, trainer: Trainer, what: str, batch_idx: int, totals: Any) -> None:
        """Print the progress of a long epoch from time to time; Lightning may list totals."""
        if self.lines and trainer.is_global_zero:
            total = totals[0] if isinstance(totals, list) else totals
            self._printed.break_silence(f"{what}, batch {batch_idx + 1}/{total}")

    def report_epoch(self, trainer: Trainer) -> None:
        """Tell what came out of an epoch; the learner calls this once its means are logged."""
        done, seconds = trainer.current_epoch + 1, self._epoch.seconds
        named = {
            name: float(trainer.callback_metrics[name])
            for name in ("train/loss", self.score)
            if name in trainer.callback_metrics
        }
        self._emit(trainer, done, score=named.get(self.score), seconds=seconds)
        if self.lines and trainer.is_global_zero:
            numbers = (f"{name} {value:.4f}" for name, value in named.items())
            epoch = f"epoch {done}/{trainer.max_epochs}"
            self._printed.print(", ".join([epoch, *numbers, f"{seconds:.1f} s"]))

    def _emit(self, trainer: Trainer, epoch: int, **more: Any) -> None:
        if self.tell is not None and trainer.is_global_zero:
            self.tell({"state": "training", "epoch": epoch, "epochs": trainer.max_epochs, **more})
