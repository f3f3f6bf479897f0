"""Reproducible parts of a data set: the same for every method, machine and library version.

Draws come from ``numpy.random.RandomState``, whose stream numpy keeps unchanged for ever.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor

from espformer.lab.data.base import TensorSet

__all__ = ["check_fraction", "digest", "hold_out", "sizes", "stratified"]

# Different uses of one seed must not draw the same numbers.
SUBSET, VALIDATION, TEST, POOL = range(4)


def stratified(
    labels: Tensor, fraction: float, seed: int, purpose: int = SUBSET
) -> tuple[Tensor, Tensor]:
    """Indices of a share of each class (at least one example), and of all the others, sorted.

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
    """Number of examples of each split that there is."""
    splits = {"train": train, "valid": valid, "test": test}
    return {name: len(split) for name, split in splits.items() if split is not None}


def digest(indices: Tensor) -> str:
    """sha256 of a choice of examples, by which two runs can tell that they chose the same."""
    return hashlib.sha256(indices.cpu().numpy().astype("<i8").tobytes()).hexdigest()


def check_fraction(name: str, option: str, value: float, *, whole: bool) -> None:
    """Refuse a share outside (0, 1], or outside [0, 1) where the whole makes no sense."""
    if whole and not 0 < value <= 1:
        percent = f" (for {value:g} % pass {option}={value / 100:g})" if value > 1 else ""
        raise ValueError(f"load('{name}'): {option} must be in (0, 1], got {value}{percent}")
    if not whole and not 0 <= value < 1:
        raise ValueError(f"load('{name}'): {option} must be in [0, 1), got {value}")
