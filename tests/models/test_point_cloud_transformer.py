"""PCT: sampling and neighbours against brute force, its layers written out, published sizes."""

import pytest
import torch
import torch.nn.functional as F

from espformer.models import PointCloudTransformer, build_model
from espformer.models.point_cloud_transformer import NeighbourEmbedding, PointAttention, PointLayer
from espformer.models.points import farthest_points, gather, nearest_points
from espformer.nn import ESP, Softmax
from tests.models.cases import count_parameters


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def brute_force_farthest(points, samples, first):
    chosen = [first]
    while len(chosen) < min(samples, len(points)):
        rest = [i for i in range(len(points)) if i not in chosen]
        chosen.append(
            max(rest, key=lambda i: min(float((points[i] - points[j]).norm()) for j in chosen))
        )
    return chosen


@pytest.mark.parametrize("samples", [1, 6, 11, 20])
def test_farthest_points_against_brute_force(samples):
    points = draw(3, 11, 3)
    lengths = torch.tensor([11, 7, 4])
    mask = torch.arange(11) < lengths[:, None]
    garbage = points.masked_fill(~mask.unsqueeze(-1), torch.nan)
    indices, kept = farthest_points(garbage, samples, mask)
    assert indices.shape == kept.shape == (3, min(samples, 11))
    for cloud, n, row, row_mask in zip(points, lengths.tolist(), indices, kept, strict=True):
        cloud = cloud[:n]
        first = int((cloud - cloud.mean(0)).norm(dim=-1).argmax())
        expected = brute_force_farthest(cloud, samples, first)
        assert row[row_mask].tolist() == expected
        alone, _ = farthest_points(cloud[None], samples)
        assert alone[0].tolist() == expected


def test_the_beginning_of_a_sample_is_a_sample():
    """Of the cloud, and of the points sampled from it: so sampling again needs no work."""
    points = draw(3, 40, 3)
    chosen, _ = farthest_points(points, 12)
    assert torch.equal(farthest_points(points, 7)[0], chosen[:, :7])
    for cloud in gather(points, chosen):
        assert brute_force_farthest(cloud, 7, first=0) == list(range(7))


def test_farthest_points_takes_none_twice():
    points = torch.zeros(2, 6, 3)
    points[:, 4:] = 1.0  # four points at one place and two at another
    indices, kept = farthest_points(points, 6)
    assert kept is None
    assert indices.sort(1).values.tolist() == [[0, 1, 2, 3, 4, 5]] * 2


def test_random_start():
    torch.manual_seed(0)
    points, mask = draw(200, 9, 3), torch.arange(9).expand(200, -1) >= 4
    first = farthest_points(points, 2, mask, random_start=True)[0][:, 0]
    assert set(first.tolist()) == {4, 5, 6, 7, 8}
    farthest_points(points, 2, torch.zeros_like(mask), random_start=True)  # no point at all

    cloud = draw(1, 30, 3)
    model = PointCloudTransformer(dim=16, depth=1, samples=(6, 3), neighbours=2, random_start=True)
    assert torch.equal(model.eval()(cloud), model(cloud))
    chosen = {tuple(farthest_points(cloud, 3, random_start=True)[0][0].tolist()) for _ in range(20)}
    assert len(chosen) > 1


def test_nearest_points_against_brute_force():
    points, centres = draw(2, 9, 3), draw(2, 4, 3, seed=1)
    mask = torch.arange(9) < torch.tensor([[9], [3]])
    for neighbours in (1, 5, 12):
        indices, kept = nearest_points(centres, points, neighbours, mask)
        assert indices.shape == (2, 4, min(neighbours, 9))
        for b, n in enumerate((9, 3)):
            for c in range(4):
                order = (points[b, :n] - centres[b, c]).norm(dim=-1).argsort()
                got = indices[b, c][kept[b, c]]
                assert got.tolist() == order[:neighbours].tolist()


def test_gather():
    x, indices = draw(2, 5, 3), torch.tensor([[[4, 0], [1, 1]], [[2, 3], [0, 4]]])
    out = gather(x, indices)
    assert out.shape == (2, 2, 2, 3)
    assert torch.equal(out[1, 0, 1], x[1, 3])


def test_point_layer_normalises_over_the_points():
    layer, x = PointLayer(3, 8), draw(2, 5, 3)
    mask = torch.arange(5) < torch.tensor([[5], [2]])
    rows = layer.linear(x[mask])
    rows = (rows - rows.mean(0)) / (rows.var(0, unbiased=False) + layer.norm.eps).sqrt()
    out = layer(x.masked_fill(~mask.unsqueeze(-1), torch.nan), mask)
    torch.testing.assert_close(out[mask], F.relu(rows), rtol=1e-4, atol=1e-5)
    assert (out[~mask] == 0).all()


@pytest.mark.parametrize("sampled", [False, True])
def test_neighbour_embedding_against_a_loop(sampled):
    embed = NeighbourEmbedding(4, 6, samples=5, neighbours=3, sampled=sampled).eval()
    points, features = draw(2, 9, 3), draw(2, 9, 4, seed=1)
    centres, out, mask = embed(points, features)
    assert mask is None
    for b in range(2):
        chosen = torch.arange(5) if sampled else farthest_points(points[b : b + 1], 5)[0][0]
        for s, index in enumerate(chosen.tolist()):
            assert torch.equal(centres[b, s], points[b, index])
            near = (points[b] - points[b, index]).norm(dim=-1).argsort()[:3]
            own = features[b, index].expand(3, -1)
            group = torch.cat([features[b, near] - own, own], dim=-1)
            expected = embed.layer2(embed.layer1(group)).amax(0)
            torch.testing.assert_close(out[b, s], expected)


@pytest.mark.parametrize("offset", [True, False])
@pytest.mark.parametrize("tie", [True, False])
def test_layer_written_out(offset, tie):
    layer = PointAttention(16, Softmax(), offset=offset, tie_query_key=tie).eval()
    x = draw(2, 7, 16)
    query = layer.query(x)
    key = query if tie else layer.key(x)
    assert query.shape[-1] == 4
    matrix = (query @ key.transpose(1, 2) / 4**0.5).softmax(-1)
    attended = matrix @ layer.value(x)
    expected = x + layer.layer(x - attended if offset else attended)
    torch.testing.assert_close(layer(x), expected)


def test_tied_projections_make_hard_attention_the_identity():
    points = draw(2, 12, 3)
    for tie in (True, False):
        model = PointCloudTransformer(
            mechanism=ESP(hard=True), dim=16, samples=None, tie_query_key=tie
        )
        matrix = model.attention_matrices(points)[0]
        identity = torch.eye(12).expand_as(matrix)
        assert torch.allclose(matrix, identity) is tie


@pytest.mark.parametrize(
    ("name", "published", "exactly"),
    [
        ("point_cloud_transformer", 2.88, 2_876_136),
        ("simple_point_cloud_transformer", 1.36, 1_360_552),
        ("naive_point_cloud_transformer", 1.36, 1_360_552),
    ],
)
def test_published_sizes(name, published, exactly):
    with torch.device("meta"):
        tied = count_parameters(build_model(name, tie_query_key=True))
        model = build_model(name)
    assert tied == exactly
    assert round(tied / 1e6, 2) == published
    dim = model.layers[0].value.in_features
    assert count_parameters(model) == tied + 4 * dim * (dim // 4)


def test_clouds_smaller_than_the_samples():
    model = PointCloudTransformer(dim=16, depth=1).eval()  # 512 and 256 samples, 32 neighbours
    small = draw(2, 5, 3)
    padded = F.pad(small, (0, 0, 0, 4))
    mask = torch.arange(9).expand(2, -1) < 5
    torch.testing.assert_close(model(padded, mask), model(small), rtol=1e-4, atol=1e-5)


def test_normals_are_features_and_not_coordinates():
    model = PointCloudTransformer(channels=6, dim=16, depth=1, samples=(6, 3), neighbours=2).eval()
    assert model(draw(2, 20, 6)).shape == (2, 40)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool": "mean"}, '"max" or "max_mean"'),
        ({"channels": 2}, "x, y and z"),
        ({"dim": 18}, "multiple of 4"),
    ],
)
def test_mistakes_in_the_sizes(options, message):
    with pytest.raises(ValueError, match=message):
        PointCloudTransformer(**{"samples": None, **options})


def test_points_of_another_width():
    with pytest.raises(ValueError, match=r"\(batch, points, 3\), got \(2, 9, 4\)"):
        PointCloudTransformer(dim=16)(torch.randn(2, 9, 4))
