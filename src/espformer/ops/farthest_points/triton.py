"""Farthest point sampling in one launch.

The torch twin is :func:`espformer.ops.farthest_points.torch.sample_farthest`, a loop whose every
step launches half a dozen kernels. Here one program samples one cloud, whose points and distances
stay in registers (up to about 8,192 points; of larger clouds some are spilled to memory). The
kernel compares squared distances, so points that are equally far up to rounding may be chosen in
another order than by the loop.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from espformer.ops.common.operators import operator
from espformer.ops.common.triton import Launch, once, power_of_2

__all__ = ["sample_farthest", "supported"]

MOST_POINTS = 16_384  # of a cloud: 32 a thread, four numbers each
POINTS_A_WARP = 256


@triton.jit
def farthest_points_kernel(
    points_ptr,  # (batch, N, 3)
    first_ptr,  # (batch,)
    present_ptr,  # (batch, N)
    indices_ptr,  # (batch, SAMPLES), the result
    N,
    SAMPLES,
    BLOCK: tl.constexpr,
):
    """Samples cloud ``program_id(0)``, from its point `first` on."""
    cloud = tl.program_id(0).to(tl.int64)
    points_ptr += cloud * N * 3
    index = tl.arange(0, BLOCK)
    inside = index < N
    x = tl.load(points_ptr + 3 * index, mask=inside, other=0.0)
    y = tl.load(points_ptr + 3 * index + 1, mask=inside, other=0.0)
    z = tl.load(points_ptr + 3 * index + 2, mask=inside, other=0.0)
    present = tl.load(present_ptr + cloud * N + index, mask=inside, other=0) != 0
    # Squared distances: candidates have one >= 0, points already taken -1, padding -2.
    distance = tl.where(present, float("inf"), tl.where(inside, -2.0, -3.0)).to(x.dtype)
    current = tl.load(first_ptr + cloud).to(tl.int32)
    for step in range(SAMPLES):
        tl.store(indices_ptr + cloud * SAMPLES + step, current.to(tl.int64))
        dx = x - tl.load(points_ptr + 3 * current)
        dy = y - tl.load(points_ptr + 3 * current + 1)
        dz = z - tl.load(points_ptr + 3 * current + 2)
        distance = tl.minimum(distance, dx * dx + dy * dy + dz * dz)
        distance = tl.where(index == current, -1.0, distance)
        current = tl.argmax(distance, 0)


def supported(points: Tensor) -> bool:
    """Whether the kernel takes clouds of this shape and dtype."""
    _, count, coordinates = points.shape
    precise = points.dtype in (torch.float32, torch.float64)
    return coordinates == 3 and count <= MOST_POINTS and precise


@once
def _launch(batch: int, count: int, samples: int) -> Launch:
    block = power_of_2(count)
    warps = min(16, max(1, block // POINTS_A_WARP))
    return Launch(
        farthest_points_kernel, (batch,), N=count, SAMPLES=samples, BLOCK=block, num_warps=warps
    )


@operator("sample_farthest")
def sample_farthest(points: Tensor, first: Tensor, present: Tensor, samples: int) -> Tensor:
    """See the twin in torch; `points` must be :func:`supported`."""
    batch, count, _ = points.shape
    indices = torch.empty(batch, samples, dtype=torch.long, device=points.device)
    if indices.numel():
        _launch(batch, count, samples)(points, first, present, indices)
    return indices


@sample_farthest.register_fake
def _(points: Tensor, first: Tensor, present: Tensor, samples: int) -> Tensor:
    return points.new_empty(points.shape[0], samples, dtype=torch.long)
