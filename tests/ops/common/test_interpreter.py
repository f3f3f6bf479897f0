"""Triton's interpreter as `tests/interpreter.py` makes it: what is fast is still right."""

from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def then(a, b, c, d):
    """The map ``x -> a x + b``, and then ``x -> c x + d``: associative, and not commutative."""
    return a * c, b * c + d


@triton.jit
def scan_kernel(
    a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)
    a, b = tl.load(a_ptr + at).to(tl.float32), tl.load(b_ptr + at)
    _, b = tl.associative_scan((a, b), AXIS, then, reverse=REVERSE)
    tl.store(out_ptr + at, b)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", [(1, 1), (2, 8), (16, 4)], ids=str)
def test_scans(shape: tuple[int, int], axis: int, reverse: bool) -> None:
    a, b = torch.randn(2, *shape, device=DEVICE).unbind()
    a = a.half()
    found = torch.empty_like(b)
    scan_kernel[(1,)](a, b, found, *shape, axis, reverse)
    # As a loop in float64: every row begins with its own b.
    expected = b.double().movedim(axis, 0).clone()
    rows = list(range(shape[axis]))[:: -1 if reverse else 1]
    for before, here in pairwise(rows):
        expected[here] += a.double().movedim(axis, 0)[here] * expected[before]
    torch.testing.assert_close(found.double(), expected.movedim(0, axis), rtol=1e-5, atol=1e-5)


@triton.jit
def types_kernel(x_ptr, half_ptr, order_ptr, mask_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    order = tl.load(order_ptr + n)
    far = tl.load(x_ptr + order.to(tl.int64), mask=tl.load(mask_ptr + n) != 0, other=0.5)
    row = far + tl.load(half_ptr + n)
    tl.store(out_ptr + n[:, None] * N + n, row[:, None] * tl.where(n[None, :] < 2, 1.0, order))


def test_types_of_the_same_shape_are_told_apart() -> None:
    x = torch.randn(4, device=DEVICE)
    half, order = torch.randn(4, device=DEVICE).half(), torch.tensor([2, 0, 3, 1], device=DEVICE)
    mask = torch.tensor([True, False, True, True], device=DEVICE)
    found = torch.empty(4, 4, device=DEVICE)
    types_kernel[(1,)](x, half, order.int(), mask, found, 4)
    row = torch.where(mask, x[order], 0.5) + half
    column = torch.where(torch.arange(4, device=DEVICE) < 2, 1.0, order)
    torch.testing.assert_close(found, row[:, None] * column)
