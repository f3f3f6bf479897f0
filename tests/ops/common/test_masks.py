"""Padding masks: which shapes are taken, which mistakes are named."""

import pytest
import torch

from espformer.ops.common.masks import resolve_masks, zero_padding

QUERY, KEY = torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 5, 8)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool)


@pytest.mark.parametrize("shape", [(2, 5), (2, 1, 5), (2, 3, 5)])
def test_shapes_broadcast_to_the_keys(shape):
    mask = torch.rand(shape) < 0.5
    query_mask, key_mask = resolve_masks("f", QUERY, KEY, None, mask)
    assert query_mask is None  # 4 queries, 5 keys
    expected = mask if mask.ndim == 3 else mask[:, None]
    assert torch.equal(key_mask.expand(2, 3, 5), expected.expand(2, 3, 5))


@pytest.mark.parametrize("tokens", [torch.zeros(4, 8), torch.zeros(3, 4, 8)])
def test_fewer_leading_dimensions(tokens):
    mask = torch.tensor([True, True, False, True])
    _, key_mask = resolve_masks("f", tokens, tokens, None, None, mask)
    assert torch.equal(key_mask.expand(tokens.shape[:-1]), mask.expand(tokens.shape[:-1]))


def test_key_mask_alone_is_ambiguous_for_queries_of_the_same_number():
    mask = torch.rand(2, 4) < 0.5
    with pytest.raises(ValueError, match=r"f: key_mask alone.*pass it as query_mask too"):
        resolve_masks("f", QUERY, QUERY, None, mask)
    with pytest.raises(ValueError, match=r"f: there alone.*in cross-attention, pass a here"):
        resolve_masks("f", QUERY, QUERY, None, mask, labels=("here", "there"))


def test_one_mask_for_both_sides_stays_one():
    mask = torch.rand(2, 4) < 0.5
    for masks in ((mask, mask), (None, None, mask)):
        query_mask, key_mask = resolve_masks("f", QUERY, QUERY, *masks)
        assert query_mask is key_mask
        assert torch.equal(key_mask, mask[:, None])


def test_given_query_mask_stays():
    query_mask, key_mask = resolve_masks("f", QUERY, QUERY, ones(2, 4), ~ones(2, 4))
    assert query_mask.all()
    assert not key_mask.any()


def test_query_mask_alone_leaves_the_keys():
    query_mask, key_mask = resolve_masks("f", QUERY, QUERY, ones(2, 4), None)
    assert query_mask.shape == (2, 1, 4)
    assert key_mask is None


def test_resolved_masks_resolve_again():
    once = resolve_masks("f", QUERY, KEY, ones(2, 4), ones(2, 5))
    again = resolve_masks("f", QUERY, KEY, *once)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_one_query_is_not_taken_for_a_pairwise_mask():
    _, key_mask = resolve_masks("f", torch.zeros(2, 3, 1, 8), KEY, None, ones(2, 1, 5))
    assert key_mask.shape == (2, 1, 5)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (ones(4, 5), r"my_attention: key_mask of shape \(4, 5\).*pairs.*identity.*with mask"),
        (torch.zeros(2, 1, 4, 5), r"pairs.*only padding"),
        (torch.ones(2, 5), r"key_mask must be boolean.*float32.*key_mask\.bool\(\)"),
        (torch.ones(2, 5, dtype=torch.int64), r"must be boolean.*int64"),
        (ones(2, 6), r"key_mask must have shape \(2, 5\) or \(2, 3, 5\).*got \(2, 6\)"),
        (ones(3, 5), r"must have shape \(2, 5\).*got \(3, 5\)"),
        (ones(2, 5).to("meta"), r"key_mask is on meta.*on cpu"),
    ],
)
def test_mistakes_are_named(mask, message):
    with pytest.raises(ValueError, match=message):
        resolve_masks("my_attention", QUERY, KEY, None, mask)


def test_wrong_query_mask_is_called_so():
    with pytest.raises(ValueError, match=r"query_mask must have shape \(2, 4\)"):
        resolve_masks("f", QUERY, KEY, ones(2, 5), None)
    with pytest.raises(ValueError, match=r"query_mask of shape \(4, 5\) masks .query, key. pairs"):
        resolve_masks("f", QUERY, KEY, ones(4, 5), None)


def test_zero_padding_stops_nan_both_ways():
    tokens = torch.tensor([[1.0], [torch.nan]], requires_grad=True)
    out = zero_padding(tokens, torch.tensor([True, False]))
    assert out.tolist() == [[1.0], [0.0]]
    (out * out).sum().backward()
    assert tokens.grad.tolist() == [[2.0], [0.0]]
    assert zero_padding(tokens, None) is tokens
