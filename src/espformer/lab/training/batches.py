"""The examples of each step: determined by the seed, the epoch and the step alone.

So a run that was killed in the middle of an epoch goes on with the examples that were left, and a
run on two devices sees in each step what one device would have seen.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from espformer.lab.data import Batch, TensorSet
from espformer.lab.errors import RunError


def mix_seed(*numbers: int) -> int:
    """Return one seed out of several numbers: near inputs give unrelated seeds.

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
    than `least` examples for each process is left out; in evaluation one that has not an example
    for each joins the batch before it.

    Args:
        size: number of examples.
        batch_size: examples of a step, over all processes.
        lengths: tokens of each example, one row per side, ``(sides, size)``; if they are given,
            examples of like length share a batch.
        max_tokens: tokens of a step, padding included, over all processes, instead of `batch_size`;
            with `lengths`.
        shuffle: a new order in each epoch.
        seed: seed of the orders.
        rank: index of this process.
        world: number of processes.
        resume: (epoch, batch) at which that epoch begins, for a run that goes on inside it.
        least: examples that each process needs for a training step; batch norms need two.
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
        least: int = 1,
    ) -> None:
        self.least = least if shuffle else 1
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
            needed = "" if self.least == 1 else f", of at least {self.least} examples for each"
            raise RunError(
                f"no batch can be made of {size} examples with {world} processes{needed}"
            )

    @property
    def sampler(self) -> "SeededBatches":
        """The object on which Lightning looks for `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[list[int]]:
        # Not a generator: with workers the first batches are asked for at once, without they are
        # asked for later, and the epoch must be the same in both.
        return iter([batch.tolist() for batch in self.tensors()])

    def tensors(self) -> list[Tensor]:
        """Return the batches of this process that are left of the epoch, as tensors of indices."""
        first = self.resume[1] if self.epoch == self.resume[0] else 0
        batches = self._global_batches(self.epoch)[first:]
        return [batch[self.rank :: self.world] for batch in batches]

    def _global_batches(self, epoch: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch))
        if self.shuffle:
            order = torch.randperm(self.size, generator=generator)
        else:
            order = torch.arange(self.size)
        if self.lengths is None:
            batches = list(order.split(self.batch_size))
        else:
            for side in reversed(self.lengths):
                order = order[torch.argsort(side[order], stable=True)]
            batches = list(order.split(self._sizes(order, self.lengths)))
            if self.shuffle:
                shuffled = torch.randperm(len(batches), generator=generator).tolist()
                batches = [batches[index] for index in shuffled]
        fewest = self.least * self.world
        whole = [batch for batch in batches if len(batch) >= fewest]
        if not self.shuffle and len(whole) < len(batches):
            rest = [batch for batch in batches if len(batch) < fewest]
            whole = [*whole[:-1], torch.cat([*whole[-1:], *rest])]
        return whole

    def _sizes(self, order: Tensor, lengths: list[Tensor]) -> int | list[int]:
        """Examples of each batch of this order, or of every one."""
        if self.max_tokens is None:
            return self.batch_size
        sizes: list[int] = []
        count, widest = 0, 0
        for tokens in torch.stack(lengths).amax(0)[order].tolist():
            if count and max(widest, tokens) * (count + 1) > self.max_tokens:
                sizes.append(count)
                count, widest = 0, 0
            count += 1
            widest = max(widest, tokens)
        return [*sizes, count]


class _Resumable:
    """A loader whose place is kept by the checkpoint's counters and by its batch sampler."""

    def state_dict(self) -> dict[str, int]:
        """Nothing to add; its presence tells Lightning that the loader can go on mid-epoch."""
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        del state


class ResumableLoader(_Resumable, DataLoader[Any]):
    """A loader that makes each batch when it is its turn."""


class TensorLoader(_Resumable):
    """A loader for a set of tensors: it selects the rows of a batch where the set lies.

    On a GPU this queues work and waits for nothing; the order of an epoch goes there in one piece.

    Args:
        data: the set.
        batches: which rows make a batch.
    """

    def __init__(self, data: TensorSet, batches: SeededBatches) -> None:
        self.data, self.batch_sampler = data, batches

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Batch]:
        batches = self.batch_sampler.tensors()
        there = torch.cat(batches).to(self.data.inputs.device) if batches else torch.empty(0)
        shares = there.split([len(rows) for rows in batches])
        # The iterator keeps the epoch in which it was requested, even if another starts before its
        # first batch.
        return (self.data.batch(rows, share) for rows, share in zip(batches, shares, strict=True))


Loader = ResumableLoader | TensorLoader


def make_loader(
    data: Dataset[Any], batches: SeededBatches, workers: int, device: torch.device | None = None
) -> Loader:
    """Return a loader over these batches.

    Args:
        data: the data set; one of tensors is taken to the device if it fits there well.
        batches: which examples make a batch.
        workers: processes that make them; 0 is none beside this one.
        device: where the batches are needed.
    """
    on_gpu = device is not None and device.type == "cuda"
    if isinstance(data, TensorSet) and workers == 0:
        if device is not None and on_gpu and data.bytes <= _room(device):
            data = data.to(device)
        return TensorLoader(data, batches)
    return ResumableLoader(
        data,
        batch_sampler=batches,
        collate_fn=_as_it_is,
        num_workers=workers,
        pin_memory=on_gpu,
        persistent_workers=workers > 0,
        # Its own generator: making an iterator takes no random number from the training.
        generator=torch.Generator().manual_seed(batches.seed),
    )


def _as_it_is(batch: Any) -> Any:
    """Return a batch as the data set gives it: nothing is left to collate."""
    return batch


def _room(device: torch.device) -> int:
    """Return how many bytes a data set may take, so that sixteen runs leave half of a device."""
    return torch.cuda.get_device_properties(device).total_memory // 32
