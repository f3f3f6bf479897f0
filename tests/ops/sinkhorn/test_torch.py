"""Sinkhorn attention against matrix scaling written out, POT, and each sequence alone."""

import math

import numpy as np
import ot
import pytest
import torch
from torch import Tensor

from espformer.ops.sinkhorn.torch import sinkhorn_matrix, sinkhorn_normalize, sinkhorn_output

SCALE = 8**-0.5


def scaled_by_hand(scores: np.ndarray, iterations: int) -> np.ndarray:
    """N · P of appendix B for one sequence: u and v scale exp(C) in turn, u first."""
    rows, columns = scores.shape
    kernel = np.exp(scores)
    u, v = np.ones(rows), np.ones(columns)
    for step in range(iterations):
        if step % 2 == 0:
            u = (1 / rows) / (kernel @ v)
        else:
            v = (1 / columns) / (kernel.T @ u)
    return rows * u[:, None] * kernel * v[None, :]


def tokens(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize(("rows", "columns"), [(7, 7), (5, 9), (9, 5), (1, 4), (4, 1), (1, 1)])
@pytest.mark.parametrize("iterations", [1, 2, 3, 4, 15, 21])
def test_is_matrix_scaling(rows, columns, iterations):
    scores = 2 * tokens(3, rows, columns)
    got = sinkhorn_normalize(scores, iterations=iterations)
    expected = np.stack([scaled_by_hand(s, iterations) for s in scores.numpy()])
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("iterations", [0, 1])
def test_no_and_one_iteration_are_softmax(iterations):
    q, k = tokens(2, 3, 5, 8), tokens(2, 3, 6, 8, seed=1)
    got = sinkhorn_matrix(q, k, iterations=iterations, epsilon=0.5, scale=SCALE)
    torch.testing.assert_close(got, (q @ k.mT * SCALE / 0.5).softmax(-1))


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (5, 9)])
@pytest.mark.parametrize("epsilon", [1.0, 0.3])
def test_limit_is_entropic_transport_of_pot(rows, columns, epsilon):
    q, k = tokens(rows, 8), tokens(columns, 8, seed=1)
    got = sinkhorn_matrix(q, k, iterations=2000, epsilon=epsilon, scale=SCALE)
    plan = ot.sinkhorn(
        np.full(rows, 1 / rows),
        np.full(columns, 1 / columns),
        -(q @ k.T * SCALE).numpy(),
        reg=epsilon,
        method="sinkhorn_log",
        numItermax=20000,
        stopThr=1e-13,
    )
    np.testing.assert_allclose(got.numpy() / rows, plan, atol=1e-9)
    np.testing.assert_allclose(got.sum(-1).numpy(), 1, atol=1e-8)
    np.testing.assert_allclose(got.sum(-2).numpy(), rows / columns, atol=1e-8)


@pytest.mark.parametrize("iterations", [3, 4])
def test_the_last_update_is_exact(iterations):
    q, k = tokens(2, 3, 5, 8), tokens(2, 3, 9, 8, seed=1)
    got = sinkhorn_matrix(q, k, iterations=iterations, epsilon=0.3, scale=SCALE)
    row_error = (got.sum(-1) - 1).abs().max()
    column_error = (got.sum(-2) - 5 / 9).abs().max()
    exact, other = (row_error, column_error) if iterations % 2 else (column_error, row_error)
    assert exact < 1e-14
    assert other > 1e-4


@pytest.mark.parametrize("iterations", [1, 2, 3, 4])
@pytest.mark.parametrize("padding_value", [0.0, 1e4, math.nan, math.inf])
def test_padded_batch_is_each_sequence_alone(iterations, padding_value):
    lengths = [(6, 9), (4, 2), (1, 1), (6, 3)]
    q, k, v = tokens(4, 2, 6, 8), tokens(4, 2, 9, 8, seed=1), tokens(4, 2, 9, 5, seed=2)
    query_mask = torch.arange(6) < torch.tensor([n for n, _ in lengths])[:, None, None]
    key_mask = torch.arange(9) < torch.tensor([m for _, m in lengths])[:, None, None]
    for x, mask in ((q, query_mask), (k, key_mask), (v, key_mask)):
        x.masked_fill_(~mask[..., None], padding_value)
        x.requires_grad_()
    options = {"iterations": iterations, "epsilon": 0.5, "scale": SCALE}
    masks = {"query_mask": query_mask, "key_mask": key_mask}
    matrix = sinkhorn_matrix(q, k, **options, **masks)
    output = sinkhorn_output(q, k, v, **options, **masks)
    output.square().sum().backward()
    for b, (n, m) in enumerate(lengths):
        alone = [x.detach()[b, :, :size].requires_grad_() for x, size in ((q, n), (k, m), (v, m))]
        expected = sinkhorn_output(*alone, **options)
        torch.testing.assert_close(output[b, :, :n], expected)
        torch.testing.assert_close(matrix[b, :, :n, :m], sinkhorn_matrix(*alone[:2], **options))
        assert (matrix[b, :, n:] == 0).all()
        assert (matrix[b, :, :, m:] == 0).all()
        assert (output[b, :, n:] == 0).all()
        expected.square().sum().backward()
        for x, one, size in ((q, alone[0], n), (k, alone[1], m), (v, alone[2], m)):
            torch.testing.assert_close(x.grad[b, :, :size], one.grad)
            assert (x.grad[b, :, size:] == 0).all()


@pytest.mark.parametrize("iterations", [1, 2, 3, 4])
@pytest.mark.parametrize("side", ["both", "keys", "queries"])
def test_sequences_without_tokens_give_zeros(iterations, side):
    q, k = tokens(2, 1, 5, 8).requires_grad_(), tokens(2, 1, 5, 8, seed=1).requires_grad_()
    present = torch.tensor([True, False])[:, None, None].expand(2, 1, 5)
    masks = {}
    if side != "keys":
        masks["query_mask"] = present
    if side != "queries":
        masks["key_mask"] = present
    out = sinkhorn_output(q, k, k, iterations=iterations, epsilon=0.1, scale=SCALE, **masks)
    assert (out[1] == 0).all()
    alone = sinkhorn_output(q[:1], k[:1], k[:1], iterations=iterations, epsilon=0.1, scale=SCALE)
    torch.testing.assert_close(out[:1], alone)
    grads, wanted = (torch.autograd.grad(y.square().sum(), (q, k)) for y in (out, alone))
    for found, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(found, want)  # of the second sequence zero


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("iterations", [3, 20, 21])
def test_small_epsilon_is_that_of_float64(dtype, iterations):
    q, k, v = (10 * tokens(2, 2, 16, 8, seed=s, dtype=torch.float32).to(dtype) for s in range(3))
    for x in (q, k, v):
        x.requires_grad_()
    out = sinkhorn_output(q, k, v, iterations=iterations, epsilon=1e-3, scale=SCALE)
    assert out.dtype == dtype
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = sinkhorn_output(*wide, iterations=iterations, epsilon=1e-3, scale=SCALE)
    wanted = torch.autograd.grad(exact.square().sum(), wide)
    # The matrix is all but a permutation, so slopes of the scores cancel: what counts is the size
    # that they would have without.
    largest = [float(x.detach().abs().max()) for x in (exact, wide[1], wide[0], wanted[2])]
    slope = SCALE / 1e-3 * largest[0] ** 2
    sizes = largest[0], slope * largest[1], slope * largest[2], largest[3]
    for found, want, size in zip((out, *grads), (exact, *wanted), sizes, strict=True):
        assert float((found.double() - want).detach().abs().max()) < 5e-3 * size


def test_small_epsilon_is_right_in_float32():
    q, k = tokens(2, 16, 8), tokens(2, 16, 8, seed=1)
    options = {"iterations": 5, "epsilon": 1e-2, "scale": SCALE}
    got = sinkhorn_matrix(q.float(), k.float(), **options)
    torch.testing.assert_close(got, sinkhorn_matrix(q, k, **options).float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_gradients(iterations):
    q, k, v = (tokens(1, 2, n, 3, seed=n).requires_grad_() for n in (4, 5, 5))
    query_mask = torch.tensor([True, True, False, True]).view(1, 1, 4)
    key_mask = torch.tensor([True, False, True, True, True]).view(1, 1, 5)

    def output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        masks = {"query_mask": query_mask, "key_mask": key_mask}
        return sinkhorn_output(q, k, v, iterations=iterations, epsilon=0.4, scale=0.6, **masks)

    assert torch.autograd.gradcheck(output, (q, k, v))


def test_nan_stays_in_its_head():
    q, k = tokens(2, 3, 5, 8), tokens(2, 3, 5, 8, seed=1)
    clean = sinkhorn_matrix(q, k, iterations=4, epsilon=1.0, scale=SCALE)
    q[1, 2, 0, 0] = math.nan
    got = sinkhorn_matrix(q, k, iterations=4, epsilon=1.0, scale=SCALE)
    assert got[1, 2].isnan().all()
    got[1, 2] = clean[1, 2]
    assert torch.equal(got, clean)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_computed_in_float32(dtype):
    q, k = (tokens(2, 2, 9, 8, seed=s).to(dtype) for s in range(2))
    options = {"iterations": 3, "epsilon": 0.1, "scale": SCALE}
    got = sinkhorn_matrix(q, k, **options)
    assert got.dtype == torch.float32
    assert torch.equal(got, sinkhorn_matrix(q.float(), k.float(), **options))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(got, sinkhorn_matrix(q.float(), k.float(), **options))
        assert sinkhorn_output(q, k, k, **options).dtype == dtype
