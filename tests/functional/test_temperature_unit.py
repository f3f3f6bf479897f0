"""Temperatures in units of the spread: one meaning whatever the scale of queries and keys."""

import math

import pytest
import torch

from espformer import esp_attention, esp_plan
from espformer.models import TextClassifier, VisionTransformer
from espformer.models.set_transformer import SetTransformer
from espformer.ops.esp.problem import with_spread
from tests.compare import BACKENDS, BALANCES, METRICS, differentiate, some, tokens


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("balance", BALANCES)
def test_scaling_queries_or_keys_changes_nothing(backend, metric, balance):
    query, key, value = tokens(2, 3, n=37)
    options = {"metric": metric, "balance": balance, "backend": backend, "mask": some(2, 37)}
    expected = esp_attention(query, key, value, **options)
    for mine, theirs in ((3.7, 1.0), (1.0, 1e-4), (1e6, 1e-9)):
        found = esp_attention(query * mine, key * theirs, value, **options)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("metric", METRICS)
def test_it_is_the_absolute_unit_of_numbers_with_spread_one(backend, metric):
    query, key, value = tokens(2, 3, n=37)
    t = torch.tensor([0.1, 0.3, 1.0], dtype=torch.float64)
    deviation = query.std(-2, keepdim=True, correction=0), key.std(-2, keepdim=True, correction=0)
    found = esp_attention(query, key, value, sort_temperature=t, metric=metric, backend=backend)
    expected = esp_attention(
        query / deviation[0], key / deviation[1], value, scale=1.0, metric=metric,
        sort_temperature=t if metric == "absolute" else t**2, temperature_unit="absolute",
        backend=backend,
    )  # fmt: skip
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("balance", BALANCES)
def test_a_padded_batch_gives_what_its_sequences_give(backend, balance):
    query, key, value = tokens(3, 2, n=20)
    query[0, :, 12:] = 1e8  # padding, whose spread must not count
    lengths = torch.tensor([12, 1, 20])
    mask = torch.arange(20) < lengths[:, None]
    options = {"balance": balance, "backend": backend}
    padded = differentiate(query, key, value, mask=mask, **options)
    for b, n in enumerate(lengths.tolist()):
        alone = esp_attention(*(x[b, :, :n] for x in (query, key, value)), **options)
        torch.testing.assert_close(padded["output"][b, :, :n], alone, rtol=0, atol=1e-12)
        assert not padded["query"][b, :, n:].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("number", [0.0, 1e-10, 0.1])
def test_a_slice_without_spread_mixes_uniformly_and_has_no_gradient(backend, metric, dtype, number):
    query, key, value = (x.to(dtype) for x in tokens(1, 1, n=40))
    query[..., 0], key[..., 1] = number, number
    found = differentiate(query, key, value, metric=metric, backend=backend)
    want = differentiate(*(x.double() for x in (query, key, value)), metric=metric, backend="dense")
    for name, x in found.items():  # the other slices have gradients, this one has none
        torch.testing.assert_close(x.double(), want[name], rtol=1e-4, atol=1e-4)
    assert not found["query"][..., 0].any()
    assert not found["key"][..., 1].any()
    constant = torch.full_like(query[..., :1], number)
    plan = esp_plan(constant, constant, metric=metric, backend=backend)
    torch.testing.assert_close(plan, torch.full_like(plan, 1 / 40))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("tokens_", [33, 200])
def test_heads_whose_keys_are_zero_have_no_gradient(backend, metric, tokens_):
    query, key, value = torch.randn(3, 1, 2, tokens_, 4)
    key[:, 0] = 0
    options = {"metric": metric, "backend": backend, "inverse_temperature": 1.0}
    found = differentiate(query, key, value, **options, cost_exponent=1.0)
    assert found["key"].abs().max() < 10
    assert not differentiate(query, key, value, metric=metric, backend=backend)["key"][:, 0].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_go_through_the_spread(backend):
    """By the chain rule alone: no gradient can point along what changes nothing."""
    query, key, value = tokens(2, n=20)
    found = differentiate(query, key, value, backend=backend)
    for side, x in (("query", query), ("key", key)):
        along = (found[side] * (x - x.mean(-2, keepdim=True))).sum(-2)
        torch.testing.assert_close(along, torch.zeros_like(along), atol=1e-9, rtol=0)

    def attend(query, key):
        return esp_attention(query, key, value[..., :7, :], backend="dense")

    small = [x[..., :7, :].clone().requires_grad_() for x in (query, key)]
    assert torch.autograd.gradcheck(attend, small)


def test_spread_is_the_standard_deviation_of_tokens_that_take_part():
    points = torch.randn(2, 3, 9, dtype=torch.float64) * 1e-170  # whose squares vanish
    mask = some(2, 1, 9)
    found = with_spread(points, mask)[1]
    for b in range(2):
        expected = (points[b][:, mask[b, 0]] * 1e170).std(-1, correction=0) * 1e-170
        torch.testing.assert_close(found[b, :, 0], expected, atol=0, rtol=1e-12)
    assert torch.equal(with_spread(points, None)[1], with_spread(points, torch.ones_like(mask))[1])


@torch.no_grad()
def entropies(model, *inputs):
    """Entropy of every row of every attention matrix, over that of a uniform row."""
    shares = []
    for matrix in model.attention_matrices(*inputs):
        p = matrix / matrix.sum(-1, keepdim=True)
        shares.append(float(-(p * p.clamp(min=1e-30).log()).sum(-1).mean()) / math.log(p.shape[-1]))
    return shares


def test_attention_of_fresh_models_is_not_uniform():
    torch.manual_seed(0)
    vit = VisionTransformer(image_size=64, depth=3)
    text = TextClassifier(classes=2, vocabulary=50, max_length=32)
    points = SetTransformer(classes=3)
    fresh = [
        entropies(vit, torch.randn(2, 3, 64, 64)),
        entropies(text, torch.randint(1, 50, (2, 32))),
        entropies(points, torch.randn(2, 64, 3)),
    ]
    assert all(share < 0.99 for shares in fresh for share in shares), fresh
