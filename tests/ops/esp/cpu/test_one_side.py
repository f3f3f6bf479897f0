"""Kernels of soft sorts: registered operators, and drawn sorts against the torch operator."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings

pytest.importorskip("numba")

from espformer import sorting
from espformer.ops.esp.cpu import sort_operators
from tests.compare import BALANCES, METRICS, OUTPUT_TOLERANCE, some
from tests.opcheck import check_operator
from tests.rows import draw_rows, given_rows


@pytest.mark.parametrize("back", [False, True], ids=["sort", "unsort"])
@pytest.mark.parametrize("width", [1, 3])
def test_operators(back, width):
    numbers, value = torch.randn(2, 6).double(), torch.randn(2, 6, width).double()
    t, options = torch.full((1,), 0.3).double(), (back, "spread", "absolute", "rows", False, "")
    outputs = sort_operators.mix(numbers, value, t, None, *options)
    saved = [x.detach() for x in (*outputs[1:], value, t)]
    for flags in ((True, True, True), (True, False, False), (False, True, False)):
        arguments = (torch.ones_like(value), *saved, *options, *flags)
        check_operator(sort_operators.mix_backward, arguments)
    leaves = (x.requires_grad_() for x in (numbers, value, t))
    check_operator(sort_operators.mix, (*leaves, None, *options))


any_sort = given_rows(
    ("normal", "ties", "clusters", "wide", "narrow", "far"),
    metric=st.sampled_from(METRICS),
    balance=st.sampled_from(BALANCES),
    width=st.sampled_from((1, 2, 5)),
    hard=st.sampled_from((False, False, False, True)),
    back=st.booleans(),
)


@settings(max_examples=60)
@any_sort
def test_any_sort(**drawn):
    assert_cpu_is_linear(**drawn)


@pytest.mark.slow
@settings(max_examples=1000)
@any_sort
def test_a_thousand_sorts(**drawn):
    assert_cpu_is_linear(**drawn)


def assert_cpu_is_linear(metric, balance, unit, kind, n, width, hard, masked, back, exponent, seed):
    x, t, largest = draw_rows(unit, kind, n, exponent, seed)
    values = torch.randn(2, n, width, dtype=torch.float64)
    function = sorting.soft_unsort if back else sorting.soft_sort
    mask = some(2, n) if masked else None
    t = t**2 if unit == "absolute" and metric == "squared" else t
    results = []
    for backend in ("cpu", "linear"):
        leaves = [y.clone().requires_grad_() for y in (x, values, torch.tensor(t).double())]
        out = function(
            *leaves[:2], temperature=leaves[2], metric=metric, unit=unit, balance=balance,
            hard=hard, mask=mask, backend=backend,
        )  # fmt: skip
        upstream = torch.sin(torch.arange(out.numel()) + 1.0).view_as(out).double()
        grads = torch.autograd.grad(out, leaves, upstream, allow_unused=True)
        results.append([out, *(torch.zeros(1) if g is None else g for g in grads)])
    # Forces are of the order of one over the width; numbers far from zero keep fewer digits.
    spread = float(x.std(-1, correction=0).min()) if n > 1 else 1.0
    width_of = 10.0**exponent * (largest if unit == "absolute" else max(spread, 1e-300))
    slack = 10 * (1 + 1e-4 * largest / width_of)
    scales = (1.0, 1 / width_of, 1.0, max(1.0, largest / width_of) / t)
    for got, want, scale in zip(*results, scales, strict=True):
        bound = OUTPUT_TOLERANCE[metric] * slack * max(scale, float(want.detach().abs().max()))
        assert float((got - want).detach().abs().max()) <= bound
