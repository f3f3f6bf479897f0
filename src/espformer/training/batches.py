"""Which examples make a step: decided by the seed, the epoch and the step, and by nothing else.

So a run that was killed in the middle of an epoch goes on with the examples that were left, and a
run on two devices sees in each step what one device would have seen.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from espformer.training.errors import RunError

__all__ = ["ResumableLoader", "SeededBatches", "make_loader", "mix_seed"]


def mix_seed(*numbers: int) -> int:
    """One seed out of several numbers: near inputs give unrelated seeds.

    Example:
        >>> mix_seed(0, 1) == mix_seed(1, 0)
        False
    """
    state = 0
    for number in numbers:
        # The finaliser of splitmix64, on the running state.
        state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


class SeededBatches(Sampler[list[int]]):
    """Batches of indices for one process.

    Every process makes the same global batches and takes its share of each, so the number of
    processes changes who computes a step, not what the step is. A last training batch with fewer
    examples than processes is left out; in evaluation it joins the batch before it.

    Args:
        size: number of examples.
        batch_size: examples of a step, over all processes.
        lengths: tokens of each example, one row per side, ``(sides, size)``; with `max_tokens`.
        max_tokens: tokens of a step, padding included, over all processes, instead of `batch_size`;
            examples of like length share a batch.
        shuffle: a new order in each epoch.
        seed: seed of the orders.
        rank: index of this process.
        world: number of processes.
        resume: (epoch, batch) at which that epoch begins, for a run that goes on inside it.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        lengths: Sequence[Sequence[int]] | None = None,
        max_tokens: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        resume: tuple[int, int] = (0, 0),
    ) -> None:
        self.size, self.batch_size, self.max_tokens = size, batch_size, max_tokens
        self.lengths = None if lengths is None else [torch.as_tensor(side) for side in lengths]
        self.shuffle, self.seed = shuffle, seed
        self.rank, self.world = rank, world
        self.resume = resume
        self.epoch = resume[0]
        if max_tokens is not None and self.lengths is None:
            raise RunError(
                "data.max_tokens needs a data set that knows the lengths of its examples"
            )
        if size < world:
            raise RunError(f"a data set of {size} examples cannot be shared by {world} processes")
        self._count = len(self._global_batches(0))
        if self._count == 0:
            raise RunError(f"no batch can be made of {size} examples with {world} processes")

    @property
    def sampler(self) -> "SeededBatches":
        """Where Lightning looks for `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[list[int]]:
        # Not a generator: with workers the first batches are asked for at once, without they are
        # asked for later, and the epoch must be the same in both.
        first = self.resume[1] if self.epoch == self.resume[0] else 0
        batches = self._global_batches(self.epoch)[first:]
        return iter([batch[self.rank :: self.world] for batch in batches])

    def _global_batches(self, epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch))
        if self.shuffle:
            order = torch.randperm(self.size, generator=generator)
        else:
            order = torch.arange(self.size)
        if self.max_tokens is None or self.lengths is None:
            batches = [chunk.tolist() for chunk in order.split(self.batch_size)]
        else:
            batches = self._by_tokens(order, self.max_tokens)
            if self.shuffle:
                shuffled = torch.randperm(len(batches), generator=generator).tolist()
                batches = [batches[index] for index in shuffled]
        whole = [batch for batch in batches if len(batch) >= self.world]
        if not self.shuffle and len(whole) < len(batches):
            rest = [index for batch in batches if len(batch) < self.world for index in batch]
            whole = [*whole[:-1], (whole[-1] if whole else []) + rest]
        return whole

    def _by_tokens(self, order: torch.Tensor, max_tokens: int) -> list[list[int]]:
        assert self.lengths is not None
        for side in reversed(self.lengths):
            order = order[torch.argsort(side[order], stable=True)]
        longest = torch.stack(self.lengths).amax(0)
        batches: list[list[int]] = []
        batch: list[int] = []
        widest = 0
        for index, tokens in zip(order.tolist(), longest[order].tolist(), strict=True):
            if batch and max(widest, tokens) * (len(batch) + 1) > max_tokens:
                batches.append(batch)
                batch, widest = [], 0
            batch.append(index)
            widest = max(widest, tokens)
        return [*batches, batch] if batch else batches


class ResumableLoader(DataLoader[Any]):
    """A loader whose place is kept by the checkpoint's counters and by its batch sampler."""

    def state_dict(self) -> dict[str, int]:
        """Nothing to add; its presence tells Lightning that the loader can go on mid-epoch."""
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        del state


def make_loader(
    data: Dataset[Any],
    batches: SeededBatches,
    collate: Callable[[list[Any]], Any] | None,
    workers: int,
    pin_memory: bool,
) -> ResumableLoader:
    """A loader over these batches."""
    return ResumableLoader(
        data,
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=pin_memory,
        persistent_workers=workers > 0,
        # Its own generator: making an iterator takes no random number from the training.
        generator=torch.Generator().manual_seed(batches.seed),
    )
