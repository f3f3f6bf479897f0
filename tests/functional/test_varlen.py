"""Packed sequences: each is attended to by itself, as in the padded call; gradients too."""

import random
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import espformer
from espformer.functional import (
    esp_attention_varlen,
    sinkhorn_attention,
    sinkhorn_attention_varlen,
    softmax_attention,
)
from espformer.ops.common import packing
from espformer.ops.common.packing import Packing, group_lengths
from tests.compare import sequence_by_sequence

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, WIDTH, VALUE_WIDTH = 2, 3, 4
ESP: dict[str, dict[str, Any]] = {
    "soft": {},
    "costs": {"inverse_temperature": 0.5, "sort_temperature": 0.2},
    "absolute": {"temperature_unit": "absolute", "metric": "squared"},
    "balanced": {"balance": "both"},
    "hard": {"hard": True, "inverse_temperature": 1.0},
    "straight-through": {"straight_through": True},
}


def tokens(lengths: list[int], width: int, dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(sum(lengths), HEADS, width, dtype=dtype, device=DEVICE)
    return x.requires_grad_()


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def compare(packed: Any, attention: Any, q_lengths: list[int], k_lengths: list[int]) -> None:
    """Outputs and gradients of a packed call and of a loop over sequences, in float64."""
    leaves = [tokens(q_lengths, WIDTH), tokens(k_lengths, WIDTH), tokens(k_lengths, VALUE_WIDTH)]
    cu = offsets(q_lengths), offsets(k_lengths)
    found, want = packed(*leaves, *cu), sequence_by_sequence(attention, *leaves, *cu)
    assert found.shape == want.shape
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-10)
    upstream = torch.randn_like(want)
    grads = [
        torch.autograd.grad(out, leaves, upstream, allow_unused=True, materialize_grads=True)
        for out in (found, want)
    ]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


@pytest.fixture(params=[0, 8, 10_000], ids=["each-alone", "grouped", "one-call"])
def _calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of equal lengths, of similar lengths, or all sequences at once."""
    packing._groups.cache_clear()
    monkeypatch.setattr(packing, "CALL_TOKENS", dict.fromkeys(("cpu", "cuda"), request.param))


@pytest.mark.usefixtures("_calls")
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("options", ESP.values(), ids=ESP)
def test_esp_attention_of_drawn_lengths(options: dict[str, Any], cross: bool) -> None:
    draw = random.Random(len(str(options)))
    for _ in range(3):
        count = draw.randint(1, 6)
        q_lengths = [draw.choice((0, 1, 2, 5, 9, 13)) for _ in range(count)]
        k_lengths = [draw.choice((0, 1, 3, 5, 8)) for _ in range(count)] if cross else q_lengths
        if not sum(q_lengths) or not sum(k_lengths):
            q_lengths[0] = k_lengths[0] = 4
        packed = partial(esp_attention_varlen, **options)
        compare(packed, partial(espformer.esp_attention, **options), q_lengths, k_lengths)


@pytest.mark.usefixtures("_calls")
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_sinkhorn_attention_of_drawn_lengths(cross: bool) -> None:
    draw = random.Random(3)
    for iterations in (1, 2, 3):
        q_lengths = [draw.choice((0, 1, 4, 9)) for _ in range(5)] + [3]
        k_lengths = [draw.choice((0, 1, 4, 9)) for _ in range(5)] + [2] if cross else q_lengths
        packed = partial(sinkhorn_attention_varlen, iterations=iterations)
        compare(packed, partial(sinkhorn_attention, iterations=iterations), q_lengths, k_lengths)


def test_it_is_the_padded_call() -> None:
    lengths = [5, 0, 7, 2]
    q, k, v = (tokens(lengths, w) for w in (WIDTH, WIDTH, VALUE_WIDTH))
    mask = torch.arange(7, device=DEVICE) < torch.tensor(lengths, device=DEVICE).unsqueeze(-1)
    slices = torch.randn(HEADS, 4, WIDTH, dtype=torch.float64, device=DEVICE, requires_grad=True)
    logits = torch.randn(HEADS, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    t = torch.tensor([0.2, 0.5], dtype=torch.float64, device=DEVICE, requires_grad=True)
    options = {"slices": slices, "slice_logits": logits, "sort_temperature": t}
    found = esp_attention_varlen(q, k, v, offsets(lengths), **options)

    def pad(x: Tensor) -> Tensor:
        padded = x.new_zeros(*mask.shape, *x.shape[1:]).index_put((mask,), x)
        return padded.transpose(1, 2)

    want = espformer.esp_attention(pad(q), pad(k), pad(v), mask=mask, **options)
    want = want.transpose(1, 2)[mask]
    torch.testing.assert_close(found, want)
    upstream = torch.randn_like(want)
    leaves = [q, k, v, slices, logits, t]
    grads = [torch.autograd.grad(out, leaves, upstream) for out in (found, want)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("attention", [espformer.esp_attention, espformer.sinkhorn_attention])
def test_jagged_nested_tensors(attention: Any) -> None:
    q_lengths, k_lengths = [4, 1, 6], [3, 5, 6]
    leaves = [tokens(q_lengths, WIDTH), tokens(k_lengths, WIDTH), tokens(k_lengths, VALUE_WIDTH)]
    cu = [offsets(lengths).to(DEVICE) for lengths in (q_lengths, k_lengths)]
    nested = [
        torch.nested.nested_tensor_from_jagged(x, cu[i > 0]).transpose(1, 2)
        for i, x in enumerate(leaves)
    ]
    out = attention(*nested)
    assert out.is_nested
    assert out.shape[:2] == (3, HEADS)
    assert out.offsets() is nested[0].offsets()
    found = out.transpose(1, 2).values()
    want = sequence_by_sequence(attention, *leaves, *cu)
    torch.testing.assert_close(found, want)
    upstream = torch.randn_like(want)
    grads = [torch.autograd.grad(x, leaves, upstream) for x in (found, want)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
    with pytest.raises(ValueError, match="hold no padding"):
        attention(*nested, key_mask=torch.ones(3, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match="hold no padding"):
        attention(*nested, mask=torch.ones(3, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"must all be jagged .* key is not nested, \(3, "):
        attention(nested[0], torch.randn(3, HEADS, 6, WIDTH), nested[2])
    with pytest.raises(ValueError, match=r"key is nested, with layout torch\.strided"):
        attention(nested[0], torch.nested.nested_tensor([torch.randn(3, 4, 2)]), nested[2])
    with pytest.raises(ValueError, match=r"query is nested, .* of 3 dimensions"):
        attention(*[torch.nested.nested_tensor([leaves[0]], layout=torch.jagged)[..., 0]] * 3)


def test_no_tokens_and_queries_without_keys() -> None:
    x = torch.randn(0, HEADS, WIDTH)
    assert esp_attention_varlen(x, x, x, [0, 0]).shape == (0, HEADS, WIDTH)
    q = torch.randn(3, HEADS, WIDTH)
    assert torch.equal(esp_attention_varlen(q, x, x, [0, 3], [0, 0]), torch.zeros_like(q))


@pytest.mark.parametrize("attention", [esp_attention_varlen, sinkhorn_attention_varlen])
def test_a_batch_in_which_no_query_has_a_key_trains(attention: Any) -> None:
    """Its gradients are zero, as for a padded batch without keys; NaN leaves no trace in them."""
    for lengths, others in (([2, 3], [0, 0]), ([0, 5], [4, 0]), ([0, 0], [0, 0])):
        q, k = tokens(lengths, WIDTH), tokens(others, WIDTH)
        v = torch.full((sum(others), HEADS, VALUE_WIDTH), torch.nan, dtype=torch.float64)
        v.requires_grad_()
        out = attention(q, k, v, offsets(lengths), offsets(others))
        assert torch.equal(out, torch.zeros(sum(lengths), HEADS, VALUE_WIDTH, dtype=torch.float64))
        out.sum().backward()
        for x in (q, k, v):
            assert torch.equal(x.grad, torch.zeros_like(x))


def test_packing_of_a_mask_and_of_any_attention() -> None:
    mask = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    x = torch.randn(5, HEADS, WIDTH)
    found = Packing.of_mask(mask).attend(softmax_attention, x, x, x)
    want = sequence_by_sequence(softmax_attention, x, x, x, *[offsets([2, 0, 3])] * 2)
    torch.testing.assert_close(found, want)


def test_groups_are_the_cheapest() -> None:
    """Against all ways to cut the sorted sizes."""
    draw = random.Random(0)
    for call in (0, 5, 40):
        sizes = [draw.randint(1, 16) for _ in range(7)]  # every size is a step of its own
        groups = group_lengths(sizes, call)
        assert sorted(i for group in groups for i in group) == list(range(7))

        def cost(parts: list[list[int]], call: int = call) -> int:
            return sum(len(part) * max(part) + call for part in parts)

        ordered = sorted(sizes)
        best = min(
            cost([ordered[a:b] for a, b in pairwise([0, *cuts, 7])])
            for bits in range(1 << 6)
            for cuts in [[i + 1 for i in range(6) if bits >> i & 1]]
        )
        assert cost([[sizes[i] for i in group] for group in groups]) == best


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 4],), "must begin with 0 and never decrease"),
        (([0, 5, 4],), "must begin with 0 and never decrease"),
        (([0, 3],), "query has 4 tokens, but cu_seqlens_q ends with 3"),
        (([0, 4], [0, 2, 4]), "has 1 sequences, cu_seqlens_k has 2"),
        ((torch.tensor([0.0, 4.0]),), "must hold integers"),
    ],
)
def test_wrong_arguments(arguments: tuple[Any, ...], message: str) -> None:
    x = torch.randn(4, HEADS, WIDTH)
    with pytest.raises(ValueError, match=message):
        esp_attention_varlen(x, x, x, *arguments)


def test_wrong_shapes() -> None:
    x = torch.randn(4, HEADS, WIDTH)
    with pytest.raises(ValueError, match=r"must have shape \(tokens, heads, width\)"):
        esp_attention_varlen(x[0], x, x, [0, 4])
    with pytest.raises(ValueError, match="query has 2 heads but key has 1"):
        esp_attention_varlen(x, x[:, :1], x, [0, 4])
    with pytest.raises(ValueError, match="one temperature per sequence"):
        esp_attention_varlen(x, x, x, [0, 4], sort_temperature=torch.ones(2, HEADS))


def test_evaluation_first_then_training() -> None:
    """Lengths that were met without gradients, as a validation meets them, train afterwards."""
    packing._groups.cache_clear()
    x = torch.randn(9, 2, 4)
    lengths = torch.tensor([0, 5, 9])
    with torch.inference_mode():
        evaluated = espformer.esp_attention_varlen(x, x, x, lengths, lengths)
    x.requires_grad_()
    trained = espformer.esp_attention_varlen(x, x, x, lengths, lengths)
    trained.sum().backward()
    torch.testing.assert_close(trained.detach(), evaluated.clone())
    assert x.grad is not None
