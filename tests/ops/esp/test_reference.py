"""Algorithm 1 and its linear-time twin against a brute-force version that shares no code."""

import itertools

import numpy as np
import pytest
import torch

from espformer import esp_plan
from espformer.ops.esp import reference
from espformer.ops.esp.options import ESPOptions
from espformer.ops.esp.problem import Problem
from tests import oracles
from tests.compare import BALANCES, COUPLINGS, METRICS, some

BACKENDS = ("dense", "linear")
SIZES = [(1, 1), (2, 2), (7, 7), (5, 8), (8, 5), (9, 1), (1, 6)]
SIZE_IDS = [f"B1-H2-N{n}-M{m}" for n, m in SIZES]
# Balanced sorts are within 5e-6 of their limit, which is what the oracle computes.
TOLERANCE = {"rows": 1e-10, "both": 5e-5}


def assert_are_brute_force(query, key, atol, **options):
    """One oracle call per head; masks and temperatures may differ from sequence to sequence.

    The oracle takes longer than the operator: it is called once for all backends.
    """
    found = {backend: esp_plan(query, key, backend=backend, **options) for backend in BACKENDS}
    masks = {name: options.pop(name) for name in ("query_mask", "key_mask") if name in options}
    slices = options.pop("slices", None)
    for b, h in itertools.product(*(range(size) for size in query.shape[:2])):
        own = {name: mask[b].numpy() for name, mask in masks.items() if mask is not None}
        theta = None if slices is None else (slices[h] if slices.dim() == 3 else slices).numpy()
        expected = oracles.attention_matrix(
            query[b, h].numpy(), key[b, h].numpy(), slices=theta, **own, **options
        )
        for backend, plan in found.items():
            np.testing.assert_allclose(
                plan[b, h].numpy(), expected, atol=atol, err_msg=f"backend {backend}"
            )


def clouds(batch: int, n: int, m: int, head_dim: int = 3):
    query = torch.randn(batch, 2, n, head_dim, dtype=torch.float64)
    return query, torch.randn(batch, 2, m, head_dim, dtype=torch.float64)


@pytest.mark.parametrize(("n", "m"), SIZES, ids=SIZE_IDS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("balance", BALANCES)
def test_soft(n, m, metric, balance):
    query, key = clouds(1, n, m)
    for temperature, tau in [(1e-3, 0.1), (0.1, 0.0), (0.1, 5.0), (2.0, 1.0)]:
        assert_are_brute_force(
            query, key, TOLERANCE[balance], metric=metric, balance=balance,
            sort_temperature=temperature, inverse_temperature=tau,
        )  # fmt: skip


@pytest.mark.parametrize(("n", "m"), SIZES, ids=SIZE_IDS)
@pytest.mark.parametrize("ties", ["stable", "average"])
def test_hard(n, m, ties):
    query, key = clouds(1, n, m)
    for tau in (0.0, 0.1, 5.0):
        for cloud in ((query, key), (query.round(), key.round())):
            assert_are_brute_force(*cloud, 1e-12, hard=True, ties=ties, inverse_temperature=tau)


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
def test_couplings(coupling, hard):
    for n, m in [(4, 6), (6, 4), (7, 3), (5, 5)]:
        query, key = clouds(1, n, m)
        assert_are_brute_force(
            query, key, 1e-10, coupling=coupling, hard=hard, inverse_temperature=0.7
        )


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_masks_at_any_position(balance, hard, coupling):
    options = {"coupling": coupling, "hard": hard, "balance": balance, "inverse_temperature": 0.7}
    atol = TOLERANCE[balance]
    query, key = clouds(5, 7, 7)
    query[0, 0, 2], key[0, 0, 2] = 9.0, -9.0
    mask = some(5, 7)
    mask[4] = False
    assert_are_brute_force(query, key, atol, query_mask=mask, key_mask=mask, **options)
    other = some(5, 7)
    other[3] = False
    assert_are_brute_force(query, key, atol, query_mask=mask, key_mask=other, **options)
    query, key = clouds(4, 6, 8)
    assert_are_brute_force(query, key, atol, key_mask=some(4, 8), **options)
    assert_are_brute_force(query, key, atol, query_mask=some(4, 6), **options)


@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
def test_slices_and_scale(hard):
    query, key = clouds(2, 6, 6)
    for slices in (torch.randn(1, 3), torch.randn(5, 3), torch.randn(2, 4, 3)):
        options = {"slices": slices.double(), "hard": hard, "inverse_temperature": 1.0}
        assert_are_brute_force(query, key, 1e-10, **options)
        assert_are_brute_force(query, key, 1e-10, scale=1.7, **options)


@pytest.mark.parametrize("balance", BALANCES)
def test_a_soft_sort_sorts(balance):
    """At low temperature ``A v`` is v sorted; rows are ranks, columns tokens."""
    v = torch.tensor([[[3.0, -1.0, 2.0, 0.5]]], dtype=torch.float64)
    temperature = torch.tensor([1e-3], dtype=torch.float64)
    problem = Problem(
        v.mT, v.mT, ESPOptions(scale=1.0, sort_temperature=temperature, balance=balance)
    )
    A = reference.soft_sort(v, problem, None)
    torch.testing.assert_close(A @ v.unsqueeze(-1), v.sort(-1).values.unsqueeze(-1))
    torch.testing.assert_close(A[0, 0, 0], torch.tensor([0.0, 1.0, 0.0, 0.0]).double())


def test_the_reference_stays_short():
    with open(reference.__file__, encoding="utf-8") as file:
        assert len(file.readlines()) < 80
