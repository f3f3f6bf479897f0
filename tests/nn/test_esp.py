"""The ESP mechanism: what reaches the function, what is learnt, what is saved."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from espformer import functional
from espformer.nn import ESP, Attention, FrozenSlicer, LearnableSlicer

HEADS, WIDTH = 2, 6


@pytest.fixture
def qkv() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 2, HEADS, 7, WIDTH, generator=generator, dtype=torch.float64).unbind()


SETTINGS = {
    "sort_temperature": 0.3,
    "inverse_temperature": 2.0,
    "metric": "squared",
    "balance": "both",
    "hard": True,
    "ties": "average",
    "straight_through": 0.25,
    "coupling": "identity",
    "scale": 0.7,
    "backend": "dense",
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_reaches_the_function(setting, qkv, monkeypatch):
    """Each alone, so that swapped or forgotten arguments show; defaults are the function's."""
    calls = []
    monkeypatch.setattr(functional, "esp_attention", lambda *a, **k: calls.append(k))
    monkeypatch.setattr(functional, "esp_plan", lambda *a, **k: calls.append(k))
    mechanism = ESP(**{setting: SETTINGS[setting]})
    mechanism(*qkv)
    mechanism.matrix(*qkv[:2])
    defaults = {
        "sort_temperature": 0.1,
        "inverse_temperature": 0.1,
        "metric": "absolute",
        "balance": "rows",
        "hard": False,
        "ties": "stable",
        "straight_through": 0.0,
        "coupling": "quantile",
        "slices": None,
        "scale": None,
        "backend": "auto",
        "query_mask": None,
        "key_mask": None,
    }
    expected = defaults | {setting: SETTINGS[setting]}
    assert calls == [expected | {"slice_dropout": 0.0}, expected]


def test_is_the_function(qkv):
    slicer = FrozenSlicer(4, WIDTH, heads=HEADS, seed=1).double()
    mechanism = ESP(
        sort_temperature=0.3,
        inverse_temperature=2.0,
        metric="squared",
        balance="both",
        slicer=slicer,
        backend="dense",
    )
    expected = functional.esp_attention(
        *qkv,
        sort_temperature=0.3,
        inverse_temperature=2.0,
        metric="squared",
        balance="both",
        slices=slicer(),
        backend="dense",
    )
    torch.testing.assert_close(mechanism.bind(HEADS, WIDTH)(*qkv), expected)


def test_slice_dropout_is_for_training(qkv):
    mechanism = ESP(slice_dropout=0.5)
    expected = functional.esp_attention(*qkv)
    torch.testing.assert_close(mechanism.eval()(*qkv), expected)
    torch.manual_seed(0)
    assert not torch.allclose(mechanism.train()(*qkv), expected)


def test_learnt_temperatures_start_at_the_fixed_one(qkv):
    learnt = ESP(sort_temperature=0.3, learn_temperature=True).bind(HEADS, WIDTH).double()
    torch.testing.assert_close(learnt(*qkv), ESP(sort_temperature=0.3)(*qkv), rtol=1e-6, atol=1e-7)
    assert learnt.sort_temperature.shape == (HEADS,)


def test_each_head_has_its_own_temperature(qkv):
    learnt = ESP(sort_temperature=0.3, learn_temperature=True).bind(HEADS, WIDTH).double()
    with torch.no_grad():
        learnt.log_sort_temperature[1] = torch.tensor(0.05).log()
    out = learnt(*qkv)
    for head, temperature in enumerate([0.3, 0.05]):
        one = [x[:, head : head + 1] for x in qkv]
        expected = ESP(temperature)(*one)
        torch.testing.assert_close(out[:, head : head + 1], expected, rtol=1e-6, atol=1e-7)


def test_temperature_is_learnt(qkv):
    """Gradient descent finds the temperature that made the target."""
    target = ESP(sort_temperature=0.05)(*qkv)
    mechanism = ESP(sort_temperature=0.3, learn_temperature=True).bind(HEADS, WIDTH).double()
    steps = torch.optim.Adam(mechanism.parameters(), lr=0.2)
    for _ in range(50):
        steps.zero_grad()
        (mechanism(*qkv) - target).square().mean().backward()
        steps.step()
    torch.testing.assert_close(
        mechanism.sort_temperature.detach(), torch.full((HEADS,), 0.05).double(), rtol=0.05, atol=0
    )


def test_frozen_layers_differ_and_follow_the_global_seed():
    spec = ESP(slicer="frozen", slices=4)

    def directions(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return [spec.bind(HEADS, WIDTH).slicer() for _ in range(2)]

    first, second = directions(0)
    assert first.shape == (HEADS, 4, WIDTH)
    assert not torch.equal(first, second)
    assert torch.equal(first, directions(0)[0])
    assert not torch.equal(first, directions(1)[0])


@pytest.mark.parametrize("learn_temperature", [False, True])
def test_checkpoint_restores_temperature_and_hardness(qkv, learn_temperature):
    spec = ESP(learn_temperature=learn_temperature, slicer="learnable")
    model = nn.Sequential(spec.bind(HEADS, WIDTH))
    esp = model[0]
    esp.sort_temperature, esp.hard, esp.ties, esp.straight_through = 1.3e-7, True, "average", 0.5
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)

    other = nn.Sequential(spec.bind(HEADS, WIDTH))
    other.load_state_dict(torch.load(file, weights_only=True), strict=True)
    loaded = other[0]
    assert (loaded.hard, loaded.ties, loaded.straight_through) == (True, "average", 0.5)
    if learn_temperature:
        torch.testing.assert_close(loaded.sort_temperature, torch.full((HEADS,), 1.3e-7))
    else:
        assert loaded.sort_temperature == 1.3e-7  # to the last bit
    torch.testing.assert_close(other.double()[0](*qkv), model.double()[0](*qkv))


def test_state_dict_holds_tensors_only():
    state = Attention(12, HEADS, ESP(learn_temperature=True)).state_dict()
    assert set(state) == {
        "qkv.weight",
        "qkv.bias",
        "proj.weight",
        "proj.bias",
        "mechanism.log_sort_temperature",
        "mechanism._extra_state",
    }
    assert all(isinstance(entry, Tensor) for entry in state.values())


def test_state_dict_without_the_settings_loads_and_keeps_them():
    layer = Attention(12, HEADS, ESP(sort_temperature=0.7, hard=True, ties="average"))
    state = layer.state_dict()
    del state["mechanism._extra_state"]
    before = set(state)
    assert not any(layer.load_state_dict(state, strict=True))
    assert set(state) == before  # the caller's dict is left alone
    esp = layer.mechanism
    assert (esp.sort_temperature, esp.hard, esp.ties) == (0.7, True, "average")


def test_a_missing_parameter_is_still_an_error():
    layer = Attention(12, HEADS, ESP(learn_temperature=True))
    state = layer.state_dict()
    del state["mechanism.log_sort_temperature"]
    with pytest.raises(RuntimeError, match="log_sort_temperature"):
        layer.load_state_dict(state)


def test_casts_do_not_touch_the_temperature():
    layer = Attention(12, HEADS, ESP(1e-9)).half()
    assert layer.mechanism.sort_temperature == 1e-9
    assert layer.state_dict()["mechanism._extra_state"][0] == 1e-9


def test_settings_survive_construction_on_meta():
    with torch.device("meta"):
        layer = Attention(12, HEADS, ESP(sort_temperature=0.7, learn_temperature=True))
        state = layer.mechanism.get_extra_state()
    assert state[0] == 0.7
    layer.to_empty(device="cpu")
    layer.mechanism.reset_parameters()
    torch.testing.assert_close(layer.mechanism.sort_temperature, torch.full((HEADS,), 0.7))


def test_deepcopy_is_independent():
    esp = ESP(sort_temperature=0.3, learn_temperature=True).bind(HEADS, WIDTH)
    other = copy.deepcopy(esp)
    other.sort_temperature = 0.1
    other.hard = True
    torch.testing.assert_close(esp.sort_temperature, torch.full((HEADS,), 0.3))
    assert not esp.hard


def test_annealing_a_compiled_model_does_not_recompile_each_time():
    torch._dynamo.reset()
    compilations = []

    def backend(module: nn.Module, inputs: object) -> nn.Module:
        compilations.append(module)
        return module

    layer = Attention(12, HEADS, ESP())
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    x = torch.randn(1, 5, 12)
    for step in range(12):
        layer.mechanism.sort_temperature = 0.5 * 0.8**step
        torch.testing.assert_close(compiled(x), layer(x))
    assert len(compilations) <= 3


def test_repr_tells_the_settings():
    text = repr(ESP(1e-5, hard=True, slicer="learnable", slices=3).bind(HEADS, WIDTH))
    assert "sort_temperature=1e-05" in text
    assert "hard=True" in text
    assert "LearnableSlicer(heads=2, slices=3, head_dim=6)" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sort_temperature": 0.0}, r"ESP: sort_temperature must be > 0, got 0\.0 .*hard=True"),
        ({"sort_temperature": torch.ones(4)}, r"must be one number, got \(4,\) of them"),
        ({"sort_temperature": float("nan")}, r"sort_temperature must be > 0"),
        (
            {"inverse_temperature": -1.0},
            r"ESP: inverse_temperature must be in \[0, 1e\+30\], got -1\.0",
        ),
        ({"inverse_temperature": float("nan")}, r"must be in \[0, 1e\+30\], got nan"),
        ({"inverse_temperature": float("inf")}, r"must be in \[0, 1e\+30\], got inf"),
        ({"metric": "cubic"}, r"ESP: metric must be one of .*'absolute'.*got 'cubic'"),
        ({"balance": "columns"}, r"ESP: balance must be one of 'rows', 'both'"),
        ({"ties": "none"}, r"ESP: ties must be one of 'stable', 'average'"),
        ({"coupling": "none"}, r"ESP: coupling must be one of"),
        ({"backend": "fast"}, r"ESP: backend must be one of"),
        ({"slicer": "random"}, r"ESP: slicer must be one of 'axis', 'frozen', 'learnable'"),
        ({"slices": 3}, r"ESP: slices=3 counts the directions"),
        ({"slicer": FrozenSlicer(3, 6), "slices": 3}, r"ESP: slices=3 counts the directions"),
        ({"slice_dropout": 1.0}, r"ESP: slice_dropout must be in \[0, 1\)"),
        ({"straight_through": 1.5}, r"ESP: straight_through must be a share in \[0, 1\], got 1\.5"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ESP(**options)


@pytest.mark.parametrize("slicer", [FrozenSlicer(3, 8), LearnableSlicer(3, 6, heads=3)])
def test_a_slicer_of_other_sizes_is_named(slicer):
    with pytest.raises(ValueError, match=r"expected \(slices, 6\) or \(2, slices, 6\)"):
        ESP(slicer=slicer).bind(HEADS, WIDTH)
