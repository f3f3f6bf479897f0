"""Recipes are read strictly: every mistake is named with its place and the nearest right word."""

import pytest

from espformer.lab.errors import ConfigError
from espformer.lab.recipes.build import build_mechanism
from espformer.lab.recipes.recipe import load_recipe, run_from_plain
from espformer.lab.recipes.schema import TrainingRun
from espformer.lab.recipes.yaml_schema import Origins, Spec, parse, plain, read_text
from espformer.nn import ESP, Differential, Sinkhorn, Softmax


def write(path, text, change=("", "")):
    assert change[0] in text
    path.write_text(text.replace(*change), encoding="utf-8")
    return path


@pytest.fixture
def broken(tiny):
    text = tiny.read_text(encoding="utf-8")

    def load(old, new):
        return load_recipe(write(tiny, text, (old, new)))

    return load


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("batch_size: 32", "batchsize: 32", r"line 9: data.batchsize: .*did you mean 'batch_size'"),
        ("optimizer:", "optimiser:", r"line 13: optimiser: .*did you mean 'optimizer'"),
        ("title: Tiny", "titel: Tiny", r"line 1: titel: .*did you mean 'title'"),
        ("seeds: [0, 1]", "seed: [0, 1]", r"line 20: grid.seed: .*did you mean 'seeds'"),
        (
            "epochs: 2",
            "epochs: two",
            r"line 15: trainer.epochs: expected a whole number, got 'two'",
        ),
        ("epochs: 2", "epochs: 2.5", r"trainer.epochs: expected a whole number, got 2.5"),
        ("epochs: 2", "epochs: -1", r"line 15: trainer.epochs: epochs cannot be negative, got -1"),
        ("epochs: 2", "limit_eval_batches: 0", r"limit_eval_batches must be > 0, got 0"),
        ("batch_size: 32", "workers: -1", r"data.workers: workers cannot be negative, got -1"),
        ("batch_size: 32", "batch_size: 0", r"line 9: data.batch_size: batch_size must be > 0"),
        ("seeds: [0, 1]", "seeds: [0, 0]", r"line 20: grid.seeds: seeds must differ, got \[0, 0\]"),
        ("seeds: [0, 1]", "seeds: [-1]", r"line 20: grid.seeds: seeds must be in .* got \[-1\]"),
        (
            "optimizer:",
            "schedule: {name: milestones, milestones: [0]}\noptimizer:",
            r"line 13: schedule.milestones: milestones must be .* from 1 on, got \[0\]",
        ),
        ("depth: 1", "depth: -1", r"line 12: model.vit.depth: .* at least 0, got -1"),
        ("depth: 1", "depth: many", r"line 12: model.vit.depth: .* an integer, got 'many'"),
        ("heads: 2", "heads: 0", r"line 12: model.vit.heads: .* at least 1, got 0"),
        ("dim: 8,", "dim: -8,", r"line 12: model.vit.dim: .* at least 1, got -8"),
        ("patch_size: 4", "patch_size: [4, 0]", r"model.vit.patch_size: .* got \[4, 0\]"),
        ("name: adam", "weight_decay: -0.1", r"weight_decay cannot be negative, got -0.1"),
        ("task: classification", "task: classification\nbeam: 0", r"beam must be > 0, got 0"),
        ("epochs: 2", "epochs: true", r"trainer.epochs: expected a whole number, got True"),
        ("statistics: false", "statistics: no", r"expected true or false, got 'no'"),
        ("name: adam", "name: adamm", r"optimizer.name: got 'adamm', did you mean 'adam'"),
        ("set: digits", "set: digit", r"data.set: no data set .*did you mean 'digits'"),
        ("set: digits", "set: {digits: {x: 1}}", r"data.set.digits.x: digits takes no option 'x'"),
        ("vit: {", "vitt: {", r"model: no model is called 'vitt', did you mean 'vit'"),
        ("depth: 1", "dept: 1", r"line 12: model.vit.dept: .*did you mean 'depth'"),
        ("metric:", "metrics:", r"mechanism.esp.metrics: .*did you mean 'metric'"),
        ("metric: squared", "metric: cubed", r"metric must be one of .* got 'cubed'"),
        ("{esp:", "{espp:", r"no mechanism is called 'espp', did you mean 'esp'"),
        ("task: classification", "task: classify", r"task: got 'classify'"),
        ("task: classification\n", "", r"task: this key is missing"),
        ("  set: digits\n", "", r"data.set: this key is missing"),
        ("epochs: 2", "epochs: 2\n  epochs: 3", r"line 16: trainer.epochs is written twice"),
        ("smooth: {", "smooth: {x", r"line 23: xlabel_smoothing: unknown key"),
        ("title: Tiny", "title: [", r"this is not YAML"),
        ("espformer: {esp", "other: {esp", r"default_mechanism: no mechanism 'espformer'"),
        ("data:", "annealing: {}\ndata:", r"softmax\(\) has no sort temperature"),
    ],
)
def test_mistakes_are_named(broken, old, new, expected):
    with pytest.raises(ConfigError, match=expected):
        broken(old, new)


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'digits'"):
        load_recipe("digitz")
    with pytest.raises(ConfigError, match=r"nowhere.yaml: cannot be read"):
        load_recipe("nowhere.yaml")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.epoch=3", r"the command line: trainer.epoch: .*did you mean 'epochs'"),
        ("trainer.epochs=x", r"the command line: trainer.epochs: expected a whole number"),
        ("trainer.epochs.more=1", r"trainer.epochs is 2, it has no keys of its own"),
        ("trainer.epochs", r"write it as key.path=value"),
        ("=3", r"write it as key.path=value"),
        ("mechanism.softmax.scale=1", r"got esp and softmax; .* chosen by --mechanism"),
        ("mechanism.metric=squared", r"argument of esp is written mechanism\.esp\.metric=\.\.\."),
        ("grid.seeds=[1]", r"an override is about one run"),
        ("data.batch_size=0", r"data.batch_size: batch_size must be > 0, got 0"),
        ("model.vit.mlp_dim=0", r"the command line: model.vit.mlp_dim: .* at least 1, got 0"),
        ("optimizer.betas=[1,2]", r"betas must be two numbers in \[0, 1\)"),
        ("mechanism.esp.sort_temperature=0", r"sort_temperature must be > 0"),
        ("annealing={factor: 0.5, straight: 1}", r"annealing.straight: unknown key"),
        ("trainer.precision=bf17", r"trainer.precision: got 'bf17'"),
        ("data.set={digits: [1]}", r"data.set.digits: expected arguments and values, got a list"),
        ("seed=3", r"seed: unknown key"),
        ("epochs=3", r"unknown key 'epochs', did you mean 'trainer.epochs'"),
        ("optimizer.lr=1e-3", r"unknown key 'lr', did you mean 'learning_rate'"),
    ],
)
def test_bad_overrides(recipe, override, expected):
    with pytest.raises(ConfigError, match=expected):
        recipe.run(overrides=[override])


def test_overrides_are_typed_and_win(recipe):
    run = recipe.run(
        "learnt",
        "smooth",
        7,
        ["trainer.epochs=5", "optimizer.learning_rate=2e-3", "mechanism.esp.balance=both",
         "annealing.factor=0.5", "label_smoothing=0.2"],
    )  # fmt: skip
    assert isinstance(run, TrainingRun)
    assert (run.trainer.epochs, run.optimizer.learning_rate, run.seed) == (5, 2e-3, 7)
    assert run.annealing is not None
    assert run.annealing.factor == 0.5
    assert run.label_smoothing == 0.2
    assert run.mechanism.arguments["balance"] == "both"
    assert recipe.run("learnt").mechanism.arguments.get("balance") is None, (
        "the recipe is unchanged"
    )


def test_a_mechanism_can_be_replaced_whole(recipe):
    run = recipe.run(overrides=["mechanism={sinkhorn: {iterations: 7}}"])
    assert run.mechanism == Spec("sinkhorn", {"iterations": 7})


def test_grid(recipe):
    runs = recipe.runs()
    assert len(runs) == 3 * 2 * 2
    assert len({(r.label, r.setting, r.seed) for r in runs}) == 12
    assert len(recipe.runs(seeds=[5], only=["smooth", "learnt"])) == 1
    with pytest.raises(ConfigError, match="did you mean 'smooth'"):
        recipe.runs(only=["smoth"])
    with pytest.raises(ConfigError, match="no mechanism 'esp'"):
        recipe.run("esp")


def test_adjust_is_for_one_mechanism(broken):
    recipe = broken("  settings:", "  adjust: {learnt: {trainer.epochs: 9}}\n  settings:")
    assert recipe.run("learnt").trainer.epochs == 9
    assert recipe.run("espformer").trainer.epochs == 2
    with pytest.raises(ConfigError, match="did you mean 'learnt'"):
        broken("  settings:", "  adjust: {learn: {trainer.epochs: 9}}\n  settings:")


def test_a_run_survives_being_written_down(recipe):
    run = recipe.run("learnt", overrides=["annealing.factor=0.5"])
    assert run_from_plain(plain(run), "x") == run
    with pytest.raises(ConfigError, match="not the description of a run"):
        run_from_plain({"a": 1}, "x")


def test_build_mechanism():
    assert isinstance(build_mechanism("softmax"), Softmax)
    esp = build_mechanism({"esp": {"sort_temperature": 1e-3, "slicer": "frozen", "slices": 3}})
    assert isinstance(esp, ESP)
    assert esp.sort_temperature == 1e-3
    differential = build_mechanism(
        {"differential": {"base": {"sinkhorn": {"iterations": 4}}, "lambda_init": 0.5}}
    )
    assert isinstance(differential, Differential)
    assert isinstance(differential.base, Sinkhorn)
    assert differential.base.iterations == 4
    with pytest.raises(ConfigError, match=r"mechanism.differential.base: this key is missing"):
        build_mechanism("differential")
    with pytest.raises(ConfigError, match=r"mechanism.differential.base.esp.t: esp takes no"):
        build_mechanism({"differential": {"base": {"esp": {"t": 1}}}})


def test_numbers_as_people_write_them():
    assert read_text("1e-3") == 1e-3
    assert read_text("1E5") == 1e5
    assert read_text("3") == 3
    assert read_text("-.5") == -0.5
    assert read_text("no") == "no"
    assert read_text("true") is True
    assert read_text("1.2.3") == "1.2.3"
    with pytest.raises(ConfigError, match="cannot read the value"):
        read_text("[1")


def test_parse_numbers():
    assert parse(float, 3, Origins()) == 3.0
    assert parse(int, 3.0, Origins()) == 3
    with pytest.raises(ConfigError, match="expected text, got 3"):
        parse(str, 3, Origins())
