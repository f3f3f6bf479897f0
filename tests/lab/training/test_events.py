"""Progress of a run as events: what is written, what is read, who is told."""

import json

import pytest

from espformer.lab.training.events import ENVIRONMENT, last_event
from espformer.lab.training.experiments import plan
from espformer.lab.training.trainer import execute


def test_a_watched_run_writes_an_event_for_each_epoch(recipe, tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    monkeypatch.setenv(ENVIRONMENT, str(path))
    execute(recipe.run("transformer"), tmp_path / "run", progress=False)
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(e["state"], e["epoch"], e["epochs"]) for e in events] == [
        ("training", 0, 2), ("training", 1, 2), ("training", 2, 2),
    ]  # fmt: skip
    assert all(0 <= e["score"] <= 1 and e["seconds"] > 0 for e in events[1:])
    assert last_event(path) == events[-1]


def test_events_are_told_in_the_same_process(recipe, tmp_path, capsys):
    heard = []
    execute(recipe.run("transformer"), tmp_path / "run", progress=False, tell=heard.append)
    assert [event["epoch"] for event in heard] == [0, 1, 2]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    assert lines[-1].startswith("epoch 2/2, train/loss ")
    assert f"valid/accuracy {heard[-1]['score']:.4f}" in lines[-1]


def test_a_run_that_nobody_watches_writes_no_events(recipe, tmp_path):
    execute(recipe.run("transformer"), tmp_path / "run", progress=False)
    assert not list(tmp_path.rglob("events.jsonl"))


@pytest.mark.parametrize(
    ("content", "epoch"),
    [
        (None, 0),
        ("", 0),
        ('{"epoch": 1}\n', 1),
        ('{"epoch": 1}\n{"epoch": 2}\n', 2),
        ('{"epoch": 1}\n{"epo', 1),
        ("no json\n", 0),
        ('{"epoch": 0, "text": "' + 5000 * "x" + '"}\n{"epoch": 3}\n', 3),
    ],
)
def test_the_last_whole_event_counts(tmp_path, content, epoch):
    path = tmp_path / "events.jsonl"
    if content is not None:
        path.write_text(content)
    assert last_event(path).get("epoch", 0) == epoch


def test_the_runs_of_an_experiment_are_told_where_to_write(recipe, tiny, tmp_path):
    from rich.console import Console

    from espformer.lab.training.experiments import do_all

    told = {}

    class Done:
        def poll(self):
            return 0

    def launcher(arguments, log, environment):
        told[log.parent] = environment[ENVIRONMENT]
        return Done()

    jobs = plan(recipe, str(tiny), tmp_path, seeds=[0], only=["plain"])
    do_all(jobs, 2, Console(quiet=True), launcher)
    assert told == {job.directory: str(job.directory / "events.jsonl") for job in jobs}
