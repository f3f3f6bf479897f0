"""The registry of mechanisms, and what a mechanism says of itself."""

import pytest

from espformer import nn
from espformer.nn import (
    ESP,
    MECHANISMS,
    Differential,
    Mechanism,
    Packed,
    Sinkhorn,
    Softmax,
    Uniform,
)
from espformer.nn.class_token import ClassToken


def test_every_public_mechanism_has_a_name():
    public = [getattr(nn, name) for name in nn.__all__]
    kinds = {kind for kind in public if isinstance(kind, type) and issubclass(kind, Mechanism)}
    assert set(MECHANISMS.values()) == kinds - {Mechanism}


@pytest.mark.parametrize(
    ("mechanism", "sorts", "cost"),
    [
        (Softmax(), False, 1.0),
        (Uniform(), False, 1.0),
        (Sinkhorn(iterations=5), False, 2.0),
        (ESP(), True, 4.0),
        (ESP(balance="both"), True, 5.0),
        (Differential(Softmax()), False, 1.5),
        (Differential(ESP()), True, 4.5),
        (ClassToken(Sinkhorn(iterations=5)), False, 2.0),
        (ClassToken(Differential(ESP())), True, 4.5),
        (Packed(ESP()), True, 4.0),
    ],
)
def test_what_a_mechanism_says_of_itself(mechanism, sorts, cost):
    assert mechanism.has_sort_temperature is sorts
    assert mechanism.relative_cost == pytest.approx(cost)
    bound = mechanism.bind(4, 8)
    assert (bound.has_sort_temperature, bound.relative_cost) == (sorts, pytest.approx(cost))
