"""Sorts and ranks of numbers, and of values with them: rows that one program holds, and longer
ones, against float64.
"""

import pytest
import torch

from espformer import sorting
from espformer.ops.common.triton import Launch

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

FUNCTIONS = {"sort": sorting.soft_sort, "rank": sorting.soft_rank}
GRID = 2**-16  # numbers are multiples of it: those that differ still do after scaling
COUNTS = (1, 2, 31, 32, 33, 257, 1000, 1024, 1025, 2048, 4095, 4096, 4097)


def found(name, x, upstream, mask, backend, **options):
    """The output and the gradients of the numbers and of the temperature."""
    leaf = x.clone().requires_grad_()
    t = torch.full(x.shape[:1], 0.1, device=x.device, dtype=x.dtype, requires_grad=True)
    out = FUNCTIONS[name](leaf, temperature=t, mask=mask, backend=backend, **options)
    return [out, *torch.autograd.grad(out, (leaf, t), upstream)]


def difference(got, want, floor):
    """‖got - want‖ as a share of ‖want‖, or of what a gradient is worth where sums cancel."""
    return float(
        (got.detach().double() - want.detach()).norm() / want.detach().norm().clamp(min=floor)
    )


@pytest.mark.parametrize("name", list(FUNCTIONS))
@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("count", COUNTS)
def test_against_float64(name, batch, count):
    torch.manual_seed(count)
    x = torch.randn(batch, count, device="cuda").div(GRID).round() * GRID
    upstream = torch.randn_like(x)
    mask = torch.rand_like(x) < 0.7
    for numbers, present in ((x, None), (x, mask), (x.mul(8).round() / 8, mask)):
        got = found(name, numbers, upstream, present, "triton")
        want = found(name, numbers.double(), upstream.double(), present, "linear")
        natural = float(upstream.norm()) * (1 if name == "sort" else count)
        for y, exact, limit in zip(got, want, (1e-5, 1e-5, 1e-4), strict=True):
            assert difference(y, exact, 0.1 * natural) < limit


@pytest.mark.parametrize("name", list(FUNCTIONS))
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_scales_and_descending(name, scale):
    x = scale * torch.randn(3, 1000, device="cuda")
    upstream = torch.randn_like(x)
    got = found(name, x, upstream, None, "triton", descending=True)
    want = found(name, x.double(), upstream.double(), None, "linear", descending=True)
    for y, exact in zip(got[:2], want, strict=False):
        assert difference(y, exact, 0.0) < 1e-4


@pytest.mark.parametrize("name", list(FUNCTIONS))
@pytest.mark.parametrize("count", [1000, 4096])
def test_nan_stays_in_its_row(name, count):
    x = torch.randn(4, count, device="cuda")
    x[1, 7], x[2, 8] = float("nan"), float("inf")
    leaf = x.clone().requires_grad_()
    out = FUNCTIONS[name](leaf, backend="triton")
    (grad,) = torch.autograd.grad(out.square().sum(), leaf)
    assert out[1:3].isnan().all()
    assert out[[0, 3]].isfinite().all()
    assert grad[[0, 3]].isfinite().all()


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_the_same_bits_in_every_run(name):
    x = torch.randn(64, 4096, device="cuda")
    first, second = (found(name, x, x.cos(), None, "triton") for _ in range(2))
    for y, again in zip(first, second, strict=True):
        assert torch.equal(y, again)


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_two_launches(name, monkeypatch):
    launched = []
    call = Launch.__call__
    monkeypatch.setattr(Launch, "__call__", lambda *a: (launched.append(a[0]), call(*a))[1])
    x = torch.randn(1, 1000, device="cuda", requires_grad=True)
    FUNCTIONS[name](x, backend="triton").sum().backward()
    assert len(launched) == 2


@pytest.mark.parametrize("function", [sorting.soft_sort, sorting.soft_unsort])
@pytest.mark.parametrize("width", [1, 3, 8, 16, 17])
@pytest.mark.parametrize("count", [1, 31, 1000, 1024, 4096, 4097])
def test_rows_against_float64(function, width, count):
    torch.manual_seed(count)
    x = torch.randn(5, count, device="cuda").div(GRID).round() * GRID
    values, upstream = torch.randn(2, 5, count, width, device="cuda")
    mask = torch.rand_like(x) < 0.7
    for numbers, present in ((x, None), (x.mul(8).round() / 8, mask)):
        results = []
        for backend, dtype in (("triton", torch.float32), ("linear", torch.float64)):
            given = numbers, values, torch.full_like(x[:, 0], 0.1)
            leaves = [y.to(dtype, copy=True).requires_grad_() for y in given]
            out = function(*leaves[:2], temperature=leaves[2], mask=present, backend=backend)
            results.append([out, *torch.autograd.grad(out, leaves, upstream.to(dtype))])
        natural = 0.1 * float(upstream.norm())
        for y, exact, limit in zip(*results, (1e-5, 2e-5, 1e-5, 1e-4), strict=True):
            assert difference(y, exact, natural) < limit


@pytest.mark.parametrize("function", [sorting.soft_sort, sorting.soft_unsort])
def test_two_launches_of_rows(function, monkeypatch):
    launched = []
    call = Launch.__call__
    monkeypatch.setattr(Launch, "__call__", lambda *a: (launched.append(a[0]), call(*a))[1])
    x = torch.randn(1, 1000, device="cuda", requires_grad=True)
    function(x, torch.randn(1, 1000, 8, device="cuda"), backend="triton").sum().backward()
    assert len(launched) == 2
