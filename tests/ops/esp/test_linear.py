"""The pieces of the linear-time operator, and the ways it splits its work."""

import pytest
import torch

from espformer import esp_attention
from espformer.ops.esp import linear, sorted_kernel
from espformer.ops.esp.options import ESPOptions
from espformer.ops.esp.problem import Problem
from tests.compare import (
    BALANCES,
    COUPLINGS,
    METRICS,
    assert_agree,
    assert_linear_is_dense,
    differentiate,
    some,
    tokens,
)

OPTIONS = {
    "rows": {},
    "both": {"balance": "both"},
    "squared": {"metric": "squared"},
    "hard": {"hard": True},
    "average": {"hard": True, "ties": "average"},
}


def test_ranks_are_a_stable_sort():
    projections = torch.tensor([[[2.0, 0.0, 2.0, -1.0, 0.0]]])
    ranking = linear.rank_tokens(projections, None)
    assert ranking.order.tolist() == [[[3, 1, 4, 0, 2]]]
    assert ranking.ranks.tolist() == [[[3, 1, 4, 0, 2]]]
    assert ranking.points.tolist() == [[[-1.0, 0.0, 0.0, 2.0, 2.0]]]
    assert ranking.lengths.tolist() == [5]
    assert ranking.valid is None


@pytest.mark.parametrize("padding", [0.0, -1e9, torch.inf, -torch.inf], ids=str)
def test_padding_ranks_last_and_stands_where_the_last_token_stands(padding):
    projections = torch.tensor([[[2.0, padding, -1.0, padding]], [[padding] * 4]])
    mask = torch.tensor([[True, False, True, False], [False] * 4])
    ranking = linear.rank_tokens(projections, mask)
    assert ranking.order[0, 0, :2].tolist() == [2, 0]
    assert ranking.points[0].tolist() == [[-1.0, 2.0, 2.0, 2.0]]
    assert ranking.valid.tolist() == [[[True, True, False, False]], [[False] * 4]]
    assert ranking.lengths.tolist() == [2, 0]


@pytest.mark.parametrize("masked", [False, True])
def test_to_ranks_and_back(masked):
    mask = some(3, 9) if masked else None
    ranking = linear.rank_tokens(torch.randn(3, 4, 9, dtype=torch.float64), mask)
    x = torch.randn(3, 9, 2, dtype=torch.float64)
    ranked = linear.to_ranks(x, ranking)
    for b in range(3):
        for l in range(4):
            count = int(ranking.lengths[b])
            order = ranking.order[b, l, :count]
            assert torch.equal(ranked[b, l, :count], x[b, order])
            assert not ranked[b, l, count:].any()
    back = linear.to_tokens(ranked, ranking)
    expected = x if mask is None else x * mask.unsqueeze(-1)
    assert torch.equal(back, expected.unsqueeze(1).expand_as(back))


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_of_to_ranks_and_to_tokens(masked):
    ranking = linear.rank_tokens(
        torch.randn(2, 3, 5, dtype=torch.float64), some(2, 5) if masked else None
    )
    x = torch.randn(2, 5, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(2, 3, 5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: linear.to_ranks(x, ranking), x)
    assert torch.autograd.gradcheck(lambda y: linear.to_tokens(y, ranking), y)


@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_plan_and_attend_are_one_operator(hard, coupling):
    query, key, value = tokens(3, n=37, m=40)
    temperature = torch.tensor([0.1], dtype=torch.float64)
    problem = Problem(
        query,
        key,
        ESPOptions(scale=0.5, sort_temperature=temperature, hard=hard, coupling=coupling),
    )
    torch.testing.assert_close(linear.plan(problem) @ value, linear.attend(problem, value))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("group", [1, 37 * 6 * 2, 37 * 6 * 2 * 3], ids=["1", "1-or-2", "3"])
@pytest.mark.parametrize("tau", [0.0, 0.5])
def test_groups_of_slices_change_nothing(options, group, tau, monkeypatch):
    query, key, value = tokens(2, n=37, width=3)
    options = {
        "slices": torch.randn(2, 7, 4, dtype=torch.float64),
        "sort_temperature": torch.tensor([0.1, 0.3], dtype=torch.float64),
        "inverse_temperature": tau,
        "mask": some(2, 37),
        "backend": "linear",
        **options,
    }
    at_once = differentiate(query, key, value, **options)
    monkeypatch.setattr(linear, "GROUP_ELEMENTS", group)
    in_groups = differentiate(query, key, value, **options)
    assert_agree(in_groups, at_once, output=1e-13, gradients=1e-12)


def test_only_one_group_exists_at_a_time(monkeypatch):
    """The widest intermediate of a backward pass holds one group of slices, not all of them."""
    largest = []
    apply = sorted_kernel.SortedKernel.multiply

    def watch(kernel, x, states):
        largest.append(x.shape[1])
        return apply(kernel, x, states)

    monkeypatch.setattr(sorted_kernel.SortedKernel, "multiply", watch)
    monkeypatch.setattr(linear, "GROUP_ELEMENTS", 1)
    differentiate(*tokens(1, n=20, head_dim=5), backend="linear")
    assert set(largest) == {1}


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("chunk", [1, 5, 16, 64])
def test_chunks_change_nothing(metric, chunk, monkeypatch):
    monkeypatch.setattr(sorted_kernel, "CHUNK", chunk)
    query, key, value = tokens(2, n=37, m=50)
    temperature = torch.tensor(0.2, dtype=torch.float64)
    assert_linear_is_dense(query, key, value, metric=metric, sort_temperature=temperature)


@pytest.mark.parametrize("group", [1, 1 << 22], ids=["grouped", "at-once"])
def test_hard_sorting_gives_no_gradient_to_what_is_sorted(group, monkeypatch):
    monkeypatch.setattr(linear, "GROUP_ELEMENTS", group)
    query, key, value = tokens(2, n=8)
    slices = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    temperature = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    options = {"hard": True, "slices": slices, "sort_temperature": temperature}
    query.requires_grad_()
    mean = esp_attention(query, key, value, inverse_temperature=0.0, backend="linear", **options)
    assert not mean.requires_grad
    weighted = esp_attention(
        query, key, value, inverse_temperature=1.0, backend="linear", **options
    )
    grads = torch.autograd.grad(weighted.sum(), (query, slices, temperature), allow_unused=True)
    assert grads[0].abs().max() > 0
    assert grads[1:] == (None, None)


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("of", ["query", "key", "value", "slices", "sort_temperature"])
@pytest.mark.parametrize("group", [1, 1 << 22], ids=["grouped", "at-once"])
def test_second_derivatives_are_refused_by_name(balance, of, group, monkeypatch):
    """Never a silent zero: not even where only one input asks for a gradient."""
    monkeypatch.setattr(linear, "GROUP_ELEMENTS", group)
    inputs = dict(zip(("query", "key", "value"), tokens(2, n=6), strict=True))
    inputs["slices"] = torch.randn(3, 4, dtype=torch.float64)
    inputs["sort_temperature"] = torch.tensor(0.3, dtype=torch.float64)
    leaf = inputs[of].requires_grad_()
    out = esp_attention(**inputs, balance=balance, backend="linear")
    (first,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match=r'differentiated once, not twice.*backend="dense"'):
        torch.autograd.grad(first.square().sum(), leaf, allow_unused=True)


@pytest.mark.parametrize("balance", BALANCES)
def test_second_derivatives_of_the_dense_backend(balance):
    query, key, value = tokens(n=4, head_dim=2, width=2)
    leaves = [x.requires_grad_() for x in (query, key, value)]

    def attend(query, key, value):
        return esp_attention(query, key, value, balance=balance, backend="dense")

    assert torch.autograd.gradgradcheck(attend, leaves)
