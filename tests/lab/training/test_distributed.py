"""Two processes give what one gives: the same losses, the same weights."""

import shutil
import subprocess
import sys

import pytest
import torch

from espformer.lab.recipes.recipe import load_recipe
from espformer.lab.training.run_directory import read_curves
from espformer.lab.training.trainer import execute

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without processes"),
]


# The command line with a model in float64, a precision that Lightning does not have for FSDP.
# Inputs get the dtype of the model.
IN_FLOAT64 = """
from espformer.lab.cli import main
from espformer.lab.training.learner import Learner
configure = Learner.configure_model
def in_float64(self):
    if not self._sharded:
        self.model.double()
    configure(self)
Learner.configure_model = in_float64
main()
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_train_as_one(tiny, tmp_path, strategy):
    """Batches of 33 are shared unevenly, and the last one of an epoch is smaller.

    In float64: a sum over two shares is rounded otherwise than over the whole, and training with a
    sharp sort amplifies the difference. In float32 it hid mistakes as large as 2e-3.
    """
    if strategy == "ddp":
        start, more = ["-m", "espformer.lab.cli"], ["trainer.precision=64-true"]
    else:
        script = tmp_path / "in_float64.py"
        script.write_text(IN_FLOAT64)
        start, more = [str(script)], []
    common = [
        *(sys.executable, *start, "train", str(tiny), "--mechanism", "learnt"),
        *("--no-progress", "data.batch_size=33", "trainer.limit_batches=null"),
        *("annealing.factor=0.9", "trainer.epochs=2", "optimizer.learning_rate=1e-4", *more),
    ]
    devices = {"one": [], "two": ["trainer.devices=2", f"trainer.strategy={strategy}"]}
    for name, more in devices.items():
        command = [*common, *more, "--output", str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
    one, two = (tmp_path / name / "tiny" / "plain" / "learnt" / "seed-0" for name in devices)
    losses = [read_curves(directory) for directory in (one, two)]
    for curve in ("train/loss", "valid/loss", "train/accuracy", "valid/accuracy"):
        assert losses[0][curve].keys() == {0, 1}
        assert losses[1][curve] == pytest.approx(losses[0][curve], abs=1e-6), curve
    weights = [
        torch.load(directory / "last.ckpt", weights_only=True)["state_dict"]
        for directory in (one, two)
    ]
    assert weights[0]["model.head.weight"].dtype == torch.float64
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, atol=1e-8, rtol=0, msg=name)


def test_a_sharded_run_goes_on_and_one_process_reads_its_checkpoint(tiny, tmp_path):
    """Two processes stop after one of two epochs; two go on, and so does one."""
    overrides = ["trainer.epochs=2", "optimizer={name: adam, learning_rate: 1e-3}"]
    two = ["trainer.devices=2", "trainer.strategy=fsdp"]
    run = load_recipe(tiny).run("learnt", overrides=overrides)
    execute(run, tmp_path / "one", progress=False)
    begun = tmp_path / "begun" / "tiny" / "plain" / "learnt" / "seed-0"
    script = (
        "import sys; from lightning.pytorch import Trainer; from espformer.lab.cli import main; "
        "from espformer.lab.training.checkpoints import Checkpoints as C; save = C._save\n"
        "def stop(self, trainer, module, position):\n"
        "    save(self, trainer, module, position)\n"
        "    trainer.strategy.barrier()\n"
        "    sys.exit(3)\n"
        "C._save = stop; main()\n"
    )
    file = tmp_path / "stopped.py"
    file.write_text(script)
    arguments = ["train", str(tiny), "--mechanism", "learnt", "--no-progress", *overrides, *two]
    command = [sys.executable, str(file), *arguments, "--output", str(tmp_path / "begun")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (begun / "last.ckpt").exists(), done.stderr
    assert not (begun / "results.json").exists()
    shutil.copytree(begun, tmp_path / "alone")
    execute(run, tmp_path / "alone", progress=False)
    command = [
        sys.executable,
        "-m",
        "espformer.lab.cli",
        *arguments,
        "--output",
        tmp_path / "begun",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    expected = torch.load(tmp_path / "one" / "last.ckpt", weights_only=True)
    for directory in (begun, tmp_path / "alone"):
        found = torch.load(directory / "last.ckpt", weights_only=True)
        assert found["global_step"] == expected["global_step"] == 6
        for name, value in expected["state_dict"].items():
            torch.testing.assert_close(found["state_dict"][name], value, atol=1e-4, rtol=0)
