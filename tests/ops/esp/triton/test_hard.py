"""Sorting of tokens and hard plans: permutations, costs, and numbers that are not finite."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import espformer
from espformer.ops.esp.triton import sort
from espformer.ops.esp.triton.hard_plan import (
    compose_with_inverse,
    gather_distance,
    gather_dot,
    gather_sum,
    match_points,
)
from espformer.ops.esp.triton.sort import masked_lengths, rank_points

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter takes a second for a row of 1000 tokens.
TOKENS = (1, 2, 5, 33, 197, 1000, 2500, 5000, 65536) if DEVICE == "cuda" else (1, 2, 33, 100)
# bfloat16 is wrong in the interpreter.
DTYPES = [torch.float32, torch.float16, torch.bfloat16][: 3 if DEVICE == "cuda" else 2]
NUMBERS = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}


def sides(tokens: int, dtype: torch.dtype, masked: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Two sides of two heads with three columns and many ties; the second head may be empty."""
    query, key = (torch.randn(2, 2, tokens, 3, device=DEVICE) * 4).round().div(4).to(dtype)
    if not masked:
        return query, key, None
    mask = torch.rand(2, tokens, device=DEVICE) < 0.7
    mask[0, 0], mask[1] = True, False
    return query * mask.unsqueeze(-1), key * mask.unsqueeze(-1), mask


def orders(x: Tensor, mask: Tensor | None) -> Tensor:
    keys = x.float().mT
    if mask is not None:
        keys = keys.masked_fill(~mask.unsqueeze(1), torch.inf)
    return keys.argsort(dim=-1, stable=True)


def test_matches_of_several_blocks() -> None:
    """Permutations longer than a program's block, composed with another or with the identity."""
    order, to = torch.rand(2, 2, 3, 2500, device=DEVICE).argsort(-1).int().unbind()
    inverse = order.argsort(-1)
    assert torch.equal(compose_with_inverse(order, to), to.gather(-1, inverse))
    assert torch.equal(compose_with_inverse(order, None), inverse.int())


@pytest.fixture(params=[False, True], ids=["at-once", "in-runs"])
def _in_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are sorted by one program each, or in runs of 32 tokens that are merged."""
    if request.param:
        monkeypatch.setattr(sort, "RUN", 32)


@pytest.mark.usefixtures("_in_runs")
@pytest.mark.parametrize("masked", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_ranks_are_those_of_a_stable_sort(tokens: int, dtype: torch.dtype, masked: bool) -> None:
    query, key, mask = sides(tokens, dtype, masked)
    points, order = rank_points(query, None, mask, masked_lengths(mask), 0.5)
    expected = orders(query, mask)
    assert torch.equal(order.long(), expected)
    sorted_points = query.mT.float().gather(-1, expected) * 0.5
    if mask is not None:  # padding repeats the last true number
        last = (mask.sum(-1) - 1).clamp(min=0).view(-1, 1, 1)
        positions = torch.arange(tokens, device=DEVICE).minimum(last)
        sorted_points = sorted_points.gather(-1, positions.expand_as(sorted_points))
    assert torch.equal(points, sorted_points)
    matches, weights = match_points(query, key, None, mask, 0.5)
    met = torch.empty_like(expected).scatter_(-1, expected, orders(key, mask))
    assert torch.equal(matches.long(), met)
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 3))


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16, 33, 70])
def test_runs_are_merged(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Runs that are full, one that is not, and one without a partner."""
    monkeypatch.setattr(sort, "RUN", 8)
    words = torch.rand(3, tokens, device=DEVICE).argsort(-1) - tokens // 2
    for word in (words.int(), words << 33 | 5):
        assert torch.equal(sort.sort_rows(word.clone())[0], word.sort(-1).values)


@pytest.mark.usefixtures("_in_runs")
@pytest.mark.parametrize("masked", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("side", [0, 1], ids=["query", "key"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_columns_that_are_not_finite(
    side: int, number: float, masked: bool, dtype: torch.dtype
) -> None:
    """Their share and their sorted numbers are NaN; matches are permutations all the same."""
    *both, mask = sides(21, dtype, masked)
    x = both[side]
    x[0, 0, 1] = number
    matches, weights = match_points(*both, None, mask, 1.0)
    points, _ = rank_points(x, None, mask, masked_lengths(mask), 1.0)
    hit = torch.zeros(2, 3, dtype=torch.bool, device=DEVICE)
    hit[0, 1] = True
    assert torch.equal(weights.isnan(), hit)
    assert torch.equal(points.isnan(), hit.unsqueeze(-1).expand_as(points))
    everyone = torch.arange(21, device=DEVICE, dtype=torch.int32).expand_as(matches)
    assert torch.equal(matches.sort(-1).values, everyone)


@pytest.mark.parametrize(("batch", "tokens", "width"), [(3, 7, 5), (1, 150, 16), (130, 40, 3)])
def test_gathers(batch: int, tokens: int, width: int) -> None:
    index = torch.rand(batch, 2, tokens, device=DEVICE).argsort(-1)
    x, y = torch.randn(2, batch, tokens, width, device=DEVICE)
    weight = torch.randn(batch, 2, device=DEVICE)
    heads = torch.arange(batch, device=DEVICE).view(-1, 1, 1)
    rows = y[heads, index]
    index = index.int()
    expected = torch.einsum("blnd,bl->bnd", rows, weight)
    torch.testing.assert_close(gather_sum(y, index, weight, torch.float32), expected)
    pairs = x.unsqueeze(1)
    dot, distance = (pairs * rows).sum((-2, -1)), (pairs - rows).square().sum((-2, -1))
    torch.testing.assert_close(gather_dot(x, y, index), dot, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gather_distance(x, y, index), distance, rtol=1e-4, atol=1e-4)


OPTIONS = [
    pytest.param({"hard": True}, id="hard"),
    pytest.param({}, id="soft", marks=pytest.mark.slow),
    pytest.param({"straight_through": True}, id="straight-through", marks=pytest.mark.slow),
    pytest.param({"hard": True, "slice_dropout": 0.9}, id="dropout"),
    pytest.param({"hard": True, "ties": "average"}, id="average"),
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("tau", [0.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_nan_is_seen_in_its_head_alone(
    options: dict[str, Any], tau: float, dtype: torch.dtype
) -> None:
    query, key, value = torch.randn(3, 2, 2, 6, 2, device=DEVICE).to(dtype).unbind()
    mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2], device=DEVICE)
    options = options | {"inverse_temperature": tau, "mask": mask, "backend": "triton"}
    for x, number in ((query, torch.nan), (key, torch.inf)):
        before = x[1, 0, 2, 1].clone()
        x[1, 0, 2, 1] = number
        out = espformer.esp_attention(query, key, value, **options)
        assert out[1, 0, mask[1]].isnan().all()
        assert torch.cat([out[0], out[1, 1:]]).isfinite().all()
        x[1, 0, 2, 1] = before


def test_nan_in_slices_is_seen() -> None:
    query, key, value = torch.randn(3, 1, 2, 6, 2, device=DEVICE).unbind()
    slices = torch.randn(2, 3, 2, device=DEVICE)
    slices[1, 2, 0] = torch.nan
    for hard in (False, True):
        for tau in (0.0, 0.7):
            out = espformer.esp_attention(
                query, key, value, slices=slices, hard=hard, inverse_temperature=tau,
                backend="triton",
            )  # fmt: skip
            assert out[0, 1].isnan().all()
            assert out[0, 0].isfinite().all()
