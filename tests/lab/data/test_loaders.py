"""Each data set on tiny files: shapes, labels, options, subsets."""

import numpy as np
import pytest
import torch

from espformer.lab.data import load
from espformer.lab.data.transforms import PointCloudAugment, RotateScale


def test_digits_are_those_of_scikit_learn():
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    task = load("digits")
    images = torch.cat([task.train.inputs, task.test.inputs])
    labels = torch.cat([task.train.labels, task.test.labels])
    ours = {(tuple(i.flatten().tolist()), int(t)) for i, t in zip(images, labels, strict=True)}
    theirs = {
        (tuple(i.astype(int).tolist()), int(t))
        for i, t in zip(digits.data, digits.target, strict=True)
    }
    assert ours == theirs
    assert (len(task.train), len(task.test)) == (1438, 359)
    prepared = task.prepare(task.train.inputs, training=False)
    assert prepared.mean().item() == pytest.approx(0, abs=1e-3)
    assert prepared.std().item() == pytest.approx(1, abs=1e-3)


def test_digits_are_tested_on_the_same_images_whatever_the_seed():
    first, second = load("digits", seed=0, validation=0.1), load("digits", seed=1, validation=0.1)
    assert torch.equal(first.test.inputs, second.test.inputs)
    assert not torch.equal(first.valid.inputs, second.valid.inputs)


def test_mnist(tiny):
    task = load("mnist", data_dir=tiny, validation=0.1)
    with np.load(tiny / "mnist" / "mnist.npz") as file:
        assert np.array_equal(task.test.inputs[:, 0].numpy(), file["x_test"])
        assert np.array_equal(task.test.labels.numpy(), file["y_test"])
    assert task.info["sizes"] == {"train": 180, "valid": 20, "test": 100}
    assert task.info["differences"][0] == "train: 200 examples, the published set has 60,000"
    assert task.valid.labels.bincount().tolist() == [2] * 10
    assert (task.info["image_size"], task.info["channels"], task.classes) == (28, 1, 10)
    batch = task.train.batch([0, 1])
    expected = (batch["inputs"].float() / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(task.prepare(batch["inputs"], training=True), expected)


def test_cats_dogs(tiny):
    task = load("cats_dogs", data_dir=tiny)
    assert task.train.inputs.shape == (120, 3, 224, 224)
    assert task.train.inputs.dtype == torch.uint8
    assert task.test.labels.bincount().tolist() == [20, 20]
    # Stripes lie in cats and stand in dogs.
    images = task.train.inputs.float()
    lie = images.std(2).mean((1, 2)) > images.std(3).mean((1, 2))
    assert torch.equal(lie, task.train.labels == 0)
    prepared = task.prepare(task.test.inputs[:4], training=False)
    torch.testing.assert_close(prepared, task.test.inputs[:4].float() / 255)
    changed = task.prepare(task.train.inputs[:4], training=True)
    assert changed.shape == (4, 3, 224, 224)
    assert not torch.allclose(changed, task.train.inputs[:4].float() / 255)


def test_cats_dogs_subsets(tiny):
    def subset(**options):
        return load("cats_dogs", data_dir=tiny, image_size=16, **options)

    quarter = subset(fraction=0.25, seed=1)
    assert quarter.train.labels.bincount().tolist() == [15, 15]
    again = subset(fraction=0.25, seed=1, augment=False)
    assert quarter.info["subset"] == again.info["subset"]
    assert torch.equal(quarter.train.inputs, again.train.inputs)
    other = subset(fraction=0.25, seed=2)
    assert quarter.info["subset"]["sha256"] != other.info["subset"]["sha256"]
    assert torch.equal(quarter.test.inputs, other.test.inputs)
    rows = {row.numpy().tobytes() for row in quarter.train.inputs}
    tenth = {row.numpy().tobytes() for row in subset(fraction=0.1, seed=1).train.inputs}
    assert len(tenth) == 12
    assert tenth < rows
    assert not rows & {row.numpy().tobytes() for row in quarter.test.inputs}
    held = subset(fraction=0.5, seed=1, validation=0.2)
    assert held.info["sizes"] == {"train": 48, "valid": 12, "test": 40}


def test_cats_dogs_options(tiny):
    small = load("cats_dogs", data_dir=tiny, image_size=32, augment=False)
    assert small.train.inputs.shape == (120, 3, 32, 32)
    assert small.augment is None
    with pytest.raises(ValueError, match=r"fraction must be in \(0, 1\], got 25 \(for 25 % pass"):
        load("cats_dogs", data_dir=tiny, fraction=25)


def test_imdb(tiny):
    task = load("imdb", data_dir=tiny, max_length=32, vocabulary_size=300)
    assert task.train.inputs.shape == (100, 32)
    assert task.info["max_length"] == 32
    assert task.info["vocabulary_size"] == len(task.vocabulary) <= 300
    assert int(task.train.inputs.max()) < len(task.vocabulary)
    assert task.train.lengths.min() >= 1
    assert torch.equal(task.train.mask.sum(1), task.train.lengths)
    assert (task.train.inputs[~task.train.mask] == 0).all()
    assert (task.train.inputs[task.train.mask] != 0).all()
    longer = load("imdb", data_dir=tiny, max_length=500, vocabulary_size=300)
    assert torch.equal(task.train.inputs[:, :32], longer.train.inputs[:, :32])
    import pyarrow.parquet

    text = pyarrow.parquet.read_table(tiny / "imdb" / "train.parquet")["text"][0].as_py()
    decoded = task.vocabulary.decode(longer.train.inputs[0])
    assert decoded.split() == text.replace("<br />", " ").split()


def test_imdb_pooled_as_the_code_of_the_paper_does(tiny):
    first = load("imdb", data_dir=tiny, split="pooled", seed=0)
    assert first.info["sizes"] == {"train": 128, "test": 32}
    second = load("imdb", data_dir=tiny, split="pooled", seed=1)
    assert first.info["vocabulary_sha256"] != second.info["vocabulary_sha256"]
    texts = [first.vocabulary.decode(row) for row in first.train.inputs]
    tested = [first.vocabulary.decode(row) for row in first.test.inputs]
    assert not set(texts) & set(tested)
    with pytest.raises(ValueError, match="split must be published or pooled"):
        load("imdb", data_dir=tiny, split="half")


def test_held_out_texts_are_not_learnt_from(tiny):
    """The vocabulary is that of the texts that are left."""
    from espformer.lab.data.vocabulary import Vocabulary

    task = load("imdb", data_dir=tiny, validation=0.3, vocabulary_size=200)
    assert task.info["sizes"] == {"train": 70, "valid": 30, "test": 60}
    assert task.info["differences"][0].startswith("train: 100 examples")
    texts = [task.vocabulary.decode(row) for row in task.train.inputs]
    assert Vocabulary.learn(texts, 200).digest == task.vocabulary.digest
    held = {task.vocabulary.decode(row) for row in task.valid.inputs}
    assert not held & set(texts)


def test_tweeteval(tiny):
    three = load("tweeteval", data_dir=tiny)
    assert three.info["sizes"] == {"train": 150, "valid": 30, "test": 60}
    assert (three.classes, three.info["max_length"]) == (3, 128)
    two = load("tweeteval", data_dir=tiny, classes=2)
    assert two.info["sizes"] == {"train": 100, "valid": 20, "test": 40}
    assert two.info["class_names"] == ["negative", "positive"]
    # What was left out on request is no difference from the published set.
    assert two.info["differences"] == three.info["differences"]
    for split, data in three.splits.items():
        kept = data.labels != 1
        assert torch.equal(two.splits[split].labels, (data.labels[kept] == 2).long())
        texts = [three.vocabulary.decode(row) for row in data.inputs[kept]]
        assert texts == [two.vocabulary.decode(row) for row in two.splits[split].inputs]
    with pytest.raises(ValueError, match="classes must be 2 or 3, got 4"):
        load("tweeteval", data_dir=tiny, classes=4)


def test_modelnet40(tiny):
    task = load("modelnet40", data_dir=tiny, points=256)
    assert task.train.inputs.shape == (160, 256, 3)
    assert task.train.inputs.dtype == torch.float32
    assert (task.classes, len(task.info["class_names"])) == (40, 40)
    with np.load(tiny / "modelnet40" / "test.npz") as file:
        expected = file["points_i16"][:, :256].astype("float32") / 2048
        assert np.array_equal(task.test.inputs.numpy(), expected)
        names = [str(name).rsplit("_", 1)[0] for name in file["name"]]
    assert names == [task.info["class_names"][label] for label in task.test.labels]
    whole = load("modelnet40", data_dir=tiny)
    assert whole.train.inputs.norm(dim=-1).max() <= 1.001
    assert isinstance(whole.augment, PointCloudAugment)


def test_modelnet40_for_set_transformers(tiny):
    task = load("modelnet40", data_dir=tiny, protocol="set_transformer")
    clouds = task.train.inputs
    torch.testing.assert_close(clouds.mean((1, 2)), torch.zeros(160), rtol=0, atol=1e-5)
    torch.testing.assert_close(clouds.std((1, 2), correction=0), torch.ones(160))
    assert isinstance(task.augment, RotateScale)
    assert load("modelnet40", data_dir=tiny, augment=False).augment is None
    with pytest.raises(ValueError, match=r"points must be in 1\.\.1024, got 5000"):
        load("modelnet40", data_dir=tiny, points=5000)
    with pytest.raises(ValueError, match="protocol must be pct or set_transformer"):
        load("modelnet40", data_dir=tiny, protocol="pointnet")


@pytest.mark.parametrize("name", ["mnist", "imdb", "modelnet40", "cats_dogs"])
def test_validation_must_leave_something(name, tiny):
    with pytest.raises(ValueError, match=r"validation must be in \[0, 1\), got 1"):
        load(name, data_dir=tiny, validation=1)
