"""Tables of exponentials: they are what their fit gives, and as good as they say."""

import math

import pytest
import torch

from espformer.ops.esp.exponentials import (
    ABSOLUTE,
    GAUSSIAN,
    exponential_sum,
    fit_gaussian,
    uniform_error,
)

PAIRS = sorted(GAUSSIAN)
GRID = torch.linspace(0, 12, 24001, dtype=torch.float64)


def direct_sum(table, x: float) -> float:
    terms = zip(table.weights, table.poles, strict=True)
    return sum((w * complex(math.e) ** (-p * x)).real for w, p in terms)


@pytest.mark.parametrize("pairs", PAIRS)
def test_the_stored_table_is_the_fitted_one(pairs):
    stored, fitted = GAUSSIAN[pairs], fit_gaussian(pairs)
    assert len(stored.poles) == len(stored.weights) == pairs
    assert stored.poles == pytest.approx(fitted.poles, abs=1e-6)
    assert stored.weights == pytest.approx(fitted.weights, abs=1e-6)
    assert stored.error == pytest.approx(fitted.error, rel=0.02)


@pytest.mark.parametrize("pairs", PAIRS)
def test_the_stated_error_is_the_largest(pairs):
    table = GAUSSIAN[pairs]
    error = float((torch.exp(-(GRID**2)) - table.approximate(GRID)).abs().max())
    assert 0.9 * table.error < error < 1.01 * table.error


@pytest.mark.parametrize(("pairs", "error"), [(3, 1.5e-5), (4, 1.9e-7), (6, 2.8e-11)])
def test_errors_that_the_documentation_names(pairs, error):
    assert uniform_error(GAUSSIAN[pairs]) < error


@pytest.mark.parametrize(("pairs", "error"), [(3, 2.0e-4), (4, 3.8e-6), (6, 1.1e-9)])
def test_the_slope_of_the_sum(pairs, error):
    table = GAUSSIAN[pairs]
    x = GRID.clone().requires_grad_()
    (slope,) = torch.autograd.grad(table.approximate(x).sum(), x)
    (exact,) = torch.autograd.grad(table.exact(x).sum(), x)
    assert float((slope - exact).abs().max()) < error


@pytest.mark.parametrize("pairs", PAIRS)
def test_equal_numbers_are_one_and_do_not_push(pairs):
    terms = list(zip(GAUSSIAN[pairs].weights, GAUSSIAN[pairs].poles, strict=True))
    assert sum(w for w, _ in terms).real == pytest.approx(1, abs=1e-13)
    assert sum(w * p for w, p in terms).real == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("table", [ABSOLUTE, *GAUSSIAN.values()], ids=lambda t: f"{len(t.poles)}")
def test_waves_decay(table):
    """No state between chunks may grow with distance, for any temperature."""
    assert all(complex(pole).real > 0 for pole in table.poles)


@pytest.mark.parametrize("table", [ABSOLUTE, *GAUSSIAN.values()], ids=lambda t: f"{len(t.poles)}")
def test_the_sum_by_hand(table):
    for x in (0.0, 0.3, 1.7, 5.0):
        by_hand = direct_sum(table, x)
        assert float(table.approximate(torch.tensor(x))) == pytest.approx(by_hand, abs=1e-7)
        exact = math.exp(-x) if table.metric == "absolute" else math.exp(-x * x)
        assert by_hand == pytest.approx(exact, abs=1.1 * table.error + 1e-15)


def test_the_absolute_kernel_is_one_exact_exponential():
    assert (ABSOLUTE.weights, ABSOLUTE.poles) == ((1.0,), (1.0,))
    assert uniform_error(ABSOLUTE) < 1e-15
    assert exponential_sum("absolute", torch.float32) is ABSOLUTE


def test_precision_decides_how_many_pairs():
    assert exponential_sum("squared", torch.float32) is GAUSSIAN[4]
    assert exponential_sum("squared", torch.float64) is GAUSSIAN[6]
