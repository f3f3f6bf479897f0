"""The mechanisms by the names that recipes, configurations and commands write."""

from espformer.nn.differential import Differential
from espformer.nn.esp import ESP
from espformer.nn.mechanisms import Mechanism, Sinkhorn, Softmax

__all__ = ["MECHANISMS"]

MECHANISMS: dict[str, type[Mechanism]] = {
    "differential": Differential,
    "esp": ESP,
    "sinkhorn": Sinkhorn,
    "softmax": Softmax,
}
