"""Slicers: unit directions, what is drawn, trained and saved."""

import pytest
import torch

from espformer.nn import AxisSlicer, FrozenSlicer, LearnableSlicer, make_slicer


def test_axes_are_none_without_state():
    slicer = AxisSlicer()
    assert slicer() is None
    assert not slicer.state_dict()


@pytest.mark.parametrize("kind", [FrozenSlicer, LearnableSlicer])
@pytest.mark.parametrize(("heads", "shape"), [(None, (5, 8)), (3, (3, 5, 8))])
def test_directions_are_unit_rows(kind, heads, shape):
    directions = kind(5, 8, heads=heads)()
    assert directions.shape == shape
    torch.testing.assert_close(directions.norm(dim=-1), torch.ones(shape[:-1]))


def test_frozen_directions_depend_on_the_seed_alone():
    torch.manual_seed(0)
    first = FrozenSlicer(5, 8, seed=3)()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert torch.equal(first, FrozenSlicer(5, 8, seed=3)())
    assert not torch.equal(first, FrozenSlicer(5, 8, seed=4)())
    assert torch.equal(state, torch.get_rng_state())  # and leave the global generator alone


@pytest.mark.parametrize("kind", [FrozenSlicer, LearnableSlicer])
def test_every_head_has_its_own_directions(kind):
    first, *others = kind(5, 8, heads=3)().unbind()
    assert len(others) == 2
    for other in others:
        assert (first - other).norm(dim=-1).min() > 0.1
    assert not torch.equal(*others)


def test_frozen_directions_cover_the_sphere():
    directions = FrozenSlicer(20000, 4, seed=0)()
    # Uniform on the sphere: mean 0 and second moments I/m, within five standard errors.
    assert directions.mean(0).abs().max() < 5 * (1 / 4 / 20000) ** 0.5
    second = directions.T @ directions / 20000
    torch.testing.assert_close(second, torch.eye(4) / 4, atol=0.01, rtol=0)


def test_frozen_directions_are_saved_and_not_trained():
    slicer = FrozenSlicer(5, 8, seed=0)
    assert not list(slicer.parameters())
    other = FrozenSlicer(5, 8, seed=1)
    other.load_state_dict(slicer.state_dict())
    assert torch.equal(other(), slicer())


def test_frozen_directions_of_a_model_built_on_meta():
    with torch.device("meta"):
        slicer = FrozenSlicer(5, 8, seed=3)
    assert slicer().is_meta
    slicer.to_empty(device="cpu").reset_parameters()
    torch.testing.assert_close(slicer(), FrozenSlicer(5, 8, seed=3)())


@pytest.mark.parametrize("assign", [False, True])
def test_some_axes_of_a_model_built_on_meta(assign):
    """No state dict holds them."""
    state = AxisSlicer(2, head_dim=3).state_dict()
    with torch.device("meta"):
        slicer = AxisSlicer(2, head_dim=3)
    if not assign:
        slicer.to_empty(device="cpu")
        slicer.directions.fill_(torch.nan)
    slicer.load_state_dict(state, assign=assign)
    assert torch.equal(slicer(), torch.eye(3)[:2])
    slicer.directions.fill_(torch.nan)
    slicer.reset_parameters()
    assert torch.equal(slicer(), torch.eye(3)[:2])


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_learnable_directions_stay_on_the_sphere_and_move(optimizer):
    torch.manual_seed(0)
    slicer = LearnableSlicer(4, 8)
    start, target = slicer().detach().clone(), torch.randn(4, 8)
    steps = optimizer(slicer.parameters(), lr=0.5)
    for _ in range(20):
        steps.zero_grad()
        (slicer() - target).square().sum().backward()
        steps.step()
    torch.testing.assert_close(slicer().norm(dim=-1), torch.ones(4))
    cosine = torch.nn.functional.cosine_similarity
    assert (cosine(slicer(), target) > cosine(start, target)).all()
    assert cosine(slicer(), target).min() > 0.9


def test_learnable_directions_in_sixteen_bits():
    slicer = LearnableSlicer(64, 64)
    expected = slicer().detach()
    got = slicer.bfloat16()()
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, atol=4e-3, rtol=2**-7)


@pytest.mark.parametrize("slices", [3, 8, 20])
def test_frozen_directions_are_orthogonal_in_blocks(slices):
    directions = FrozenSlicer(slices, 8, heads=2, seed=3)().double()
    for block in directions.split(8, dim=-2):
        eye = torch.eye(block.shape[-2], dtype=torch.float64).expand(2, -1, -1)
        torch.testing.assert_close(block @ block.mT, eye, atol=1e-6, rtol=0)


def test_made_by_name():
    assert isinstance(make_slicer("axis", 8), AxisSlicer)
    assert make_slicer("frozen", 8)().shape == (8, 8)
    assert make_slicer("learnable", 8, slices=3, heads=2)().shape == (2, 3, 8)
    assert torch.equal(make_slicer("frozen", 8, seed=2)(), FrozenSlicer(8, 8, seed=2)())


def test_mistakes_are_named():
    with pytest.raises(
        ValueError, match=r"expected \"axis\", \"frozen\" or \"learnable\", got 'x'"
    ):
        make_slicer("x", 8)
    with pytest.raises(ValueError, match=r"a head of width 8 has 8 axes, got slices=9"):
        make_slicer("axis", 8, slices=9)
    with pytest.raises(ValueError, match=r"FrozenSlicer: slices must be at least 1, got 0"):
        FrozenSlicer(0, 8)
    with pytest.raises(ValueError, match=r"LearnableSlicer: heads must be at least 1, got 0"):
        LearnableSlicer(2, 8, heads=0)
