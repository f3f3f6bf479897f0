"""Models of the ESPFormer paper's experiments; each accepts any mechanism.

The defaults of each class give the paper's model; :func:`build_model` has more, by name.
"""

import difflib
from typing import Any

from torch import nn

from espformer.models.blocks import MLP, Classifier, EncoderBlock, record_attention
from espformer.models.decoder import CausalSoftmax, DecoderBlock
from espformer.models.point_cloud_transformer import PointCloudTransformer
from espformer.models.search import beam_search
from espformer.models.set_transformer import ISAB, MAB, PMA, SAB, SetTransformer
from espformer.models.text_classifier import TextClassifier
from espformer.models.translation import TranslationTransformer
from espformer.models.vit import VisionTransformer

__all__ = [
    "ISAB",
    "MAB",
    "MLP",
    "PMA",
    "SAB",
    "CausalSoftmax",
    "Classifier",
    "DecoderBlock",
    "EncoderBlock",
    "PointCloudTransformer",
    "SetTransformer",
    "TextClassifier",
    "TranslationTransformer",
    "VisionTransformer",
    "available_models",
    "beam_search",
    "build_model",
    "model_class",
    "record_attention",
]

_TIMM = {"classes": 1000, "depth": 12, "head_dim": None, "qkv_bias": True, "position_std": 0.02}

_MODELS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    # Cats & Dogs.
    "vit": (VisionTransformer, {}),
    # One layer of attention alone, for the patch size experiment on MNIST.
    "vit_mnist": (
        VisionTransformer,
        {
            "classes": 10,
            "image_size": 28,
            "patch_size": 4,
            "channels": 1,
            "depth": 1,
            "heads": 1,
            "mlp_dim": None,
        },
    ),
    # Sizes, names and defaults of timm.
    "vit_small_patch16_224": (
        VisionTransformer,
        {**_TIMM, "dim": 384, "heads": 6, "mlp_dim": 1536},
    ),
    "vit_base_patch16_224": (
        VisionTransformer,
        {**_TIMM, "dim": 768, "heads": 12, "mlp_dim": 3072},
    ),
    # ModelNet40.
    "set_transformer": (SetTransformer, {}),
    "point_cloud_transformer": (PointCloudTransformer, {}),
    "simple_point_cloud_transformer": (PointCloudTransformer, {"dim": 128, "samples": None}),
    "naive_point_cloud_transformer": (
        PointCloudTransformer,
        {"dim": 128, "samples": None, "offset": False},
    ),
    # IMDb and TweetEval.
    "text_classifier": (TextClassifier, {}),
    # IWSLT'14.
    "translation_transformer": (TranslationTransformer, {}),
}


def available_models() -> list[str]:
    """Names that :func:`build_model` knows.

    Example:
        >>> "vit_mnist" in available_models()
        True
    """
    return sorted(_MODELS)


def build_model(name: str, **options: Any) -> nn.Module:
    """A model by its name.

    Args:
        name: one of :func:`available_models`.
        **options: arguments of the model's class; they override those of the named model.

    Example:
        >>> from espformer.nn import ESP
        >>> model = build_model("vit_mnist", patch_size=7, mechanism=ESP(sort_temperature=0.3))
        >>> type(model).__name__, model.pos_embed.shape
        ('VisionTransformer', torch.Size([1, 17, 128]))
        >>> build_model("vit_minst")
        Traceback (most recent call last):
        ...
        ValueError: build_model: there is no model 'vit_minst', did you mean 'vit_mnist'? ...
    """
    model, defaults = _find("build_model", name)
    return model(**{**defaults, **options})


def model_class(name: str) -> type[nn.Module]:
    """The class of a model, whose arguments are the options of :func:`build_model`.

    Example:
        >>> model_class("vit_mnist").__name__
        'VisionTransformer'
    """
    return _find("model_class", name)[0]


def _find(function: str, name: str) -> tuple[type[nn.Module], dict[str, Any]]:
    if name not in _MODELS:
        near = difflib.get_close_matches(name.lower(), _MODELS, n=1, cutoff=0.4)
        hint = f", did you mean {near[0]!r}?" if near else "."
        raise ValueError(
            f"{function}: there is no model {name!r}{hint} Models: {', '.join(available_models())}"
        )
    return _MODELS[name]
