"""The compiled kernels against the torch operator: outputs and gradients of drawn problems."""

from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

pytest.importorskip("numba")

from espformer import esp_attention
from espformer.ops.esp.cpu import operators
from tests.compare import (
    BALANCES,
    COUPLINGS,
    KINDS,
    METRICS,
    assert_agree,
    assert_same,
    cloud,
    differentiate,
    some,
    tokens,
)

FORMS = operators.RECURRENCES, operators.MATRICES, operators.BANDS


def any_call(largest=16, widths=(1, 3, 8, 16)):
    """Problems of every kind; every further width is seconds of compiling."""
    return given(
        metric=st.sampled_from(METRICS),
        balance=st.sampled_from(BALANCES),
        hard=st.sampled_from((False, False, False, True)),
        ties=st.sampled_from(("stable", "average")),
        coupling=st.sampled_from(COUPLINGS),
        unit=st.sampled_from(("absolute", "spread")),
        kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
        n=st.integers(1, 120),
        m=st.one_of(st.none(), st.integers(1, 120)),
        head_dim=st.integers(1, largest),
        width=st.sampled_from(widths),
        slices=st.integers(0, 4),
        preferred=st.booleans(),
        masked=st.booleans(),
        exponent=st.floats(-6, 1),
        tau=st.sampled_from((0.0, 0.1, 1.0)),
        seed=st.integers(0, 2**20),
        form=st.sampled_from((None, *FORMS)),
    )


def assert_cpu_is_linear(
    metric, balance, hard, ties, coupling, unit, kinds, n, m, head_dim, width, slices, preferred,
    masked, exponent, tau, seed, form,
):  # fmt: skip
    """`form`: how plans are applied; None leaves that to the sizes."""
    torch.manual_seed(seed)
    m = n if m is None else m
    if {"narrow", "far", "one-point"} & set(kinds):
        unit = "absolute"  # quotients by the spread keep few digits of differences, or none
    query, key = cloud(kinds[0], 2, n, head_dim), cloud(kinds[1], 2, m, head_dim)
    value = torch.randn(2, m, width, dtype=torch.float64)
    # Weights are exp(-τ D): a cost of a million leaves fewer digits than a cost of one.
    spread = float((query.unsqueeze(-2) - key.unsqueeze(-3)).square().sum(-1).max()) / head_dim
    chosen = operators._form_of if form is None or hard else lambda *_: form
    with mock.patch.object(operators, "_form_of", chosen):
        assert_same(
            query, key, value, "cpu", "linear", metric=metric, balance=balance, hard=hard,
            ties=ties, coupling=coupling, temperature_unit=unit, inverse_temperature=tau,
            sort_temperature=torch.tensor(10.0**exponent, dtype=torch.float64),
            slices=torch.randn(slices, head_dim, dtype=torch.float64) if slices else None,
            slice_logits=torch.randn(slices or head_dim).double() if preferred else None,
            query_mask=some(2, n) if masked else None, key_mask=some(2, m) if masked else None,
            slack=1 + tau * spread,
        )  # fmt: skip


@settings(max_examples=100)
@any_call()
def test_any_call(**drawn):
    assert_cpu_is_linear(**drawn)


@pytest.mark.slow
@settings(max_examples=4000)
@any_call(20, (1, 3, 16, 17, 40))
def test_thousands_of_calls(**drawn):
    assert_cpu_is_linear(**drawn)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("n", [15, 16, 17, 40, 41, 96, 97, 300], ids=lambda n: f"N{n}")
def test_borders(metric, balance, n):
    """Lengths at which sorting, vectors or chunks change how they work."""
    query, key, value = tokens(1, 2, n=n, head_dim=3, width=5)
    for t in (1e-3, 0.3, 10.0):
        assert_same(
            query, key, value, "cpu", "linear", metric=metric, balance=balance,
            sort_temperature=torch.tensor([t, 2 * t], dtype=torch.float64),
            inverse_temperature=0.5,
        )  # fmt: skip


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize(
    ("n", "width"),
    [
        (19, 16),
        (64, 16),
        (500, 16),
        *(pytest.param(n, 40, marks=pytest.mark.slow) for n in (19, 500)),
    ],
    ids=lambda n: f"{n}",
)
def test_single_precision(metric, balance, n, width):
    inputs = tokens(2, 2, n=n, head_dim=8, width=width)
    options = {"metric": metric, "balance": balance, "inverse_temperature": 0.1}
    exact = differentiate(*inputs, backend="linear", **options)
    found = differentiate(*(x.float() for x in inputs), backend="cpu", **options)
    twin = differentiate(*(x.float() for x in inputs), backend="linear", **options)
    assert_agree(found, exact, output=1e-5, gradients=2e-5)
    for name, expected in exact.items():  # no worse than the torch operator, by much
        own, others = ((x[name] - expected).norm() for x in (found, twin))
        assert own <= 3 * others + 1e-6 * expected.norm(), name


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("form", FORMS)
def test_forms_in_single_precision(form, balance, metric):
    """Plans by recurrences, as matrices and as bands; with padding, and N ≠ M."""
    inputs = tokens(2, 2, n=150, m=131, head_dim=8, width=16)
    options = {
        "metric": metric, "balance": balance, "inverse_temperature": 0.1, "sort_temperature": 0.1,
        "query_mask": some(2, 150), "key_mask": some(2, 131),
    }  # fmt: skip
    exact = differentiate(*inputs, backend="linear", **options)
    with mock.patch.object(operators, "_form_of", return_value=form):
        found = differentiate(*(x.float() for x in inputs), backend="cpu", **options)
    assert_agree(found, exact, output=1e-5, gradients=2e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("slices", [1, 3])
def test_gradients_of_the_cheapest_slice(form, slices):
    """Large τ multiply rounding errors of logits, and of differences between slices."""
    inputs = [*tokens(2, 2, n=30, head_dim=3, width=8)]
    inputs.append(torch.nn.functional.normalize(torch.randn(slices, 3), dim=-1))
    found = {}
    for backend, dtype in (("linear", torch.float64), ("cpu", torch.float32)):
        query, key, value, directions = (x.float().to(dtype) for x in inputs)
        with mock.patch.object(operators, "_form_of", return_value=form):
            found[backend] = differentiate(
                query, key, value, slices=directions, backend=backend, metric="squared",
                inverse_temperature=1e6,
            )  # fmt: skip
    assert_agree(found["cpu"], found["linear"], output=1e-5, gradients=2e-5)


@pytest.mark.parametrize(
    ("n", "t", "form"),
    [
        (20, 0.1, "matrices"), (64, 0.1, "bands"), (40, 1.0, "matrices"), (200, 0.03, "bands"),
        (200, 1.0, "recurrences"), (600, 0.01, "recurrences"),
    ],
)  # fmt: skip
def test_the_form_follows_from_the_band(n, t, form):
    """Forward and backward choose alike, with padding too, which is no part of a band."""
    query, key, value = (x.float() for x in tokens(2, 2, n=n, head_dim=8, width=8))
    mask, chosen, choose = some(2, n), [], operators._form_of

    def spy(*args):
        chosen.append(choose(*args))
        return chosen[-1]

    one_thread = mock.patch.object(torch, "get_num_threads", return_value=1)
    with mock.patch.object(operators, "_form_of", spy), one_thread:
        differentiate(
            query, key, value, backend="cpu", metric="squared", sort_temperature=t, key_mask=mask,
            query_mask=mask,
        )  # fmt: skip
    assert chosen == [form, form]


@pytest.mark.parametrize("options", [{}, {"hard": True}, {"balance": "both"}], ids=str)
def test_no_token_takes_part(options):
    query, key, value = tokens(3, 2, n=9)
    mask = some(3, 9)
    mask[1] = False
    for masks in ({"mask": mask}, {"query_mask": mask, "key_mask": ~mask}):
        assert_same(query, key, value, "cpu", "linear", inverse_temperature=0.5, **masks, **options)


@pytest.mark.parametrize("which", [("query",), ("key",), ("value",), ("query", "value")], ids=str)
@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_some_gradients_alone_are_those_of_all(which, tau):
    inputs = dict(zip(("query", "key", "value"), tokens(1, 2, n=11), strict=True))
    options = {"inverse_temperature": tau, "backend": "cpu"}
    expected = differentiate(**inputs, **options)
    leaves = {name: x.clone().requires_grad_(name in which) for name, x in inputs.items()}
    output = esp_attention(**leaves, **options)
    upstream = torch.sin(torch.arange(output.numel()) + 1.0).view_as(output).double()
    output.backward(upstream)
    for name, leaf in leaves.items():
        if name in which:
            torch.testing.assert_close(leaf.grad, expected[name])
        else:
            assert leaf.grad is None


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("balance", BALANCES)
def test_errors_of_many_additions_do_not_add_up(metric, balance):
    """Equal tokens are the worst: every addition is rounded the same way."""
    query = torch.zeros(1, 20_000, 1)
    query[0, 0] = 1e3
    out = esp_attention(
        query, query, torch.ones_like(query), backend="cpu", metric=metric, balance=balance,
        sort_temperature=1.0, temperature_unit="absolute",
    )  # fmt: skip
    torch.testing.assert_close(out, torch.ones_like(out), atol=1e-5, rtol=1e-5)
