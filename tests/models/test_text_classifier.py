"""Text classifier: against torch's own encoder layer, its padding and its sizes."""

import math

import pytest
import torch
from torch import nn

from espformer.models import TextClassifier
from espformer.models.blocks import masked_max, masked_mean, sinusoidal_positions
from espformer.nn import ESP, Differential, Sinkhorn, Softmax
from espformer.ops.common.packing import Packing
from tests.models.cases import count_parameters


def torch_layer(block, heads):
    """torch.nn's post-norm encoder layer with the weights of a block."""
    layer = nn.TransformerEncoderLayer(
        block.attn.dim, heads, block.mlp.fc1.out_features, dropout=0.0, batch_first=True
    )
    layer.self_attn.in_proj_weight = block.attn.qkv.weight
    layer.self_attn.in_proj_bias = block.attn.qkv.bias
    layer.self_attn.out_proj = block.attn.proj
    layer.linear1, layer.linear2 = block.mlp.fc1, block.mlp.fc2
    layer.norm1, layer.norm2 = block.norm1, block.norm2
    return layer


def test_against_the_encoder_of_torch():
    torch.manual_seed(0)
    model = TextClassifier(
        vocabulary=11, dim=16, depth=3, heads=4, mlp_dim=24, dropout=0.0, mechanism=Softmax()
    )
    tokens = torch.tensor([[3, 5, 7, 2, 9], [4, 1, 0, 0, 0]])
    present = tokens != 0
    x = model.embedding(tokens) + sinusoidal_positions(5, 16)
    for block in model.blocks:
        x = torch_layer(block, 4)(x, src_key_padding_mask=~present)
    pooled = torch.stack([x[0].amax(0), x[1, :2].amax(0)])
    torch.testing.assert_close(model(tokens), model.head(pooled), rtol=1e-4, atol=1e-5)


def test_positions():
    table = sinusoidal_positions(50, 7)
    assert table.shape == (50, 7)
    assert table[13, 4].item() == pytest.approx(math.sin(13 / 10000 ** (4 / 7)), abs=1e-5)
    assert table[13, 5].item() == pytest.approx(math.cos(13 / 10000 ** (4 / 7)), abs=1e-5)


def test_the_mask_is_made_of_padding_unless_given():
    model = TextClassifier(vocabulary=11, dim=16, depth=1, heads=2, mlp_dim=16, pad_id=4).eval()
    tokens = torch.tensor([[3, 5, 4, 4], [1, 2, 3, 6]])
    torch.testing.assert_close(model(tokens), model(tokens, tokens != 4))
    assert not torch.allclose(model(tokens), model(tokens, torch.ones(2, 4, dtype=torch.bool)))


def test_size_of_the_model_of_the_paper():
    dim, hidden = 256, 1024
    block = 4 * (dim + 1) * dim + (dim + 1) * hidden + (hidden + 1) * dim + 4 * dim
    with torch.device("meta"):
        model = TextClassifier(vocabulary=16000)
    assert count_parameters(model) == 16000 * dim + 6 * block + 2 * (dim + 1)
    assert "positions" not in model.state_dict()


def test_longer_than_the_model():
    model = TextClassifier(vocabulary=11, dim=16, depth=1, max_length=4)
    with pytest.raises(ValueError, match="longer than max_length=4"):
        model(torch.ones(1, 5, dtype=torch.long))


def test_pooling_ignores_padding_and_empty_sequences():
    x = torch.tensor([[[1.0, -4.0], [3.0, -2.0], [torch.nan, torch.nan]], [[7.0, 7.0]] * 3])
    mask = torch.tensor([[True, True, False], [False] * 3])
    assert masked_max(x, mask).tolist() == [[3.0, -2.0], [0.0, 0.0]]
    assert masked_mean(x, mask).tolist() == [[2.0, -3.0], [0.0, 0.0]]
    x = x[1:].clone().requires_grad_()
    long = torch.full((1, 2000, 3), 60.0, dtype=torch.float16)  # its sum is beyond float16
    assert torch.equal(masked_mean(long, torch.ones(1, 2000, dtype=torch.bool)), long[:, 0])
    (masked_max(x, mask[1:]) + masked_mean(x, mask[1:])).sum().backward()
    assert (x.grad == 0).all()


@pytest.mark.parametrize(
    "mechanism", [Softmax(), Sinkhorn(), ESP(), ESP(hard=True), Differential(Softmax())], ids=str
)
def test_packed_logits_and_gradients_are_those_of_the_padded_batch(mechanism):
    """Full, empty and short texts, and padding in the middle; every parameter."""
    torch.manual_seed(0)
    model = TextClassifier(
        vocabulary=11, dim=16, depth=2, heads=2, mlp_dim=24, dropout=0.0, mechanism=mechanism
    ).double()
    tokens = torch.randint(1, 11, (5, 7))
    tokens[1, 3:], tokens[2], tokens[3, 2:4] = 0, 0, 0
    grads = []
    for packed in (False, True):
        model.packed = packed
        logits = model(tokens)
        grads.append(
            (
                logits,
                *torch.autograd.grad(
                    logits.square().sum(),
                    list(model.parameters()),
                    allow_unused=True,
                    materialize_grads=True,
                ),
            )
        )
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)
    assert [m.shape for m in model.attention_matrices(tokens)] == [(5, 2, 7, 7)] * 2
    assert model.packed


def test_packed_tokens_attend_to_themselves():
    model = TextClassifier(vocabulary=11, dim=16, depth=1, heads=2, mlp_dim=24)
    layer, packing = model.blocks[0].attn, Packing([0, 2, 5], device="cpu")
    with pytest.raises(ValueError, match="self-attention only, without return_matrix"):
        layer(torch.randn(5, 16), mask=packing, return_matrix=True)
    with pytest.raises(ValueError, match=r"packed x must have shape \(tokens, 16\)"):
        layer(torch.randn(1, 5, 16), mask=packing)
