"""The chunk kernels against the dense kernel matrix, in float64."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from espformer.ops.triton import column, launch
from espformer.ops.triton.launch import Rows, SortedSlices

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow: without a GPU, chunks of four ranks make several from few tokens."""
    if DEVICE == "cpu":
        monkeypatch.setattr(launch, "CHUNK", {2: 4, 4: 4})
        monkeypatch.setattr(launch, "AHEAD", 2)


CASES = [
    pytest.param("absolute", 2, 3, 11, 8, 0.1, id="absolute-B2-L3-N11-D8"),
    pytest.param("absolute", 1, 2, 8, 4, 0.3, id="absolute-B1-L2-N8-D4"),
    pytest.param("absolute", 1, 1, 1, 5, 1.0, id="absolute-B1-L1-N1-D5"),
    pytest.param("absolute", 1, 5, 13, 1, 1.0, id="absolute-B1-L5-N13-D1"),
    pytest.param("squared", 2, 3, 11, 8, 0.1, id="squared-B2-L3-N11-D8"),
    pytest.param("squared", 1, 2, 8, 1, 0.3, id="squared-B1-L2-N8-D1"),
]


class Case:
    """Sorted numbers with many ties, two operands, and everything dense."""

    def __init__(self, metric: str, batch: int, slices: int, ranks: int, width: int, t: float):
        numbers = (torch.randn(batch, slices, ranks) * 4).round() / 4
        values, order = numbers.to(DEVICE).sort(-1)
        inverse_width = torch.full((batch,), 1 / t if metric == "absolute" else t**-0.5)
        self.kernel = SortedSlices(
            values.contiguous(), inverse_width.to(DEVICE), metric, torch.float32
        )
        self.order, self.order32 = order, order.int()
        self.tokens = torch.randn(2, batch, ranks, width, device=DEVICE)
        self.scale = torch.rand(batch, slices, ranks, device=DEVICE)
        difference = (values.unsqueeze(-1) - values.unsqueeze(-2)).double() * float(
            inverse_width[0]
        )
        if metric == "absolute":
            self.matrix = torch.exp(-difference.abs())
            self.slope = -difference.sign() * self.matrix
        else:
            self.matrix = torch.exp(-(difference**2))
            self.slope = -2 * difference * self.matrix

    def ranked(self, which: int) -> Tensor:
        rows = self.tokens[which].unsqueeze(1).expand(-1, self.order.shape[1], -1, -1)
        return rows.gather(2, self.order.unsqueeze(-1).expand_as(rows)).double()

    def to_tokens(self, rows: Tensor) -> Tensor:
        index = self.order.unsqueeze(-1).expand_as(rows)
        return torch.zeros_like(rows).scatter_(2, index, rows).sum(1)


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(
        got.double(), expected, rtol=0, atol=2e-5 * (1 + expected.abs().max())
    )


@pytest.mark.parametrize(("metric", "batch", "slices", "ranks", "width", "t"), CASES)
def test_products(metric: str, batch: int, slices: int, ranks: int, width: int, t: float) -> None:
    case = Case(metric, batch, slices, ranks, width, t)
    x, expected = Rows(case.tokens[0], case.order32), case.matrix @ case.ranked(0)
    states = case.kernel.states(x)

    stored = torch.full(expected.shape, torch.nan, device=DEVICE)
    case.kernel.mix(x, states, case.scale, "ranks", stored)
    close(stored, expected * case.scale.unsqueeze(-1))

    added = torch.zeros_like(case.tokens[0])
    case.kernel.mix(x, states, None, "tokens", added, order=case.order32)
    close(added, case.to_tokens(expected))

    dots = case.kernel.dot(x, states, None, case.tokens[1], case.order32)
    close(dots, (expected * case.ranked(1)).sum((-2, -1)))

    in_ranks = Rows(case.ranked(0).float(), None, case.scale)
    case.kernel.mix(in_ranks, case.kernel.states(in_ranks), None, "ranks", stored)
    close(stored, case.matrix @ (case.ranked(0) * case.scale.unsqueeze(-1)))


@pytest.mark.parametrize(("metric", "batch", "slices", "ranks", "width", "t"), CASES)
def test_gradient(metric: str, batch: int, slices: int, ranks: int, width: int, t: float) -> None:
    case = Case(metric, batch, slices, ranks, width, t)
    x, p = case.ranked(0), case.ranked(1)
    kx, kp = case.matrix @ x, case.matrix @ p
    rows, upstream = Rows(case.tokens[0], case.order32), Rows(case.tokens[1], case.order32)
    states = [case.kernel.states(side, ties=True) for side in (rows, upstream)]
    slope, agree, align = torch.full((3, *case.scale.shape), torch.nan, device=DEVICE).unbind()
    out = torch.full(kp.shape, torch.nan, device=DEVICE)
    case.kernel.grad(
        rows,
        upstream,
        *states,
        slope,
        scale=case.scale,
        agree=agree,
        align=align,
        to="ranks",
        out=out,
    )
    close(slope, (p * (case.slope @ x) + x * (case.slope @ p)).sum(-1))
    close(agree, (x * kp).sum(-1))
    close(align, (p * kx).sum(-1))
    close(out, kp * case.scale.unsqueeze(-1))

    added = torch.zeros_like(case.tokens[0])
    case.kernel.grad(rows, upstream, *states, slope, to="tokens", out=added, order=case.order32)
    close(added, case.to_tokens(kp))


@pytest.mark.parametrize(("metric", "batch", "slices", "ranks", "width", "t"), CASES)
def test_columns(
    monkeypatch: pytest.MonkeyPatch,
    metric: str, batch: int, slices: int, ranks: int, width: int, t: float,
) -> None:  # fmt: skip
    """One number per rank, through several blocks, with ties within and across them."""
    monkeypatch.setattr(column, "BLOCK", 4)
    monkeypatch.setattr(column, "LEAST_BLOCK", 4)
    case = Case(metric, batch, slices, ranks, width, t)
    x, p = torch.randn(2, *case.scale.shape, device=DEVICE).unbind()
    values, inverse_width = case.kernel.values, case.kernel.inverse_width
    kx = (case.matrix @ x.double().unsqueeze(-1)).squeeze(-1)
    close(column.sorted_column(x, values, inverse_width, metric, True), kx)

    found, slope = column.sorted_column_backward(p, x, values, inverse_width, metric, True)
    close(found, (case.matrix @ p.double().unsqueeze(-1)).squeeze(-1))
    x_slope, p_slope = ((case.slope @ y.double().unsqueeze(-1)).squeeze(-1) for y in (x, p))
    close(slope, p * x_slope + x * p_slope)
