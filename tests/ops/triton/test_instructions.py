"""Single instructions and what stands for them."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from espformer.ops.triton.instructions import exact_cosine

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
