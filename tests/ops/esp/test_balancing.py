"""Chebyshev steps towards a doubly-stochastic matrix."""

import math

import pytest
import torch

from espformer.ops.esp.balancing import STEPS, chebyshev_exponents

KERNELS = {"absolute": lambda d: torch.exp(-d), "squared": lambda d: torch.exp(-(d**2))}


def row_sum_error(kernel: torch.Tensor, exponents: list[float]) -> float:
    x = kernel.sum(-1).rsqrt()
    for exponent in exponents:
        x = x * (x * (kernel @ x)) ** -exponent
    return float((x * (kernel @ x) - 1).abs().max())


def kernel_matrix(numbers: torch.Tensor, metric: str, width: float) -> torch.Tensor:
    return KERNELS[metric]((numbers[:, None] - numbers).abs() / width)


@pytest.mark.parametrize("steps", [1, 2, 5, 8])
def test_exponents_are_inverse_chebyshev_nodes(steps):
    """Their product ``Π (1 - ω λ)`` is the smallest that a polynomial of this degree can be on
    [1, 2]: ``1 / T_n(3)``."""
    exponents = chebyshev_exponents(steps)
    spectrum = torch.linspace(1, 2, 4001, dtype=torch.float64)
    product = torch.ones_like(spectrum)
    for exponent in exponents:
        product *= 1 - exponent * spectrum
    assert len(exponents) == steps
    assert float(product.abs().max()) == pytest.approx(
        1 / math.cosh(steps * math.acosh(3)), rel=1e-6
    )


def test_cautious_steps_come_first():
    exponents = chebyshev_exponents()
    assert exponents == sorted(exponents)
    assert 0.5 < exponents[0] < exponents[-1] < 1.0
    assert chebyshev_exponents(1) == pytest.approx([2 / 3])


@pytest.mark.parametrize("metric", KERNELS)
@pytest.mark.parametrize("width", [1e-3, 0.03, 0.1, 0.5, 2.0, 100.0])
@pytest.mark.parametrize("cloud", ["normal", "clusters", "outlier", "geometric"])
def test_eight_steps_are_enough(metric, width, cloud):
    count = 150
    numbers = {
        "normal": torch.randn(count, dtype=torch.float64),
        "clusters": torch.randint(0, 4, (count,)).double() * width,
        "outlier": torch.cat([torch.zeros(count - 1), torch.tensor([width])]).double(),
        "geometric": 0.8 ** torch.arange(count, dtype=torch.float64),
    }[cloud]
    assert row_sum_error(kernel_matrix(numbers, metric, width), chebyshev_exponents()) < 5e-6


# Where a search found the row sums of 65,536 numbers furthest from one: clusters, and their sizes.
WORST = {
    "absolute": (
        [-2.53, -1.34, -0.63, 0.02, 0.66, 1.28, 1.99, 2.71, 5.73, 6.83],
        [1.0, 1.5, 2.8, 4.6, 8.4, 15.2, 36.5, 122.6, 65179.7, 164.6],
    ),
    "squared": (
        [-2.74, -1.84, -1.08, -0.68, -0.33, 0.51, 0.72, 1.84, 1.85, 1.85],
        [1.0, 6.1, 28.8, 1.0, 137.5, 1562.7, 1.8, 1.0, 60526.7, 3271.4],
    ),
}


@pytest.mark.parametrize("metric", WORST)
def test_worst_case_known(metric):
    """What the documents promise is no less than what happens."""
    numbers, sizes = torch.tensor(WORST[metric], dtype=torch.float64)
    # Equal numbers have equal scales: w of them count w times.
    kernel = kernel_matrix(numbers, metric, 1.0) * sizes
    assert 3e-5 < row_sum_error(kernel, chebyshev_exponents()) < 5e-5


def test_plain_square_roots_are_far_worse():
    kernel = kernel_matrix(torch.randn(150, dtype=torch.float64), "absolute", 0.1)
    assert row_sum_error(kernel, [0.5] * STEPS) > 100 * row_sum_error(kernel, chebyshev_exponents())
