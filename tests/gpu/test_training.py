"""Training with the step recorded as a CUDA graph is training without, on a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")
pytestmark = pytest.mark.gpu

# Soft temperatures: a sharp sort is chaotic, and 20 steps make much of the rounding of a rate.
RECIPE = """\
title: Tiny
task: classification
mechanisms:
  softmax: softmax
  sinkhorn: {sinkhorn: {iterations: 5, epsilon: 1.0}}
  absolute: {esp: {temperature_unit: absolute, sort_temperature: 0.1, metric: absolute}}
  squared: {esp: {temperature_unit: absolute, sort_temperature: 0.1, metric: squared}}
  both: {esp: {temperature_unit: absolute, sort_temperature: 0.1, balance: both}}
  straight: {esp: {temperature_unit: absolute, sort_temperature: 0.1, straight_through: true}}
  sliced:
    esp:
      temperature_unit: absolute
      sort_temperature: 0.1
      slicer: learnable
      slices: 8
      slice_dropout: 0.2
  learnt: {esp: {temperature_unit: absolute, sort_temperature: 0.1, learn_temperature: true}}
  diff-softmax: {differential: {base: softmax, lambda_init: 0.5}}
  diff-esp:
    differential:
      base: {esp: {temperature_unit: absolute, sort_temperature: 0.1}}
      lambda_init: 0.5
  spread: {esp: {sort_temperature: 1.0}}
default_mechanism: absolute
data: {set: digits, batch_size: 128, eval_batch_size: 359}
model:
  vit: {patch_size: 2, dim: 32, depth: 2, heads: 2, head_dim: 16, mlp_dim: 32, pool: mean}
optimizer: {name: adam, learning_rate: 1e-3}
trainer: {epochs: 2, accelerator: gpu, limit_batches: 10, attention_statistics: false}
"""

MECHANISMS = [
    "softmax", "sinkhorn", "absolute", "squared", "both", "straight", "sliced", "learnt",
    "diff-softmax", "diff-esp", "spread",
]  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from espformer.lab.recipes.recipe import load_recipe

    monkeypatch.setenv("ESPFORMER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tiny.yaml").write_text(RECIPE, encoding="utf-8")
    return load_recipe(tmp_path / "tiny.yaml")


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts how often a step is recorded: a run without any would prove nothing."""
    from espformer.lab.training.cuda_graphs import CudaRecorder

    record, made = CudaRecorder.record, []

    def counted(self: CudaRecorder, function: Any) -> Any:
        made.append(1)
        return record(self, function)

    monkeypatch.setattr(CudaRecorder, "record", counted)
    return made


def train(recipe: Any, label: str, directory: Path, *overrides: str) -> dict[str, Any]:
    """The last checkpoint of a run, with its results, its curves and the weights it began with."""
    from espformer.lab.training.assemble import load_task, make_learner
    from espformer.lab.training.checkpoints import read_checkpoint
    from espformer.lab.training.run_directory import read_curves
    from espformer.lab.training.trainer import execute

    run = recipe.run(label, overrides=overrides)
    results = execute(run, directory, progress=False)
    checkpoint = read_checkpoint(directory / "last.ckpt")
    first = make_learner(run, load_task(run)).state_dict()
    return {**checkpoint, "results": results, "curves": read_curves(directory), "first": first}


def assert_alike(one: dict[str, Any], other: dict[str, Any], tolerance: float) -> None:
    """Weights differ by a small share of the way that training took them, and losses as little.

    Not weight by weight: sums in another order give gradients near zero another sign, and Adam
    makes whole steps of signs.
    """
    names = [name for name in one["state_dict"] if not name.endswith("_extra_state")]

    def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
        squares = [(a[name].double() - b[name].double()).square().sum() for name in names]
        return float(torch.stack(squares).sum().sqrt())

    way = distance(one["first"], one["state_dict"])
    assert way > 0
    apart = distance(one["state_dict"], other["state_dict"])
    assert apart <= tolerance * way, (apart, way)
    assert one["global_step"] == other["global_step"]
    for curve in ("train/loss", "valid/loss"):
        assert other["curves"][curve] == pytest.approx(one["curves"][curve], rel=tolerance), curve


@pytest.mark.parametrize("label", MECHANISMS)
def test_recorded_as_plain(recipe: Any, tmp_path: Path, recordings: list[int], label: str) -> None:
    plain = train(recipe, label, tmp_path / "plain", "model.vit.dropout=0.1")
    assert not recordings
    graph = train(
        recipe, label, tmp_path / "graph", "model.vit.dropout=0.1", "trainer.cuda_graph=true"
    )
    assert sum(recordings) == 1
    assert_alike(plain, graph, 0.02)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_recorded_in_half_precision(
    recipe: Any, tmp_path: Path, recordings: list[int], precision: str
) -> None:
    more = f"trainer.precision={precision}"
    plain = train(recipe, "absolute", tmp_path / "plain", more)
    graph = train(recipe, "absolute", tmp_path / "graph", more, "trainer.cuda_graph=true")
    assert sum(recordings) == 1
    assert_alike(plain, graph, 0.1)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_recorded_with_schedules_and_clipping(
    recipe: Any, tmp_path: Path, recordings: list[int], optimizer: str
) -> None:
    more = [
        f"optimizer={{name: {optimizer}, learning_rate: 1e-2, clip_norm: 0.5, weight_decay: 0.1}}",
        "schedule={name: inverse_sqrt, warmup_steps: 8}",
    ]
    plain = train(recipe, "absolute", tmp_path / "plain", *more)
    graph = train(recipe, "absolute", tmp_path / "graph", *more, "trainer.cuda_graph=true")
    assert sum(recordings) == 1
    assert plain["lr_schedulers"] == graph["lr_schedulers"]
    assert_alike(plain, graph, 0.02)


def test_annealed_and_resumed(
    recipe: Any, tmp_path: Path, recordings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """t falls before each of four epochs; a kill in the third; the last batch is smaller."""
    from espformer.lab.training.checkpoints import AtomicCheckpointIO
    from tests.lab.training.test_resume import copy_at

    more = [
        *("annealing.factor=0.5", "trainer.epochs=4", "trainer.checkpoint_minutes=0"),
        *("trainer.limit_batches=null", "model.vit.dropout=0.1"),
    ]
    plain = train(recipe, "squared", tmp_path / "plain", *more)
    killed = tmp_path / "killed"
    with copy_at(AtomicCheckpointIO, monkeypatch, killed, (2, 5)):
        graph = train(recipe, "squared", tmp_path / "graph", *more, "trainer.cuda_graph=true")
    assert sum(recordings) == 4, "once for each temperature"
    assert_alike(plain, graph, 0.05)
    again = train(recipe, "squared", killed, *more, "trainer.cuda_graph=true")
    assert sum(recordings) == 4 + 2
    assert again["results"]["continued"]
    assert again["global_step"] == graph["global_step"]
    # The curves of the second attempt begin where it began.
    again["curves"] = {name: {**graph["curves"][name], **curve} for name, curve in
                       again["curves"].items()}  # fmt: skip
    assert_alike(graph, again, 0.05)


def test_texts_of_several_widths(
    recipe: Any, tmp_path: Path, recordings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One recording for each width of a batch, with masks."""
    import espformer.lab.data
    from espformer.lab.data import Task, TensorSet

    generator = torch.Generator().manual_seed(0)
    lengths = torch.cat([torch.full((160,), 9), torch.full((160,), 17)])
    tokens = torch.randint(1, 40, (320, 24), generator=generator, dtype=torch.int32)
    tokens[torch.arange(24) >= lengths[:, None]] = 0
    texts = TensorSet(tokens, tokens[:, 0].long() % 2, lengths)
    task = Task("texts", texts, texts, classes=2, info={"vocabulary_size": 40, "max_length": 24})
    monkeypatch.setattr(espformer.lab.data, "load", lambda name, **options: task)
    model = "{text_classifier: {dim: 32, depth: 1, heads: 2, mlp_dim: 32, dropout: 0.1}}"
    more = ["data={set: tweeteval, batch_size: 4}", f"model={model}", "trainer.limit_batches=60"]
    plain = train(recipe, "absolute", tmp_path / "plain", *more)
    graph = train(recipe, "absolute", tmp_path / "graph", *more, "trainer.cuda_graph=true")
    assert sum(recordings) == 2
    assert_alike(plain, graph, 0.05)


def test_a_data_set_that_fits_lies_on_the_device(recipe: Any) -> None:
    from espformer.lab.training.assemble import TaskData, load_task, make_learner
    from espformer.lab.training.trainer import make_trainer

    run = recipe.run("softmax")
    task = load_task(run)
    trainer = make_trainer(run, None, progress=False)
    data = TaskData(run, task)
    trainer.test(make_learner(run, task), datamodule=data, verbose=False)
    loader = data.train_dataloader()
    assert next(iter(loader))["inputs"].is_cuda


def test_steps_do_not_wait_for_the_device(recipe: Any, tmp_path: Path) -> None:
    """Nothing between two steps reads from the GPU, recorded or not."""
    from espformer.lab.training.learner import Learner

    begin, end = Learner.on_train_batch_start, Learner.on_train_epoch_end
    counted = {"steps": 0}

    def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> None:
        begin(self, batch, batch_idx)
        counted["steps"] += 1
        if batch_idx == 5:  # what is prepared once is
            torch.cuda.set_sync_debug_mode("error")
        elif batch_idx == 9:
            torch.cuda.set_sync_debug_mode("default")

    def on_train_epoch_end(self: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        end(self)

    for graph in ("false", "true"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Learner, "on_train_batch_start", on_train_batch_start)
            patch.setattr(Learner, "on_train_epoch_end", on_train_epoch_end)
            try:
                train(recipe, "softmax", tmp_path / graph, f"trainer.cuda_graph={graph}")
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert counted["steps"] == 40


def test_forked_runs_use_the_device(recipe: Any, tmp_path: Path) -> None:
    """Several at once, forked from a process that must not have touched the GPU."""
    import json

    from rich.console import Console

    from espformer.lab.training.experiments import do_all, plan

    overrides = ["trainer.cuda_graph=true", "trainer.epochs=1"]
    source = str(tmp_path / "tiny.yaml")
    only = ["softmax", "absolute", "both"]
    jobs = plan(recipe, source, tmp_path / "out", only=only, overrides=overrides)
    assert do_all(jobs, 3, Console(quiet=True)) == [], jobs[0].log.read_text()
    for job in jobs:
        results = json.loads((job.directory / "results.json").read_text())
        assert results["device"] == torch.cuda.get_device_name()
        assert "starting afresh" not in job.log.read_text()
