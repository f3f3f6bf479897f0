"""Sums over an epoch, kept on the device: a step adds to them and waits for nothing."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["EpochMeans"]


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
