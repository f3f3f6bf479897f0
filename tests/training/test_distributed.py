"""Two processes give what one gives: the same losses, the same weights."""

import subprocess
import sys

import pytest
import torch

from espformer.training.figures import read_curves


@pytest.mark.slow
def test_two_processes_train_as_one(tiny, tmp_path):
    """Batches of 33 are shared unevenly, and the last one of an epoch is smaller.

    In float64: rounding, which training amplifies, would hide a mistake of this size.
    """
    if not torch.distributed.is_available():
        pytest.skip("this torch has no distributed training")
    common = [
        *(sys.executable, "-m", "espformer.cli", "train", str(tiny), "--mechanism", "learnt"),
        *("--no-progress", "data.batch_size=33", "trainer.limit_batches=null"),
        *("annealing.factor=0.9", "trainer.epochs=3", "trainer.precision=64-true"),
    ]
    devices = {"one": [], "two": ["trainer.devices=2", "trainer.strategy=ddp"]}
    for name, more in devices.items():
        command = [*common, *more, "--output", str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    one, two = (tmp_path / name / "tiny" / "plain" / "learnt" / "seed-0" for name in devices)
    losses = [read_curves(directory) for directory in (one, two)]
    for curve in ("train/loss", "valid/loss", "train/accuracy", "valid/accuracy"):
        assert losses[0][curve].keys() == {0, 1, 2}
        assert losses[1][curve] == pytest.approx(losses[0][curve], abs=1e-6), curve
    weights = [
        torch.load(directory / "last.ckpt", weights_only=True)["state_dict"]
        for directory in (one, two)
    ]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, atol=1e-8, rtol=0, msg=name)
