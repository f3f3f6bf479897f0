"""The demonstration: what it prints is what it measured, and what is missing is told."""

import io
import re

import pytest
from rich.console import Console

from espformer.lab import demo
from tests.lab.report.conftest import TINY
from tests.processes import run_beside_torch


def test_it_ends_well_and_says_where_the_page_is(demonstration, page):
    assert demonstration.code == 0
    assert demonstration.text.splitlines()[-1].endswith(f"The report is in {page}")
    assert page.stat().st_size > 50_000


def test_the_table_has_a_row_for_each_attention(demonstration, runs):
    lines = [re.split(r"\s{2,}", line.strip()) for line in demonstration.text.splitlines()]
    rows = {cells[0]: cells[1:] for cells in lines if len(cells) == 8}
    names = ["Softmax", "Differential", "Sinkhorn"]
    names += ["Default ESP", "ESP, paper's t", "ESP, learnt t"]
    assert [name for name in rows if name != "attention"] == names
    for name, label in zip(names, demo.LABELS, strict=True):
        run = runs[label]
        soft, sharp, hard, _, columns, parameters, _ = rows[name]
        assert float(soft) == pytest.approx(run.results["scores"]["test"], abs=0.051)
        assert int(parameters.replace(",", "")) == run.results["parameters"]
        assert (sharp == "–") == (hard == "–") == (run.annealed is None)
        if run.annealed is not None:
            assert float(hard) == pytest.approx(run.annealed.results["scores"]["hard"], abs=0.051)
            assert columns.endswith("→ 0"), "hard sorting is doubly stochastic"


def test_all_have_the_same_budget_and_those_that_sort_are_annealed(runs):
    assert {run.results["epochs"] for run in runs.values()} == {2}
    assert {run.results["steps"] for run in runs.values()} == {6}
    annealed = {label for label, run in runs.items() if run.annealed}
    assert annealed == {"espformer-default", "espformer-paper", "espformer-learnt"}
    ratio = runs["espformer-paper"].annealed.temperatures[0] / 1e-3
    assert ratio == pytest.approx(demo.FACTOR**2)


def test_finished_runs_are_kept(demonstration, page, capsys, monkeypatch):
    from espformer.lab.report import inspection

    monkeypatch.setattr(inspection, "SCORED", 16)
    monkeypatch.setattr(demo, "QUICK", TINY)
    monkeypatch.setattr(
        "espformer.lab.training.trainer._train", lambda *a, **k: pytest.fail("trained again")
    )
    before = page.read_bytes()
    assert demo.main(["--quick", "--output", str(demonstration.folder)]) == 0
    page.write_bytes(before)


def test_a_folder_that_cannot_be_written_is_said_in_plain_words(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert demo.main(["--quick", "--output", str(tmp_path / "file" / "folder")]) == 1
    assert "cannot write here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "package",
    ["lightning", *(pytest.param(x, marks=pytest.mark.slow) for x in ("rich", "matplotlib"))],
)
def test_what_is_missing_is_told(package):
    program = (
        f"import sys; sys.modules['{package}'] = None\n"
        "from espformer.lab import demo; sys.exit(demo.main(['--quick', '--output', '/nowhere']))"
    )
    done = run_beside_torch(program)
    assert done.returncode == 1
    assert f"needs {package}: pip install {package}" in done.stderr
    assert 'pip install -e ".[train,plots]"' in done.stderr


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as stopped:
        demo.main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("--quick", "--output", "examples:", "report.html"))


def test_events_move_the_bar(capsys):
    console = Console(file=io.StringIO())
    progress = demo.Progress(console, ["one"], [4])
    with progress.doing("one") as (hear, close):
        print("a line of the log")
        hear({"state": "training", "epoch": 3, "epochs": 4, "score": 0.5})
        (task,) = progress.bars.tasks
        assert (task.completed, task.fields["told"]) == (3, "accuracy 50.0 %")
        close("well done")
    assert task.completed == 4
    assert capsys.readouterr().out == "", "what training prints goes elsewhere"
    assert "one: well done" in console.file.getvalue()
