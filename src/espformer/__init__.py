"""Doubly-stochastic attention through Expected Sliced Transport Plans, in linear time.

:mod:`espformer.functional` has attention as functions, :mod:`espformer.nn` as layers,
:mod:`espformer.sorting` has differentiable sorts, :mod:`espformer.integrations` swaps the attention
of existing models, and :mod:`espformer.models` has the models of the paper. The most common names
are also here:

    >>> import torch, espformer
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8).unbind()  # (batch, heads, tokens, head_dim)
    >>> espformer.esp_attention(q, k, v).shape
    torch.Size([2, 4, 10, 8])
    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    >>> layer = espformer.convert(layer, espformer.nn.ESP())
    >>> espformer.sorting.soft_rank(torch.tensor([3.0, 1.0, 2.0]), temperature=0.01)
    tensor([3., 1., 2.])
"""

import importlib
from typing import TYPE_CHECKING

from espformer import functional, nn, sorting
from espformer.functional import (
    esp_attention,
    esp_attention_varlen,
    esp_plan,
    sinkhorn_attention,
    sinkhorn_attention_varlen,
    sinkhorn_plan,
)
from espformer.nn import anneal, harden, set_sort_temperature, set_straight_through, soften

if TYPE_CHECKING:
    from espformer import integrations, models
    from espformer.integrations.calibration import calibrate
    from espformer.integrations.convert import convert, revert

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "anneal",
    "calibrate",
    "convert",
    "esp_attention",
    "esp_attention_varlen",
    "esp_plan",
    "functional",
    "harden",
    "integrations",
    "models",
    "nn",
    "revert",
    "set_sort_temperature",
    "set_straight_through",
    "sinkhorn_attention",
    "sinkhorn_attention_varlen",
    "sinkhorn_plan",
    "soften",
    "sorting",
]


def __getattr__(name: str) -> object:
    """Import ``models``, ``integrations`` and the names taken from it on first use."""
    if name in ("integrations", "models"):
        return importlib.import_module(f"espformer.{name}")
    if name in ("calibrate", "convert", "revert"):
        return getattr(importlib.import_module("espformer.integrations"), name)
    raise AttributeError(f"module 'espformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    """All public names, including those that are not imported yet."""
    return sorted(__all__)
