"""Transforms of a batch of images or point clouds on the device, before the network sees it.

Random draws come from the generator that the call is given (on the generator's device), or else
from torch's own generator of the device of the inputs: either way a seed determines them.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _as_float(images: Tensor, scale: float = 255.0) -> Tensor:
    return images if images.is_floating_point() else images.float() / scale


def _uniform(
    shape: Sequence[int], low: float, high: float, like: Tensor, generator: torch.Generator | None
) -> Tensor:
    device = like.device if generator is None else generator.device
    draw = torch.rand(shape, generator=generator, device=device) * (high - low) + low
    return draw.to(like.device)


class Normalise(nn.Module):
    """``(x / scale - mean) / std`` for each channel; floats are taken as divided already.

    Example:
        >>> images = torch.full((1, 1, 2, 2), 255, dtype=torch.uint8)
        >>> Normalise([0.5], [0.25])(images).flatten()
        tensor([2., 2., 2., 2.])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float], scale: float = 255.0) -> None:
        super().__init__()
        self.scale = scale
        # Not saved with a model: the data set knows them.
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, C, H, W), uint8 or floats in [0, 1] → floats of the same shape."""
        return (_as_float(images, self.scale) - self.mean) / self.std


class RandomResizedCrop(nn.Module):
    """A random part of each image, stretched to the whole size again, and mirrored half the time.

    Area and aspect ratio are drawn as torchvision's ``RandomResizedCrop`` draws them (ten attempts,
    then the largest central crop), a box for each image of the batch. The box is resized
    bilinearly, which never shrinks it, so no smoothing is needed.

    Example:
        >>> images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
        >>> crop = RandomResizedCrop()
        >>> first = crop(images, torch.Generator().manual_seed(0))
        >>> bool((first == crop(images, torch.Generator().manual_seed(0))).all())
        True
    """

    def __init__(
        self,
        area: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        mirror: float = 0.5,
    ) -> None:
        super().__init__()
        self.area, self.ratio, self.mirror = area, ratio, mirror

    def forward(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """(batch, C, H, W), uint8 or floats in [0, 1] → floats in [0, 1] of the same shape."""
        height, width = images.shape[-2:]
        boxes = self.boxes(images, generator)
        mirrored = _uniform((len(images),), 0, 1, images, generator) < self.mirror
        return crop_and_resize(_as_float(images), boxes, (height, width), mirrored)

    def boxes(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """(batch, 4): top, left, height and width of the part of each image, in pixels."""
        batch, (height, width) = len(images), images.shape[-2:]
        area = height * width * _uniform((batch, 10), *self.area, images, generator)
        shortest, longest = self.ratio
        ratio = _uniform((batch, 10), math.log(shortest), math.log(longest), images, generator)
        widths = (area * ratio.exp()).sqrt().round()
        heights = (area / ratio.exp()).sqrt().round()
        fits = (widths >= 1) & (widths <= width) & (heights >= 1) & (heights <= height)

        first = fits.int().argmax(1, keepdim=True)
        some = fits.any(1)
        # Where none of the ten fits: the largest part of a permitted shape, from the middle.
        spare_width = round(min(width, height * longest))
        spare_height = round(min(height, width / shortest))
        box_width = torch.where(some, widths.gather(1, first)[:, 0], spare_width)
        box_height = torch.where(some, heights.gather(1, first)[:, 0], spare_height)
        room = torch.stack([height - box_height, width - box_width])
        corner = _uniform((2, batch), 0, 1, images, generator)
        corner = torch.where(some, (corner * (room + 1)).floor().minimum(room), (room / 2).floor())
        top, left = corner
        return torch.stack([top, left, box_height, box_width], 1)


def crop_and_resize(
    images: Tensor, boxes: Tensor, size: tuple[int, int], mirrored: Tensor | None = None
) -> Tensor:
    """Each box of each image, resized bilinearly as ``F.interpolate`` does the cut-out box.

    Args:
        images: ``(batch, C, H, W)``, floats.
        boxes: ``(batch, 4)``, top, left, height, width in pixels.
        size: height and width of the result.
        mirrored: ``(batch,)``, True where left and right change places.
    """
    top, left, box_height, box_width = boxes.to(images.dtype).unbind(1)

    def positions(start: Tensor, extent: Tensor, pixels: int, whole: int) -> Tensor:
        centres = torch.arange(pixels, device=images.device, dtype=images.dtype) + 0.5
        inside = centres * (extent / pixels)[:, None] - 0.5
        # Clamped to the box, or its edge would blend with what was cut away.
        inside = inside.clamp(min=0).minimum(extent[:, None] - 1)
        return (2 * (start[:, None] + inside) + 1) / whole - 1

    y = positions(top, box_height, size[0], images.shape[-2])
    x = positions(left, box_width, size[1], images.shape[-1])
    if mirrored is not None:
        x = torch.where(mirrored[:, None], x.flip(1), x)
    grid = torch.stack(torch.broadcast_tensors(x[:, None, :], y[:, :, None]), -1)
    return F.grid_sample(images, grid, mode="bilinear", align_corners=False)


class PointCloudAugment(nn.Module):
    """The changes that Point Cloud Transformers are trained with.

    For each cloud: a share of the points, up to ``dropout``, is put on the first point; each axis
    is scaled and shifted; the points are shuffled (Guo et al. 2021).

    Example:
        >>> clouds = torch.rand(2, 128, 3)
        >>> PointCloudAugment()(clouds, torch.Generator().manual_seed(0)).shape
        torch.Size([2, 128, 3])
    """

    def __init__(
        self,
        scale: tuple[float, float] = (2 / 3, 3 / 2),
        shift: float = 0.2,
        dropout: float = 0.875,
    ) -> None:
        super().__init__()
        self.scale, self.shift, self.dropout = scale, shift, dropout

    def forward(self, clouds: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """(batch, points, 3) → the same shape."""
        batch, points, axes = clouds.shape
        share = _uniform((batch, 1), 0, self.dropout, clouds, generator)
        dropped = _uniform((batch, points), 0, 1, clouds, generator) < share
        clouds = torch.where(dropped[..., None], clouds[:, :1], clouds)
        scale = _uniform((batch, 1, axes), *self.scale, clouds, generator)
        shift = _uniform((batch, 1, axes), -self.shift, self.shift, clouds, generator)
        clouds = clouds * scale + shift
        order = _uniform((batch, points), 0, 1, clouds, generator).argsort(1)
        return clouds.gather(1, order[..., None].expand_as(clouds))


class RotateScale(nn.Module):
    """The changes that Set Transformers are trained with: a small turn about z, then a scale.

    The angle is uniform within ±``angle``, the scale of each axis uniform in ``scale``
    (Lee et al. 2019, and Sander et al. 2022 after them).

    Example:
        >>> RotateScale()(torch.rand(2, 128, 3)).shape
        torch.Size([2, 128, 3])
    """

    def __init__(
        self, angle: float = 0.1 * math.pi, scale: tuple[float, float] = (0.8, 1.25)
    ) -> None:
        super().__init__()
        self.angle, self.scale = angle, scale

    def forward(self, clouds: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """(batch, points, 3) → the same shape."""
        angle = _uniform((len(clouds), 1), -self.angle, self.angle, clouds, generator)
        x, y, z = clouds.unbind(-1)
        cos, sin = angle.cos(), angle.sin()
        turned = torch.stack([cos * x - sin * y, sin * x + cos * y, z], -1)
        return turned * _uniform((len(clouds), 1, 3), *self.scale, clouds, generator)
