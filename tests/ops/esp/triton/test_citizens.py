"""The fused soft_plan as torch sees them: schemas, fakes, autograd, compilation."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import espformer
from espformer.ops.esp.triton import costs, hard_plan, soft_plan, sort, states
from espformer.ops.esp.triton.normalise import balanced_scales, row_scales
from espformer.ops.esp.triton.plan import sort_sides

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(states, "CHUNK", {2: 4, 4: 4})
        monkeypatch.setattr(states, "AHEAD", (2, 2))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def plan(tokens: int = 6) -> tuple[Any, ...]:
    """The arguments of a plan of two slices, after the rows."""
    sides = [numbers(1, 2, tokens).sort(-1) for _ in range(2)]
    values = [side.values.requires_grad_() for side in sides]
    orders = [side.indices.int() for side in sides]
    width = torch.full((1,), 5.0, device=DEVICE, requires_grad=True)
    scale = torch.rand(1, 2, tokens, device=DEVICE).requires_grad_()
    return (*values, *orders, width, scale, None, None, "absolute")


def strided(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same numbers, every matrix with the strides of its transpose."""

    def turned(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() < 2:
            return x
        return x.detach().mT.contiguous().mT.requires_grad_(x.requires_grad)

    return tuple(turned(x) for x in arguments)


@pytest.mark.parametrize(
    "name",
    [
        "apply_plans",
        "apply_plans_keeping_states",
        "cross_plans",
        "sort_sides",
        "sort_sides_of_two_lengths",
        "row_scales",
        "balanced_scales",
        "norm_costs",
        "centre_rows",
        "centred_costs",
    ],
)
def test_soft_operators(name: str) -> None:
    rows, weights = numbers(1, 6, 4).requires_grad_(), torch.rand(1, 2, device=DEVICE)
    points, _, order, _, width, scale, *_ = plan()
    lengths = torch.full((1,), 4, device=DEVICE).int()
    slices = numbers(1, 3, 4).requires_grad_()
    two_sides = rows, numbers(1, 6, 4).requires_grad_()
    two_lengths = (rows, numbers(1, 7, 4), slices, None, None, lengths, None, width, width)
    calls = {
        "sort_sides": (
            sort_sides,
            (*two_sides, *(None,) * 5, width, width, 0.5, True, False, True, "absolute", True),
        ),
        "sort_sides_of_two_lengths": (
            sort_sides,
            (*two_lengths, 0.5, False, True, False, "absolute", True),
        ),
        "apply_plans": (soft_plan.apply_plans, (rows, weights, 6, False, *plan())),
        "apply_plans_keeping_states": (soft_plan.apply_plans, (rows, weights, 6, True, *plan())),
        "cross_plans": (soft_plan.cross_plans, (rows, numbers(1, 6, 4), *plan())),
        "row_scales": (row_scales, (points, lengths, width, "absolute", True)),
        "balanced_scales": (balanced_scales, (points, lengths, width, "absolute", True)),
        "centred_costs": (
            costs.centred_costs,
            (
                *two_sides,
                numbers(1, 4),
                None,
                None,
                *(order, scale, None, points) * 2,
                width,
                width,
                0.5,
                "absolute",
                True,
            ),
        ),
        "centre_rows": (costs.centre_rows, (rows, numbers(1, 4), None, 0.5)),
        "norm_costs": (
            costs.norm_costs,
            (torch.rand(1, 6, device=DEVICE), order, scale, None, points, width, "absolute", True),
        ),
    }
    operator, arguments = calls[name]
    torch.library.opcheck(operator.custom, arguments, test_utils=CHECKS)
    torch.library.opcheck(operator.custom, strided(arguments), test_utils=CHECKS)


@pytest.mark.parametrize(
    "name",
    ["match", "apply_matching", "cross_matching", "matching_costs", "rank_points", "match_points"],
)
def test_hard_operators(name: str) -> None:
    order = numbers(1, 2, 6).argsort(-1).int()
    rows, weight = numbers(1, 6, 4).requires_grad_(), torch.rand(1, 2, device=DEVICE)
    half, slices = numbers(1, 6, 2).bfloat16().requires_grad_(), numbers(1, 3, 2).requires_grad_()
    calls = {
        "match": (hard_plan.match, (order, order.flip(-1).contiguous())),
        "apply_matching": (hard_plan.apply_matching, (rows, weight, order)),
        "cross_matching": (hard_plan.cross_matching, (rows.detach(), numbers(1, 6, 4), order)),
        "matching_costs": (hard_plan.matching_costs, (rows, numbers(1, 6, 4), order)),
        "rank_points": (sort.rank_points, (half, slices, None, None, 0.5, True)),
        "match_points": (sort.match_points, (half, half.detach().flip(1), None, None, 0.5)),
    }
    operator, arguments = calls[name]
    torch.library.opcheck(operator.custom, arguments, test_utils=CHECKS)
    torch.library.opcheck(operator.custom, strided(arguments), test_utils=CHECKS)


@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
def test_compiles_without_graph_breaks(hard: bool) -> None:
    """Forward and backward of the compiled function are those of the plain one."""

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return espformer.esp_attention(
            query, key, value, hard=hard, inverse_temperature=1.0, backend="triton"
        )

    leaves = [numbers(1, 2, 6, 4).requires_grad_() for _ in range(3)]
    upstream = numbers(1, 2, 6, 4)
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(attention, fullgraph=True, backend=backend)
    found, expected = compiled(*leaves), attention(*leaves)
    torch.testing.assert_close(found, expected)
    for a, b in zip(
        torch.autograd.grad(found, leaves, upstream),
        torch.autograd.grad(expected, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_forward_mode_is_refused_not_dropped() -> None:
    query, key, value = numbers(3, 1, 1, 5, 2).unbind()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(query, query)
        with pytest.raises(NotImplementedError, match="jvp"):
            espformer.esp_attention(dual, key, value, backend="triton")
