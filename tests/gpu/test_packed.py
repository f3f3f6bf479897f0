"""Packed sequences on the fused kernels, in bfloat16: each as the float64 result of it alone."""

from functools import partial

import pytest
import torch

import espformer
from espformer.ops.common import packing
from tests.compare import sequence_by_sequence

pytestmark = pytest.mark.gpu
LENGTHS, KEY_LENGTHS = [70, 0, 197, 33, 1, 512, 64, 180], [70, 3, 150, 33, 1, 600, 0, 200]
CALLS = {
    "soft": (espformer.esp_attention_varlen, espformer.esp_attention, {}),
    "costs": (
        espformer.esp_attention_varlen, espformer.esp_attention, {"inverse_temperature": 0.1},
    ),
    "hard": (espformer.esp_attention_varlen, espformer.esp_attention, {"hard": True}),
    "sinkhorn": (espformer.sinkhorn_attention_varlen, espformer.sinkhorn_attention, {}),
}  # fmt: skip


@pytest.mark.parametrize("call", [0, 100, 1_000_000], ids=["each-alone", "grouped", "one-call"])
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("kind", CALLS)
def test_packed_sequences(
    kind: str, cross: bool, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    packing._groups.cache_clear()
    monkeypatch.setattr(packing, "CALL_TOKENS", {"cuda": call, "cpu": call})
    packed, attention, options = CALLS[kind]
    torch.manual_seed(0)
    key_lengths = KEY_LENGTHS if cross else LENGTHS
    counts = (sum(LENGTHS), sum(key_lengths), sum(key_lengths))
    q, k, v = (torch.randn(n, 4, 64, device="cuda").bfloat16().requires_grad_() for n in counts)
    cu = [torch.tensor([0, *lengths]).cumsum(0) for lengths in (LENGTHS, key_lengths)]
    upstream = torch.randn_like(q)
    out = packed(q, k, v, *cu, **options)
    got = [
        out,
        *torch.autograd.grad(out, [q, k, v], upstream, materialize_grads=True, allow_unused=True),
    ]
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want_out = sequence_by_sequence(partial(attention, **options), *exact, *cu)
    grads = torch.autograd.grad(
        want_out, exact, upstream.double(), materialize_grads=True, allow_unused=True
    )
    for one, other in zip(got, [want_out, *grads], strict=True):
        error = (one.double() - other).norm() / other.norm().clamp(min=1e-30)
        assert float(error.detach()) <= 6e-3
