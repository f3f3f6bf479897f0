"""Attention as functions.

Shapes are those of :func:`torch.nn.functional.scaled_dot_product_attention`:
``(batch, heads, tokens, head_dim)``, with any number of leading dimensions.
"""

from espformer.functional.baselines import (
    sinkhorn_attention,
    sinkhorn_plan,
    softmax_attention,
    softmax_plan,
)
from espformer.functional.esp import BACKENDS, esp_attention, esp_plan
from espformer.functional.varlen import esp_attention_varlen, sinkhorn_attention_varlen

__all__ = [
    "BACKENDS",
    "esp_attention",
    "esp_attention_varlen",
    "esp_plan",
    "sinkhorn_attention",
    "sinkhorn_attention_varlen",
    "sinkhorn_plan",
    "softmax_attention",
    "softmax_plan",
]
