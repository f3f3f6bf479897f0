"""Figures. Needs matplotlib (``pip install 'espformer[plots]'``); nothing else imports it."""

from espformer.plots.plans import (
    Measurement,
    NamedPlan,
    SumErrors,
    cost_curve,
    esp_plans,
    example_clouds,
    plan_comparison,
    row_column_sums,
    sinkhorn_plans,
    softness,
    sum_errors,
)
from espformer.plots.style import save_figure

__all__ = [
    "Measurement",
    "NamedPlan",
    "SumErrors",
    "cost_curve",
    "esp_plans",
    "example_clouds",
    "plan_comparison",
    "row_column_sums",
    "save_figure",
    "sinkhorn_plans",
    "softness",
    "sum_errors",
]
