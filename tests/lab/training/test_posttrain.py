"""After training: evaluate, anneal, harden, each from a checkpoint."""

import json

import pytest
import torch

from espformer.lab.errors import RunError
from espformer.lab.files import LOCK, lock
from espformer.lab.training import posttrain
from espformer.lab.training.checkpoints import AtomicCheckpointIO
from espformer.lab.training.trainer import execute
from tests.lab.training.test_resume import copy_at


@pytest.fixture
def trained(recipe, tmp_path):
    results = execute(recipe.run("espformer"), tmp_path / "run", progress=False)
    return tmp_path / "run", results


def test_evaluate_repeats_the_scores(trained):
    directory, results = trained
    assert posttrain.evaluate(directory)["test"] == pytest.approx(results["scores"]["test"])
    best = posttrain.evaluate(directory, which="best")
    assert best["test"] == pytest.approx(results["scores"]["best"])
    assert posttrain.evaluate(directory / "last.ckpt")["test"] == pytest.approx(
        results["scores"]["test"]
    )
    with pytest.raises(RunError, match="has no checkpoint 'hard', choose from last, best"):
        posttrain.evaluate(directory, which="hard")
    with pytest.raises(RunError, match="sort_temperature must be > 0"):
        posttrain.evaluate(directory, sort_temperature=-1.0)


def test_sharper_and_sharper_is_hard(trained):
    directory, _ = trained
    sharp = posttrain.evaluate(directory, sort_temperature=1e-12)["test"]
    assert sharp == pytest.approx(posttrain.evaluate(directory, hard=True)["test"])


def test_harden(trained):
    directory, results = trained
    hardened = posttrain.harden(directory)
    assert hardened["soft"] == pytest.approx(results["scores"]["test"])
    assert hardened["hard"] == pytest.approx(posttrain.evaluate(directory, hard=True)["test"])
    assert posttrain.evaluate(directory, which="hard")["test"] == pytest.approx(hardened["hard"])
    assert json.loads((directory / "hard.json").read_text())["hard"] == hardened["hard"]


def test_what_sorts_exactly_has_no_temperature_and_is_not_hardened_again(trained):
    directory, _ = trained
    posttrain.harden(directory)
    kept = (directory / "hard.json").read_text()
    for path, which in ((directory, "hard"), (directory / "hard.ckpt", "last")):
        with pytest.raises(RunError, match=r"sorts exactly already; .*--checkpoint last"):
            posttrain.harden(path, which=which)
        with pytest.raises(RunError, match="a temperature would change nothing"):
            posttrain.evaluate(path, which=which, sort_temperature=0.1)
    assert (directory / "hard.json").read_text() == kept
    with pytest.raises(RunError, match="give --hard or --sort-temperature"):
        posttrain.evaluate(directory, hard=True, sort_temperature=0.1)


def test_what_was_hardened_on_the_way_goes_when_training_goes_on(trained, recipe):
    directory, _ = trained
    posttrain.harden(directory)
    (directory / "results.json").unlink()
    execute(recipe.run("espformer"), directory, progress=False)
    assert not (directory / "hard.json").exists()
    with pytest.raises(RunError, match="has no checkpoint 'hard'"):
        posttrain.evaluate(directory, which="hard")


def test_anneal(trained):
    directory, results = trained
    annealed = posttrain.anneal(directory, epochs=3, factor=0.1, learning_rate=1e-3, progress=False)
    assert set(annealed["scores"]) == {"start", "start_hard", "test", "hard", "best"}
    assert annealed["scores"]["start_hard"] == posttrain.evaluate(directory, hard=True)["test"]
    assert annealed["scores"]["start"] == pytest.approx(results["scores"]["test"])
    assert annealed["config"]["optimizer"]["learning_rate"] == 1e-3
    state = torch.load(directory / "anneal" / "last.ckpt", weights_only=True)["state_dict"]
    temperature = state["model.blocks.0.attn.mechanism._extra_state"][0]
    assert float(temperature) == pytest.approx(1e-4)
    again = posttrain.anneal(directory, epochs=3, factor=0.1, learning_rate=1e-3, progress=False)
    assert again == annealed, "finished, so kept"
    with pytest.raises(RunError, match="factor must be in"):
        posttrain.anneal(directory, factor=2.0)
    with pytest.raises(RunError, match=r"learning_rate must be > 0, got -1\.0"):
        posttrain.anneal(directory, learning_rate=-1.0)
    with pytest.raises(RunError, match="epochs must be at least 1"):
        posttrain.anneal(directory, epochs=0)
    with pytest.raises(RunError, match=r"trainer\.epochs is 3 there.*Move the directory away"):
        posttrain.anneal(directory, epochs=4, factor=0.1, learning_rate=1e-3, progress=False)


def test_nothing_to_sharpen_in_softmax(recipe, tmp_path):
    execute(recipe.run("transformer"), tmp_path, progress=False)
    for work in (posttrain.harden, posttrain.anneal):
        with pytest.raises(RunError, match="has no sort"):
            work(tmp_path)
    with pytest.raises(RunError, match="no run was trained there"):
        posttrain.evaluate(tmp_path / "logs")


def test_what_was_annealed_before_the_run_went_on_is_not_its_result(recipe, tmp_path, monkeypatch):
    """Interrupted, annealed, trained on and annealed again: the answer is of the trained run."""
    directory = tmp_path / "run"
    with copy_at(AtomicCheckpointIO, monkeypatch, directory, (1, 0)):
        execute(recipe.run("espformer"), tmp_path / "whole", progress=False)
    options = {"epochs": 1, "factor": 0.5, "progress": False}
    early = posttrain.anneal(directory, **options)
    results = execute(recipe.run("espformer"), directory, progress=False)
    late = posttrain.anneal(directory, **options)
    assert late["scores"]["start"] == pytest.approx(results["scores"]["test"])
    kept = json.loads((directory / "anneal-before-0" / "results.json").read_text())
    assert kept["scores"] == early["scores"], "the former result is moved away, not lost"


def test_hardening_keeps_off_a_run_that_another_process_works_on(trained):
    directory, _ = trained
    with lock(directory / LOCK, wait=False), pytest.raises(RunError, match="another process"):
        posttrain.harden(directory)
    assert not (directory / "hard.ckpt").exists()
    assert posttrain.harden(directory)["hard"] >= 0
