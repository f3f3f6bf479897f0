"""Differential attention against the formula of Ye et al. written out head by head."""

import math

import pytest
import torch
from torch import Tensor

from espformer import functional
from espformer.nn import ESP, Attention, Differential, Sinkhorn, Softmax


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bound(mechanism: Differential, heads: int, width: int, depth: int = 0) -> Differential:
    torch.manual_seed(0)
    mechanism = mechanism.bind(heads, width, depth=depth).double()
    with torch.no_grad():
        mechanism.norm.weight.copy_(torch.rand(mechanism.norm.weight.shape) + 0.5)
    return mechanism


def written_out(mechanism: Differential, q: Tensor, k: Tensor, v: Tensor, plan) -> Tensor:
    """(1 - λ₀) RMSNorm((A₁ - λA₂) [v₁ v₂]) for each pair of heads, concatenated."""
    first = torch.dot(mechanism.lambda_q1, mechanism.lambda_k1).exp()
    second = torch.dot(mechanism.lambda_q2, mechanism.lambda_k2).exp()
    weight = first - second + mechanism.lambda_init
    outputs = []
    for first in range(0, q.shape[1], 2):
        second = first + 1
        matrix = plan(q[:, first], k[:, first]) - weight * plan(q[:, second], k[:, second])
        out = matrix @ torch.cat([v[:, first], v[:, second]], dim=-1)
        out = out / (out.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mechanism.norm.weight
        outputs.append(out * (1 - mechanism.lambda_init))
    return torch.cat(outputs, dim=-1)  # (batch, tokens, heads · width)


PLANS = {
    "softmax": (Softmax(), functional.softmax_plan),
    "sinkhorn": (Sinkhorn(4), lambda q, k: functional.sinkhorn_plan(q, k, iterations=4)),
    "esp": (
        ESP(sort_temperature=0.2, inverse_temperature=1.0),
        lambda q, k: functional.esp_plan(
            q[:, None],
            k[:, None],
            sort_temperature=0.2,
            inverse_temperature=1.0,
            backend="dense",
        )[:, 0],
    ),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(("n", "m"), [(6, 6), (5, 8)])
@pytest.mark.parametrize("lambda_init", [0.0, 0.33, 0.8])
def test_is_the_formula(name, n, m, lambda_init):
    base, plan = PLANS[name]
    mechanism = bound(Differential(base, lambda_init), 4, 6)
    q, k, v = draw(2, 4, n, 6), draw(2, 4, m, 6, seed=1), draw(2, 4, m, 6, seed=2)
    out = mechanism(q, k, v)
    assert out.shape == (2, 4, n, 6)
    expected = written_out(mechanism, q, k, v, plan)
    torch.testing.assert_close(out.transpose(1, 2).flatten(2), expected, rtol=1e-6, atol=1e-8)


def test_one_head_is_two_of_half_the_width():
    mechanism = bound(Differential(Softmax(), 0.5), 1, 12)
    q, k, v = (draw(2, 1, 7, 12, seed=s) for s in range(3))
    halves = [torch.cat(x.chunk(2, dim=-1), dim=1) for x in (q, k, v)]
    expected = written_out(mechanism, *halves, functional.softmax_plan)
    out = mechanism(q, k, v)
    assert out.shape == (2, 1, 7, 12)
    torch.testing.assert_close(out[:, 0], expected)
    assert mechanism.matrix(q, k).shape == (2, 1, 7, 7)
    # Scores are scaled by the width of a group, 6, as for any head of that width.
    assert mechanism.base.head_dim == 6


@pytest.mark.parametrize("heads", [1, 4])
def test_matrix_is_the_difference(heads):
    mechanism = bound(Differential(ESP(sort_temperature=0.2, balance="both"), 0.4), heads, 6)
    q, k, v = (draw(2, heads, 7, 6, seed=s) for s in range(3))
    matrix = mechanism.matrix(q, k)
    assert matrix.shape == (2, heads, 7, 7)
    # Rows and columns of doubly-stochastic A₁ and A₂ leave 1 - λ.
    rest = torch.ones(()).double() - mechanism.difference_weight().detach()
    for dim in (-1, -2):
        expected = rest.expand(2, heads, 7)
        torch.testing.assert_close(matrix.sum(dim).detach(), expected, atol=1e-4, rtol=0)
    # Both heads of a pair show the matrix that made their outputs: normalised, it gives them.
    pairs = max(heads // 2, 1)
    value = v.unflatten(1, (pairs, -1)).transpose(2, 3).flatten(3)  # (batch, pairs, tokens, width)
    shown = matrix if heads == 1 else matrix[:, 1::2]
    expected = mechanism.norm(shown @ value) * (1 - 0.4)
    out = mechanism(q, k, v).unflatten(1, (pairs, -1)).transpose(2, 3).flatten(3)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-8)


def test_lambda_starts_as_in_the_original():
    torch.manual_seed(0)
    mechanism = Differential(Softmax(), 0.8).bind(2, 4096)
    for vector in mechanism._lambda_vectors():
        assert abs(vector.std().item() - 0.1) < 0.01
        assert abs(vector.mean().item()) < 0.01
    assert (mechanism.norm.weight == 1).all()
    assert mechanism.norm.eps == 1e-5


@pytest.mark.parametrize("depth", [0, 1, 5])
def test_lambda_init_of_the_depth(depth):
    layer = Attention(8, heads=2, mechanism=Differential(Softmax(), "depth"), depth=depth)
    expected = 0.8 - 0.6 * math.exp(-0.3 * depth)
    assert layer.mechanism.lambda_init == pytest.approx(expected)


def test_the_base_learns_for_both_groups():
    mechanism = bound(Differential(ESP(learn_temperature=True)), 4, 6)
    assert mechanism.base.log_sort_temperature.shape == (4,)
    single = bound(Differential(ESP(learn_temperature=True)), 1, 6)
    assert single.base.log_sort_temperature.shape == (2,)
    assert sum(p.numel() for p in single.parameters()) == 3 * 6 + 2


def test_state_dict_round_trip():
    mechanism = bound(Differential(ESP(sort_temperature=0.2, learn_temperature=True)), 4, 6)
    mechanism.base.hard = True
    other = Differential(ESP(learn_temperature=True)).bind(4, 6).double()
    other.load_state_dict(mechanism.state_dict())
    q, k, v = (draw(2, 4, 7, 6, seed=s) for s in range(3))
    assert torch.equal(other(q, k, v), mechanism(q, k, v))


def test_gradients():
    mechanism = bound(Differential(Sinkhorn(3), 0.3), 2, 4)
    q, k, v = (draw(1, 2, 4, 4, seed=s).requires_grad_() for s in range(3))
    assert torch.autograd.gradcheck(mechanism, (q, k, v))


@pytest.mark.parametrize(
    ("make_it", "error", "message"),
    [
        (lambda: Differential(ESP), TypeError, r"base must be a mechanism such as .*ESP\(\)"),
        (lambda: Differential(ESP(), 1.0), ValueError, r"lambda_init must be in \[0, 1\), got 1"),
        (lambda: Differential(ESP(), "deep"), ValueError, r"must be \"depth\" or in .*'deep'"),
        (
            lambda: Differential(ESP()).bind(3, 8),
            ValueError,
            r"the number of heads must be even, or one, got 3",
        ),
        (lambda: Differential(ESP()).bind(1, 7), ValueError, r"widths must be even, got 7"),
    ],
)
def test_mistakes_are_named(make_it, error, message):
    with pytest.raises(error, match=message):
        make_it()


@pytest.mark.parametrize("heads", [1, 4], ids=["H1", "H4"])
def test_values_wider_than_keys(heads: int) -> None:
    mechanism = Differential(Softmax(), lambda_init=0.5).bind(heads, 4, value_dim=6)
    query, value = torch.randn(2, heads, 5, 4), torch.randn(2, heads, 5, 6)
    out = mechanism(query, query, value)
    assert out.shape == value.shape
    # The norm is over the joined value of a pair: its mean square is one, times (1 - λ₀)².
    joined = out if heads == 1 else out.unflatten(1, (-1, 2)).transpose(2, 3).flatten(-2)
    torch.testing.assert_close(
        joined.square().mean(-1), torch.full(joined.shape[:-1], 0.25), rtol=1e-2, atol=0
    )


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("lead", [(), (2, 3)], ids=["no batch", "two batches"])
def test_any_number_of_leading_dimensions(heads, lead):
    mechanism = bound(Differential(ESP()), heads, 6)
    q, k, v = draw(3, *lead, heads, 6, 6).unbind()
    flat = [x.reshape(-1, heads, 6, 6) for x in (q, k, v)]
    expected = mechanism(*flat).view_as(v)
    torch.testing.assert_close(mechanism(q, k, v), expected)
    matrix = mechanism.matrix(*flat[:2]).view(*lead, heads, 6, 6)
    torch.testing.assert_close(mechanism.matrix(q, k), matrix)
