"""The real data sets, where ESPFORMER_DATA names the folder that holds them."""

import pytest
import torch

from espformer.lab.data import load

slow = pytest.mark.slow


def known(name, folder, **options):
    """The task, if its files are those whose checksums are known."""
    task = load(name, data_dir=folder, **options)
    if task.info["checked_against"] != "known":
        pytest.skip(f"{task.info['source']} holds another version of {name}")
    return task


def test_mnist(real):
    task = known("mnist", real)
    assert task.info["sizes"] == {"train": 60_000, "test": 10_000}
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert task.train.labels.bincount().tolist() == counts
    prepared = task.prepare(task.train.inputs, training=False)
    assert prepared.mean().item() == pytest.approx(0, abs=1e-3)
    assert prepared.std().item() == pytest.approx(1, abs=1e-3)


def test_modelnet40(real):
    task = known("modelnet40", real)
    assert task.info["sizes"] == {"train": 9843, "test": 2468}
    assert task.train.inputs.norm(dim=-1).amax(1).mean().item() == pytest.approx(1, abs=1e-3)
    assert task.train.inputs.mean((0, 1)).abs().max() < 1e-3
    assert task.info["class_names"][0] == "airplane"
    assert task.train.labels.bincount()[[0, 8]].tolist() == [626, 889]  # airplanes, chairs


def test_tweeteval(real):
    task = known("tweeteval", real)
    assert task.train.labels.bincount().tolist() == [7093, 20673, 17849]
    assert task.valid.labels.bincount().tolist() == [312, 869, 819]
    assert task.test.labels.bincount().tolist() == [3972, 5937, 2375]
    assert task.info["vocabulary_size"] == 16_000
    assert (task.train.inputs == task.vocabulary.unknown).sum() == 0
    two = known("tweeteval", real, classes=2)
    assert two.info["sizes"] == {"train": 24_942, "valid": 1_131, "test": 6_347}
    assert two.info["differences"] == task.info["differences"]


def test_multi30k(real):
    task = known("multi30k", real)
    assert task.info["sizes"] == {"train": 29_000, "valid": 1_014, "test": 1_000}
    batch = task.test.batch(range(1000))
    exact = sum(
        task.vocabulary.decode(row) == text
        for row, text in zip(batch["target"], task.test.target_texts, strict=True)
    )
    assert exact >= 998  # all but runs of spaces and characters never seen in training


@pytest.mark.parametrize(("subset", "pairs"), [("iwslt14", 47_059), ("all", 63_772)])
def test_iwslt14(real, subset, pairs):
    task = known("iwslt14", real, subset=subset)
    assert len(task.train) + task.info["left_out_of_training"] == pairs
    assert task.info["left_out_of_training"] < 20
    assert (len(task.valid), len(task.test)) == (7_283, 6_750)
    assert task.info["vocabulary_size"] == 10_000


@slow
def test_imdb(real):
    task = known("imdb", real)
    assert task.train.labels.bincount().tolist() == [12_500, 12_500]
    assert task.test.labels.bincount().tolist() == [12_500, 12_500]
    assert task.info["vocabulary_size"] == 16_000
    assert 200 < task.train.lengths.float().mean() < 300


@slow
def test_cats_dogs(real):
    task = known("cats_dogs", real)
    assert task.train.inputs.shape == (5000, 3, 224, 224)
    assert task.train.labels.bincount().tolist() == [2500, 2500]
    assert task.test.labels.bincount().tolist() == [1000, 1000]
    means = task.train.inputs[::10].float().mean((0, 2, 3)) / 255
    torch.testing.assert_close(means, torch.tensor([0.49, 0.455, 0.417]), rtol=0, atol=0.02)
    for fraction, each in ((0.01, 25), (0.1, 250), (0.25, 625)):
        part = known("cats_dogs", real, fraction=fraction, seed=2)
        assert part.train.labels.bincount().tolist() == [each, each]
