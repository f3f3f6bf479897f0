"""Single instructions and what stands for them."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from espformer.ops.esp.triton.instructions import exact_cosine, rotation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def cosines(X, Y, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + i, exact_cosine(tl.load(X + i)))


def test_cosine_of_large_angles() -> None:
    near = torch.linspace(-20, 20, 4096)
    x = torch.cat([near, torch.linspace(-1000, 1000, 4096)]).to(DEVICE)
    y = torch.empty_like(x)
    cosines[(8,)](x, y, BLOCK=1024)
    torch.testing.assert_close(y.double(), x.double().cos(), rtol=0, atol=1.5e-7)


@triton.jit
def rotations(X, RE, IM, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    i = tl.arange(0, BLOCK)
    re, im = rotation(tl.load(X + i), EXACT)
    tl.store(RE + i, re)
    tl.store(IM + i, im)


@pytest.mark.parametrize("exact", [True, False])
def test_rotations(exact: bool) -> None:
    x = torch.cat([torch.logspace(-9, 2, 512), torch.linspace(-9, 9, 512)]).to(DEVICE)
    re, im = torch.empty_like(x), torch.empty_like(x)
    rotations[(1,)](x, re, im, BLOCK=1024, EXACT=exact)
    expected = torch.exp(-1j * x.double())
    atol = 1.5e-7 if exact else 5e-5  # far from zero, the fast ones are worse than close to it
    torch.testing.assert_close(
        torch.complex(re, im).to(expected.dtype), expected, rtol=0, atol=atol
    )
    if exact:
        small = x.abs() < 0.1
        torch.testing.assert_close(im.double()[small], -x.double()[small].sin(), rtol=2e-7, atol=0)
