"""Uniform attention: the mean of what takes part, whatever queries and keys are."""

import math

import pytest
import torch

from espformer.nn import Attention, Softmax, Uniform


def draw(n, m):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 2, n, 4), (3, 2, m, 4), (3, 2, m, 5)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize(("n", "m"), [(6, 6), (4, 7), (1, 1)])
def test_every_query_gets_the_mean_of_the_keys_that_take_part(n, m):
    q, k, v = draw(n, m)
    queries = torch.arange(n) < torch.tensor([[n], [2], [1]])
    keys = torch.arange(m) < torch.tensor([[m], [3], [1]])
    padded = v.masked_fill(~keys[:, None, :, None], math.nan)
    out = Uniform()(q, k, padded, query_mask=queries, key_mask=keys)
    for b in range(3):
        mean = v[b, :, keys[b]].mean(-2, keepdim=True)
        count = int(queries[b].sum())
        torch.testing.assert_close(out[b, :, queries[b]], mean.expand(-1, count, -1))
        assert (out[b, :, ~queries[b]] == 0).all()
    matrix = Uniform().matrix(q, k, query_mask=queries, key_mask=keys)
    torch.testing.assert_close(matrix @ v, out)


def test_as_many_queries_as_keys_make_a_doubly_stochastic_matrix():
    q, k, _ = draw(6, 6)
    matrix = Uniform().matrix(q, k)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(3, 2, 6, dtype=torch.float64))
    torch.testing.assert_close(matrix.sum(-2), torch.ones(3, 2, 6, dtype=torch.float64))


def test_sequences_without_keys_give_zeros():
    q, k, v = draw(3, 5)
    assert (Uniform()(q, k, v, key_mask=torch.zeros(3, 5, dtype=torch.bool)) == 0).all()


@pytest.mark.parametrize("masked", [False, True])
def test_sums_of_half_precision_do_not_overflow(masked):
    x = torch.full((1, 2, 2000, 4), 60.0, dtype=torch.float16)
    mask = torch.ones(1, 2000, dtype=torch.bool) if masked else None
    assert torch.equal(Uniform()(x, x, x, query_mask=mask, key_mask=mask), x)
    row = Uniform().matrix(x, x, query_mask=mask, key_mask=mask)[0, 0, 0]
    torch.testing.assert_close(row, torch.full((2000,), 1 / 2000, dtype=torch.float16))


@pytest.mark.parametrize("leads", [[2, 1, 1], [1, 2, 2], [1, 1, 2], [1, 2, 1]])
def test_leading_dimensions_broadcast(leads):
    """As those of the other mechanisms do."""
    q, k, v = (torch.randn(lead, 3, 5, 4) for lead in leads)
    queries, keys = (torch.arange(5).expand(lead, -1) < 3 for lead in leads[:2])
    every = torch.ones_like(queries)
    for chosen in ((None, None), (queries, None), (every, keys), (queries, keys)):
        masks = dict(zip(("query_mask", "key_mask"), chosen, strict=True))
        out, matrix = Uniform()(q, k, v, **masks), Uniform().matrix(q, k, **masks)
        assert out.shape == Softmax()(q, k, v, **masks).shape
        assert matrix.shape == Softmax().matrix(q, k, **masks).shape
        torch.testing.assert_close((matrix @ v).expand_as(out), out)


def test_mistakes_are_named():
    q, k, v = draw(4, 7)
    with pytest.raises(ValueError, match="Uniform: key and value must have equally many tokens"):
        Uniform()(q, k, v[:, :, :5])


def test_values_learn_and_queries_do_not():
    layer = Attention(8, 2, mechanism=Uniform())
    layer(torch.randn(2, 5, 8)).square().sum().backward()
    grads = {name: p.grad for name, p in layer.named_parameters() if "qkv.weight" in name}
    (grad,) = grads.values()
    queries, keys, values = grad.chunk(3)
    assert (queries == 0).all()
    assert (keys == 0).all()
    assert (values != 0).any()
