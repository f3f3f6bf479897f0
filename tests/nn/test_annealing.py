"""Temperatures, hardening and straight-through over a whole model."""

import pytest
import torch
from torch import nn

from espformer.nn import (
    ESP,
    Attention,
    Differential,
    Softmax,
    anneal,
    copy_sort_settings,
    exponential_schedule,
    get_sort_temperatures,
    harden,
    set_sort_temperature,
    set_straight_through,
    soften,
)

NAMES = ["0.mechanism", "1.mechanism", "3.0.mechanism.base"]


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        Attention(12, 2, ESP(sort_temperature=0.2)),
        Attention(12, 2, ESP(sort_temperature=0.3, learn_temperature=True)),
        Attention(12, 2, Softmax()),
        nn.Sequential(Attention(12, 2, Differential(ESP(sort_temperature=0.4)))),
    ).double()


def test_set_and_get(model):
    assert get_sort_temperatures(model) == {
        NAMES[0]: 0.2,
        NAMES[1]: pytest.approx([0.3, 0.3]),
        NAMES[2]: 0.4,
    }
    assert set_sort_temperature(model, 1e-5) == NAMES
    assert get_sort_temperatures(model) == {
        NAMES[0]: 1e-5,
        NAMES[1]: pytest.approx([1e-5, 1e-5]),
        NAMES[2]: 1e-5,
    }


def test_what_is_set_is_what_runs(model):
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    set_sort_temperature(model, 0.05)
    fresh = Attention(12, 2, ESP(sort_temperature=0.05)).double()
    for index in (0, 1):
        weights = {k: v for k, v in model[index].state_dict().items() if "mechanism" not in k}
        fresh.load_state_dict(weights)
        torch.testing.assert_close(model[index](x), fresh(x), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_average_of_weights_follows(model, use_buffers):
    """torch averages parameters and buffers; a temperature that is not learnt is neither."""
    average = torch.optim.swa_utils.AveragedModel(
        model,
        multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5),
        use_buffers=use_buffers,
    )
    keys = list(average.state_dict())
    for _ in range(3):
        anneal(model, 0.5)
        average.update_parameters(model)
    harden(model, ties="average")
    assert copy_sort_settings(model, average) == ["module." + name for name in NAMES]
    found, expected = (get_sort_temperatures(m) for m in (average, model))
    for name in (NAMES[0], NAMES[2]):
        assert found["module." + name] == expected[name]
    # A learnt temperature is a parameter, of which this is the average.
    assert found["module." + NAMES[1]][0] == pytest.approx(0.3 * 0.5**2.25)
    for name in NAMES:
        options = average.module.get_submodule(name).options
        assert (options.hard, options.ties) == (True, "average")
    assert list(average.state_dict()) == keys


def test_what_is_not_a_model_is_named(model):
    for change in (harden, soften, get_sort_temperatures):
        with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got list"):
            change([model])


def test_settings_are_copied_between_models_of_one_kind(model):
    with pytest.raises(ValueError, match="3 ESP mechanisms and this Attention 1"):
        copy_sort_settings(model, Attention(12, 2))


def test_anneal_multiplies_each_head(model):
    esp = model[1].mechanism
    with torch.no_grad():
        esp.log_sort_temperature[1] += 1
    before = esp.sort_temperature.detach()
    assert anneal(model, 0.8) == NAMES
    torch.testing.assert_close(esp.sort_temperature.detach(), 0.8 * before)
    assert model[0].mechanism.sort_temperature == pytest.approx(0.16)
    assert model[3][0].mechanism.base.sort_temperature == pytest.approx(0.32)


@pytest.mark.parametrize("metric", ["absolute", "squared"])
@pytest.mark.parametrize("learn", [False, True], ids=["given", "learnt"])
def test_anneal_stops_where_soft_is_hard(metric, learn):
    layer = Attention(12, 2, ESP(sort_temperature=0.3, learn_temperature=learn, metric=metric))
    x = torch.randn(2, 7, 12)
    for _ in range(20):
        anneal(layer, 1e-30)
    soft = layer(x)
    grads = torch.autograd.grad(
        soft.square().sum(), tuple(layer.parameters()), allow_unused=True, materialize_grads=True
    )
    harden(layer)
    hard = layer(x)
    torch.testing.assert_close(soft, hard)
    wanted = torch.autograd.grad(
        hard.square().sum(), tuple(layer.parameters()), allow_unused=True, materialize_grads=True
    )
    for found, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(found, want)


def test_learnt_temperatures_stay_parameters(model):
    parameter = model[1].mechanism.log_sort_temperature
    set_sort_temperature(model, 1e-3)
    anneal(model, 0.5)
    assert model[1].mechanism.log_sort_temperature is parameter
    assert parameter.requires_grad
    assert parameter.is_leaf


def test_harden_and_soften(model):
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    soft, soft_matrix = model[0](x, return_matrix=True)
    assert (soft_matrix.sum(-2) - 1).abs().max() > 1e-3
    assert harden(model, ties="average") == NAMES
    hard, hard_matrix = model[0](x, return_matrix=True)
    assert (hard_matrix.sum(-2) - 1).abs().max() < 1e-12
    assert not torch.allclose(hard, soft)
    assert model[0].mechanism.ties == "average"
    assert soften(model) == NAMES
    torch.testing.assert_close(model[0](x), soft)


def test_harden_leaves_ties_alone_unless_told(model):
    model[0].mechanism.ties = "average"
    harden(model)
    assert [model[0].mechanism.ties, model[1].mechanism.ties] == ["average", "stable"]


def test_hardened_checkpoint_loads_as_hardened(model):
    harden(model)
    set_sort_temperature(model, 1e-6)
    fresh = nn.Sequential(
        Attention(12, 2, ESP()),
        Attention(12, 2, ESP(learn_temperature=True)),
        Attention(12, 2, Softmax()),
        nn.Sequential(Attention(12, 2, Differential(ESP()))),
    ).double()
    fresh.load_state_dict(model.state_dict())
    assert get_sort_temperatures(fresh) == get_sort_temperatures(model)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    assert torch.equal(fresh(x), model(x))


def test_straight_through_shows_hard_and_learns_soft(model):
    layer = model[0]
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    soft, soft_matrix = layer(x, return_matrix=True)
    harden(layer)
    hard, hard_matrix = layer(x, return_matrix=True)
    soften(layer)

    assert set_straight_through(model, 1.0) == NAMES
    torch.testing.assert_close(layer(x), hard)
    set_straight_through(model, 0.25)
    mixed, matrix = layer(x, return_matrix=True)
    torch.testing.assert_close(mixed, 0.75 * soft + 0.25 * hard)
    torch.testing.assert_close(matrix, 0.75 * soft_matrix + 0.25 * hard_matrix)

    # The gradient is the soft one's: a linear loss sees no difference in queries and keys.
    def gradient(share: float) -> torch.Tensor:
        set_straight_through(layer, share)
        layer.zero_grad()
        layer(x).sum().backward()
        return layer.qkv.weight.grad[:24].clone()  # queries and keys

    torch.testing.assert_close(gradient(1.0), gradient(0.0))
    assert gradient(0.0).abs().max() > 1e-6


def test_schedule_of_the_paper():
    schedule = exponential_schedule(1e-3, factor=0.8, epochs=40)
    temperature = 1e-3
    for got in schedule:
        temperature *= 0.8
        assert got == pytest.approx(temperature, rel=1e-12)
    assert len(schedule) == 40
    assert exponential_schedule(1e-3, 0.8, 0) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda model: set_sort_temperature(model, 0.1),
        get_sort_temperatures,
        lambda model: anneal(model, 0.5),
        harden,
        soften,
        lambda model: set_straight_through(model, 0.5),
    ],
)
def test_a_model_without_esp_is_an_error(change):
    with pytest.raises(ValueError, match=r"no ESP mechanism inside this Attention"):
        change(Attention(12, 2, Softmax()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: set_sort_temperature(m, 0.0), r"sort_temperature must be > 0, got 0\.0"),
        (lambda m: anneal(m, 0.0), r"anneal: factor must be > 0 and finite, got 0\.0"),
        (lambda m: anneal(m, float("inf")), r"anneal: factor must be > 0 and finite, got inf"),
        (lambda m: anneal(m, float("nan")), r"anneal: factor must be > 0 and finite, got nan"),
        (lambda m: harden(m, ties="none"), r"ties must be one of"),
        (lambda m: set_straight_through(m, 2.0), r"\[0, 1\], got 2\.0"),
        (lambda m: exponential_schedule(0.0, 0.8, 3), r"start=0\.0"),
    ],
)
def test_mistakes_are_named_and_change_nothing(model, change, message):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        change(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_settings_are_copied_between_models_of_one_kind_only():
    learnt, constant = (Attention(8, 2, ESP(learn_temperature=x)) for x in (True, False))
    before = get_sort_temperatures(constant)
    with pytest.raises(ValueError, match="learnt in one model and not in the other"):
        copy_sort_settings(learnt, constant)
    assert get_sort_temperatures(constant) == before
