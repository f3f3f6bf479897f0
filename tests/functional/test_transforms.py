"""``torch.func``: transforms of attention calls."""

import pytest
import torch
from torch import Tensor

from espformer import esp_attention

OPTIONS = [
    pytest.param({}, id="soft"),
    pytest.param({"hard": True, "inverse_temperature": 1.0}, id="hard"),
    pytest.param({"straight_through": True}, id="straight-through"),
    pytest.param({"balance": "both"}, id="balanced"),
]


def tokens() -> list[Tensor]:
    return list(torch.randn(3, 1, 2, 5, 4, dtype=torch.float64).unbind())


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_are_those_of_autograd(options: dict) -> None:
    query, key, value = tokens()

    def loss(query: Tensor) -> Tensor:
        return esp_attention(query, key, value, **options).square().sum()

    leaf = query.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(query), expected)


@pytest.mark.parametrize("options", OPTIONS)
def test_examples_are_independent(options: dict) -> None:
    """Gradients of every example by itself, all at once."""
    query, key, value = (torch.randn(3, 1, 2, 5, 4) for _ in range(3))

    def loss(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return esp_attention(query, key, value, **options).square().sum()

    found = torch.vmap(torch.func.grad(loss))(query, key, value)
    for i in range(3):
        alone = torch.func.grad(loss)(query[i], key[i], value[i])
        torch.testing.assert_close(found[i], alone)


def test_directions() -> None:
    query, key, value = tokens()
    direction = torch.randn_like(query)

    def attend(query: Tensor) -> Tensor:
        return esp_attention(query, key, value)

    _, found = torch.func.jvp(attend, (query,), (direction,))
    step = 1e-6
    expected = (attend(query + step * direction) - attend(query - step * direction)) / (2 * step)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_a_backend_that_cannot_says_so() -> None:
    query, key, value = tokens()

    def loss(query: Tensor) -> Tensor:
        return esp_attention(query, key, value, backend="linear").sum()

    with pytest.raises(ValueError, match=r'torch.func.*backend="dense"'):
        torch.func.grad(loss)(query)
