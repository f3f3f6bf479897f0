"""Chebyshev steps towards a doubly-stochastic matrix."""

import math

import pytest
import torch

from espformer.ops.balancing import STEPS, chebyshev_exponents

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


def test_plain_square_roots_are_far_worse():
    kernel = kernel_matrix(torch.randn(150, dtype=torch.float64), "absolute", 0.1)
    assert row_sum_error(kernel, [0.5] * STEPS) > 100 * row_sum_error(kernel, chebyshev_exponents())
