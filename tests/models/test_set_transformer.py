"""Set Transformer: its blocks against their equations, unequal sets, and pooling."""

import pytest
import torch
import torch.nn.functional as F

from espformer.models import ISAB, MAB, PMA, SAB, SetTransformer
from espformer.nn import ESP, Sinkhorn, Softmax
from tests.models.cases import count_parameters


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_mab_is_its_equation():
    block = MAB(16, 4, Softmax())
    x, y = draw(2, 3, 16), draw(2, 7, 16, seed=1)
    reference = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    attention = block.attn
    with torch.no_grad():
        reference.in_proj_weight.copy_(torch.cat([attention.q.weight, attention.kv.weight]))
        reference.in_proj_bias.copy_(torch.cat([attention.q.bias, attention.kv.bias]))
    reference.out_proj = attention.proj
    h = block.norm1(x + reference(x, y, y)[0])
    expected = block.norm2(h + F.relu(block.fc(h)))
    torch.testing.assert_close(block(x, y), expected)


def test_blocks_are_made_of_mabs():
    x = draw(2, 7, 16)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    sab = SAB(16, 4)
    torch.testing.assert_close(sab(x, mask), sab.mab(x, x, mask, mask))
    isab = ISAB(16, 4, inducing_points=3)
    points = isab.inducing_points.expand(2, -1, -1)
    gathered = isab.gather(points, x, context_mask=mask)
    torch.testing.assert_close(isab(x, mask), isab.spread(x, gathered, mask=mask))
    pma = PMA(16, 4, seeds=2)
    seeds = pma.seeds.expand(2, -1, -1)
    torch.testing.assert_close(pma(x, mask), pma.mab(seeds, x, context_mask=mask))


def test_as_many_inducing_points_as_points():
    """The mask of the points must not spill over to the inducing points."""
    block = ISAB(16, 4, ESP(), inducing_points=7).eval()
    x = draw(2, 7, 16)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    alone = block(x[1:, :4])
    torch.testing.assert_close(block(x, mask)[1:, :4], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mechanism", [ESP(balance="both"), ESP(hard=True), Sinkhorn(21)])
def test_one_seed_of_a_doubly_stochastic_mechanism_is_the_mean(mechanism):
    block = PMA(16, 4, mechanism, seeds=1)
    x = draw(2, 7, 16)
    matrix = block.mab.attn(block.seeds.expand(2, -1, -1), x, return_matrix=True)[1]
    torch.testing.assert_close(matrix, torch.full_like(matrix, 1 / 7), rtol=0, atol=1e-4)


def test_size():
    dim = 256
    mab = 4 * (dim + 1) * dim + (dim + 1) * dim + 4 * dim
    expected = 4 * dim + 2 * (2 * mab + 16 * dim) + (mab + 4 * dim) + mab + 40 * (4 * dim + 1)
    with torch.device("meta"):
        assert count_parameters(SetTransformer()) == expected
        plain = SetTransformer(layer_norm=False)
        assert count_parameters(plain) == expected - 6 * 4 * dim
    assert not any("norm" in name for name in plain.state_dict())


def test_points_of_another_width():
    with pytest.raises(ValueError, match=r"\(batch, points, 3\), got \(2, 9, 4\)"):
        SetTransformer(dim=16)(torch.randn(2, 9, 4))
