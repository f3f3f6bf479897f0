"""Kernels for sorts and ranks of numbers alone: registered operators, and drawn rows of numbers."""

import hypothesis.strategies as st
import numba
import numpy as np
import pytest
import torch
from hypothesis import settings

from espformer import sorting
from espformer.ops.esp.cpu import number_operators
from espformer.ops.esp.cpu.compiling import OPTIONS
from espformer.ops.esp.cpu.sort import sort_tokens
from tests.compare import some
from tests.opcheck import check_operator
from tests.rows import draw_rows, given_rows
from tests.sorting import dense


@pytest.mark.parametrize("ranks", [False, True], ids=["sort", "rank"])
@pytest.mark.parametrize("learnt", [False, True], ids=["constant", "learnt"])
def test_operators(ranks, learnt):
    numbers, mask = torch.randn(2, 6).double(), torch.arange(6) < torch.tensor([[6], [4]])
    t = torch.full((2,), 0.3).double() if learnt else None
    options = 0.3, "spread", ranks
    _, *kept = number_operators.mix_numbers(numbers, t, mask, *options)
    backward = number_operators.mix_numbers_backward
    arguments = torch.ones_like(numbers), *kept, t, *options
    check_operator(backward, arguments)
    leaves = numbers.requires_grad_(), t.requires_grad_() if learnt else None
    check_operator(number_operators.mix_numbers, (*leaves, mask, *options))


@pytest.mark.parametrize("function", [sorting.soft_sort, sorting.soft_rank])
def test_what_is_kept_may_be_compressed(function):
    """As by hooks that keep activations in 16 bits: numbers are rounded, and no index is."""

    def pack(x):
        return x.bfloat16() if x.is_floating_point() else x

    x, upstream = torch.randn(2, 2, 300)
    found = []
    for hooks in (pack, lambda x: x):
        leaf = x.clone().requires_grad_()
        unpack = lambda kept: kept.float() if kept.is_floating_point() else kept  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(hooks, unpack):
            out = function(leaf)
        found.append(torch.autograd.grad(out, leaf, upstream)[0])
    assert (found[0] - found[1]).norm() < 0.5 * found[1].norm()


any_numbers = given_rows(
    ("normal", "ties", "clusters", "wide", "narrow", "far", "one far", "equal"),
    ranks=st.booleans(),
    descending=st.booleans(),
    learnt=st.booleans(),
)


@settings(max_examples=150)
@any_numbers
def test_any_numbers(**drawn):
    assert_rows_are_dense(**drawn)


@pytest.mark.slow
@settings(max_examples=2000)
@any_numbers
def test_thousands_of_numbers(**drawn):
    assert_rows_are_dense(**drawn)


def assert_rows_are_dense(ranks, unit, kind, n, masked, descending, learnt, exponent, seed):
    """Output and gradients of two rows, each against the dense formula of what takes part."""
    x, t, largest = draw_rows(unit, kind, n, exponent, seed)
    mask = some(2, n) if masked else torch.ones(2, n, dtype=torch.bool)
    t = torch.tensor([t, 1.5 * t] if learnt else [t, t]).double()
    options = {"unit": unit, "descending": descending}
    function = sorting.soft_rank if ranks else sorting.soft_sort
    leaves = x.clone().requires_grad_(), t.clone().requires_grad_()
    given_t = leaves[1] if learnt else float(t[0])
    out = function(leaves[0], temperature=given_t, mask=mask, backend="cpu", **options)
    upstream = torch.sin(torch.arange(2 * n) + 1.0).view(2, n).double()
    got = [out, *torch.autograd.grad(out, leaves, upstream, allow_unused=True)]
    for row in range(2):
        taken = mask[row]
        own = x[row, taken].clone().requires_grad_()
        own_t = t[row].clone().requires_grad_()
        if ranks:
            want = dense.rank(own, temperature=own_t, **options)
            places = taken
        else:
            want = dense.sort_matrix(own, temperature=own_t, **options) @ own
            places = torch.arange(n) < len(own)
        assert not out[row, ~places].any()
        gradients = torch.autograd.grad(want, (own, own_t), upstream[row, places])
        # Forces are of the order of one over the width; numbers far from zero keep fewer digits.
        spread = float(own.detach().std(correction=0))
        width = float(t[row]) * (1.0 if unit == "absolute" else spread or largest)
        slack = 1e-11 * n * (1 + 1e-4 * largest / width)
        size = n if ranks else largest
        assert_near(out[row, places], want, slack * size)
        assert_near(got[1][row, taken], gradients[0], slack * max(1.0, size / width))
        assert not got[1][row, ~taken].any()
        if learnt:
            scale = max(1.0, largest / width) * size / float(t[row])
            assert_near(got[2][row], gradients[1], slack * scale)


def assert_near(got, want, bound):
    if got.numel():
        error = float((got - want).detach().abs().max())
        assert error <= max(bound, 1e-11 * float(want.detach().abs().max()))


@pytest.mark.parametrize("ranks", [False, True], ids=["sort", "rank"])
@pytest.mark.parametrize("t", [1e-3, 0.1, 3.0])
def test_float32_keeps_its_digits(ranks, t):
    """Nothing is lost to narrow kernels: forces are found without differences of large sums."""
    x = torch.randn(3, 700, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    function = sorting.soft_rank if ranks else sorting.soft_sort
    upstream = torch.sin(torch.arange(x.numel()) + 1.0).view_as(x)
    results = []
    for rows, backend in ((x, "cpu"), (x.double(), "linear")):
        leaf = rows.clone().requires_grad_()
        out = function(leaf, temperature=t, backend=backend)
        results.append([out, *torch.autograd.grad(out, leaf, upstream.to(out.dtype))])
    for got, want in zip(*results, strict=True):
        assert float(((got - want).norm() / want.norm()).detach()) < 1e-6


@numba.njit(**OPTIONS)
def _sort(numbers, tokens, n, order, points, keys, spare, counts):
    sort_tokens(numbers, tokens, n, order, points, keys, spare, counts)


ROWS = {
    "normal": lambda n, rng: rng.standard_normal(n),
    "ties": lambda n, rng: rng.standard_normal(n).round(1),
    "heavy tails": lambda n, rng: rng.standard_cauchy(n),
    "one far": lambda n, rng: np.append(rng.standard_normal(n - 1), 1e30),
    "many scales": lambda n, rng: np.exp(12 * rng.standard_normal(n)),
    "equal": lambda n, rng: np.ones(n),
    "zeros": lambda n, rng: np.where(rng.random(n) < 0.5, -0.0, 0.0),
    "infinite": lambda n, rng: rng.choice([-np.inf, np.inf, 0.5, 1.5], n),
    "subnormal": lambda n, rng: 1e-42 * rng.standard_normal(n),
    "largest": lambda n, rng: rng.choice([-3e38, 3e38, 1e38], n),
    "descending": lambda n, rng: -np.sort(rng.standard_normal(n)),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", ROWS)
def test_sorts_are_stable(kind, dtype):
    """In every way that numbers are sorted, by how many they are; some of them, or all."""
    rng = np.random.default_rng(0)
    for n in (1, 2, 20, 21, 80, 81, 256, 257, 1024, 1025, 1 << 14, (1 << 14) + 1):
        numbers = ROWS[kind](n, rng).astype(dtype)
        for tokens in (np.arange(n), np.flatnonzero(rng.random(n) < 0.7)):
            tokens = tokens.astype(np.int32)
            order, points = np.empty(n, np.int32), np.empty(n, dtype)
            spare, counts = np.empty(n, np.int32), np.empty(2048, np.int32)
            count = len(tokens)
            if count:
                room = np.empty(2 * n, np.uint64)
                _sort(numbers, tokens, count, order, points, room, spare, counts)
            want = tokens[np.argsort(numbers[tokens], kind="stable")]
            assert (order[:count] == want).all()
            assert (points[:count] == numbers[want]).all()
