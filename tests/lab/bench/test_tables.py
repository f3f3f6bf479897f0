"""Suites, targets and the command itself."""

import csv
import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("lightning")

from typer.testing import CliRunner

from espformer.lab import cli
from espformer.lab.bench.attentions import find
from espformer.lab.bench.cases import Case, Measurement
from espformer.lab.bench.suites import SUITES, select
from espformer.lab.bench.tables import is_failure, verdict_cells, verdicts
from espformer.lab.bench.targets import TARGETS, judge, target_cases
from tests.processes import run_beside_torch

BY_TITLE = {target.title: target for target in TARGETS}
SOFT = BY_TITLE["soft forward, τ = 0, squared, N = 1024"]
GRAPH = BY_TITLE["soft forward, τ = 0, absolute, N = 1024"]
OVER = BY_TITLE["hard forward, called from Python, over its graph"]
RATIO = BY_TITLE["soft forward against dense ESP, N = 1024"]
FROM = BY_TITLE["hard forward faster than flash attention from"]


@pytest.mark.parametrize("suite", SUITES)
def test_suites_are_of_known_operators_without_repetition(suite: str) -> None:
    cases = SUITES[suite]()
    assert len(cases) == len(set(cases)) > 5
    for case in cases:
        assert find(case).name == case.operator


def test_paper_and_long_have_their_sizes() -> None:
    assert {case.tokens for case in SUITES["paper"]()} == {50, 100, 500, 1000}
    assert {case.heads * case.width for case in SUITES["paper"]()} == {1024}
    assert max(case.tokens for case in SUITES["long"]() if case.heads > 1) == 131_072
    assert {(c.heads, c.operator) for c in SUITES["long"]() if c.tokens == 1 << 20} == {
        (1, "esp"),
        (1, "esp-hard"),
    }


def times(*milliseconds: float, target=SOFT, **options) -> dict[Case, Measurement]:
    return {
        case: Measurement(case, ms, error=1e-3, **options)
        for case, ms in zip(target.cases, milliseconds, strict=True)
    }


@pytest.mark.parametrize(
    ("milliseconds", "graph", "expected"),
    [
        (0.99, math.nan, "met, and the aim"),
        (2.5, math.nan, "met"),
        (2.51, math.nan, "missed"),
        (2.51, 0.5, "missed (met as a CUDA graph)"),
    ],
)
def test_verdicts(milliseconds: float, graph: float, expected: str) -> None:
    found = times(milliseconds, graph_milliseconds=graph)
    assert judge(SOFT, found).verdict == expected


def test_targets_of_graphs_are_judged_by_them() -> None:
    found = times(9.0, graph_milliseconds=0.5, target=GRAPH)
    assert judge(GRAPH, found).verdict == "met"
    assert judge(GRAPH, times(0.1, target=GRAPH)).verdict == "missed"  # not as a graph


def test_calls_over_their_graphs() -> None:
    """The share of Python is judged; a graph has none, and no number in that column."""
    for milliseconds, verdict in ((1.04, "met, and the aim"), (1.1, "met"), (1.2, "missed")):
        found = judge(OVER, times(milliseconds, graph_milliseconds=1.0, target=OVER))
        assert found.verdict == verdict
        assert math.isnan(found.graph_value)


def test_ratios_and_crossings() -> None:
    assert judge(RATIO, times(1.0, 200.0, target=RATIO)).verdict == "met"
    assert judge(RATIO, times(1.0, 199.0, target=RATIO)).verdict == "missed"
    crossing = judge(FROM, times(2.0, 1.0, 3.0, 4.0, target=FROM))
    assert (crossing.value, crossing.verdict) == (16384, "met")
    never = judge(FROM, times(2.0, 3.0, 5.0, 4.0, target=FROM))
    assert (never.value, never.verdict) == (math.inf, "missed")
    assert verdict_cells(never)[1] == "never"


def test_a_wrong_row_meets_nothing() -> None:
    (case,) = SOFT.cases
    wrong = Measurement(case, error=0.1, status="FAILED: error above 5e-03")
    verdict = judge(SOFT, {case: wrong})
    assert verdict.verdict == "FAILED: a result is wrong"
    assert verdict_cells(verdict)[1] == ""
    assert is_failure([wrong])
    full = Measurement(case, status="out of memory")
    assert (
        judge(SOFT, {case: full}).verdict == "not measured (esp-squared-mean/triton: out of memory)"
    )


def test_every_target_is_judged_once_its_rows_are_there() -> None:
    rows = [Measurement(case, 1.0, peak_mb=1.0, error=0.0) for case in target_cases()]
    assert len(verdicts(rows)) == len(TARGETS)
    assert not verdicts(rows[:0])


def call(*arguments: object) -> str:
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_writes_what_it_found(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    text = call(
        "bench", "quick", "--device", "cpu", "--dtype", "float32", "--tokens", "6,9", "--heads", 2,
        "--width", 8, "--operators", "esp,softmax", "--row-seconds", 2, "--output", tmp_path,
    )  # fmt: skip
    assert "command: espformer" in text
    with (tmp_path / "quick-cpu.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        "operator", "backend", "mode", "tokens", "heads", "width", "slices", "dtype",
        "milliseconds", "graph_milliseconds", "peak_mb", "error", "status",
    ]  # fmt: skip
    assert len(rows) == 2 * 2 * 5  # lengths, modes, and four backends of ESP beside softmax
    linear = [row for row in rows if row["backend"] == "linear"]
    assert {row["status"] for row in linear} == {"ok"}
    assert all(float(row["milliseconds"]) > 0 and float(row["error"]) < 2e-5 for row in linear)
    assert {row["status"] for row in rows if row["backend"] == "triton"} == {
        "skipped: needs a CUDA device"
    }
    written = (tmp_path / "quick-cpu.md").read_text(encoding="utf-8")
    for condition in ("command", "torch", "cpu", "dtype", "shapes", "seeds"):
        assert f"- {condition}: " in written
    assert (tmp_path / "quick-cpu.png").stat().st_size > 1000


def test_help_teaches_with_examples() -> None:
    text = call("bench", "--help")
    assert "espformer bench targets paper long" in text
    assert "Examples" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "there is no suite 'nothing'; choose from quick"),
        (["quick", "--dtype", "int8"], "--dtype must be one of bfloat16"),
        (["quick", "--operators", "softmx"], "there is no 'softmx'"),
        (["quick", "--tokens", "many"], "expected numbers such as 512,1024"),
        (["quick", "--device", "tpu"], "--device must be cuda, cpu or auto"),
        (["long", "--operators", "differential"], "nothing of the suite 'long' is left"),
    ],
)
def test_mistakes_are_told(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["espformer", "bench", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("option", ["heads", "width", "shrink"])
def test_sizes_are_at_least_one(option: str) -> None:
    result = CliRunner().invoke(cli.app, ["bench", "quick", "--no-save", f"--{option}", "0"])
    assert result.exit_code == 2
    assert "equal to 1" in result.output
    with pytest.raises(ValueError, match=f"--{option} must be at least 1, got 0"):
        select("quick", **{option: 0})


def test_sizes_can_be_chosen() -> None:
    cases = select("targets", shrink=16)
    assert max(case.tokens for case in cases) == 65536
    assert {case.heads for case in select("peers", heads=3)} == {3}
    assert {case.tokens for case in select("quick", tokens="5,7", modes="forward")} == {5, 7}


ALONE = """
import sys
for name in ("rich", "typer", "lightning", "matplotlib", "yaml", "numpy.testing"):
    sys.modules[name] = None
sys.argv = ["bench", "quick", "--device", "cpu", "--tokens", "4,5", "--heads", "2", "--width", "4",
            "--operators", "softmax", "--dtype", "float32", "--output", sys.argv[1]]
from espformer.lab.bench.__main__ import main
sys.exit(main())
"""


def test_torch_alone_is_enough(tmp_path: Path) -> None:
    done = run_beside_torch(ALONE, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "[quick 4/4] softmax/sdpa forward+backward N=5" in done.stderr
    assert "command: python -m espformer.lab.bench quick --device cpu" in done.stdout
    assert "no plot: it needs matplotlib: pip install matplotlib" in done.stdout
    assert (tmp_path / "quick-cpu.csv").is_file()


def test_a_command_is_told_without_where_its_files_went() -> None:
    from espformer.lab.bench.session import _without_output

    asked = ["long", "-o", "here", "--operators", "esp", "--output=there", "-oelsewhere"]
    assert _without_output(asked) == ["long", "--operators", "esp"]
