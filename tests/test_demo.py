"""The demonstration and its figures: what they write, and that their numbers are true."""

import re
import subprocess
import sys

import pytest
import torch

from espformer import demo

pytest.importorskip("matplotlib")

PICTURES = ("plans", "sums", "softness", "cost")


@pytest.fixture(scope="module")
def quick_tour(tmp_path_factory):
    """The folder and the printed text of one quick run, in a process of its own."""
    folder = tmp_path_factory.mktemp("demo") / "made" / "by the demo"
    result = subprocess.run(
        [sys.executable, "-m", "espformer.demo", "--quick", "--output", str(folder)],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return folder, result.stdout


def test_every_picture_is_drawn_twice(quick_tour):
    folder, _ = quick_tour
    expected = {f"{name}{suffix}" for name in PICTURES for suffix in (".png", ".svg")}
    assert {path.name for path in folder.iterdir()} == expected
    for path in folder.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 5_000
    for path in folder.glob("*.svg"):
        assert "</svg>" in path.read_text(encoding="utf-8")


def test_the_last_line_says_where(quick_tour):
    folder, text = quick_tour
    assert text.splitlines()[-1].endswith(f"The pictures are in {folder}")


def test_the_table_is_true(quick_tour):
    _, text = quick_tour
    pattern = r"^  (.+?) {2,}(\d\.\de[+-]\d+) +(\d\.\de[+-]\d+) +([\d.]+) ms$"
    rows = {m[1]: (float(m[2]), float(m[3])) for m in re.finditer(pattern, text, re.MULTILINE)}
    assert list(rows) == [mechanism.name for mechanism in demo.MECHANISMS]
    assert max(rows["Hard ESP"]) < 1e-6
    assert max(rows["Soft ESP, balanced"]) < 1e-5
    assert rows["Softmax"][0] < 1e-6 < 1 < rows["Softmax"][1]
    assert rows["Sinkhorn, 21 steps"][1] < rows["Sinkhorn, 3 steps"][1]
    assert 1e-3 < max(rows["Soft ESP"]) < 0.5


def test_operator_and_formula_agree(quick_tour):
    _, text = quick_tour
    error = float(re.search(r"are within\s+(\S+)\s+of", text)[1])
    assert error < 1e-5


def test_a_folder_that_cannot_be_written_is_said_in_plain_words(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert demo.main(["--quick", "--output", str(tmp_path / "file" / "folder")]) == 1
    message = capsys.readouterr().err
    assert "Could not write the pictures" in message
    assert "--output" in message


def test_without_matplotlib_it_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith("espformer.plots")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("espformer.plots", raising=False)
    assert demo.main(["--quick", "--output", str(tmp_path)]) == 1
    assert "espformer[plots]" in capsys.readouterr().err


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as exit_:
        demo.main(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in (*PICTURES, "--quick", "--output", "examples:"))


def test_a_table_without_rich_reads_the_same(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    screen = demo.Screen()
    assert screen.rich is None
    screen.heading("Title")
    assert list(screen.progress([1, 2, 3], "numbers")) == [1, 2, 3]
    screen.table(("name", "value"), [("a", "1"), ("long name", "22")])
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "  a              1",
        "  long name     22",
    ]


def test_importing_espformer_does_not_import_matplotlib():
    program = "import sys, espformer, espformer.demo; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_sum_errors_of_a_known_matrix():
    from espformer.plots import sum_errors

    assert sum_errors(torch.tensor([[0.5, 0.5], [1.0, 0.25]])) == (0.25, 0.5)


def test_figures_leave_the_settings_of_matplotlib_alone():
    import matplotlib as mpl

    from espformer.plots import Measurement, cost_curve

    before = dict(mpl.rcParams)
    figure = cost_curve([Measurement("one", 64, 0.1), Measurement("one", 128, 0.2)], "conditions")
    assert dict(mpl.rcParams) == before
    assert [line.get_ydata().tolist() for line in figure.axes[0].lines] == [[1562.5, 1562.5]]
