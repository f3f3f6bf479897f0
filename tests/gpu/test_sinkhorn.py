"""Streaming Sinkhorn attention on a GPU: 16-bit inputs, real sizes, every supported width."""

from typing import Any

import pytest
import torch
from torch import Tensor

from espformer.functional import sinkhorn_attention
from espformer.nn import Sinkhorn

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
DTYPES = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in TOLERANCE]


def tokens(queries: int, keys: int, width: int, dtype: torch.dtype, heads: int = 2) -> list[Tensor]:
    shapes = ((queries, width), (keys, width), (keys, width), (queries, width))
    return [torch.randn(2, heads, *shape, device="cuda").to(dtype) for shape in shapes]


def relative_errors(tensors: list[Tensor], **options: Any) -> dict[str, float]:
    """Errors of values and gradients against the same rounded inputs in float64."""
    results = []
    for backend, precision in (("triton", tensors[0].dtype), ("torch", torch.float64)):
        leaves = [x.to(precision).requires_grad_() for x in tensors[:3]]
        out = sinkhorn_attention(*leaves, backend=backend, **options)
        results.append([out, *torch.autograd.grad(out, leaves, tensors[3].to(precision))])
    return {
        name: float(((a.double() - b).norm() / b.norm()).detach())
        for name, a, b in zip(("out", "query", "key", "value"), *results, strict=True)
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("iterations", [1, 2, 3, 21])
def test_against_float64(dtype: torch.dtype, iterations: int) -> None:
    errors = relative_errors(tokens(197, 197, 64, dtype), iterations=iterations)
    assert max(errors.values()) <= TOLERANCE[dtype], errors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 32, 80, 96, 128, 256])
def test_widths(dtype: torch.dtype, width: int) -> None:
    errors = relative_errors(tokens(150, 100, width, dtype), iterations=4)
    assert max(errors.values()) <= TOLERANCE[dtype], errors


@pytest.mark.parametrize("iterations", [3, 4])
def test_padding(iterations: int) -> None:
    tensors = tokens(130, 257, 64, torch.bfloat16)
    masks = {
        "query_mask": torch.arange(130, device="cuda") < torch.tensor([[130], [77]], device="cuda"),
        "key_mask": torch.arange(257, device="cuda") < torch.tensor([[1], [200]], device="cuda"),
    }
    errors = relative_errors(tensors, iterations=iterations, **masks)
    assert max(errors.values()) <= TOLERANCE[torch.bfloat16], errors


def test_small_epsilon_takes_the_other_kernel() -> None:
    tensors = tokens(197, 197, 64, torch.float32)
    errors = relative_errors(tensors, iterations=5, epsilon=1e-2)
    assert max(errors.values()) <= 1e-3, errors  # potentials in the hundreds lose digits


def test_long_sequences() -> None:
    tensors = tokens(4099, 4099, 64, torch.bfloat16, heads=1)
    errors = relative_errors(tensors, iterations=3)
    assert max(errors.values()) <= TOLERANCE[torch.bfloat16], errors


def test_memory_is_linear() -> None:
    """131,072 tokens: their matrix alone would take 34 GB in bfloat16."""
    leaves = [
        torch.randn(1, 1, 131_072, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = sinkhorn_attention(*leaves, iterations=3)
    out.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 400e6
    assert all(x.grad is not None and x.grad.isfinite().all() for x in leaves)


def test_the_same_numbers_every_time() -> None:
    tensors = tokens(500, 300, 64, torch.bfloat16)
    runs = []
    for _ in range(2):
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        out = sinkhorn_attention(*leaves, iterations=5)
        runs.append([out, *torch.autograd.grad(out, leaves, tensors[3])])
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


def test_compiled_and_captured() -> None:
    layer = torch.compile(Sinkhorn(iterations=3), fullgraph=True)
    query, key, value, upstream = tokens(128, 128, 64, torch.bfloat16)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    expected = torch.autograd.grad(
        sinkhorn_attention(*leaves, iterations=3, backend="triton"), leaves, upstream
    )
    found = torch.autograd.grad(layer(*leaves), leaves, upstream)
    for a, b in zip(found, expected, strict=True):
        # The compiler fuses roundings of bfloat16 away: close, not equal.
        assert (a - b).float().norm() <= 1e-2 * b.float().norm()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sinkhorn_attention(*leaves, iterations=3, backend="triton")
        captured = torch.autograd.grad(out, leaves, upstream)
    graph.replay()
    for a, b in zip(captured, expected, strict=True):
        assert torch.equal(a, b)
