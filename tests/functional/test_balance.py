"""``balance="both"``: doubly stochastic at every temperature, not only in the limit."""

import pytest
import torch

from espformer import esp_plan
from tests.compare import BACKENDS, METRICS, some, tokens

TEMPERATURES = (1e-6, 1e-4, 1e-2, 0.1, 0.3, 1.0, 10.0, 100.0)
TOLERANCE = 1e-4  # what is promised, at worst


def clouds(kind, lead, n):
    x = torch.randn(*lead, n, 4, dtype=torch.float64)
    return {
        "normal": lambda: x,
        "clusters": lambda: x.round() + 1e-2 * torch.randn_like(x),
        "ties": lambda: x.round(),
        "heavy": lambda: x**5,
        "outlier": lambda: torch.cat([torch.zeros_like(x[..., 1:, :]), x[..., :1, :]], -2),
    }[kind]()


# As many columns as tokens: kernels for many columns in float64 are compiled in slow tests alone.
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", ["normal", "clusters", "ties", "heavy", "outlier"])
@pytest.mark.parametrize(
    ("n", "dtype"),
    [
        *((n, torch.float32) for n in (1, 2, 33, 150)),
        *((n, torch.float64) for n in (1, 2, 8)),
        *(pytest.param(n, torch.float64, marks=pytest.mark.slow) for n in (33, 150)),
    ],
    ids=lambda x: str(x).removeprefix("torch."),
)
def test_self_attention(metric, dtype, kind, n):
    query, key = clouds(kind, (2,), n).to(dtype), clouds("normal", (2,), n).to(dtype)
    for t in TEMPERATURES:
        plan = esp_plan(query, key, sort_temperature=t, metric=metric, balance="both")
        assert float((plan.sum(-1) - 1).abs().max()) < TOLERANCE
        assert float((plan.sum(-2) - 1).abs().max()) < TOLERANCE
        assert float(plan.min()) > -1e-6


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("n", "m"), [(40, 25), (25, 40), (33, 33)], ids=["N40-M25", "N25-M40", "N33-M33"]
)
def test_masked_cross_attention_with_quantiles(metric, backend, n, m):
    query, key, _ = tokens(4, 2, n=n, m=m)
    query_mask, key_mask = some(4, n), some(4, m)
    rows = query_mask[:, None].double().expand(4, 2, n)
    columns = (key_mask * (query_mask.sum(-1) / key_mask.sum(-1))[:, None])[:, None].double()
    for t in TEMPERATURES:
        plan = esp_plan(
            query, key, sort_temperature=t, metric=metric, balance="both", backend=backend,
            query_mask=query_mask, key_mask=key_mask,
        )  # fmt: skip
        assert float((plan.sum(-1) - rows).abs().max()) < TOLERANCE
        assert float((plan.sum(-2) - columns).abs().max()) < TOLERANCE * max(1, n / m)


def test_rows_alone_are_only_roughly_doubly_stochastic():
    """What the balance is for: at the temperatures that learn best, sums are off by tenths."""
    query, key, _ = tokens(n=40)
    plan = esp_plan(query, key, sort_temperature=0.1, balance="rows")
    assert float((plan.sum(-1) - 1).abs().max()) > 0.05
    assert float((plan.sum(-2) - 1).abs().max()) > 0.05
    assert float(plan.sum()) == pytest.approx(40)


def test_a_high_temperature_is_uniform():
    query, key, _ = tokens(n=12, m=7)
    for balance in ("rows", "both"):
        plan = esp_plan(query, key, sort_temperature=1e9, balance=balance)
        torch.testing.assert_close(plan, torch.full_like(plan, 1 / 7), atol=1e-6, rtol=0)
