"""A class token that reads by softmax, beside tokens that match."""

import pytest
import torch

from espformer.nn import ESP, Attention, ClassToken, Softmax


@pytest.fixture
def qkv():
    torch.manual_seed(0)
    return torch.randn(3, 2, 4, 7, 8, dtype=torch.float64).unbind()


def test_the_first_token_reads_by_softmax_and_the_others_match(qkv):
    query, key, value = qkv
    out = ClassToken(ESP()).bind(4, 8)(query, key, value)
    torch.testing.assert_close(out[..., :1, :], Softmax()(query, key, value)[..., :1, :])
    others = [x[..., 1:, :] for x in qkv]
    torch.testing.assert_close(out[..., 1:, :], ESP()(*others))


def test_its_matrix_makes_its_output(qkv):
    mechanism = ClassToken(ESP(hard=True)).bind(4, 8)
    mask = torch.arange(7) < torch.tensor([7, 4])[:, None]
    for masks in ({}, {"query_mask": mask}, {"query_mask": mask, "key_mask": mask}):
        matrix = mechanism.matrix(*qkv[:2], **masks)
        torch.testing.assert_close(matrix @ qkv[2], mechanism(*qkv, **masks))
    torch.testing.assert_close(matrix[0].sum(-1), torch.ones(4, 7).double())


def test_padding_changes_nothing(qkv):
    mechanism = ClassToken(ESP()).bind(4, 8)
    mask = torch.arange(7) < torch.tensor([7, 4])[:, None]
    padded = mechanism(*qkv, query_mask=mask, key_mask=mask)
    alone = mechanism(*(x[1:, :, :4] for x in qkv))
    torch.testing.assert_close(padded[1:, :, :4], alone)
    assert not padded[1, :, 4:].any()


def test_the_mask_of_self_attention_stays_one_tensor(qkv):
    """So that the base knows, without reading it, that there are as many queries as keys."""
    seen = []

    class Spy(ESP):
        def forward(self, query, key, value, *, query_mask=None, key_mask=None):
            seen.append((query_mask, key_mask))
            return value

    mask = torch.arange(7) < torch.tensor([7, 4])[:, None]
    for masks in ((mask, mask), (mask, mask.clone())):
        ClassToken(Spy())(*qkv, query_mask=masks[0], key_mask=masks[1])
    (one, same), (first, second) = seen
    assert one is same
    assert first is not second
    assert all(torch.equal(x, mask[:, 1:]) for x in (one, first, second))


def test_in_a_layer_and_what_it_refuses(qkv):
    layer = Attention(32, 4, ClassToken(ESP(learn_temperature=True)))
    layer(torch.randn(2, 5, 32)).sum().backward()
    assert layer.mechanism.base.log_sort_temperature.grad is not None
    with pytest.raises(TypeError, match="base must be a mechanism"):
        ClassToken("esp")
    with pytest.raises(ValueError, match="tokens beside the class token"):
        ClassToken(ESP())(*(x[..., :1, :] for x in qkv))
