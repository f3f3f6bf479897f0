"""Batches are decided by seed, epoch and step: resumable, the same for any number of processes."""

import pytest
import torch
from torch.utils.data import TensorDataset

from espformer.lab.errors import RunError
from espformer.lab.training.batches import SeededBatches, make_loader, mix_seed


def epoch_of(batches, epoch):
    batches.set_epoch(epoch)
    return list(batches)


@pytest.mark.parametrize(("size", "batch_size"), [(10, 3), (9, 3), (1, 4), (100, 7)])
def test_each_example_once_per_epoch_in_a_new_order(size, batch_size):
    batches = SeededBatches(size, batch_size, seed=1)
    first, second = epoch_of(batches, 0), epoch_of(batches, 1)
    assert len(batches) == len(first) == -(-size // batch_size)
    for epoch in (first, second):
        assert sorted(i for batch in epoch for i in batch) == list(range(size))
    assert size < 5 or first != second
    assert first == epoch_of(SeededBatches(size, batch_size, seed=1), 0)
    assert size < 5 or first != epoch_of(SeededBatches(size, batch_size, seed=2), 0)


@pytest.mark.parametrize("done", [0, 1, 3])
def test_resuming_gives_what_was_left(done):
    whole = epoch_of(SeededBatches(10, 3, seed=5), 2)
    resumed = SeededBatches(10, 3, seed=5, resume=(2, done))
    assert list(resumed) == whole[done:]
    assert list(resumed) == whole[done:], "asking twice changes nothing"
    assert len(resumed) == 4, "the length is that of the epoch"
    assert epoch_of(resumed, 3) == epoch_of(SeededBatches(10, 3, seed=5), 3)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_processes_share_out_each_batch(world):
    alone = epoch_of(SeededBatches(22, 8, seed=3), 1)
    shares = [epoch_of(SeededBatches(22, 8, seed=3, rank=r, world=world), 1) for r in range(world)]
    assert len({len(share) for share in shares}) == 1
    for step, batch in enumerate(alone):
        together = [index for share in shares for index in share[step]]
        assert sorted(together) == sorted(batch)
        assert all(share[step] for share in shares)


def test_a_remainder_too_small_to_share():
    training = SeededBatches(9, 4, seed=0, world=2)
    assert len(training) == 2, "one example cannot be shared by two: left out"
    parts = [SeededBatches(9, 4, shuffle=False, rank=r, world=2) for r in range(2)]
    assert sorted(i for part in parts for batch in part for i in batch) == list(range(9))
    with pytest.raises(RunError, match="cannot be shared by 4"):
        SeededBatches(3, 8, world=4)


def test_batches_by_tokens():
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(1, 30, (200,), generator=generator)
    target = torch.randint(1, 30, (200,), generator=generator)
    batches = SeededBatches(200, 1, lengths=[source, target], max_tokens=100, seed=1)
    longest = torch.maximum(source, target)
    for epoch in range(3):
        made = epoch_of(batches, epoch)
        assert len(made) == len(batches), "the number of batches is that of every epoch"
        assert sorted(i for batch in made for i in batch) == list(range(200))
        assert all(len(b) == 1 or longest[b].max() * len(b) <= 100 for b in made)
    padded = sum(int(longest[b].max()) * len(b) for b in made)
    assert padded < 1.6 * int(longest.sum()), "sentences of like length are together"
    with pytest.raises(RunError, match="knows the lengths"):
        SeededBatches(3, 1, max_tokens=10)


def test_batches_of_like_length():
    lengths = torch.randint(1, 30, (203,), generator=torch.Generator().manual_seed(0))
    batches = SeededBatches(203, 8, lengths=[lengths], seed=1)
    orders = [epoch_of(batches, epoch) for epoch in range(2)]
    for made in orders:
        assert sorted(len(batch) for batch in made) == [3, *[8] * 25]
        assert sorted(i for batch in made for i in batch) == list(range(203))
        assert sum(int(lengths[b].max()) * len(b) for b in made) < 1.1 * int(lengths.sum())
        widest = [int(lengths[batch].max()) for batch in made]
        assert widest != sorted(widest), "short ones do not come first"
    sets = [{frozenset(batch) for batch in made} for made in orders]
    assert len(sets[0] & sets[1]) < 5, "who shares a batch changes from epoch to epoch"


class Whole(TensorDataset):
    """Gives whole batches, as the data sets of the laboratory do."""

    def __getitems__(self, rows):
        return self[rows]


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_follows_the_epoch(workers):
    batches = SeededBatches(10, 4, seed=2, resume=(1, 1))
    loader = make_loader(Whole(torch.arange(10)), batches, workers)
    expected = epoch_of(SeededBatches(10, 4, seed=2), 1)[1:]
    assert [batch[0].tolist() for batch in loader] == expected
    batches.set_epoch(2)
    expected = epoch_of(SeededBatches(10, 4, seed=2), 2)
    assert [batch[0].tolist() for batch in loader] == expected
    before = torch.get_rng_state()
    iter(loader)
    assert torch.equal(before, torch.get_rng_state()), "a loader takes no random numbers"


def test_mixed_seeds_differ():
    seeds = {mix_seed(a, b, c) for a in range(10) for b in range(10) for c in range(10)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(("size", "world", "kept"), [(9, 1, 2), (10, 1, 3), (11, 2, 2), (12, 2, 3)])
def test_a_batch_too_small_for_a_batch_norm_is_left_out_of_training(size, world, kept):
    """Two examples at least for each process; which ones are left out changes with the epoch."""
    whole = [SeededBatches(size, 4, least=2, rank=rank, world=world) for rank in range(world)]
    assert {len(batches) for batches in whole} == {kept}
    assert all(len(batch) >= 2 for batches in whole for batch in batches)
    assert len(SeededBatches(9, 4, least=2, shuffle=False)) == 3, "evaluation misses nothing"
    with pytest.raises(RunError, match="of at least 2 examples for each"):
        SeededBatches(1, 4, least=2)
