"""Padded batches attended to in packed form: what the base gives, for fewer tokens."""

import copy

import pytest
import torch

from espformer.integrations.settings import mechanism_from_settings, settings_of
from espformer.nn import ESP, Attention, ClassToken, Differential, Packed, Sinkhorn, Softmax
from espformer.ops.common import packing

MASK = torch.arange(9) < torch.tensor([[9], [3], [0], [5], [4]])
HOLES = MASK & (torch.arange(9) != 1)
BASES = {
    "softmax": Softmax(),
    "sinkhorn": Sinkhorn(),
    "soft": ESP(learn_temperature=True, slicer="learnable", slices=3),
    "hard": ESP(hard=True),
    "class-token": ClassToken(ESP()),
    "differential": Differential(ESP()),
}


@pytest.fixture(autouse=True)
def _several_groups(monkeypatch):
    packing._groups.cache_clear()
    monkeypatch.setattr(packing, "CALL_TOKENS", {"cpu": 2, "cuda": 2})


def results(mechanism, qkv, upstream, **masks):
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = mechanism(*leaves, **masks)
    parameters = [*leaves, *mechanism.parameters()]
    grads = torch.autograd.grad(
        out, parameters, upstream, allow_unused=True, materialize_grads=True
    )
    return [out.detach(), *grads]


@pytest.mark.parametrize("masks", ["keys", "both", "each", "queries", "holes"])
@pytest.mark.parametrize("name", BASES)
def test_it_is_its_base(name, masks):
    torch.manual_seed(0)
    base = BASES[name].bind(2, 4).double()
    qkv = torch.randn(3, 5, 2, 9, 4, dtype=torch.float64).unbind()
    upstream = torch.randn(5, 2, 9, 4, dtype=torch.float64)
    if name == "class-token" and masks in ("each", "queries", "keys"):
        pytest.skip("a class token stands first on both sides")
    given = {
        "keys": {"query_mask": torch.ones_like(MASK), "key_mask": MASK},
        "both": {"query_mask": MASK, "key_mask": MASK},
        "each": {"query_mask": MASK.flip(0), "key_mask": MASK},
        "queries": {"query_mask": MASK},
        "holes": {"query_mask": HOLES, "key_mask": HOLES},
    }[masks]
    got = results(Packed(base), qkv, upstream, **given)
    want = results(base, qkv, upstream, **given)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)
    matrices = [m.matrix(*qkv[:2], **given) for m in (Packed(base), base)]
    torch.testing.assert_close(*matrices)


def test_only_tokens_that_take_part_are_attended_to(monkeypatch):
    seen = []
    monkeypatch.setattr(
        Softmax, "forward", lambda self, q, k, v, **masks: seen.append(q.shape[0] * q.shape[2]) or v
    )
    x = torch.randn(5, 2, 9, 4)
    Packed(Softmax())(x, x, x, query_mask=MASK, key_mask=MASK)
    assert seen == [15, 9]  # of 45: three sequences padded to 5 tokens, and one of 9
    seen.clear()
    Packed(Softmax())(x, x, x)  # no mask
    by_head = MASK.unsqueeze(1).expand(-1, 2, -1)
    Packed(Softmax())(x, x, x, query_mask=by_head, key_mask=by_head)
    assert seen == [45, 45]


def test_in_a_layer_in_a_configuration_and_what_it_refuses():
    layer = Attention(8, 2, Packed(ESP(learn_temperature=True)))
    layer(torch.randn(5, 9, 8), mask=MASK).sum().backward()
    assert layer.mechanism.base.log_sort_temperature.grad is not None
    again = mechanism_from_settings(settings_of(Packed(Sinkhorn(iterations=5))))
    assert isinstance(again, Packed)
    assert again.base.iterations == 5
    with pytest.raises(TypeError, match="base must be a mechanism"):
        Packed("esp")


def test_inside_a_model_of_transformers():
    transformers = pytest.importorskip("transformers")
    import espformer

    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    outputs = []
    for mechanism in (ESP(slicer="axis"), Packed(ESP(slicer="axis"))):
        torch.manual_seed(0)
        model = transformers.BertModel(copy.deepcopy(config)).double().eval()
        espformer.convert(model, mechanism)
        mask = MASK[[0, 1, 3, 4]]
        ids = torch.randint(1, 30, mask.shape, generator=torch.Generator().manual_seed(0))
        hidden = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        outputs.append(hidden[mask])
    torch.testing.assert_close(*outputs, rtol=1e-8, atol=1e-9)


def test_compiled_it_is_padded():
    x = torch.randn(5, 2, 9, 4)
    mechanism = Packed(Softmax())
    compiled = torch.compile(mechanism, fullgraph=True, backend="eager")
    masks = {"query_mask": MASK, "key_mask": MASK}
    torch.testing.assert_close(compiled(x, x, x, **masks), mechanism(x, x, x, **masks))
