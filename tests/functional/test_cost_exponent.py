"""The exponent of transport costs: what τ weighs slices by."""

import pytest
import torch
from torch import Tensor

from espformer import esp_attention, esp_plan

TAU = 3.0
OPTIONS = {"inverse_temperature": TAU, "scale": 1.0}


def by_hand(
    query: Tensor, key: Tensor, value: Tensor, exponent: float, **options: object
) -> Tensor:
    """One plan for each axis, its cost, and the softmax over them."""
    axes = torch.eye(query.shape[-1], dtype=query.dtype)
    plans = [esp_plan(query, key, slices=axis[None], scale=1.0, **options) for axis in axes]
    squares = torch.cdist(query, key, compute_mode="donot_use_mm_for_euclid_dist").square()
    means = torch.stack([(squares * plan).sum((-2, -1)) / query.shape[-2] for plan in plans], -1)
    weights = (-TAU * means ** (exponent / 2)).softmax(-1)
    plan = sum(weights[..., i, None, None] * plan for i, plan in enumerate(plans))
    return plan @ value


@pytest.fixture
def qkv() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(3, 2, 2, 9, 3, generator=generator, dtype=torch.float64)
    stretched = drawn * torch.tensor([0.3, 1.0, 2.0], dtype=torch.float64)  # unequal costs
    return tuple(x.clone().requires_grad_() for x in stretched)


@pytest.mark.parametrize("backend", ["dense", "linear", "cpu"])
@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("hard", [False, True])
def test_is_the_formula(qkv: tuple[Tensor, ...], backend: str, exponent: float, hard: bool) -> None:
    if backend == "cpu":
        pytest.importorskip("numba")
    expected = by_hand(*qkv, exponent, hard=hard)
    found = esp_attention(*qkv, cost_exponent=exponent, backend=backend, hard=hard, **OPTIONS)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, qkv, upstream)
    for have, want in zip(torch.autograd.grad(found, qkv, upstream), wanted, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-8, atol=1e-9)


def test_a_cost_of_zero_has_no_gradient() -> None:
    """All slices have the same plan, the identity, whatever their weights."""
    x = torch.randn(1, 2, 6, 3, dtype=torch.float64, requires_grad=True)
    out = esp_attention(x, x, x.detach(), cost_exponent=1.0, hard=True, **OPTIONS)
    torch.testing.assert_close(out, x.detach())
    (grad,) = torch.autograd.grad(out, x, torch.randn_like(out))
    torch.testing.assert_close(grad, torch.zeros_like(x))


@pytest.mark.parametrize("backend", ["dense", "linear", "cpu"])
@pytest.mark.parametrize("exponent", [1.0, 3.0])
@pytest.mark.parametrize("hard", [False, True])
def test_nan_reaches_the_same_gradients_with_every_exponent(
    qkv: tuple[Tensor, ...], backend: str, exponent: float, hard: bool
) -> None:
    if backend == "cpu":
        pytest.importorskip("numba")
    qkv[0].data[1, 0, 4, 2] = torch.nan
    found = []
    for power in (exponent, 2.0):
        out = esp_attention(*qkv, cost_exponent=power, backend=backend, hard=hard, **OPTIONS)
        found.append(torch.autograd.grad(out, qkv, torch.ones_like(out)))
    for have, want in zip(*found, strict=True):
        assert torch.equal(have.isnan(), want.isnan())
        if backend != "cpu":  # whose kernels compute such a head with zeros, and then add NaN
            assert bool(have[1, 0].isnan().all())


def test_nothing_changes_without_costs(qkv: tuple[Tensor, ...]) -> None:
    plain = esp_attention(*qkv)
    assert torch.equal(esp_attention(*qkv, cost_exponent=1.0), plain)


@pytest.mark.parametrize("exponent", [0.0, -1.0, 5.0, float("nan")])
def test_says_what_is_wrong(qkv: tuple[Tensor, ...], exponent: float) -> None:
    with pytest.raises(ValueError, match=r"cost_exponent must be in \(0, 4\]"):
        esp_attention(*qkv, cost_exponent=exponent)
