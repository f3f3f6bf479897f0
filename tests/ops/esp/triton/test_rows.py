"""Rows of values, sorted by short rows of numbers and back: the operator, and drawn rows."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from espformer import sorting
from espformer.ops.esp import triton as kernels
from espformer.ops.esp.triton.numbers import mix_rows, mix_rows_backward
from tests.opcheck import check_operator
from tests.rows import KINDS, apart

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LONGEST = 3000 if DEVICE == "cuda" else 50
FUNCTIONS = {"sort": sorting.soft_sort, "unsort": sorting.soft_unsort}


@pytest.mark.parametrize("back", [False, True], ids=["sort", "unsort"])
@pytest.mark.parametrize("learnt", [False, True], ids=["constant", "learnt"])
def test_operators(back, learnt):
    numbers, values = torch.randn(2, 6, device=DEVICE), torch.randn(2, 6, 3, device=DEVICE)
    mask = (torch.arange(6) < torch.tensor([[6], [4]])).to(DEVICE)
    inverse = torch.full((2,), 3.0, device=DEVICE)
    _, *kept = mix_rows.custom(numbers, values, inverse, mask, learnt, back)
    arguments = torch.ones_like(values), values, *kept, inverse, back, learnt
    check_operator(mix_rows_backward, arguments)
    leaves = [x.requires_grad_() for x in (numbers, values)]
    leaves.append(inverse.requires_grad_(learnt))
    check_operator(mix_rows, (*leaves, mask, learnt, back))


def check(name, kind, count, width, t, unit, masked, seed):
    """Outputs and gradients against the torch operator in float64."""
    torch.manual_seed(seed)
    x = apart(KINDS[kind](torch.randn(2, count)))
    values, upstream = torch.randn(2, 2, count, width)
    largest = float(x.abs().max())
    t = t * largest if unit == "absolute" else t
    mask = torch.ones(2, count, dtype=torch.bool)
    if masked:
        mask[0, torch.randperm(count)[: count // 3]] = False
    found = []
    for backend, dtype in (("triton", torch.float32), ("linear", torch.float64)):
        leaves = [y.clone().to(DEVICE, dtype) for y in (x, values, torch.full((2,), t))]
        leaves = [y.requires_grad_() for y in leaves]
        chosen = {"unit": unit, "backend": backend, "descending": seed % 2 == 1}
        chosen |= {"mask": mask.to(DEVICE)} if masked else {}
        out = FUNCTIONS[name](*leaves[:2], temperature=leaves[2], **chosen)
        grads = torch.autograd.grad(out, leaves, upstream.to(DEVICE, dtype))
        found.append([y.detach().double().cpu() for y in (out, *grads)])
    worth = 3e-6 * float(upstream.norm()) * float(values.norm())
    allowed = worth, 10 * worth / largest, worth, 10 * worth / t
    for got, want, rounding in zip(*found, allowed, strict=True):
        assert float((got - want).norm()) <= 3e-4 * float(want.norm()) + rounding


@settings(
    max_examples=100 if DEVICE == "cuda" else 5,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(
    st.sampled_from(list(FUNCTIONS)),
    st.sampled_from(["normal", "ties", "clusters", "wide", "narrow", "equal"]),
    st.integers(1, LONGEST), st.sampled_from([1, 2, 3, 8, 16]), st.sampled_from([0.01, 0.1, 3.0]),
    st.sampled_from(["spread", "absolute"]), st.booleans(), st.integers(0, 1000),
)  # fmt: skip
def test_drawn(name, kind, count, width, t, unit, masked, seed):
    check(name, kind, count, width, t, unit, masked, seed)


@pytest.mark.parametrize("name", list(FUNCTIONS))
@pytest.mark.parametrize("count", [1, 2, 33, pytest.param(129, marks=pytest.mark.slow)])
def test_lengths(name, count):
    check(name, "ties", count, 3, 0.1, "spread", True, count)


def test_tiny_numbers_are_told_apart():
    x = torch.tensor([[3.0, 1.0, 5.0, 2.0, 6.0, 4.0]], device=DEVICE) * 1e-36
    rows = torch.arange(6.0, device=DEVICE).view(1, 6, 1)
    found = sorting.soft_sort(x, rows, temperature=1e-3, backend="triton")
    assert torch.equal(found.flatten().round(), x.argsort().flatten().float())
    ranks = sorting.soft_rank(x, temperature=1e-3, backend="triton")
    torch.testing.assert_close(ranks, (x * 1e36).round())


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_nan_stays_in_its_row_and_padding_takes_no_part(name):
    x, values = torch.randn(3, 20, device=DEVICE), torch.randn(3, 20, 2, device=DEVICE)
    x[1, 7] = float("nan")
    mask = torch.ones(3, 20, dtype=torch.bool, device=DEVICE)
    mask[2] = False  # a row without numbers
    leaves = x.requires_grad_(), values.requires_grad_()
    out = FUNCTIONS[name](*leaves, mask=mask, backend="triton")
    grads = torch.autograd.grad(out.sum(), leaves)
    assert out[1].isnan().all()
    for y in (out, *grads):
        assert y[0].isfinite().all()
        assert not y[2].any()


def test_what_goes_through_attention():
    """Wide or long rows, other precisions and other options."""
    x, rows = torch.randn(2, 5), torch.randn(2, 5, 3)
    options = sorting.rows.prepare("soft_sort", x, -1, False).options
    takes = kernels.takes_rows
    assert takes(x, rows, options)
    assert not takes(x.double(), rows.double(), options)
    assert not takes(x, rows.repeat(1, 1, 6), options)
    assert not takes(x.repeat(1, 1000), rows.repeat(1, 1000, 1), options)
    for other in ({"hard": True}, {"straight_through": True}, {"metric": "squared"}):
        assert not takes(x, rows, sorting.rows.prepare("sort", x, -1, False, **other).options)


def test_numbers_that_differ_by_rounding_have_no_gradient():
    steps = torch.tensor([[0.0, 1.0, 0.0, 2.0, 1.0]], device=DEVICE)
    x = (1 + steps * torch.finfo(torch.float32).eps).requires_grad_()
    rows = torch.arange(10.0, device=DEVICE).view(1, 5, 2)
    for out in (
        sorting.soft_rank(x, backend="triton"),
        sorting.soft_sort(x, rows, backend="triton"),
        sorting.soft_unsort(x, rows, backend="triton"),
    ):
        upstream = torch.sin(torch.arange(out.numel(), device=DEVICE).view_as(out))
        (found,) = torch.autograd.grad(out, x, upstream)
        assert not bool(found.any())
