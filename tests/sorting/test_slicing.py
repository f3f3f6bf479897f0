"""Sliced distances and plans against POT, one problem at a time."""

import math

import numpy as np
import ot
import pytest
import torch

from espformer.ops.esp import linear
from espformer.sorting import sliced_plan, sliced_wasserstein


def clouds(count: int, other: int | None = None) -> tuple[torch.Tensor, ...]:
    x = torch.randn(3, count, 4, dtype=torch.float64)
    y = torch.randn(3, other or count, 4, dtype=torch.float64) * 2 + 1
    theta = torch.nn.functional.normalize(torch.randn(6, 4, dtype=torch.float64), dim=-1)
    return x, y, theta


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize(("count", "other"), [(20, 20), (20, 13), (1, 7)])
def test_distance_is_that_of_pot(count, other, p):
    x, y, theta = clouds(count, other)
    ours = sliced_wasserstein(x, y, slices=theta, p=p)
    for a, b, got in zip(x.numpy(), y.numpy(), ours, strict=True):
        want = ot.sliced_wasserstein_distance(a, b, projections=theta.T.numpy(), p=p)
        assert float(got) == pytest.approx(want, rel=1e-9)


def test_distance_has_gradients():
    x, y, theta = (z.requires_grad_() for z in clouds(7, 5))
    assert torch.autograd.gradcheck(
        lambda x, y, t: sliced_wasserstein(x, y, slices=t), (x, y, theta)
    )
    same = sliced_wasserstein(x, x.detach(), slices=theta)
    assert not same.any()
    assert not torch.autograd.grad(same.sum(), x)[0].any()


def test_padding_does_not_count():
    x, y, theta = clouds(9, 6)
    padded = torch.cat([x, torch.full((3, 4, 4), torch.nan).double()], -2)
    mask = torch.arange(13) < 9
    got = sliced_wasserstein(padded, y, slices=theta, x_mask=mask.expand(3, -1))
    torch.testing.assert_close(got, sliced_wasserstein(x, y, slices=theta))


@pytest.mark.parametrize("size", [1e-3, 0.1, 10.0, 1e3])
@pytest.mark.parametrize("more", [0, 3], ids=["equal", "unequal"])
def test_large_powers(more: int, size: float) -> None:
    """They neither overflow nor vanish, and go to the largest distance."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(1, n, 3, generator=generator) * size for n in (20, 20 + more))
    theta = torch.eye(3)
    limit = sliced_wasserstein(x, y, slices=theta, p=math.inf)
    if not more:
        gaps = (x.sort(-2).values - y.sort(-2).values).abs()
        torch.testing.assert_close(limit, gaps.amax().view(1))
    for p in (20.0, 100.0, 1000.0):
        x.requires_grad_()
        found = sliced_wasserstein(x, y, slices=theta, p=p)
        want = sliced_wasserstein(x.double(), y.double(), slices=theta.double(), p=p)
        torch.testing.assert_close(found, want.float(), rtol=1e-4, atol=0)
        assert 0.7 * limit < found <= limit * (1 + 1e-6)
        (grad,) = torch.autograd.grad(found.sum(), x)
        (wanted,) = torch.autograd.grad(want.sum(), x)
        torch.testing.assert_close(grad, wanted, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("count", "other"), [(8, 8), (8, 11), (11, 8)])
def test_a_mask_masks_its_own_cloud_alone(count, other):
    """Also where both clouds have as many points: they are not one sequence."""
    x, y, theta = clouds(count, other)
    mask = torch.arange(count).expand(3, -1) < 5
    want = sliced_wasserstein(x[:, :5], y, slices=theta)
    torch.testing.assert_close(sliced_wasserstein(x, y, slices=theta, x_mask=mask), want)
    torch.testing.assert_close(sliced_wasserstein(y, x, slices=theta, y_mask=mask), want)


def test_plans_are_those_of_pot():
    x, y, theta = clouds(15)
    plan = sliced_plan(x, y, slices=theta)
    assert plan.matches.shape == (3, 6, 15)
    for b in range(3):
        for l in range(6):
            index = plan.matches[b, l]
            assert sorted(index.tolist()) == list(range(15))
            a, c = (x[b] @ theta[l]).numpy(), (y[b] @ theta[l]).numpy()
            want = ot.emd_1d(a, c, metric="sqeuclidean") * 15
            assert np.allclose(want[np.arange(15), index], 1)
            cost = (x[b] - y[b][index]).square().sum(-1).mean()
            torch.testing.assert_close(plan.cost[b, l], cost)
        best = int(plan.cost[b].argmin())
        assert torch.equal(plan.cheapest()[b], plan.matches[b, best])


def test_plans_of_padded_clouds():
    x, y, theta = clouds(8)
    mask = torch.arange(8).expand(3, -1) < 5
    plan = sliced_plan(x, y, slices=theta, mask=mask)
    alone = sliced_plan(x[:, :5], y[:, :5], slices=theta)
    assert torch.equal(plan.matches[..., :5], alone.matches)
    torch.testing.assert_close(plan.cost, alone.cost)


def test_costs_of_clouds_that_are_close_and_far_from_zero(monkeypatch):
    """Their norms are 10^8 times the cost: a difference of norms would have no digit left."""
    x = 100 * torch.randn(200, 3)
    y = (x + 1e-2)[torch.randperm(200)].requires_grad_()
    x.requires_grad_()
    for elements in (linear.GROUP_ELEMENTS, 5 * x.numel()):  # one group of slices, and several
        monkeypatch.setattr(linear, "GROUP_ELEMENTS", elements)
        plan = sliced_plan(x, y, slices=16)
        wide = [z.detach().double().requires_grad_() for z in (x, y)]
        want = (wide[0] - wide[1][plan.matches]).square().sum(-1).mean(-1)
        torch.testing.assert_close(plan.cost.double(), want, rtol=1e-5, atol=0)
        upstream = torch.rand(16)
        grads = torch.autograd.grad(plan.cost, (x, y), upstream)
        wanted = torch.autograd.grad(want, wide, upstream.double())
        for got, exact in zip(grads, wanted, strict=True):
            torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-7)
    far = sliced_wasserstein(x, x.detach() + 1e-2, slices=torch.eye(3))
    assert float(far) == pytest.approx(1e-2, rel=1e-2)  # float32 has 1e-5 between numbers at 200


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_stays_in_its_cloud(bad):
    """Matches are permutations whatever they are of, so only the cost can show it."""
    for which in range(3):
        inputs = [z.clone() for z in clouds(6)]
        inputs[2] = inputs[2].expand(3, 6, 4).clone()  # a slice of its own for every cloud
        inputs[which][1, 2, 3] = bad
        x, y, theta = inputs
        for found in (sliced_plan(x, y, slices=theta).cost, sliced_wasserstein(x, y, slices=theta)):
            assert found[1].isnan().all()
            assert found[[0, 2]].isfinite().all()


def test_under_autocast():
    """Points are projected in their own precision: in 16 bits their order would be another."""
    x, y, theta = (z.float() for z in clouds(50))
    plan, distance = sliced_plan(x, y, slices=theta), sliced_wasserstein(x, y, slices=theta)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = sliced_plan(x, y, slices=theta)
        assert torch.equal(sliced_wasserstein(x, y, slices=theta), distance)
    assert torch.equal(cast.matches, plan.matches)
    assert torch.equal(cast.cost, plan.cost)


def test_exported_for_any_number_of_points():
    class Costs(torch.nn.Module):
        def forward(self, x, y):
            return sliced_plan(x, y, slices=theta).cost, sliced_wasserstein(x, y, slices=theta)

    x, y, theta = clouds(20)
    sizes = {1: torch.export.Dim("points", min=2)}
    program = torch.export.export(Costs(), (x, y), dynamic_shapes=(sizes, sizes), strict=False)
    for got, want in zip(
        program.module()(x[:, :7], y[:, :7]), Costs()(x[:, :7], y[:, :7]), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_an_empty_batch():
    x, y = torch.randn(2, 0, 5, 3, requires_grad=True).unbind()
    plan = sliced_plan(x, y, slices=4)
    assert (plan.matches.shape, plan.cost.shape) == ((0, 4, 5), (0, 4))
    assert plan.cheapest().shape == (0, 5)
    for found in (plan.cost, sliced_wasserstein(x, y), sliced_wasserstein(x, y[:, :2])):
        found.sum().backward()
    assert sliced_wasserstein(x, y).shape == (0,)


def test_errors_in_words():
    x, y, _ = clouds(4, 5)
    with pytest.raises(ValueError, match="x and y must have equally many points"):
        sliced_plan(x, y)
    for wrong in (0, 2.5, [1.0, 2.0]):
        with pytest.raises(ValueError, match="slices must be an integer of at least 1, or a tens"):
            sliced_wasserstein(x, y, slices=wrong)
    with pytest.raises(ValueError, match="p must be a number of at least 1"):
        sliced_wasserstein(x, y, p=0.5)


@pytest.mark.parametrize("function", [sliced_wasserstein, sliced_plan])
def test_errors_speak_of_points(function):
    """Of arguments by their names, not of queries, keys and heads."""
    x, y, theta = clouds(4)
    mistakes = [
        ((x, y[..., :2]), {}, r"x and y must have the same width, got x \(3, 4, 4\) and y"),
        ((x, [1.0]), {}, r"y must be a torch\.Tensor, got list"),
        ((x[0, 0], y), {}, r"x must have shape \(batch, points, width\) or at least"),
        ((x, y.long()), {}, "y must hold floating-point numbers, got torch.int64"),
        ((x, y.float()), {}, "x is torch.float64 but y is torch.float32"),
        ((x[:, :0], y[:, :0]), {}, "x of shape .* has no points or no width; at least one point"),
        ((x, y[:2]), {}, r"leading dimensions do not agree: x \(3, 4, 4\), y \(2, 4, 4\)"),
        ((x, y), {"slices": theta[:, :3]}, r"slices must have shape \(L, 4\)"),
    ]
    mask = "mask" if function is sliced_plan else "y_mask"
    for wrong in ([True], torch.ones(3, 4), torch.ones(3, 5).bool(), torch.ones(4, 4).bool()):
        mistakes.append(((x, y), {mask: wrong}, f": {mask} "))
    for clouds_given, options, words in mistakes:
        with pytest.raises((ValueError, TypeError), match=words) as caught:
            function(*clouds_given, **options)
        said = str(caught.value)
        assert said.startswith(f"{function.__name__}: ")
        assert not any(word in said for word in ("query", "key", "head")), said


def test_costs_in_groups_under_torch_func(monkeypatch):
    x, y = torch.randn(2, 20, 3, dtype=torch.float64)
    slices = torch.randn(7, 3, dtype=torch.float64)

    def total(x):
        return sliced_plan(x, y, slices=slices).cost.sum()

    whole = torch.func.grad(total)(x)
    monkeypatch.setattr(linear, "GROUP_ELEMENTS", 3 * x.numel())
    torch.testing.assert_close(torch.func.grad(total)(x), whole)


def test_a_generator_draws_the_directions():
    x, y, _ = clouds(12)

    def draw(seed: int | None) -> list[torch.Tensor]:
        def new() -> torch.Generator | None:
            return None if seed is None else torch.Generator().manual_seed(seed)

        distance = sliced_wasserstein(x, y, slices=5, generator=new())
        return [distance, sliced_plan(x, y, slices=5, generator=new()).cost]

    state = torch.get_rng_state()
    for first, again, other in zip(draw(0), draw(0), draw(1), strict=True):
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
    assert torch.equal(state, torch.get_rng_state())
    for first, second in zip(draw(None), draw(None), strict=True):  # of the global generator
        assert not torch.equal(first, second)
    generator = torch.Generator()
    first, second = (sliced_plan(x, y, slices=5, generator=generator).cost for _ in range(2))
    assert not torch.equal(first, second)
    for function in (sliced_wasserstein, sliced_plan):
        with pytest.raises(
            TypeError, match=r"generator must be a torch.Generator, got int \(for a"
        ):
            function(x, y, generator=0)
