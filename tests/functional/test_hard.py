"""Hard plans: against POT, against the lifted plan of the paper, and as the limit of soft ones."""

import numpy as np
import pytest
import torch

from espformer import esp_attention, esp_plan
from tests import oracles
from tests.compare import BACKENDS, some, tokens

SIZES = [(1, 1), (2, 2), (17, 17), (40, 40), (12, 7), (7, 12), (50, 33), (1, 5), (5, 1)]
SIZE_IDS = [f"N{n}-M{m}" for n, m in SIZES]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tau", [0.0, 0.1, 1.0, 20.0])
@pytest.mark.parametrize(("n", "m"), SIZES, ids=SIZE_IDS)
def test_against_python_optimal_transport(backend, tau, n, m):
    sliced = pytest.importorskip("ot.sliced")
    query, key, _ = tokens(n=n, m=m, head_dim=3)
    theta = torch.nn.functional.normalize(torch.randn(8, 3, dtype=torch.float64), dim=-1)
    theirs, _, log = sliced.expected_sliced_plan(
        query.numpy(), key.numpy(), projections=theta.T.numpy().copy(), metric="sqeuclidean", p=2,
        beta=tau, log=True,
    )  # fmt: skip
    found = n * expected_plan(log["G"], query.numpy(), key.numpy(), tau)
    if tau == 0 or np.allclose(log["costs"], costs_of(log["G"], query.numpy(), key.numpy())):
        np.testing.assert_allclose(n * theirs, found, atol=1e-9)
    plan = esp_plan(
        query, key, slices=theta, scale=1.0, hard=True, inverse_temperature=tau, backend=backend
    )
    np.testing.assert_allclose(plan.numpy(), found, atol=1e-6)


@pytest.mark.parametrize("tau", [0.0, 0.1, 1.0, 20.0])
@pytest.mark.parametrize("n", [1, 2, 17, 40])
def test_against_python_optimal_transport_as_it_is(tau, n):
    sliced = pytest.importorskip("ot.sliced")
    query, key, _ = tokens(n=n, head_dim=3)
    plan, _ = sliced.expected_sliced_plan(
        query.numpy(), key.numpy(), projections=np.eye(3), metric="sqeuclidean", p=2, beta=tau
    )
    found = esp_plan(query, key, scale=1.0, hard=True, inverse_temperature=tau)
    np.testing.assert_allclose(found.numpy(), n * plan, atol=1e-6)


def costs_of(plans, x, y):
    """POT 0.9.7 takes the mass of a pair at the index of its point: right only if all are equal."""
    return [(((x[g.rows] - y[g.cols]) ** 2).sum(-1) * g.data).sum() for g in plans]


def expected_plan(plans, x, y, tau):
    """POT's plan of every slice, weighted by ``softmax(-τ D)``."""
    costs = np.array(costs_of(plans, x, y))
    shares = np.exp(-tau * (costs - costs.min()))
    total = np.zeros((len(x), len(y)))
    for g, share in zip(plans, shares / shares.sum(), strict=True):
        np.add.at(total, (g.rows, g.cols), share * g.data)
    return total


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ties", ["stable", "average"])
@pytest.mark.parametrize(("n", "m"), SIZES, ids=SIZE_IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_rows_and_columns_sum_to_one(backend, ties, n, m, dtype):
    query, key, _ = (x.to(dtype) for x in tokens(2, 3, n=n, m=m))
    for q, k in ((query, key), (query.round(), key.round())):
        for tau in (0.0, 0.1, 10.0):
            plan = esp_plan(q, k, hard=True, ties=ties, inverse_temperature=tau, backend=backend)
            assert float((plan.sum(-1) - 1).abs().max()) < 1e-6
            assert float((plan.sum(-2) - n / m).abs().max()) < 1e-6 * max(1, n / m)
            assert float(plan.min()) >= 0


@pytest.mark.parametrize("ties", ["stable", "average"])
def test_rows_and_columns_of_a_padded_batch(ties):
    query, key, _ = (x.float() for x in tokens(4, 2, n=30, m=21))
    query_mask, key_mask = some(4, 30), some(4, 21)
    plan = esp_plan(
        query.round(), key.round(), hard=True, ties=ties, query_mask=query_mask, key_mask=key_mask
    )
    rows = query_mask[:, None].float().expand(4, 2, 30)
    shares = query_mask.sum(-1) / key_mask.sum(-1)
    columns = (key_mask * shares[:, None])[:, None].expand(4, 2, 21)
    torch.testing.assert_close(plan.sum(-1), rows, atol=1e-6, rtol=0)
    torch.testing.assert_close(plan.sum(-2), columns, atol=2e-6, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("n", "m"), SIZES, ids=SIZE_IDS)
@pytest.mark.parametrize("kind", ["rounded", "distinct", "one-point"])
def test_average_is_the_lifted_plan(backend, n, m, kind):
    """``u_θ(x, y) = p(x) q(y) / (P(x̄) Q(ȳ)) · Λ(x̄, ȳ)``, on one slice and as the mean of many."""
    query, key, _ = tokens(n=n, m=m, head_dim=3)
    change = {"rounded": torch.round, "distinct": lambda x: x, "one-point": torch.ones_like}[kind]
    query, key = change(query), change(key)
    expected = [oracles.lifted_plan(query[:, l].numpy(), key[:, l].numpy()) for l in range(3)]
    options = {"hard": True, "ties": "average", "inverse_temperature": 0.0, "backend": backend}
    for l in range(3):
        axis = torch.eye(3, dtype=torch.float64)[l : l + 1]
        found = esp_plan(query, key, slices=axis, **options)
        np.testing.assert_allclose(found.numpy(), expected[l], atol=1e-12)
    np.testing.assert_allclose(esp_plan(query, key, **options), np.mean(expected, 0), atol=1e-12)


@pytest.mark.parametrize("balance", ["rows", "both"])
@pytest.mark.parametrize("metric", ["absolute", "squared"])
@pytest.mark.parametrize(("n", "m"), [(24, 24), (40, 30)], ids=["N24-M24", "N40-M30"])
def test_average_is_the_limit_of_soft_sorting(balance, metric, n, m):
    query, key, value = tokens(2, n=n, m=m)
    query, key = query.round(), key.round()
    hard = esp_attention(query, key, value, hard=True, ties="average")
    options = {"metric": metric, "balance": balance}
    errors = [
        float((esp_attention(query, key, value, sort_temperature=t, **options) - hard).abs().max())
        for t in (1.0, 0.1, 1e-2, 1e-3)
    ]
    assert errors == sorted(errors, reverse=True)
    # Eight balancing steps leave 5e-6 among tied tokens.
    assert errors[-1] < (1e-12 if balance == "rows" else 2e-5)


@pytest.mark.parametrize("balance", ["rows", "both"])
@pytest.mark.parametrize("metric", ["absolute", "squared"])
def test_soft_tends_to_hard_as_the_temperature_falls(balance, metric):
    query, key, value = tokens(2, 3, n=33)
    hard = esp_attention(query, key, value, hard=True)
    options = {"metric": metric, "balance": balance}
    errors = [
        float((esp_attention(query, key, value, sort_temperature=t, **options) - hard).abs().max())
        for t in (10.0, 0.1, 1e-3, 1e-5, 1e-9, 1e-14)
    ]
    assert errors[-1] < 1e-5
    assert errors[0] > 0.1
    assert errors == sorted(errors, reverse=True)


def test_ties_differ_only_where_there_are_ties():
    query, key, value = tokens(2, n=20)
    options = {"hard": True, "inverse_temperature": 0.5}
    torch.testing.assert_close(
        esp_attention(query, key, value, ties="stable", **options),
        esp_attention(query, key, value, ties="average", **options),
    )
    query, key = query.round(), key.round()
    stable = esp_attention(query, key, value, ties="stable", **options)
    average = esp_attention(query, key, value, ties="average", **options)
    assert float((stable - average).abs().max()) > 0.1


def test_stable_ties_put_earlier_tokens_first():
    query = torch.tensor([[1.0], [0.0], [1.0], [0.0]])
    key = torch.zeros(4, 1)
    plan = esp_plan(query, key, hard=True, ties="stable")
    assert plan.argmax(-1).tolist() == [2, 0, 3, 1]
    assert torch.equal(plan, plan.round())


@pytest.mark.parametrize("backend", BACKENDS)
def test_stable_ties_are_deterministic(backend):
    query, key, value = (x.float() for x in tokens(2, 2, n=300))
    query, key = query.round(), key.round()
    options = {"hard": True, "ties": "stable", "backend": backend}
    once = esp_attention(query, key, value, **options)
    assert torch.equal(once, esp_attention(query, key, value, **options))
    in_a_batch = esp_attention(
        torch.stack([query] * 3), torch.stack([key] * 3), torch.stack([value] * 3), **options
    )
    torch.testing.assert_close(in_a_batch[1], once)


def test_hard_ignores_what_only_soft_sorting_has():
    query, key, value = tokens(2, n=20)
    once = esp_attention(query, key, value, hard=True)
    for option in ({"sort_temperature": 9.0}, {"metric": "squared"}, {"balance": "both"}):
        assert torch.equal(esp_attention(query, key, value, hard=True, **option), once)


def test_one_token_attends_to_itself():
    query, key, value = tokens(2, 2, n=1)
    for hard in (False, True):
        torch.testing.assert_close(esp_attention(query, key, value, hard=hard), value)
