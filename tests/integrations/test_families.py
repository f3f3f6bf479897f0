"""What holds for a converted model of every family."""

import copy
import io

import pytest
import torch

import espformer
from espformer.integrations import conversion_report
from espformer.nn import ESP, Softmax
from tests.integrations.families import FAMILIES, MASK, WITH_PADDING, make, run

DECODERS = ("bart", "marian")


def present(family, output, mask=MASK):
    """The rows that are no padding; a decoder's own tokens are never padding here."""
    return output if family in DECODERS else output[mask]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_softmax_reproduces_the_original(family, padded):
    if padded and family not in WITH_PADDING:
        pytest.skip("takes no padding")
    model, mask = make(family), MASK if padded else None
    with torch.no_grad():
        before = run(family, model, mask)
        after = run(family, espformer.convert(model, Softmax(), cross=True), mask)
    if padded:
        before, after = present(family, before), present(family, after)
    assert (after - before).abs().max() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_esp_changes_the_output_and_trains(family):
    model = make(family)
    before = run(family, model).detach()
    espformer.convert(model, ESP(learn_temperature=True, slicer="learnable", slices=3))
    model.train()
    output = run(family, model)
    assert (output - before).abs().max() > 1e-3
    output.square().sum().backward()
    names = conversion_report(model).converted
    assert len(names) == 2
    for name in names:
        attention = model.get_submodule(name)
        gradients = {n: p.grad for n, p in attention.named_parameters()}
        assert "mechanism.log_sort_temperature" in gradients
        for parameter, gradient in gradients.items():
            assert gradient is not None, parameter
            assert gradient.isfinite().all(), parameter
            assert gradient.abs().sum() > 0, parameter


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "grad"])
def test_what_trains_is_what_evaluates(family, mode):
    """Dropout is zero everywhere, so both modes are the same function."""
    model, mask = espformer.convert(make(family), ESP()), MASK if family in WITH_PADDING else None
    trained = run(family, model.train(), mask).detach()
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    with context.get(mode, torch.enable_grad)():
        evaluated = run(family, model.eval(), mask).detach()
    torch.testing.assert_close(evaluated, trained, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", WITH_PADDING)
@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
@torch.no_grad()
def test_a_padded_batch_is_its_sequences(family, hard):
    model = espformer.convert(make(family), ESP(hard=hard, sort_temperature=0.3), cross=True)
    batch = run(family, model, MASK)
    for row, length in enumerate(MASK.sum(1).tolist()):
        alone = run(family, model, torch.ones(1, length, dtype=torch.bool), slice(row, row + 1))
        both = batch[row] if family in DECODERS else batch[row, :length]
        torch.testing.assert_close(alone[0], both, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_revert_restores_every_bit(family):
    model = make(family)
    mask = MASK if family in WITH_PADDING else None
    keys, before, shown = list(model.state_dict()), run(family, model, mask), repr(model)
    espformer.convert(model, ESP(learn_temperature=True), cross=True)
    assert not torch.equal(run(family, model, mask), before)
    espformer.revert(model)
    assert torch.equal(run(family, model, mask), before)
    assert list(model.state_dict()) == keys
    assert repr(model) == shown
    with pytest.raises(ValueError, match="no module of this"):
        espformer.revert(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_state_dicts_keep_their_keys(family):
    original, model = make(family), espformer.convert(make(family), ESP(learn_temperature=True))
    extra = set(model.state_dict()) - set(original.state_dict())
    assert not set(original.state_dict()) - set(model.state_dict())
    assert {key.rpartition(".")[2] for key in extra} == {"log_sort_temperature", "_extra_state"}
    assert all(".mechanism." in key for key in extra)
    # Both ways: the original's weights into the converted model, and back.
    model.load_state_dict(original.state_dict(), strict=False)
    assert not original.load_state_dict(model.state_dict(), strict=False).missing_keys
    plain = espformer.convert(make(family), ESP())
    plain.load_state_dict(original.state_dict())


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_copies_and_pickles_are_converted(family):
    if family == "timm":
        pytest.skip("timm's own classes decide how they are pickled")
    model = espformer.convert(make(family), ESP(0.3))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    expected = run(family, model)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        espformer.set_sort_temperature(other, 0.3)
        assert torch.equal(run(family, other), expected)
        espformer.harden(other)
        assert not torch.equal(run(family, other), expected)
        espformer.revert(other)
    assert torch.equal(run(family, model), expected)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_converting_again_replaces_the_mechanism(family):
    model = make(family)
    before = run(family, model)
    espformer.convert(model, ESP())
    espformer.convert(model, Softmax())
    torch.testing.assert_close(run(family, model), before, atol=1e-5, rtol=1e-5)
    assert torch.equal(run(family, espformer.revert(model)), before)
