"""Points in rank order: on axes and on slices, in units of their spread, and their gradients."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import espformer
from espformer.ops.esp.problem import with_spread
from espformer.ops.esp.triton import sort
from espformer.ops.esp.triton.sort import masked_lengths, point_gradients, sort_points

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 0.7


@pytest.fixture(params=[False, True], ids=["at-once", "in-runs"])
def _in_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are ranked by one program each, or in runs of 8 tokens and in blocks of 4."""
    if request.param:
        monkeypatch.setattr(sort, "RUN", 8)
        monkeypatch.setattr(sort, "MOST_BLOCK", 4)
        monkeypatch.setattr(sort, "LEAST_BLOCK", 4)


def tokens(dtype: torch.dtype, width: int, masked: bool) -> tuple[Tensor, Tensor | None]:
    """Two heads of 21 tokens: far from zero in one column, equal in another; one may be empty."""
    x = torch.randn(2, 21, width, device=DEVICE)
    x[..., 1] += 100
    x[..., 2] = 0.3
    x = x.to(dtype)
    if not masked:
        return x, None
    mask = torch.rand(2, 21, device=DEVICE) < 0.7
    mask[0, :2], mask[1] = True, False
    return x * mask.unsqueeze(-1), mask


def expected(
    x: Tensor, slices: Tensor | None, mask: Tensor | None, order: Tensor, in_spreads: bool
) -> Tensor:
    """Points of that order, in the precision of x; padding stands where the last one stands."""
    points = (x if slices is None else x @ slices.mT).mT * SCALE
    points = points.gather(-1, order.long())
    valid = None
    if mask is not None:
        ranks = torch.arange(points.shape[-1], device=DEVICE)
        last = (mask.sum(-1) - 1).clamp(min=0).view(-1, 1, 1)
        points = points.gather(-1, ranks.minimum(last).expand_as(points))
        points = torch.where(mask.any(-1).view(-1, 1, 1), points, 0)
        valid = ranks < mask.sum(-1).view(-1, 1, 1)
    return torch.divide(*with_spread(points, valid)) if in_spreads else points


@pytest.mark.usefixtures("_in_runs")
@pytest.mark.parametrize("in_spreads", [False, True], ids=["absolute", "spread"])
@pytest.mark.parametrize("masked", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("sliced", ["axes", "shared", "own"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_points_order_and_gradients(
    dtype: torch.dtype, sliced: str, masked: bool, in_spreads: bool
) -> None:
    """The points are those of the order that was found, which sorts them, stably."""
    if DEVICE == "cpu" and sliced == "shared" and (dtype == torch.float32 or masked):
        pytest.skip("slow in the interpreter, and like its neighbours")
    width = 24 if sliced == "own" else 5  # a width that kernels are told when they are launched
    x, mask = tokens(dtype, width, masked)
    slices = None
    if sliced != "axes":
        count = 3 if sliced == "own" else 9  # more than are projected on at once
        slices = torch.randn(2 if sliced == "own" else 1, count, width, device=DEVICE)
        slices[:, 0] = 0  # ties
        slices[:, 0, 2] = 1
    lengths = masked_lengths(mask)
    points, order, found_spread = sort_points(x, None, slices, mask, lengths, SCALE, in_spreads)
    assert (None if found_spread is None else found_spread.shape) == (
        points.shape[:2] if in_spreads else None
    )
    everyone = torch.arange(21, device=DEVICE, dtype=torch.int32).expand_as(order)
    assert torch.equal(order.sort(-1).values, everyone)
    assert bool((points.diff(dim=-1) >= 0).all())
    tied = points.diff(dim=-1) == 0
    if mask is not None:  # the last token and padding
        tied &= torch.arange(1, 21, device=DEVICE) != mask.sum(-1).view(-1, 1, 1)
    assert bool((order.diff(dim=-1)[tied] > 0).all())
    leaves = [x] + ([] if slices is None else [slices])
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    want = expected(exact[0], exact[1] if slices is not None else None, mask, order, in_spreads)
    torch.testing.assert_close(points.double(), want.detach(), rtol=1e-5, atol=1e-5)
    upstream = torch.randn_like(points)
    if mask is not None:  # nobody pulls at padding
        upstream *= torch.arange(21, device=DEVICE) < mask.sum(-1).view(-1, 1, 1)
    part = torch.randn_like(points)  # the gradient may come in two parts
    dx, dy, d_slices = point_gradients(
        upstream - part, part, points, order, found_spread, x, None, slices, lengths, SCALE, True
    )
    assert dy is None
    got = [dx] if slices is None else [dx, d_slices]
    wanted = torch.autograd.grad(want, exact, upstream.double())
    for one, other in zip(got, wanted, strict=True):
        size = other.abs().max().clamp(min=1e-30)
        error = 2e-3 if one.dtype == torch.float16 else 3e-5
        torch.testing.assert_close(one.double() / size, other / size, rtol=0, atol=error)


@pytest.mark.usefixtures("_in_runs")
@pytest.mark.parametrize("sliced", ["axes", "shared", "own"])
def test_two_sides_are_sorted_like_one(sliced: str) -> None:
    """The same bits as of either side alone; with padding, and in units of the spread."""
    (x, mask), (y, _) = tokens(torch.float16, 5, True), tokens(torch.float16, 5, True)
    slices = None if sliced == "axes" else torch.randn(2 if sliced == "own" else 1, 3, 5).to(DEVICE)
    shared = slices, mask, masked_lengths(mask), SCALE, True
    both, *sides = (
        sort_points(x, y, *shared),
        sort_points(x, None, *shared),
        sort_points(y, None, *shared),
    )
    for together, *apart in zip(both, *sides, strict=True):
        assert torch.equal(together, torch.cat(apart))
    upstream = torch.randn_like(both[0])
    rest = slices, masked_lengths(mask), SCALE, True
    dx, dy, d_slices = point_gradients(upstream, None, *both, x, y, *rest)
    of_x, of_y = (
        point_gradients(part, None, *side, tokens, None, *rest)
        for part, side, tokens in zip(upstream.chunk(2), sides, (x, y), strict=True)
    )
    assert torch.equal(dx, of_x[0])
    assert torch.equal(dy, of_y[0])
    if slices is not None:
        torch.testing.assert_close(d_slices, of_x[2] + of_y[2])


@pytest.mark.usefixtures("_in_runs")
def test_huge_tiny_and_equal_points() -> None:
    x = torch.randn(1, 21, 4, device=DEVICE)
    x[..., 0] *= 1e30
    x[..., 1] *= 1e-30
    x[..., 2] = 0.3
    x[..., 3] = 0
    points, _, found = sort_points(x, None, None, None, None, 1.0, True)
    want = with_spread(x.mT.contiguous(), None)[1]
    torch.testing.assert_close(found.unsqueeze(-1), want)
    torch.testing.assert_close(points[:, :2].std(-1, correction=0), torch.ones(1, 2, device=DEVICE))
    assert bool(points.isfinite().all())
    torch.testing.assert_close(points[:, 2:], (x.mT[:, 2:] / want[:, 2:]))


@pytest.mark.parametrize("metric", ["absolute", "squared"])
@pytest.mark.parametrize("number", [0.0, 1e-10])
def test_keys_without_spread_have_no_gradient(number: float, metric: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 17, 2, device=DEVICE).unbind()
    k[:, 1] = number
    k.requires_grad_()
    out = espformer.esp_attention(q, k, v, metric=metric, backend="triton")
    (found,) = torch.autograd.grad(out.square().sum(), k)
    assert not bool(found[:, 1].any())
    assert bool(found[:, 0].any())


@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("where", ["query", "key", "slices"])
def test_a_head_that_holds_nan_is_all_nan(where: str, number: float, hard: bool) -> None:
    """On slices that are not axes; the other head is as it was."""
    q, k, v = torch.randn(3, 1, 2, 9, 4, device=DEVICE).unbind()
    slices = torch.randn(2, 3, 4, device=DEVICE)
    {"query": q[0], "key": k[0], "slices": slices}[where][1, 1, 1] = number
    out = espformer.esp_attention(q, k, v, slices=slices, hard=hard, backend="triton")
    assert bool(out[:, 1].isnan().all())
    assert bool(out[:, 0].isfinite().all())
