"""The kernel of farthest point sampling chooses what the loop in torch chooses."""

import pytest
import torch

from espformer.models.points import farthest_points
from espformer.ops.farthest_points.torch import sample_farthest

pytest.importorskip("triton")

from espformer.ops.farthest_points import triton as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(batch, count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(count)
    points = torch.randn(batch, count, 3, generator=generator, dtype=dtype)
    present = torch.rand(batch, count, generator=generator) < 0.8
    present[:, 0] = True
    first = torch.zeros(batch, dtype=torch.long)
    return [x.to(DEVICE) for x in (points, first, present)]


@pytest.mark.parametrize("count", [1, 2, 37, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_points_as_the_loop(count, dtype):
    points, first, present = draw(3, count, dtype)
    for samples in {1, (count + 1) // 2, count}:
        found = kernels.sample_farthest(points, first, present, samples)
        expected = sample_farthest(points, first, present, samples)
        assert torch.equal(found, expected)


def test_equal_points_are_taken_once_each_and_an_empty_batch_is_allowed():
    points = torch.zeros(2, 6, 3, device=DEVICE)
    points[:, 4:] = 1.0
    first, present = torch.zeros(2, dtype=torch.long, device=DEVICE), points[..., 0] >= 0
    found = kernels.sample_farthest(points, first, present, 6)
    assert found.sort(1).values.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert kernels.sample_farthest(points[:0], first[:0], present[:0], 6).shape == (0, 6)


def test_fake_rule():
    points, first, present = draw(2, 5)
    torch.library.opcheck(torch.ops.espformer.sample_farthest.default, (points, first, present, 3))


def test_one_graph_serves_all_sizes_of_a_batch():
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    sample = torch.compile(
        lambda *x: kernels.sample_farthest(*x, 3) + 1, backend=keep, dynamic=True
    )
    for batch in (4, 6, 7):
        given = draw(batch, 9)
        assert torch.equal(sample(*given), kernels.sample_farthest(*given, 3) + 1)
    assert len(graphs) == 1


def test_what_the_kernel_does_not_take_goes_through_the_loop():
    points = torch.zeros(2, 8, 3, device="meta")
    assert kernels.supported(points)
    assert not kernels.supported(points.half())
    assert not kernels.supported(points[..., :2])
    assert not kernels.supported(points.new_empty(1, kernels.MOST_POINTS + 1, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1024, 5000, 16_384])
def test_farthest_points_uses_the_kernel_on_a_gpu(count, monkeypatch):
    points, _, present = draw(32, count)
    expected, _ = farthest_points(points.cpu(), 256, present.cpu())
    monkeypatch.setattr("espformer.models.points.sample_farthest", None)  # not to be called
    found, _ = farthest_points(points, 256, present)
    # Distances that differ by their rounding alone may be taken in another order.
    assert (found.cpu() == expected).double().mean() > 0.99
