"""The form that every data set takes: a :class:`Task`, its splits, and its batches.

A batch is a dict of tensors:

=============== ======================= ==================================================
key             shape                   content
=============== ======================= ==================================================
``inputs``      (batch, C, H, W)        images, uint8 (floats after ``augment``)
..              (batch, tokens)         token ids of a text, int64, 0 = padding
..              (batch, points, 3)      point clouds, float32
``mask``        (batch, tokens)         texts only: bool, True = takes part
``labels``      (batch,)                classes, int64
``source``      (batch, tokens)         translation: int64, ends with eos
``source_mask`` (batch, tokens)         bool, True = takes part
``target``      (batch, target_tokens)  translation: int64, from bos to eos
``target_mask`` (batch, target_tokens)  bool, True = takes part
=============== ======================= ==================================================
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from espformer.lab.data.vocabulary import Vocabulary

# Different uses of one seed must not draw the same numbers. Draws come from
# ``numpy.random.RandomState``, whose stream numpy keeps unchanged for ever.
SUBSET, VALIDATION, TEST, POOL = range(4)

Batch = dict[str, Tensor]
Indices = Sequence[int] | Tensor

# Widths of padded batches of texts are multiples of this, the rows of a tile of the kernels: fewer
# shapes, so fewer recorded steps, for padding that would be computed anyway.
WIDTH_MULTIPLE = 16


class TensorSet(Dataset[Batch]):
    """A labelled data set that lies in memory as a few tensors.

    A ``DataLoader`` asks it for a whole batch at once, so no worker is needed. Texts are stored
    padded; a batch is cut to its longest text.

    Args:
        inputs: ``(examples, ...)``, images (uint8), token ids (int32) or points (float32).
        labels: ``(examples,)``, classes.
        lengths: ``(examples,)``, tokens that take part in each text; None when all do.

    Example:
        >>> texts = torch.tensor([[5, 6, 0, 0], [7, 8, 9, 0]])
        >>> data = TensorSet(texts, torch.tensor([0, 1]), lengths=torch.tensor([2, 3]))
        >>> data.mask.sum(1)
        tensor([2, 3])
        >>> data.batch([1])["inputs"]
        tensor([[7, 8, 9, 0]])
        >>> on_device = data.to("cpu")  # or "cuda": the whole set then lies on the GPU
    """

    def __init__(self, inputs: Tensor, labels: Tensor, lengths: Tensor | None = None) -> None:
        if len(inputs) != len(labels) or (lengths is not None and len(lengths) != len(inputs)):
            raise ValueError(
                "TensorSet: inputs, labels and lengths must have as many rows as each other, got "
                f"{len(inputs)}, {len(labels)}"
                + ("" if lengths is None else f" and {len(lengths)}")
            )
        self.inputs = inputs
        self.labels = labels.to(torch.int64)
        # On the CPU wherever the inputs are: the width of a batch is then known without waiting
        # for the device. The masks are made on the device.
        self.lengths = None if lengths is None else lengths.to("cpu", torch.int64)
        self._lengths_there = None if self.lengths is None else self.lengths.to(inputs.device)

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def mask(self) -> Tensor | None:
        """``(examples, tokens)``, True = takes part; None when every input does."""
        there = self._lengths_there
        return None if there is None else _mask(there, self.inputs.shape[1])

    @property
    def bytes(self) -> int:
        """Size in memory."""
        tensors = (self.inputs, self.labels, self.lengths)
        return sum(x.numel() * x.element_size() for x in tensors if x is not None)

    def batch(self, indices: Indices, there: Tensor | None = None) -> Batch:
        """The batch of these examples, on the device of the set (no waiting with CPU indices).

        Args:
            indices: rows of the set, best on the CPU.
            there: the same on the device of the set, if they are there already.
        """
        rows = torch.as_tensor(indices, dtype=torch.int64)
        if there is None:
            there = rows.to(self.inputs.device, non_blocking=True)
        labels = self.labels.index_select(0, there)
        if self.lengths is None or self._lengths_there is None:
            # Copies whole rows: on the CPU, for images, twice as fast as indexing with brackets.
            return {"inputs": self.inputs.index_select(0, there), "labels": labels}
        longest = int(self.lengths[rows.cpu()].max()) if len(rows) else 0
        width = min(-(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, self.inputs.shape[1])
        return {
            "inputs": self.inputs[:, :width].index_select(0, there).long(),
            "mask": _mask(self._lengths_there.index_select(0, there), width),
            "labels": labels,
        }

    def __getitems__(self, indices: list[int]) -> Batch:
        return self.batch(indices)

    def subset(self, indices: Indices) -> TensorSet:
        """Copy these examples, in this order, into a set of their own."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        there = rows.to(self.inputs.device)
        lengths = None if self.lengths is None else self.lengths[rows.cpu()]
        return TensorSet(self.inputs.index_select(0, there), self.labels[there], lengths)

    def to(self, device: str | torch.device) -> TensorSet:
        """Return the whole set on this device."""
        return TensorSet(self.inputs.to(device), self.labels.to(device), self.lengths)


def _mask(lengths: Tensor, width: int) -> Tensor:
    return torch.arange(width, device=lengths.device) < lengths[..., None]


@dataclass
class Task:
    """A data set with all that training on it needs.

    A batch of the training split goes through ``augment`` and then ``normalise``, on the device; a
    batch of the other splits through ``normalise`` alone: :meth:`prepare`.

    Args:
        name: of the data set.
        train, test, valid: the splits; ``valid`` is None where nothing is held out.
        classes: number of classes; None in translation.
        augment: random changes of the inputs, called with them and a generator.
        normalise: from stored to network inputs, called with them alone.
        vocabulary: of texts; ``vocabulary.decode`` turns token ids into a text again.
        info: sizes, checksums, source, licence, vocabulary_size, max_length, image_size, channels,
            what differs from the published set; all of it fit for JSON.

    Example:
        >>> from espformer.lab.data import load
        >>> task = load("digits")
        >>> batch = task.train.batch(range(32))
        >>> task.prepare(batch["inputs"], training=True).shape, batch["labels"].shape
        (torch.Size([32, 1, 8, 8]), torch.Size([32]))
    """

    name: str
    train: Dataset[Batch]
    test: Dataset[Batch]
    valid: Dataset[Batch] | None = None
    classes: int | None = None
    augment: nn.Module | None = None
    normalise: nn.Module | None = None
    vocabulary: Vocabulary | None = None
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def splits(self) -> dict[str, Dataset[Batch]]:
        """The splits that exist, by name."""
        named = {"train": self.train, "valid": self.valid, "test": self.test}
        return {name: split for name, split in named.items() if split is not None}

    def prepare(
        self, inputs: Tensor, *, training: bool, generator: torch.Generator | None = None
    ) -> Tensor:
        """Turn the stored inputs of a batch into those of the network, on their device."""
        if training and self.augment is not None:
            inputs = self.augment(inputs, generator)
        return inputs if self.normalise is None else self.normalise(inputs)


def stratified(
    labels: Tensor, fraction: float, seed: int, purpose: int = SUBSET
) -> tuple[Tensor, Tensor]:
    """Choose a share of each class (at least one example); return its indices, and all others.

    With one seed, a smaller share is part of a larger one.

    Example:
        >>> chosen, others = stratified(torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), 0.25, seed=0)
        >>> len(chosen), len(others)
        (2, 6)
    """
    random = np.random.RandomState([seed, purpose])
    classes = labels.cpu().numpy()
    chosen, others = [], []
    for label in np.unique(classes):
        members = random.permutation(np.flatnonzero(classes == label))
        count = max(1, round(fraction * len(members)))
        chosen.append(members[:count])
        others.append(members[count:])
    return (
        torch.from_numpy(np.sort(np.concatenate(chosen))),
        torch.from_numpy(np.sort(np.concatenate(others))),
    )


def hold_out(data: TensorSet, fraction: float, seed: int) -> tuple[TensorSet, TensorSet | None]:
    """Return the set without, and with only, a share of each class; nothing is held out at 0."""
    if fraction == 0:
        return data, None
    held, kept = stratified(data.labels, fraction, seed, VALIDATION)
    return data.subset(kept), data.subset(held)


def sizes(train: TensorSet, valid: TensorSet | None, test: TensorSet) -> dict[str, int]:
    """Count the examples of each split that there is."""
    splits = {"train": train, "valid": valid, "test": test}
    return {name: len(split) for name, split in splits.items() if split is not None}


def digest(indices: Tensor) -> str:
    """Return a checksum of a choice of examples: equal ones are the same choice."""
    return hashlib.sha256(indices.cpu().numpy().astype("<i8").tobytes()).hexdigest()


def check_fraction(name: str, option: str, value: float, *, whole: bool) -> None:
    """Refuse a share outside (0, 1], or outside [0, 1) where the whole makes no sense."""
    if whole and not 0 < value <= 1:
        percent = f" (for {value:g} % pass {option}={value / 100:g})" if value > 1 else ""
        raise ValueError(f"load('{name}'): {option} must be in (0, 1], got {value}{percent}")
    if not whole and not 0 <= value < 1:
        raise ValueError(f"load('{name}'): {option} must be in [0, 1), got {value}")


def check_sizes(name: str, **sizes: int) -> None:
    """Refuse lengths and sizes that are not positive."""
    for option, size in sizes.items():
        if size < 1:
            raise ValueError(f"load('{name}'): {option} must be at least 1, got {size}")
