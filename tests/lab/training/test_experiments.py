"""Experiments: planned, done several at a time, kept, continued, and put beside the paper."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from espformer.lab.clock import in_words
from espformer.lab.errors import RunError
from espformer.lab.files import lock
from espformer.lab.recipes.recipe import load_recipe, recipe_names
from espformer.lab.recipes.yaml_schema import plain
from espformer.lab.results.figures import plot_experiment, plot_run
from espformer.lab.results.paper_numbers import DIFFERENCES, TABLES, Number
from espformer.lab.results.result_files import collect, read_file, write_report
from espformer.lab.results.result_tables import markdown, summarise
from espformer.lab.training import experiments, timing
from espformer.lab.training.assemble import load_task
from espformer.lab.training.experiments import do_all, plan, rough_work, seed_by_seed
from espformer.lab.training.learner import Classifier
from espformer.lab.training.timing import Estimator
from espformer.lab.training.trainer import execute

QUIET = Console(quiet=True)

FAKE = """
import json, os, pathlib, sys, time
directory = pathlib.Path(sys.argv[1])
with open(directory.parents[3] / "order.txt", "a") as file:
    file.write(directory.parent.name + "\\n")
if sys.argv[2] == "fail":
    sys.exit("it went wrong")
if sys.argv[2] == "killed" and not (directory / "begun").exists():
    (directory / "begun").touch()
    os.kill(os.getpid(), 9)
(directory / "results.json").write_text(json.dumps({"scores": {"test": 1.0}}))
"""


@pytest.fixture
def jobs(recipe, tiny, tmp_path):
    """Jobs that write results without training."""
    made = plan(recipe, str(tiny), tmp_path / "out", seeds=[0], only=["plain"])
    for job in made:
        job.arguments = [str(job.directory), "ok"]
    return made


def fake(arguments, log, environment):
    with open(log, "ab") as file:
        return subprocess.Popen(
            [sys.executable, "-c", FAKE, *arguments],
            stdout=file, stderr=file, env={**os.environ, **environment},
        )  # fmt: skip


def do_fake(jobs, at_once, console=QUIET):
    return do_all(jobs, at_once, console, fake)


def order(tmp_path):
    return (tmp_path / "out" / "order.txt").read_text().split()


def test_commands_say_everything(recipe, tiny, tmp_path):
    made = plan(
        recipe, str(tiny), tmp_path, seeds=[3], only=["learnt"], overrides=["trainer.epochs=1"]
    )
    assert [job.run.setting for job in made] == ["plain", "smooth"]
    text = " ".join(made[1].arguments)
    for part in ("--mechanism learnt", "--setting smooth", "--seed 3", "trainer.epochs=1"):
        assert part in text


def test_other_settings_are_refused_only_where_work_would_be_lost(recipe, tiny, tmp_path):
    """A description without a checkpoint is of a run that was killed before its first one."""
    (job,) = plan(recipe, str(tiny), tmp_path, seeds=[0], only=["plain", "learnt"])
    job.directory.mkdir(parents=True)
    (job.directory / "config.yaml").write_text("data: {batch_size: 3}\n")
    plan(recipe, str(tiny), tmp_path, seeds=[0], only=["plain", "learnt"])
    (job.directory / "last.ckpt").touch()
    with pytest.raises(RunError, match="other settings"):
        plan(recipe, str(tiny), tmp_path, seeds=[0], only=["plain", "learnt"])


def test_all_are_done_and_none_twice(jobs, tmp_path):
    assert do_fake(jobs, 2) == []
    assert sorted(order(tmp_path)) == ["espformer", "learnt", "transformer"]
    assert all(job.state == "finished" for job in jobs)
    (jobs[0].directory / "results.json").unlink()
    assert jobs[0].state == "new"
    assert do_fake(jobs, 2) == []
    assert len(order(tmp_path)) == 4, "only what was missing was done again"


def test_a_failure_stops_what_needs_it_and_nothing_else(jobs, tmp_path):
    jobs[0].arguments[-1] = "fail"
    jobs[1].needs = [jobs[0].directory]
    failed = do_fake(jobs, 1)
    assert [job.name for job in failed] == [jobs[0].name, jobs[1].name]
    assert jobs[2].state == "finished"
    assert "it went wrong" in (jobs[0].directory / "log.txt").read_text()
    jobs[0].arguments[-1] = "ok"
    assert do_fake(jobs, 1) == []
    assert order(tmp_path).count("transformer") == 2


def test_what_is_needed_comes_first(jobs, tmp_path):
    jobs[0].needs = [jobs[2].directory]
    do_fake(jobs, 3)
    names = order(tmp_path)
    assert names.index("learnt") < names.index("transformer")


def test_a_killed_run_goes_on_once(jobs, tmp_path):
    jobs[0].arguments[-1] = "killed"
    assert do_fake(jobs, 1) == []
    assert order(tmp_path).count("transformer") == 2
    (jobs[0].directory / "results.json").unlink()
    (jobs[0].directory / "begun").unlink()
    assert jobs[0].attempts == 2
    assert do_fake(jobs, 1) == [jobs[0]], "a run that is killed again has a reason"


class Deaf:
    """A run that does not stop when asked to."""

    def __init__(self, *_):
        self.killed = False

    def poll(self):
        return None

    def terminate(self):
        pass

    def kill(self):
        self.killed = True

    def wait(self, timeout=None):
        if not self.killed:
            time.sleep(timeout)
            raise subprocess.TimeoutExpired("run", timeout)
        return -9


def test_an_interrupt_waits_once_for_all(jobs, monkeypatch):
    monkeypatch.setattr(experiments, "_PATIENCE_SECONDS", 1.0)
    made = []

    def launcher(*arguments):
        made.append(Deaf())
        if len(made) == 3:
            monkeypatch.setattr(experiments.time, "sleep", interrupt)
        return made[-1]

    sleep = time.sleep

    def interrupt(seconds):
        monkeypatch.setattr(experiments.time, "sleep", sleep)
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        do_all(jobs, 3, QUIET, launcher)
    assert time.monotonic() - began < 2.8, "not a second for each"
    assert [run.killed for run in made] == [True] * 3


def test_failures_are_told_again_at_the_end(jobs):
    jobs[0].arguments[-1] = "fail"
    console = Console(record=True, width=300, file=io.StringIO())
    do_fake(jobs, 1, console)
    lines = [line for line in console.export_text().splitlines() if line.strip()]
    assert any("it went wrong" in line for line in lines)
    assert lines[-1].endswith(f"see {jobs[0].log}")


def test_the_longest_begin_first(tmp_path):
    recipe = load_recipe("mnist-patch-size")
    runs = {
        (label, setting): recipe.run(label, setting)
        for label in ("transformer", "espformer")
        for setting in ("patch=2", "patch=14")
    }
    names = sorted(runs, key=lambda name: -rough_work(runs[name]))
    assert names == [
        ("espformer", "patch=2"), ("transformer", "patch=2"),
        ("espformer", "patch=14"), ("transformer", "patch=14"),
    ]  # fmt: skip
    images = load_recipe("cats-dogs")
    work = [rough_work(images.run("transformer", setting)) for setting in images.grid.settings]
    assert work == sorted(set(work)), "200, 2,000 and 5,000 images"


def test_an_interruption_leaves_whole_comparisons(tmp_path):
    recipe = load_recipe("mnist-patch-size")
    made = plan(recipe, recipe.name, tmp_path, only=["patch=7", "patch=4", "patch=14"])
    jobs = seed_by_seed(made)
    assert sorted(job.name for job in jobs) == sorted(job.name for job in made)
    groups = list(dict.fromkeys((job.run.seed, job.run.setting) for job in jobs))
    assert groups == [(s, f"patch={p}") for s in (0, 1, 2) for p in (4, 7, 14)]
    for group in groups:  # all mechanisms of a group together, the longest of them first
        labels = [job.run.label for job in jobs if (job.run.seed, job.run.setting) == group]
        assert set(labels) == set(recipe.mechanisms)
        assert labels[0] == "espformer-balanced"
        assert labels[-1] in ("transformer", "uniform", "uniform-high-rate")
    order = [(job.run.seed, job.run.setting) for job in jobs]
    assert order == sorted(order, key=groups.index)


def test_what_a_seed_starts_from_comes_before_it(tmp_path):
    made = plan(load_recipe("mnist-hardening"), "mnist-hardening", tmp_path, seeds=[5, 3])
    jobs = seed_by_seed(made)
    assert [job.run.seed for job in jobs] == [5] * 9 + [3] * 9, "seeds as they were asked for"
    places = {job.directory: place for place, job in enumerate(jobs)}
    assert all(places[path] < places[job.directory] for job in jobs for path in job.needs)


@pytest.mark.parametrize(
    ("cards", "at_once", "overrides", "daemon", "told"),
    [
        (1, 2, [], False, True),
        (1, 2, [], True, False),
        (1, 1, [], False, False),
        (2, 2, [], False, False),
        (0, 2, [], False, False),
        (1, 2, ["trainer.accelerator=cpu"], False, False),
    ],
    ids=["shared", "mps", "alone", "a-card-each", "no-card", "cpu"],
)
def test_sharing_a_card_without_mps_is_told(
    tiny, tmp_path, monkeypatch, cards, at_once, overrides, daemon, told
):
    pipes = tmp_path / "pipes"
    if daemon:
        pipes.mkdir()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(pipes))
    monkeypatch.setattr("torch.cuda.device_count", lambda: cards)
    asked = overrides or ["trainer.accelerator=auto"]
    made = plan(
        load_recipe(tiny), str(tiny), tmp_path / "out", seeds=[0], only=["plain"], overrides=asked
    )
    for job in made:
        job.arguments = [str(job.directory), "ok"]
    console = Console(record=True, width=300, file=io.StringIO())
    assert do_fake(made, at_once, console) == []
    assert ("nvidia-cuda-mps-control -d" in console.export_text()) == told


def test_what_is_timed_is_timed_alone(tmp_path):
    recipe = load_recipe("runtime")
    made = plan(recipe, "runtime", tmp_path, seeds=[0])[:2]
    for job in made:
        job.arguments = [str(job.directory), "ok"]
    console = Console(record=True, width=300, file=io.StringIO())
    do_fake(made, 8, console)
    assert "2 to do, 1 at once (what is timed is timed alone)" in console.export_text()


def test_data_are_prepared_once(recipe, tiny, tmp_path, monkeypatch):
    made = plan(recipe, str(tiny), tmp_path / "out", seeds=[0, 1])
    asked = []
    monkeypatch.setattr(experiments, "load_task", lambda run: asked.append(run.seed))
    experiments._prepare_data([job.run for job in made], QUIET)
    assert len(made) == 12
    assert asked == [0, 1]


def test_missing_data_are_told_before_anything_starts(recipe, tiny, tmp_path):
    overrides = ["data.set=mnist", f"data.directory={tmp_path}"]
    made = plan(recipe, str(tiny), tmp_path / "out", overrides=overrides)
    with pytest.raises(RunError, match="mnist"):
        experiments._prepare_data([job.run for job in made], QUIET)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_forks_end_with_their_parent(tiny, tmp_path):
    """`reproduce` is killed: its runs stop, and can be taken up at once."""
    overrides = ["trainer.epochs=10000", "trainer.checkpoint_minutes=0"]
    command = [
        *(sys.executable, "-m", "espformer.lab.cli", "reproduce", str(tiny), "--seeds", "0"),
        *("--only", "learnt", "--only", "plain", "--output", str(tmp_path), *overrides),
    ]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    directory = tmp_path / "tiny" / "plain" / "learnt" / "seed-0"
    try:
        wait_until(lambda: (directory / "last.ckpt").exists() or parent.poll() is not None)
        assert parent.poll() is None
    finally:  # it would train for hours
        parent.kill()
        parent.wait()

    def free():
        try:
            with lock(directory / ".lock", wait=False):
                return True
        except RunError:
            return False

    wait_until(free)
    assert "stopped; the same command goes on" in (directory / "log.txt").read_text()


def wait_until(condition):
    deadline = time.monotonic() + 500  # imports alone take minutes where many share the processors
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_real_runs_interrupted_and_continued(tiny, tmp_path):
    """Two runs in processes of their own; one of them was begun before and goes on."""
    recipe = load_recipe(tiny)
    overrides = ["trainer.checkpoint_minutes=0"]
    only = ["plain", "learnt", "transformer"]
    out = tmp_path / "out"
    made = plan(recipe, str(tiny), out, seeds=[0], only=only, overrides=overrides)
    assert len(made) == 2
    execute(made[0].run, made[0].directory, progress=False)
    whole = json.loads((made[0].directory / "results.json").read_text())
    (made[0].directory / "results.json").unlink()
    assert made[0].state == "interrupted"
    assert do_all(made, 2, QUIET) == []
    again = json.loads((made[0].directory / "results.json").read_text())
    assert again["continued"]
    assert again["scores"] == whole["scores"]
    assert [r["mechanism"] for r in collect(recipe, tmp_path / "out")] == ["transformer", "learnt"]


def result(label, setting, seed, **scores):
    return {
        "mechanism": label, "setting": setting, "seed": seed, "scores": scores, "score": "accuracy",
        "device": "a card", "versions": {"torch": "2", "espformer": "0"}, "config": {},
    }  # fmt: skip


def test_mean_and_deviation_beside_the_paper():
    recipe = load_recipe("cats-dogs")
    results = [result("espformer", "200 images", s, test=50.0 + s, best=99.0) for s in range(3)]
    text = markdown(recipe, results)
    assert "| ESP (`espformer`) | here | 3 | 51.00 ± 1.00 |\n|  | paper |  | 55.66 ± 3.95 |" in text
    assert "command" not in text, "Python called, no command"
    assert "99.0" not in text, "the best epoch was chosen on the test data"
    alone = markdown(recipe, results[:1])
    assert "| ESP (`espformer`) | here | 1 | 50.00 |" in alone, "one run has no deviation"


def test_settings_stand_side_by_side():
    recipe = load_recipe("cats-dogs")
    names = ("200 images", 55), ("5000 images", 75)
    results = [result("espformer", s, 0, test=float(v)) for s, v in names]
    text = markdown(recipe, results)
    assert "| mechanism |  | runs | 200 images | 5000 images |" in text
    assert "| ESP (`espformer`) | here | 1 | 55.00 | 75.00 |" in text
    assert "|  | paper |  | 55.66 ± 3.95 | 75.40 ± 0.38 |" in text
    assert "settings not run: 2000 images" in text
    assert "20000 images: the files have 5,000 training images" in text


def test_best_median_mean_worst_beside_the_paper():
    recipe = load_recipe("imdb")
    results = [result("espformer", "pooled", s, test=v) for s, v in enumerate((85, 86, 88, 84))]
    text = markdown(recipe, results)
    assert "| ESP (`espformer`) | here | 4 | 88.00 | 85.50 | 85.75 | 84.00 |" in text
    assert "|  | paper |  | 85.50 | 85.50 | 85.47 | 85.40 |" in text
    both = markdown(recipe, [*results, result("espformer", "published", 0, test=80.0)])
    assert "| pooled: best | pooled: median |" in both
    assert "| 88.00 | 85.50 | 85.75 | 84.00 | 80.00 | 80.00 | 80.00 | 80.00 |" in both


def test_differences_are_from_the_paper_where_it_tells():
    """Not from the recipe, which may differ from the paper itself."""

    def differences(name, label, **changes):
        recipe = load_recipe(name)
        run = recipe.run(label, overrides=[f"{key}={value}" for key, value in changes.items()])
        done = result(label, run.setting, 0, test=90.0) | {"config": plain(run)}
        return markdown(recipe, [done]).partition("Differs from the paper:")[2]

    text = differences("modelnet40-pct", "espformer", **{"trainer.epochs": 30})
    assert "| `optimizer.learning_rate` | 0.01 | 0.0001 |" in text
    assert "| `trainer.epochs` | 30 | 300 |" in text
    assert "| `schedule.milestones` | [25] | [250] |" in text
    same = {"optimizer.learning_rate": 1e-4, "trainer.precision": "bf16-mixed"}
    text = differences("modelnet40-pct", "espformer", **same)
    assert "learning_rate`" not in text
    assert "| `trainer.precision` | bf16-mixed | 32-true (recipe) |" in text, "it tells nothing"
    text = differences("modelnet40-pct", "espformer-default", **{"mechanism.esp.slices": 4})
    assert "| `mechanism.esp.slices` | 4 | – (recipe) |" in text, "no row of the paper"
    assert set(DIFFERENCES) <= set(recipe_names())


def test_plugged_and_tuned_beside_the_paper():
    recipe = load_recipe("iwslt14-plug-and-play")
    text = markdown(recipe, [result("diff-espformer", "default", 0, start=30.0, test=31.0)])
    assert "| differential ESP, before fine-tuning | here | 1 | 30.00 | 30.00 |" in text
    assert "|  | paper |  | 33.72 | – |" in text
    assert "| differential ESP (`diff-espformer`) | here | 1 | 31.00 | 31.00 |" in text


def test_what_the_paper_does_not_print():
    recipe = load_recipe("mnist-patch-size")
    text = markdown(recipe, [result("espformer", "patch=4", 0, test=97.0)])
    assert "| ESP (`espformer`) | 1 | 97.00 |" in text
    assert "|  | paper |" not in text
    incomplete = markdown(load_recipe("iwslt14"), [result("other", "default", 0, test=9.0)])
    assert "| other | here | 1 | 9.00 | 9.00 |" in incomplete
    assert "No run is finished yet" in markdown(recipe, [])


def test_paper_numbers():
    table = TABLES["cats-dogs-anneal"].numbers
    assert table["20000 images", "espformer", "hard"] == Number(mean=81.23, std=0.11)
    soft = TABLES["cats-dogs"].numbers["200 images", "espformer", "test"]
    assert table["200 images", "espformer", "start"] == soft
    slicers = TABLES["cats-dogs-slicers"].numbers
    assert len(slicers) == 33
    assert slicers["tau=10", "frozen-128", "test"] == Number(mean=78.10, std=0.26)
    assert slicers["tau=1", "learnable-8", "test"].mean == 79.07
    assert len(TABLES["cats-dogs"].numbers) == 16
    assert summarise([2.0]).std is None


def test_report_and_figures(recipe, tmp_path):
    output = tmp_path / "out"
    for seed in (0, 1):
        overrides = ["trainer.attention_statistics=true"]
        run = recipe.run("transformer", "plain", seed, overrides)
        execute(run, output / "tiny" / "plain" / "transformer" / f"seed-{seed}", progress=False)
    path, text = write_report(recipe, output)
    assert path.read_text() == text
    assert "| softmax (`transformer`) | 2 |" in text
    assert "error of row sums" in text
    kept = read_file(output / "tiny" / "results.json")
    assert [run["seed"] for run in kept.runs] == [0, 1]
    assert kept.runs == collect(recipe, output)
    assert set(kept.runs[0]["attention"]) == {"row_error", "column_error", "entropy"}
    pytest.importorskip("matplotlib")
    (scores,) = plot_experiment(recipe, collect(recipe, output)).axes
    (line,) = scores.get_legend_handles_labels()[1]
    assert line == "softmax"
    curves = plot_run(output / "tiny" / "plain" / "transformer" / "seed-0").axes
    assert [axis.get_title() for axis in curves] == ["loss", "score", "attention"]
    with pytest.raises(RunError, match="nothing was logged"):
        plot_run(tmp_path)
    with pytest.raises(RunError, match="no run of tiny is finished"):
        plot_experiment(recipe, [])


def test_estimate(recipe):
    estimate = Estimator()
    guess = estimate(recipe.run("transformer", overrides=["trainer.limit_batches=null"]))
    assert guess.steps == 2 * 45, "1,438 examples in batches of 32, two epochs"
    assert 0 < guess.seconds < 600
    missing = recipe.run(overrides=["data.set=mnist", "data.directory=/nowhere"])
    assert estimate(missing).seconds is None
    assert "mnist" in estimate(missing).reason
    assert [in_words(s) for s in (5, 100, 7000, 10**6)] == ["5 s", "1.7 min", "1.9 h", "11.6 days"]


def test_the_first_step_which_compiles_is_not_part_of_an_estimate(recipe, monkeypatch):
    losses = []
    measure = Classifier.measure

    def slow_at_first(learner, stage, batch):
        time.sleep(0.0 if losses else 1.0)
        losses.append(len(batch["inputs"]))
        return measure(learner, stage, batch)

    monkeypatch.setattr(Classifier, "measure", slow_at_first)
    run = recipe.run("transformer")
    assert timing._seconds_per_example(run, load_task(run)) < 0.1
    assert losses[0] == 2, "a small batch"


def test_threads_that_the_user_asked_for_are_those_of_the_runs(monkeypatch):
    """MKL would follow its own variable rather than the one of OpenMP."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert set(experiments._environment(0, 1000).values()) == {"1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert {experiments._environment(0, 1000)[name] for name in names} == {"3"}
    monkeypatch.setenv("MKL_NUM_THREADS", "5")
    assert experiments._environment(0, 1000)["MKL_NUM_THREADS"] == "5"


def test_sigterm_stops_the_runs(recipe, tmp_path):
    """As an interrupt does: whoever called writes what is finished."""
    stopped = []

    class Endless:
        def poll(self):
            os.kill(os.getpid(), signal.SIGTERM)

        def terminate(self):
            stopped.append(self)

        def wait(self, timeout=None):
            return -15

    before = signal.getsignal(signal.SIGTERM)
    jobs = plan(recipe, recipe.origins.file, tmp_path, seeds=[0], only=["plain"])
    with pytest.raises(SystemExit) as ended:
        do_all(jobs, 2, Console(file=io.StringIO()), lambda *_: Endless())
    assert ended.value.code == 143
    assert len(stopped) == 2
    assert signal.getsignal(signal.SIGTERM) is before
