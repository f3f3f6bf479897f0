"""Every recipe, end to end for a few steps: on made-up files of the real formats, and on real ones.

Where ESPFORMER_DATA names the folder of the real data, ESPFORMER_CACHE is where what is made of
them is kept (a place of the test's own otherwise). With a GPU the recipes keep their sizes.
"""

import math
import os

import pytest
import torch

from espformer.data.make_tiny import make_tiny
from espformer.training import load_recipe, recipe_names
from espformer.training.config import TrainingRun
from espformer.training.records import run_directory
from espformer.training.runner import execute, start_run
from tests.training.test_recipes import SMALL

# As they were before a fixture takes them away.
REAL_DATA = os.environ.get("ESPFORMER_DATA")
REAL_CACHE = os.environ.get("ESPFORMER_CACHE")
RECIPES = [name for name in recipe_names() if name not in ("digits", "runtime")]

SHORT = [
    "trainer.epochs=1", "trainer.limit_batches=2", "trainer.limit_eval_batches=1",
    "trainer.compare_throughput=false",
]  # fmt: skip
LITTLE = {
    "classification": ["data.batch_size=2", "data.eval_batch_size=2"],
    "translation": ["data.max_tokens=128", "data.eval_batch_size=2", "beam=2"],
}


@pytest.fixture(scope="session")
def made_up(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("made-up"))


def short_run(name, data, output, more=()):
    """Two steps of a recipe's default run, after those of the run that it starts from."""
    recipe = load_recipe(name)
    overrides = [*SHORT, f"data.directory={data}", *more]
    run = recipe.run(overrides=overrides)
    assert isinstance(run, TrainingRun)
    if run.start is not None and run.start.recipe is not None:
        before = start_run(run)
        source = load_recipe(before.recipe)
        before = source.run(before.label, before.setting, before.seed, overrides)
        directory = run_directory(output, before)
        execute(before, directory, progress=False)
        run = recipe.run(overrides=[*overrides, f"start={{checkpoint: {directory / 'last.ckpt'}}}"])
    return run, execute(run, run_directory(output, run), progress=False)


def check(run, results):
    assert 1 <= results["steps"] <= 2, "one per cent of a few images is one batch"
    assert all(math.isfinite(score) and 0 <= score <= 100 for score in results["scores"].values())
    expected = {"test", "best"} | ({"hard"} if run.harden else set())
    expected |= {"start"} if run.start is not None else set()
    assert set(results["scores"]) == expected
    assert results["samples_per_second"] > 0


@pytest.mark.parametrize("name", RECIPES)
def test_on_files_of_the_same_format(name, made_up, tmp_path):
    task = load_recipe(name).task
    model = load_recipe(name).run().model.name
    more = [f"model.{model}.{key}={value}" for key, value in SMALL[model].items()]
    run, results = short_run(
        name, made_up, tmp_path, [*LITTLE[task], *more, "trainer.accelerator=cpu"]
    )
    check(run, results)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_on_real_files(name, tmp_path, monkeypatch):
    if not REAL_DATA:
        pytest.skip("ESPFORMER_DATA does not name a folder with the real data")
    if REAL_CACHE:
        monkeypatch.setenv("ESPFORMER_CACHE", REAL_CACHE)
    task = load_recipe(name).task
    run, results = short_run(
        name, REAL_DATA, tmp_path, [] if torch.cuda.is_available() else LITTLE[task]
    )
    check(run, results)
    print(name, results["device"], results["scores"], f"{results['seconds']:.1f} s")
