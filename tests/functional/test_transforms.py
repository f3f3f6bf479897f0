"""``torch.func``: transforms of attention calls."""

import pytest
import torch
from torch import Tensor

from espformer import esp_attention
from espformer.nn import ESP, Attention

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


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_directions_straight_through_are_soft(share: float) -> None:
    query, key, value = tokens()
    direction = torch.randn_like(query)

    def attend(query: Tensor, straight_through: float) -> Tensor:
        return esp_attention(query, key, value, straight_through=straight_through)

    shown, found = torch.func.jvp(lambda q: attend(q, share), (query,), (direction,))
    _, expected = torch.func.jvp(lambda q: attend(q, 0.0), (query,), (direction,))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(shown, attend(query, share))
    basis = torch.eye(query.numel(), dtype=query.dtype).view(-1, *query.shape)
    rows = torch.func.vmap(lambda d: torch.func.jvp(lambda q: attend(q, share), (query,), (d,))[1])(
        basis
    )
    columns = torch.func.jacrev(lambda q: attend(q, share))(query)
    torch.testing.assert_close(rows.flatten(1).mT, columns.reshape(-1, query.numel()))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(query, direction)
        out = esp_attention(dual, key, value, straight_through=share, backend="dense")
        tangent = torch.autograd.forward_ad.unpack_dual(out).tangent
    torch.testing.assert_close(tangent, found)


@pytest.mark.parametrize("metric", ["absolute", "squared"])
def test_temperatures_side_by_side(metric: str) -> None:
    query, key, value = tokens()
    temperatures = torch.tensor([0.1, 0.3, 1.0], dtype=torch.float64)

    def attend(t: Tensor) -> Tensor:
        return esp_attention(query, key, value, sort_temperature=t, metric=metric)

    found = torch.vmap(attend)(temperatures)
    for t, one in zip(temperatures, found, strict=True):
        torch.testing.assert_close(one, attend(t))


def test_ensembles_of_layers_that_learn_their_temperature() -> None:
    layers = [
        Attention(8, 2, ESP(sort_temperature=t, learn_temperature=True)) for t in (0.1, 0.3, 1.0)
    ]
    parameters, buffers = torch.func.stack_module_state(layers)
    x = torch.randn(2, 5, 8)

    def call(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layers[0], (parameters, buffers), (x,))

    found = torch.vmap(call)(parameters, buffers)
    torch.testing.assert_close(found, torch.stack([layer(x) for layer in layers]))


def test_a_backend_that_cannot_says_so() -> None:
    query, key, value = tokens()

    def loss(query: Tensor) -> Tensor:
        return esp_attention(query, key, value, backend="linear").sum()

    with pytest.raises(ValueError, match=r'torch.func.*backend="dense"'):
        torch.func.grad(loss)(query)
