"""The mechanisms by their names in recipes, configurations and commands."""

from espformer.nn.class_token import ClassToken
from espformer.nn.differential import Differential
from espformer.nn.esp import ESP
from espformer.nn.mechanisms import Mechanism, Sinkhorn, Softmax
from espformer.nn.packed import Packed
from espformer.nn.uniform import Uniform

__all__ = ["MECHANISMS"]

MECHANISMS: dict[str, type[Mechanism]] = {
    "class_token": ClassToken,
    "differential": Differential,
    "esp": ESP,
    "packed": Packed,
    "sinkhorn": Sinkhorn,
    "softmax": Softmax,
    "uniform": Uniform,
}
"""The mechanisms by their names in recipes, configurations and commands."""
