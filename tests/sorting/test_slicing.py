"""Sliced distances and plans against POT, one problem at a time."""

import numpy as np
import ot
import pytest
import torch

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


def test_errors_in_words():
    x, y, _ = clouds(4, 5)
    with pytest.raises(ValueError, match="equally many points of the same width"):
        sliced_plan(x, y)
    with pytest.raises(ValueError, match="slices must be at least 1"):
        sliced_wasserstein(x, y, slices=0)
    with pytest.raises(ValueError, match="p must be at least 1"):
        sliced_wasserstein(x, y, p=0.5)
