"""One run, end to end, on the data that come with the package."""

import json
from types import SimpleNamespace

import pytest
import torch
import yaml

from espformer.lab.errors import ConfigError, RunError
from espformer.lab.files import lock
from espformer.lab.recipes.recipe import load_recipe
from espformer.lab.training import posttrain, trainer
from espformer.lab.training.assemble import load_task, load_weights, make_learner
from espformer.lab.training.checkpoints import read_checkpoint
from espformer.lab.training.learner import Classifier
from espformer.lab.training.run_directory import read_curves, run_directory
from espformer.lab.training.trainer import execute
from espformer.nn import get_sort_temperatures


def test_digits_end_to_end(tmp_path):
    small = [
        "trainer.epochs=1",
        "trainer.limit_batches=2",
        "trainer.accelerator=cpu",
        "harden=true",
    ]
    run = load_recipe("digits").run("espformer", overrides=small)
    directory = run_directory(tmp_path, run)
    assert directory == tmp_path / "digits" / "default" / "espformer" / "seed-0"
    results = execute(run, directory, progress=False)
    assert set(results["scores"]) == {"test", "best", "hard"}
    assert all(0 <= score <= 100 for score in results["scores"].values())
    assert results["steps"] == 2
    assert results["samples_per_second"] > 0
    assert results["best_chosen_on"] == "test"
    assert results == json.loads((directory / "results.json").read_text())
    assert yaml.safe_load((directory / "config.yaml").read_text())["mechanism"]["esp"]
    curves = read_curves(directory)
    assert {"train/loss", "valid/accuracy", "attention/row_error"} <= set(curves)
    assert list((directory / "logs").glob("*/events.out.tfevents.*")), "TensorBoard has it too"


@pytest.mark.parametrize("label", ["transformer", "espformer"])
def test_throughput_beside_softmax(recipe, tmp_path, capsys, label):
    """An ESP run says at what share of softmax's throughput it trains, measured in this run."""
    overrides = ["trainer.compare_throughput=true", "trainer.epochs=1"]
    results = execute(recipe.run(label, overrides=overrides), tmp_path, progress=False)
    printed = capsys.readouterr().out
    if label == "transformer":
        assert results["throughput"] is None
        assert "throughput" not in printed
        return
    measured = results["throughput"]
    own, softmax = measured["samples_per_second"], measured["softmax_samples_per_second"]
    assert measured["share"] == own / softmax
    assert 0 < measured["share"] < float("inf")  # no more: other programs may be busy
    assert measured["batch_size"] == 32
    assert f"{100 * own / softmax:.0f} % of the {softmax:,.0f} of softmax attention" in printed


def test_throughput_of_batches_that_hold_all_examples(recipe, tmp_path):
    overrides = ["trainer.compare_throughput=true", "trainer.epochs=1", "data.batch_size=5000"]
    results = execute(recipe.run("espformer", overrides=overrides), tmp_path, progress=False)
    assert results["throughput"]["batch_size"] == results["data"]["sizes"]["train"] < 5000


def test_measuring_throughput_changes_nothing(recipe, tmp_path):
    for name in ("true", "false"):
        overrides = [f"trainer.compare_throughput={name}", "harden=true"]
        execute(recipe.run("espformer", overrides=overrides), tmp_path / name, progress=False)
    a, b = (read_checkpoint(tmp_path / name / "last.ckpt") for name in ("true", "false"))
    assert all(torch.equal(a["state_dict"][key], b["state_dict"][key]) for key in a["state_dict"])


def test_it_learns(recipe, tmp_path):
    overrides = ["trainer.limit_batches=null", "trainer.epochs=3", "trainer.validate_every=3"]
    results = execute(recipe.run("transformer", overrides=overrides), tmp_path, progress=False)
    assert results["scores"]["test"] > 40, "ten classes, so chance is 10 %"


def test_backward_passes_stay_in_the_thread_that_trains(recipe, tmp_path, monkeypatch):
    """On a GPU another thread would be slower; see docs/performance.md. Throughput is so, too."""
    backward, seen = torch.Tensor.backward, []

    def noting(self, *args, **options):
        seen.append(torch._C._is_multithreading_enabled())
        return backward(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "backward", noting)
    run = recipe.run("espformer", overrides=["trainer.compare_throughput=true"])
    results = execute(run, tmp_path, progress=False)
    assert results["throughput"]
    assert len(seen) > results["steps"]
    assert not any(seen)
    assert torch._C._is_multithreading_enabled()


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "64-true"])
def test_precisions(recipe, tmp_path, precision):
    run = recipe.run("espformer", overrides=[f"trainer.precision={precision}"])
    assert execute(run, tmp_path, progress=False)["steps"] == 6


def test_a_finished_run_is_kept(recipe, tmp_path):
    run = recipe.run("transformer")
    first = execute(run, tmp_path, progress=False)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    assert execute(run, tmp_path, progress=False) == first
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_other_settings_are_refused(recipe, tmp_path):
    execute(recipe.run("transformer"), tmp_path, progress=False)
    with pytest.raises(RunError, match=r"trainer.epochs is 2 there and 3 here"):
        execute(recipe.run("transformer", overrides=["trainer.epochs=3"]), tmp_path)
    same = recipe.run("transformer", overrides=["data.workers=2", "trainer.devices=3"])
    assert execute(same, tmp_path)["steps"] == 6, "where it is computed does not matter"
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(RunError, match="cannot be read"):
        execute(recipe.run("transformer"), tmp_path)


def test_a_failed_start_leaves_the_directory_free(recipe, tmp_path, monkeypatch):
    wrong = recipe.run("transformer", overrides=["model.vit.patch_size=3"])
    with pytest.raises(ConfigError, match="patch_size"):
        execute(wrong, tmp_path, progress=False)
    # A step that fails before the first checkpoint, and a process that could not tidy up.
    for tidy in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(Classifier, "training_step", lambda *_: 1 / 0)
            if not tidy:
                patch.setattr(trainer, "_forget", lambda _: None)
            larger = recipe.run("transformer", overrides=["data.batch_size=64"])
            with pytest.raises(ZeroDivisionError):
                execute(larger, tmp_path, progress=False)
        assert (tmp_path / "config.yaml").exists() is not tidy
    assert execute(recipe.run("transformer"), tmp_path, progress=False)["steps"] == 6


def test_an_interrupted_run_keeps_its_directory(recipe, tmp_path, monkeypatch):
    step = Classifier.training_step

    def stop(self, batch, batch_idx):
        return step(self, batch, batch_idx) if self.current_epoch == 0 else 1 / 0

    with monkeypatch.context() as patch:
        patch.setattr(Classifier, "training_step", stop)
        with pytest.raises(ZeroDivisionError):
            execute(recipe.run("transformer"), tmp_path, progress=False)
    other = recipe.run("transformer", overrides=["data.batch_size=64"])
    for name in ("last.ckpt", "best.ckpt"):
        with pytest.raises(RunError, match=r"holds a run with other settings: data.batch_size"):
            execute(other, tmp_path, progress=False)
        (tmp_path / name).unlink()


def test_one_process_at_a_time(recipe, tmp_path):
    with (
        lock(tmp_path / ".lock", wait=False),
        pytest.raises(RunError, match="another process is working on this run"),
    ):
        execute(recipe.run("transformer"), tmp_path)


def test_missing_data_are_explained(recipe, tmp_path):
    run = recipe.run(overrides=["data.set=mnist", f"data.directory={tmp_path}"])
    with pytest.raises(RunError, match="mnist"):
        execute(run, tmp_path / "run")


def test_start_from_another_run(tiny, tmp_path):
    """Weights go from softmax to ESP; the score before training is that of the plugged model."""
    base = load_recipe(tiny).run("transformer")
    execute(base, run_directory(tmp_path, base), progress=False)
    checkpoint = run_directory(tmp_path, base) / "last.ckpt"
    overrides = [f"start.checkpoint={checkpoint}", "trainer.epochs=1", "annealing.factor=0.5"]
    run = load_recipe(tiny).run("espformer", overrides=overrides)
    results = execute(run, tmp_path / "tuned", progress=False)
    assert set(results["scores"]) >= {"start", "test"}

    task = load_task(run)
    learner = make_learner(run, task)
    fresh = {name: value.clone() for name, value in learner.model.state_dict().items()}
    kept = load_weights(learner.model, read_checkpoint(checkpoint)["state_dict"], "x")
    assert kept == []
    changed = [
        name
        for name, value in learner.model.state_dict().items()
        if not name.endswith("_extra_state") and not torch.equal(value, fresh[name])
    ]
    assert "head.weight" in changed
    assert read_checkpoint(tmp_path / "tuned" / "last.ckpt")["global_step"] == 3


def test_weights_that_do_not_fit(recipe):
    run = recipe.run("learnt")
    model = make_learner(run, load_task(run)).model
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    assert load_weights(model, state, "x") == []
    without = {name: v for name, v in state.items() if not name.endswith("log_sort_temperature")}
    assert load_weights(model, without, "x") == ["blocks.0.attn.mechanism.log_sort_temperature"]
    with pytest.raises(RunError, match=r"x: .* it lacks head.weight"):
        load_weights(model, {n: v for n, v in state.items() if n != "model.head.weight"}, "x")
    with pytest.raises(RunError, match=r"it has more.weight"):
        load_weights(model, {**state, "model.more.weight": torch.ones(1)}, "x")
    with pytest.raises(RunError, match=r"x: its weights do not fit this model: size mismatch"):
        load_weights(model, {**state, "model.head.weight": torch.ones(1, 1)}, "x")


def test_straight_through_and_deterministic(recipe, tmp_path):
    overrides = ["straight_through.end=1.0", "harden=true", "trainer.deterministic=true"]
    results = execute(recipe.run("espformer", overrides=overrides), tmp_path, progress=False)
    assert results["scores"]["test"] == results["scores"]["hard"], "the last epoch was hard already"
    torch.use_deterministic_algorithms(False)


def test_annealed_temperature_is_in_the_checkpoint(recipe, tmp_path):
    run = recipe.run("espformer", overrides=["annealing.factor=0.5"])
    execute(run, tmp_path, progress=False)
    learner = make_learner(run, load_task(run))
    load_weights(learner.model, read_checkpoint(tmp_path / "last.ckpt")["state_dict"], "x")
    assert list(get_sort_temperatures(learner.model).values()) == [pytest.approx(0.1 * 0.25)]


def test_a_start_has_the_temperature_of_the_recipe(recipe, tmp_path):
    """Whatever the checkpoint was trained with; annealing alone goes on from where it was."""
    execute(recipe.run("espformer"), tmp_path / "first", progress=False)
    posttrain.anneal(tmp_path / "first", epochs=1, factor=0.5, progress=False)
    annealed = f"start={{checkpoint: {tmp_path / 'first' / 'anneal' / 'last.ckpt'}}}"

    def temperature(name, *overrides):
        run = recipe.run("espformer", overrides=[annealed, "trainer.epochs=1", *overrides])
        execute(run, tmp_path / name, progress=False)
        state = read_checkpoint(tmp_path / name / "last.ckpt")["state_dict"]
        (saved,) = [value for key, value in state.items() if key.endswith("_extra_state")]
        return pytest.approx(float(saved[0]))

    assert temperature("as-the-recipe") == 0.1
    assert temperature("another", "mechanism.esp.sort_temperature=0.7") == 0.7
    assert temperature("go-on", "annealing.factor=0.5") == 0.025
    both = ("mechanism.esp.sort_temperature=0.8", "annealing.factor=0.5")
    assert temperature("anneal-from", *both) == 0.4


def test_a_schedule_goes_on_where_the_start_left_it(recipe, tmp_path):
    schedule = ["schedule={name: inverse_sqrt, warmup_steps: 2}", "trainer.epochs=2"]
    execute(recipe.run("transformer", overrides=schedule), tmp_path / "first", progress=False)
    start = f"start={{checkpoint: {tmp_path / 'first' / 'last.ckpt'}}}"
    goes_on = ["schedule={name: inverse_sqrt, continues: true}", start, "trainer.epochs=1"]
    execute(recipe.run("transformer", overrides=goes_on), tmp_path / "then", progress=False)
    saved = read_checkpoint(tmp_path / "then" / "last.ckpt")
    # Six steps, then three more: the next one would be the ninth.
    rate = saved["optimizer_states"][0]["param_groups"][0]["lr"]
    assert rate == pytest.approx(1e-2 * (2 / 9) ** 0.5)
    assert saved["espformer"]["continued"]["first_step"] == 6
    constant = recipe.run("transformer", overrides=["trainer.epochs=1"])
    execute(constant, tmp_path / "constant", progress=False)
    goes_on[1] = f"start={{checkpoint: {tmp_path / 'constant' / 'last.ckpt'}}}"
    with pytest.raises(RunError, match="trained with the schedule 'constant'"):
        execute(recipe.run("transformer", overrides=goes_on), tmp_path / "no", progress=False)


def test_a_run_that_fails_at_once_leaves_no_directory(recipe, tmp_path, monkeypatch):
    run = recipe.run("espformer")
    (tmp_path / "mine").mkdir()
    monkeypatch.setattr(trainer, "load_task", lambda run: 1 / 0)
    for directory in (tmp_path / "mine" / "a" / "b", tmp_path / "other" / "a"):
        with pytest.raises(ZeroDivisionError):
            execute(run, directory, progress=False)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["mine"]
    assert not list((tmp_path / "mine").iterdir()), "what was there before stays"


@pytest.mark.parametrize(("score", "percent"), [("bleu", 34.2), ("accuracy", 3420.0)])
def test_bleu_is_in_percent_already(score, percent):
    settings = SimpleNamespace(validate_every=1, epochs=2)
    learner = SimpleNamespace(score=score, run=SimpleNamespace(trainer=settings))
    runner = SimpleNamespace(
        callback_metrics={f"valid/{score}": torch.tensor(34.2)},
        test=lambda *_, **__: [{f"test/{score}": 34.2}],
    )
    scores = trainer.Scores(runner, learner, None)
    scores.test("test")
    scores.validation()
    assert scores.scores == pytest.approx({"test": percent, "valid": percent})


def test_a_run_that_is_shorter_than_its_first_validation_has_none():
    settings = SimpleNamespace(validate_every=10, epochs=2)
    learner = SimpleNamespace(score="bleu", run=SimpleNamespace(trainer=settings))
    scores = trainer.Scores(SimpleNamespace(), learner, None)  # which cannot validate
    scores.validation()
    assert scores.scores == {}


def test_a_width_that_no_layer_has_is_blamed_on_the_model():
    sizes = ["model.vit.heads=3", "model.vit.head_dim=null"]
    run = load_recipe("digits").run("transformer", overrides=sizes)
    with pytest.raises(ConfigError, match=r"model.vit: .*dim must be a multiple of heads"):
        make_learner(run, load_task(run))
