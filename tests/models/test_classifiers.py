"""What holds for every classification model with every mechanism."""

import copy

import pytest
import torch
import torch.nn.functional as F

from espformer.models import record_attention
from espformer.nn import ESP, Attention, Differential, Mechanism, Softmax
from tests.models.cases import (
    CLASSES,
    MECHANISMS,
    MODELS,
    RAGGED,
    SETS,
    count_parameters,
    draw,
    draw_labelled,
    make,
)

every_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS)
every_model = pytest.mark.parametrize("name", MODELS)


@every_model
@every_mechanism
def test_logits(name, mechanism):
    model = make(name, mechanism)
    logits = model(draw(name))
    assert logits.shape == (4, CLASSES)
    assert logits.isfinite().all()


@every_model
@every_mechanism
def test_a_few_steps_of_training_reduce_the_loss(name, mechanism):
    model = make(name, mechanism)
    inputs, labels = draw_labelled(name)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = F.cross_entropy(model(inputs), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


@every_model
@pytest.mark.parametrize("mechanism", [m for m in MECHANISMS if m != "esp-hard"])
def test_gradients_reach_every_parameter(name, mechanism):
    model = make(name, mechanism)
    F.cross_entropy(model(draw(name)), torch.arange(4) % CLASSES).backward()
    for label, parameter in model.named_parameters():
        assert parameter.grad is not None, label
        assert parameter.grad.isfinite().all(), label
        # A bias can be invisible (of keys under softmax, before a batch norm), a matrix cannot.
        if parameter.ndim > 1:
            assert parameter.grad.abs().max() > 1e-9, label


@every_model
@every_mechanism
def test_state_dict_round_trip(name, mechanism):
    model = make(name, mechanism)
    inputs = draw(name)
    model(inputs)  # so that running statistics are not the first ones
    state = copy.deepcopy(model.state_dict())
    torch.manual_seed(7)
    other = MODELS[name](mechanism=MECHANISMS[mechanism]())
    other.load_state_dict(state)
    assert torch.equal(other.eval()(inputs), model.eval()(inputs))


@every_model
def test_weights_of_softmax_load_into_the_other_mechanisms(name):
    state = make(name, "softmax").state_dict()
    for mechanism in ("sinkhorn", "esp", "esp-hard"):
        make(name, mechanism).load_state_dict(copy.deepcopy(state))


@every_model
def test_parameter_counts(name):
    plain = count_parameters(make(name, "softmax"))
    for mechanism in ("sinkhorn", "esp", "esp-both", "esp-hard"):
        assert count_parameters(make(name, mechanism)) == plain

    model = make(name, "differential-softmax")
    layers = [module for module in model.modules() if isinstance(module, Differential)]
    # λ has four vectors and the norm two, of the width of a group: a head, or half of a single one.
    widths = [layer.head_dim if layer.heads > 1 else layer.head_dim // 2 for layer in layers]
    assert len(layers) > 0
    assert count_parameters(model) == plain + 6 * sum(widths)

    learnt = ESP(slicer="learnable", slices=3, learn_temperature=True)
    model = make(name, learnt)
    layers = [module for module in model.modules() if isinstance(module, ESP)]
    extra = sum(layer.heads * (3 * layer.head_dim + 1) for layer in layers)
    assert count_parameters(model) == plain + extra


@every_model
def test_layers_share_no_mechanism(name):
    spec = ESP(learn_temperature=True)
    model = make(name, spec)
    bound = [module for module in model.modules() if isinstance(module, Mechanism)]
    assert spec not in bound
    assert len({id(module.log_sort_temperature) for module in bound}) == len(bound)


@every_model
@every_mechanism
def test_attention_matrices(name, mechanism):
    model = make(name, mechanism)
    inputs = draw(name)
    before = copy.deepcopy(model.state_dict())
    matrices = model.attention_matrices(inputs)
    assert all(module.training for module in model.modules())
    after = model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)

    outermost = [
        module
        for label, module in model.named_modules()
        if isinstance(module, Mechanism) and not label.endswith(".base")
    ]
    assert len(matrices) == len(outermost)
    for matrix, layer in zip(matrices, outermost, strict=True):
        assert matrix.shape[:2] == (4, layer.heads)
        assert not matrix.requires_grad
        if mechanism == "softmax":
            torch.testing.assert_close(matrix.sum(-1), torch.ones(matrix.shape[:-1]))
        if mechanism == "esp-hard":
            n, m = matrix.shape[-2:]
            torch.testing.assert_close(matrix.sum(-1), torch.ones(matrix.shape[:-1]))
            torch.testing.assert_close(matrix.sum(-2), torch.full((*matrix.shape[:2], m), n / m))


def test_attention_matrices_of_a_compiled_model():
    model = make("vit-attention-only", "softmax").eval()
    model.compile(backend="eager")
    inputs = draw("vit-attention-only")
    model(inputs)
    matrices = model.attention_matrices(inputs)
    assert [matrix.shape for matrix in matrices] == [(4, 1, 16, 16)]


def test_frozen_parts_stay_in_evaluation_mode():
    model = make("pct")
    model.embed1.eval()
    model.attention_matrices(draw("pct"))
    assert model.training
    assert not model.embed1.training
    assert not model.embed1.norm.training


def test_recorded_matrices_are_those_of_the_layers():
    model = make("vit", Softmax()).eval()
    seen = []
    for block in model.blocks:
        block.attn.register_forward_hook(
            lambda layer, given, options, out: seen.append(
                Attention.forward(layer, *given, **options, return_matrix=True)[1]
            ),
            with_kwargs=True,
        )
    inputs = draw("vit")
    with record_attention(model) as matrices:
        model(inputs)
    # Each hook above made its layer run once more.
    torch.testing.assert_close(matrices[::2], seen)
    assert matrices[0].requires_grad
    model(inputs)
    assert len(matrices) == 2 * len(model.blocks)


def pad(inputs, lengths, side="right"):
    """The first `lengths[i]` tokens of each row, with garbage around them, and their mask."""
    tokens = inputs.shape[1]
    index = torch.arange(tokens)
    mask = index < lengths[:, None]
    if side == "left":
        shifts = (tokens - lengths).tolist()
        inputs = torch.stack([row.roll(n, 0) for row, n in zip(inputs, shifts, strict=True)])
        mask = mask.flip(1)
    garbage = torch.nan if inputs.is_floating_point() else 5
    shape = (*mask.shape, *[1] * (inputs.ndim - 2))
    return inputs.masked_fill(~mask.view(shape), garbage), mask


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", RAGGED)
@every_mechanism
def test_a_padded_batch_gives_each_what_it_gets_alone(name, mechanism, side):
    model = make(name, mechanism).eval()
    inputs, lengths = draw(name), torch.tensor([12, 7, 5, 3])
    padded, mask = pad(inputs, lengths, side)
    together = model(padded, mask)
    for index, length in enumerate(lengths):
        alone = model(inputs[index : index + 1, :length])
        torch.testing.assert_close(together[index : index + 1], alone, rtol=1e-4, atol=1e-5)


def train_once(name, mechanism, inputs, mask):
    """Gradients, and buffers such as the statistics of batch norms, after one forward.

    In float64: spreads of few points, which a temperature is a share of, leave float32 few digits.
    """
    model = make(name, mechanism).double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    model(inputs, mask).square().sum().backward()
    gradients = {label: p.grad for label, p in model.named_parameters()}
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    return gradients, dict(model.named_buffers())


@pytest.mark.parametrize("name", RAGGED)
@every_mechanism
def test_padding_touches_no_gradient_and_no_statistics(name, mechanism):
    inputs = draw(name)
    padded, mask = pad(inputs, torch.tensor([12, 7, 5, 3]))
    wider = torch.cat([padded, padded[:, :4]], dim=1), F.pad(mask, (0, 4))
    torch.testing.assert_close(
        train_once(name, mechanism, *wider),
        train_once(name, mechanism, padded, mask),
        rtol=1e-8,
        atol=1e-9,
    )


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("mechanism", ["softmax", "esp"])
def test_a_padded_batch_trains_as_one_without_padding(name, mechanism):
    """Three tokens are fewer than the samples and neighbours of a point cloud."""
    inputs = draw(name)
    torch.testing.assert_close(
        train_once(name, mechanism, *pad(inputs, torch.tensor([3] * 4))),
        train_once(name, mechanism, inputs[:, :3], None),
        rtol=1e-8,
        atol=1e-9,
    )


@pytest.mark.parametrize("name", RAGGED)
def test_a_sequence_without_tokens_is_finite(name):
    model = make(name).eval()
    mask = torch.ones(4, 12, dtype=torch.bool)
    mask[1] = False
    inputs = draw(name)
    logits = model(inputs, mask)
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[[0, 2, 3]], model(inputs)[[0, 2, 3]], rtol=1e-4, atol=1e-5)


def test_masked_patches_of_an_image_take_no_part():
    for name in ("vit", "vit-attention-only"):
        model = make(name, "sinkhorn").eval()
        patches = 4 if name == "vit" else 16
        mask = torch.arange(patches).expand(4, -1) < torch.tensor([[patches], [3], [2], [1]])
        images = draw(name)
        other = images.clone()
        other[1:, :, -2:, -2:] = 9.0  # inside the last patch, masked in all images but the first
        torch.testing.assert_close(model(images, mask), model(other, mask))
        assert not torch.allclose(model(images), model(other))


@pytest.mark.parametrize("name", SETS)
@every_mechanism
def test_sets_have_no_order(name, mechanism):
    model = make(name, mechanism).eval()
    points = draw(name, tokens=20)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(model(points[:, order]), model(points), rtol=1e-4, atol=1e-5)
    mask = torch.arange(20).expand(4, -1) < torch.tensor([[20], [11], [15], [2]])
    torch.testing.assert_close(
        model(points[:, order], mask[:, order]), model(points, mask), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", RAGGED)
def test_an_image_where_tokens_belong(name):
    with pytest.raises((ValueError, RuntimeError)):
        make(name)(torch.randn(2, 3, 8, 9))
