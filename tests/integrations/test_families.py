"""What holds for a converted model of every family."""

import copy
import io

import pytest
import torch

import espformer
from espformer.integrations import conversion_report
from espformer.nn import ESP, Packed, Softmax
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
    model = espformer.convert(make(family), ESP(sort_temperature=0.3))
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


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_autocast_is_the_same_attention(family):
    """In 16 bits as in 32, training as evaluating; softmax is far from both."""
    model, mask = make(family), MASK if family in WITH_PADDING else None
    softmax = run(family, model, mask)
    espformer.convert(model, ESP(sort_temperature=0.3))
    exact = run(family, model, mask)
    results = []
    for training in (True, False):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode(), torch.autocast("cpu", torch.bfloat16):
                results.append(run(family, model.train(training), mask).float().clone())
    for result in results[1:]:
        assert torch.equal(result, results[0])
    rows = present if mask is not None else lambda _family, output: output
    error, distance = (
        (rows(family, results[0]) - rows(family, other)).norm() for other in (exact, softmax)
    )
    assert error < 0.2 * distance


@pytest.mark.parametrize("family", WITH_PADDING)
@pytest.mark.parametrize("options", [{}, {"straight_through": True}], ids=["soft", "straight"])
def test_gradients_of_a_padded_batch_are_those_of_its_sequences(family, options):
    model = espformer.convert(
        make(family), ESP(sort_temperature=0.3, learn_temperature=True, **options), cross=True
    )

    def gradients(mask, rows=slice(None)):
        model.zero_grad()
        output = run(family, model, mask, rows)
        kept = output if family in DECODERS else output[mask]
        kept.square().sum().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    together = gradients(MASK)
    summed = {name: torch.zeros_like(g) for name, g in together.items()}
    for row, length in enumerate(MASK.sum(1).tolist()):
        ones = torch.ones(1, length, dtype=torch.bool)
        for name, gradient in gradients(ones, slice(row, row + 1)).items():
            summed[name] += gradient
    largest = max(float(g.abs().max()) for g in together.values())
    for name, gradient in together.items():
        assert (gradient - summed[name]).abs().max() < 2e-5 * largest, name


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
@torch.no_grad()
def test_compiled_models_are_the_same(family, hard):
    model, mask = make(family), MASK if family in WITH_PADDING else None
    espformer.convert(model, ESP(sort_temperature=0.3, hard=hard))
    expected = run(family, model, mask)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    for training in (True, False):
        compiled.train(training)
        torch.testing.assert_close(run(family, compiled, mask), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in DECODERS])
@torch.no_grad()
def test_exported_programs_are_the_same(family):
    """Every family as a graph of torch.export, for batches and lengths that it has not seen."""
    from espformer.integrations.onnx import export_program

    model = espformer.convert(make(family), ESP(hard=True))
    generator = torch.Generator().manual_seed(0)

    def inputs(batch, length):
        if family in ("vit", "deit", "timm"):
            images = torch.randn(batch, 3, 16, 16, generator=generator)
            return {"x" if family == "timm" else "pixel_values": images}
        mask = torch.arange(length) < torch.randint(1, length + 1, (batch, 1), generator=generator)
        if family.startswith("torch"):
            x = torch.randn(batch, length, 16, generator=generator)
            x = x.transpose(0, 1) if family == "torch-seq-first" else x
            return {"src": x, "src_key_padding_mask": ~mask}
        if family == "timm-like":
            return {"input": torch.randn(batch, length, 16, generator=generator)}
        ids = torch.randint(3, 50, (batch, length), generator=generator)
        return {"input_ids": ids, "attention_mask": mask.long()}

    program = export_program(model, inputs(2, 7)).module()
    for batch, length in ((2, 7), (3, 12), (1, 2)):
        given = inputs(batch, length)
        found, wanted = program(**given), model(**given)
        found, wanted = (x if isinstance(x, torch.Tensor) else x[0] for x in (found, wanted))
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mechanism", [ESP(), Packed(ESP())], ids=["esp", "packed"])
@pytest.mark.parametrize("family", ["torch", "bert"])
def test_gradients_of_each_sample_of_a_padded_batch(family, mechanism):
    """By ``torch.func``, as differential privacy needs them: no value of a mask can be read."""
    model = espformer.convert(make(family), mechanism)
    weights = dict(model.named_parameters())
    x = torch.randn(3, 7, 16) if family == "torch" else torch.randint(3, 50, (3, 7))

    def loss(weights, x, mask):
        masks = (
            {"src_key_padding_mask": ~mask[None]}
            if family == "torch"
            else {"attention_mask": mask[None].long()}
        )
        output = torch.func.functional_call(model, weights, (x[None],), masks)
        return (output if family == "torch" else output[0])[0, :3].square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, x, MASK)
    for sample in range(3):
        expected = torch.func.grad(loss)(weights, x[sample], MASK[sample])
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name][sample], gradient, atol=1e-4, rtol=1e-3)
