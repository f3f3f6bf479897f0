"""Figures: what they draw is what they were given, and every command writes its files."""

import pytest
import torch

pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from espformer.lab import plots
from espformer.lab.cli import app
from espformer.lab.errors import UserError
from espformer.lab.plots.runtime import Timing
from espformer.lab.plots.scores import Score
from espformer.lab.plots.softness import SoftScore
from tests.processes import run_beside_torch

CSV = """\
operator,backend,mode,tokens,heads,width,slices,dtype,milliseconds,peak_mb,error,status
esp,linear,forward,64,8,64,64,float32,1.5,10,1e-7,ok
esp,linear,forward,128,8,64,64,float32,3.0,20,1e-7,ok
esp,linear,training,128,8,64,64,float32,9.0,40,1e-7,ok
esp,dense,forward,64,8,64,64,float32,0.1,10,3e-1,FAILED: error too large
softmax,torch,forward,64,8,64,,float32,0.5,5,1e-7,ok
softmax,torch,forward,64,2,64,,float32,0.2,5,1e-7,ok
"""


def test_importing_espformer_does_not_import_matplotlib():
    program = "import sys, espformer, espformer.lab.demo; assert 'matplotlib' not in sys.modules"
    done = run_beside_torch(program)
    assert done.returncode == 0, done.stderr


def test_sum_errors_of_a_known_matrix():
    from espformer.lab.plots.clouds import sum_errors

    assert sum_errors(torch.tensor([[0.5, 0.5], [1.0, 0.25]])) == (0.25, 0.5)


def test_figures_leave_the_settings_of_matplotlib_alone():
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    plots.scores_by_setting([Score("a", "default", 1.0)], "title", "unit", "conditions")
    assert dict(mpl.rcParams) == before


def test_timings_that_failed_their_check_are_not_drawn(tmp_path):
    path = tmp_path / "bench.csv"
    path.write_text(CSV)
    timings = plots.read_timings(path)
    assert Timing("esp (linear)", "forward", 128, 8, "float32", 3.0, 20.0) in timings
    assert not [row for row in timings if row.series == "esp (dense)"]
    figure = plots.runtime(timings, "conditions")
    forward = {line.get_label(): line.get_ydata().tolist() for line in figure.axes[0].lines}
    assert forward == {"esp (linear)": [1.5, 3.0], "softmax (torch)": [0.5]}, "eight heads"
    assert [axes.get_title() for axes in figure.axes] == ["forward", "training", "training, memory"]
    with pytest.raises(ValueError, match="passed its check"):
        plots.runtime([], "")


def test_times_of_cuda_graphs_are_drawn_where_they_are_known(tmp_path):
    path = tmp_path / "bench.csv"
    path.write_text(
        "operator,backend,mode,tokens,milliseconds,graph_milliseconds,status\n"
        "esp,triton,forward,64,2.0,0.5,ok\nesp,triton,forward,128,4.0,,ok\n"
    )
    figure = plots.runtime(plots.read_timings(path), "")
    assert figure.axes[0].lines[0].get_ydata().tolist() == [0.5, 4.0]
    assert any("CUDA graphs" in text.get_text() for text in figure.texts)


def test_scores_stand_at_their_numbers():
    scores = [Score("a", f"patch={size}", value) for size in (2, 14) for value in (90.0, 92.0)]
    figure = plots.scores_by_setting(scores, "title", "accuracy", "conditions")
    (axes,) = figure.axes
    line = axes.containers[0].lines[0]
    assert line.get_xdata().tolist() == [2, 14]
    assert line.get_ydata().tolist() == [91, 91]
    assert axes.get_xlabel() == "patch"
    words = plots.scores_by_setting([Score("a", "default", 1.0)], "t", "u", "c").axes[0]
    assert [label.get_text() for label in words.get_xticklabels()] == ["default"]


def test_panels_show_what_they_are_told_in_the_same_colours():
    scores = [Score(name, "patch=4", 90.0) for name in "abc"]
    figure = plots.scores_by_setting(
        scores, "t", "u", "c", panels={"one": ["a", "b"], "two": ["b", "c", "unknown"]}
    )
    drawn = [
        {bars.get_label(): bars.lines[0].get_color() for bars in axes.containers}
        for axes in figure.axes
    ]
    assert [list(panel) for panel in drawn] == [["a", "b"], ["b", "c"]]
    assert drawn[0]["b"] == drawn[1]["b"]
    assert len({drawn[0]["a"], drawn[0]["b"], drawn[1]["c"]}) == 3


def test_softness_of_both_metrics_shares_an_axis():
    scores = [
        SoftScore("squared", "squared", t, value)
        for t in (0.01, 0.04, 0.09)
        for value in (95.0, 96.0)
    ]
    scores += [SoftScore("learnt", "squared", 0.25, 96.5, learnt=True)]
    scores += [SoftScore("absolute", "absolute", 0.3, 96.0)]
    figure = plots.scores_by_softness(
        scores, {"near": [95.5], "far": [50.0]}, "title", "accuracy", "conditions"
    )
    (axes,) = figure.axes
    squared, absolute = axes.containers
    assert (squared.lines[0].get_xdata() * 1.03).tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert squared.lines[0].get_ydata().tolist() == [95.5] * 3
    assert absolute.lines[0].get_xdata().tolist() == pytest.approx([0.3 * 1.03])
    learnt = next(line for line in axes.lines if line.get_label() == "learnt")
    assert (*learnt.get_xdata(), *learnt.get_ydata()) == (0.5, 96.5)
    shown = [text.get_text() for text in axes.get_legend().get_texts()]
    assert shown == ["squared", "learnt", "absolute", "near"]
    assert [text.get_text() for text in axes.texts] == ["far 50.00, below the axis"]


def test_attention_is_drawn_with_its_sums():
    matrix = torch.tensor([[[0.5, 0.5], [1.0, 0.0]]])
    signed = torch.tensor([[[0.5, -0.5], [1.0, 0.0]]])
    figure = plots.attention_maps(
        [plots.NamedPlan("one", matrix), plots.NamedPlan("two", signed)], "title", "subtitle"
    )
    first = figure.axes[0]
    right, below = first.child_axes
    assert [bar.get_width() for bar in right.patches] == [1.0, 1.0]
    assert [bar.get_height() for bar in below.patches] == [1.5, 0.5]


def test_the_plans_of_the_paper_by_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["plot", "plans", "--to", "figures/plans"])
    assert done.exit_code == 0, done.output
    assert done.output.split() == [f"figures/plans.{name}" for name in ("png", "svg", "pdf")]
    assert (tmp_path / "figures/plans.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "figures/plans.pdf").read_bytes().startswith(b"%PDF")
    svg = (tmp_path / "figures/plans.svg").read_text(encoding="utf-8")
    assert "Sinkhorn, S = 21" in svg or "</svg>" in svg


def test_runtime_by_command_and_its_mistakes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bench.csv").write_text(CSV)
    done = CliRunner().invoke(app, ["plot", "runtime", "bench.csv", "--to", "time.svg"])
    assert done.output.split() == ["time.svg"]
    (tmp_path / "wrong.csv").write_text("a,b\n1,2\n")
    for arguments, message in (
        (["plot", "runtime", "wrong.csv"], "columns operator, backend"),
        (["plot", "runtime", "missing.csv"], "No such file"),
        (["plot", "patch-size"], "say what to draw it from"),
        (["plot", "softness"], "say what to draw it from, a file of results"),
        (["plot", "digits", "bench.csv"], "only runtime, patch-size, softness, attention"),
        (["plot", "plans", "bench.csv"], "points of its own"),
        (["plot", "plans", "--to", "plans.gif"], "png, svg, pdf"),
    ):
        error = CliRunner().invoke(app, arguments).exception
        assert isinstance(error, UserError)
        assert message in str(error)
