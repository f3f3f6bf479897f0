"""The cache: kept, found again, never half written, and never needed."""

import multiprocessing
import os
import time

import numpy as np
import pytest
import torch

from espformer.lab.data import DataError, cache, load
from espformer.lab.data.cache import CacheWarning, cache_key, cached_array, cached_bytes


@pytest.fixture
def folder():
    return cache.directory()


def rows(count=3, offset=0):
    """Builds (2·count, 4) in two chunks, and counts how often."""

    def chunks():
        chunks.calls += 1
        yield np.arange(4 * count).reshape(count, 4) + offset
        yield np.arange(4 * count).reshape(count, 4) + offset + 100

    chunks.calls = 0
    return chunks


def test_arrays_are_built_once(folder):
    build = rows()
    first = cached_array("a", (6, 4), np.int32, build)
    second = cached_array("a", (6, 4), np.int32, build)
    assert build.calls == 1
    assert isinstance(second, np.memmap)
    assert np.array_equal(first, second)
    assert second[3:].min() == 100
    assert [path.name for path in folder.iterdir()] == ["a.npy"]


def test_mapped_arrays_can_be_tensors_and_the_file_stays_as_it_is():
    build = rows()
    tensor = torch.from_numpy(cached_array("a", (6, 4), np.int32, build))
    tensor.zero_()
    assert cached_array("a", (6, 4), np.int32, build).max() == 111


def test_bytes_are_built_once(folder):
    calls = []
    for _ in range(2):
        assert cached_bytes("b", lambda: calls.append(1) or b"line\nline") == b"line\nline"
    assert len(calls) == 1


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"x" * 10])
def test_damaged_files_are_made_again(folder, content):
    cached_array("a", (6, 4), np.int32, rows())
    cached_bytes("b", lambda: b"content")
    whole = (folder / "a.npy").read_bytes()
    (folder / "a.npy").write_bytes(content or whole[:-8])
    (folder / "b.bin").write_bytes((folder / "b.bin").read_bytes()[:-1])
    assert cached_array("a", (6, 4), np.int32, rows()).max() == 111
    assert cached_bytes("b", lambda: b"content") == b"content"
    assert (folder / "a.npy").read_bytes() == whole


def test_keys_depend_on_every_part():
    keys = {cache_key("a"), cache_key("b"), cache_key("a", 1), cache_key("a", "1")}
    assert len(keys) == 4


def test_unwritable_cache_is_a_warning(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ESPFORMER_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(CacheWarning, match="Set ESPFORMER_CACHE to a folder with room"):
        assert cached_array("a", (6, 4), np.int32, rows()).max() == 111
    with pytest.warns(CacheWarning):
        assert cached_bytes("b", lambda: b"content") == b"content"


def test_data_sets_load_without_a_cache(tiny, tmp_path, monkeypatch):
    kept = {name: load(name, data_dir=tiny) for name in ("cats_dogs", "imdb", "multi30k")}
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ESPFORMER_CACHE", str(tmp_path / "file" / "cache"))
    for name, expected in kept.items():
        with pytest.warns(CacheWarning):
            task = load(name, data_dir=tiny)
        batch, same = task.train.batch(range(20)), expected.train.batch(range(20))
        assert all(torch.equal(batch[key], same[key]) for key in batch)


def test_full_disk_is_a_warning_and_leaves_nothing(folder):
    """A limit on the size of files makes writing fail as a full disk does."""
    resource = pytest.importorskip("resource")
    build = rows(count=20_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.warns(CacheWarning, match="cannot be kept"):
            array = cached_array("a", (40_000, 4), np.int32, build)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert array.shape == (40_000, 4)
    assert array.max() == 80_099
    assert list(folder.iterdir()) == []


def test_errors_of_the_data_are_not_errors_of_the_cache(folder):
    def damaged():
        yield np.zeros((3, 4))
        raise DataError("row 3 is damaged")

    def unreadable():
        yield np.zeros((3, 4))
        raise OSError("input/output error")

    with pytest.raises(DataError, match="row 3"):
        cached_array("a", (6, 4), np.int32, damaged)
    with pytest.raises(OSError, match="input/output"):
        cached_array("a", (6, 4), np.int32, unreadable)
    assert list(folder.iterdir()) == []


def test_what_killed_processes_left_is_swept_away(folder):
    folder.mkdir(exist_ok=True)
    old, new = folder / ".a.npy.old.part", folder / ".a.npy.new.part"
    for path in (old, new):
        path.write_bytes(b"half")
    ago = time.time() - 2 * cache.ABANDONED
    os.utime(old, (ago, ago))
    cached_array("a", (6, 4), np.int32, rows())
    assert sorted(path.name for path in folder.iterdir()) == [".a.npy.new.part", "a.npy"]


def share(start: float) -> None:
    """Keep the same contents as the other processes, at the same time."""

    def chunks():
        for i in range(50):
            time.sleep(0.002)  # long enough for the others to be at it too
            yield np.full((100, 50), i, np.int32)

    while time.time() < start:
        time.sleep(0.001)
    for turn in range(3):
        array = cached_array(f"shared{turn}", (5000, 50), np.int32, chunks)
        assert (array.reshape(50, -1) == np.arange(50)[:, None]).all()
        assert cached_bytes(f"shared{turn}", lambda: b"x" * 100_000) == b"x" * 100_000


def test_processes_that_write_the_same_file(folder):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=share, args=(time.time() + 0.3,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(f"shared{turn}.{kind}" for turn in range(3) for kind in ("bin", "npy"))
