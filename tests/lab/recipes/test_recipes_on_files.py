"""Every recipe, end to end for a few steps: on made-up files of the real formats, and on real ones.

Where ESPFORMER_DATA names the folder of the real data, ESPFORMER_CACHE is where what is made of
them is kept (a place of the test's own otherwise). With a GPU the recipes keep their sizes.
"""

import math
import os

import pytest
import torch

from espformer import functional
from espformer.lab.data.make_tiny import make_tiny
from espformer.lab.recipes.recipe import load_recipe, recipe_names
from espformer.lab.recipes.schema import TrainingRun
from espformer.lab.training.posttrain import evaluate
from espformer.lab.training.run_directory import read_curves, run_directory
from espformer.lab.training.trainer import execute, start_run
from tests.lab.recipes.test_recipes import SMALL

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


def little(name):
    """Overrides for a small model and small batches."""
    run = load_recipe(name).run()
    model = run.model.name
    sizes = [f"model.{model}.{key}={value}" for key, value in SMALL[model].items()]
    if run.data.set.name == "modelnet40":
        sizes.append("data.set.modelnet40.points=128")
    if "images" in run.data.set.arguments:
        sizes.append("data.set.cats_dogs.images=40")
    return [*LITTLE[run.task], *sizes]


def short_run(name, data, output, more=(), trainer=None):
    """Two steps of a recipe's default run, after those of the run that it starts from.

    What `trainer` says holds for the run alone.
    """
    own = [f"trainer.{key}={value}" for key, value in (trainer or {}).items()]
    recipe = load_recipe(name)
    overrides = [*SHORT, f"data.directory={data}", *more]
    run = recipe.run(overrides=[*overrides, *own])
    assert isinstance(run, TrainingRun)
    if run.start is not None and run.start.recipe is not None:
        before = start_run(run)
        source = load_recipe(before.recipe)
        before = source.run(before.label, before.setting, before.seed, overrides)
        directory = run_directory(output, before)
        execute(before, directory, progress=False)
        start = f"start={{checkpoint: {directory / 'last.ckpt'}}}"
        run = recipe.run(overrides=[*overrides, *own, start])
    return run, execute(run, run_directory(output, run), progress=False)


def check(run, results):
    assert 1 <= results["steps"] <= 2, "one per cent of a few images is one batch"
    assert all(math.isfinite(score) and 0 <= score <= 100 for score in results["scores"].values())
    expected = {"test", "best"} | ({"hard"} if run.harden else set())
    expected |= set(run.scores_before)
    expected |= {"valid"} if "valid" in results["data"]["sizes"] else set()
    assert set(results["scores"]) == expected
    assert results["steps"] == 1 or results["samples_per_second"] > 0


@pytest.mark.parametrize("name", RECIPES)
def test_on_files_of_the_same_format(name, made_up, tmp_path):
    check(*short_run(name, made_up, tmp_path, [*little(name), "trainer.accelerator=cpu"]))


def test_annealing_of_the_paper_ends_with_the_hard_operator(made_up, tmp_path, monkeypatch):
    """All 40 epochs: t from 1e-3 to 1.3e-7, and then an evaluation that sorts exactly."""
    attend, calls = functional.esp_attention, []

    def recorded(*tensors, **options):
        calls.append((options["hard"], options["sort_temperature"]))
        return attend(*tensors, **options)

    monkeypatch.setattr(functional, "esp_attention", recorded)
    more = [*little("cats-dogs-anneal"), "trainer.accelerator=cpu", "trainer.limit_batches=1"]
    more += ["model.vit.patch_size=56", "trainer.attention_statistics=false"]
    long = [*more, "trainer.validate_every=40"]
    run, results = short_run("cats-dogs-anneal", made_up, tmp_path, long, {"epochs": 40})
    temperatures = read_curves(run_directory(tmp_path, run))["sort_temperature"]
    assert temperatures == pytest.approx({e: 1e-3 * 0.8 ** (e + 1) for e in range(40)})
    assert temperatures[39] == pytest.approx(1.3e-7, rel=0.03)
    assert set(results["scores"]) == {"start", "start_hard", "test", "hard", "best"}
    hard = [round(temperature, 12) for is_hard, temperature in calls if is_hard]
    assert set(hard) == {1e-3, round(1e-3 * 0.8**40, 12)}, "hard before annealing and after it"
    soft = {round(temperature, 12) for is_hard, temperature in calls if not is_hard}
    assert {round(1e-3 * 0.8**e, 12) for e in range(41)} <= soft
    again = evaluate(run_directory(tmp_path, run), which="hard", data_directory=str(made_up))
    assert again["test"] == results["scores"]["hard"]


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_on_real_files(name, tmp_path, monkeypatch):
    if not REAL_DATA:
        pytest.skip("ESPFORMER_DATA does not name a folder with the real data")
    if REAL_CACHE:
        monkeypatch.setenv("ESPFORMER_CACHE", REAL_CACHE)
    sizes = [] if torch.cuda.is_available() else little(name)
    run, results = short_run(name, REAL_DATA, tmp_path, sizes)
    check(run, results)
    print(name, results["device"], results["scores"], f"{results['seconds']:.1f} s")
