"""Hard forwards, soft backwards."""

import pytest
import torch

from espformer import esp_attention
from tests.compare import BACKENDS, differentiate, some, tokens

OPTIONS = {
    "rows": {},
    "both-average": {"balance": "both", "ties": "average"},
    "squared": {"metric": "squared"},
}


@pytest.fixture(params=OPTIONS.values(), ids=OPTIONS)
def options(request):
    return {
        "slices": torch.randn(5, 4, dtype=torch.float64),
        "sort_temperature": torch.tensor([0.1, 0.3], dtype=torch.float64),
        "mask": some(3, 37),
        **request.param,
    }


def all_equal(one, other, but=()):
    return all(torch.equal(one[name], other[name]) for name in one if name not in but)


@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_is_hard_and_backward_is_soft_exactly(options, backend):
    inputs = tokens(3, 2, n=37)
    through = differentiate(*inputs, straight_through=True, backend=backend, **options)
    soft = differentiate(*inputs, backend=backend, **options)
    hard = differentiate(*inputs, hard=True, backend=backend, **options)
    assert torch.equal(through["output"], hard["output"])
    assert all_equal(through, soft, but=("output",))
    assert float(through["slices"].abs().max()) > 0
    assert not torch.equal(through["output"], soft["output"])


@pytest.mark.parametrize("share", [0.25, 0.9])
def test_a_share_mixes_outputs_and_keeps_the_soft_gradient(options, share):
    inputs = tokens(3, 2, n=37)
    mixed = differentiate(*inputs, straight_through=share, **options)
    soft = differentiate(*inputs, **options)
    hard = differentiate(*inputs, hard=True, **options)
    expected = (1 - share) * soft["output"] + share * hard["output"]
    torch.testing.assert_close(mixed["output"], expected)
    assert all_equal(mixed, soft, but=("output",))


def test_the_ends_of_the_mix(options):
    inputs = tokens(3, 2, n=37)
    soft = differentiate(*inputs, **options)
    for share in (0, 0.0, False):
        assert all_equal(differentiate(*inputs, straight_through=share, **options), soft)
    true = differentiate(*inputs, straight_through=True, **options)
    assert all_equal(differentiate(*inputs, straight_through=1.0, **options), true)


def test_without_effect_when_hard(options):
    inputs = tokens(3, 2, n=37)
    hard = differentiate(*inputs, hard=True, **options)
    assert all_equal(differentiate(*inputs, hard=True, straight_through=True, **options), hard)


def test_both_halves_drop_the_same_slices():
    query, key, value = tokens(2, n=20)
    torch.manual_seed(1)
    through = esp_attention(query, key, value, straight_through=True, slice_dropout=0.5)
    torch.manual_seed(1)
    torch.testing.assert_close(
        through, esp_attention(query, key, value, hard=True, slice_dropout=0.5)
    )
