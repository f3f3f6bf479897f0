"""Figures. Needs matplotlib (the extra ``plots``); nothing else imports it."""

from espformer.lab.plots.attention import attention_maps
from espformer.lab.plots.clouds import (
    NamedPlan,
    SumErrors,
    esp_plans,
    example_clouds,
    sinkhorn_plans,
    sum_errors,
)
from espformer.lab.plots.plans import (
    Measurement,
    cost_curve,
    plan_comparison,
    row_column_sums,
    softness,
)
from espformer.lab.plots.runtime import read_timings, runtime
from espformer.lab.plots.scores import scores_by_setting
from espformer.lab.plots.softness import scores_by_softness
from espformer.lab.plots.style import save_figure

__all__ = [
    "Measurement",
    "NamedPlan",
    "SumErrors",
    "attention_maps",
    "cost_curve",
    "esp_plans",
    "example_clouds",
    "plan_comparison",
    "read_timings",
    "row_column_sums",
    "runtime",
    "save_figure",
    "scores_by_setting",
    "scores_by_softness",
    "sinkhorn_plans",
    "softness",
    "sum_errors",
]
