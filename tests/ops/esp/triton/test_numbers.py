"""Sorts and ranks of numbers, by scans or with whole rows in registers: registered operators, and
drawn rows of numbers.
"""

from unittest import mock

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from espformer import sorting
from espformer.ops.esp.triton import numbers as kernels
from tests.opcheck import check_operator
from tests.rows import KINDS, apart

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LONGEST, PROBLEMS = (3000, 100) if DEVICE == "cuda" else (70, 12)
FUNCTIONS = {"sort": sorting.soft_sort, "rank": sorting.soft_rank}


@pytest.fixture(params=[True, False], ids=["whole", "scans"])
def whole(request):
    """Whether a program holds a whole row; otherwise rows are as if they were long."""
    with held(request.param):
        yield request.param


def held(whole):
    return mock.patch.object(kernels, "MOST_NUMBERS", 4096 if whole else 0)


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("name", ["sort", "rank"])
@pytest.mark.parametrize("learnt", [False, True], ids=["constant", "learnt"])
def test_operators(name, learnt):
    numbers = torch.randn(2, 6, device=DEVICE)
    mask = (torch.arange(6) < torch.tensor([[6], [4]])).to(DEVICE)
    inverse = torch.full((2,), 3.0, device=DEVICE)
    forward = getattr(kernels, f"{name}_numbers")
    backward = getattr(kernels, f"{name}_numbers_backward")
    _, *kept = forward.custom(numbers, inverse, mask, True)
    if name == "sort":
        kept = [numbers, *kept]
    arguments = torch.ones_like(numbers), *kept, inverse, mask, learnt
    check_operator(backward, arguments)
    leaves = numbers.requires_grad_(), inverse.requires_grad_(learnt)
    check_operator(forward, (*leaves, mask, True))


DRAWN = ("normal", "ties", "clusters", "wide", "widest", "narrow", "narrowest", "equal", "one far")


@settings(
    max_examples=100 if DEVICE == "cuda" else 8,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(
    st.sampled_from(list(FUNCTIONS)), st.sampled_from(DRAWN), st.integers(1, LONGEST),
    st.sampled_from([0.003, 0.1, 3.0]), st.sampled_from(["spread", "absolute"]), st.booleans(),
    st.booleans(), st.integers(0, 1000),
)  # fmt: skip
def test_drawn(name, kind, count, t, unit, masked, whole, seed):
    with held(whole):
        check(name, kind, count, t, unit, masked, seed)


@pytest.mark.parametrize("name", ["sort", "rank"])
@pytest.mark.parametrize(
    "count", [1, 2, 3, 31, 32, 33, 129, pytest.param(257, marks=pytest.mark.slow)]
)
def test_whole_rows(name, count):
    """Of lengths around those of blocks, some in several warps; with ties."""
    for masked in (False, True):
        check(name, "ties" if masked else "normal", count, 0.1, "spread", masked, count)


def check(name, kind, count, t, unit, masked, seed):
    """Outputs and gradients of numbers and temperatures against the torch operator in float64."""
    torch.manual_seed(seed)
    x = apart(KINDS[kind](torch.randn(2, count)))
    descending = seed % 2 == 1
    if unit == "absolute":
        t = t * float(x.abs().max())
    mask = torch.ones(2, count, dtype=torch.bool)
    if masked:
        mask[0, torch.randperm(count)[: count // 3]] = False
    upstream = torch.randn(2, count)
    found = []
    for backend, dtype in (("triton", torch.float32), ("linear", torch.float64)):
        leaf = x.clone().to(DEVICE, dtype).requires_grad_()
        softness = torch.full((2,), t, device=DEVICE, dtype=dtype, requires_grad=True)
        chosen = {"unit": unit, "backend": backend, "descending": descending}
        chosen |= {"mask": mask.to(DEVICE)} if masked else {}
        out = FUNCTIONS[name](leaf, temperature=softness, **chosen)
        grads = torch.autograd.grad(out, (leaf, softness), upstream.to(DEVICE, dtype))
        found.append([y.detach().double().cpu() for y in (out, *grads)])
    # What a gradient is worth if numbers change by their own size, or t by itself: sums may cancel.
    largest = float(x.abs().max())
    natural = float(upstream.norm()) * (largest if name == "sort" else count)
    allowed = 3e-6 * natural, 3e-6 * natural / largest, 3e-5 * natural / t
    for got, want, rounding in zip(*found, allowed, strict=True):
        assert float((got - want).norm()) <= 3e-4 * float(want.norm()) + rounding


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_without_gradient_of_temperature_and_nan(wrong):
    x = torch.randn(3, 50, device=DEVICE)
    x[1, 7] = wrong
    for function in FUNCTIONS.values():
        leaf = x.clone().requires_grad_()
        out = function(leaf, backend="triton")
        out.sum().backward()
        assert out[1].isnan().all()
        exact = x[[0, 2]].double().requires_grad_()
        want = function(exact, backend="dense")
        torch.testing.assert_close(out[[0, 2]].double(), want, rtol=1e-4, atol=1e-4)
        want.sum().backward()
        torch.testing.assert_close(leaf.grad[[0, 2]].double(), exact.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("name", ["sort", "rank"])
def test_a_row_without_numbers(name):
    """It is zero, and takes no part in the gradient of a temperature that all rows share."""
    x = torch.randn(2, 5, device=DEVICE)
    mask = torch.tensor([[True] * 5, [False] * 5], device=DEVICE)
    found = []
    for backend, rows in (("triton", 2), ("linear", 1)):
        t = torch.tensor(0.5, device=DEVICE, requires_grad=True)
        out = FUNCTIONS[name](x[:rows], mask=mask[:rows], temperature=t, backend=backend)
        assert not out[1:].any()
        weights = torch.arange(5.0, device=DEVICE)
        found.append(torch.autograd.grad((out * weights).sum(), t)[0])
    assert float(found[0]) == pytest.approx(float(found[1]), rel=1e-4)


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("name", ["sort", "rank"])
def test_results_may_be_changed_in_place(name):
    x, grads = torch.randn(2, 5, device=DEVICE, requires_grad=True), []
    for change in (lambda y: y.sub_(1).mul_(3), lambda y: 3 * (y - 1)):
        out = change(FUNCTIONS[name](x, backend="triton"))
        grads.append(torch.autograd.grad(out.square().sum(), x)[0])
    torch.testing.assert_close(*grads)


def test_one_launch_each():
    """A row that fits is sorted, and differentiated, by one launch."""
    with (
        mock.patch.object(kernels, "sort_points", side_effect=AssertionError),
        mock.patch.object(kernels, "point_gradients", side_effect=AssertionError),
        mock.patch.object(kernels.Launch, "__call__", autospec=True) as launched,
    ):
        for launches, function in enumerate(FUNCTIONS.values()):
            x = torch.randn(2, 5, device=DEVICE, requires_grad=True)
            function(x, backend="triton").sum().backward()
            assert launched.call_count == 2 * (launches + 1)


@pytest.mark.parametrize("t", [1e-37, float("inf")], ids=["none", "infinite"])
def test_extreme_temperatures(t):
    x = torch.randn(2, 9, device=DEVICE, requires_grad=True)
    ordered, ranks = (f(x, temperature=t, backend="triton") for f in FUNCTIONS.values())
    hard = x.sort(-1).values, x.argsort(-1).argsort(-1) + 1.0
    even = x.mean(-1, keepdim=True).expand(2, 9), torch.full_like(x, 5.0)
    for found, expected in zip((ordered, ranks), hard if t < 1 else even, strict=True):
        torch.testing.assert_close(found, expected)
    assert float(torch.autograd.grad(ranks.square().sum(), x)[0].abs().max()) < 1e-20
