"""A recipe so small that a run of it takes a second: digits cut into four patches."""

from importlib.util import find_spec
from pathlib import Path

import pytest

TINY = """\
title: Tiny
task: classification
mechanisms:
  transformer: softmax
  espformer: {esp: {sort_temperature: 0.1, metric: squared}}
  learnt: {esp: {sort_temperature: 0.1, learn_temperature: true}}
data:
  set: digits
  batch_size: 32
  eval_batch_size: 400
model:
  vit: {patch_size: 4, dim: 8, depth: 1, heads: 2, head_dim: 4, mlp_dim: 8, pool: mean}
optimizer: {name: adam, learning_rate: 1e-2}
trainer:
  epochs: 2
  accelerator: cpu
  limit_batches: 3
  attention_statistics: false
grid:
  seeds: [0, 1]
  settings:
    plain: {}
    smooth: {label_smoothing: 0.1}
"""


@pytest.fixture(autouse=True, scope="session")
def _short_rounds():
    """Steps that are timed beside softmax's are timed once a round, not for tenths of a second."""
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("lightning"):
            patch.setattr("espformer.lab.training.timing.SECONDS_OF_A_ROUND", 0.0)
        yield


@pytest.fixture(autouse=True)
def _one_place(monkeypatch, tmp_path):
    """Nothing is looked for, or left, outside the test's own folder."""
    monkeypatch.setenv("ESPFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ESPFORMER_DATA", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def tiny(tmp_path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY, encoding="utf-8")
    return path


@pytest.fixture
def recipe(tiny):
    from espformer.lab.recipes.recipe import load_recipe

    return load_recipe(tiny)
