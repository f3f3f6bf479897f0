"""Shapes, dtypes, padding, extremes, NaN, straight-through, compilers, and errors in words."""

import itertools
import warnings
from functools import partial

import pytest
import scipy.stats
import torch

from espformer import sorting
from tests.sorting import dense

FUNCTIONS = {
    "soft_sort": sorting.soft_sort,
    "soft_unsort": lambda x, **o: sorting.soft_unsort(x, x, **o),
    "soft_permutation": sorting.soft_permutation,
    "soft_rank": sorting.soft_rank,
    "spearman": lambda x, **o: sorting.spearman(x, x.flip(-1), **o),
    "spearman_loss": lambda x, **o: sorting.spearman_loss(x, x.flip(-1), **o),
    "soft_quantile": lambda x, **o: sorting.soft_quantile(x, 0.2, **o),
    "soft_median": sorting.soft_median,
    "soft_topk": lambda x, **o: sorting.soft_topk(x, 1, **o),
}
every = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
def test_any_dimension(dim):
    x = torch.randn(4, 5, 6)
    values = torch.randn(4, 5, 6, 2, 3)
    last = x.movedim(dim, -1)
    options = {"temperature": 0.3}
    for function in (sorting.soft_sort, sorting.soft_rank):
        got = function(x, dim=dim, **options)
        torch.testing.assert_close(got, function(last, **options).movedim(-1, dim))
    got = sorting.soft_sort(x, values, dim=dim, **options)
    want = sorting.soft_sort(last, values.movedim(dim % 3, 2), **options).movedim(2, dim % 3)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(sorting.soft_unsort(x, got, dim=dim, hard=True).shape, values.shape)

    q = torch.tensor([0.1, 0.5])
    for keepdim in (False, True):
        got = sorting.soft_quantile(x, q, dim=dim, keepdim=keepdim, hard=True)
        torch.testing.assert_close(got, x.quantile(q, dim=dim, keepdim=keepdim))
        got = sorting.soft_quantile(x, 0.3, dim=dim, keepdim=keepdim, hard=True)
        torch.testing.assert_close(got, x.quantile(0.3, dim=dim, keepdim=keepdim))
    assert sorting.soft_permutation(x, dim=dim).shape == (*last.shape, last.shape[-1])


def test_the_matrix_is_what_sorts():
    x, values = torch.randn(3, 8), torch.randn(3, 8, 4)
    for options in ({"balance": "both"}, {"descending": True}, {"mask": torch.rand(3, 8) < 0.6}):
        matrix = sorting.soft_permutation(x, **options)
        torch.testing.assert_close(matrix @ values, sorting.soft_sort(x, values, **options))
        torch.testing.assert_close(matrix.mT @ values, sorting.soft_unsort(x, values, **options))


# A matrix is sorted rows of the identity: kernels for more than eight columns are compiled in slow
# tests alone.
@pytest.mark.parametrize("count", [8, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("balance", ["rows", "both"])
def test_sums(balance, count):
    x, ones = torch.randn(count, dtype=torch.float64), torch.ones(count).double()
    matrix = sorting.soft_permutation(x, temperature=0.5, balance=balance)
    weights = sorting.soft_topk(x, 7, temperature=0.5, balance=balance)
    torch.testing.assert_close(matrix.sum(-1), ones, atol=1e-5, rtol=0)
    torch.testing.assert_close(weights.sum(), torch.tensor(7.0).double(), atol=1e-4, rtol=0)
    if balance == "both":
        torch.testing.assert_close(matrix.sum(0), ones, atol=1e-5, rtol=0)
        assert 0 <= weights.min() <= weights.max() <= 1 + 1e-5


def padded_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and masks that are symmetric, since correlations pair a row with its mirror image."""
    mask = torch.rand(3, 8) < 0.8
    mask[:, 0] = True
    mask &= mask.flip(-1)
    return torch.randn(3, 8, dtype=torch.float64).masked_fill(~mask, torch.nan), mask


@pytest.mark.parametrize("name", ["soft_rank", "soft_topk"])
def test_padded_tokens_are_as_if_absent(name):
    x, mask = padded_rows()
    got = FUNCTIONS[name](x, mask=mask)
    for row, taken, out in zip(x, mask, got, strict=True):
        torch.testing.assert_close(out[taken], FUNCTIONS[name](row[taken]))
        assert not out[~taken].any()


def test_padded_ranks_come_last():
    x, mask = padded_rows()
    ranked, matrix = sorting.soft_sort(x, mask=mask), sorting.soft_permutation(x, mask=mask)
    for row, taken, out, a in zip(x, mask, ranked, matrix, strict=True):
        count = int(taken.sum())
        torch.testing.assert_close(out[:count], sorting.soft_sort(row[taken]))
        assert not out[count:].any()
        alone = sorting.soft_permutation(row[taken])
        torch.testing.assert_close(a[:count, taken], alone)
        torch.testing.assert_close(a.sum(), alone.sum())


@pytest.mark.parametrize("name", ["spearman", "soft_quantile", "soft_median"])
def test_padded_rows_have_the_numbers_of_what_is_left(name):
    x, mask = padded_rows()
    alone = [FUNCTIONS[name](row[taken]) for row, taken in zip(x, mask, strict=True)]
    torch.testing.assert_close(FUNCTIONS[name](x, mask=mask), torch.stack(alone))


@every
def test_padding_gets_no_gradient(function):
    x, mask = padded_rows()
    x.requires_grad_()
    if function is FUNCTIONS["spearman_loss"]:
        function = partial(function, reduction="sum")
    function(x, mask=mask).sum().backward()
    if function is FUNCTIONS["soft_unsort"]:  # there x is also a row for each rank
        return
    assert not x.grad[~mask].any()
    for row, taken, grad in zip(x.detach(), mask, x.grad, strict=True):
        leaf = row[taken].clone().requires_grad_()
        (alone,) = torch.autograd.grad(function(leaf).sum(), leaf)
        torch.testing.assert_close(grad[taken], alone)


@every
def test_a_row_that_is_all_padding(function):
    x = torch.randn(2, 6, requires_grad=True)
    mask = torch.tensor([[True], [False]]).expand(2, 6)
    if function is FUNCTIONS["spearman_loss"]:
        function = partial(function, reduction="none")
    out, alone = function(x, mask=mask), function(x[0])
    torch.testing.assert_close(out[0], alone)
    assert (out[1] == (1 if isinstance(function, partial) else 0)).all()  # no correlation
    grads = [torch.autograd.grad(y.sum(), x)[0] for y in (out, alone)]
    torch.testing.assert_close(*grads)


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes(function, dtype):
    count = 8 if function is sorting.soft_permutation else 30
    x = torch.randn(2, count).to(dtype)
    got = function(x)
    ranked = function in (sorting.soft_rank, FUNCTIONS["spearman"], FUNCTIONS["spearman_loss"])
    assert got.dtype == (torch.float32 if ranked and dtype.itemsize == 2 else dtype)
    eps = torch.finfo(dtype).eps if not ranked else torch.finfo(torch.float32).eps * 30
    torch.testing.assert_close(got.double(), function(x.double()), atol=10 * eps, rtol=2 * eps)
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    function(leaf).sum().backward()
    function(exact).sum().backward()
    assert leaf.grad.dtype == dtype
    eps = max(4 * torch.finfo(dtype).eps, 16 * torch.finfo(torch.float32).eps)
    rounding = eps * max(1.0, float(exact.grad.abs().max()))
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=0, atol=rounding)


EXTREMES = {
    "one": [0.7],
    "equal": [0.1] * 40,
    "zeros": [0.0] * 3,
    "tiny": [1e-30, 2e-30, -3e-30],
    "huge": [1e30, 2e30, -3e30],
    "outlier": [1.0, 1.0, 1.0, 1e20],
    "near": [1 / 3 + i * 1e-7 for i in range(40)],
}


def bounds(function, x):
    """What every result lies between."""
    low, high, count = float(x.min()), float(x.max()), len(x)
    known = {
        "soft_unsort": (count * min(low, 0), count * max(high, 0)),  # columns sum to N at most
        "soft_permutation": (0, 1),
        "soft_rank": (1, count),
        "spearman": (-1, 1),
        "spearman_loss": (0, 2),
        "soft_topk": (0, 1),
    }
    name = next(name for name, known in FUNCTIONS.items() if known is function)
    return known.get(name, (low, high))  # sorts and quantiles are means of the numbers


@every
@pytest.mark.parametrize("case", EXTREMES)
@pytest.mark.parametrize("metric", ["absolute", "squared"])
def test_extremes_stay_finite(function, case, metric):
    settings = itertools.product(
        (1e-30, 1e-8, 1e8, 1e30), ("spread", "absolute"), (torch.float32, torch.float64)
    )
    for t, unit, dtype in settings:
        x = torch.tensor(EXTREMES[case], dtype=dtype, requires_grad=True)
        temperature = torch.tensor(t, dtype=dtype, requires_grad=True)
        out = function(x, temperature=temperature, metric=metric, unit=unit)
        low, high = bounds(function, x.detach())
        room = 1e-3 * max(abs(low), abs(high))
        assert low - room <= out.min() <= out.max() <= high + room, (t, unit, dtype)
        grads = torch.autograd.grad(out.sum(), (x, temperature), allow_unused=True)
        assert all(g is None or g.isfinite().all() for g in grads), (t, unit, dtype)


@pytest.mark.parametrize("backend", ["auto", "linear", "dense"])
@pytest.mark.parametrize("number", [0.0, 1e-10, 0.1])
def test_numbers_without_spread_have_no_gradient(backend, number):
    """Rounding, divided by nearly nothing, is none."""
    x = number * (1 + torch.finfo(torch.float32).eps * (torch.arange(200) % 3))
    x, rows = x.requires_grad_(), torch.randn(200, 3)
    for out in (
        sorting.soft_rank(x, backend=backend),
        sorting.soft_sort(x, rows, backend=backend),
        sorting.soft_unsort(x, rows, backend=backend),
    ):
        upstream = torch.sin(torch.arange(out.numel()).view_as(out))
        (found,) = torch.autograd.grad(out, x, upstream)
        assert not found.any()


# Kernels of the squared metric in float32 are compiled for slow tests alone.
@pytest.mark.parametrize("metric", ["absolute", pytest.param("squared", marks=pytest.mark.slow)])
@pytest.mark.parametrize("scale", [2.0**-90, 2.0**-20, 2.0**60])
def test_units_of_the_spread_know_no_scale(scale, metric):
    x = torch.randn(5, 70)
    options = {"metric": metric, "temperature": 0.2}
    assert torch.equal(sorting.soft_rank(x, **options), sorting.soft_rank(x * scale, **options))
    shifted = sorting.soft_rank(x.double() + 3, **options)
    torch.testing.assert_close(shifted, sorting.soft_rank(x.double(), **options))
    absolute = {**options, "unit": "absolute"}
    assert not torch.allclose(
        sorting.soft_rank(x, **absolute), sorting.soft_rank(x * scale, **absolute)
    )


@pytest.mark.parametrize("backend", ["auto", "linear", "dense"])
@pytest.mark.parametrize("power", [-900, 900])
def test_numbers_that_only_float64_holds_are_sorted_like_others(power, backend):
    """Such as likelihoods: near 1e-271 all of them were taken for equal."""
    x = torch.randn(3, 40, dtype=torch.float64)
    rows = torch.randn(3, 40, 2, dtype=torch.float64)

    def results(unit: float) -> list[torch.Tensor]:
        leaf = (x * unit).requires_grad_()
        ranks = sorting.soft_rank(leaf, backend=backend)
        (slopes,) = torch.autograd.grad(ranks.square().sum(), leaf)
        mixed = sorting.soft_sort(leaf, rows, backend=backend)
        absolute = sorting.soft_rank(leaf, backend=backend, unit="absolute", temperature=0.1 * unit)
        return [ranks, slopes * leaf.detach(), mixed, absolute]

    for found, want in zip(results(2.0**power), results(1.0), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_in_plain_words(layout):
    nested = torch.nested.nested_tensor([torch.randn(3), torch.randn(4)], layout=layout)
    for call in (
        lambda: sorting.soft_rank(nested),
        lambda: sorting.spearman(torch.randn(2, 4), nested),
        lambda: sorting.soft_quantile(nested, 0.5),
    ):
        with pytest.raises(ValueError, match=r"is a nested tensor; pad it .* and pass a mask"):
            call()


def test_limits_of_the_temperature():
    x = torch.tensor([0.3, -1.2, 0.3, 5.0, 0.31], dtype=torch.float64)
    ranks = torch.from_numpy(scipy.stats.rankdata(x.numpy()))
    torch.testing.assert_close(sorting.soft_rank(x, temperature=1e-8), ranks)
    torch.testing.assert_close(
        sorting.soft_rank(x, temperature=1e8), torch.full((5,), 3.0).double()
    )
    torch.testing.assert_close(sorting.soft_sort(x, temperature=1e-8), x.sort().values)
    torch.testing.assert_close(
        sorting.soft_sort(x, temperature=1e8), x.mean().expand(5), atol=1e-7, rtol=0
    )


def test_a_million_numbers():
    x = torch.randn(1_000_000)
    torch.testing.assert_close(sorting.soft_sort(x, temperature=1e-9), x.sort().values)
    assert torch.equal(sorting.soft_sort(x, hard=True), x.sort().values)
    ranks = sorting.soft_rank(x, hard=True)
    true = torch.from_numpy(scipy.stats.rankdata(x.numpy()))
    assert (ranks.double() - true).abs().max() < 0.2  # float32 has 24 bits


def test_float32_is_near_float64():
    x = torch.randn(10_000)
    for t in (1e-4, 0.1, 1.0):
        exact = sorting.soft_rank(x.double(), temperature=t)
        error = (sorting.soft_rank(x, temperature=t).double() - exact).abs().max()
        assert error < 0.02, t
    small = x[:500].double()
    torch.testing.assert_close(
        sorting.soft_sort(small, temperature=0.1), dense.sort_matrix(small) @ small
    )


def test_one_temperature_for_every_row():
    x = torch.randn(2, 3, 10, dtype=torch.float64)
    t = torch.rand(3, dtype=torch.float64) + 0.1
    got = sorting.soft_rank(x, temperature=t)
    for i in range(3):
        torch.testing.assert_close(got[:, i], sorting.soft_rank(x[:, i], temperature=float(t[i])))


@every
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_stays_in_its_row(function, bad):
    """A row that holds NaN or an infinity is NaN; another row does not see it."""
    x = torch.randn(2, 8)
    x[0, 3] = bad
    x.requires_grad_()
    if function is FUNCTIONS["spearman_loss"]:
        assert function(x).isnan()
        assert function(x, reduction="none").isnan().tolist() == [True, False]
        return
    out = function(x)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()
    out[1].sum().backward()
    assert x.grad[1].isfinite().all()


@pytest.mark.parametrize("name", ["soft_sort", "soft_unsort", "soft_rank", "soft_topk"])
def test_straight_through(name):
    """The hard result, with the gradient of the soft one."""
    function = FUNCTIONS[name]
    x = torch.randn(3, 15, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(3, 15, dtype=torch.float64)
    hard, soft = function(x, hard=True), function(x)
    both = function(x, straight_through=True)
    torch.testing.assert_close(both, hard)
    expected = torch.autograd.grad(soft, x, upstream)[0]
    torch.testing.assert_close(torch.autograd.grad(both, x, upstream)[0], expected)
    mixed = function(x, straight_through=0.25)
    torch.testing.assert_close(mixed, 0.75 * soft + 0.25 * hard)


def test_hard_has_the_gradient_of_a_permutation():
    x = torch.randn(9, requires_grad=True)
    upstream = torch.randn(9)
    ours = torch.autograd.grad(sorting.soft_sort(x, hard=True), x, upstream)[0]
    torch.testing.assert_close(ours, torch.autograd.grad(x.sort().values, x, upstream)[0])
    assert not sorting.soft_rank(x, hard=True).requires_grad


def test_spearman_is_that_of_scipy():
    x, y = torch.randn(4, 50), torch.randn(4, 50)
    x[:, 1] = x[:, 0]  # ties
    for a, b, ours in zip(x, y, sorting.spearman(x, y, hard=True), strict=True):
        assert float(ours) == pytest.approx(scipy.stats.spearmanr(a, b).statistic, abs=1e-5)
    assert not sorting.spearman(torch.ones(2, 5), torch.randn(2, 5)).any()
    loss = sorting.spearman_loss(x, y, reduction="none")
    torch.testing.assert_close(sorting.spearman_loss(x, y), loss.mean())
    torch.testing.assert_close(sorting.spearman_loss(x, y, reduction="sum"), loss.sum())


@pytest.mark.parametrize("backend", ["cpu", "linear", "dense"])
@pytest.mark.parametrize("padded", [False, True])
def test_spearman_of_numbers_that_differ_by_rounding(backend, padded):
    """They count as equal if and only if the sort takes them for equal and has no gradient."""
    spread = torch.tensor([1e-7, 3e-7, 5e-7, 8e-7, 2e-6, 1e-5]).unsqueeze(-1)
    noise = torch.randn(6, 200)
    noise = (noise - noise.mean(-1, True)) / noise.std(-1, keepdim=True)
    x = (0.5 * (1 + spread * noise)).requires_grad_()
    options = {"backend": backend, "mask": torch.arange(200) < 180 if padded else None}
    loss = sorting.spearman_loss(x, x.detach(), reduction="none", **options)
    loss.sum().backward()
    assert (loss[:4] == 1).all()
    assert not x.grad[:4].any()
    assert (loss[4:] < 0.1).all()
    assert x.grad[4:].any(-1).all()
    assert not sorting.spearman(x, noise, **options)[:4].any()
    assert not sorting.spearman(noise, x, **options)[:4].any()
    thousands = torch.tensor([1000001.0, 1000002.0, 1000003.0])
    assert sorting.spearman(thousands, torch.arange(3.0), backend=backend) == 0
    assert sorting.spearman(thousands, torch.arange(3.0), backend=backend, hard=True) == 1


def test_spearman_loss_of_equal_predictions_has_no_gradient():
    """The documentation says so, because a model that predicts one number does not start."""
    prediction = torch.zeros(3, 20, requires_grad=True)
    loss = sorting.spearman_loss(prediction, torch.randn(3, 20))
    loss.backward()
    assert loss == 1
    assert not prediction.grad.any()
    assert "the gradient zero" in sorting.spearman_loss.__doc__


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.float64])
def test_spearman_loss_of_grades(dtype):
    """Integers are what most targets are; they are ranked as they are, not as rounded ones."""
    prediction = torch.randn(3, 40, requires_grad=True)
    grades = torch.randint(0, 4, (3, 40))
    target = grades.to(dtype)
    exact = sorting.spearman_loss(prediction, target.float())
    loss = sorting.spearman_loss(prediction, target)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(loss.float(), exact)
    grads = [torch.autograd.grad(x, prediction)[0] for x in (loss, exact)]
    torch.testing.assert_close(*grads)
    if dtype == torch.int64:
        close = sorting.spearman_loss(prediction, target + 2**25)  # odd ones are not in float32
        torch.testing.assert_close(close, exact)


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiles_as_a_whole(dynamic):
    def loss(x, values):
        rows = sorting.soft_sort(x, values, temperature=0.2, straight_through=True)
        weights = sorting.soft_topk(x, 2, balance="rows")
        return (rows * weights.unsqueeze(-1)).sum() + sorting.soft_rank(x).square().mean()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for count in (20, 33):
        x, values = torch.randn(2, count, requires_grad=True), torch.randn(2, count, 3)
        want, got = loss(x, values), compiled(x, values)
        torch.testing.assert_close(got, want)
        grads = [torch.autograd.grad(y, x)[0] for y in (got, want)]
        torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


def test_transforms_of_torch_func():
    x = torch.randn(4, 7, dtype=torch.float64)
    torch.testing.assert_close(torch.func.vmap(sorting.soft_rank)(x), sorting.soft_rank(x))
    jacobian = torch.func.jacrev(sorting.soft_sort)(x[0])
    numeric = torch.autograd.functional.jacobian(sorting.soft_sort, x[0])
    torch.testing.assert_close(jacobian, numeric)
    q = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    quantiles = torch.func.vmap(lambda one: sorting.soft_quantile(x, one))(q)
    torch.testing.assert_close(quantiles, sorting.soft_quantile(x, q))


def test_under_autocast():
    x = torch.randn(2, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = sorting.soft_rank(x)
    torch.testing.assert_close(got, sorting.soft_rank(x))


@every
@pytest.mark.parametrize("backend", ["auto", "linear", "dense"])
def test_an_empty_batch(function, backend):
    """A shard without rows has the shapes and the gradients of any other."""
    x = torch.randn(3, 0, 5, requires_grad=True)
    full = torch.randn(3, 2, 5)
    for options in ({}, {"hard": True}, {"mask": torch.ones(5, dtype=torch.bool)}):
        out, like = function(x, backend=backend, **options), function(full, **options)
        assert out.shape == tuple(0 if size == 2 else size for size in like.shape)
        if out.requires_grad:
            out.sum().backward()
    assert x.grad.shape == x.shape


def test_quantiles_of_an_empty_batch():
    q = torch.tensor([0.1, 0.5, 0.7])
    assert sorting.soft_quantile(torch.zeros(0, 4), q).shape == (3, 0)
    assert sorting.soft_quantile(torch.zeros(0, 4), q, keepdim=True).shape == (3, 0, 1)


X = torch.randn(2, 5)
MANY = torch.zeros(1).expand(2**24 + 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sorting.soft_sort([3.0, 1.0]), "x must be a torch.Tensor, got list"),
        (lambda: sorting.soft_rank(torch.arange(3)), "floating-point numbers, got torch.int64"),
        (lambda: sorting.soft_rank(torch.tensor(1.0)), "at least one dimension"),
        (lambda: sorting.soft_rank(X, dim=2), r"dim must be an integer in \[-2, 1\].* got 2"),
        (lambda: sorting.soft_rank(X, dim=None), r"dim must be an integer in .* got None"),
        (lambda: sorting.soft_rank(X, temperature=None), "temperature must be a number.* None"),
        (lambda: sorting.soft_sort(X, temperature="0.1"), "soft_sort: temperature must be a num"),
        (lambda: sorting.soft_rank(X, temperature=True), "temperature must be a number, got True"),
        (lambda: sorting.soft_rank(X, hard=0.5), "hard must be True or False, got 0.5"),
        (lambda: sorting.soft_quantile(X, "0.5"), "q must be a number or a tensor of one dim"),
        (lambda: sorting.soft_quantile(X, None), "q must be a number .* got None"),
        (lambda: sorting.soft_quantile(X, [0.1, 0.9]), "q must be a number or a tensor"),
        (lambda: sorting.sliced_wasserstein(X, X, p="2"), "p must be a number of at least 1"),
        (lambda: sorting.soft_rank(X[:, :0]), "no numbers along dim -1"),
        (lambda: sorting.soft_rank(MANY), "float32, which counts to 16,777,216; pass x.double"),
        (lambda: sorting.soft_topk(MANY, 3), "cannot be told apart in torch.float32"),
        (lambda: sorting.soft_rank(X, temperature=0.0), r"temperature must be > 0.*hard=True"),
        (lambda: sorting.soft_rank(X, temperature=-torch.ones(2)), "must be > 0 everywhere"),
        (lambda: sorting.soft_rank(X, temperature=torch.ones(3)), "does not broadcast"),
        (lambda: sorting.soft_rank(X, unit="metre"), "unit must be one of 'spread', 'absolute'"),
        (lambda: sorting.soft_rank(X, metric="cosine"), "metric must be one of"),
        (lambda: sorting.soft_rank(X, balance="columns"), "balance must be one of"),
        (lambda: sorting.soft_rank(X, backend="jax"), "backend must be one of"),
        (lambda: sorting.soft_rank(X, straight_through=2.0), r"share of the hard output in"),
        (lambda: sorting.soft_rank(X, mask=torch.ones(2, 5)), "mask must be boolean"),
        (lambda: sorting.soft_rank(X, mask=torch.ones(3, 5).bool()), "does not broadcast to x"),
        (lambda: sorting.soft_sort(X, X.T), r"values must have the shape of x, \(2, 5\)"),
        (lambda: sorting.soft_sort(X, X.long()), "values must hold floating-point numbers"),
        (lambda: sorting.soft_quantile(X, 1.5), r"q must be in \[0, 1\], got 1.5"),
        (lambda: sorting.soft_quantile(X, torch.rand(2, 2)), "q must be a number or a tensor of"),
        (lambda: sorting.soft_topk(X, 6), "k must be an integer from 1 to 5"),
        (lambda: sorting.soft_topk(X, 2.5), "k must be an integer from 1 to 5.* got 2.5"),
        (lambda: sorting.soft_topk(X, torch.tensor(2)), r"k must be an integer.* got tensor\(2\)"),
        (lambda: sorting.soft_sort(X, 0.1), "passed by name, temperature=0.1"),
        (lambda: sorting.soft_sort(X, temprature=0.1), "did you mean 'temperature'"),
        (lambda: sorting.soft_rank(X, mask=[True]), "soft_rank: mask must be a torch.Tensor"),
        (lambda: sorting.soft_rank(X, temprature=1.0), "no option 'temprature'; did you mean 'te"),
        (lambda: sorting.soft_quantile(X, 0.5, descending=True),
         "soft_quantile: there is no option 'descending'; choose from temperature, unit"),
        (lambda: sorting.soft_rank(X, label="y", name="z"), "soft_rank: there is no option 'label"),
        (lambda: sorting.spearman(X, X.long()), "spearman: y must hold floating-point numbers"),
        (lambda: sorting.spearman_loss(X.long(), X), "prediction must hold floating-point numbers"),
        (lambda: sorting.spearman_loss(X, X.to(torch.complex64)), "target must hold floating-poin"),
        (lambda: sorting.spearman_loss(X, X.to("meta")), "prediction is on cpu but target on meta"),
        (lambda: sorting.spearman(X, torch.randn(3)), "shapes do not agree"),
        (lambda: sorting.spearman_loss(X, [1.0]), "target must be a torch.Tensor, got list"),
        (lambda: sorting.spearman_loss(X, X, reduction="max"), "reduction must be one of"),
    ],
)  # fmt: skip
def test_errors_in_words(call, words):
    with pytest.raises((ValueError, TypeError), match=words):
        call()


@pytest.mark.parametrize(
    ("prediction", "target", "dim"),
    [((7, 1), (7,), -1), ((7,), (7, 1), -1), ((1, 7), (7, 7), 0), ((7,), (7, 7), 0)],
)
def test_a_single_number_is_not_repeated_to_be_ranked(prediction, target, dim):
    """A column beside a row would be a constant loss without a gradient."""
    with pytest.raises(ValueError, match=r"single number along dim .*squeeze\(-1\) a column"):
        sorting.spearman_loss(torch.randn(prediction), torch.randn(target), dim=dim)


def test_a_column_of_predictions_is_told():
    column = torch.randn(7, 1, requires_grad=True)
    with pytest.warns(UserWarning, match=r"single number along dim -1.*squeeze\(-1\)"):
        loss = sorting.spearman_loss(column, torch.randn(7, 1))
    assert loss == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sorting.spearman_loss(column, torch.randn(7, 1), dim=0).backward()
        assert column.grad.any()
        sorting.spearman_loss(torch.randn(1), torch.randn(1))  # a last batch of one
        sorting.spearman_loss(torch.randn(4, 7), torch.randn(7))  # one target for all rows
