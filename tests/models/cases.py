"""Small models, one of each kind, their inputs, and the mechanisms they are tested with."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from espformer.models import (
    PointCloudTransformer,
    SetTransformer,
    TextClassifier,
    VisionTransformer,
)
from espformer.nn import ESP, Differential, Mechanism, Sinkhorn, Softmax

CLASSES = 3
VOCABULARY = 12

MECHANISMS: dict[str, Callable[[], Mechanism]] = {
    "softmax": lambda: Softmax(),
    "sinkhorn": lambda: Sinkhorn(iterations=4),
    "esp": lambda: ESP(),
    "esp-both": lambda: ESP(balance="both"),
    "esp-hard": lambda: ESP(hard=True, inverse_temperature=0.1),
    "differential-softmax": lambda: Differential(Softmax(), lambda_init="depth"),
    "differential-esp": lambda: Differential(ESP(), lambda_init=0.5),
}

MODELS: dict[str, Callable[..., nn.Module]] = {
    "vit": lambda **options: VisionTransformer(
        **{"image_size": 8, "patch_size": 4, "dim": 16, "depth": 2, "heads": 2, "head_dim": 6}
        | {"mlp_dim": 16, "classes": CLASSES}
        | options
    ),
    "vit-attention-only": lambda **options: VisionTransformer(
        **{"image_size": 8, "patch_size": 2, "channels": 1, "dim": 16, "depth": 1, "heads": 1}
        | {"head_dim": 8, "mlp_dim": None, "pool": "mean", "classes": CLASSES}
        | options
    ),
    "set-transformer": lambda **options: SetTransformer(
        **{"dim": 16, "heads": 2, "inducing_points": 5, "dropout": 0.0, "classes": CLASSES}
        | options
    ),
    "pct": lambda **options: PointCloudTransformer(
        **{"dim": 16, "depth": 2, "heads": 4, "samples": (9, 6), "neighbours": 4, "dropout": 0.0}
        | {"classes": CLASSES}
        | options
    ),
    "pct-naive": lambda **options: PointCloudTransformer(
        **{"dim": 16, "depth": 2, "heads": 4, "samples": None, "offset": False, "dropout": 0.0}
        | {"pool": "max_mean", "classes": CLASSES}
        | options
    ),
    "text-classifier": lambda **options: TextClassifier(
        **{"vocabulary": VOCABULARY, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 32}
        | {"max_length": 16, "dropout": 0.0, "classes": CLASSES}
        | options
    ),
}
SETS = ["set-transformer", "pct", "pct-naive"]
RAGGED = [*SETS, "text-classifier"]


def make(name: str, mechanism: str | Mechanism = "esp", **options: object) -> nn.Module:
    torch.manual_seed(0)
    if isinstance(mechanism, str):
        mechanism = MECHANISMS[mechanism]()
    return MODELS[name](mechanism=mechanism, **options)


def draw(name: str, batch: int = 4, tokens: int = 12, seed: int = 0) -> Tensor:
    """Inputs of a model, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        return torch.randn(batch, 3, 8, 8, generator=generator)
    if name == "vit-attention-only":
        return torch.randn(batch, 1, 8, 8, generator=generator)
    if name == "text-classifier":
        return torch.randint(1, VOCABULARY, (batch, tokens), generator=generator)
    return torch.randn(batch, tokens, 3, generator=generator)


def draw_labelled(name: str) -> tuple[Tensor, Tensor]:
    """A batch in which each class has its own mean, or its own words."""
    labels = torch.arange(9) % CLASSES
    inputs = draw(name, batch=9)
    if inputs.is_floating_point():
        return inputs + labels.view(-1, *[1] * (inputs.ndim - 1)), labels
    return 1 + 3 * labels.unsqueeze(1) + inputs % 3, labels


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
