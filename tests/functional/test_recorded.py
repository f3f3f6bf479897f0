"""Graphs that ``torch.jit.trace`` and ``torch.export`` record, on inputs they have not seen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from espformer import esp_attention, esp_plan, sinkhorn_attention, sorting
from espformer.functional import esp as functional_esp
from espformer.ops.esp import linear, reference

OPTIONS = {
    "soft": {},
    "costs": {"inverse_temperature": 1.0, "metric": "squared", "balance": "both"},
    "straight-through": {"straight_through": True},
    "hard": {"hard": True, "inverse_temperature": 1.0},
}
# Sizes are constants of a trace, of which it warns.
pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning"),
]
every = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


class Call(nn.Module):
    """A function as a module, which ``torch.export`` asks for."""

    def __init__(self, function: Callable[..., Tensor], **options: Any) -> None:
        super().__init__()
        self.function, self.options = function, options

    def forward(self, x: Tensor) -> Tensor:
        if self.function is esp_attention or self.function is sinkhorn_attention:
            return self.function(x, x.flip(-2), x.square(), **self.options)
        if self.function is esp_plan:
            return self.function(x, x.flip(-2), **self.options)
        return self.function(x, **self.options)


def draw(length: int, width: int = 3) -> Tensor:
    return torch.randn(2, 2, length, width, dtype=torch.float64)


@every
@pytest.mark.parametrize("function", [esp_attention, esp_plan])
def test_traced_attention(function: Any, options: dict[str, Any]) -> None:
    call = Call(function, **options)
    traced = torch.jit.trace(call, (draw(40),))
    for x in (
        draw(40),
        draw(40).round(),
    ):  # the second has ties, which a trace must not assume away
        x.requires_grad_()
        found, want = traced(x), call(x)
        torch.testing.assert_close(found, want)
        upstream = torch.randn_like(want)
        grads = [torch.autograd.grad(out, x, upstream, allow_unused=True) for out in (found, want)]
        assert (grads[0][0] is None) == (grads[1][0] is None)
        if grads[0][0] is not None:
            torch.testing.assert_close(grads[0][0], grads[1][0], rtol=1e-6, atol=1e-8)


SORTS = {
    "soft_sort": Call(sorting.soft_sort),
    "soft_rank": Call(sorting.soft_rank, temperature=0.3),
    "soft_topk": Call(sorting.soft_topk, k=2),
    "hard": Call(sorting.soft_sort, hard=True),
}


@pytest.mark.parametrize("call", SORTS.values(), ids=SORTS)
def test_traced_sorts(call: Call) -> None:
    traced = torch.jit.trace(call, (draw(2, 40),))
    x = draw(2, 40).round()
    torch.testing.assert_close(traced(x), call(x))


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@every
def test_exported_attention_of_any_length(options: dict[str, Any], strict: bool) -> None:
    call, length = Call(esp_attention, **options), torch.export.Dim("length", min=2)
    program = torch.export.export(call, (draw(40),), dynamic_shapes=({2: length},), strict=strict)
    for x in (draw(33), draw(70), draw(2)):
        torch.testing.assert_close(program.module()(x), call(x))


@pytest.mark.parametrize("call", SORTS.values(), ids=SORTS)
def test_exported_sorts_of_any_length(call: Call) -> None:
    length = torch.export.Dim("length", min=3, max=1000)
    program = torch.export.export(call, (draw(2, 40),), dynamic_shapes=({3: length},), strict=False)
    for x in (draw(2, 33), draw(2, 70)):
        torch.testing.assert_close(program.module()(x), call(x))


def test_only_soft_graphs_of_any_length_are_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dense formula takes O(N²) memory, so it must not be chosen without need."""
    used = []
    for module in (linear, reference):
        attend = module.attend
        monkeypatch.setattr(
            module, "attend", lambda *a, m=module, f=attend, **o: (used.append(m), f(*a, **o))[1]
        )
    torch.export.export(Call(esp_attention), (draw(8),), strict=False)
    torch.export.export(
        Call(esp_attention), (draw(8),), dynamic_shapes=({0: torch.export.Dim("b")},), strict=False
    )
    torch.export.export(
        Call(esp_attention, hard=True), (draw(8),), dynamic_shapes=({2: torch.export.Dim("n")},),
        strict=False,
    )  # fmt: skip
    assert set(used) == {linear}


@pytest.mark.parametrize("backend", ["linear", "cpu", "triton"])
def test_kernels_cannot_be_traced(backend: str) -> None:
    """Their results would be constants of the trace."""
    expected = f'cannot record backend="{backend}"; pass backend="auto" or "dense"'
    with pytest.raises(ValueError, match=expected):
        torch.jit.trace(Call(esp_attention, backend=backend), (draw(8).float(),))


@pytest.mark.parametrize("recording", ["jit", "export"])
def test_graphs_of_gpu_tensors_consist_of_torch_operators(
    recording: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They must run without this library, wherever they were recorded."""
    if recording == "jit":
        monkeypatch.setattr(torch.jit, "is_tracing", lambda: True)
    else:
        monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(1, 8, 4, device="cuda")
    assert functional_esp.pick_backend("test", "auto", x) is linear
