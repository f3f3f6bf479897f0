"""Kill trainings at random times, let them go on, and compare what they end with, bit for bit.

    python tools/kill_runs.py --count 100

Three kinds of work take turns: a training whose temperature is learnt and falls, the annealing of a
trained run, and the fine-tuning of a converted encoder. Each is done once in peace. Then it is done
again in a process that gets SIGKILL after a random share of the time that it took, is started
again, is killed again, until it ends by itself; its weights, the state of its optimiser and its
scores must be those of the run in peace. Processes are forked after everything is imported, so that
the kills hit the work and not Python's imports.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RECIPE = """\
title: Tiny
task: classification
mechanisms:
  espformer: {esp: {sort_temperature: 0.3, learn_temperature: true}}
data: {set: digits, batch_size: 32, eval_batch_size: 400}
model:
  vit: {patch_size: 4, dim: 8, depth: 1, heads: 2, head_dim: 4, mlp_dim: 8, dropout: 0.1}
optimizer: {name: adam, learning_rate: 1e-2}
schedule: {name: milestones, milestones: [1]}
annealing: {factor: 0.5}
trainer:
  {epochs: 3, accelerator: cpu, limit_batches: 12, checkpoint_minutes: 0,
   attention_statistics: false}
"""


@dataclass
class Work:
    """One kind of work.

    Attributes:
        name: of the kind.
        do: does what is left of it in a directory, and returns the directory of its checkpoint.
        seconds: that it takes in peace.
        expected: what it ends with in peace.
        kills, lives: how often it was killed, and how often it was done again to its end.
        killed_at: share of the time in peace after which each kill came.
    """

    name: str
    do: Callable[[Path], Path]
    seconds: float = 0.0
    expected: Any = None
    kills: int = 0
    lives: int = 0
    killed_at: list[float] = field(default_factory=list)


def works(folder: Path) -> list[Work]:
    """The three kinds, with the data and models that they need, in a folder."""
    from espformer.lab.data.make_tiny import make_tiny
    from espformer.lab.recipes.recipe import load_recipe
    from espformer.lab.training import finetuning
    from espformer.lab.training.posttrain import anneal
    from espformer.lab.training.run_directory import run_directory
    from espformer.lab.training.trainer import execute
    from tools.tiny_encoder import make_tiny_encoder

    recipe = folder / "tiny.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    run = load_recipe(recipe).run("espformer")

    def train(directory: Path) -> Path:
        execute(run, directory, output=folder, progress=False)
        return directory

    trained = train(folder / "trained")

    def annealed(directory: Path) -> Path:
        if not (directory / "last.ckpt").exists():
            directory.mkdir(parents=True, exist_ok=True)
            shutil.copy(trained / "last.ckpt", directory / "copy")
            (directory / "copy").rename(directory / "last.ckpt")
        anneal(directory, epochs=3, factor=0.5, progress=False)
        return directory / "anneal"

    texts = make_tiny(folder / "texts")
    encoder = make_tiny_encoder(folder / "encoder")
    experiment = finetuning.make_experiment(
        str(encoder), "tweeteval", finetuning.read_attentions(["esp"]), [1e-3], [0], epochs=3,
        batch_size=4, anneal_to=1e-3, precision="32-true", max_length=None, data_dir=str(texts),
        examples=None,
    )  # fmt: skip
    fine = experiment.run("esp")

    def finetune(directory: Path) -> Path:
        finetuning.fit_shared_head(fine, directory)
        there = run_directory(directory, fine)
        execute(fine, there, output=directory, progress=False)
        return there

    return [Work("training", train), Work("annealing", annealed), Work("fine-tuning", finetune)]


def outcome(directory: Path) -> Any:
    """Everything that must be the same: weights, optimiser, learning rates, position and scores."""
    import torch

    from espformer.lab.training.learner import MARK

    checkpoint = torch.load(directory / "last.ckpt", weights_only=True)
    results = json.loads((directory / "results.json").read_text("utf-8"))
    kept = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")
    return {
        **{key: checkpoint.get(key) for key in kept},
        "position": checkpoint[MARK]["position"],
        "scores": results["scores"],
    }


def same(one: Any, other: Any) -> bool:
    """Whether two nested structures of tensors and plain values are equal, bit for bit."""
    import torch

    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def start(work: Work, directory: Path) -> int:
    """The id of a new process that does what is left of the work."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        work.do(directory)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def live(work: Work, directory: Path, chance: random.Random, most: int) -> None:
    """Do the work in a directory; kill it at random times, at most so often, until it ends."""
    kills = 0
    while True:
        patience = chance.uniform(0, 1.2) * work.seconds if kills < most else 600.0
        process, began = start(work, directory), time.monotonic()
        while time.monotonic() - began < patience:
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                if os.waitstatus_to_exitcode(status) != 0:
                    raise RuntimeError(f"{work.name} failed after {kills} kills: see above")
                return
            time.sleep(0.002)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        kills += 1
        work.kills += 1
        work.killed_at.append(patience / work.seconds)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=30, help="number of kills")
    parser.add_argument("--seed", type=int, default=0, help="of the times")
    options = parser.parse_args()

    import logging
    import warnings

    import torch

    torch.set_num_threads(1)  # forked processes must find no threads
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    chance, different = random.Random(options.seed), 0
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        os.environ["ESPFORMER_CACHE"] = f"{name}/cache"
        kinds = works(Path(name))
        for work in kinds:
            began = time.monotonic()
            work.do(Path(name, "peace", work.name))
            began, directory = time.monotonic(), Path(name, "again", work.name)
            work.expected = outcome(work.do(directory))
            work.seconds = time.monotonic() - began
            print(f"{work.name}: {work.seconds:.1f} s in peace", flush=True)
        while (left := options.count - sum(work.kills for work in kinds)) > 0:
            work = min(kinds, key=lambda work: work.kills)
            directory = Path(name, work.name, str(work.lives))
            live(work, directory, chance, most=min(left, 10))
            work.lives += 1
            if not same(outcome(work.do(directory)), work.expected):
                different += 1
                print(f"{work.name}, {directory.name}: DIFFERS", flush=True)
            shutil.rmtree(directory)
    for work in kinds:
        early = sum(share < 0.1 for share in work.killed_at)
        print(f"{work.name}: killed {work.kills} times ({early} in the first tenth), "
              f"brought to its end {work.lives} times")  # fmt: skip
    print(
        f"{sum(work.kills for work in kinds)} kills, seed {options.seed}: {different} differences"
    )
    return 1 if different else 0


if __name__ == "__main__":
    ROOT = Path(__file__).parents[1]
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    sys.exit(main())
