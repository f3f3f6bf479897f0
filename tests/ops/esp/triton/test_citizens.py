"""The fused kernels as torch sees them: schemas, fakes, autograd, compilation."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import espformer
from espformer.ops.esp.triton import attention, hard_plan, soft_plan, sort
from tests.opcheck import check_operator

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(soft_plan, "CHUNK", {2: 4, 4: 4})
        monkeypatch.setattr(soft_plan, "AHEAD", (2, 2))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


ATTENTIONS = {
    "mean": {},
    "keeping states": {"keep_states": True},
    "two lengths": {"keys": 7, "one_to_one": False, "one_mask": False},
    "two masks": {"one_mask": False, "key_mask": torch.tensor([[True] * 6])},
    "costs": {"inverse_temperature": 0.5, "balanced": True},
    "costs of two lengths": {
        "keys": 7, "one_to_one": False, "one_mask": False, "inverse_temperature": 0.5,
        "cost_exponent": 1.0,
    },
    "half precision": {"dtype": torch.float16},
    "gradient of the values": {"needed": ("value",), "dtype": torch.float16},
    "gradients of keys and logits": {"needed": ("key", "slice_logits"), "inverse_temperature": 0.5},
}  # fmt: skip
OPERANDS = "query", "key", "value", "slices", "slice_logits", "inv_bandwidth"


@pytest.mark.parametrize("name", ATTENTIONS)
def test_soft_attention(name: str) -> None:
    options = {
        "one_to_one": True, "one_mask": True, "keep_states": False, "scale": 0.5,
        "in_spreads": name != "costs", "balanced": False, "metric": "absolute",
        "coupling": "quantile", "inverse_temperature": 0.0, "cost_exponent": 2.0,
    }  # fmt: skip
    options |= ATTENTIONS[name]
    keys, key_mask = options.pop("keys", 6), options.pop("key_mask", None)
    masks = torch.tensor([[True] * 4 + [False] * 2], device=DEVICE), key_mask, None
    if options["one_to_one"] and not options["one_mask"]:
        masks = key_mask.to(DEVICE), key_mask.to(DEVICE), None
    dtype = options.pop("dtype", torch.float32)
    query, key = numbers(1, 6, 4).to(dtype), numbers(1, keys, 4).to(dtype)
    value = numbers(1, keys, 4).to(dtype)
    inv_bandwidth = torch.full((1,), 5.0, device=DEVICE)
    operands = query, key, value, numbers(1, 2, 4), numbers(1, 2), inv_bandwidth
    needed = options.pop("needed", OPERANDS)
    leaves = [x.requires_grad_() for x, of in zip(operands, OPERANDS, strict=True) if of in needed]
    arguments = (*operands, *masks, *(options[name] for name in attention.Settings._fields))
    every_one = dtype == torch.float32 and needed == OPERANDS
    check_operator(attention.soft_attention, arguments, strides=every_one)
    found = attention.soft_attention.custom(*arguments)[0]
    assert torch.equal(found, attention.soft_attention(*arguments))
    # The same in float32, where all gradients are needed.
    every = [x.detach().float().requires_grad_() for x in operands]
    expected = attention.soft_attention(*every, *arguments[len(every) :])
    wanted = dict(zip(OPERANDS, torch.autograd.grad(expected.square().sum(), every), strict=True))
    got = torch.autograd.grad(found.square().sum(), leaves)
    rounding = 1e-5 if dtype == torch.float32 else 5e-3
    for a, b in zip((found, *got), (expected, *(wanted[x] for x in needed)), strict=True):
        assert (a - b).norm() <= rounding * b.norm()


@pytest.mark.parametrize(
    "name",
    [
        "compose_with_inverse",
        "apply_matching",
        "cross_matching",
        "matching_costs",
        "rank_points",
        "match_points",
    ],
)
def test_hard_operators(name: str) -> None:
    order = numbers(1, 2, 6).argsort(-1).int()
    rows, weight = numbers(1, 6, 4).requires_grad_(), torch.rand(1, 2, device=DEVICE)
    half, slices = numbers(1, 6, 2).bfloat16().requires_grad_(), numbers(1, 3, 2).requires_grad_()
    calls = {
        "compose_with_inverse": (
            hard_plan.compose_with_inverse,
            (order, order.flip(-1).contiguous()),
        ),
        "apply_matching": (hard_plan.apply_matching, (rows, weight, order)),
        "cross_matching": (hard_plan.cross_matching, (rows.detach(), numbers(1, 6, 4), order)),
        "matching_costs": (hard_plan.matching_costs, (rows, numbers(1, 6, 4), order)),
        "rank_points": (sort.rank_points, (half, slices, None, None, 0.5)),
        "match_points": (hard_plan.match_points, (half, half.detach().flip(1), None, None, 0.5)),
    }
    operator, arguments = calls[name]
    check_operator(operator, arguments)


@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
def test_compiles_without_graph_breaks(hard: bool) -> None:
    """Forward and backward of the compiled function are those of the plain one."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return espformer.esp_attention(
            query, key, value, hard=hard, inverse_temperature=1.0, backend="triton"
        )

    leaves = [numbers(1, 2, 6, 4).requires_grad_() for _ in range(3)]
    upstream = numbers(1, 2, 6, 4)
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    found, expected = compiled(*leaves), attend(*leaves)
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


def test_selective_checkpointing_sees_the_operator() -> None:
    """A policy that saves attention is asked about it, and it is not computed again."""
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint,
        create_selective_checkpoint_contexts,
    )

    asked: list[str] = []

    def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator.namespace != "espformer":
            return CheckpointPolicy.PREFER_RECOMPUTE
        asked.append(("recomputing " if ctx.is_recompute else "") + operator._schema.name)
        return CheckpointPolicy.MUST_SAVE

    def attend(*tensors: Tensor) -> Tensor:
        return espformer.esp_attention(*tensors, hard=True, backend="triton")

    leaves = [numbers(1, 1, 6, 2).requires_grad_() for _ in range(3)]
    expected = attend(*leaves)
    found = checkpoint(
        attend, *leaves, use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )  # fmt: skip
    torch.testing.assert_close(found, expected)
    assert "espformer::apply_matching" in asked
    gradients = torch.autograd.grad(found.square().sum(), leaves[2])
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.square().sum(), leaves[2]))
