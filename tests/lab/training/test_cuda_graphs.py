"""A recorded step trains as the plain one does, here with a recording that calls what it recorded.

The stand-in replays in Python, so everything but CUDA itself is seen: the tensors that a batch is
copied into, the learning rates, when a step is recorded, and which steps never are.
"""

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from espformer.lab.data import Task, TensorSet
from espformer.lab.errors import ConfigError, RunError
from espformer.lab.training import cuda_graphs as module
from espformer.lab.training.batches import SeededBatches, TensorLoader
from espformer.lab.training.checkpoints import read_checkpoint
from espformer.lab.training.cuda_graphs import Rates, StepGraphs, settings
from espformer.lab.training.run_directory import read_curves
from espformer.lab.training.trainer import execute
from tests.lab.training.test_resume import STATEFUL


class Stand:
    """Calls what it recorded, if no Python number has changed since: a graph would not see it."""

    made: ClassVar[list["Stand"]] = []

    def __init__(self, device):
        self.recorded = self.replayed = self.plain = self.forgotten = 0
        self.learner = None
        Stand.made.append(self)

    def run(self, function):
        self.plain += 1
        function()

    def record(self, function):
        self.recorded += 1
        frozen = settings(self.learner.model) if self.learner else None

        def replay():
            self.replayed += 1
            assert self.learner is None or settings(self.learner.model) == frozen
            function()

        return replay

    def forget(self):
        self.forgotten += 1


@pytest.fixture
def stand(monkeypatch):
    Stand.made = []
    monkeypatch.setattr(module, "check_possible", lambda run: None)
    monkeypatch.setattr(module, "make_recorder", Stand)
    start = module.GraphedClassifier.on_train_start

    def on_train_start(self):
        start(self)
        Stand.made[-1].learner = self

    monkeypatch.setattr(module.GraphedClassifier, "on_train_start", on_train_start)
    return Stand


@pytest.fixture
def wide_rates(monkeypatch):
    """Learning rates of float64, which is what the plain step computes with.

    Fused optimisers read float32, and 0.01 is not one: the first step differs by 3e-8, the 24th of
    the tiny recipe by up to 5e-3, as it also does after a change of all first weights by 1e-7.
    Nothing else differs, as this shows.
    """
    make = Rates.__init__

    def widened(self, optimizer, device):
        make(self, optimizer, device)
        self._tensors = [torch.tensor(rate, dtype=torch.float64) for rate in self._values]

    monkeypatch.setattr(Rates, "__init__", widened)


# 1,438 digits in batches of 200: seven whole ones and one of 38.
WHOLE = ["data.batch_size=200", "trainer.limit_batches=null", "trainer.epochs=3"]


@pytest.mark.parametrize(
    "more",
    [
        [],
        STATEFUL,
        ["schedule={name: inverse_sqrt, warmup_steps: 3}", "model.vit.dropout=0.1"],
        ["optimizer={name: sgd, learning_rate: 0.1, clip_norm: 0.1, weight_decay: 0.1}"],
        ["trainer.precision=bf16-mixed", "optimizer={name: sgd, learning_rate: 0.1}"],
    ],
    ids=["adam", "stateful", "inverse_sqrt", "sgd-clip", "bf16"],
)
def test_recorded_as_plain(recipe, tmp_path, stand, wide_rates, more):
    """Bit for bit, with rates that are not rounded."""
    results = {}
    for graph in ("false", "true"):
        overrides = [*WHOLE, *more, f"trainer.cuda_graph={graph}"]
        run = recipe.run("learnt", overrides=overrides)
        results[graph] = execute(run, tmp_path / graph, progress=False)
    assert results["true"]["scores"] == results["false"]["scores"]
    assert results["true"]["steps"] == results["false"]["steps"] == 24
    a, b = (read_checkpoint(tmp_path / graph / "last.ckpt") for graph in results)
    for name, value in a["state_dict"].items():
        assert torch.equal(b["state_dict"][name], value), name
    assert a["lr_schedulers"] == b["lr_schedulers"]
    assert a["optimizer_states"][0]["param_groups"] == b["optimizer_states"][0]["param_groups"]
    curves = [read_curves(tmp_path / graph) for graph in results]
    for name in ("train/loss", "train/accuracy", "valid/accuracy"):
        assert curves[1][name] == curves[0][name], name
    (recorder,) = stand.made
    # Learnt temperatures are parameters: annealing them changes no number that was recorded.
    assert (recorder.recorded, recorder.plain, recorder.replayed) == (1, 2 + 3, 24 - 5)


def test_a_rate_is_rounded_to_float32_and_nothing_else(recipe, tmp_path, stand):
    """What a GPU does: after the first replayed step, the rounding of the rate is seen, no more."""
    states = []
    for graph in ("false", "true"):
        overrides = ["data.batch_size=200", "trainer.limit_batches=3", "trainer.epochs=1"]
        run = recipe.run("learnt", overrides=[*overrides, f"trainer.cuda_graph={graph}"])
        execute(run, tmp_path / graph, progress=False)
        states.append(read_checkpoint(tmp_path / graph / "last.ckpt")["state_dict"])
    (recorder,) = stand.made
    assert recorder.replayed == 1
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-6, atol=1e-7, msg=name)


def test_a_temperature_that_changes_is_recorded_anew(recipe, tmp_path, stand):
    """The stand-in refuses a replay whose numbers have changed."""
    overrides = [*WHOLE, "annealing.factor=0.5", "trainer.cuda_graph=true"]
    execute(recipe.run("espformer", overrides=overrides), tmp_path, progress=False)
    (recorder,) = stand.made
    assert (recorder.recorded, recorder.plain, recorder.replayed) == (3, 3 * 3, 3 * 5)


@pytest.mark.parametrize("label", ["learnt", "espformer"])
def test_resumed_within_an_epoch(recipe, tmp_path, stand, wide_rates, monkeypatch, label):
    """From a checkpoint of a recorded run, and from one of a plain run: bit for bit."""
    from espformer.lab.training.checkpoints import AtomicCheckpointIO
    from tests.lab.training.test_resume import copy_at

    overrides = [*WHOLE, *STATEFUL]
    recorded = recipe.run(label, overrides=[*overrides, "trainer.cuda_graph=true"])
    plain = recipe.run(label, overrides=overrides)
    for name, first, second in (("a", recorded, recorded), ("b", plain, recorded)):
        with copy_at(AtomicCheckpointIO, monkeypatch, tmp_path / f"{name}-killed", (1, 4)):
            execute(first, tmp_path / name, progress=False)
        again = execute(second, tmp_path / f"{name}-killed", progress=False)
        assert again["continued"]
        a, b = (read_checkpoint(tmp_path / d / "last.ckpt") for d in (name, f"{name}-killed"))
        for key, value in a["state_dict"].items():
            assert torch.equal(b["state_dict"][key], value), key
        losses = [read_curves(tmp_path / d)["train/loss"] for d in (name, f"{name}-killed")]
        assert losses[1][1] == pytest.approx(losses[0][1], abs=1e-5), "the whole epoch's mean"


def test_random_numbers_are_those_of_the_step(recipe, tmp_path, stand):
    """Dropout of a recorded step is seeded before each replay, as it is before a plain step."""
    overrides = [*WHOLE, "model.vit.dropout=0.5", "optimizer={name: sgd, learning_rate: 0.1}"]
    for graph in ("false", "true"):
        run = recipe.run("transformer", overrides=[*overrides, f"trainer.cuda_graph={graph}"])
        execute(run, tmp_path / graph, progress=False)
    a, b = (read_checkpoint(tmp_path / g / "last.ckpt")["state_dict"] for g in ("false", "true"))
    assert all(torch.allclose(a[name], b[name], rtol=0, atol=1e-6) for name in a)


def make_graphs(batch_size=4):
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    sums = []

    def step(batch):
        sums.append(int(batch["inputs"].sum()))
        weight.grad = torch.ones(())
        optimizer.step()

    rates = Rates(optimizer, torch.device("cpu"))
    graphs = StepGraphs(step, Stand(None), rates, batch_size)
    return SimpleNamespace(graphs=graphs, weight=weight, optimizer=optimizer, sums=sums)


def batch(value, count=4, width=3):
    inputs = torch.full((count, width), value)
    return {"inputs": inputs, "labels": torch.zeros(count, dtype=torch.int64)}


def test_batches_reach_the_recorded_step_and_small_ones_are_never_recorded():
    made = make_graphs()
    for value in (1, 2, 3, 4, 5):
        made.graphs(batch(value))
    made.graphs(batch(7, count=2))
    made.graphs(batch(6))
    assert made.sums == [12, 24, 36, 48, 60, 42, 72]
    recorder = made.graphs.recorder
    assert (recorder.plain, recorder.recorded, recorder.replayed) == (3, 1, 4)


def test_one_recording_for_each_width():
    made = make_graphs()
    for value in range(1, 5):
        for width in (3, 5):
            made.graphs(batch(value, width=width))
    assert made.sums == [12, 20, 24, 40, 36, 60, 48, 80]
    assert made.graphs.recorder.recorded == 2


def test_learning_rates_reach_the_recorded_step():
    made = make_graphs()
    (group,) = made.optimizer.param_groups
    for rate in (1.0, 1.0, 1.0, 10.0, 100.0):
        group["lr"] = rate
        made.graphs(batch(1))
        assert group["lr"] == rate, "the optimiser keeps a plain number"
    assert made.weight.item() == -113
    assert "capturable" not in group


def test_forgotten_when_settings_change():
    made = make_graphs()
    made.graphs.look_at((1,))
    for value in range(3):
        made.graphs(batch(value))
    made.graphs.look_at((1,))
    made.graphs(batch(0))
    assert made.graphs.recorder.recorded == 1
    made.graphs.look_at((2,))
    for value in range(3):
        made.graphs(batch(value))
    assert made.graphs.recorder.recorded == 2
    assert made.graphs.recorder.plain == 4, "new kernels may have to compile"


def tweets(count, longest=96):
    """Texts with the lengths of tweets: 28 tokens in the middle, few beyond 50."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.normal(28.0, 8.0, (count,), generator=generator).round().clamp(3, longest)
    lengths[7::97] = 70
    tokens = torch.randint(1, 40, (count, longest), generator=generator, dtype=torch.int32)
    tokens[torch.arange(longest) >= lengths[:, None]] = 0
    return TensorSet(tokens, tokens[:, 0].long() % 2, lengths.long())


def test_texts_have_few_shapes(recipe, tmp_path, stand, monkeypatch):
    """Nearly all steps on texts are replayed, although hardly two batches are equally long."""
    texts = tweets(16 * 40)
    task = Task("texts", texts, texts, classes=2, info={"vocabulary_size": 40, "max_length": 96})
    monkeypatch.setattr("espformer.lab.data.load", lambda name, **options: task)
    more = [
        "data={set: tweeteval, batch_size: 16}", "trainer.epochs=2", "trainer.limit_batches=null",
        "model={text_classifier: {dim: 16, depth: 1, heads: 2, mlp_dim: 16, dropout: 0.1}}",
        "optimizer={name: sgd, learning_rate: 0.125}",
    ]  # fmt: skip
    results = {}
    for graph in ("false", "true"):
        run = recipe.run("transformer", overrides=[*more, f"trainer.cuda_graph={graph}"])
        results[graph] = execute(run, tmp_path / graph, progress=False)
    (recorder,) = stand.made
    assert 2 <= recorder.recorded <= 3
    assert recorder.plain <= 2 * 4
    assert recorder.plain + recorder.replayed == results["true"]["steps"] == 80
    a, b = (read_checkpoint(tmp_path / graph / "last.ckpt") for graph in results)
    for name, value in a["state_dict"].items():
        torch.testing.assert_close(b["state_dict"][name], value, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.devices=2", "cuda_graph needs devices=1"),
        ("trainer.strategy=ddp", "cuda_graph needs devices=1"),
        ("trainer.compile=true", "cuda_graph needs compile=false"),
        ("trainer.accumulate=2", "cuda_graph needs accumulate=1"),
        ("trainer.precision=16-mixed", "cuda_graph needs a precision other than 16-mixed"),
    ],
)
def test_what_cannot_be_recorded_is_refused(recipe, override, message):
    with pytest.raises(ConfigError, match=message):
        recipe.run("learnt", overrides=["trainer.cuda_graph=true", override])


def test_translations_and_processors_are_refused(recipe, tmp_path):
    from espformer.lab.recipes.recipe import load_recipe

    blamed = r"^the command line: trainer.cuda_graph: .*hardly two batches of a translation"
    with pytest.raises(ConfigError, match=blamed):
        load_recipe("iwslt14").run(overrides=["trainer.cuda_graph=true"])
    with pytest.raises(ConfigError, match=r"trainer\.strategy=ddp"):
        load_recipe("iwslt14").run(overrides=["trainer.strategy=fsdp"])
    run = recipe.run("learnt", overrides=["trainer.cuda_graph=true"])
    with pytest.raises(RunError, match=r"needs a CUDA device.*trainer.cuda_graph=false"):
        execute(run, tmp_path)


def test_loader_of_tensors_is_that_of_lists():
    data = TensorSet(torch.arange(50)[:, None], torch.arange(50), torch.full((50,), 1))
    batches = SeededBatches(50, 8, seed=3, resume=(2, 1))
    loader = TensorLoader(data, batches)
    assert len(loader) == 7
    for epoch in (2, 3):
        batches.set_epoch(epoch)
        asked = iter(loader)
        expected = list(batches)
        batches.set_epoch(9)
        assert [b["labels"].tolist() for b in asked] == expected
        assert len(expected) == (6 if epoch == 2 else 7)
