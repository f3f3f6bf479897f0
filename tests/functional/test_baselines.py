"""Softmax and Sinkhorn attention as functions: against formulas, masks and mistakes."""

import math

import pytest
import torch
import torch.nn.functional as F

from espformer.functional.baselines import (
    sinkhorn_attention,
    sinkhorn_plan,
    softmax_attention,
    softmax_plan,
)
from espformer.ops.sinkhorn.torch import LEAST_EPSILON

PAIRS = [(softmax_attention, softmax_plan), (sinkhorn_attention, sinkhorn_plan)]


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return draw(2, 3, 5, 8), draw(2, 3, 7, 8), draw(2, 3, 7, 6)


@pytest.mark.parametrize(("attention", "plan"), PAIRS)
@pytest.mark.parametrize("scale", [None, 0.2])
def test_plan_times_value_is_the_output(qkv, attention, plan, scale):
    q, k, v = qkv
    masks = {
        "query_mask": torch.tensor([[True] * 5, [True] * 3 + [False] * 2]),
        "key_mask": torch.tensor([[True] * 7, [False] * 2 + [True] * 5]),
    }
    for options in ({}, masks):
        out = attention(q, k, v, scale=scale, **options)
        torch.testing.assert_close(plan(q, k, scale=scale, **options) @ v, out)


def test_softmax_is_torchs(qkv):
    q, k, v = qkv
    torch.testing.assert_close(softmax_attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
    torch.testing.assert_close(softmax_plan(q, k), (q @ k.mT / math.sqrt(8)).softmax(-1))


@pytest.mark.parametrize("attention", [softmax_attention, sinkhorn_attention])
@pytest.mark.parametrize("padding_value", [1e4, math.nan, math.inf])
def test_padding_takes_no_part(qkv, attention, padding_value):
    q, _, v = qkv
    k, v = q.flip(2), v[:, :, :5].clone()
    lengths = [5, 3]
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    padded = [
        x.masked_fill(~mask[:, None, :, None], padding_value).requires_grad_() for x in (q, k, v)
    ]
    out = attention(*padded, mask=mask)
    out.square().sum().backward()
    for b, n in enumerate(lengths):
        alone = [x[b, :, :n] for x in (q, k, v)]
        torch.testing.assert_close(out[b, :, :n], attention(*alone))
        assert (out[b, :, n:] == 0).all()
    for x in padded:
        assert x.grad.isfinite().all()
        assert (x.grad[1, :, 3:] == 0).all()


@pytest.mark.parametrize("attention", [softmax_attention, sinkhorn_attention])
def test_no_keys_give_zeros_and_no_gradient(qkv, attention):
    q, k, v = (x.requires_grad_() for x in qkv)
    key_mask = torch.tensor([[True] * 7, [False] * 7])
    out = attention(q, k, v, key_mask=key_mask)
    torch.testing.assert_close(out[0], attention(q[:1], k[:1], v[:1])[0])
    assert (out[1] == 0).all()
    out.sum().backward()
    for x in (q, k, v):
        assert x.grad.isfinite().all()
        assert (x.grad[1] == 0).all()


def test_dropout_of_softmax_drops_and_rescales(qkv):
    q, k, _ = qkv
    torch.manual_seed(0)
    ones = torch.ones(2, 3, 7, 1, dtype=torch.float64)
    sums = torch.stack([softmax_attention(q, k, ones, dropout=0.5) for _ in range(200)])
    assert sums.std() > 0.1
    assert abs(sums.mean() - 1) < 0.05


def test_plans_keep_the_dtype(qkv):
    q, k, _ = (x.bfloat16() for x in qkv)
    assert softmax_plan(q, k).dtype == sinkhorn_plan(q, k).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"iterations": -1}, r"sinkhorn_attention: iterations must be an integer >= 0, got -1"),
        ({"epsilon": 0.0}, r"sinkhorn_attention: epsilon must be > 0, got 0\.0"),
        ({"epsilon": math.nan}, r"epsilon must be > 0"),
        ({"epsilon": 1e-39}, r"sinkhorn_attention: epsilon must be at least 1e-20, got 1e-39"),
        ({"key_mask": torch.ones(5, 7)}, r"sinkhorn_attention: key_mask.*pairs"),
    ],
)
def test_mistakes_are_named(qkv, options, message):
    with pytest.raises(ValueError, match=message):
        sinkhorn_attention(*qkv, **options)


@pytest.mark.parametrize("iterations", [1, 2, 3, 4])
def test_scores_of_the_least_epsilon_stay_above_padding(qkv, iterations):
    q, _, v = (x.float() for x in qkv)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    tensors = [x.requires_grad_() for x in (q, 10 * q.flip(2), v[:, :, :5])]
    options = {"iterations": iterations, "epsilon": LEAST_EPSILON}
    out = sinkhorn_attention(*tensors, mask=mask, **options)
    alone = sinkhorn_attention(*(x[1:, :, :3] for x in tensors), **options)
    torch.testing.assert_close(out[1:, :, :3], alone)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), tensors))
    if iterations <= 2:  # later on, scores that cancel leave their rounding
        exact = sinkhorn_attention(*(x.double() for x in tensors), mask=mask, **options)
        torch.testing.assert_close(out, exact.float())


@pytest.mark.parametrize(("attention", "plan"), PAIRS)
def test_shapes_on_the_meta_device(qkv, attention, plan):
    q, k, v = (x.float().to("meta") for x in qkv)
    assert attention(q, k, v).shape == (2, 3, 5, 6)
    assert plan(q, k).shape == (2, 3, 5, 7)
    with pytest.raises(ValueError, match="cast them to one dtype"):
        attention(q, k.double(), v)
