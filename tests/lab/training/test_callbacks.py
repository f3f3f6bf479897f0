"""What happens around the steps: temperatures, shares, statistics of the attention."""

import math
from types import SimpleNamespace

import pytest
import torch

from espformer import esp_plan
from espformer.lab.recipes.schema import Annealing, StraightThrough
from espformer.lab.training.annealing import AnnealTemperature, StraightThroughShare
from espformer.lab.training.attention import (
    attention_statistics,
    recorded_calls,
    slice_statistics,
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
    matrix = Sinkhorn(iterations=101).matrix(x, x, query_mask=mask, key_mask=mask)
    statistics = attention_statistics([matrix])
    assert statistics["row_error"] < 1e-5
    assert statistics["column_error"] < 1e-3
    alone = attention_statistics([matrix[1:, :, :3, :3]])
    entropy = torch.special.entr(matrix[1, 0, :3, :3]).sum(-1).mean() / math.log(3)
    assert alone["entropy"] == pytest.approx(float(entropy), rel=1e-5)


def test_nothing_is_said_of_differences():
    assert attention_statistics([torch.tensor([[[[1.0, -0.5], [0.5, 0.5]]]])]) == {}
    assert attention_statistics([]) == {}


@pytest.mark.parametrize("slicer", ["axis", "learnable"])
def test_slices_of_a_trained_model(slicer):
    """The largest weight and the spread, against the formulas in float64, padding left out."""
    torch.manual_seed(0)
    tau = 3.0
    layer = Attention(8, 2, ESP(0.5, slicer=slicer, inverse_temperature=tau, backend="dense"))
    x, mask = torch.randn(3, 5, 8), torch.ones(3, 5, dtype=torch.bool)
    mask[0, 3:] = False
    with recorded_calls(layer) as calls:
        layer(x, mask=mask)
    found = slice_statistics(calls)
    ((_, mechanism, (query, key, masks)),) = calls
    largest, summed, spreads = [], [], []
    for row in range(3):
        kept = masks["query_mask"][row].flatten()
        for head in range(2):
            q, k = (side[row, head][kept].detach().double() / 2 for side in (query, key))
            directions = mechanism.slicer()
            lines = torch.eye(4) if directions is None else directions.detach()
            lines = (lines[head] if lines.ndim == 3 else lines).double()
            plans = [
                esp_plan(
                    q[None, None], k[None, None], slices=line[None], sort_temperature=0.5, scale=1.0
                )[0, 0]
                for line in lines
            ]
            distance = torch.cdist(q, k)
            costs = torch.stack([(distance.square() * plan).sum() / len(q) for plan in plans])
            sums = torch.stack([(distance * plan).sum() for plan in plans])
            summed.append(float((-tau * sums).softmax(0).max()) * len(lines))
            largest.append(float((-tau * costs).softmax(0).max()) * len(lines))
            spreads += [(side @ lines.T).std(0, correction=0).mean() for side in (q, k)]
    assert found["slice_weight"] == pytest.approx(sum(largest) / 6, rel=1e-4)
    assert found["slice_weight_summed"] == pytest.approx(sum(summed) / 6, rel=1e-4)
    assert found["spread"] == pytest.approx(float(sum(spreads) / 12), rel=1e-6)
    assert found["sort_temperature"] == 0.5
    assert slice_statistics([]) == {}
