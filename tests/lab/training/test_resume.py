"""A run that was killed and goes on ends where it would have ended, bit for bit."""

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from espformer.lab.errors import RunError
from espformer.lab.recipes.recipe import load_recipe
from espformer.lab.training.checkpoints import AtomicCheckpointIO
from espformer.lab.training.learner import MARK
from espformer.lab.training.trainer import execute

# Everything that has a state: dropout, learnt temperatures that are annealed, milestones.
STATEFUL = [
    "model.vit.dropout=0.1",
    "annealing.factor=0.5",
    "schedule={name: milestones, milestones: [1]}",
    "trainer.checkpoint_minutes=0",
]


def load(directory: Path) -> dict:
    return torch.load(directory / "last.ckpt", weights_only=True)


def assert_same_state(one: Path, other: Path) -> None:
    a, b = load(one), load(other)
    for name, value in a["state_dict"].items():
        assert torch.equal(value, b["state_dict"][name]), name
    moments = [checkpoint["optimizer_states"][0]["state"] for checkpoint in (a, b)]
    for index, state in moments[0].items():
        for name, value in state.items():
            assert torch.equal(value, moments[1][index][name]), (index, name)
    for state in (*a["callbacks"].values(), *b["callbacks"].values()):
        state.pop("seconds", None)  # time is what differs
    for key in ("lr_schedulers", "global_step", "callbacks", MARK):
        assert a[key] == b[key], key


@contextlib.contextmanager
def copy_at(
    kind: type[AtomicCheckpointIO], monkeypatch, target: Path, position: tuple[int, int]
) -> Iterator[None]:
    """Within the block, copy the checkpoints of a position: what a kill after it would leave."""
    save = kind.save_checkpoint

    def save_and_copy(self, checkpoint, path, storage_options=None):
        save(self, checkpoint, path)
        there = checkpoint[MARK]["position"]
        if Path(path).name == "last.ckpt" and (there["epoch"], there["batch"]) == position:
            target.mkdir()
            for file in Path(path).parent.glob("*.ckpt"):
                shutil.copy(file, target)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "save_checkpoint", save_and_copy)
        yield
    assert target.is_dir()


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["trainer.accumulate=2", "optimizer.name=sgd"],
        ["schedule={name: inverse_sqrt, warmup_steps: 3}", "trainer.validate_every=2"],
        ["trainer.precision=bf16-mixed", "data.workers=1"],
    ],
    ids=["plain", "accumulate", "inverse_sqrt", "bf16-workers"],
)
def test_resumed_at_every_step_it_ends_the_same(recipe, tmp_path, monkeypatch, more):
    run = recipe.run("learnt", overrides=[*STATEFUL, *more])
    moments: list[Path] = []
    save = AtomicCheckpointIO.save_checkpoint

    def save_and_keep(self, checkpoint, path, storage_options=None):
        save(self, checkpoint, path)
        if Path(path).name == "last.ckpt":
            moments.append(tmp_path / f"killed-{len(moments)}")
            moments[-1].mkdir()
            for file in Path(path).parent.glob("*.ckpt"):
                shutil.copy(file, moments[-1])

    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", save_and_keep)
    reference = execute(run, tmp_path / "reference", progress=False)
    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", save)
    positions = [load(moment)[MARK]["position"] for moment in moments]
    assert {"epoch": 1, "batch": 2 if "trainer.accumulate=2" in more else 1} in positions
    for moment in moments:
        results = execute(run, moment, progress=False)
        assert results["continued"]
        assert results["scores"] == reference["scores"]
        assert results["steps"] == reference["steps"]
        assert_same_state(moment, tmp_path / "reference")


def spent(checkpoint: dict) -> dict:
    """The part of a checkpoint that says how long the run has taken."""
    (state,) = (state for state in checkpoint["callbacks"].values() if "seconds" in state)
    return state


def test_the_time_of_a_run_counts_what_came_before_a_stop(recipe, tmp_path, monkeypatch):
    run = recipe.run("learnt", overrides=STATEFUL)
    killed, old = tmp_path / "killed", tmp_path / "old"
    with copy_at(AtomicCheckpointIO, monkeypatch, killed, (1, 1)):
        whole = execute(run, tmp_path / "whole", progress=False)
    before = spent(load(killed))["seconds"]
    assert whole["seconds_before"] == 0
    assert 0 < before < spent(load(tmp_path / "whole"))["seconds"] <= whole["seconds"]
    shutil.copytree(killed, old)
    for directory, seconds in ((killed, 1000.0), (old, None)):
        checkpoint = load(directory)
        if seconds is None:  # as written before time was kept
            del spent(checkpoint)["seconds"]
        else:
            spent(checkpoint)["seconds"] = seconds
        torch.save(checkpoint, directory / "last.ckpt")
        results = execute(run, directory, progress=False)
        assert results["seconds_before"] == seconds
        own = results["seconds"] - (seconds or 0.0)
        assert 0 < own < 100, "what came before is counted once"
    assert spent(load(killed))["seconds"] > 1000, "a second stop would not lose the first part"


def test_two_runs_with_one_seed_are_alike_and_two_seeds_are_not(recipe, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run = recipe.run("learnt", None, seed, STATEFUL)
        execute(run, tmp_path / name, progress=False)
    assert_same_state(tmp_path / "a", tmp_path / "b")
    weights = [load(tmp_path / name)["state_dict"]["model.head.weight"] for name in "ac"]
    assert not torch.equal(*weights)


@pytest.mark.slow
def test_killed_in_the_middle_of_an_epoch(tiny, tmp_path):
    """SIGKILL to a real process, twice, while the temperature falls."""
    overrides = [*STATEFUL, "trainer.epochs=3", "trainer.limit_batches=12"]
    command = [
        *(sys.executable, "-m", "espformer.lab.cli", "train", str(tiny), "--mechanism", "learnt"),
        *("--output", str(tmp_path / "out"), "--no-progress", *overrides),
    ]
    directory = tmp_path / "out" / "tiny" / "plain" / "learnt" / "seed-0"
    for kill_at in ((0, 5), (1, 7)):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert process.poll() is None, process.stdout.read().decode()
            if (directory / "last.ckpt").exists():
                position = load(directory)[MARK]["position"]
                if (position["epoch"], position["batch"]) >= kill_at:
                    break
            time.sleep(0.005)
        process.kill()
        process.wait()
        position = load(directory)[MARK]["position"]
        assert (position["epoch"], position["batch"]) >= kill_at
        assert not (directory / "results.json").exists(), "it was killed before it ended"
    subprocess.run(command, check=True, capture_output=True)
    run = load_recipe(tiny).run("learnt", overrides=overrides)
    execute(run, tmp_path / "reference", progress=False)
    assert_same_state(directory, tmp_path / "reference")
    assert len(list((directory / "logs").glob("attempt-*"))) == 3


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of its own, of 80 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("no file system can be mounted here")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_disk_that_fills_up_while_training_loses_nothing(
    recipe, small_disk, tmp_path, monkeypatch
):
    run = recipe.run("learnt", None, 0, STATEFUL)
    execute(run, tmp_path / "reference", progress=False)
    save, saved, filler = AtomicCheckpointIO.save_checkpoint, [], small_disk / "filler"

    def fill_up_and_save(self, checkpoint, path, storage_options=None):
        if len(saved) == 3:
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        save(self, checkpoint, path)
        saved.append(checkpoint[MARK]["position"])

    with monkeypatch.context() as patched:
        patched.setattr(AtomicCheckpointIO, "save_checkpoint", fill_up_and_save)
        with pytest.raises(RunError, match=r"0 MB free\). The one before it is as it was"):
            execute(run, small_disk / "run", progress=False)
    assert load(small_disk / "run")[MARK]["position"] == saved[-1], "the last whole checkpoint"
    filler.unlink()
    execute(run, small_disk / "run", progress=False)
    assert_same_state(small_disk / "run", tmp_path / "reference")


def test_a_file_system_that_is_read_only_is_told_before_anything_runs(recipe, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(RunError, match=r"cannot write here \(.*Read-only.*choose another place"):
        execute(recipe.run("learnt"), small_disk / "run", progress=False)
