"""convert itself: what it chooses, what it reports, what it refuses."""

import re

import pytest
import torch
from torch import nn

import espformer
from espformer.integrations import conversion_report
from espformer.integrations.settings import mechanism_from_settings, settings_of
from espformer.models.decoder import DecoderBlock
from espformer.nn import ESP, Attention, Differential, FrozenSlicer, Sinkhorn, Softmax, Uniform
from tests.integrations.families import make, torch_encoder


def encoder(layers: int = 12) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.ModuleDict({"encoder": nn.TransformerEncoder(layer, layers)})


@pytest.mark.parametrize(
    ("where", "chosen"),
    [
        ("encoder.layers.[0-5]", [0, 1, 2, 3, 4, 5]),
        ("encoder.layers.1", [1]),
        ("encoder.layers.1*", [1, 10, 11]),
        ("*.3.self_attn", [3]),
        ("encoder", list(range(12))),
        (re.compile(r"layers\.1\d\."), [10, 11]),
        (lambda name, module: name.endswith("2.self_attn"), [2]),
    ],
    ids=["range", "name", "prefix", "suffix", "whole", "regex", "callable"],
)
def test_where_chooses_layers(where, chosen):
    model = espformer.convert(encoder(), ESP(), where=where)
    report = conversion_report(model)
    assert report.converted == [f"encoder.layers.{index}.self_attn" for index in chosen]
    assert len(report.left) == 12 - len(chosen)
    assert {row.reason for row in report.rows} <= {"ESP", "not chosen by where"}


def test_report_is_a_table():
    model = espformer.convert(make("bart"), ESP())
    table = str(conversion_report(model)).splitlines()
    assert table[0].split() == ["module", "kind", "heads", "action", "reason"]
    assert len(table) == 1 + 6
    rows = {row.module: row for row in conversion_report(model).rows}
    causal = rows["decoder.layers.0.self_attn"]
    assert (causal.kind, causal.heads, causal.action) == ("BartAttention", 2, "left")
    assert "identity" in causal.reason
    assert "cross=True" in rows["decoder.layers.0.encoder_attn"].reason
    assert rows["encoder.layers.1.self_attn"].action == "converted"


def test_calls_add_up():
    model = espformer.convert(torch_encoder(), ESP(), where="layers.0")
    espformer.convert(model, Softmax(), where="layers.1")
    kinds = [type(layer.self_attn.mechanism) for layer in model.layers]
    assert kinds == [ESP, Softmax]
    assert [row.reason for row in conversion_report(model).rows] == [
        "not chosen by where, keeps ESP",
        "Softmax",
    ]


def test_an_unconverted_model_has_no_report():
    with pytest.raises(ValueError, match="was not converted"):
        conversion_report(nn.Linear(2, 2))


class OddAttention(nn.Module):
    """Attention of a kind that nobody knows."""


@pytest.mark.parametrize(
    ("model", "where", "message"),
    [
        (nn.Linear(2, 2), None, "no attention modules"),
        (nn.Sequential(OddAttention()), None, "0 .*OddAttention .*left .*not a kind of attention"),
        (torch_encoder(), "encoder.*", r"where='encoder\.\*'(.|\n)*layers\.0\.self_attn"),
        (nn.MultiheadAttention(8, 2, add_bias_kv=True), None, "add_bias_kv"),
        (nn.MultiheadAttention(8, 2, add_zero_attn=True), None, "add_zero_attn"),
        (nn.TransformerDecoderLayer(8, 2), None, "self_attn(.|\n)*causal(.|\n)*cross=True"),
    ],
    ids=["none", "unknown", "where", "bias-kv", "zero-attn", "decoder"],
)
def test_nothing_to_convert_lists_what_was_seen(model, where, message):
    with pytest.raises(ValueError, match=message):
        espformer.convert(model, ESP(), where=where)


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"convert: model must be a torch\.nn\.Module, got list"):
        espformer.convert([torch.nn.Linear(2, 2)], ESP())
    with pytest.raises(TypeError, match="such as espformer"):
        espformer.convert(torch_encoder(), "ESP")
    with pytest.raises(TypeError, match="where must be a pattern"):
        espformer.convert(torch_encoder(), ESP(), where=3)
    with pytest.raises(TypeError, match=r"model comes first, .* convert\(model, ESP\(\)\)"):
        espformer.convert(ESP(), nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"such as espformer.nn.ESP\(\), got Linear$"):
        espformer.convert(nn.Linear(2, 2), nn.Linear(2, 2))


def test_a_model_is_converted_whole_or_not_at_all():
    """The second module has an odd number of heads, which come in pairs here."""
    model = nn.ModuleList([nn.MultiheadAttention(12, 2), nn.MultiheadAttention(12, 3)])
    with pytest.raises(ValueError, match="heads must be even"):
        espformer.convert(model, Differential(ESP()))
    assert all(type(module) is nn.MultiheadAttention for module in model)


def test_own_layers_change_their_mechanism_and_decoders_are_left():
    model = nn.ModuleDict({"a": Attention(8, 2, Sinkhorn()), "d": DecoderBlock(8, 2, mlp_dim=16)})
    x = torch.randn(2, 5, 8)
    before, sinkhorn = model["a"](x), model["a"].mechanism
    espformer.convert(model, ESP(sort_temperature=0.3), cross=True)
    report = conversion_report(model)
    assert report.converted == ["a"]
    assert report.left == ["d.self_attn", "d.cross_attn"]
    assert all("decoder" in row.reason for row in report.rows[1:])
    assert isinstance(model["a"].mechanism, ESP)
    espformer.revert(model)
    assert model["a"].mechanism is sinkhorn
    assert torch.equal(model["a"](x), before)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("mechanism", [ESP(learn_slice_weights=True), Differential(Sinkhorn())])
def test_own_layers_with_queries_of_another_width_than_their_values(mechanism, cross):
    layer = Attention(32, 4, Softmax(), qk_dim=4, cross=cross)
    inputs = (torch.randn(2, 6, 32),) * (2 if cross else 1)
    before = layer(*inputs)
    built = Attention(32, 4, mechanism, qk_dim=4, cross=cross)
    espformer.convert(layer, mechanism, cross=cross)
    built.load_state_dict(layer.state_dict())
    assert torch.equal(layer(*inputs), built(*inputs))
    assert torch.equal(espformer.revert(layer)(*inputs), before)


def test_slices_of_a_wrong_width_leave_own_layers_as_they_were():
    """The slices have the width of the values, not of the queries."""
    model = nn.ModuleList([Attention(32, 4, Softmax()), Attention(32, 4, Softmax(), qk_dim=4)])
    with pytest.raises(ValueError, match=r"expected \(slices, 4\)"):
        espformer.convert(model, ESP(slicer=FrozenSlicer(3, 8)))
    assert all(isinstance(layer.mechanism, Softmax) for layer in model)


def test_depth_reaches_the_mechanism():
    model = espformer.convert(torch_encoder(), Differential(Softmax(), lambda_init="depth"))
    first, second = (model.layers[i].self_attn.mechanism.lambda_init for i in (0, 1))
    assert first < second


@pytest.mark.parametrize(
    "mechanism",
    [
        ESP(),
        ESP(
            sort_temperature=0.3,
            inverse_temperature=0.0,
            metric="squared",
            hard=True,
            slicer="learnable",
            slices=3,
        ),
        Sinkhorn(5, scale=0.2),
        Softmax(dropout=0.1),
        Uniform(),
        Differential(ESP(balance="both"), lambda_init="depth"),
    ],
    ids=lambda mechanism: type(mechanism).__name__,
)
def test_settings_describe_a_mechanism(mechanism):
    settings = settings_of(mechanism)
    again = mechanism_from_settings(settings)
    assert repr(again) == repr(mechanism)
    assert settings_of(again) == settings
    assert settings_of(mechanism.bind(2, 4)) == settings


def test_wrong_settings():
    with pytest.raises(ValueError, match="name must be one of"):
        mechanism_from_settings({"name": "Flash"})
    with pytest.raises(ValueError, match="temprature"):
        mechanism_from_settings({"sort_temprature": 0.1})
