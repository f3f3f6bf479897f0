"""The attention layer: against torch's, with timm's weights, masks and mistakes."""

import pytest
import torch
from torch import Tensor, nn

from espformer.nn import ESP, Attention, Differential, Sinkhorn, Softmax

MECHANISMS = {
    "softmax": Softmax(),
    "sinkhorn": Sinkhorn(4),
    "esp": ESP(learn_temperature=True),
    "esp-hard": ESP(hard=True),
    "differential": Differential(ESP(slicer="frozen")),
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("bias", [True, False])
def test_softmax_self_attention_is_torchs(bias):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(12, 3, bias=bias, batch_first=True).double()
    ours = Attention(12, 3, Softmax(), qkv_bias=bias, proj_bias=bias).double()
    weights = {"qkv.weight": theirs.in_proj_weight, "proj.weight": theirs.out_proj.weight}
    if bias:
        nn.init.normal_(theirs.in_proj_bias)
        nn.init.normal_(theirs.out_proj.bias)
        weights |= {"qkv.bias": theirs.in_proj_bias, "proj.bias": theirs.out_proj.bias}
    ours.load_state_dict(weights)
    x = draw(2, 7, 12)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    expected, matrix = theirs(x, x, x, key_padding_mask=~mask, average_attn_weights=False)
    got, got_matrix = ours(x, mask=mask, return_matrix=True)
    present = mask[..., None].expand_as(got)
    torch.testing.assert_close(got[present], expected[present])
    rows = mask[:, None, :, None].expand_as(matrix)
    torch.testing.assert_close(got_matrix[rows], matrix[rows])
    padded = torch.zeros(12).double() if theirs.out_proj.bias is None else theirs.out_proj.bias
    torch.testing.assert_close(got[1, 4:], padded.expand(3, 12))


def test_softmax_cross_attention_is_torchs():
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(12, 3, kdim=10, vdim=10, batch_first=True).double()
    nn.init.normal_(theirs.in_proj_bias)
    ours = Attention(12, 3, Softmax(), cross=True, key_dim=10).double()
    bias = theirs.in_proj_bias
    ours.load_state_dict(
        {
            "q.weight": theirs.q_proj_weight,
            "q.bias": bias[:12],
            "kv.weight": torch.cat([theirs.k_proj_weight, theirs.v_proj_weight]),
            "kv.bias": bias[12:],
            "proj.weight": theirs.out_proj.weight,
            "proj.bias": theirs.out_proj.bias,
        }
    )
    x, context = draw(2, 5, 12), draw(2, 8, 10, seed=1)
    context_mask = torch.arange(8) < torch.tensor([[8], [3]])
    expected, _ = theirs(x, context, context, key_padding_mask=~context_mask)
    torch.testing.assert_close(ours(x, context, context_mask=context_mask), expected)


class Block(nn.Module):
    """A block with the parameter names of timm's Vision Transformer."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)


def test_loads_weights_in_the_layout_of_timm():
    torch.manual_seed(0)
    state = {
        "norm1.weight": torch.randn(12),
        "norm1.bias": torch.randn(12),
        "attn.qkv.weight": torch.randn(36, 12),
        "attn.qkv.bias": torch.randn(36),
        "attn.proj.weight": torch.randn(12, 12),
        "attn.proj.bias": torch.randn(12),
    }
    block = Block(12, 3)
    block.load_state_dict(state, strict=True)
    x = torch.randn(2, 5, 12)
    # timm: qkv(x).reshape(B, N, 3, heads, head_dim).permute(2, 0, 3, 1, 4)
    qkv = x @ state["attn.qkv.weight"].T + state["attn.qkv.bias"]
    q, k, v = qkv.reshape(2, 5, 3, 3, 4).permute(2, 0, 3, 1, 4).unbind(0)
    out = ESP()(q, k, v).transpose(1, 2).reshape(2, 5, 12)
    expected = out @ state["attn.proj.weight"].T + state["attn.proj.bias"]
    torch.testing.assert_close(block.attn(x), expected)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("padding_value", [1e3, torch.nan])
def test_padded_batch_is_each_sequence_alone(name, padding_value):
    torch.manual_seed(0)
    layer = Attention(12, 2, MECHANISMS[name]).double()
    lengths = [6, 4, 1]
    x = draw(3, 6, 12)
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    out, matrix = layer(
        x.masked_fill(~mask[..., None], padding_value), mask=mask, return_matrix=True
    )
    for b, n in enumerate(lengths):
        alone, alone_matrix = layer(x[b : b + 1, :n], return_matrix=True)
        torch.testing.assert_close(out[b : b + 1, :n], alone, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(matrix[b : b + 1, :, :n, :n], alone_matrix, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", MECHANISMS)
def test_context_mask_masks_the_context_only(name):
    """Also when the context is as long as x."""
    torch.manual_seed(0)
    layer = Attention(12, 2, MECHANISMS[name], cross=True).double()
    x, context = draw(2, 6, 12), draw(2, 6, 12, seed=1)
    context_mask = torch.arange(6) < torch.tensor([[6], [4]])
    out = layer(x, context, context_mask=context_mask)
    alone = layer(x[1:], context[1:, :4])
    torch.testing.assert_close(out[1:], alone, rtol=1e-7, atol=1e-9)


def test_masks_of_both_sides():
    torch.manual_seed(0)
    layer = Attention(12, 2, ESP(), cross=True, key_dim=10).double()
    x, context = draw(2, 6, 12), draw(2, 9, 10, seed=1)
    out = layer(
        x,
        context,
        mask=torch.arange(6) < torch.tensor([[6], [5]]),
        context_mask=torch.arange(9) < torch.tensor([[9], [4]]),
    )
    alone = layer(x[1:, :5], context[1:, :4])
    torch.testing.assert_close(out[1:, :5], alone, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("differential", [False, True], ids=["esp", "differential"])
def test_padded_self_attention_needs_no_coupling(monkeypatch, differential):
    """As many queries as keys in every sequence: pieces of ranks would double the work."""
    monkeypatch.setattr("espformer.ops.esp.linear.couple", None)
    esp = ESP(backend="linear")
    mask = torch.arange(5) < torch.tensor([[5], [3]])
    layer = Attention(8, 2, mechanism=Differential(esp, 0.5) if differential else esp)
    x = torch.randn(2, 5, 8)
    found = layer(x, mask=mask)
    esp.backend = "dense"
    torch.testing.assert_close(found, layer(x, mask=mask))


def test_permutation_equivariance():
    torch.manual_seed(0)
    layer = Attention(12, 2).double()
    x, order = draw(2, 9, 12), torch.randperm(9)
    torch.testing.assert_close(layer(x[:, order]), layer(x)[:, order], rtol=1e-7, atol=1e-9)


def test_default_mechanism_is_esp():
    layer = Attention(16)
    assert isinstance(layer.mechanism, ESP)
    assert (layer.mechanism.heads, layer.mechanism.head_dim) == (8, 2)


def test_one_mechanism_for_many_layers():
    spec = ESP(learn_temperature=True)
    layers = nn.ModuleList(Attention(12, 2, spec) for _ in range(3))
    pointers = {p.data_ptr() for p in layers.parameters()}
    assert len(pointers) == len(list(layers.parameters())) == 3 * 5


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 3 * 12 * 12 + 36 + 12 * 12 + 12),
        ({"qkv_bias": False, "proj_bias": False}, 4 * 12 * 12),
        ({"head_dim": 5}, 3 * 12 * 10 + 30 + 10 * 12 + 12),
        ({"cross": True, "key_dim": 7}, 12 * 12 + 12 + 7 * 24 + 24 + 12 * 12 + 12),
    ],
)
def test_number_of_parameters(options, expected):
    for mechanism in (Softmax(), Sinkhorn(), ESP()):
        layer = Attention(12, 2, mechanism, **options)
        assert sum(p.numel() for p in layer.parameters()) == expected


def test_head_dim_of_its_own():
    x = draw(2, 5, 12)
    out, matrix = Attention(12, 3, head_dim=5).double()(x, return_matrix=True)
    assert out.shape == (2, 5, 12)
    assert matrix.shape == (2, 3, 5, 5)


def test_dropout_on_the_output():
    torch.manual_seed(0)
    layer = Attention(12, 2, dropout=0.5).double()
    x = draw(4, 9, 12)
    share = (layer.train()(x) == 0).double().mean()
    assert 0.4 < share < 0.6
    assert (layer.eval()(x) != 0).all()


@pytest.mark.parametrize("name", MECHANISMS)
def test_bfloat16_autocast_and_cast_train(name):
    torch.manual_seed(0)
    layer = Attention(32, 2, MECHANISMS[name])
    x = torch.randn(2, 9, 32)
    expected = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    grads, wanted = (
        torch.autograd.grad(
            y.float().square().mean(), tuple(layer.parameters()), allow_unused=True,
            materialize_grads=True,
        )
        for y in (out, expected)
    )  # fmt: skip
    whole = torch.cat([want.flatten() for want in wanted]).norm()
    for found, want in zip(grads, wanted, strict=True):
        assert (found - want).norm() < 0.1 * whole
    half = layer.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    if name != "esp-hard":  # rounding changes ranks, and with them a permutation
        torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)
        torch.testing.assert_close(half.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", MECHANISMS)
def test_state_dict_round_trip(name):
    first, second = (Attention(12, 2, MECHANISMS[name]).double() for _ in range(2))
    x = draw(2, 5, 12)
    assert not torch.equal(first(x), second(x))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x), second(x))


def test_compiles_without_graph_breaks():
    torch._dynamo.reset()
    layer = Attention(12, 2, Sinkhorn(3)).double()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    x, mask = draw(2, 5, 12), torch.arange(5) < torch.tensor([[5], [3]])
    torch.testing.assert_close(compiled(x, mask=mask), layer(x, mask=mask))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"heads": 5}, ValueError, r"multiple of heads, got dim=12 and heads=5"),
        ({"heads": 0}, ValueError, r"multiple of heads, got dim=12 and heads=0"),
        ({"heads": 2, "key_dim": 6}, ValueError, r"key_dim=6.*cross=True"),
        ({"heads": 2.0}, TypeError, r"heads must be an integer, got 2\.0"),
        ({"heads": 2, "qk_dim": "4"}, TypeError, r"qk_dim must be an integer, got '4'"),
        ({"heads": 2, "mechanism": ESP}, TypeError, r"such as espformer\.nn\.ESP\(\)"),
        ({"heads": 2, "mechanism": "esp"}, TypeError, r"such as .*got 'esp'"),
    ],
)
def test_mistakes_of_construction_are_named(options, error, message):
    with pytest.raises(error, match=message):
        Attention(12, **options)


def test_mistakes_of_calls_are_named():
    layer, cross = Attention(12, 2), Attention(12, 2, cross=True, key_dim=7)
    x, context = torch.randn(2, 5, 12), torch.randn(2, 6, 7)
    with pytest.raises(ValueError, match=r"x must have shape \(batch, tokens, 12\).*unsqueeze"):
        layer(x[0])
    with pytest.raises(ValueError, match=r"x must have shape \(batch, tokens, 12\), got \(2, 6, 7"):
        layer(context)
    with pytest.raises(ValueError, match=r"context, but this is self-attention"):
        layer(x, x)
    with pytest.raises(ValueError, match=r"needs a context"):
        cross(x)
    with pytest.raises(ValueError, match=r"context must have shape \(batch, tokens, 7\)"):
        cross(x, x)
    with pytest.raises(ValueError, match=r"same batch"):
        cross(x, context[:1])
    with pytest.raises(ValueError, match=r"mask must be boolean"):
        layer(x, mask=torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"context_mask, but this is self-attention"):
        layer(x, context_mask=torch.ones(2, 5, dtype=torch.bool))


def test_repr_tells_the_sizes():
    text = repr(Attention(12, 2, cross=True, key_dim=7))
    assert "dim=12, heads=2, head_dim=6, cross=True, key_dim=7" in text


@pytest.mark.parametrize("cross", [False, True])
def test_queries_and_keys_narrower_than_values(cross):
    layer = Attention(32, 4, ESP(), qk_dim=3, cross=cross, head_dim=5).double()
    x = torch.randn(2, 6, 32, dtype=torch.float64)
    weights = [layer.q, layer.kv] if cross else [layer.qkv]
    assert sum(w.out_features for w in weights) == 4 * (3 + 3 + 5)
    projected = torch.cat([w(x) for w in weights], -1)
    widths = (12, 12, 20)
    q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in projected.split(widths, -1))
    expected = layer.proj(ESP()(q, k, v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, x) if cross else layer(x), expected)


@pytest.mark.parametrize("cross", [False, True])
def test_keys_that_begin_as_queries(cross):
    layer = Attention(32, 4, ESP(hard=True), key_init="query", cross=cross)
    x = torch.randn(2, 6, 32)
    _, matrix = layer(x, *([x] if cross else []), return_matrix=True)
    torch.testing.assert_close(matrix, torch.eye(6).expand_as(matrix))
    # The matrix does not see a bias, which shifts all keys alike.
    query, key = layer._project(x, x if cross else None)[:2]
    assert torch.equal(query, key)


def test_widths_and_beginnings_that_cannot_be():
    with pytest.raises(ValueError, match="qk_dim must be at least 1"):
        Attention(32, 4, qk_dim=0)
    with pytest.raises(ValueError, match="needs queries and keys from tokens of the same width"):
        Attention(32, 4, key_init="query", cross=True, key_dim=16)
    with pytest.raises(ValueError, match="key_init must be one of 'own', 'query'"):
        Attention(32, 4, key_init="random")


def test_a_mask_that_is_not_passed_by_name_is_told():
    with pytest.raises(ValueError, match=r"self-attention \(pass a mask as mask=") as told:
        Attention(12, 2)(torch.randn(2, 3, 12), torch.ones(2, 3, dtype=torch.bool))
    assert "cross=True" not in str(told.value)
