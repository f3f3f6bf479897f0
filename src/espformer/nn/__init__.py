"""Layers: attention, its mechanisms, slicers, and annealing."""

from espformer.nn.annealing import (
    anneal,
    copy_sort_settings,
    exponential_schedule,
    get_sort_temperatures,
    harden,
    set_sort_temperature,
    set_straight_through,
    soften,
)
from espformer.nn.attention import Attention
from espformer.nn.class_token import ClassToken
from espformer.nn.differential import Differential
from espformer.nn.esp import ESP
from espformer.nn.mechanisms import Mechanism, Sinkhorn, Softmax
from espformer.nn.packed import Packed
from espformer.nn.parameters import parameter_groups
from espformer.nn.registry import MECHANISMS
from espformer.nn.slicers import AxisSlicer, FrozenSlicer, LearnableSlicer, Slicer, make_slicer
from espformer.nn.uniform import Uniform

__all__ = [
    "ESP",
    "MECHANISMS",
    "Attention",
    "AxisSlicer",
    "ClassToken",
    "Differential",
    "FrozenSlicer",
    "LearnableSlicer",
    "Mechanism",
    "Packed",
    "Sinkhorn",
    "Slicer",
    "Softmax",
    "Uniform",
    "anneal",
    "copy_sort_settings",
    "exponential_schedule",
    "get_sort_temperatures",
    "harden",
    "make_slicer",
    "parameter_groups",
    "set_sort_temperature",
    "set_straight_through",
    "soften",
]
