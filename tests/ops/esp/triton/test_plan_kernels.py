"""The chunk kernels against dense kernel matrices, in float64."""

import itertools

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from espformer.ops.esp.triton import (
    costs,
    normalise,
    short_columns,
    short_plan,
    soft_plan,
)
from espformer.ops.esp.triton.short_plan import ShortPlanKernels
from espformer.ops.esp.triton.soft_plan import Plan, PlanGradients, PlanKernels, segment_length

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow: without a GPU, chunks of four ranks make several from few tokens."""
    if DEVICE == "cpu":
        monkeypatch.setattr(soft_plan, "CHUNK", {2: 4, 4: 4})
        monkeypatch.setattr(soft_plan, "LEAST", 2)
        monkeypatch.setattr(soft_plan, "AHEAD", (2, 2))
        monkeypatch.setattr(soft_plan, "segment_length", lambda chunks, ahead, scans: ahead)
        monkeypatch.setattr(short_columns, "BLOCK_M", 4)
        monkeypatch.setattr(short_columns, "BLOCK_N", 2)
        monkeypatch.setattr(short_plan, "LANES", 4)  # so many groups


@pytest.fixture(params=[0, 256], ids=["scans", "dense"])
def _columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns by scans, and by whole rows of κ or, in the absolute metric, in registers."""
    monkeypatch.setattr(short_columns, "MOST_RANKS", request.param)
    monkeypatch.setattr(short_columns, "LEAST_PAIRS", 1 if request.param else 1 << 30)
    monkeypatch.setattr(normalise, "BLOCK", 4)
    monkeypatch.setattr(normalise, "LEAST_BLOCK", 4)


CASES = [
    pytest.param("absolute", 2, 2, 11, 5, 0.1, id="absolute-B2-L2-N11-D5"),
    pytest.param("absolute", 1, 1, 8, 17, 0.3, id="absolute-B1-L1-N8-D17"),
    pytest.param("absolute", 1, 1, 1, 5, 1.0, id="absolute-B1-L1-N1-D5"),
    pytest.param("absolute", 2, 1, 3, 2, 1.0, id="absolute-B2-L1-N3-D2"),
    pytest.param("squared", 1, 2, 11, 4, 0.1, id="squared-B1-L2-N11-D4"),
    pytest.param("squared", 1, 1, 4, 2, 0.1, id="squared-B1-L1-N4-D2"),
    # Two blocks of columns; full chunks without masks; full ones and a last one that goes apart.
    pytest.param("absolute", 1, 2, 11, 40, 0.1, id="absolute-B1-L2-N11-D40"),
    pytest.param("squared", 1, 1, 8, 64, 0.1, id="squared-B1-L1-N8-D64"),
    pytest.param("absolute", 2, 1, 11, 32, 0.3, id="absolute-B2-L1-N11-D32"),
    # A last one that is shorter than others, after several and after one.
    pytest.param("absolute", 1, 1, 9, 32, 0.3, id="absolute-B1-L1-N9-D32"),
    pytest.param("squared", 1, 1, 5, 32, 0.3, id="squared-B1-L1-N5-D32"),
    # Five segments: what leaves the first of them passes through others.
    pytest.param("absolute", 1, 2, 33, 2, 1.0, id="absolute-B1-L2-N33-D2"),
    pytest.param("squared", 1, 1, 33, 2, 1.0, id="squared-B1-L1-N33-D2"),
]


def is_narrow(metric: str, batch: int, slices: int, ranks: int, width: int, t: float) -> bool:
    return metric == "absolute" and width <= max(short_plan.WIDTHS)


class Side:
    """Sorted numbers with many ties, rows of tokens, scales, and the dense kernel and its slope."""

    def __init__(self, metric: str, batch: int, slices: int, ranks: int, width: int, t: float):
        numbers = (torch.randn(batch, slices, ranks) * 4).round() / 4
        if ranks > 30:
            numbers[..., :24] = 0.25  # all ranks of two segments of eight, and more around them
        self.points, self.order = numbers.to(DEVICE).sort(-1)
        self.rows = torch.randn(batch, ranks, width, device=DEVICE)
        self.scale, self.factor = torch.rand(2, batch, slices, ranks, device=DEVICE).unbind()
        rate = 1 / t if metric == "absolute" else t**-0.5
        self.rates = rate * torch.linspace(1, 0.5, batch, device=DEVICE)  # every head has its own
        gap = (self.points.unsqueeze(-1) - self.points.unsqueeze(-2)).double()
        gap = gap * self.rates.view(-1, 1, 1, 1)
        if metric == "absolute":
            self.matrix = torch.exp(-gap.abs())
            self.slope = -gap.sign() * self.matrix
        else:
            self.matrix = torch.exp(-(gap**2))
            self.slope = -2 * gap * self.matrix

    def ranked(self) -> Tensor:
        """Rows of every slice in the order of its ranks, times the factor."""
        rows = self.rows.unsqueeze(1).expand(-1, self.order.shape[1], -1, -1).double()
        rows = rows.gather(2, self.order.unsqueeze(-1).expand_as(rows))
        return rows * self.factor.unsqueeze(-1)

    def to_tokens(self, ranked: Tensor, weight: Tensor) -> Tensor:
        ranked = ranked * (self.factor * weight.unsqueeze(-1)).unsqueeze(-1)
        index = self.order.unsqueeze(-1).expand_as(ranked)
        return torch.zeros_like(ranked).scatter_(2, index, ranked).sum(1)

    def slopes(self, x: Tensor, p: Tensor) -> Tensor:
        return (p * (self.slope @ x) + x * (self.slope @ p)).sum(-1) * self.rates.view(-1, 1, 1)


def close(got: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    atol = tolerance * (1 + float(expected.abs().max()))
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=atol)


# For groups of ranks: one rank in each; several, of which the last are past the end; twice as many
# groups; a sharp temperature; and points that fill several groups.
SHORT = [
    *CASES,
    pytest.param("absolute", 3, 3, 16, 8, 0.3, id="absolute-B3-L3-N16-D8"),
    pytest.param("absolute", 2, 1, 21, 16, 0.02, id="absolute-B2-L1-N21-D16"),
    pytest.param("absolute", 1, 2, 45, 8, 0.3, id="absolute-B1-L2-N45-D8"),
    pytest.param("absolute", 1, 1, 40, 3, 0.3, id="absolute-B1-L1-N40-D3"),
]
PLANS = [
    *((PlanKernels, *case.values) for case in CASES),
    *((ShortPlanKernels, *case.values) for case in SHORT if is_narrow(*case.values)),
]


@pytest.mark.parametrize(("kind", "metric", "batch", "slices", "ranks", "width", "t"), PLANS)
def test_plans(
    kind: type[PlanKernels | ShortPlanKernels],
    metric: str, batch: int, slices: int, ranks: int, width: int, t: float,
) -> None:  # fmt: skip
    keys, queries = (Side(metric, batch, slices, ranks, width, t) for _ in range(2))
    weight = torch.rand(batch, slices, device=DEVICE)
    plan = Plan(
        queries.points, keys.points, queries.order.int(), keys.order.int(), keys.rates,
        queries.scale * keys.scale, keys.factor, queries.factor, metric,
    )  # fmt: skip
    plans = kind(plan, torch.float32)
    x, g = keys.ranked(), queries.ranked()
    y, z = keys.matrix @ x, queries.matrix @ g
    scale = (keys.scale * queries.scale).double().unsqueeze(-1)
    w, p = scale * y, scale * z

    out = torch.zeros_like(queries.rows)
    plans.apply(keys.rows, weight, out)
    expected = queries.to_tokens(queries.matrix @ w, weight)
    close(out, expected)
    narrow = kind is not PlanKernels
    if not narrow:
        by_slice = torch.zeros(batch, slices, ranks, width, device=DEVICE)
        plans.apply(keys.rows, weight, by_slice)
        close(by_slice.sum(1), expected)

    totals = (w * z).sum((-2, -1))
    crossed = torch.full_like(weight, torch.nan)
    plans.cross(queries.rows, keys.rows, crossed)
    close(crossed, totals)

    dx, dg = torch.zeros_like(keys.rows), torch.zeros_like(queries.rows)
    ranked = torch.full((5, batch, slices, ranks), torch.nan, device=DEVICE).unbind()
    totals_found, d_inv_bandwidth = torch.full((2, *weight.shape), torch.nan, device=DEVICE)
    found = PlanGradients(totals_found, None if narrow else d_inv_bandwidth, *ranked)
    plans.grad(queries.rows, keys.rows, weight, dx, dg, found)
    each = weight.double().unsqueeze(-1)
    dots = (y * z).sum(-1) * each
    kp, kw = keys.matrix @ p, queries.matrix @ w
    close(dx, keys.to_tokens(kp, weight))
    close(dg, queries.to_tokens(kw, weight))
    close(found.weight, totals)
    close(found.key_points, keys.slopes(x, p) * each)
    close(found.query_points, queries.slopes(g, w) * each)
    if not narrow:
        bandwidth_dot = keys.points * found.key_points + queries.points * found.query_points
        close(d_inv_bandwidth, bandwidth_dot.sum(-1).double() / keys.rates.double().view(-1, 1))
    close(found.mid_scale, dots)
    close(ranked[3], (x * kp).sum(-1) * each / keys.factor)
    close(ranked[4], (g * kw).sum(-1) * each / queries.factor)


@pytest.mark.parametrize(("metric", "batch", "slices", "ranks", "width", "t"), CASES)
@pytest.mark.usefixtures("_columns")
def test_slopes_of_columns(
    metric: str, batch: int, slices: int, ranks: int, width: int, t: float
) -> None:
    """One number per rank, through several blocks, with ties within and across them."""
    side = Side(metric, batch, slices, ranks, width, t)
    x, p = torch.randn(2, batch, slices, ranks, device=DEVICE).unbind()
    inv_bandwidth = side.rates
    slope = normalise.sorted_slope(p, x, side.points, inv_bandwidth, metric, True)
    close(slope, side.slopes(x.double().unsqueeze(-1), p.double().unsqueeze(-1)))


@pytest.mark.usefixtures("_columns")
def test_faint_forces() -> None:
    """Between numbers 20 widths apart: below the last digit of what stands at a rank, but right."""
    points = 20 * torch.tensor([[[0.0, 1.0, 2.5, 2.5, 4.0]]], device=DEVICE)
    x, p = torch.rand(2, 1, 1, 5, device=DEVICE).unbind()
    found = normalise.sorted_slope(p, x, points, torch.ones(1, device=DEVICE), "absolute", True)
    gap = (points.unsqueeze(-1) - points.unsqueeze(-2)).double()
    slope = -gap.sign() * torch.exp(-gap.abs())
    each = p.double() * (slope @ x.double().unsqueeze(-1)).squeeze(-1)
    each = each + x.double() * (slope @ p.double().unsqueeze(-1)).squeeze(-1)
    assert 0 < each.abs().max() < 1e-8
    torch.testing.assert_close(
        found[..., [0, 1, 4]].double(), each[..., [0, 1, 4]], rtol=1e-5, atol=0
    )


@pytest.mark.usefixtures("_columns")
@pytest.mark.parametrize("balanced", [False, True], ids=["rows", "balanced"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["added", "by slice"])
@pytest.mark.parametrize(("metric", "t"), [("absolute", 0.3), ("squared", 0.1)])
def test_norm_costs(
    monkeypatch: pytest.MonkeyPatch, metric: str, t: float, deterministic: bool, balanced: bool
) -> None:
    """Squared norms through several blocks, with ties, and the gradient of everything."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    batch, slices, ranks = 2, 2, 9
    side = Side(metric, batch, slices, ranks, 1, t)
    square, given = torch.rand(batch, ranks), torch.rand(batch, slices, ranks)
    factor = torch.rand(batch, slices, ranks) + 0.5
    square, given, factor = (x.to(DEVICE) for x in (square, given, factor))
    arguments = (
        square, side.order.int(), given, factor if balanced else None, side.points, side.rates,
        metric, True,
    )  # fmt: skip
    out = costs.norm_costs(*arguments)
    upstream = torch.randn_like(out)
    d_square, d_given, d_factor, slope = costs.norm_costs_backward(upstream, *arguments)
    square, given, factor = (x.requires_grad_() for x in (square, given, factor))
    gathered = square.double().unsqueeze(1).expand(-1, slices, -1).gather(-1, side.order.long())
    x = gathered * factor.double() if balanced else gathered
    kx = (side.matrix @ x.unsqueeze(-1)).squeeze(-1)
    expected = (given.double() * kx).sum(-1)
    close(out, expected.detach())
    leaves = [square, given, factor] if balanced else [square, given]
    found = [d_square, d_given, d_factor] if balanced else [d_square, d_given]
    assert balanced or d_factor is None
    for a, b in zip(found, torch.autograd.grad(expected, leaves, upstream.double()), strict=True):
        close(a, b.double())
    p = upstream.double().unsqueeze(-1) * given.detach().double()
    close(slope, side.slopes(x.detach().unsqueeze(-1), p.unsqueeze(-1)))


@pytest.mark.usefixtures("_columns")
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize(("metric", "t"), [("absolute", 0.3), ("squared", 0.1), ("squared", 1e-2)])
def test_row_scales(metric: str, t: float, padded: bool) -> None:
    """What makes a soft sort row-stochastic, and its gradient; padding neither gives nor takes."""
    side = Side(metric, 2, 2, 7, 1, t)
    lengths = torch.tensor([5, 7] if padded else [7, 7], dtype=torch.int32, device=DEVICE)
    present = (torch.arange(7, device=DEVICE) < lengths.view(2, 1, 1)).double().unsqueeze(-1)
    given = lengths if padded else None
    scales = normalise.row_scales(side.points, given, side.rates, metric, True)
    expected = present / (side.matrix @ present)
    close(scales, expected.squeeze(-1))
    upstream = torch.randn_like(scales)
    found = normalise.row_scales_backward(upstream, scales, side.points, side.rates, metric, True)
    close(found, side.slopes(present, -upstream.double().unsqueeze(-1) * expected**2))


@pytest.mark.slow
def test_long_walks_keep_their_digits() -> None:
    """Every step turns by a small angle, and errors of as many as a thousand add up."""
    side = Side("squared", 1, 1, 1500, 1, 1.0)
    scales = normalise.row_scales(side.points, None, side.rates, "squared", True)
    expected = 1 / side.matrix.sum(-1)
    torch.testing.assert_close(scales.double(), expected, rtol=8e-6, atol=0)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize(("metric", "t"), [("absolute", 0.3), ("squared", 0.1)])
def test_balanced_scales(
    monkeypatch: pytest.MonkeyPatch, metric: str, t: float, padded: bool
) -> None:
    """The fixed point, and its gradient by a dense solution."""
    monkeypatch.setattr(normalise, "BLOCK", 4)
    monkeypatch.setattr(normalise, "LEAST_BLOCK", 4)
    side = Side(metric, 2, 2, 7, 1, t)
    lengths = torch.tensor([5, 7] if padded else [7, 7], dtype=torch.int32, device=DEVICE)
    present = (torch.arange(7, device=DEVICE) < lengths.view(2, 1, 1)).double().unsqueeze(-1)
    x = present
    for _ in range(60):
        x = present * x / (x * (side.matrix @ x)).where(present > 0, 1).sqrt()
    given = lengths if padded else None
    scales = normalise.balanced_scales(side.points, given, side.rates, metric, True)
    close(scales, x.squeeze(-1), 2e-6)
    upstream = torch.randn_like(scales)
    arguments = scales, side.points, side.rates, metric, True
    found = normalise.balanced_scales_backward(upstream, *arguments)
    d_inv_bandwidth = normalise.bandwidth_gradient(found, side.points, side.rates)
    system = torch.eye(7, device=DEVICE) + x * side.matrix * x.mT
    v = torch.linalg.solve(system, x * upstream.double().unsqueeze(-1))
    slope = side.slopes(x, -x * v)
    close(found, slope)
    close(d_inv_bandwidth, (slope * side.points).sum((1, 2)) / side.rates)


@pytest.mark.usefixtures("_columns")
@pytest.mark.parametrize("balanced", [False, True], ids=["rows", "balanced"])
@pytest.mark.parametrize("metric", ["absolute", "squared"])
def test_two_sides_are_twice_as_many_heads(metric: str, balanced: bool) -> None:
    """Scales and squared norms of queries and keys in one launch, with the bits of two launches."""
    sides = [Side(metric, 2, 2, 5, 1, 0.3) for _ in range(2)]
    rates, lengths = sides[0].rates, torch.tensor([3, 5], dtype=torch.int32, device=DEVICE)
    points, orders = ([getattr(side, name) for side in sides] for name in ("points", "order"))
    orders = [order.int() for order in orders]
    forward = normalise.balanced_scales if balanced else normalise.row_scales
    backward = normalise.balanced_scales_backward if balanced else normalise.row_scales_backward
    squares, upstream = torch.rand(2, 2, 5, device=DEVICE), torch.randn(2, 2, device=DEVICE)

    def both(points: Tensor, order: Tensor, squares: Tensor) -> list[Tensor]:
        scales = forward(points, lengths, rates, metric, True)
        arguments = squares, order, scales, scales if balanced else None, points, rates
        norms = costs.norm_costs(*arguments, metric, True)
        *found, slope = costs.norm_costs_backward(upstream, *arguments, metric, True)
        more = backward(slope, scales, points, rates, metric, True)
        return [scales, norms, *(x for x in found if x is not None), slope, more]

    together = both(torch.cat(points), torch.cat(orders), squares.flatten(0, 1))
    apart = [both(*arguments) for arguments in zip(points, orders, squares, strict=True)]
    for one, *two in zip(together, *apart, strict=True):
        assert torch.equal(one, torch.cat(two))


@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("sides", [1, 2], ids=["one side", "two sides"])
def test_centred_rows(sides: int, masked: bool) -> None:
    x, before = torch.randn(2, sides, 2, 5, 3, device=DEVICE).unbind()
    centre = torch.randn(2, 3, device=DEVICE)
    mask = torch.rand(2, 5, device=DEVICE) < 0.7 if masked else None
    exact_x = x.double().requires_grad_()
    exact = (exact_x - centre.double().unsqueeze(1)) * 0.5
    if mask is not None:
        exact = exact * mask.unsqueeze(-1)
    expected = exact.flatten(0, 1), exact.square().sum(-1).flatten(0, 1)
    x, y = (*x, None)[:2]
    found = costs.centre_rows(x, y, centre, mask, 0.5)
    for a, b in zip(found, expected, strict=True):
        close(a, b.detach())
    upstream = [torch.randn_like(a) for a in found]
    (added,) = torch.autograd.grad(expected, exact_x, [u.double() for u in upstream])
    dx, dy = (*before.clone(), None)[:2]
    costs.centre_rows_backward(*upstream, found[0], mask, 0.5, dx, dy)
    for a, b, c in zip((dx, dy), before, added, strict=False):
        close(a, b.double() + c)


def test_walks_are_cut_where_that_is_shorter() -> None:
    """In steps of the longest chain of loads, and into no more programs than run at once."""
    for chunks, ahead, scans in itertools.product((1, 16, 65, 256, 2048, 16384), (4, 8), (2, 512)):
        length = segment_length(chunks, ahead, scans)
        steps, own = -(-chunks // ahead), -(-length // ahead)
        segments = -(-chunks // length)
        assert length % ahead == 0
        assert segments == 1 or 2 * own + segments < steps
        assert scans * segments <= max(scans, soft_plan.SCANNING)
    assert segment_length(16384, 8, 4) == 256
    assert segment_length(16384, 8, 4096) >= 16384
