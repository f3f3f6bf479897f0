"""Streaming Sinkhorn attention against its torch twin in float64: values and every gradient."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from espformer.functional import sinkhorn_attention
from espformer.nn import Sinkhorn
from espformer.ops.sinkhorn import triton as sinkhorn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = DEVICE == "cpu"


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU small tiles make several from few tokens, and 16 bits means float16."""
    if INTERPRETED:
        small = (sinkhorn.Tile(16, 16, 4, 1),) * 3
        for table in (sinkhorn.HALVES, sinkhorn.SINGLES):
            for kernel in table:
                monkeypatch.setitem(table, kernel, small)
        monkeypatch.setattr(sinkhorn, "SPLIT_DTYPE", torch.float16)


def tokens(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def some(*shape: int) -> Tensor:
    mask = torch.rand(*shape, device=DEVICE) < 0.7
    mask[..., 0] |= ~mask.any(-1)
    return mask


def gradients(inputs: list[Tensor], upstream: Tensor, backend: str, **options: Any) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = sinkhorn_attention(*leaves, backend=backend, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out))]


def compare(
    inputs: list[Tensor], tolerance: float = 2e-5, upstream: Tensor | None = None, **options: Any
) -> None:
    shape = (*inputs[0].shape[:-1], inputs[2].shape[-1])
    upstream = tokens(*shape, dtype=inputs[2].dtype) if upstream is None else upstream
    got = gradients(inputs, upstream, "triton", **options)
    want = gradients([x.double() for x in inputs], upstream, "torch", **options)
    assert got[0].dtype == inputs[2].dtype
    for name, a, b in zip(("out", "query", "key", "value"), got, want, strict=True):
        error = float((a.double() - b).norm() / b.norm().clamp(min=1e-6))
        assert error <= tolerance, f"{name}: relative error {error:.1e}"


SHAPES = [
    pytest.param(20, 20, 5, 7, False, id="N20-D5-W7"),
    pytest.param(5, 37, 16, 3, True, id="N5-M37-D16-W3-padded"),
    pytest.param(37, 5, 3, 20, True, id="N37-M5-D3-W20-padded"),
    pytest.param(1, 1, 2, 2, False, id="N1"),
]


@pytest.mark.parametrize("iterations", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize(("queries", "keys", "width", "value_width", "padded"), SHAPES)
def test_is_the_torch_twin(
    iterations: int, queries: int, keys: int, width: int, value_width: int, padded: bool
) -> None:
    inputs = [
        tokens(2, 1, queries, width),
        tokens(2, 1, keys, width),
        tokens(2, 1, keys, value_width),
    ]
    masks = {"query_mask": some(2, queries), "key_mask": some(2, keys)} if padded else {}
    compare(inputs, iterations=iterations, epsilon=0.5, **masks)


@pytest.mark.parametrize("iterations", [1, 2, 3, 6])
def test_potentials_that_change_much(iterations: int) -> None:
    """At a small ε the factors of early updates overflow: the updates are added one by one."""
    inputs = [tokens(1, 2, 20, 8), tokens(1, 2, 33, 8), tokens(1, 2, 33, 8)]
    changes = []
    original = sinkhorn.Sides.factors

    def spy(*args: Any) -> Tensor:
        found = original(*args)
        changes.append(float(args[-1].max()))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sinkhorn.Sides, "factors", spy)
        compare(inputs, tolerance=5e-4, iterations=iterations, epsilon=5e-3)
    assert iterations < 3 or max(changes) > sinkhorn.MOST_CHANGE.value


def test_many_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinkhorn, "HIGHEST_RANK", 8)  # as if these were too many to factor
    compare([tokens(1, 1, 20, 4) for _ in range(3)], iterations=4, epsilon=0.3)


@pytest.mark.parametrize("iterations", [1, 3, 4])
def test_sixteen_bits(iterations: int) -> None:
    inputs = [tokens(1, 2, 20, 16, dtype=torch.float16) for _ in range(3)]
    compare(inputs, tolerance=1e-3, iterations=iterations)


@pytest.mark.parametrize("iterations", [2, 3])
@pytest.mark.parametrize("padding_value", [1e4, math.nan])
def test_padding_holds_anything(iterations: int, padding_value: float) -> None:
    inputs = [tokens(2, 1, 12, 4), tokens(2, 1, 19, 4), tokens(2, 1, 19, 4)]
    masks = {"query_mask": some(2, 12), "key_mask": some(2, 19)}
    upstream = tokens(2, 1, 12, 4)
    options = {"iterations": iterations, **masks}
    want = gradients(inputs, upstream, "triton", **options)
    query, key, value = (x.clone() for x in inputs)
    query.masked_fill_(~masks["query_mask"][:, None, :, None], padding_value)
    for x in (key, value):
        x.masked_fill_(~masks["key_mask"][:, None, :, None], padding_value)
    got = gradients([query, key, value], upstream, "triton", **options)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("iterations", [1, 2, 3])
@pytest.mark.parametrize("side", ["both", "keys", "queries"])
def test_sequences_without_tokens_give_zeros(iterations: int, side: str) -> None:
    present = torch.tensor([True, False], device=DEVICE)[:, None].expand(2, 9)
    everyone = torch.ones_like(present)
    masks = {
        "query_mask": everyone if side == "keys" else present,
        "key_mask": everyone if side == "queries" else present,
    }
    inputs = [tokens(2, 1, 9, 4) for _ in range(3)]
    upstream = tokens(2, 1, 9, 4)
    for x in gradients(inputs, upstream, "triton", iterations=iterations, **masks):
        assert (x[1] == 0).all()
        assert x.isfinite().all()
    first = [x[:1] for x in inputs]
    compare(first, iterations=iterations, upstream=upstream[:1])


def test_nan_stays_in_its_head() -> None:
    query, key, value = (tokens(1, 2, 9, 4) for _ in range(3))
    clean = sinkhorn_attention(query, key, value, iterations=3, backend="triton")
    query[0, 1, 4, 2] = math.nan
    got = sinkhorn_attention(query, key, value, iterations=3, backend="triton")
    assert got[0, 1].isnan().all()
    assert torch.equal(got[0, 0], clean[0, 0])


def test_strided_and_broadcast_inputs() -> None:
    packed = tokens(2, 9, 3, 2, 4)  # (batch, tokens, 3, heads, width), as a layer makes them
    query, key, value = packed.permute(2, 0, 3, 1, 4)
    compare([query, key, value[:, :1].expand(2, 2, 9, 4)], iterations=3)


def test_registered_operators() -> None:
    query, key, value = (tokens(2, 5, 4).requires_grad_() for _ in range(3))
    mask = some(2, 5)
    for masks in ((None, None), (mask, mask)):
        torch.library.opcheck(sinkhorn.sinkhorn_forward.custom, (query, key, value, *masks, 0.5, 3))
    found = sinkhorn.sinkhorn_forward.custom(query, key, value, None, None, 0.5, 2)
    arguments = [x.detach() for x in (torch.ones_like(found[0]), query, key, value, *found)]
    torch.library.opcheck(
        sinkhorn.sinkhorn_backward.custom, (*arguments, 0.5, 2),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


def test_compiles_without_graph_breaks() -> None:
    layer = Sinkhorn(iterations=3, backend="triton")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    leaves = [tokens(1, 2, 9, 4).requires_grad_() for _ in range(3)]
    expected = layer(*leaves)
    got = compiled(*leaves)
    torch.testing.assert_close(got, expected)
    for a, b in zip(
        torch.autograd.grad(got.square().sum(), leaves),
        torch.autograd.grad(expected.square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_second_derivatives_are_refused() -> None:
    leaves = [tokens(1, 1, 4, 4).requires_grad_() for _ in range(3)]
    out = sinkhorn_attention(*leaves, backend="triton")
    (first,) = torch.autograd.grad(out.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match=r'pass backend="torch"'):
        first.sum().backward()


def test_autocast_leaves_it_alone() -> None:
    inputs = [tokens(1, 1, 9, 4) for _ in range(3)]
    expected = sinkhorn_attention(*inputs, backend="triton")
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert torch.equal(sinkhorn_attention(*inputs, backend="triton"), expected)


def test_what_the_kernels_do_not_do_is_done_by_torch() -> None:
    inputs = [tokens(1, 1, 5, 4).double() for _ in range(3)]
    expected = sinkhorn_attention(*inputs, backend="torch")
    assert torch.equal(sinkhorn_attention(*inputs, backend="triton"), expected)


def test_backends_are_checked() -> None:
    with pytest.raises(ValueError, match="backend must be one of 'auto', 'torch', 'triton'"):
        sinkhorn_attention(*(tokens(1, 1, 5, 4) for _ in range(3)), backend="dense")
    with pytest.raises(ValueError, match="Sinkhorn: backend must be one of"):
        Sinkhorn(backend="dense")


def test_transforms_and_forward_mode_are_not_for_kernels() -> None:
    query, key, value = torch.randn(3, 1, 1, 5, 2, device=DEVICE).unbind()

    def total(x: Tensor, backend: str) -> Tensor:
        return sinkhorn_attention(x, key, value, backend=backend).sum()

    found = torch.func.grad(total)(query, "auto")
    leaf = query.clone().requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(total(leaf, "torch"), leaf)[0])
    with pytest.raises(ValueError, match=r"torch\.func cannot transform"):
        torch.func.grad(total)(query, "triton")
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        total(torch.autograd.forward_ad.make_dual(query, query), "triton")


def test_double_precision_is_left_to_torch() -> None:
    query, key, value = torch.randn(3, 1, 1, 5, 2, device=DEVICE, dtype=torch.float64).unbind()
    found = sinkhorn_attention(query, key, value, backend="triton")
    assert torch.equal(found, sinkhorn_attention(query, key, value, backend="torch"))
