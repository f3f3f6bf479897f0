"""Finding files: where is looked, and what is said when they are missing or damaged."""

import dataclasses
import importlib
import shutil
import sys

import numpy as np
import pytest

from espformer.lab.data import DataError, DataMissing, load
from espformer.lab.data.files import require


def without_sums(name):
    source = importlib.import_module(f"espformer.lab.data.{name}").SOURCE
    return dataclasses.replace(source, sums={})


def test_folder_given_by_hand_comes_first(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("ESPFORMER_DATA", str(tmp_path))
    assert load("mnist", data_dir=tiny).info["source"] == str(tiny / "mnist")
    # The folder of the set itself will do.
    assert load("mnist", data_dir=tiny / "mnist").info["source"] == str(tiny / "mnist")


def test_environment_variable_is_next(tiny, monkeypatch):
    monkeypatch.setenv("ESPFORMER_DATA", str(tiny))
    assert load("mnist").info["source"] == str(tiny / "mnist")


def test_folder_given_by_hand_is_a_promise(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("ESPFORMER_DATA", str(tiny))
    with pytest.raises(DataMissing, match=f"no folder mnist in {tmp_path}"):
        load("mnist", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("name", "folder", "file"),
    [
        ("mnist", "mnist", "mnist.npz"),
        ("cats_dogs", "cats_dogs", "train-00.parquet"),
        ("imdb", "imdb", "test.parquet"),
        ("tweeteval", "tweeteval_sentiment", "validation.parquet"),
        ("iwslt14", "iwslt14_de_en", "train.parquet"),
        ("multi30k", "multi30k_de_en", "test2016.parquet"),
        ("modelnet40", "modelnet40", "train_0.npz"),
    ],
)
def test_missing_data_is_explained(name, folder, file):
    with pytest.raises(DataMissing) as caught:
        load(name)
    message = str(caught.value)
    assert f"The data set {name} was not found" in message
    assert "the environment variable ESPFORMER_DATA is not set" in message
    assert "Get it: " in message
    assert "data.directory=DIR for train" in message
    assert f"DIR/\n  {folder}/\n" in message
    assert f"    {file} " in message
    assert isinstance(caught.value, FileNotFoundError)


def test_failure_of_the_hub_is_told():
    with pytest.raises(DataMissing, match="hub, ylecun/mnist: the hub cannot be reached"):
        load("mnist")


def test_incomplete_folder_names_what_it_lacks(own_tiny):
    (own_tiny / "imdb" / "test.parquet").unlink()
    with pytest.raises(DataMissing, match=r"imdb \(data_dir\) lacks test\*\.parquet"):
        load("imdb", data_dir=own_tiny)


def test_checksum_of_the_manifest(own_tiny):
    path = own_tiny / "mnist" / "mnist.npz"
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(DataError, match=r"mnist\.npz has sha256 \w{64}, expected \w{64}"):
        load("mnist", data_dir=own_tiny)


def test_checksum_of_the_known_files(own_tiny):
    (own_tiny / "mnist" / "SHA256SUMS").unlink()
    with pytest.raises(DataError) as caught:
        load("mnist", data_dir=own_tiny)
    message = str(caught.value)
    assert "is cut short" in message
    assert "of 11,490,434" in message
    assert "06af5dfe73b70e3bc1c36439982b18a8d76803db9b544f6fdf838a37fbb01b64" in message
    assert "fetch it again" in message
    assert "sha256sum * > SHA256SUMS" in message


def test_unknown_files_are_taken_and_said_to_be_unchecked(own_tiny):
    folder = own_tiny / "cats_dogs"
    (folder / "SHA256SUMS").unlink()
    for old, new in (("train-00", "train_a"), ("train-01", "train_b"), ("test", "test_a")):
        (folder / f"{old}.parquet").rename(folder / f"{new}.parquet")
    assert load("cats_dogs", data_dir=own_tiny).info["checked_against"] == "nothing"


def test_sums_are_reported(tiny):
    info = load("mnist", data_dir=tiny).info
    assert info["checked_against"] == "SHA256SUMS"
    line = (tiny / "mnist" / "SHA256SUMS").read_text()
    assert info["sha256"] == {"mnist/mnist.npz": line.split()[0]}


@pytest.mark.parametrize(
    ("name", "folder", "file"),
    [
        ("mnist", "mnist", "mnist.npz"),
        ("modelnet40", "modelnet40", "train_1.npz"),
        ("imdb", "imdb", "train.parquet"),
        ("cats_dogs", "cats_dogs", "train-01.parquet"),
        ("multi30k", "multi30k_de_en", "valid.parquet"),
    ],
)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.98])
def test_truncated_files_without_any_checksum(name, folder, file, share, own_tiny, monkeypatch):
    """Sums catch these first; where there are none, the reader must."""
    path = own_tiny / folder / file
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    (own_tiny / folder / "SHA256SUMS").unlink()
    monkeypatch.setattr(f"espformer.lab.data.{name}.SOURCE", without_sums(name))
    with pytest.raises(DataError, match=r"is empty|cut short or damaged") as caught:
        load(name, data_dir=own_tiny)
    assert str(path) in str(caught.value)
    assert "fetch it again" in str(caught.value)


def rewrite_npz(path, **changes):
    with np.load(path) as file:
        arrays = {name: file[name] for name in file} | changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    (path.parent / "SHA256SUMS").write_text("")


def test_arrays_that_are_missing_or_misshapen(own_tiny, monkeypatch):
    path = own_tiny / "modelnet40" / "test.npz"
    monkeypatch.setattr("espformer.lab.data.modelnet40.SOURCE", without_sums("modelnet40"))
    original = path.read_bytes()
    rewrite_npz(path, label=None)
    with pytest.raises(DataError, match=r"test\.npz has no array 'label', only points_i16"):
        load("modelnet40", data_dir=own_tiny)
    path.write_bytes(original)
    rewrite_npz(path, points_i16=np.zeros((80, 100, 3), np.int16))
    with pytest.raises(DataError, match=r"'points_i16' has shape \(80, 100, 3\), expected"):
        load("modelnet40", data_dir=own_tiny)
    path.write_bytes(original)
    rewrite_npz(path, label=np.full(80, 40, np.uint8))
    with pytest.raises(DataError, match=r"labels must be in 0\.\.39, got 40\.\.40"):
        load("modelnet40", data_dir=own_tiny)


def rewrite_parquet(path, columns):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    (path.parent / "SHA256SUMS").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"sentence": ["a"], "label": [0]}, "has no column text, only sentence, label"),
        ({"text": ["a", None], "label": [0, 1]}, "row 1 of 'text' is None, not a text"),
        ({"text": ["a"], "label": [7]}, r"labels must be in 0\.\.1, got 7\.\.7"),
        ({"text": ["a"], "label": ["pos"]}, "labels must be integers"),
    ],
)
def test_tables_that_are_not_what_they_should_be(own_tiny, monkeypatch, columns, message):
    monkeypatch.setattr("espformer.lab.data.imdb.SOURCE", without_sums("imdb"))
    rewrite_parquet(own_tiny / "imdb" / "train.parquet", columns)
    with pytest.raises(DataError, match=message):
        load("imdb", data_dir=own_tiny)


def test_images_that_cannot_be_decoded(own_tiny, monkeypatch):
    monkeypatch.setattr("espformer.lab.data.cats_dogs.SOURCE", without_sums("cats_dogs"))
    path = own_tiny / "cats_dogs" / "test.parquet"
    rewrite_parquet(path, {"image": [b"\xff\xd8 no image"], "label": [0]})
    with pytest.raises(DataError, match=r"test\.parquet, row 0: the image cannot be decoded"):
        load("cats_dogs", data_dir=own_tiny)


def test_plain_text_as_fairseq_leaves_it(own_tiny):
    folder = own_tiny / "iwslt14_de_en"
    shutil.rmtree(folder)
    folder.mkdir()
    for split, lines in (("train", 30), ("valid", 4), ("test", 5)):
        for language in ("de", "en"):
            rows = [f"{language} wort {i} ." for i in range(lines)]
            (folder / f"{split}.{language}").write_text("\n".join(rows) + "\n")
    task = load("iwslt14", data_dir=own_tiny)
    assert task.info["sizes"] == {"train": 30, "valid": 4, "test": 5}
    (folder / "valid.en").write_text("only one\n")
    with pytest.raises(DataError, match=r"differ in length: \{'de': 4, 'en': 1\} lines"):
        load("iwslt14", data_dir=own_tiny)


def test_missing_packages_are_named(monkeypatch, tiny):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match="needs pyarrow: pip install pyarrow"):
        require("pyarrow.parquet")
    with pytest.raises(ImportError, match="needs pyarrow: pip install pyarrow"):
        load("imdb", data_dir=tiny)
