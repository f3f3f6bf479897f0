"""Geometry of point clouds: sampling, neighbours and gathering, for whole batches.

A cloud may have fewer points than requested, because it is small or padded. Then all its points are
returned, and a mask marks the valid entries.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from espformer.ops.common.operators import is_exporting
from espformer.ops.farthest_points.torch import sample_farthest

__all__ = ["farthest_points", "gather", "nearest_points"]


@torch.no_grad()
def farthest_points(
    points: Tensor, samples: int, mask: Tensor | None = None, *, random_start: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Farthest point sampling: each point is the farthest from those chosen before it.

    The first is the farthest from the centre of its cloud, so the sample does not depend on the
    order of the points. The first points of a sample are themselves a smaller sample, both of the
    cloud and of the sampled points.

    Args:
        points: ``(batch, points, 3)``.
        samples: number of points to choose; all points if there are fewer.
        mask: boolean ``(batch, points)``, True = takes part.
        random_start: choose the first one at random instead.

    Returns:
        Indices ``(batch, samples)``, without repetition, and which of them take part,
        boolean ``(batch, samples)``, or None if all do.

    Example:
        >>> points = torch.tensor([[[0.0, 0, 0], [1, 0, 0], [1.1, 0, 0], [3, 0, 0]]])
        >>> farthest_points(points, 3)
        (tensor([[3, 0, 2]]), None)

    References:
        Eldar, Lindenbaum, Porat, Zeevi, The farthest point strategy for progressive image sampling,
        IEEE Transactions on Image Processing 1997.
    """
    batch, count, _ = points.shape
    samples = min(samples, count)
    present = points.new_ones(batch, count, dtype=torch.bool) if mask is None else mask
    points = points.masked_fill(~present.unsqueeze(-1), 0)
    number = present.sum(-1)
    if random_start:
        # multinomial needs a positive weight, also for a cloud without points.
        weights = torch.where(number.unsqueeze(-1) > 0, present, True).to(torch.float32)
        current = torch.multinomial(weights, 1)
    else:
        middle = points.sum(1, keepdim=True) / number.clamp(min=1).view(-1, 1, 1)
        away = _distance(middle, points).squeeze(1).masked_fill(~present, -1)
        current = away.argmax(-1, keepdim=True)

    indices = _sampler(points)(points, current.squeeze(1), present, samples)
    if mask is None:
        return indices, None
    return indices, torch.arange(samples, device=points.device) < number.unsqueeze(-1)


@torch.no_grad()
def nearest_points(
    centres: Tensor, points: Tensor, neighbours: int, mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The nearest neighbours of each centre, nearest first.

    Args:
        centres: ``(batch, centres, 3)``.
        points: ``(batch, points, 3)``.
        neighbours: number of neighbours; all points if there are fewer.
        mask: boolean ``(batch, points)``, True = takes part.

    Returns:
        Indices ``(batch, centres, neighbours)``, and which of them take part, boolean of the same
        shape, or None if all do.

    Example:
        >>> points = torch.tensor([[[0.0, 0, 0], [1, 0, 0], [3, 0, 0]]])
        >>> nearest_points(points, points, 2)[0]
        tensor([[[0, 1],
                 [1, 0],
                 [2, 1]]])
    """
    distance = _distance(centres, points)
    if mask is not None:
        distance = distance.masked_fill(~mask.unsqueeze(1), torch.inf)
    nearest = distance.topk(min(neighbours, points.shape[1]), largest=False)
    return nearest.indices, None if mask is None else nearest.values.isfinite()


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """Rows of each cloud, ``(batch, ..., width)``.

    Args:
        x: ``(batch, points, width)``.
        indices: ``(batch, ...)``.

    Example:
        >>> gather(torch.tensor([[[1.0], [2.0], [3.0]]]), torch.tensor([[[2, 0]]]))
        tensor([[[[3.],
                  [1.]]]])
    """
    flat = indices.flatten(1).unsqueeze(-1).expand(-1, -1, x.shape[-1])
    return x.gather(1, flat).view(*indices.shape, x.shape[-1])


def _sampler(points: Tensor) -> Callable[[Tensor, Tensor, Tensor, int], Tensor]:
    """The loop in torch, or on a GPU one kernel, which chooses the same points up to rounding."""
    if points.device.type != "cuda" or is_exporting():
        return sample_farthest
    try:
        from espformer.ops.farthest_points import triton as kernels
    except ImportError:
        return sample_farthest
    return kernels.sample_farthest if kernels.supported(points) else sample_farthest


def _distance(centres: Tensor, points: Tensor) -> Tensor:
    """``(batch, centres, points)``, of ``(batch, centres, 3)`` and ``(batch, points, 3)``."""
    # Not by a matrix product, whose rounding depends on the batch and could swap neighbours.
    return torch.cdist(centres, points, compute_mode="donot_use_mm_for_euclid_dist")
