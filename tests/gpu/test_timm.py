"""Real models of timm on a GPU: converted, trained, evaluated, compiled, taken back.

Skipped where timm or a CUDA device is missing: timm needs a torchvision of the same build as torch.
"""

import copy

import pytest
import torch

import espformer
from espformer.integrations import conversion_report
from espformer.nn import ESP, Sinkhorn, Softmax, get_sort_temperatures

pytestmark = pytest.mark.gpu
timm = pytest.importorskip("timm", reason="timm is not installed", exc_type=ImportError)

# Plain attention in blocks; norms of queries and keys, registers and other pools among them.
MODELS = {
    "vit_tiny_patch16_224": 12,
    "vit_small_patch16_224": 12,
    "deit_tiny_patch16_224": 12,
    "deit3_small_patch16_224": 12,
    "vit_small_patch14_reg4_dinov2": 12,
    "vit_base_patch16_siglip_224": 12,
    "vit_wee_patch16_reg1_gap_256": 14,
}
# Attention that is more than softmax of scaled products: windows, biases, rotary positions.
LEFT = ["swin_tiny_patch4_window7_224", "beit_base_patch16_224", "eva02_tiny_patch14_224"]


def make(name):
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model.cuda().eval()


def images(model, batch=2):
    channels, height, width = model.default_cfg["input_size"]
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.randn(batch, channels, height, width, device="cuda", generator=generator)


@pytest.fixture(autouse=True)
def _exact_products():
    """No TensorFloat-32: comparisons are about attention."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_softmax_reproduces_the_original(name):
    model = make(name)
    x = images(model)
    before = model(x)
    keys = list(model.state_dict())
    espformer.convert(model, Softmax())
    assert len(conversion_report(model).converted) >= MODELS[name]
    assert (model(x) - before).abs().max() <= 1e-4 * before.abs().max().clamp(min=1)
    assert list(model.state_dict()) == keys
    espformer.revert(model)
    torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", list(MODELS)[:3])
@pytest.mark.parametrize("mechanism", [ESP(), ESP(balance="both"), ESP(hard=True), Sinkhorn(5)])
@torch.no_grad()
def test_what_trains_is_what_evaluates(name, mechanism):
    model = espformer.convert(make(name), mechanism)
    x = images(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    trained = model.train()(x)
    with torch.inference_mode():
        evaluated = model.eval()(x)
    torch.testing.assert_close(evaluated.clone(), trained, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", list(MODELS)[:3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "autocast"])
def test_every_parameter_gets_a_gradient(name, dtype):
    mechanism = ESP(learn_temperature=True, slicer="learnable", slices=16)
    model = espformer.convert(make(name), mechanism).train()
    with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
        loss = model(images(model)).float().square().sum()
    loss.backward()
    for key, parameter in model.named_parameters():
        if ".attn." in key:
            assert parameter.grad is not None, key
            assert parameter.grad.isfinite().all(), key
            # A bias of the keys moves all of them alike, and a sort does not see it.
            if not key.endswith("qkv.bias"):
                assert parameter.grad.abs().sum() > 0, key


def test_kernels_agree_with_plain_torch():
    """The fused kernels inside a whole model, against the same mechanism in plain torch."""
    fused = espformer.convert(make("vit_tiny_patch16_224"), ESP(0.1))
    plain = copy.deepcopy(fused)
    for module in plain.modules():
        if isinstance(module, ESP):
            module.backend = "linear"
    x = images(fused)
    results = []
    for model in (fused, plain):
        output = model(x)
        output.square().sum().backward()
        results.append((output.detach(), model.blocks[0].attn.qkv.weight.grad))
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= 1e-3 * b.norm()


def test_steps_of_training_then_hard():
    """A few steps on one batch lower the loss; then the model is hardened and saved."""
    model = espformer.convert(make("vit_tiny_patch16_224"), ESP(0.3)).train()
    x, labels = images(model, 8), torch.arange(8, device="cuda") % 5
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0], losses
    espformer.set_sort_temperature(model, 1e-4)
    assert set(get_sort_temperatures(model).values()) == {1e-4}
    espformer.harden(model.eval())
    other = espformer.convert(make("vit_tiny_patch16_224"), ESP())
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(other(x), model(x))


@torch.no_grad()
def test_compiled():
    model = espformer.convert(make("vit_tiny_patch16_224"), ESP())
    x = images(model)
    expected = model(x)
    torch.testing.assert_close(torch.compile(model)(x), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", LEFT)
def test_other_attention_is_left(name):
    model = make(name)
    with pytest.raises(ValueError, match="nothing to convert"):
        espformer.convert(model, ESP())
