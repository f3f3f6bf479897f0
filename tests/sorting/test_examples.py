"""The worked examples do what they say."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_loss_of_ranks_does_not_mind_the_scale():
    example = runpy.run_path(str(EXAMPLES / "rank_with_spearman.py"))
    scores = example["compare"](seeds=1, epochs=8)
    measured, distorted = (
        scores[scale, "espformer, Spearman"][0] for scale in ("as measured", "exp(2 z)")
    )
    assert measured > 0.55
    assert distorted == pytest.approx(measured, abs=0.02)
    assert scores["as measured", "squared error"][0] > 0.55


def test_colours_become_smooth(tmp_path, monkeypatch, capsys):
    picture = tmp_path / "colours.png"
    arguments = ["sort_colours.py", str(picture), "--side", "12", "--rounds", "40"]
    monkeypatch.setattr(sys, "argv", arguments)
    example = runpy.run_path(str(EXAMPLES / "sort_colours.py"), run_name="__main__")
    assert picture.stat().st_size > 1000
    before, after = example["sort_colours"](side=12, rounds=40)
    assert example["roughness"](after) < 0.5 * example["roughness"](before)
    # The same colours in another order.
    assert before.flatten(0, 1).sort(0).values.equal(after.flatten(0, 1).sort(0).values)
    assert "written" in capsys.readouterr().out
