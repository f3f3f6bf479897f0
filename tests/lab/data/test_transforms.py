"""Augmentation: equal to the plain formula, and random only as far as the seed allows."""

import math
from random import Random

import pytest
import torch
import torch.nn.functional as F

from espformer.lab.data.transforms import (
    Normalise,
    PointCloudAugment,
    RandomResizedCrop,
    RotateScale,
    crop_and_resize,
)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("size", [(32, 32), (31, 45)], ids=["square", "odd"])
def test_crop_is_the_box_resized(size):
    images = torch.rand(6, 3, *size, dtype=torch.float64)
    boxes = RandomResizedCrop().boxes(images, seeded(0))
    mirrored = torch.tensor([True, False] * 3)
    result = crop_and_resize(images, boxes, size, mirrored)
    for image, box, mirror, got in zip(images, boxes.long(), mirrored, result, strict=True):
        top, left, height, width = box.tolist()
        part = image[None, :, top : top + height, left : left + width]
        expected = F.interpolate(part, size, mode="bilinear", align_corners=False)[0]
        expected = expected.flip(-1) if mirror else expected
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def test_whole_image_is_left_as_it_is():
    images = torch.rand(2, 3, 16, 16)
    boxes = torch.tensor([[0.0, 0.0, 16.0, 16.0]]).expand(2, 4)
    torch.testing.assert_close(crop_and_resize(images, boxes, (16, 16)), images)


def one_box(random, height, width):
    """A box drawn as torchvision's documentation describes it, one attempt after the other."""
    for _ in range(10):
        area = height * width * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            top = random.randint(0, height - box_height)
            return top, random.randint(0, width - box_width), box_height, box_width
    return 0, 0, height, width


@pytest.mark.parametrize(("height", "width"), [(224, 224), (100, 120)])
def test_boxes_are_distributed_as_one_by_one(height, width):
    images = torch.empty(20_000, 1, 1, 1).expand(20_000, 1, height, width)
    boxes = RandomResizedCrop().boxes(images, seeded(0))
    top, left, box_height, box_width = boxes.T
    assert torch.minimum(top, left).min() >= 0
    assert (top + box_height).max() <= height
    assert (left + box_width).max() <= width
    random = Random(0)
    expected = torch.tensor([one_box(random, height, width) for _ in range(20_000)]).float()
    levels = torch.linspace(0.05, 0.95, 10)
    for ours, theirs in zip(boxes.T, expected.T, strict=True):
        difference = ours.quantile(levels) - theirs.quantile(levels)
        assert difference.abs().max() <= 0.02 * width
    ours, theirs = (b[:, 2] * b[:, 3] for b in (boxes, expected))
    assert ours.mean().item() == pytest.approx(theirs.mean().item(), rel=0.02)


def test_spare_box_is_central():
    """Nothing of area 2 fits: the largest part of a permitted shape, in the middle."""
    crop = RandomResizedCrop(area=(2.0, 2.0))
    boxes = crop.boxes(torch.rand(1, 1, 30, 90), seeded(0))
    assert boxes.tolist() == [[0.0, 25.0, 30.0, 40.0]]


def test_crops_are_determined_by_the_seed():
    images = torch.randint(256, (4, 3, 24, 24), dtype=torch.uint8)
    crop = RandomResizedCrop()
    first = crop(images, seeded(1))
    assert torch.equal(first, crop(images, seeded(1)))
    assert not torch.equal(first, crop(images, seeded(2)))
    torch.manual_seed(1)
    unnamed = crop(images)
    torch.manual_seed(1)
    assert torch.equal(unnamed, crop(images))
    assert first.dtype == torch.float32
    assert first.min() >= 0
    assert first.max() <= 1


def test_half_of_the_crops_are_mirrored():
    images = torch.arange(32.0).expand(2000, 1, 32, 32) / 32
    result = RandomResizedCrop()(images, seeded(0))
    mirrored = result[:, 0, 0, 0] > result[:, 0, 0, -1]
    assert mirrored.float().mean().item() == pytest.approx(0.5, abs=0.04)


def test_normalise():
    images = torch.randint(256, (2, 3, 5, 5), dtype=torch.uint8)
    module = Normalise([0.1, 0.2, 0.3], [0.5, 1.0, 2.0])
    expected = (images.float() / 255 - module.mean) / module.std
    torch.testing.assert_close(module(images), expected)
    torch.testing.assert_close(module(images.float() / 255), expected)
    assert module.state_dict() == {}


def test_point_clouds_are_scaled_shifted_and_thinned():
    clouds = torch.randn(50, 200, 3)
    result = PointCloudAugment()(clouds, seeded(0))
    # Every point is a scaled and shifted point of the cloud: fit both, for each axis.
    for before, after in zip(clouds, result, strict=True):
        distinct = after.unique(dim=0)
        assert len(distinct) <= 200
        for axis in range(3):
            assert after[:, axis].max() <= before[:, axis].max() * 1.5 + 0.2 + 1e-5
    kept = torch.tensor([len(cloud.unique(dim=0)) / 200 for cloud in result])
    assert kept.mean().item() == pytest.approx(1 - 0.875 / 2, abs=0.08)
    assert kept.min() > 0.05


def test_point_clouds_without_chance_keep_their_points():
    clouds = torch.randn(3, 64, 3)
    same = PointCloudAugment(scale=(1.0, 1.0), shift=0.0, dropout=0.0)(clouds, seeded(0))
    assert not torch.equal(same, clouds)  # shuffled
    assert torch.equal(same.sort(1).values, clouds.sort(1).values)


def test_rotation_about_z_keeps_norms():
    clouds = torch.randn(20, 64, 3)
    turned = RotateScale(scale=(1.0, 1.0))(clouds, seeded(0))
    torch.testing.assert_close(turned.norm(dim=-1), clouds.norm(dim=-1))
    torch.testing.assert_close(turned[..., 2], clouds[..., 2])
    angle = torch.atan2(turned[:, 0, 1], turned[:, 0, 0]) - torch.atan2(
        clouds[:, 0, 1], clouds[:, 0, 0]
    )
    angle = (angle + torch.pi) % (2 * torch.pi) - torch.pi
    assert angle.abs().max() <= 0.1 * torch.pi + 1e-5
    assert angle.abs().max() > 0.05 * torch.pi


@pytest.mark.parametrize("module", [PointCloudAugment(), RotateScale()])
def test_point_clouds_are_determined_by_the_seed(module):
    clouds = torch.randn(4, 32, 3)
    assert torch.equal(module(clouds, seeded(3)), module(clouds, seeded(3)))
    assert not torch.equal(module(clouds, seeded(3)), module(clouds, seeded(4)))
