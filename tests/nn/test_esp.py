"""The ESP mechanism: what reaches the function, what is learnt, what is saved."""

import copy
import inspect
import io
import warnings
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from torch import Tensor, nn

from espformer import functional
from espformer.nn import ESP, Attention, FrozenSlicer, LearnableSlicer, Softmax
from espformer.ops.esp.options import (
    COMPARED_OPTIONS,
    OPTIONS,
    SAVED_OPTIONS,
    ESPOptions,
    Options,
)

HEADS, WIDTH = 2, 6


@pytest.fixture
def qkv() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 2, HEADS, 7, WIDTH, generator=generator, dtype=torch.float64).unbind()


OTHERS = {
    "sort_temperature": 0.4,
    "temperature_unit": "absolute",
    "inverse_temperature": 2.0,
    "cost_exponent": 1.0,
    "metric": "squared",
    "balance": "both",
    "hard": True,
    "ties": "average",
    "straight_through": 0.25,
    "coupling": "identity",
    "scale": 0.7,
    "slice_dropout": 0.5,
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_reaches_the_function(option, qkv, monkeypatch):
    """Each alone, so that swapped or forgotten arguments show; defaults are the function's."""
    calls = []
    monkeypatch.setattr(functional, "esp_attention", lambda *a, **k: calls.append(k))
    monkeypatch.setattr(functional, "esp_plan", lambda *a, **k: calls.append(k))
    mechanism = ESP(**{option: OTHERS[option]})
    mechanism(*qkv)
    mechanism.matrix(*qkv[:2])
    expected = {name: o.default for name, o in OPTIONS.items()} | {option: OTHERS[option]}
    rest = {"slices": None, "slice_logits": None, "query_mask": None, "key_mask": None}
    expected |= rest | {"backend": "auto"}
    assert calls == [expected, expected | {"slice_dropout": 0.0}]
    assert getattr(mechanism, option) == OTHERS[option]


def test_an_option_is_listed_once():
    """Its field, its type for type checkers, and the place that uses it: nothing else lists it."""
    assert list(get_type_hints(ESPOptions)) == list(OPTIONS)
    assert set(get_type_hints(Options)) == set(OPTIONS)
    for callable_ in (functional.esp_attention, functional.esp_plan, ESP):
        parameters = inspect.signature(callable_).parameters
        for name, option in OPTIONS.items():
            assert parameters[name].default == option.default
            assert f"{name}: {option.metadata['meaning'][:20]}" in callable_.__doc__ or (
                callable_ is functional.esp_plan
            )
    root = Path(functional.__file__).parents[1]
    listed = [
        path.relative_to(root).as_posix()
        for folder in ("ops", "functional", "nn", "integrations")
        for path in (root / folder).rglob("*.py")
        if "slice_dropout: float" in path.read_text(encoding="utf-8")
    ]
    assert listed == ["ops/esp/options.py"]


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
        expected = ESP(sort_temperature=temperature)(*one)
        torch.testing.assert_close(out[:, head : head + 1], expected, rtol=1e-6, atol=1e-7)


def test_temperature_is_learnt(qkv):
    """Gradient descent finds the temperature that made the target."""
    target = ESP(sort_temperature=0.05)(*qkv)
    mechanism = ESP(sort_temperature=0.3, learn_temperature=True).bind(HEADS, WIDTH).double()
    steps = torch.optim.Adam(mechanism.parameters(), lr=0.2)
    for _ in range(100):
        steps.zero_grad()
        (mechanism(*qkv) - target).square().mean().backward()
        steps.step()
    torch.testing.assert_close(
        mechanism.sort_temperature.detach(), torch.full((HEADS,), 0.05).double(), rtol=0.05, atol=0
    )


@pytest.mark.parametrize("slicer", ["frozen", "learnable"])
def test_slices_of_layers_differ_and_follow_the_global_seed(slicer):
    spec = ESP(slicer=slicer, slices=4)

    def directions(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return [spec.bind(HEADS, WIDTH, depth=depth).slicer() for depth in range(2)]

    first, second = directions(0)
    assert first.shape == (HEADS, 4, WIDTH)
    assert not torch.equal(first, second)
    assert torch.equal(first, directions(0)[0])
    assert not torch.equal(first, directions(1)[0])
    width = HEADS * WIDTH
    first, second = (Attention(width, HEADS, mechanism=spec).mechanism for _ in range(2))
    assert not torch.equal(first.slicer(), second.slicer())


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


def test_state_dict_of_before_temperatures_had_a_unit():
    layer = Attention(12, HEADS, ESP())
    state = layer.state_dict()
    state["mechanism._extra_state"] = torch.tensor([0.07, 1.0, 0.5, 1.0], dtype=torch.float64)
    layer.load_state_dict(state)
    esp = layer.mechanism
    assert (esp.sort_temperature, esp.temperature_unit, esp.hard) == (0.07, "absolute", True)
    assert (esp.straight_through, esp.ties) == (0.5, "average")


def test_weights_of_other_options_are_told():
    """Temperatures and the like are restored; what the constructor decides is not."""
    saved = Attention(12, HEADS, ESP(0.7, metric="squared", balance="both", scale=0.5))
    layer = Attention(12, HEADS, ESP())
    words = (
        r"saved with metric='squared', balance='both', scale=0.5, and this mechanism has "
        r"metric='absolute', balance='rows', scale=None, so"
    )
    with pytest.warns(UserWarning, match=words):
        layer.load_state_dict(saved.state_dict())
    assert (layer.mechanism.sort_temperature, layer.mechanism.metric) == (0.7, "absolute")
    same = Attention(12, HEADS, ESP(metric="squared", balance="both", scale=0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same.load_state_dict(saved.state_dict())
        former = saved.state_dict()
        former["mechanism._extra_state"] = former["mechanism._extra_state"][:5]
        layer.load_state_dict(former)  # saved before other options were compared


def test_states_hold_options_by_position():
    """A state of today keeps its meaning if options are added at the end, as they must be."""
    saved = ESP(**{name: OTHERS[name] for name in COMPARED_OPTIONS})
    state = [0.4, 1.0, 0.25, 1.0, 1.0, -1.0, 2.0, 1.0, 1.0, 1.0, 2.0, 0.7]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved.set_extra_state(torch.tensor(state, dtype=torch.float64))
    for name in (*SAVED_OPTIONS[:5], *COMPARED_OPTIONS[:6]):
        assert getattr(saved, name) == OTHERS[name], name


def test_few_slices_unless_told():
    assert ESP().bind(2, 6).slicer() is None
    assert ESP().bind(2, 8).slicer() is None
    assert ESP().bind(8, 64).slicer().shape == (8, 8, 64)
    assert ESP().bind(12, 64).slicer().shape == (12, 8, 64)
    assert ESP(slices=5).bind(2, 64).slicer().shape == (2, 5, 64)
    assert ESP(slicer="axis").bind(2, 64).slicer() is None
    assert ESP(slicer="axis", slices=3).bind(2, 64).slicer().tolist() == torch.eye(64)[:3].tolist()
    with pytest.raises(ValueError, match="AxisSlicer: a head of width 6 has 6 axes"):
        ESP(slicer="axis", slices=7).bind(2, 6)


def test_a_single_head_has_64_slices_if_it_is_wide_enough():
    assert ESP().bind(2, 64).slicer().shape == (2, 8, 64)
    assert ESP().bind(1, 96).slicer().shape == (1, 64, 96)
    assert ESP().bind(1, 64).slicer() is None  # the axes
    assert ESP().bind(1, 16).slicer() is None


@pytest.mark.parametrize(("heads", "width"), [(1, 96), (1, 64)])  # more slices, and the axes
@pytest.mark.parametrize("learnt", [False, True])
def test_weights_that_were_saved_with_another_number_of_slices_keep_it(heads, width, learnt):
    torch.manual_seed(0)
    mechanism = ESP(slices=8, learn_temperature=learnt)
    former = Attention(64, heads, mechanism, head_dim=width)
    layer = Attention(64, heads, ESP(learn_temperature=learnt), head_dim=width)
    x = torch.randn(2, 10, 64)
    assert not layer(x).allclose(former(x))
    assert not any(layer.load_state_dict(former.state_dict(), strict=True))
    assert layer.mechanism.slicer().shape == (heads, 8, width)
    torch.testing.assert_close(layer(x), former(x))
    with pytest.raises(RuntimeError, match="size mismatch"):  # asked for, so not changed
        Attention(
            64, heads, ESP(slices=9, learn_temperature=learnt), head_dim=width
        ).load_state_dict(former.state_dict())


def test_weights_of_softmax_load_beside_frozen_slices():
    wide = Attention(128, HEADS, Softmax()).state_dict()
    layer = Attention(128, HEADS, ESP())
    before = layer.mechanism.slicer().clone()
    assert not any(layer.load_state_dict(wide, strict=True))
    assert torch.equal(layer.mechanism.slicer(), before)
    former = wide | {"mechanism._extra_state": torch.tensor([0.1, 0.0, 0.0, 0.0])}
    with pytest.raises(RuntimeError, match=r"slicer\.directions"):  # it was trained along the axes
        layer.load_state_dict(former)


def test_slice_weights_are_learnt(qkv):
    mechanism = ESP(learn_slice_weights=True).bind(HEADS, WIDTH).double()
    torch.testing.assert_close(mechanism(*qkv), ESP()(*qkv))
    wanted = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    only = torch.eye(WIDTH, dtype=torch.float64)[2:3]
    target = functional.esp_attention(*qkv, slices=only)
    steps = torch.optim.Adam(mechanism.parameters(), lr=0.2)
    for _ in range(100):
        steps.zero_grad()
        (mechanism(*qkv) - target).square().mean().backward()
        steps.step()
    found = mechanism.slice_logits.softmax(-1).detach()
    torch.testing.assert_close(found, wanted.expand(HEADS, -1), atol=0.05, rtol=0)


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
    layer = Attention(12, HEADS, ESP(sort_temperature=1e-9)).half()
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
    text = repr(
        ESP(sort_temperature=1e-5, hard=True, slicer="learnable", slices=3).bind(HEADS, WIDTH)
    )
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
        ({"slicer": "random"}, r"ESP: slicer must be one of 'auto', 'axis', 'frozen', 'learnable'"),
        ({"slicer": FrozenSlicer(3, 6), "slices": 3}, r"ESP: slices=3 is only for slicers"),
        ({"slice_dropout": 1.0}, r"ESP: slice_dropout must be in \[0, 1\)"),
        ({"straight_through": 1.5}, r"ESP: straight_through must be True.*\[0, 1\], got 1\.5"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ESP(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slices": 0}, "ESP: slices must be an integer of at least 1"),
        ({"slices": "8"}, "slices must be an integer of at least 1.* got '8'"),
        ({"slices": torch.eye(6)}, "slices must be an integer of at least 1.* got a Tensor"),
        ({"slicer": None}, 'slicer must be "auto", "axis", .* got NoneType'),
        ({"learn_temperature": 0.3}, r"learn_temperature must be True or False, got 0\.3"),
        ({"learn_temprature": True}, "did you mean 'learn_temperature'"),
        ({"heads": 4}, r"it belongs to espformer\.nn\.Attention"),
    ],
)
def test_mistakes_in_its_own_arguments(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ESP(**options)


def test_one_temperature_is_enough():
    with pytest.raises(TypeError, match=r"two temperatures, 0\.5 and sort_temperature=0\.1"):
        ESP(0.5, sort_temperature=0.1)


@pytest.mark.parametrize("name", ["slices", "learn_temperature", "learn_slice_weights"])
def test_what_parameters_depend_on_is_fixed_in_a_layer(name):
    """Setting it would change nothing."""
    esp = ESP()
    setattr(esp, name, 3 if name == "slices" else True)
    bound = esp.bind(HEADS, WIDTH)
    with pytest.raises(
        AttributeError, match=rf"{name} is fixed.*build the layer with ESP\({name}="
    ):
        setattr(bound, name, getattr(bound, name))


@pytest.mark.parametrize("slicer", [FrozenSlicer(3, 8), LearnableSlicer(3, 6, heads=3)])
def test_a_slicer_of_other_sizes_is_named(slicer):
    with pytest.raises(ValueError, match=r"expected \(slices, 6\) or \(2, slices, 6\)"):
        ESP(slicer=slicer).bind(HEADS, WIDTH)


@pytest.mark.parametrize("make", [ESP, lambda t: setattr(ESP(), "sort_temperature", t)])
def test_a_parameter_is_no_temperature(make):
    with pytest.raises(TypeError, match=r"must be a number.*learn_temperature=True"):
        make(nn.Parameter(torch.tensor(0.2)))


@pytest.mark.parametrize("learn_temperature", [False, True])
def test_options_are_changed(learn_temperature):
    mechanism = ESP(0.3, learn_temperature=learn_temperature).bind(2, 4)
    mechanism.change(sort_temperature=torch.tensor(0.01), metric="squared")
    assert torch.as_tensor(mechanism.sort_temperature).flatten().tolist() == pytest.approx(
        [0.01] * (2 if learn_temperature else 1)
    )
    assert mechanism.metric == "squared"
    assert isinstance(mechanism.options.sort_temperature, float)
    for options, error, message in (
        ({"nonsense": 1}, TypeError, "ESP: there is no option 'nonsense'"),
        ({"hard": True, "metrik": "squared"}, TypeError, "did you mean 'metric'"),
        ({"hard": True, "sort_temperature": 0.0}, ValueError, "sort_temperature must be > 0"),
        ({"hard": True, "ties": "any"}, ValueError, "ties must be one of"),
    ):
        with pytest.raises(error, match=message):
            mechanism.change(**options)
    assert not mechanism.hard


def test_a_temperature_by_its_short_name(qkv):
    """``sorting`` calls it so."""
    message = "no option 'temperature'; did you mean 'sort_temperature'"
    with pytest.raises(TypeError, match=message):
        ESP(temperature=0.1)
    with pytest.raises(TypeError, match=message):
        functional.esp_attention(*qkv, temperature=0.1)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temperature", "sort_temperature"),
        ("t", "sort_temperature"),
        ("unit", "temperature_unit"),
        ("tau", "inverse_temperature"),
        ("sort_temprature", "sort_temperature"),
        ("strait_through", "straight_through"),
        ("slices_dropout", "slice_dropout"),
    ],
)
def test_a_misspelt_option_is_not_set_silently(name, meant):
    for esp in (ESP(), ESP(learn_temperature=True).bind(HEADS, WIDTH)):
        for value in (0.1, nn.Parameter(torch.ones(HEADS))):
            with pytest.raises(AttributeError, match=f"no option '{name}', so .* mean '{meant}'"):
                setattr(esp, name, value)
        assert not hasattr(esp, name)


def test_other_attributes_can_be_set(qkv):
    esp = ESP(learn_temperature=True, learn_slice_weights=True).bind(HEADS, WIDTH).double()
    esp.qconfig, esp.ds_id, esp._hidden, esp.temperature_log = None, 3, 4, [0.3]
    esp.extra, esp.weight = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    esp.register_buffer("seen", torch.zeros(()))
    esp.seen = torch.ones(())
    esp.log_sort_temperature = nn.Parameter(esp.log_sort_temperature.detach() + 0.1)
    esp.register_forward_hook(lambda *_: None)
    for name in OPTIONS:
        if name != "sort_temperature":
            setattr(esp, name, getattr(esp, name))
    expected = esp(*qkv)
    file = io.BytesIO()
    del esp._forward_hooks[next(iter(esp._forward_hooks))]  # a lambda cannot be pickled
    torch.save(esp, file)
    file.seek(0)
    for other in (copy.deepcopy(esp), torch.load(file, weights_only=False)):
        assert other.ds_id == 3
        torch.testing.assert_close(other(*qkv), expected)
        other.load_state_dict(esp.state_dict())
        assert not other.eval().training
