"""Batches, splits and the registry: what every data set has in common."""

import json
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, Subset

import espformer.lab.data
from espformer.lab.data import Task, TensorSet, available, load
from espformer.lab.data.base import digest, hold_out, stratified
from tests.processes import run_beside_torch


def texts(lengths, width):
    """A TensorSet whose row i holds i + 1 at each of its tokens."""
    lengths = torch.tensor(lengths)
    inside = torch.arange(width) < lengths[:, None]
    rows = torch.arange(1, len(lengths) + 1, dtype=torch.int32)[:, None]
    return TensorSet(torch.where(inside, rows, 0), torch.arange(len(lengths)) % 3, lengths)


def as_it_is(batch):
    """A data set gives whole batches."""
    return batch


def test_batches_of_texts_are_cut_to_the_longest_and_masked():
    data = texts([3, 9, 20, 1], width=21)
    batch = data.batch([1, 0])
    assert batch["inputs"].shape == (2, 16)  # 9 tokens, up to the next multiple of eight
    assert batch["inputs"].dtype == torch.int64
    assert batch["mask"].sum(1).tolist() == [9, 3]
    assert torch.equal(batch["inputs"] != 0, batch["mask"])
    assert batch["labels"].tolist() == [1, 0]
    assert data.batch([2])["inputs"].shape == (1, 21)  # never wider than the set
    assert data.mask.sum(1).tolist() == [3, 9, 20, 1]


def test_images_keep_their_bytes():
    images = torch.randint(256, (5, 3, 4, 4), dtype=torch.uint8)
    data = TensorSet(images, torch.zeros(5, dtype=torch.uint8))
    batch = data.batch(torch.tensor([4, 0]))
    assert batch["inputs"].dtype == torch.uint8
    assert batch["labels"].dtype == torch.int64
    assert torch.equal(batch["inputs"], images[[4, 0]])
    assert data.mask is None
    assert "mask" not in batch


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_gives_each_example_once(workers):
    data = texts([3, 9, 20, 1, 5], width=24)
    loader = DataLoader(data, batch_size=2, shuffle=True, collate_fn=as_it_is, num_workers=workers)
    seen = [int(row[0]) for batch in loader for row in batch["inputs"]]
    assert sorted(seen) == [1, 2, 3, 4, 5]


def test_subset_of_torch_works():
    data = texts([3, 9, 20, 1], width=21)
    batch = next(iter(DataLoader(Subset(data, [2, 3]), batch_size=2, collate_fn=as_it_is)))
    assert batch["inputs"][:, 0].tolist() == [3, 4]


def test_rows_must_match():
    with pytest.raises(ValueError, match="as many rows"):
        TensorSet(torch.zeros(3, 2), torch.zeros(2))


def test_stratified_is_reproducible_nested_and_disjoint():
    labels = torch.tensor([0] * 40 + [1] * 60 + [2] * 100)
    chosen, others = stratified(labels, 0.25, seed=3)
    assert labels[chosen].bincount().tolist() == [10, 15, 25]
    assert sorted(chosen.tolist() + others.tolist()) == list(range(200))
    assert torch.equal(chosen, stratified(labels, 0.25, seed=3)[0])
    assert not torch.equal(chosen, stratified(labels, 0.25, seed=4)[0])
    smaller, _ = stratified(labels, 0.1, seed=3)
    assert set(smaller.tolist()) < set(chosen.tolist())
    # The stream is numpy's frozen one: these numbers must never change.
    assert digest(chosen)[:16] == "892e33c8690c01f1"


def test_every_class_keeps_an_example():
    chosen, _ = stratified(torch.tensor([0] * 50 + [1] * 3), 0.01, seed=0)
    assert len(chosen) == 2


def test_hold_out_takes_nothing_at_zero():
    data = TensorSet(torch.arange(20), torch.arange(20) % 2)
    assert hold_out(data, 0.0, seed=0) == (data, None)
    train, valid = hold_out(data, 0.2, seed=0)
    assert valid is not None
    assert sorted(train.inputs.tolist() + valid.inputs.tolist()) == list(range(20))
    assert valid.labels.bincount().tolist() == [2, 2]


def test_task_prepares_inputs():
    class Add(torch.nn.Module):
        def forward(self, inputs, generator=None):
            return inputs + 1

    class Double(torch.nn.Module):
        def forward(self, inputs):
            return inputs * 2

    data = TensorSet(torch.zeros(1), torch.zeros(1))
    task = Task("t", data, data, augment=Add(), normalise=Double())
    assert task.prepare(torch.tensor([3.0]), training=True).item() == 8
    assert task.prepare(torch.tensor([3.0]), training=False).item() == 6
    assert Task("t", data, data).prepare(torch.tensor([3.0]), training=True).item() == 3


@pytest.mark.parametrize("name", available())
def test_every_task(name, tiny):
    """What all tasks promise: batches, dtypes, labels in range, JSON."""
    task = load(name, data_dir=None if name == "digits" else tiny)
    assert task.name == name
    json.dumps(task.info)
    for key in ("source", "sizes", "sha256", "licence", "differences", "checked_against"):
        assert key in task.info
    assert task.info["sizes"] == {split: len(data) for split, data in task.splits.items()}
    for split, data in task.splits.items():
        batch = next(iter(DataLoader(data, batch_size=8, collate_fn=as_it_is)))
        again = data.batch(range(8))
        assert all(torch.equal(again[key], value) for key, value in batch.items())
        if task.classes is None:
            continue
        labels = task.splits[split].labels
        assert labels.dtype == torch.int64
        assert labels.min() >= 0
        assert labels.max() < task.classes
        prepared = task.prepare(batch["inputs"], training=split == "train")
        assert prepared.shape == batch["inputs"].shape
    assert len(pickle.dumps(task.vocabulary)) > 0


@pytest.mark.parametrize("name", available())
def test_loading_twice_gives_the_same(name, tiny, monkeypatch, tmp_path):
    data_dir = None if name == "digits" else tiny
    first = load(name, data_dir=data_dir, seed=5)
    monkeypatch.setenv("ESPFORMER_CACHE", str(tmp_path))  # so that nothing is merely read back
    second = load(name, data_dir=data_dir, seed=5)
    third = load(name, data_dir=data_dir, seed=5)  # and now it is
    for other in (second, third):
        assert first.info == other.info
        for split, data in first.splits.items():
            batch, same = data.batch(range(len(data))), other.splits[split].batch(range(len(data)))
            assert all(torch.equal(batch[key], same[key]) for key in batch)


def test_unknown_names_and_options_are_told_the_nearest():
    with pytest.raises(ValueError, match=r"no data set 'minst', did you mean 'mnist'\?"):
        load("minst")
    with pytest.raises(TypeError, match=r"no option 'fractions', did you mean 'fraction'\?"):
        load("cats_dogs", fractions=0.1)
    with pytest.raises(ValueError, match="choose from cats_dogs, digits"):
        load("???")
    with pytest.raises(ValueError, match="seed must be an integer"):
        load("digits", seed=-1)


def test_options_of_every_set_are_listed():
    assert espformer.lab.data.options("cats_dogs")["fraction"] == 1.0
    assert "seed" not in espformer.lab.data.options("imdb")


def test_import_needs_no_optional_package():
    program = """
        import sys
        import espformer.lab.data
        optional = {"pyarrow", "PIL", "sentencepiece", "huggingface_hub"}
        assert not optional & set(sys.modules)
        task = espformer.lab.data.load("digits")
        assert "sklearn" not in sys.modules
    """
    done = run_beside_torch(program)
    assert done.returncode == 0, done.stderr
