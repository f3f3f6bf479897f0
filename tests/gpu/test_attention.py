"""The fused kernels on a GPU: 16-bit inputs, real sizes, every supported width."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import espformer

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
launches = pytest.importorskip("espformer.ops.common.triton")

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}


@pytest.fixture(autouse=True)
def _fresh_shapes() -> Iterator[None]:
    """Tests change which kernels are chosen, which is worked out once for every shape."""
    launches.forget()
    yield
    launches.forget()


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
        name: float(((a.double() - b).norm() / b.norm()).detach())
        for name, a, b in zip(("out", "query", "key", "value"), *results, strict=True)
    }


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16],
    ids=["float32", "bfloat16", "float16"],
)
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


@pytest.mark.parametrize("metric", ["absolute", "squared"])
@pytest.mark.parametrize("width", [0.1, 1e-2, 1e-3])
def test_the_gradient_of_the_temperature(width: float, metric: str) -> None:
    """Several chunks, whose forces on each other cancel in it where the sort is sharp."""
    t = width if metric == "absolute" else width**2
    query, key, value, upstream = torch.randn(4, 2, 2, 256, 64, device="cuda").bfloat16()
    found = []
    for backend, dtype in (("triton", torch.bfloat16), ("dense", torch.float64)):
        temperature = torch.full((2,), t, device="cuda", dtype=torch.float64).requires_grad_()
        tokens = (x.to(dtype) for x in (query, key, value))
        out = espformer.esp_attention(
            *tokens, sort_temperature=temperature, temperature_unit="absolute", metric=metric,
            backend=backend,
        )  # fmt: skip
        found.append(torch.autograd.grad(out, temperature, upstream.to(dtype))[0])
    torch.testing.assert_close(*found, rtol=0, atol=0.05 * float(found[1].abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_more_keys_than_queries(dtype: torch.dtype) -> None:
    errors = relative_errors(dtype, 100, 150, 32, "dense")
    assert max(errors.values()) <= TOLERANCE[dtype], errors


@pytest.mark.parametrize(
    ("dtype", "metric"),
    [
        pytest.param(torch.float32, "absolute", id="float32"),
        pytest.param(torch.bfloat16, "absolute", id="bfloat16"),
        pytest.param(torch.float16, "squared", id="float16-squared"),
    ],
)
@pytest.mark.parametrize("width", [16, 80, 96, 128, 256])
def test_widths(width: int, dtype: torch.dtype, metric: str) -> None:
    """Full chunks and one that is not, so with states, and one block of columns or several."""
    errors = relative_errors(dtype, 150, 150, width, "dense", metric=metric)
    assert max(errors.values()) <= TOLERANCE[dtype], errors


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"inverse_temperature": 0.0}, id="mean"),
        pytest.param({"inverse_temperature": 1.0}, id="costs"),
        pytest.param({"inverse_temperature": 1.0, "balance": "both"}, id="both"),
        pytest.param({"sort_temperature": 1e-3}, id="sharp"),
    ],
)
@pytest.mark.parametrize(
    ("queries", "keys", "width"),
    [(197, 197, 8), (17, 17, 8), (65, 65, 12), (100, 150, 4), (150, 100, 16)],
)
def test_narrow_rows(
    monkeypatch: pytest.MonkeyPatch, queries: int, keys: int, width: int, options: dict[str, Any]
) -> None:
    """Those of 4, 8 and 16 columns in registers, which are meant for more slices than these."""
    monkeypatch.setattr("espformer.ops.esp.triton.short_plan.LEAST_PAIRS", 1)
    errors = relative_errors(torch.bfloat16, queries, keys, width, "dense", **options)
    assert max(errors.values()) <= TOLERANCE[torch.bfloat16], errors


@pytest.mark.parametrize("t", [0.3, 1e-3])
@pytest.mark.parametrize(("tokens", "width"), [(197, 8), (64, 16), (100, 4), (256, 16)])
def test_short_narrow_rows(
    monkeypatch: pytest.MonkeyPatch, tokens: int, width: int, t: float
) -> None:
    """Sequences and columns in registers, meant for more slices than a test has."""
    kernels = pytest.importorskip("espformer.ops.esp.triton.short_plan").ShortPlanKernels
    apply, launched = kernels._apply, []

    def counted(*args: Any) -> None:
        launched.append(args)
        apply(*args)

    monkeypatch.setattr(kernels, "_apply", counted)
    monkeypatch.setattr("espformer.ops.esp.triton.short_plan.LEAST_PAIRS", 1)
    monkeypatch.setattr("espformer.ops.esp.triton.short_columns.LEAST_PAIRS", 1)
    for dtype in (torch.bfloat16, torch.float16):
        errors = relative_errors(dtype, tokens, tokens, width, "dense", sort_temperature=t)
        assert max(errors.values()) <= TOLERANCE[dtype], errors
    assert len(launched) == 6  # rows, and the gradients of either side


@pytest.mark.parametrize("metric", ["absolute", "squared"])
@pytest.mark.parametrize("tokens", [1, 16, 63, 64, 65, 81, 96, 129, 180])
def test_ends_of_chunks(tokens: int, metric: str) -> None:
    """One chunk or several, and a last one of every size."""
    errors = relative_errors(torch.bfloat16, tokens, tokens, 64, "dense", metric=metric)
    if tokens == 1:  # one token's plan does not move: no gradient to compare
        errors = {name: errors[name] for name in ("out", "value")}
    assert max(errors.values()) <= TOLERANCE[torch.bfloat16], errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
def test_padding_changes_nothing(dtype: torch.dtype, hard: bool) -> None:
    """A padded batch gives what every sequence gives alone; one head's mask is a strided view."""
    lengths = torch.tensor([100, 61], device="cuda")
    mask = torch.arange(100, device="cuda") < lengths[:, None]
    x = torch.randn(3, 2, 3, 100, 64, device="cuda").to(dtype)
    padded = espformer.esp_attention(*x, mask=mask, hard=hard)
    for i, length in enumerate(lengths.tolist()):
        alone = espformer.esp_attention(*x[:, i : i + 1, :, :length], hard=hard)
        error = (padded[i : i + 1, :, :length] - alone).norm() / alone.norm()
        assert error <= TOLERANCE[dtype], float(error)
    one = espformer.esp_attention(*x[:, 1:], mask=mask[1:], hard=hard)
    torch.testing.assert_close(one, padded[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
def test_captured_as_a_graph(hard: bool, dtype: torch.dtype) -> None:
    """Forward and backward in a CUDA graph: replays follow new inputs."""
    leaves = [torch.randn(1, 4, 100, 64, device="cuda").to(dtype) for _ in range(3)]
    leaves = [x.requires_grad_() for x in leaves]
    upstream = torch.randn_like(leaves[0])

    def step() -> tuple[torch.Tensor, ...]:
        out = espformer.esp_attention(*leaves, hard=hard, inverse_temperature=0.1)
        return (out, *torch.autograd.grad(out, leaves, upstream))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in leaves:
            x.copy_(torch.randn_like(x))
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert (a - b).float().norm() <= 1e-2 * b.float().norm()


def test_deterministic_algorithms_repeat_exactly() -> None:
    leaves = [torch.randn(2, 4, 300, 64, device="cuda").bfloat16() for _ in range(3)]
    leaves = [x.requires_grad_() for x in leaves]
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            out = espformer.esp_attention(*leaves)
            runs.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


def test_tokens_split_off_a_wide_matrix() -> None:
    """Strided views, as (batch, tokens, heads, width) transposed, give the same as copies."""
    views = [torch.randn(2, 50, 3, 64, device="cuda").bfloat16().transpose(1, 2) for _ in range(3)]
    copies = [x.contiguous() for x in views]
    torch.testing.assert_close(espformer.esp_attention(*views), espformer.esp_attention(*copies))


@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
def test_more_heads_than_a_grid_is_high(hard: bool) -> None:
    """65,535 programs fit along the second axis of a grid, any number along the first.

    Many heads use other soft kernels than few, so their results are equal up to rounding.
    """
    bounds = {} if hard else {"rtol": 2e-2, "atol": 2e-3}
    x = torch.randn(1100, 64, 3, 16, device="cuda").to(torch.bfloat16).requires_grad_()
    out = espformer.esp_attention(x, x, x, hard=hard, inverse_temperature=1.0)
    out.sum().backward()
    last = x[-1:].detach().requires_grad_()
    alone = espformer.esp_attention(last, last, last, hard=hard, inverse_temperature=1.0)
    alone.sum().backward()
    torch.testing.assert_close(out[-1:], alone, **bounds)
    assert x.grad is not None
    torch.testing.assert_close(x.grad[-1:], last.grad, **bounds)


@pytest.mark.parametrize("metric", ["absolute", "squared"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_long_sequences(metric: str, dtype: torch.dtype) -> None:
    """Errors of single steps of a scan add up."""
    options = {"metric": metric, "sort_temperature": 0.1}
    errors = relative_errors(dtype, 20_000, 20_000, 16, "linear", **options)
    assert max(errors.values()) <= TOLERANCE[dtype], errors


@pytest.mark.parametrize("metric", ["absolute", "squared"])
def test_balanced_long_sequences(metric: str) -> None:
    """Scales are scanned block by block, by several warps."""
    options = {"metric": metric, "balance": "both", "sort_temperature": 0.3}
    errors = relative_errors(torch.float32, 2500, 2500, 16, "linear", **options)
    assert max(errors.values()) <= TOLERANCE[torch.float32], errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [197, 1000, 70_000])
def test_ranks_are_those_of_a_stable_sort(tokens: int, dtype: torch.dtype) -> None:
    """Words of 32 bits and of 64; more tokens than 16 bits can number."""
    from espformer.ops.esp.triton.sort import rank_points

    x = torch.randn(3, tokens, 5, device="cuda").to(dtype)
    points, order = rank_points(x, None, None, None, 0.5)
    expected, index = x.float().mT.sort(dim=-1, stable=True)
    torch.testing.assert_close(points, expected * 0.5, rtol=0, atol=0)
    assert torch.equal(order.long(), index)


@pytest.mark.parametrize("heads", [300, 3])
@pytest.mark.parametrize("tokens", [17, 32, 197, 1000])
def test_tied_points_stay_tied_in_units_of_the_spread(tokens: int, heads: int) -> None:
    """Lanes that hold tied points divide them by the same bits."""
    from espformer.ops.esp.triton.sort import sort_points

    for dtype in (torch.bfloat16, torch.float32):
        x = (torch.randn(heads, tokens, 16, device="cuda") * 4).round().to(dtype) / 4
        points, order, _ = sort_points(x, None, None, None, None, 1.0, True)
        numbers = x.float().mT.gather(-1, order.long())
        assert torch.equal(points.diff(dim=-1) == 0, numbers.diff(dim=-1) == 0)


@pytest.mark.parametrize("heads", [6, 600])
@pytest.mark.parametrize("tokens", [197, 1000, 5000])
def test_projected_points_are_sorted(tokens: int, heads: int) -> None:
    """Points are those of the order that was found, in float32, and ascend."""
    from espformer.ops.esp.triton.sort import sort_points

    x = torch.randn(heads, tokens, 64, device="cuda").to(torch.bfloat16)
    slices = torch.nn.functional.normalize(torch.randn(heads, 8, 64, device="cuda"), dim=-1)
    points, order, spread = sort_points(x, None, slices, None, None, 0.125, True)
    exact = (slices.double() @ x.double().mT * 0.125).gather(-1, order.long())
    assert bool((points.diff(dim=-1) >= 0).all())
    exact_spread = exact.std(-1, correction=0)
    torch.testing.assert_close(spread.double(), exact_spread, rtol=1e-5, atol=0)
    expected = exact / exact_spread.unsqueeze(-1)
    torch.testing.assert_close(points.double(), expected, rtol=1e-5, atol=1e-5)
