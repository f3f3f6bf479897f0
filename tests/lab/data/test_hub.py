"""Loading from the hub, with a hub that hands out made-up files in the hub's own forms."""

import io

import numpy as np
import pytest
import torch

from espformer.lab.data import DataMissing, load

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
Image = pytest.importorskip("PIL.Image")


def png(pixels):
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "PNG")
    return {"bytes": encoded.getvalue(), "path": None}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Give it tables by path; it serves them and notes how it was asked."""

    class Hub:
        def __init__(self):
            self.tables, self.calls = {}, []

        def download(self, **arguments):
            self.calls.append(arguments)
            for path, columns in self.tables.items():
                (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
                parquet.write_table(pyarrow.table(columns), tmp_path / path)
            return str(tmp_path)

    served = Hub()
    monkeypatch.setattr("huggingface_hub.snapshot_download", served.download)
    return served


def test_mnist(hub):
    images = np.random.RandomState(0).randint(0, 256, (30, 28, 28)).astype(np.uint8)
    labels = np.arange(30) % 10
    rows = {"image": [png(image) for image in images], "label": labels}
    hub.tables = {"mnist/train/0000.parquet": rows, "mnist/test/0000.parquet": rows}
    task = load("mnist")
    assert np.array_equal(task.train.inputs[:, 0].numpy(), images)
    assert np.array_equal(task.test.labels.numpy(), labels)
    assert hub.calls == [
        {
            "repo_id": "ylecun/mnist",
            "repo_type": "dataset",
            "revision": "refs/convert/parquet",
            "allow_patterns": ["mnist/test/*.parquet", "mnist/train/*.parquet"],
        }
    ]
    assert task.info["source"] == "hub: ylecun/mnist, mnist"
    assert set(task.info["sha256"]) == {"train/0000.parquet", "test/0000.parquet"}


def test_cats_dogs_have_one_split_there(hub):
    random = np.random.RandomState(0)
    shards = {}
    for shard in range(2):
        sizes = random.randint(20, 60, (20, 2))
        images = [random.randint(0, 256, (*size, 3)).astype(np.uint8) for size in sizes]
        rows = {"image": [png(image) for image in images], "labels": np.arange(20) % 2}
        shards[f"default/train/000{shard}.parquet"] = rows
    hub.tables = shards
    task = load("cats_dogs", image_size=32)
    assert hub.calls[0]["allow_patterns"] == ["default/train/*.parquet"]
    assert task.info["sizes"] == {"train": 32, "test": 8}
    assert task.train.inputs.shape == (32, 3, 32, 32)
    assert task.test.labels.bincount().tolist() == [4, 4]
    other = load("cats_dogs", image_size=32, seed=3, fraction=0.5)
    assert torch.equal(task.test.inputs, other.test.inputs)
    train = {row.numpy().tobytes() for row in task.train.inputs}
    assert not train & {row.numpy().tobytes() for row in task.test.inputs}


def test_grey_and_transparent_images_become_rgb(hub):
    pixels = np.random.RandomState(0).randint(0, 256, (40, 40, 4)).astype(np.uint8)
    forms = [pixels, pixels[..., :3], pixels[..., 0]]
    rows = {"image": [png(forms[i % 3]) for i in range(12)], "labels": np.arange(12) % 2}
    hub.tables = {"default/train/0000.parquet": rows}
    assert load("cats_dogs", image_size=16).train.inputs.shape[1] == 3


@pytest.mark.parametrize(
    ("name", "config", "splits", "columns"),
    [
        ("imdb", "plain_text", ["train", "test"], ["text", "label"]),
        ("tweeteval", "sentiment", ["train", "validation", "test"], ["text", "label"]),
        ("multi30k", "default", ["train", "validation", "test"], ["en", "de"]),
    ],
)
def test_texts(hub, name, config, splits, columns):
    rows = {
        column: [i % 2 for i in range(20)]
        if column == "label"
        else [f"the {column} number {i} ." for i in range(20)]
        for column in columns
    }
    hub.tables = {f"{config}/{split}/0000.parquet": rows for split in splits}
    task = load(name)
    assert [len(data) for data in task.splits.values()] == [20] * len(splits)
    assert task.info["checked_against"] == "nothing"


def test_data_given_by_hand_keep_the_hub_out(hub, tiny, monkeypatch):
    load("mnist", data_dir=tiny)
    monkeypatch.setenv("ESPFORMER_DATA", str(tiny))
    load("imdb")
    with pytest.raises(DataMissing, match="no folder mnist in"):
        load("mnist", data_dir=tiny / "imdb")
    assert hub.calls == []


def test_environment_without_the_set_leads_to_the_hub(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("ESPFORMER_DATA", str(tmp_path / "elsewhere"))
    rows = {"text": ["good film"] * 4, "label": [0, 1] * 2}
    hub.tables = {f"plain_text/{split}/0000.parquet": rows for split in ("train", "test")}
    assert load("imdb").info["source"] == "hub: stanfordnlp/imdb, plain_text"


def test_hub_without_the_files(hub):
    with pytest.raises(DataMissing, match=r"no file plain_text/train/\*\.parquet"):
        load("imdb")
