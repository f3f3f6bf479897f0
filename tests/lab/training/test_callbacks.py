"""What happens around the steps: temperatures, shares, statistics of the attention."""

import math
from types import SimpleNamespace

import pytest
import torch

from espformer.lab.recipes.schema import Annealing, StraightThrough
from espformer.lab.training.callbacks import (
    AnnealTemperature,
    StraightThroughShare,
    attention_statistics,
)
from espformer.lab.training.learner import Learner
from espformer.nn import ESP, Attention, Sinkhorn, get_sort_temperatures


def learner(**options):
    module = Learner(run=None, model=Attention(8, 2, ESP(sort_temperature=1e-3, **options)))  # type: ignore[arg-type]
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return module


def at_epoch(epoch):
    return SimpleNamespace(current_epoch=epoch)


def test_annealing_of_the_paper():
    """40 epochs with γ = 0.8 from 1e-3 end at 1.3e-7."""
    module = learner()
    callback = AnnealTemperature(Annealing(factor=0.8))
    for epoch in range(40):
        callback.on_train_epoch_start(at_epoch(epoch), module)
    temperature = get_sort_temperatures(module)["model.mechanism"]
    assert temperature == pytest.approx(1e-3 * 0.8**40)
    assert temperature == pytest.approx(1.3e-7, rel=0.03)


def test_annealing_counts_each_epoch_once():
    module = learner()
    callback = AnnealTemperature(Annealing(factor=0.5, start=0.4))
    callback.on_train_epoch_start(at_epoch(0), module)
    assert get_sort_temperatures(module) == {"model.mechanism": pytest.approx(0.2)}
    resumed = AnnealTemperature(Annealing(factor=0.5, start=0.4))
    resumed.load_state_dict(callback.state_dict())
    resumed.on_train_epoch_start(at_epoch(0), module)
    assert get_sort_temperatures(module) == {"model.mechanism": pytest.approx(0.2)}
    resumed.on_train_epoch_start(at_epoch(1), module)
    assert get_sort_temperatures(module) == {"model.mechanism": pytest.approx(0.1)}


def test_annealing_keeps_the_ratio_of_learnt_temperatures():
    module = learner(learn_temperature=True)
    with torch.no_grad():
        module.model.mechanism.log_sort_temperature.copy_(torch.tensor([1.0, 4.0]).log())
    AnnealTemperature(Annealing(factor=0.5)).on_train_epoch_start(at_epoch(0), module)
    assert get_sort_temperatures(module)["model.mechanism"] == pytest.approx([0.5, 2.0])


def test_straight_through_share():
    callback = StraightThroughShare(StraightThrough(start=0.2, end=1.0), epochs=5)
    assert [callback.share(e) for e in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    module = learner()
    callback.on_train_epoch_start(at_epoch(2), module)
    assert module.model.mechanism.straight_through == pytest.approx(0.6)
    once = StraightThroughShare(StraightThrough(epochs=2), epochs=100)
    assert [once.share(e) for e in range(4)] == pytest.approx([0, 0.5, 1, 1])


def test_statistics_of_known_matrices():
    uniform = torch.full((2, 3, 4, 8), 1 / 8)
    assert attention_statistics([uniform]) == pytest.approx(
        {"row_error": 0.0, "column_error": 0.0, "entropy": 1.0}, abs=1e-6
    )
    first_column = torch.zeros(1, 1, 4, 4)
    first_column[..., 0] = 1
    statistics = attention_statistics([first_column])
    assert statistics["row_error"] == 0
    assert statistics["entropy"] == 0
    wrong_rows = torch.eye(4).expand(1, 1, 4, 4) * 1.5
    assert attention_statistics([wrong_rows])["row_error"] == pytest.approx(0.5)
    assert attention_statistics([wrong_rows])["column_error"] == pytest.approx(0.5)


def test_statistics_leave_padding_out():
    x = torch.randn(2, 1, 6, 4)
    mask = torch.arange(6) < torch.tensor([[6], [3]])
    matrix = Sinkhorn(iterations=101).matrix(x, x, key_mask=mask)
    statistics = attention_statistics([matrix])
    assert statistics["row_error"] < 1e-5
    assert statistics["column_error"] < 1e-3
    alone = attention_statistics([matrix[1:, :, :3, :3]])
    entropy = torch.special.entr(matrix[1, 0, :3, :3]).sum(-1).mean() / math.log(3)
    assert alone["entropy"] == pytest.approx(float(entropy), rel=1e-5)


def test_nothing_is_said_of_differences():
    assert attention_statistics([torch.tensor([[[[1.0, -0.5], [0.5, 0.5]]]])]) == {}
    assert attention_statistics([]) == {}
