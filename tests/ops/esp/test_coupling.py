"""Couplings of N ranks with M ranks, against fractions."""

import numpy as np
import pytest
import torch

from espformer.ops.esp.coupling import couple
from tests import oracles
from tests.compare import COUPLINGS

SIZES = [(1, 1), (1, 5), (5, 1), (2, 3), (3, 2), (6, 4), (4, 6), (7, 7), (12, 5), (31, 33)]


def matrix(name, n, m, rows=None, columns=None):
    rows, columns = rows or max(n), columns or max(m)
    coupling = couple(name, torch.tensor(n), torch.tensor(m), rows, columns, torch.float64)
    return coupling.matrix(columns)


@pytest.mark.parametrize("name", COUPLINGS)
@pytest.mark.parametrize(("n", "m"), SIZES, ids=[f"N{n}-M{m}" for n, m in SIZES])
def test_against_fractions(name, n, m):
    expected = oracles.COUPLINGS[name](n, m)
    np.testing.assert_allclose(matrix(name, [n], [m])[0].numpy(), expected, atol=1e-14)


@pytest.mark.parametrize("name", COUPLINGS)
def test_sequences_of_one_batch_have_their_own_lengths(name):
    n, m = [6, 1, 4, 0, 5, 0], [3, 5, 4, 2, 0, 0]
    found = matrix(name, n, m, rows=7, columns=6)
    for T, rows, columns in zip(found, n, m, strict=True):
        expected = np.zeros((7, 6))
        if rows and columns:
            expected[:rows, :columns] = oracles.COUPLINGS[name](rows, columns)
        np.testing.assert_allclose(T.numpy(), expected, atol=1e-14)


@pytest.mark.parametrize(("n", "m"), SIZES, ids=[f"N{n}-M{m}" for n, m in SIZES])
def test_quantiles_have_the_right_marginals_and_few_pairs(n, m):
    coupling = couple("quantile", torch.tensor([n]), torch.tensor([m]), n, m, torch.float64)
    T = coupling.matrix(m)[0]
    torch.testing.assert_close(T.sum(1), torch.ones(n, dtype=torch.float64))
    torch.testing.assert_close(T.sum(0), torch.full((m,), n / m, dtype=torch.float64))
    assert coupling.weights.shape == (1, n + m)
    assert int((T > 0).sum()) <= n + m - 1


@pytest.mark.parametrize("name", COUPLINGS)
@pytest.mark.parametrize("n", [1, 2, 9, 32])
def test_equal_lengths_are_the_identity(name, n):
    torch.testing.assert_close(matrix(name, [n], [n])[0], torch.eye(n, dtype=torch.float64))


@pytest.mark.parametrize("name", COUPLINGS)
def test_application_is_the_product_with_the_matrix(name):
    n, m, rows, columns = [4, 6, 2], [5, 3, 1], 6, 5
    coupling = couple(name, torch.tensor(n), torch.tensor(m), rows, columns, torch.float64)
    y = torch.randn(3, 2, columns, 4, dtype=torch.float64)
    expected = coupling.matrix(columns).unsqueeze(1) @ y
    torch.testing.assert_close(coupling(y), expected)
    assert coupling(y).shape == (3, 2, rows, 4)


def test_many_tokens_stay_exact_in_integers():
    """Cut points are multiples of 1/(n m): beyond the integers that float32 can count."""
    n, m = 20_011, 19_997
    T = couple("quantile", torch.tensor([n]), torch.tensor([m]), n, m, torch.float64)
    sums = torch.zeros(n, dtype=torch.float64).scatter_add_(0, T.rows[0], T.weights[0])
    assert float((sums - 1).abs().max()) < 1e-12
