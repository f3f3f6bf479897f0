"""The fused kernels on a GPU: 16-bit inputs, real sizes, every supported width."""

from typing import Any

import pytest
import torch

import espformer

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}


def relative_errors(
    dtype: torch.dtype, queries: int, keys: int, width: int, oracle: str, **options: Any
) -> dict[str, float]:
    """Errors of values and gradients against the same rounded inputs in float64."""
    shapes = ((queries, width), (keys, width), (keys, width), (queries, width))
    tensors = [torch.randn(2, 2, *shape, device="cuda").to(dtype) for shape in shapes]
    results = []
    for backend, precision in (("triton", dtype), (oracle, torch.float64)):
        leaves = [x.to(precision).requires_grad_() for x in tensors[:3]]
        out = espformer.esp_attention(*leaves, backend=backend, **options)
        results.append([out, *torch.autograd.grad(out, leaves, tensors[3].to(precision))])
    return {
        name: float((a.double() - b).norm() / b.norm())
        for name, a, b in zip(("out", "query", "key", "value"), *results, strict=True)
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="rows"),
        pytest.param({"metric": "squared"}, id="squared"),
        pytest.param({"balance": "both"}, id="both"),
        pytest.param({"hard": True, "inverse_temperature": 1.0}, id="hard"),
        pytest.param({"sort_temperature": 1e-3}, id="sharp"),
    ],
)
def test_against_dense(dtype: torch.dtype, options: dict[str, Any]) -> None:
    errors = relative_errors(dtype, 197, 197, 64, "dense", **options)
    assert max(errors.values()) <= TOLERANCE[dtype], errors


def test_more_keys_than_queries() -> None:
    errors = relative_errors(torch.float32, 100, 150, 32, "dense")
    assert max(errors.values()) <= TOLERANCE[torch.float32], errors


@pytest.mark.parametrize("width", [16, 80, 96, 128, 256])
def test_widths(width: int) -> None:
    errors = relative_errors(torch.bfloat16, 64, 64, width, "dense")
    assert max(errors.values()) <= TOLERANCE[torch.bfloat16], errors


@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
def test_more_heads_than_a_grid_is_high(hard: bool) -> None:
    """65,535 programs fit along the second axis of a grid, any number along the first."""
    x = torch.randn(1100, 64, 3, 16, device="cuda").to(torch.bfloat16).requires_grad_()
    out = espformer.esp_attention(x, x, x, hard=hard, inverse_temperature=1.0)
    out.sum().backward()
    last = x[-1:].detach().requires_grad_()
    alone = espformer.esp_attention(last, last, last, hard=hard, inverse_temperature=1.0)
    alone.sum().backward()
    torch.testing.assert_close(out[-1:], alone)
    assert x.grad is not None
    torch.testing.assert_close(x.grad[-1:], last.grad)


def test_long_sequences() -> None:
    errors = relative_errors(torch.bfloat16, 20_000, 20_000, 16, "linear")
    assert max(errors.values()) <= TOLERANCE[torch.bfloat16], errors


def test_half_precision_ranks_like_a_stable_sort() -> None:
    from espformer.ops.triton.ranking import rank_halves

    x = torch.randn(3, 1000, 5, device="cuda").to(torch.bfloat16)
    values, order = rank_halves(x, None, 0.5)
    expected, index = x.float().mT.sort(dim=-1, stable=True)
    torch.testing.assert_close(values, expected * 0.5, rtol=0, atol=0)
    assert torch.equal(order.long(), index)
