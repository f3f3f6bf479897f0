"""Checkpoints are whole or absent, hold no code, and are refused when they are not ours."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

from espformer.lab.errors import RunError
from espformer.lab.files import check_directory, write_atomically
from espformer.lab.training.checkpoints import (
    AtomicCheckpointIO,
    read_checkpoint,
)
from espformer.lab.training.learner import MARK
from espformer.lab.training.trainer import execute


class Code:
    """What a pickle can do: write a file while it is being loaded."""

    def __reduce__(self):
        return os.system, ("touch was-run",)


def files_of(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.is_file()}


@pytest.fixture
def trained(recipe, tmp_path):
    run = recipe.run("transformer")
    directory = tmp_path / "run"
    execute(run, directory, progress=False)
    (directory / "results.json").unlink()
    return run, directory


@pytest.mark.parametrize("kept", [0, 10, 0.5, 0.99])
def test_truncated_checkpoint_is_refused(trained, kept):
    run, directory = trained
    path = directory / "last.ckpt"
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content) if kept < 1 else kept)])
    before = files_of(directory)
    with pytest.raises(RunError, match=r"last.ckpt: .*[Nn]othing was changed"):
        execute(run, directory, progress=False)
    assert files_of(directory) == before


@pytest.mark.parametrize("kind", ["weights", "code", "text", "list", "other run"])
def test_foreign_checkpoint_is_refused(trained, kind, recipe, monkeypatch, tmp_path):
    run, directory = trained
    monkeypatch.chdir(tmp_path)
    path = directory / "last.ckpt"
    if kind == "weights":
        torch.save({"state_dict": {"weight": torch.ones(3)}}, path)
    elif kind == "code":
        torch.save({MARK: Code()}, path)
    elif kind == "text":
        path.write_text("not a checkpoint")
    elif kind == "list":
        torch.save([1, 2], path)
    else:
        execute(recipe.run("espformer"), tmp_path / "other", progress=False)
        shutil.copy(tmp_path / "other" / "last.ckpt", path)
    before = files_of(directory)
    expected = "belongs to another run: label" if kind == "other run" else "refused|cannot be read"
    with pytest.raises(RunError, match=expected):
        execute(run, directory, progress=False)
    assert files_of(directory) == before
    assert not (tmp_path / "was-run").exists()


def test_missing_checkpoint(tmp_path):
    with pytest.raises(RunError, match="no such checkpoint"):
        read_checkpoint(tmp_path / "x.ckpt")


def test_a_failed_write_leaves_the_former_checkpoint(trained, monkeypatch):
    _, directory = trained
    path = directory / "last.ckpt"
    before = files_of(directory)

    def full(checkpoint, target):
        Path(target).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(RunError, match=r"No space left on device.*The one before it is as it was"):
        AtomicCheckpointIO().save_checkpoint({}, path)
    assert files_of(directory) == before, "nothing is left over either"


def test_a_full_disk_is_met_for_real():
    """/dev/full answers every write as a full disk does."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with pytest.raises((OSError, RuntimeError)):
        torch.save({"x": torch.ones(100_000)}, "/dev/full")


def test_write_atomically(tmp_path):
    path = tmp_path / "new" / "results.json"
    write_atomically(path, "one")
    write_atomically(path, "two")
    assert path.read_text() == "two"
    assert [p.name for p in path.parent.iterdir()] == ["results.json"]


def test_unwritable_directory(tmp_path, recipe):
    (tmp_path / "file").write_text("")
    run = recipe.run("transformer")
    with pytest.raises(RunError, match=r"cannot write here \(.*choose another place with --output"):
        execute(run, tmp_path / "file" / "below", progress=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_directory_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(RunError, match="Permission denied"):
        check_directory(tmp_path / "run")


def test_nearly_full_disk(tmp_path, recipe, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=70 * 2**20))
    check_directory(tmp_path, 0)
    with pytest.raises(RunError, match=r"70 MB free, and this run needs about 164 MB"):
        check_directory(tmp_path, 100 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    with pytest.raises(RunError, match="make room"):
        execute(recipe.run("transformer"), tmp_path / "run", progress=False)
    assert not list((tmp_path / "run").glob("*.ckpt"))
