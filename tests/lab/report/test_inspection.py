"""What the page shows is what the models do."""

import base64
import dataclasses
import shutil
from types import SimpleNamespace

import pytest
import torch

from espformer.functional import esp_plan
from espformer.lab.errors import RunError
from espformer.lab.plots.clouds import sum_errors
from espformer.lab.report import inspection
from espformer.lab.report.content import attention_content
from espformer.lab.report.inspection import Example, Trained, open_run
from espformer.lab.report.summary import summarise
from espformer.lab.training.attention import slice_weights
from espformer.nn import ESP


def test_slice_weights_are_those_of_the_operator():
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 2, 7, 5, dtype=torch.float64).unbind()
    mask = torch.arange(7) < torch.tensor([7, 4, 6])[:, None]
    masks = {"query_mask": mask, "key_mask": mask}
    for options in (
        {"sort_temperature": 0.3, "inverse_temperature": 7.0},
        {"metric": "squared", "balance": "both", "inverse_temperature": 3.0},
        {"hard": True, "inverse_temperature": 5.0, "scale": 1.0},
        {"slicer": "frozen", "slices": 9, "inverse_temperature": 4.0},
    ):
        esp = ESP(**options).bind(2, 5)
        weights = slice_weights(esp, q, k, masks)
        directions = torch.eye(5).double() if esp.slicer() is None else esp.slicer().double()
        settings = esp.arguments(q, training=False)
        for name in ("slices", "slice_logits", "inverse_temperature"):
            settings.pop(name)
        whole = sum(
            weights[..., i, None, None]
            * esp_plan(
                q, k, slices=directions[..., i : i + 1, :], inverse_temperature=0.0, **settings,
                **masks,
            )
            for i in range(weights.shape[-1])
        )  # fmt: skip
        torch.testing.assert_close(whole, esp.matrix(q, k, **masks), rtol=1e-5, atol=1e-6)
        assert weights.max() > 1.3 * weights.min(), "a τ that matters"


def test_matrices_are_those_of_the_forward(runs):
    for run in runs.values():
        example = run.example(3)
        first, second = run.matrices(example)
        assert first.shape == second.shape == (2, 17, 17)  # a class token and 16 patches
        assert example.picture.shape == (8, 8)
        assert 0 <= float(example.picture.min()) < float(example.picture.max()) <= 1
    rows, _ = sum_errors(torch.stack(runs["transformer"].matrices(runs["transformer"].example(0))))
    assert rows < 1e-5
    hard = runs["espformer-paper"].hardened()
    assert max(sum_errors(torch.stack(hard.matrices(hard.example(0))))) < 1e-5
    assert max(sum_errors(runs["espformer-paper"].matrices(example)[-1])) > 1e-3, "it stayed soft"


def test_frames_change_the_temperature_and_put_it_back(runs):
    run = runs["espformer-learnt"]
    before = run.temperatures, run.matrices(run.example(0))[0]
    frames = run.frames(run.example(0), [1.0, 1e-3])
    assert [frame.temperature for frame in frames] == [1.0, 1e-3, None]
    spread = [float(frame.matrices.max()) for frame in frames]
    assert spread[0] < spread[1] < spread[2], "sharper and sharper"
    assert sum_errors(frames[-1].matrices)[1] < 1e-5
    assert run.temperatures == before[0]
    torch.testing.assert_close(run.matrices(run.example(0))[0], before[1])


def test_accuracy_is_that_of_the_test(runs, monkeypatch):
    monkeypatch.setattr(inspection, "SCORED", 128)  # two batches, as the demonstration tests on
    run = runs["transformer"]
    assert run.accuracy() == pytest.approx(run.results["scores"]["test"], abs=1e-3)


def test_summary_of_a_run_that_was_never_hardened(runs):
    row = summarise(runs["transformer"])
    assert row.hard is row.sharp is row.hard_columns is None
    assert row.columns > 0.05 > 1e-5 > row.rows


def content_of(*heads):
    """What the page gets of a run whose last layer has these matrices."""
    example = Example(torch.zeros(1, 1, 8, 8), None, label=0, index=0, picture=torch.zeros(8, 8))
    run = SimpleNamespace(
        run=SimpleNamespace(data=SimpleNamespace(set="mine")), label="mine", annealed=None,
        results={"scores": {}}, example=lambda index: example,
        matrices=lambda example: [torch.stack(heads)],
    )  # fmt: skip
    content = attention_content([run], [0])
    return content, content["maps"][0][0]


def test_a_matrix_survives_its_encoding():
    matrix = torch.randn(5, 5)
    content, (made,) = content_of(matrix)
    values = torch.tensor(list(base64.b64decode(made["bytes"]))).float().sub(128).div(127)
    decoded = (values.square() * values.sign() * content["peak"]).view(made["shape"])
    assert (decoded - matrix).abs().max() < 0.02 * matrix.abs().max()
    torch.testing.assert_close(torch.tensor(made["columns"]), matrix.sum(-2), rtol=0, atol=6e-4)


def test_negative_weights_are_told_whatever_the_mechanism():
    assert not content_of(torch.eye(4))[0]["negative"]
    assert content_of(torch.eye(4), torch.eye(4) - 0.5)[0]["negative"]


def test_large_matrices_are_shown_by_means():
    _, (made,) = content_of(torch.eye(300))
    assert made["shape"] == [96, 96]
    assert len(made["rows"]) == 96
    assert made["off"] == ["0", "0"]


def test_pairs_of_differential_heads_are_shown_once():
    one, other = torch.rand(2, 4, 4).unbind()
    _, shown = content_of(one, one, other, other)
    assert [made["head"] for made in shown] == ["heads 1 and 2", "heads 3 and 4"]
    _, shown = content_of(one, other)
    assert [made["head"] for made in shown] == ["head 1", "head 2"]


@pytest.mark.parametrize(("tokens", "side"), [(16, 4), (17, 4), (196, 14), (15, None)])
def test_patches_along_an_edge(tokens, side):
    content, _ = content_of(torch.eye(tokens))
    assert content["side"] == side


def test_an_annealing_that_trained_nothing_is_left_out(runs, tmp_path):
    copied = tmp_path / "run"
    annealed = next(run for run in runs.values() if run.annealed)
    shutil.copytree(annealed.directory, copied)
    assert open_run(copied).annealed is not None
    (copied / "anneal" / "last.ckpt").unlink()
    assert open_run(copied).annealed is None


def test_mistakes_are_told(runs, tmp_path):
    with pytest.raises(RunError, match="no run was trained there"):
        open_run(tmp_path)
    with pytest.raises(RunError, match="there is no test example 359"):
        runs["transformer"].example(359)
    run = runs["transformer"]
    other = dataclasses.replace(run.run, data=dataclasses.replace(run.run.data, set=run.run.model))
    stranger = Trained(run.directory, other, run.results, {}, run.learner, run.task)
    with pytest.raises(RunError, match="different data"):
        attention_content([run, stranger], [0])
