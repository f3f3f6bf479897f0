"""Every recipe loads, says what the paper's appendix says, and runs, on stand-ins for its data."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import espformer.lab.data
from espformer.lab.cli import app
from espformer.lab.data import Task, TensorSet
from espformer.lab.data.translation import PairSet
from espformer.lab.data.vocabulary import Ragged
from espformer.lab.recipes.build import build_mechanism
from espformer.lab.recipes.recipe import load_recipe, recipe_names
from espformer.lab.recipes.schema import TimingRun
from espformer.lab.results.paper_numbers import TABLES
from espformer.lab.training import timing
from espformer.lab.training.experiments import plan
from espformer.lab.training.trainer import execute
from espformer.nn import ESP, ClassToken

EXPERIMENTS = {
    "mnist-patch-size", "cats-dogs", "cats-dogs-anneal", "cats-dogs-slicers", "imdb", "tweeteval",
    "iwslt14", "iwslt14-plug-and-play", "modelnet40-set", "modelnet40-pct", "runtime", "digits",
    "mnist-hypotheses", "mnist-hardening", "esp-settings-cats-dogs", "esp-settings-mnist",
    "esp-settings-tweeteval", "esp-rates-cats-dogs",
    "multi30k", "multi30k-plug-and-play",
}  # fmt: skip

# t, τ, ε, S, λ, learning rate, batch size, epochs, milestones: the tables of appendix C, but for
# the learning rate of PCT, which is a hundred times as large (as the recipe explains).
APPENDIX = {
    "modelnet40-set": (1e-3, 0.1, 0.1, 21, 0.8, 1e-3, 64, 300, [200]),
    "modelnet40-pct": (1e-3, 0.1, 0.1, 21, 0.8, 1e-2, 32, 300, [250]),
    "imdb": (1e-3, 10.0, 0.1, 15, 0.33, 1e-4, 32, 15, [12]),
    "tweeteval": (1e-3, 10.0, 0.1, 15, 0.33, 1e-4, 32, 15, [12]),
    "cats-dogs": (1e-3, 0.1, 1.0, 3, 0.5, 3e-5, 64, 300, [250]),
    "mnist-patch-size": (1e-3, 0.0, 1.0, 5, 0.5, 2e-3, 100, 45, [35, 41]),
}


def test_there_is_one_for_each_experiment():
    assert set(recipe_names()) == EXPERIMENTS


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_every_recipe_loads_and_every_run_is_described(name):
    recipe = load_recipe(name)
    runs = recipe.runs()
    assert len({(run.setting, run.label, run.seed) for run in runs}) == len(runs)
    assert recipe.paper is None or recipe.paper in TABLES
    cells = {(run.setting, run.label) for run in runs}
    if recipe.paper:
        table = TABLES[recipe.paper]
        printed = {key[:2] for key in table.numbers if key[0] not in table.out_of_reach}
        assert printed <= cells, "each number of the paper has its run"
        assert not set(table.out_of_reach) & set(recipe.grid.settings)


@pytest.mark.parametrize(
    "name", [*sorted({*APPENDIX} - {"tweeteval", "mnist-patch-size"}), "iwslt14-plug-and-play"]
)
def test_our_defaults_stand_beside_the_paper(name):
    """The row of our defaults says what they are, and is what `ESP()` does."""
    run = load_recipe(name).run("espformer-default")
    said, ours = run.mechanism.arguments, build_mechanism(run.mechanism)
    if isinstance(ours, ClassToken):  # that of a ViT
        said, ours = said["base"]["esp"], ours.base
    plain = ESP()
    assert ours.options == plain.options
    assert (ours.slicer_kind, ours.slices) == (plain.slicer_kind, plain.slices)
    assert {"temperature_unit", "sort_temperature", "slicer"} <= set(said)


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_every_key_is_explained(name):
    """A person shall read a recipe without looking elsewhere; the rows of grids speak alone."""
    text = Path(load_recipe(name).origins.file).read_text(encoding="utf-8")
    assert text.startswith("# ")
    section, silent = "", []
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        assert len(line) <= 100
        if not line.strip() or line.startswith(("#", "title:")):
            continue
        section = line.partition(":")[0] if indent == 0 else section
        row = (section in ("mechanisms", "note") and indent) or (section == "grid" and indent > 2)
        if "#" not in line and not row:
            silent.append(line)
    assert not silent


@pytest.mark.parametrize("name", sorted(APPENDIX))
def test_hyper_parameters_are_those_of_the_appendix(name):
    recipe = load_recipe(name)
    t, tau, epsilon, iterations, weight, rate, batch, epochs, milestones = APPENDIX[name]
    esp = recipe.mechanisms["espformer"].arguments
    assert (esp["metric"], esp["sort_temperature"], esp["inverse_temperature"]) == (
        "squared",
        t,
        tau,
    )
    sinkhorn = recipe.mechanisms["sinkformer"].arguments
    assert (sinkhorn["epsilon"], sinkhorn["iterations"]) == (epsilon, iterations)
    assert recipe.mechanisms["difftransformer"].arguments == {
        "base": "softmax", "lambda_init": weight,
    }  # fmt: skip
    run = recipe.run("espformer")
    assert run.optimizer.learning_rate == rate
    assert run.data.batch_size == batch
    assert (run.trainer.epochs, run.schedule.milestones) == (epochs, milestones)
    assert run.schedule.factor == 0.1


def test_details_of_the_appendix():
    vit = load_recipe("cats-dogs").run().model.arguments
    assert [vit[key] for key in ("dim", "mlp_dim", "depth", "heads", "patch_size", "head_dim")] == [
        128, 128, 6, 8, 16, 64,
    ]  # fmt: skip
    mnist = load_recipe("mnist-patch-size")
    assert mnist.run("transformer").optimizer.learning_rate == 1e-3
    assert mnist.run("sinkformer").optimizer.learning_rate == 2e-3
    assert load_recipe("tweeteval").run().data.set.arguments["classes"] == 2
    anneal = load_recipe("cats-dogs-anneal").run()
    assert (anneal.annealing.factor, anneal.trainer.epochs, anneal.harden) == (0.8, 40, True)
    assert load_recipe("modelnet40-set").run().mechanism.arguments["coupling"] == "identity"
    assert load_recipe("modelnet40-pct").run().optimizer.name == "sgd"
    plug = load_recipe("iwslt14-plug-and-play")
    assert plug.run("espformer").trainer.epochs == 10
    before, after = load_recipe("iwslt14").run(), plug.run("espformer")
    assert after.optimizer.learning_rate == pytest.approx(before.optimizer.learning_rate / 10)
    assert before.trainer.epochs == 25


def pairs(count: int) -> PairSet:
    tokens = torch.cat([torch.tensor([2, 5 + i % 3, 6, 7, 8, 3]) for i in range(count)]).int()
    ids = Ragged(tokens, torch.arange(0, len(tokens) + 1, 6))
    return PairSet(ids, ids, ["a b c d"] * count, ["a b c d"] * count)


def stand_in(name: str, **options) -> Task:
    """Data of the right shapes, without a file."""
    generator = torch.Generator().manual_seed(0)

    def labelled(inputs, classes, lengths=None):
        return TensorSet(inputs, torch.arange(len(inputs)) % classes, lengths)

    def images(count, channels, size):
        shape = (count, channels, size, size)
        return torch.randint(256, shape, dtype=torch.uint8, generator=generator)

    if name in ("iwslt14", "multi30k"):

        class Words:
            def decode(self, ids):
                return "a b c d"

        return Task(name, pairs(6), pairs(3), pairs(3), vocabulary=Words(),
                    info={"vocabulary_size": 12})  # fmt: skip
    if name in ("imdb", "tweeteval"):
        texts = torch.randint(1, 50, (6, 16), generator=generator)
        data, classes = labelled(texts, 2, torch.tensor([16, 3, 9, 1, 16, 8])), 2
        info = {"vocabulary_size": 50, "max_length": 16}
    elif name == "modelnet40":
        data, classes = labelled(torch.randn(4, 64, 3, generator=generator), 40), 40
        info = {"channels": 3}
    else:
        size = 28 if name == "mnist" else 64
        channels = 1 if name == "mnist" else 3
        data, classes = labelled(images(4, channels, size), 2), 10 if name == "mnist" else 2
        info = {"image_size": size, "channels": channels}
        return Task(name, data, data, classes=classes, info=info, normalise=ToFloat())
    return Task(name, data, data, classes=classes, info=info)


class ToFloat(torch.nn.Module):
    def forward(self, images):
        return images.float() / 255


SMALL = {
    "vit": {"dim": 16, "depth": 1, "heads": 2, "head_dim": 8, "mlp_dim": 16},
    "vit_mnist": {"dim": 16, "head_dim": 8, "patch_size": 7},
    "text_classifier": {"dim": 16, "depth": 1, "heads": 2, "mlp_dim": 16},
    "set_transformer": {"dim": 16, "heads": 2, "inducing_points": 4},
    "point_cloud_transformer": {"dim": 16, "depth": 1, "neighbours": 4, "samples": [16, 8]},
    "translation_transformer": {
        "dim": 16, "mlp_dim": 16, "heads": 2, "encoder_depth": 1, "decoder_depth": 1,
    },
}  # fmt: skip

# Rows that differ from others of their recipe in a number alone.
ALIKE = {
    "learnable-1", "learnable-32", "learnable-64", "frozen-8", "frozen-64",
    "squared-0.01", "squared-0.1", "squared-1", "absolute-0.03", "absolute-0.1", "absolute-1",
    "balanced-0.001", "learnt-from-0.1", "learnt-from-10", "only-harden", "anneal-soft",
    "transformer-low-rate", "espformer-default-high-rate",
}  # fmt: skip

CASES = [
    (name, label)
    for name in sorted(EXPERIMENTS - {"digits", "runtime"})
    for label in load_recipe(name).mechanisms
    if label not in ALIKE
]


def first_of_their_kind() -> list[object]:
    """The cases; slow are rows that another recipe has for the same model, and searches of ours."""
    seen, found = set(), []
    for name, label in CASES:
        recipe = load_recipe(name)
        kind = recipe.run(label).model.name, label
        slow = (kind in seen or name.startswith("esp-")) and label != recipe.default_mechanism
        found.append(pytest.param(name, label, marks=[pytest.mark.slow] if slow else []))
        seen |= set() if slow else {kind}
    return found


@pytest.mark.parametrize(("name", "label"), first_of_their_kind(), ids=lambda value: value)
def test_every_mechanism_of_every_recipe_trains(name, label, tmp_path, monkeypatch):
    monkeypatch.setattr(espformer.lab.data, "load", lambda n, **options: stand_in(n))
    overrides = ["trainer.epochs=1", "trainer.accelerator=cpu", "data.batch_size=4"]
    recipe = load_recipe(name)
    model = recipe.run(label).model.name
    overrides += [f"model.{model}.{key}={value}" for key, value in SMALL[model].items()]
    if recipe.run(label).start is not None:
        start = load_recipe(recipe.run(label).start.recipe)
        source = recipe.run(label).start.mechanism
        run = start.run(source, overrides=overrides)
        execute(run, tmp_path / "start", progress=False)
        overrides += [f"start={{checkpoint: {tmp_path / 'start' / 'last.ckpt'}}}"]
    results = execute(recipe.run(label, overrides=overrides), tmp_path / "run", progress=False)
    assert results["steps"] >= 1
    assert 0 <= results["scores"]["test"] <= 100.0001
    assert ("start" in results["scores"]) == (recipe.run(label).start is not None)


def test_runtime_times_a_layer(tmp_path):
    run = load_recipe("runtime").run(
        "espformer-hard", overrides=["tokens=10", "dim=32", "heads=2", "accelerator=cpu"]
    )
    assert isinstance(run, TimingRun)
    results = execute(run, tmp_path)
    assert results["scores"]["mean"] > 0
    assert results["check"]["row_error"] < 1e-5
    assert results["check"]["column_error"] < 1e-5


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_every_recipe_dry_runs(name, tmp_path, monkeypatch):
    """Without data there is still a plan; only the estimate is missing."""
    monkeypatch.setattr(
        espformer.lab.data,
        "load",
        lambda n, **options: (_ for _ in ()).throw(ValueError("no data")),
    )
    command = ["reproduce", name, "--dry-run", "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "runs, 0 finished" in result.output
    assert name == "runtime" or "no estimate: no data" in result.output
    assert not (tmp_path / "out").exists(), "a dry run leaves nothing behind"


@pytest.mark.parametrize("name", ["modelnet40-pct", "cats-dogs-slicers", "iwslt14-plug-and-play"])
def test_estimates_of_a_dry_run(name, tmp_path, monkeypatch):
    """Every run gets an estimate, and steps of one kind are timed once."""
    monkeypatch.setattr(espformer.lab.data, "load", lambda n, **options: stand_in(n))
    timed = []
    measure = timing._seconds_per_example

    def count(run, task):
        timed.append(run.label)
        return measure(run, task)

    monkeypatch.setattr(timing, "_seconds_per_example", count)
    run = load_recipe(name).run()
    small = [f"model.{run.model.name}.{key}={v}" for key, v in SMALL[run.model.name].items()]
    command = ["reproduce", name, "--dry-run", "--output", str(tmp_path / "out"), *small]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "no estimate" not in result.output
    assert "?" not in result.output
    if name == "cats-dogs-slicers":
        assert timed == ["axis-64", "learnable-1", "learnable-8"]


def test_prerequisites_come_first(tmp_path):
    recipe = load_recipe("cats-dogs-anneal")
    overrides = ["trainer.precision=64-true", "annealing.factor=0.5"]
    jobs = plan(recipe, recipe.name, tmp_path, only=["200 images"], overrides=overrides)
    names = [(job.run.recipe, job.run.label, job.run.setting, job.run.seed) for job in jobs]
    assert len(names) == 2 * 2 * 3
    for first, second in zip(names[::2], names[1::2], strict=True):
        assert first == ("cats-dogs", second[1], "200 images", second[3])
        assert second[0] == "cats-dogs-anneal"
    assert jobs[1].needs == [jobs[0].directory]
    assert "trainer.precision=64-true" in jobs[0].arguments
    assert jobs[0].run.trainer.precision == jobs[1].run.trainer.precision == "64-true"
    assert "annealing.factor=0.5" not in jobs[0].arguments
    assert "annealing.factor=0.5" in jobs[1].arguments


def test_the_stages_of_an_experiment_are_shortened_apart(tmp_path):
    recipe = load_recipe("cats-dogs-anneal")

    def epochs(*overrides):
        jobs = plan(recipe, recipe.name, tmp_path, seeds=[0], only=["espformer"],
                    overrides=["trainer.validate_every=7", *overrides])  # fmt: skip
        assert {job.run.trainer.validate_every for job in jobs} == {7}
        assert all(
            job.run
            == load_recipe(job.arguments[1]).run(
                job.run.label, job.run.setting, job.run.seed, job.arguments[11:]
            )
            for job in jobs
        )
        return {(job.run.recipe, job.run.trainer.epochs) for job in jobs}

    assert epochs("trainer.epochs=4") == {("cats-dogs", 300), ("cats-dogs-anneal", 4)}
    both = epochs("trainer.epochs=4", "start.overrides=[trainer.epochs=60]")
    assert both == {("cats-dogs", 60), ("cats-dogs-anneal", 4)}


def test_another_number_of_epochs_stretches_the_schedule():
    short = load_recipe("mnist-patch-size").run(overrides=["trainer.epochs=9"])
    assert (short.trainer.epochs, short.schedule.milestones) == (9, [7, 8])
    assert load_recipe("mnist-patch-size").run(
        overrides=["trainer.epochs=1"]
    ).schedule.milestones == [1]
    said = ["trainer.epochs=9", "schedule.milestones=[2]"]
    assert load_recipe("mnist-patch-size").run(overrides=said).schedule.milestones == [2]
    anneal = load_recipe("cats-dogs-anneal")
    whole, quick = anneal.run(), anneal.run(overrides=["trainer.epochs=8"])
    assert quick.annealing.factor**8 == pytest.approx(whole.annealing.factor**40)
    said = anneal.run(overrides=["trainer.epochs=8", "annealing.factor=0.5"])
    assert said.annealing.factor == 0.5
    translation = load_recipe("iwslt14").run(overrides=["trainer.epochs=5"])
    assert translation.schedule.warmup_steps == 260
