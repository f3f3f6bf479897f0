"""The tools do what the documentation says of them, on a small scale."""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def run(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / tool), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
def test_killed_runs_end_as_others_do():
    pytest.importorskip("lightning")
    pytest.importorskip("transformers")
    done = run("kill_runs.py", "--count", "3")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "3 kills, seed 0: 0 differences" in done.stdout


@pytest.mark.slow
def test_a_recipe_passes_no_more_files_than_we_allow():
    pytest.importorskip("lightning")
    done = run("count_files.py")
    counted = re.search(r"^recipe: (\d+) files \(at most (\d+)\)$", done.stdout, re.MULTILINE)
    assert counted, done.stderr[-2000:]
    assert 15 < int(counted[1]) <= int(counted[2])


def test_a_difference_of_one_bit_is_seen():
    from tools.kill_runs import same

    weight = torch.randn(3, 4)
    other = weight.clone()
    state = {"weights": [weight], "step": 3}
    assert same(state, {"weights": [other], "step": 3})
    other[1, 2] = torch.nextafter(other[1, 2], torch.tensor(10.0))
    assert not same(state, {"weights": [other], "step": 3})
    assert not same(state, {"weights": [weight], "step": 4})
    assert not same(state, {"weights": [weight]})


def test_a_soak_notices_what_is_not_finite():
    from espformer.nn import ESP, Attention
    from tools.soak import DIM, HEADS, step

    layer = Attention(DIM, heads=HEADS, mechanism=ESP())
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.1)
    assert step(layer, optimiser, random.Random(0), "cpu") > 0
    with torch.no_grad():
        layer.proj.weight[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite"):
        step(layer, optimiser, random.Random(0), "cpu")


@pytest.mark.slow
def test_problems_are_drawn():
    pytest.importorskip("numba")
    done = run("draw_problems.py", "--count", "20", "--seed", "7")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "problems, seed 7: all agree" in done.stdout


@pytest.mark.slow
def test_small_vits_learn_with_every_mechanism(tmp_path, monkeypatch):
    from espformer.lab.data.make_tiny import make_tiny
    from tools import small_vits

    make_tiny(tmp_path)
    for name, number in {"TRAIN": 20, "TEST": 10, "BATCH": 10}.items():
        monkeypatch.setattr(small_vits, name, number)
    weights = {}
    for name in small_vits.MECHANISMS:
        scores, weights[name] = small_vits.learn(name, 0, 1, str(tmp_path))
        assert len(scores) == 1
        assert 0 <= scores[0] <= 100
    assert weights["exact"] == pytest.approx(1)
    assert weights["tau-100"] > weights["tau-1"] > 1
