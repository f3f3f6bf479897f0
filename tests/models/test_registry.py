"""Models by name."""

import inspect

import pytest
import torch
from torch import nn

from espformer import models
from espformer.models import VisionTransformer, available_models, build_model, model_class
from espformer.nn import Sinkhorn

NEEDED = {"text_classifier": {"vocabulary": 9}, "translation_transformer": {"vocabulary": 9}}


@pytest.mark.parametrize("name", available_models())
def test_every_name_builds_its_class(name):
    with torch.device("meta"):
        model = build_model(name, mechanism=Sinkhorn(), **NEEDED.get(name, {}))
    assert isinstance(model, nn.Module)
    assert type(model) is model_class(name)
    assert any(isinstance(module, Sinkhorn) for module in model.modules())


def test_options_go_over_what_a_name_stands_for():
    model = build_model("vit_mnist", patch_size=14, mlp_dim=32, classes=4)
    assert model.pos_embed.shape == (1, 5, 128)
    assert model.blocks[0].mlp.fc1.out_features == 32
    assert model.head.out_features == 4
    assert build_model("vit_mnist").head.out_features == 10


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("vit_minst", "vit_mnist"),
        ("VIT", "vit"),
        ("settransformer", "set_transformer"),
        ("vit_small", "vit_small_patch16_224"),
        ("pointcloud_transformer", "point_cloud_transformer"),
        ("translation", "translation_transformer"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(wrong, right):
    for function in (build_model, model_class):
        with pytest.raises(ValueError, match=f"no model '{wrong}', did you mean '{right}'"):
            function(wrong)


def test_a_name_like_no_other_lists_them():
    with pytest.raises(ValueError, match=r"no model 'zzz'\. Models: .*set_transformer"):
        build_model("zzz")


def test_an_unknown_option():
    with pytest.raises(TypeError, match="patchsize"):
        build_model("vit", patchsize=3)


SIZES = [
    (name, size)
    for name in {model_class(name): name for name in available_models()}.values()
    for size, parameter in inspect.signature(model_class(name)).parameters.items()
    if "int" in str(parameter.annotation)
]


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_a_size_below_one_is_named(name, size):
    """Not a model without blocks, nor an error of torch about a shape."""
    least = 0 if size.endswith(("depth", "_id")) else 1
    options = NEEDED.get(name, {}) | {size: least - 1}
    message = f"{model_class(name).__name__}: {size} must be at least {least}, got {least - 1}"
    with pytest.raises(ValueError, match=message):
        build_model(name, **options)
    with pytest.raises(TypeError, match=f": {size} must be an integer, got '3'"):
        build_model(name, **options | {size: "3"})


def test_public_names_exist():
    assert sorted(models.__all__) == sorted(set(models.__all__))
    assert all(hasattr(models, name) for name in models.__all__)
    assert models.VisionTransformer is VisionTransformer
