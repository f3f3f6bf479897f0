"""Linear-time products with the kernel of sorted numbers, against the dense matrix."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from espformer.ops.esp import sorted_kernel
from espformer.ops.esp.exponentials import exponential_sum
from espformer.ops.esp.sorted_kernel import SortedKernel
from tests.compare import GRADIENT_TOLERANCE, METRICS, OUTPUT_TOLERANCE

RANKS = [1, 2, 3, 31, 32, 33, 64, 65, 97, 200]


def dense_product(s: Tensor, inv_bandwidth: Tensor, x: Tensor, metric: str) -> Tensor:
    distance = (s.unsqueeze(-1) - s.unsqueeze(-2)).abs() * inv_bandwidth.unsqueeze(-1)
    return torch.exp(-distance if metric == "absolute" else -(distance**2)) @ x


def linear_product(s: Tensor, inv_bandwidth: Tensor, x: Tensor, metric: str) -> Tensor:
    return SortedKernel(s, inv_bandwidth, exponential_sum(metric, s.dtype))(x)


def with_gradients(product, s, inv_bandwidth, x, metric):
    leaves = [y.detach().clone().requires_grad_() for y in (s, inv_bandwidth, x)]
    out = product(*leaves, metric)
    upstream = torch.cos(torch.arange(out.numel()) + 0.5).view_as(out).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def assert_is_dense(s, inv_bandwidth, x, metric):
    found = with_gradients(linear_product, s, inv_bandwidth, x, metric)
    expected = with_gradients(dense_product, s, inv_bandwidth, x, metric)
    scale = max(1.0, float(x.abs().max())) * s.shape[-1]
    assert float((found[0] - expected[0]).abs().max()) < OUTPUT_TOLERANCE[metric] * scale
    floors = {"points": float(inv_bandwidth.max()), "inv_bandwidth": 1e-3, "x": 1.0}
    for (name, floor), a, b in zip(floors.items(), found[1:], expected[1:], strict=True):
        bound = GRADIENT_TOLERANCE[metric] * max(float(b.abs().max()), floor)
        assert float((a - b).abs().max()) < bound, name


def ascending(*shape: int, spread: float = 1.0) -> Tensor:
    return (spread * torch.randn(shape, dtype=torch.float64)).sort(-1).values


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("width", [1e-6, 1e-3, 0.1, 1.0, 30.0])
@pytest.mark.parametrize("ranks", RANKS)
def test_against_the_dense_matrix(metric, width, ranks):
    inv_bandwidth = torch.tensor([1 / width, 3 / width], dtype=torch.float64).view(2, 1, 1)
    x = torch.randn(2, 3, ranks, 2, dtype=torch.float64)
    assert_is_dense(ascending(2, 3, ranks), inv_bandwidth, x, metric)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("chunk", [1, 2, 7, 32, 1000])
def test_chunks_of_any_size_give_the_same(metric, chunk, monkeypatch):
    monkeypatch.setattr(sorted_kernel, "CHUNK", chunk)
    s, x = ascending(1, 2, 45), torch.randn(1, 2, 45, 3, dtype=torch.float64)
    s[..., 10:30] = s[..., 10:11]  # ties within and across chunks
    assert_is_dense(s.sort(-1).values, torch.full((1, 1, 1), 5.0, dtype=torch.float64), x, metric)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("run", [(0, 100), (31, 33), (5, 40), (20, 100), (64, 96)], ids=str)
def test_equal_numbers_do_not_push_each_other(metric, run):
    """Ties of any length, inside chunks and across their borders: the slope there is zero."""
    s = torch.linspace(-1, 1, 100, dtype=torch.float64).view(1, 1, 100).clone()
    s[..., run[0] : run[1]] = s[..., run[0]].item()
    x = torch.randn(1, 1, 100, 2, dtype=torch.float64)
    assert_is_dense(s.sort(-1).values, torch.full((1, 1, 1), 4.0, dtype=torch.float64), x, metric)


@settings(max_examples=60)
@given(
    metric=st.sampled_from(METRICS),
    ranks=st.integers(1, 140),
    width=st.floats(1e-6, 1e2),
    kind=st.sampled_from(["normal", "ties", "clusters", "wide", "narrow", "heavy"]),
    seed=st.integers(0, 2**20),
)
def test_any_numbers(metric, ranks, width, kind, seed):
    torch.manual_seed(seed)
    s = torch.randn(1, 2, ranks, dtype=torch.float64)
    s = {
        "normal": s,
        "ties": s.round(),
        "clusters": s.round() + 1e-3 * width * torch.randn_like(s),
        "wide": 1e6 * s,
        "narrow": 1e-9 * s + 1,
        "heavy": s**5,
    }[kind]
    x = torch.randn(1, 2, ranks, 2, dtype=torch.float64)
    inv_bandwidth = torch.full((1, 1, 1), 1 / width, dtype=torch.float64)
    assert_is_dense(s.sort(-1).values, inv_bandwidth, x, metric)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("ranks", [5, 40, 70])
def test_gradcheck(metric, ranks):
    s = torch.linspace(-1, 1, ranks, dtype=torch.float64).view(1, 1, -1) ** 3
    leaves = [
        s.contiguous().requires_grad_(),
        torch.full((1, 1, 1), 2.0, dtype=torch.float64, requires_grad=True),
        torch.randn(1, 1, ranks, 2, dtype=torch.float64, requires_grad=True),
    ]
    assert torch.autograd.gradcheck(
        lambda *inputs: linear_product(*inputs, metric), leaves, fast_mode=ranks > 5
    )


@pytest.mark.parametrize("metric", METRICS)
def test_the_matrix_is_symmetric_with_a_unit_diagonal(metric):
    eye = torch.eye(70, dtype=torch.float64).expand(1, 1, -1, -1)
    inv_bandwidth = torch.full((1, 1, 1), 2.0, dtype=torch.float64)
    kernel = linear_product(ascending(1, 1, 70), inv_bandwidth, eye, metric)
    torch.testing.assert_close(kernel, kernel.mT, atol=1e-10, rtol=0)
    torch.testing.assert_close(kernel.diagonal(dim1=-2, dim2=-1), torch.ones_like(kernel[..., 0]))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("width", [1e-6, 1e-5])
def test_float32_keeps_close_numbers_apart(metric, width):
    """Numbers a few widths apart far from the origin: only their differences may be scaled."""
    s = (3 + torch.arange(100).float() * 2.0**-21).view(1, 1, 100)
    x = torch.randn(1, 1, 100, 3)
    inv_bandwidth = torch.full((1, 1, 1), 1 / width)
    found = with_gradients(linear_product, s, inv_bandwidth, x, metric)
    expected = with_gradients(dense_product, s.double(), inv_bandwidth.double(), x.double(), metric)
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).norm() / b.norm()) < 2e-5


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("ranks", [30, 200])
def test_the_gradient_of_the_width_does_not_cancel_in_float32(metric, ranks):
    """Pairs a thousandth of the spread apart: ``Σ s_n ds_n`` would lose three digits."""
    s = torch.rand(1, 1, ranks // 2)
    s = torch.cat([s, s + 1e-5], -1).sort(-1).values
    x = torch.randn(1, 1, ranks, 3)
    inv_bandwidth = torch.full((1, 1, 1), 1e5)
    found = with_gradients(linear_product, s, inv_bandwidth, x, metric)[2]
    expected = with_gradients(
        dense_product, s.double(), inv_bandwidth.double(), x.double(), metric
    )[2]
    assert float(found) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("metric", METRICS)
def test_extremes_do_not_overflow(metric):
    s = torch.tensor([-1e30, -1.0, 0.0, 0.0, 1.0, 1e30]).repeat(10).sort().values.view(1, 1, -1)
    for inv_bandwidth in (1e-6, 1.0, 1e6):
        inverse = torch.full((1, 1, 1), inv_bandwidth)
        found = with_gradients(linear_product, s, inverse, torch.ones(1, 1, 60, 1), metric)
        wide = s.double(), inverse.double(), torch.ones(1, 1, 60, 1).double()
        expected = with_gradients(dense_product, *wide, metric)
        floors = (1.0, inv_bandwidth, 1.0, 1.0)  # slopes of equal numbers cancel
        for a, b, floor in zip(found, expected, floors, strict=True):
            scale = max(float(b.abs().max()), floor)
            assert float((a.double() - b).abs().max()) <= 3e-5 * scale


@pytest.mark.parametrize("metric", METRICS)
def test_only_the_gradients_asked_for(metric):
    s, x = ascending(1, 1, 50), torch.randn(1, 1, 50, 2, dtype=torch.float64)
    inv_bandwidth = torch.full((1, 1, 1), 2.0, dtype=torch.float64)
    every = with_gradients(linear_product, s, inv_bandwidth, x, metric)[1:]
    for position, expected in enumerate(every):
        leaves = [s, inv_bandwidth, x]
        leaves[position] = leaves[position].clone().requires_grad_()
        out = linear_product(*leaves, metric)
        upstream = torch.cos(torch.arange(out.numel()) + 0.5).view_as(out).double()
        (found,) = torch.autograd.grad(out, leaves[position], upstream)
        torch.testing.assert_close(found, expected)


def test_a_second_derivative_is_refused():
    s = ascending(1, 1, 40).requires_grad_()
    inv_bandwidth = torch.full((1, 1, 1), 2.0, dtype=torch.float64)
    out = linear_product(s, inv_bandwidth, torch.ones(1, 1, 40, 1, dtype=torch.float64), "absolute")
    (first,) = torch.autograd.grad(out.sum(), s, create_graph=True)
    with pytest.raises(RuntimeError, match=r'once, not twice.*backend="dense"'):
        torch.autograd.grad(first.sum(), s)


@pytest.mark.parametrize("metric", ["absolute", "squared"])
def test_no_subnormal_numbers(metric: str) -> None:
    """They are a hundred times slower to multiply: a sharp kernel must end in zeros."""
    values = torch.randn(1, 4, 200).sort(-1).values
    table = exponential_sum(metric, torch.float32)
    kernel = SortedKernel(values, torch.full((1, 1, 1), 300.0), table)
    smallest = torch.finfo(torch.float32).tiny
    for name, x in vars(kernel).items():
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            assert not ((x != 0) & (x.abs() < smallest)).any(), name


@pytest.mark.parametrize("metric", ["absolute", "squared"])
@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_a_product_of_tiny_numbers_is_as_good_as_one_of_others(metric: str, factor: float) -> None:
    """What is negligible is so beside the largest number of a head, and of no other head."""
    values, x = ascending(2, 3, 200), torch.randn(2, 3, 200, 4, dtype=torch.float64)
    width = torch.full((2, 1, 1), 30.0, dtype=torch.float64)
    expected = linear_product(values, width, x, metric)
    x[0] *= factor
    found = linear_product(values, width, x, metric)
    torch.testing.assert_close(found[0] / factor, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0)
