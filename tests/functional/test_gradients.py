"""Gradients against finite differences, in float64."""

import pytest
import torch

from espformer import esp_attention
from tests.compare import BACKENDS, BALANCES, COUPLINGS, METRICS, some, tokens

NAMES = ("query", "key", "value", "slices", "sort_temperature")


def check(inputs: dict[str, torch.Tensor], **options) -> None:
    names = list(inputs)

    def attend(*leaves):
        return esp_attention(**dict(zip(names, leaves, strict=True)), **options)

    leaves = [inputs[name].clone().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(attend, leaves, atol=1e-6, rtol=1e-4)


def inputs(*lead: int, n: int, m: int | None = None, temperature=0.5) -> dict[str, torch.Tensor]:
    """Tokens that stay further apart than a finite difference: no order changes under it."""
    query, key, value = tokens(*lead, n=n, m=m, head_dim=2, width=2)
    steps = [torch.linspace(-1, 1, x.shape[-2]).double()[:, None] for x in (query, key)]
    query, key = (0.1 * x + s for x, s in zip((query, key), steps, strict=True))
    query, key = (x[..., torch.randperm(x.shape[-2]), :] for x in (query, key))
    slices = torch.randn(3, 2, dtype=torch.float64)
    t = torch.as_tensor(temperature, dtype=torch.float64)
    return dict(zip(NAMES, (query, key, value, slices, t), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_self_attention(backend, metric, balance, tau):
    check(
        inputs(n=6), metric=metric, balance=balance, inverse_temperature=tau, backend=backend
    )  # fmt: skip


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("balance", BALANCES)
def test_across_chunks(metric, balance, monkeypatch):
    from espformer.ops.esp import sorted_kernel

    monkeypatch.setattr(sorted_kernel, "CHUNK", 2)
    check(inputs(n=5), metric=metric, balance=balance, inverse_temperature=1.0, backend="linear")


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize(("n", "m"), [(5, 4), (3, 6)], ids=["N5-M4", "N3-M6"])
def test_cross_attention(metric, balance, coupling, n, m):
    options = {"metric": metric, "balance": balance, "coupling": coupling}
    check(inputs(n=n, m=m), inverse_temperature=1.0, backend="linear", **options)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("balance", BALANCES)
def test_masks_and_temperatures_per_head(metric, balance):
    masks = {"query_mask": some(2, 5), "key_mask": some(2, 4)}
    masks["key_mask"][1] = False
    case = inputs(2, 2, n=5, m=4, temperature=[0.3, 0.8])
    check(case, metric=metric, balance=balance, inverse_temperature=1.0, backend="linear", **masks)


@pytest.mark.parametrize("ties", ["stable", "average"])
@pytest.mark.parametrize(("n", "m"), [(5, 5), (5, 3)], ids=["N5-M5", "N5-M3"])
@pytest.mark.parametrize("masked", [False, True])
def test_hard_plans_have_gradients_through_their_costs(ties, n, m, masked):
    case = inputs(n=n, m=m)
    del case["slices"], case["sort_temperature"]
    masks = {"mask" if n == m else "key_mask": some(m)} if masked else {}
    check(
        case, hard=True, ties=ties, inverse_temperature=1.0, backend="linear",
        slices=torch.randn(3, 2, dtype=torch.float64), **masks,
    )  # fmt: skip


def test_hard_costs_have_the_gradient_of_the_squared_distance():
    """Two slices that disagree, by hand: ``dσ_l = -τ σ_l (dD_l - Σ σ dD)``."""
    query = torch.tensor([[0.0, 0.0], [1.0, 3.0]], dtype=torch.float64, requires_grad=True)
    key = torch.tensor([[0.5, 2.0], [2.0, 1.0]], dtype=torch.float64)
    value = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    out = esp_attention(query, key, value, hard=True, inverse_temperature=0.5, scale=1.0)
    # Slice x pairs (0, 0) and (1, 1); slice y pairs (0, 1) and (1, 0).
    differences = [query - key, query - key.flip(0)]
    costs = torch.stack([d.square().sum(-1).mean() for d in differences])
    share = torch.softmax(-0.5 * costs, 0)
    torch.testing.assert_close(out, torch.stack([share[0], share[1]]).view(2, 1))
    expected = torch.autograd.grad(share[0], query)[0]
    torch.testing.assert_close(torch.autograd.grad(out[0, 0], query)[0], expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("metric", METRICS)
def test_an_infinite_temperature_is_flat(metric: str, backend: str) -> None:
    """Every token gets the mean of all values, and t, which could not matter less, no gradient."""
    leaves = [torch.randn(1, 2, 6, 4, requires_grad=True) for _ in range(3)]
    t = torch.full((2,), torch.inf, requires_grad=True)
    out = esp_attention(*leaves, sort_temperature=t, metric=metric, backend=backend)
    mean = leaves[2].mean(-2, keepdim=True).expand_as(out)
    torch.testing.assert_close(out, mean)
    d_query, d_key, d_value, d_t = torch.autograd.grad(out.square().sum(), [*leaves, t])
    torch.testing.assert_close(d_value, torch.autograd.grad(mean.square().sum(), leaves[2])[0])
    for found in (d_query, d_key, d_t):
        torch.testing.assert_close(found, torch.zeros_like(found))
