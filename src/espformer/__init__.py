"""Doubly-stochastic attention through Expected Sliced Transport Plans, in linear time."""

from espformer import functional, nn
from espformer.functional import esp_attention, esp_plan, sinkhorn_attention, sinkhorn_plan
from espformer.nn import anneal, harden, set_sort_temperature, set_straight_through, soften

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "anneal",
    "esp_attention",
    "esp_plan",
    "functional",
    "harden",
    "nn",
    "set_sort_temperature",
    "set_straight_through",
    "sinkhorn_attention",
    "sinkhorn_plan",
    "soften",
]
