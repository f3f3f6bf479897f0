"""Single instructions and what stands for them."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from espformer.ops.esp.triton.primitives import accurate_cosine, rotation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def cosines(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, accurate_cosine(tl.load(x_ptr + i)))


def test_cosine_of_large_angles() -> None:
    near = torch.linspace(-20, 20, 4096)
    x = torch.cat([near, torch.linspace(-1000, 1000, 4096)]).to(DEVICE)
    y = torch.empty_like(x)
    cosines[(8,)](x, y, BLOCK=1024)
    torch.testing.assert_close(y.double(), x.double().cos(), rtol=0, atol=1.5e-7)


@triton.jit
def rotations(x_ptr, re_ptr, im_ptr, BLOCK: tl.constexpr, ACCURATE: tl.constexpr):
    i = tl.arange(0, BLOCK)
    re, im = rotation(tl.load(x_ptr + i), ACCURATE)
    tl.store(re_ptr + i, re)
    tl.store(im_ptr + i, im)


@pytest.mark.parametrize("accurate", [True, False])
def test_rotations(accurate: bool) -> None:
    x = torch.cat([torch.logspace(-9, 2, 512), torch.linspace(-9, 9, 512)]).to(DEVICE)
    re, im = torch.empty_like(x), torch.empty_like(x)
    rotations[(1,)](x, re, im, BLOCK=1024, ACCURATE=accurate)
    expected = torch.exp(-1j * x.double())
    atol = 1.5e-7 if accurate else 5e-5  # far from zero, the fast ones are worse than close to it
    torch.testing.assert_close(
        torch.complex(re, im).to(expected.dtype), expected, rtol=0, atol=atol
    )
    if accurate:
        small = x.abs() < 0.1
        torch.testing.assert_close(im.double()[small], -x.double()[small].sin(), rtol=2e-7, atol=0)
