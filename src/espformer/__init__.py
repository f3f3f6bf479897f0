"""Doubly-stochastic attention through Expected Sliced Transport Plans, in linear time."""

from espformer.functional import esp_attention, esp_plan, sinkhorn_attention, sinkhorn_plan

__version__ = "0.1.0"

__all__ = ["__version__", "esp_attention", "esp_plan", "sinkhorn_attention", "sinkhorn_plan"]
