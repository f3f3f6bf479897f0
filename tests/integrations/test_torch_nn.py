"""nn.MultiheadAttention with a mechanism, and torch's layers around it."""

import copy

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import espformer
from espformer.integrations import conversion_report
from espformer.nn import ESP, Softmax
from tests.integrations.families import MASK, torch_encoder


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [{}, {"kdim": 5, "vdim": 7}], ids=["same", "kdim-vdim"])
@pytest.mark.parametrize("averaged", [True, False])
@torch.no_grad()
def test_softmax_is_multihead_attention(batch_first, bias, widths, averaged):
    module = nn.MultiheadAttention(12, 3, batch_first=batch_first, bias=bias, **widths).eval()
    query = torch.randn(3, 4, 12)
    key, value = (torch.randn(3, 7, widths.get(name, 12)) for name in ("kdim", "vdim"))
    if not batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    options = {"key_padding_mask": ~MASK, "average_attn_weights": averaged}
    output, weights = module(query, key, value, **options)
    espformer.convert(module, Softmax(), cross=True)
    assert module.training is False
    found, matrix = module(query, key, value, **options)
    torch.testing.assert_close(found, output, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(matrix, weights, atol=1e-6, rtol=1e-5)
    assert module(query, key, value, need_weights=False)[1] is None


@torch.no_grad()
def test_one_sequence_without_a_batch():
    module = nn.MultiheadAttention(12, 3).eval()
    x, padding = torch.randn(7, 12), ~MASK[1]
    output, weights = module(x, x, x, key_padding_mask=padding)
    espformer.convert(module, Softmax())
    found, matrix = module(x, x, x, key_padding_mask=padding)
    torch.testing.assert_close(found[~padding], output[~padding], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(matrix[~padding], weights[~padding], atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_weights_are_the_matrix_that_was_applied():
    module = espformer.convert(nn.MultiheadAttention(12, 3, batch_first=True), ESP(hard=True))
    x = torch.randn(3, 7, 12)
    output, matrix = module(x, x, x, key_padding_mask=~MASK, average_attn_weights=False)
    value = nn.functional.linear(x, *(p[24:] for p in (module.in_proj_weight, module.in_proj_bias)))
    applied = matrix @ value.unflatten(-1, (3, 4)).transpose(1, 2)
    torch.testing.assert_close(module.out_proj(applied.transpose(1, 2).flatten(2)), output)
    for sums in (matrix.sum(-1), matrix.sum(-2)):
        torch.testing.assert_close(sums, MASK[:, None].expand(3, 3, 7).float())


def test_true_means_ignore_in_key_padding_mask():
    module = espformer.convert(nn.MultiheadAttention(12, 3, batch_first=True), ESP())
    x = torch.randn(1, 5, 12)
    padding = torch.tensor([[False, False, False, True, True]])
    changed = x.clone()
    changed[:, 3:] = torch.nan
    short = x[:, :3]
    expected = module(short, short, short)[0]
    for y in (x, changed):
        output = module(y, y, y, key_padding_mask=padding)[0]
        torch.testing.assert_close(output[:, :3], expected)


def test_queries_and_keys_of_self_attention_may_be_different_objects():
    """Copies of one sequence share its padding; cross-attention keeps all queries."""
    module = espformer.convert(nn.MultiheadAttention(12, 3, batch_first=True), ESP())
    x = torch.randn(3, 7, 12, requires_grad=True)
    one = module(x, x, x, key_padding_mask=~MASK)[0]
    torch.testing.assert_close(module(x, x.clone(), x + 0, key_padding_mask=~MASK)[0], one)

    def attend(query, key, value):
        return module(query, key, value, key_padding_mask=~MASK)[0]

    torch.utils.checkpoint.checkpoint(attend, x, x, x, use_reentrant=True).square().sum().backward()
    found, module.in_proj_weight.grad = module.in_proj_weight.grad, None
    attend(x, x, x).square().sum().backward()
    torch.testing.assert_close(found, module.in_proj_weight.grad)
    layer = nn.TransformerDecoderLayer(12, 3, batch_first=True)
    cross = espformer.convert(layer, ESP(), cross=True).multihead_attn
    output = cross(x, torch.randn(3, 7, 12), x, key_padding_mask=~MASK)[0]
    assert not torch.allclose(output[~MASK], cross.out_proj.bias.expand_as(output)[~MASK])


@torch.no_grad()
def test_attn_mask_may_only_be_padding():
    module = espformer.convert(nn.MultiheadAttention(12, 3, batch_first=True), ESP())
    x = torch.randn(2, 5, 12)
    padding = torch.tensor([False, False, False, True, True])
    expected = module(x, x, x, key_padding_mask=padding.expand(2, 5))[0]
    additive = torch.zeros(5).masked_fill(padding, -torch.inf)
    for mask in (padding.expand(5, 5), padding.expand(6, 5, 5), additive.expand(5, 5)):
        torch.testing.assert_close(module(x, x, x, attn_mask=mask)[0], expected)
    nothing = torch.zeros(5, 5, dtype=torch.bool)
    torch.testing.assert_close(module(x, x, x, attn_mask=nothing)[0], module(x, x, x)[0])
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    for options in ({"attn_mask": causal}, {"attn_mask": causal, "is_causal": True}):
        with pytest.raises(ValueError, match="identity"):
            module(x, x, x, **options)
    with pytest.raises(ValueError, match="other than 0 and -inf"):
        module(x, x, x, key_padding_mask=torch.full((2, 5), 0.5))


@pytest.fixture
def no_fused_kernels(monkeypatch):
    def refuse(*_args, **_options):
        raise AssertionError("a fused softmax kernel was called")

    names = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
    for name in (*names, "_nested_tensor_from_mask"):
        monkeypatch.setattr(torch, name, refuse)
    monkeypatch.setattr(nn.functional, "multi_head_attention_forward", refuse)


@pytest.mark.parametrize("where", [None, "layers.0", "layers.1"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_the_fast_path_never_goes_round_the_mechanism(no_fused_kernels, where, autocast):
    model = torch_encoder().eval()
    x = torch.randn(3, 7, 16)
    with torch.inference_mode(), pytest.raises(AssertionError, match="fused"):
        model(x, src_key_padding_mask=~MASK)
    espformer.convert(model, ESP())
    if where is not None:
        # Only one of the layers has a mechanism, and no layer may hand it a nested tensor.
        espformer.revert(model)
        espformer.convert(model, ESP(), where=where)
        other = model.layers[1 if where == "layers.0" else 0]
        other.self_attn = espformer.convert(copy.deepcopy(other.self_attn), Softmax())
    assert model.use_nested_tensor is False
    results = []
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for training in (False, True):
            with mode(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                results.append(model.train(training)(x, src_key_padding_mask=~MASK).detach())
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], atol=1e-6, rtol=1e-5)
    if where is None:
        espformer.revert(model)
        assert model.use_nested_tensor is True


def test_clones_of_a_converted_layer_are_converted(no_fused_kernels):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    espformer.convert(layer, ESP(learn_temperature=True))
    with pytest.warns(UserWarning, match="enable_nested_tensor"):
        model = nn.TransformerEncoder(layer, 2).eval()
    with torch.no_grad():
        model(torch.randn(3, 7, 16), src_key_padding_mask=~MASK)
    temperatures = [layer.self_attn.mechanism.log_sort_temperature for layer in model.layers]
    assert temperatures[0] is not temperatures[1]


@pytest.mark.slow
def test_compiled():
    model = espformer.convert(torch_encoder(), ESP(hard=True)).eval()
    x = torch.randn(3, 7, 16)
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=~MASK)
        found = torch.compile(model, backend="eager")(x, src_key_padding_mask=~MASK)
    torch.testing.assert_close(found, expected)


def test_a_nested_tensor_is_refused():
    model = torch_encoder().eval()
    espformer.convert(model.layers[0], ESP())  # the encoder around it does not know
    with torch.no_grad(), pytest.raises(ValueError, match="convert the whole"):
        model(torch.randn(3, 7, 16), src_key_padding_mask=~MASK)


@torch.no_grad()
def test_decoder_layers_keep_causal_self_attention():
    model = nn.Transformer(16, 2, 1, 2, 32, dropout=0.0, batch_first=True).eval()
    source, target = torch.randn(3, 7, 16), torch.randn(3, 7, 16)
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    options = {"tgt_mask": causal, "src_key_padding_mask": ~MASK, "memory_key_padding_mask": ~MASK}
    before = model(source, target, **options)
    espformer.convert(model, Softmax(), cross=True)
    assert conversion_report(model).left == [f"decoder.layers.{i}.self_attn" for i in (0, 1)]
    # As many targets as sources: the padding of the memory must not mask the targets.
    torch.testing.assert_close(model(source, target, **options), before, atol=1e-5, rtol=1e-5)
    espformer.revert(model)
    espformer.convert(model, ESP())
    assert conversion_report(model).converted == ["encoder.layers.0.self_attn"]
    model(source, target, **options)
