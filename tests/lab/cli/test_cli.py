"""The command line teaches, does its work, and tells mistakes in plain words."""

import inspect
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("lightning")

from typer.testing import CliRunner

import espformer
from espformer.lab import cli
from espformer.lab.recipes.recipe import recipe_names
from tests.processes import run_beside_torch

SMALL = [
    "model.vit.patch_size=4", "model.vit.dim=8", "model.vit.head_dim=4", "model.vit.mlp_dim=8",
    "trainer.epochs=1", "trainer.limit_batches=2", "trainer.accelerator=cpu",
    "trainer.attention_statistics=false",
]  # fmt: skip


def call(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def mistake(monkeypatch, capsys):
    """What is printed for a command that fails, as `main` prints it."""

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["espformer", *map(str, arguments)])
        monkeypatch.setenv("ESPFORMER_COMMAND", "espformer in a test")
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert stopped.value.code not in (0, None)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err + captured.out
        return captured.err + captured.out

    return run


COMMANDS = {command.callback.__name__: command.callback for command in cli.app.registered_commands}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_with_examples(command):
    text = call(command, "--help")
    assert f"espformer {command}" in text
    assert "Example" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_well_broken_on_a_narrow_terminal(command, monkeypatch):
    """A line ends where the next word does not fit, and no example is broken at all."""
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    text = call(command, "--help").partition("╭")[0]
    shown = [line.strip() for line in text.splitlines()]
    paragraphs = inspect.getdoc(COMMANDS[command]).split("\n\n")
    for paragraph in paragraphs:
        if paragraph.startswith(" "):
            assert paragraph.strip() in shown
            continue
        words = paragraph.split()
        lines = textwrap.wrap(" ".join(words), 78, break_on_hyphens=False)
        start = shown.index(lines[0])
        assert shown[start : start + len(lines)] == lines


def test_help_says_where_to_begin():
    assert "espformer train digits" in call("--help")


def test_version():
    version = re.escape(espformer.__version__)
    assert re.match(
        rf"espformer {version}( at \w+\+?)?, torch 2\.\d+.*, Python 3\.\d+", call("--version")
    )


def test_the_life_of_a_model(tmp_path):
    out = tmp_path / "runs"
    text = call("train", "digits", "--output", out, *SMALL)
    assert "espformer-default: accuracy test" in text
    assert "samples/s" in text
    run = out / "digits" / "default" / "espformer-default" / "seed-0"
    assert str(run) in text.replace("\n", "")
    assert "finished before" in call("train", "digits", "--output", out, *SMALL)
    assert "test: " in call("evaluate", run, "--checkpoint", "best")
    assert "start" in call("anneal", run, "--epochs", "1", "--factor", "0.5")
    text = call("harden", run)
    assert "soft: " in text
    assert "hard: " in text
    assert "test: " in call("evaluate", run, "--checkpoint", "hard")
    pytest.importorskip("matplotlib")
    assert call("plot", run).split() == [str(run / "curves.png")]
    assert "scores.png" in call("plot", "digits", "--output", out)
    for target in (run, "digits"):
        paths = call("plot", target, "--output", out, "--to", tmp_path / "figure").split()
        assert paths == [str(tmp_path / f"figure.{form}") for form in ("png", "svg", "pdf")]
        for path, first in zip(paths, (b"\x89PNG", b"<?xml", b"%PDF"), strict=True):
            assert Path(path).read_bytes().startswith(first)
            Path(path).unlink()


def test_recipes_are_listed_and_printed(tmp_path):
    listing = call("recipes")
    assert all(name in listing for name in recipe_names())
    mine = tmp_path / "mine.yaml"
    mine.write_text(call("recipes", "digits"), encoding="utf-8")
    assert "mine" in call("train", mine, "--output", tmp_path, "-m", "transformer", *SMALL)


def test_dry_run_shows_runs_and_time(tmp_path):
    row = "espformer-balanced"  # the longest name, which must be read to be given to --only
    command = ["reproduce", "digits", "--dry-run", "--seeds", "0,1", "--only", row]
    text = call(*command, "--output", tmp_path / "out", "trainer.accelerator=cpu")
    assert "2 runs, 0 finished" in text
    assert "each" in text
    assert row in text
    assert not (tmp_path / "out").exists()


def test_a_dry_run_says_what_it_measures(tmp_path):
    """Steps of large models take minutes; what is piped elsewhere holds the plan alone."""
    command = ["reproduce", "digits", "--dry-run", "--only", "transformer", "--only", "espformer"]
    result = CliRunner().invoke(
        cli.app, [*command, "--output", str(tmp_path / "out"), *SMALL], catch_exceptions=False
    )
    assert result.stderr.splitlines() == [
        "[row 1 of 2] reading the data of digits, default",
        "[row 1 of 2] timing a few steps of digits, default, transformer",
        "[row 2 of 2] timing a few steps of digits, default, espformer",
    ]
    assert "timing" not in result.stdout
    assert "6 runs, 0 finished" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "digitz"], "error: no recipe is called 'digitz', did you mean 'digits'?"),
        (["train", "digits", "trainer.epoch=1"], "did you mean 'epochs'?"),
        (["train", "digits", "-m", "espformr"], "did you mean 'espformer'?"),
        (["train", "digits", "--setting", "x"], "recipe digits has no setting 'x'"),
        (["train", "digits", "--output", "/dev/null/x"], "cannot write here"),
        (["evaluate", "/nowhere"], "/nowhere: there is no such checkpoint"),
        (["reproduce", "digits", "--seeds", "one"], "expected different numbers such as 0,1,2"),
        (["reproduce", "digits", "--seeds", "3,3"], "such as 0,1,2, got '3,3'"),
        (["reproduce", "digits", "--only", "nothing"], "has no mechanism or setting 'nothing'"),
        (["plot", "digits", "--output", "/nowhere"], "no run of digits is finished yet"),
        (["plot", "attenton"], "not a figure, a run or an experiment, did you mean 'attention'?"),
        (["train"], "Missing argument"),
        (["trian"], "No such command"),
    ],
)
def test_mistakes_in_plain_words(mistake, arguments, expected):
    assert expected in " ".join(mistake(*arguments).split())


def test_what_is_no_checkpoint_is_refused(mistake, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("recipe: digits\ntask: classification\n", encoding="utf-8")
    assert f"error: {path}: refused. It is no checkpoint" in mistake("evaluate", path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("asked", ["digits trainer.accelerator=gpu", "runtime accelerator=gpu"])
def test_a_gpu_that_is_not_there(mistake, tmp_path, asked):
    text = mistake("train", *asked.split(), "--output", tmp_path)
    assert "error: " in text
    assert "unexpected" not in text
    assert "accelerator=gpu" in text


def test_unexpected_errors_are_short_and_debug_shows_them(mistake, monkeypatch):
    def broken(*args, **kwargs):
        raise KeyError("surprise")

    monkeypatch.setattr("espformer.lab.recipes.recipe.load_recipe", broken)
    text = mistake("train", "digits")
    assert "unexpected error: KeyError" in text
    assert "--debug" in text
    monkeypatch.setattr(sys, "argv", ["espformer", "train", "digits", "--debug"])
    with pytest.raises(KeyError, match="surprise"):
        cli.main()


def test_help_is_quick_to_load():
    """Lightning is not loaded to print a page of help."""
    program = (
        "import sys; sys.argv = ['espformer', '--help']\n"
        "from espformer.lab.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "assert 'lightning' not in sys.modules, 'lightning was loaded'"
    )
    done = run_beside_torch(program)
    assert done.returncode == 0, done.stderr


def test_an_interrupted_experiment_leaves_what_was_finished(tmp_path, monkeypatch):
    out = tmp_path / "runs"
    call("train", "digits", "--output", out, "-m", "transformer", *SMALL)

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("espformer.lab.training.experiments.do_all", interrupted)
    command = ["reproduce", "digits", "--output", str(out), "--save", str(tmp_path / "kept")]
    CliRunner().invoke(cli.app, [*command, *SMALL])
    table = (out / "digits" / "results.md").read_text(encoding="utf-8")
    assert "| softmax (`transformer`) | 1 |" in table
    assert '"mechanism": "transformer"' in (tmp_path / "kept" / "digits.json").read_text()


@pytest.mark.slow
def test_reproduce_from_nothing_to_a_table(tmp_path):
    text = call(
        "reproduce", "digits", "--output", tmp_path, "--seeds", "0", "--jobs", "2",
        "--only", "transformer", "--only", "espformer", *SMALL,
    )  # fmt: skip
    assert "| ESP (`espformer`) | 1 |" in text
    assert (tmp_path / "digits" / "results.md").read_text() in text
