"""ViT: published sizes, timm's names, and a forward written out."""

import pytest
import torch
import torch.nn.functional as F

from espformer.models import VisionTransformer, build_model
from espformer.nn import ESP, ClassToken, Softmax
from tests.models.cases import count_parameters


def timm_state(dim, depth, mlp_dim, patches, patch, classes, seed=0):
    """A state dict with the names and shapes of timm's VisionTransformer."""
    shapes = {
        "cls_token": (1, 1, dim),
        "pos_embed": (1, patches + 1, dim),
        "patch_embed.proj.weight": (dim, 3, patch, patch),
        "patch_embed.proj.bias": (dim,),
        "norm.weight": (dim,),
        "norm.bias": (dim,),
        "head.weight": (classes, dim),
        "head.bias": (classes,),
    }
    for i in range(depth):
        shapes |= {
            f"blocks.{i}.norm1.weight": (dim,),
            f"blocks.{i}.norm1.bias": (dim,),
            f"blocks.{i}.attn.qkv.weight": (3 * dim, dim),
            f"blocks.{i}.attn.qkv.bias": (3 * dim,),
            f"blocks.{i}.attn.proj.weight": (dim, dim),
            f"blocks.{i}.attn.proj.bias": (dim,),
            f"blocks.{i}.norm2.weight": (dim,),
            f"blocks.{i}.norm2.bias": (dim,),
            f"blocks.{i}.mlp.fc1.weight": (mlp_dim, dim),
            f"blocks.{i}.mlp.fc1.bias": (mlp_dim,),
            f"blocks.{i}.mlp.fc2.weight": (dim, mlp_dim),
            f"blocks.{i}.mlp.fc2.bias": (dim,),
        }
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.3 * torch.randn(s, generator=generator) for name, s in shapes.items()}


def timm_forward(state, images, heads, depth):
    """ViT as its paper has it, with timm's layout of qkv and its epsilon."""

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], 1e-6)

    def linear(x, name):
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    kernel = state["patch_embed.proj.weight"]
    x = F.conv2d(images, kernel, state["patch_embed.proj.bias"], stride=kernel.shape[-1])
    x = x.flatten(2).transpose(1, 2)
    x = torch.cat([state["cls_token"].expand(len(x), -1, -1), x], dim=1) + state["pos_embed"]
    batch, tokens, dim = x.shape
    for i in range(depth):
        qkv = linear(norm(x, f"blocks.{i}.norm1"), f"blocks.{i}.attn.qkv")
        q, k, v = qkv.reshape(batch, tokens, 3, heads, dim // heads).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) / (dim // heads) ** 0.5).softmax(-1)
        out = (scores @ v).transpose(1, 2).reshape(batch, tokens, dim)
        x = x + linear(out, f"blocks.{i}.attn.proj")
        hidden = F.gelu(linear(norm(x, f"blocks.{i}.norm2"), f"blocks.{i}.mlp.fc1"))
        x = x + linear(hidden, f"blocks.{i}.mlp.fc2")
    return linear(norm(x, "norm")[:, 0], "head")


@pytest.mark.parametrize(
    ("name", "published"),
    [("vit_small_patch16_224", 22_050_664), ("vit_base_patch16_224", 86_567_656)],
)
def test_published_sizes(name, published):
    with torch.device("meta"):
        assert count_parameters(build_model(name)) == published


def test_size_of_the_model_of_the_paper():
    """By hand, in vit-pytorch's convention: heads of width 64, no bias in qkv."""
    dim, width = 128, 8 * 64
    embedding = (16 * 16 * 3 + 1) * dim + dim + (196 + 1) * dim
    attention = 3 * width * dim + (width + 1) * dim
    block = attention + 2 * (dim + 1) * dim + 4 * dim
    expected = embedding + 6 * block + 2 * dim + 2 * (dim + 1)
    with torch.device("meta"):
        assert count_parameters(build_model("vit")) == expected


def test_size_of_the_attention_only_model():
    with torch.device("meta"):
        model = build_model("vit_mnist", patch_size=7)
    dim, width = 128, 64
    expected = (49 + 1) * dim + dim + 17 * dim + 3 * width * dim + (width + 1) * dim + 4 * dim
    assert count_parameters(model) == expected + 10 * (dim + 1)
    assert not any("mlp" in name or "norm2" in name for name in model.state_dict())


def test_state_dict_of_timm():
    heads, depth = 4, 3
    state = timm_state(dim=32, depth=depth, mlp_dim=48, patches=9, patch=4, classes=5)
    sizes = {"image_size": 12, "patch_size": 4, "dim": 32, "depth": depth, "heads": heads}
    sizes |= {"head_dim": None, "mlp_dim": 48, "classes": 5, "qkv_bias": True}
    images = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))

    model = VisionTransformer(mechanism=Softmax(), **sizes).eval()
    assert set(model.state_dict()) == set(state)
    model.load_state_dict(state)
    expected = timm_forward(state, images, heads, depth)
    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)

    other = VisionTransformer(mechanism=ESP(hard=True), **sizes).eval()
    other.load_state_dict(state)
    assert torch.equal(other.blocks[2].attn.qkv.weight, state["blocks.2.attn.qkv.weight"])
    assert other.blocks[0].attn.mechanism.hard
    assert not torch.allclose(other(images), expected, atol=1e-2)


def test_mean_pooling_has_no_class_token():
    model = VisionTransformer(image_size=8, patch_size=4, dim=16, depth=1, heads=2, pool="mean")
    assert model.cls_token is None
    assert model.pos_embed.shape == (1, 4, 16)
    assert "cls_token" not in model.state_dict()
    # Doubly-stochastic attention of identical tokens changes none: the mean is any of them.
    model.pos_embed.data.zero_()
    images = torch.ones(1, 3, 8, 8)
    mask = torch.tensor([[True, False, False, True]])
    torch.testing.assert_close(model.eval()(images), model(images, mask))


def test_images_need_not_be_square():
    model = VisionTransformer(
        image_size=(8, 12), patch_size=[4, 3], dim=16, depth=1, heads=2, classes=7
    )
    assert model.pos_embed.shape == (1, 2 * 4 + 1, 16)
    assert model(torch.randn(2, 3, 8, 12)).shape == (2, 7)


def test_patches_run_row_by_row():
    model = VisionTransformer(image_size=4, patch_size=2, channels=1, dim=1, heads=1, depth=0)
    torch.nn.init.ones_(model.patch_embed.proj.weight)
    torch.nn.init.zeros_(model.patch_embed.proj.bias)
    image = torch.arange(16.0).view(1, 1, 4, 4)
    assert model.patch_embed(image).flatten().tolist() == [10.0, 18.0, 42.0, 50.0]


def test_position_std():
    torch.manual_seed(0)
    for std in (0.02, 1.0):
        model = build_model("vit", depth=0, position_std=std)
        assert model.pos_embed.std().item() == pytest.approx(std, rel=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 30}, "multiple of patch_size"),
        ({"pool": "max"}, 'must be "cls" or "mean"'),
        ({"head_dim": None, "heads": 3}, "multiple of heads"),
    ],
)
def test_mistakes_in_the_sizes(options, message):
    with pytest.raises(ValueError, match=message):
        VisionTransformer(**{"depth": 1, **options})


def test_images_of_another_size():
    model = VisionTransformer(image_size=8, patch_size=4, depth=0)
    with pytest.raises(ValueError, match=r"\(batch, 3, 8, 8\), got \(2, 3, 8, 12\)"):
        model(torch.randn(2, 3, 8, 12))


def test_a_class_token_reads_by_softmax_unless_told():
    sizes = {"image_size": 8, "patch_size": 4, "dim": 16, "depth": 1, "heads": 2, "head_dim": 6}
    mechanism = VisionTransformer(**sizes).blocks[0].attn.mechanism
    assert isinstance(mechanism, ClassToken)
    assert isinstance(mechanism.base, ESP)
    assert isinstance(VisionTransformer(**sizes, pool="mean").blocks[0].attn.mechanism, ESP)
    assert isinstance(VisionTransformer(**sizes, mechanism=ESP()).blocks[0].attn.mechanism, ESP)


def test_first_weights_do_not_depend_on_the_mechanism():
    def state(mechanism):
        torch.manual_seed(0)
        return VisionTransformer(
            image_size=16, patch_size=4, dim=48, depth=2, heads=3, classes=10, mechanism=mechanism
        ).state_dict()

    plain, esp = state(Softmax()), state(ClassToken(ESP()))
    assert all(torch.equal(tensor, esp[name]) for name, tensor in plain.items())
    slices = [tensor for name, tensor in esp.items() if name.endswith("slicer.directions")]
    assert len(slices) == 2
    assert not torch.equal(*slices)
