"""Figures. Needs matplotlib (the extra ``plots``); nothing else imports it."""

from espformer.lab.plots.attention import attention_maps
from espformer.lab.plots.clouds import (
    NamedPlan,
    esp_plans,
    example_clouds,
    sinkhorn_plans,
)
from espformer.lab.plots.plans import plan_comparison
from espformer.lab.plots.runtime import read_timings, runtime
from espformer.lab.plots.scores import scores_by_setting
from espformer.lab.plots.softness import scores_by_softness
from espformer.lab.plots.style import save_figure

__all__ = [
    "NamedPlan",
    "attention_maps",
    "esp_plans",
    "example_clouds",
    "plan_comparison",
    "read_timings",
    "runtime",
    "save_figure",
    "scores_by_setting",
    "scores_by_softness",
    "sinkhorn_plans",
]
