"""Every function against its dense formula in float64, with every gradient."""

from functools import partial

import hypothesis
import pytest
import scipy.stats
import torch
from hypothesis import strategies as st
from torch import Tensor

from espformer import sorting
from tests.sorting import dense

LENGTHS = (1, 2, 5, 33, 200)
TEMPERATURES = (0.01, 0.3, 10.0)
# The squared metric is a sum of exponentials; balancing ends after a few steps.
TOLERANCE = {
    ("absolute", "rows"): 1e-9,
    ("squared", "rows"): 1e-6,
    ("absolute", "both"): 1e-4,
    ("squared", "both"): 1e-4,
}
SETTINGS = [
    {"metric": metric, "balance": balance, "unit": unit}
    for metric, balance in TOLERANCE
    for unit in ("spread", "absolute")
]


def ids(setting):
    return "-".join(setting.values())


def numbers(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator, dtype=torch.float64) * 3 + 1


def with_gradients(function, *inputs: Tensor) -> list[Tensor]:
    """The output, and gradients of all inputs for a fixed upstream gradient."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    upstream = torch.sin(torch.arange(out.numel()) + 1.0).view_as(out).to(out.dtype)
    grads = torch.autograd.grad(out, leaves, upstream, allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]
    return [out.detach(), *grads]


def assert_same(ours, theirs, *inputs: Tensor, tolerance: float, floor: float = 1.0) -> None:
    results = zip(with_gradients(ours, *inputs), with_gradients(theirs, *inputs), strict=True)
    for i, (got, want) in enumerate(results):
        assert got.shape == want.shape
        scale = max(floor, float(want.abs().max()))
        error = float((got - want).abs().max())
        assert error <= tolerance * scale, f"result {i}: off by {error:.1e} of {scale:.1e}"


def tolerance(setting) -> float:
    return TOLERANCE[setting["metric"], setting["balance"]]


@pytest.mark.parametrize("setting", SETTINGS, ids=ids)
@pytest.mark.parametrize("t", TEMPERATURES)
@pytest.mark.parametrize("count", LENGTHS)
def test_sort_and_unsort(count, t, setting):
    x, rows = numbers(count), torch.stack([numbers(count, 1), numbers(count, 2)], -1)
    t = torch.tensor(t, dtype=torch.float64)
    # A kernel of 1/100 of the spread has forces a hundred times as large.
    limit = tolerance(setting) * 10
    assert_same(
        lambda x, t: sorting.soft_sort(x, temperature=t, **setting),
        lambda x, t: dense.sort_matrix(x, temperature=t, **setting) @ x,
        x, t, tolerance=limit,
    )  # fmt: skip
    for descending in (False, True):
        options = {**setting, "descending": descending}
        assert_same(
            lambda x, v, t, o=options: sorting.soft_sort(x, v, temperature=t, **o),
            lambda x, v, t, o=options: dense.sort_matrix(x, temperature=t, **o) @ v,
            x, rows, t, tolerance=limit,
        )  # fmt: skip
        assert_same(
            lambda x, v, t, o=options: sorting.soft_unsort(x, v, temperature=t, **o),
            lambda x, v, t, o=options: dense.sort_matrix(x, temperature=t, **o).mT @ v,
            x, rows, t, tolerance=limit,
        )  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS, ids=ids)
@pytest.mark.parametrize("t", TEMPERATURES)
@pytest.mark.parametrize("count", LENGTHS)
def test_ranks_quantiles_and_weights(count, t, setting):
    x, t = numbers(count), torch.tensor(t, dtype=torch.float64)
    limit = tolerance(setting) * 10
    pairs = [
        (sorting.soft_rank, dense.rank),
        (partial(sorting.soft_quantile, q=0.3), partial(dense.quantile, q=0.3)),
        (sorting.soft_median, partial(dense.quantile, q=0.5)),
        (partial(sorting.soft_topk, k=1), partial(dense.topk, k=1)),
        (partial(sorting.soft_topk, k=count), partial(dense.topk, k=count)),
    ]
    for ours, theirs in pairs:
        assert_same(
            lambda x, t, f=ours: f(x, temperature=t, **setting),
            lambda x, t, f=theirs: f(x, temperature=t, **setting),
            x, t, tolerance=limit, floor=max(1.0, 0.1 / float(t)),
        )  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS, ids=ids)
@pytest.mark.parametrize("t", TEMPERATURES)
@pytest.mark.parametrize("count", LENGTHS)
def test_permutations(count, t, setting):
    """As many columns as rows: kernels for many columns are compiled in slow tests."""
    assert_same(
        lambda x, t: sorting.soft_permutation(x, temperature=t, **setting),
        lambda x, t: dense.sort_matrix(x, temperature=t, **setting),
        numbers(count), torch.tensor(t, dtype=torch.float64),
        tolerance=tolerance(setting) * 10, floor=max(1.0, 0.1 / t),
    )  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS, ids=ids)
@pytest.mark.parametrize("t", [0.03, 0.3])
def test_spearman(t, setting):
    x, y, t = numbers(60), numbers(60, 1), torch.tensor(t, dtype=torch.float64)
    y = y + x
    limit = tolerance(setting) * 10

    def both(x, y, t):
        return dense.pearson(*(dense.rank(z, temperature=t, **setting) for z in (x, y)))

    assert_same(
        lambda x, y, t: sorting.spearman(x, y, temperature=t, **setting), both, x, y, t,
        tolerance=limit,
    )  # fmt: skip
    true = torch.from_numpy(scipy.stats.rankdata(y.numpy()))
    assert_same(
        lambda x, t: sorting.spearman_loss(x, y, temperature=t, **setting),
        lambda x, t: 1 - dense.pearson(dense.rank(x, temperature=t, **setting), true),
        x, t, tolerance=limit,
    )  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS[:1] + SETTINGS[3:4], ids=ids)
def test_gradcheck(setting):
    x = numbers(9).requires_grad_()
    values = torch.stack([numbers(9, 1), numbers(9, 2)], -1).requires_grad_()
    t = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    y = numbers(9, 3).requires_grad_()

    def every(x, values, t, y):
        options = {**setting, "temperature": t}
        return (
            sorting.soft_sort(x, values, **options),
            sorting.soft_unsort(x, values, descending=True, **options),
            sorting.soft_rank(x, **options),
            sorting.spearman(x, y, **options),
            sorting.soft_quantile(x, torch.tensor([0.1, 0.77]), **options),
            sorting.soft_topk(x, 3, **options),
        )

    assert torch.autograd.gradcheck(every, (x, values, t, y), atol=1e-6)


@pytest.mark.parametrize("backend", ["dense", "linear", "triton"])
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_backends_agree(backend, hard, masked):
    count = 12 if backend == "triton" and not torch.cuda.is_available() else 40
    x, values = torch.randn(3, count), torch.randn(3, count, 2)
    mask = torch.rand(3, count) < 0.7 if masked else None
    for function in (sorting.soft_sort, sorting.soft_unsort):
        ours = partial(function, mask=mask, hard=hard, temperature=0.2, backend=backend)
        oracle = partial(function, mask=mask, hard=hard, temperature=0.2, backend="dense")
        got = with_gradients(ours, x, values)
        want = with_gradients(oracle, x.double(), values.double())
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=2e-5)


def test_second_derivatives_are_refused_or_dense():
    x = numbers(6).requires_grad_()

    def slope(backend):
        ranks = sorting.soft_rank(x, backend=backend)
        return torch.autograd.grad(ranks[0], x, create_graph=True)[0].sum()

    exact = torch.autograd.grad(dense.rank(x)[0], x, create_graph=True)[0].sum()
    want = torch.autograd.grad(exact, x)[0]
    torch.testing.assert_close(torch.autograd.grad(slope("dense"), x)[0], want)
    with pytest.raises(RuntimeError, match="once, not twice"):
        torch.autograd.grad(slope("linear"), x)


some_numbers = st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=1, max_size=70)


@hypothesis.given(x=some_numbers, t=st.sampled_from([1e-3, 0.1, 1.0, 30.0]), data=st.data())
@hypothesis.settings(max_examples=60)
def test_any_numbers_with_ties(x, t, data):
    """Few different numbers: most of them tie, and ties exert no force on each other."""
    x = torch.tensor(x, dtype=torch.float64)
    unit = data.draw(st.sampled_from(["spread", "absolute"]))
    options = {"temperature": t, "unit": unit}
    limit = 1e-8
    assert_same(
        lambda x: sorting.soft_sort(x, **options),
        lambda x: dense.sort_matrix(x, **options) @ x, x, tolerance=limit,
    )  # fmt: skip
    assert_same(
        lambda x: sorting.soft_rank(x, **options), lambda x: dense.rank(x, **options), x,
        tolerance=limit,
    )  # fmt: skip


@hypothesis.given(x=some_numbers)
@hypothesis.settings(max_examples=40)
def test_hard_is_exact(x):
    x = torch.tensor(x)
    ranks = torch.from_numpy(scipy.stats.rankdata(x.numpy())).float()
    for descending in (False, True):
        order = x.argsort(descending=descending, stable=True)
        rows = torch.stack([x, torch.arange(len(x)).float()], -1)
        options = {"descending": descending, "hard": True}
        assert torch.equal(sorting.soft_sort(x, rows, **options), rows[order])
        assert torch.equal(sorting.soft_unsort(x, rows[order], **options), rows)
    torch.testing.assert_close(sorting.soft_rank(x, hard=True), ranks, atol=1e-4, rtol=0)
    torch.testing.assert_close(
        sorting.soft_rank(x, hard=True, descending=True), len(x) + 1 - ranks, atol=1e-4, rtol=0
    )
    torch.testing.assert_close(sorting.soft_rank(x, temperature=1e-6), ranks, atol=1e-4, rtol=0)
    for q in (0.0, 0.25, 0.5, 1.0):
        torch.testing.assert_close(sorting.soft_quantile(x, q, hard=True), x.quantile(q))
    k = (len(x) + 1) // 2
    weights = sorting.soft_topk(x, k, hard=True)
    assert weights.sum() == k
    assert set(weights.tolist()) <= {0.0, 1.0}
    assert torch.equal(x[weights == 1].sort().values, x.topk(k).values.sort().values)
