"""The matrix of an attention is what the attention multiplies with."""

import itertools

import pytest
import torch

from espformer import esp_attention, esp_plan
from tests.compare import BACKENDS, BALANCES, COUPLINGS, METRICS, some, tokens

CALLS = [
    *({"metric": m, "balance": b} for m, b in itertools.product(METRICS, BALANCES)),
    *({"hard": True, "ties": ties} for ties in ("stable", "average")),
    {"straight_through": True},
    {"straight_through": 0.3, "balance": "both"},
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize(
    ("n", "m"),
    [(1, 1), (37, 37), (37, 20), (20, 37)],
    ids=["N1-M1", "N37-M37", "N37-M20", "N20-M37"],
)
@pytest.mark.parametrize("masked", [False, True])
def test_plan_times_values(backend, coupling, n, m, masked):
    query, key, value = tokens(2, 3, n=n, m=m)
    options = {"coupling": coupling, "backend": backend}
    if masked:
        options |= {"query_mask": some(2, n), "key_mask": some(2, m)}
    slices = torch.randn(3, 5, 4, dtype=torch.float64)
    temperature = torch.tensor([0.01, 0.1, 1.0], dtype=torch.float64)
    for call in CALLS:
        for extra in (
            {},
            {
                "slices": slices,
                "scale": 0.9,
                "sort_temperature": temperature,
                "inverse_temperature": 2.0,
            },
        ):
            plan = esp_plan(query, key, **options, **call, **extra)
            expected = esp_attention(query, key, value, **options, **call, **extra)
            assert plan.shape == (2, 3, n, m)
            torch.testing.assert_close(plan @ value, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_a_plan(backend):
    query, key, value = tokens(2, n=20)
    query.requires_grad_()
    through_plan = (esp_plan(query, key, backend=backend) @ value).square().sum()
    directly = esp_attention(query, key, value, backend=backend).square().sum()
    torch.testing.assert_close(
        torch.autograd.grad(through_plan, query), torch.autograd.grad(directly, query)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtype_and_shape(dtype):
    query, key, _ = (x.to(dtype) for x in tokens(2, 3, n=5, m=4))
    plan = esp_plan(query, key)
    assert plan.dtype == dtype
    assert plan.shape == (2, 3, 5, 4)


def test_leading_dimensions_broadcast():
    query, key, _ = tokens(2, 3, n=5, m=4)
    plan = esp_plan(query, key[:1, :1])
    torch.testing.assert_close(plan, esp_plan(query, key[:1, :1].expand(2, 3, 4, 4)))
    assert esp_plan(query[0, 0], key[0, 0]).shape == (5, 4)


def test_dropout_of_slices_is_that_of_the_attention():
    query, key, value = tokens(2, 3, n=9)
    torch.manual_seed(3)
    plan = esp_plan(query, key, slice_dropout=0.5)
    torch.manual_seed(3)
    torch.testing.assert_close(plan @ value, esp_attention(query, key, value, slice_dropout=0.5))
