"""Numbers in units of their spread, by kernels, against the formula in torch."""

import pytest
import torch

import espformer

pytest.importorskip("numba")

from espformer.ops.esp.cpu.units import in_spreads
from espformer.ops.esp.problem import with_spread
from tests.compare import some

NUMBERS = {
    "normal": lambda x: x,
    "far": lambda x: x + 1000,
    "huge": lambda x: 1e30 * x,
    "tiny": lambda x: 1e-25 * x,
    "equal": lambda x: torch.full_like(x, 3.7),
    "zero": torch.zeros_like,
    "equal but for rounding": lambda x: 3.7 * (1 + torch.finfo(x.dtype).eps * x.round()),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("n", [1, 2, 37])
def test_as_in_torch(kind, n, dtype, masked):
    points = NUMBERS[kind](torch.randn(2, 3, n, dtype=dtype)).requires_grad_()
    mask = some(2, n) if masked else None
    if masked:
        mask[1] = False  # a sequence without tokens
    valid = torch.ones(2, 1, n, dtype=torch.bool) if mask is None else mask.unsqueeze(1)
    upstream = torch.where(valid, torch.randn(2, 3, n, dtype=dtype), 0)  # padding gets none
    found, want = (
        in_spreads(points, mask)[0],
        torch.divide(*with_spread(points, valid if masked else None)),
    )
    pairs = [
        (found, want),
        *zip(*(torch.autograd.grad(x, points, upstream) for x in (found, want)), strict=True),
    ]
    off = 1e-5 if dtype == torch.float32 else 1e-12
    if kind == "far":
        off *= 1000  # the digits that a distance from the mean loses
    for x, y in pairs:
        x, y = (torch.where(valid, z.detach(), 0) for z in (x, y))
        torch.testing.assert_close(x, y, rtol=off, atol=off * float(y.abs().max()))


def test_padding_is_no_part_of_the_spread():
    points, mask = torch.randn(1, 2, 9), torch.arange(9).unsqueeze(0) < 5
    other = torch.where(mask.unsqueeze(1), points, 1e6)
    assert torch.equal(in_spreads(points, mask)[0][..., :5], in_spreads(other, mask)[0][..., :5])


def test_slices_of_keys_far_from_zero():
    """Their mean has too few digits for distances from it."""
    torch.manual_seed(4)
    query, value = torch.randn(2, 1, 1, 64, 4).unbind()
    key, slices = 1e3 + torch.randn(1, 1, 64, 4), torch.randn(3, 4)
    found = []
    for backend, dtype in (("cpu", torch.float32), ("dense", torch.float64)):
        theta = slices.to(dtype).requires_grad_()
        tokens = (x.to(dtype) for x in (query, key, value))
        out = espformer.esp_attention(*tokens, slices=theta, backend=backend)
        found += torch.autograd.grad(out, theta, value.sin().to(dtype))
    error = (found[0].double() - found[1]).norm() / found[1].norm()
    assert error < 2e-3  # 9e-3 if distances are measured from the mean
